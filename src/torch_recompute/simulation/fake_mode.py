"""The mode under which a step is simulated, and the fake copies it runs on: small values are real, memory is fake.

A fake tensor has no values, and models read some: Hugging Face looks at the attention mask and gives none to the kernel
where nothing is masked, a mixture of experts reads which tokens go where, an optimizer the number of its step. What is
read is small and made of integers. So tensors of integers and booleans stay real as long as they come from real ones,
up to `INTEGERS` elements, and so do floating tensors of up to `FLOATS`. Where one meets a fake tensor, the operation is
simulated. Where integers come out of fake ones, values are made up: indices are spread evenly (`topk` of a router then
sends as many tokens to each expert), booleans alternate, a float that is read is 1, also where values leave PyTorch
(`x.numpy()`), and a factorization succeeds. Each such decision is noted by the operation and the module that made it.

`Faker` copies the model: `copy.deepcopy` does, and a function mode answers for its tensors. Tied parameters stay tied;
tensors over one storage get fakes over one storage of its size. On meta, integers are taken to be ones, which as a mask
hides nothing and as ids are valid. What a closure reaches is not copied; the caller checks afterwards that nothing of
the original was touched.

PyTorch takes a third of a millisecond to say what an operation returns, and almost all operations are the same as in
the layer before. So its first answer is kept as a recipe: new tensors of some layout, views over the memory of an
argument, an argument itself; what fits none of these is asked each time. Where the answer is not what kernels do (the
layout of a batch norm's result, the memory of a loss, one tensor twice), theirs is taken.

It is a mode of its own beside `memory.operations.Operations`, because it answers operations instead of running them; it
shows them to the same books (`showing`). No tensor of the caller's is written to, read (parameters) or held by a
recipe. Nothing fake ever holds memory, and nothing makes a reference cycle, which would be counted. The generators are
as they were before the mode.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import _torch, errors
from .._torch import TorchDispatchMode, is_operator
from .._torch.fakes import (
    NOT_FAKED,
    FakeMaker,
    FakeTensor,
    FakeTensorMode,
    answer_for,
    converted,
    device_of,
    fake_like,
    flex_uncompiled,
    is_sharded,
    is_wrapper,
    lay,
    on_fakes,
    over,
    returned,
    traced,
    writes,
)
from .._torch.modes import without_modes
from .._torch.tensors import mapped
from ..memory.ledger import leaves
from ..memory.operations import Operation, PlainFormulas, Seen
from ..memory.saved import generators_as_before
from ..memory.workspaces import (
    RECURRENT,
    attention_on_cuda,
    reserve,
    results,
    takes_nothing,
    watched,
    workspace,
)
from .cuda_decompositions import AsOnCuda, autocast_of_cuda, capability_of

INTEGERS = 2**24
FLOATS = 2**10
MADE_UP = 2**22

aten: Any = torch.ops.aten
_MASKED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
_DRAWS: set[Any] = {  # whose integers are states of generators
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
_DEVICE: Any = torch.ops.prim.device.default
_GROUPED: Any = aten._grouped_mm.default
_CHOICES = {"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "multinomial", "mode", "median", "kthvalue"}
_NO_CHOICE = (torch.bool, torch.uint64)  # the latter are states of generators
_READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@cache
def _kind(func: Any) -> tuple[bool, bool, bool]:
    """Whether an operation returns views, writes to its arguments, reads values."""
    return func.is_view, writes(func), not _READS.isdisjoint(func.tags)


@cache
def _status(func: Any) -> int | None:
    """Which result of an operation says whether it failed."""
    return next((place for place, name in enumerate(returned(func)) if name == "info"), None)


def _cannot_simulate(op: str, where: str, error: Exception) -> str:
    """Text for an operation that cannot be run on tensors without values."""
    return (
        f"simulate: {op} in {where or 'the model'} cannot be run on tensors without values: it depends on them, is of "
        "a layout without strides (sparse), or is an operation of a library that says nothing of its shapes "
        f"({type(error).__name__}).\n"
        "  Use RecomputeConfig, which simulates nothing, or measure() a real step; for an operation of your own, write "
        "torch.library.register_fake."
    )


def _converts(where: str, name: str, before: torch.Tensor, after: torch.Tensor) -> str:
    def kind(tensor: torch.Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"

    return (
        f"simulate: the forward of {where or 'the model'} converts the parameter {name} of a module, as `.to(...)` "
        f"does, from {kind(before)} to {kind(after)}. A step from the middle of training finds it converted, and so "
        "must a plan.\n"
        "  Convert that module before planning, as the forward does: module.to(...), or call the model once."
    )


class FakeMode(TorchDispatchMode):
    """Runs operations on real small tensors, simulates those on fake ones.

    Args:
        fakes: The mode that simulates; it is not active itself, which saves a turn of each operation.
        where: Says which module is running.
        composed: "cuda", or "cuda 9.0" with a capability, where functions are to be composed as there, although the
            fakes are on the CPU.

    Attributes:
        assumed: What had to be assumed, in words, each once.
        graph_of_gradients: Whether a backward has been recorded for another one, as by `create_graph=True`.
        capability: Of the CUDA device that functions are composed for; None for none.
    """

    supports_higher_order_operators = True

    def __init__(self, fakes: FakeTensorMode, where: Callable[[], str], composed: str = "") -> None:
        super().__init__()
        self._fakes, self._where, self._make = fakes, where, FakeMaker(fakes)
        answer_for(fakes, self)
        self.assumed: dict[str, None] = {}
        self.graph_of_gradients = False
        self._seen: Seen | None = None
        self._known: dict[Any, Any] | None = None  # of the present operation, as the next
        self._taken: int | None = None
        self._composed, self._recipes = composed, _recipes[bool(composed)]
        self.capability = capability_of(composed)
        self._around: list[ExitStack] = []
        self._formulas = PlainFormulas()

    def __enter__(self) -> Any:
        with ExitStack() as stack:
            stack.enter_context(generators_as_before())
            stack.enter_context(flex_uncompiled())
            stack.enter_context(converted(lambda *found: errors.ArgumentError(_converts(self._where(), *found))))
            if self.capability is not None:
                stack.enter_context(autocast_of_cuda())
                stack.enter_context(AsOnCuda(self.capability))
            self._around.append(stack.pop_all())
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._around.pop().__exit__(*exception)

    @contextmanager
    def showing(self, seen: Seen) -> Generator[None]:
        """Calls `seen` with each operation in the block."""
        self._seen = seen
        try:
            yield
        finally:
            self._seen = None

    def workspace(self, ran: Operation) -> int | str:
        """Bytes that an operation takes while it runs, or why they are not known."""
        if ran.taken is not None:
            return ran.taken
        inputs = ran.args, ran.kwargs
        if not self._composed:
            return workspace(ran.func, inputs)
        known = attention_on_cuda(ran.func, ran.args) if self.capability else None
        if known is not None:
            return known
        nothing = not ran.given or takes_nothing(ran.func, inputs, on_gpu=True)
        return 0 if nothing else f"there is no {self._composed} device here to ask"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # how a fake tensor is asked for its device, at every turn
            return device_of(args[0])
        if traced():
            return func(*args, **(kwargs or {}))
        if _torch.graph_is_kept() and torch.is_grad_enabled():
            self.graph_of_gradients = True
        kwargs = kwargs or {}
        func = self._formulas.meant(func, args)
        tensors: list[FakeTensor] = []
        try:
            recipe, known, is_all, _ = self._recipes.get(_key(func, args, kwargs, tensors), _UNKNOWN)
        except TypeError:  # an argument that cannot be looked up
            recipe, known, is_all, _ = _UNKNOWN
        self._taken = None
        if is_all:
            self._known = known
            out = self._remade(recipe, tensors)
        else:
            self._known = None
            out = self._out(func, args, kwargs)
        self._formulas.ran(func, out)
        if self._seen is not None and out is not NotImplemented:
            self._seen(Operation(func, args, kwargs, out, self._known, tensors if is_all else None, self._taken))
        return out

    def _out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fake = real = False
        for kind in map(type, leaves((args, kwargs))):
            if kind is FakeTensor:
                fake = True
            elif _torch.is_plain_kind(kind):
                real = True
            else:
                return NotImplemented
        if not is_operator(func):
            with self._fakes:
                return func(*self._all_fake(args), **self._all_fake(kwargs))
        if not fake:
            return self._real(func, args, kwargs, real)
        views, writing, reads = _kind(func)
        if func in _MASKED:
            args = self._by_index(func, args, kwargs)
            real = True
        elif reads:  # integers stay as they are, the rest becomes fake
            out = self._run(func, args, kwargs)
            return mapped(out, lambda value: value if _stays(value) else self._fake(value))
        written = leaves(_torch.written_by(func, args, kwargs)) if real and writing else ()
        if any(type(tensor) is not FakeTensor for tensor in written):
            return self._run(func, args, kwargs)
        if func is _GROUPED:
            with self._fakes:
                return grouped(*args, **kwargs)
        out = self._simulated(func, args, kwargs, real)
        if real or func in RECURRENT:
            self._known = None
        if func in RECURRENT:
            return self._with_reserve(func, args, kwargs, out)
        if views or writing or func in _DRAWS:
            return out
        return self._decided(func, args, out)

    def _real(self, func: Any, args: Any, kwargs: Any, real: bool) -> Any:
        """An operation on real tensors alone, or on none."""
        if not any(_kind(func)):
            out = self._simulated(func, args, kwargs, real)
            if not all(map(_stays, leaves(out))):
                return out
        return self._in_the_act(func, args, kwargs)

    def _in_the_act(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation on real tensors, and sees what it takes."""
        with without_modes():
            out, taken = watched(func, args, kwargs)
        self._taken = None if self._composed else taken
        return out

    def _simulated(self, func: Any, args: Any, kwargs: Any, real: bool) -> Any:
        if real:
            args, kwargs = self._all_fake(args), self._all_fake(kwargs)
        try:
            return self._kernel(func, args, kwargs)
        except NOT_FAKED as error:
            raise errors.RecomputeError(_cannot_simulate(str(func), self._where(), error)) from error

    def _with_reserve(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """The results of a recurrent layer, with what its kernel keeps for backward, which fakes have none of."""
        if torch.is_grad_enabled() and not out[RECURRENT[func]].numel():
            taken = reserve(func, (args, kwargs))
            name = str(func).partition(".default")[0]
            if isinstance(taken, str):
                self.assumed[f"what {name} keeps for its backward is not known and counted as none: {taken}"] = None
                taken = 0
            elif self._composed:
                self.assumed[f"{name} keeps as much for its backward on a GPU as on the CPU"] = None
            with self._fakes:
                made = torch.empty(taken, dtype=torch.uint8, device=device_of(out[0]))
            out = tuple(made if place == RECURRENT[func] else x for place, x in enumerate(out))
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that reads or writes real values, with made-up ones for the fake ones."""

        def real(value: Any) -> Any:
            return self._made_up(value, str(func)) if type(value) is FakeTensor else value

        given, named = mapped((args, kwargs), real)
        try:
            return self._in_the_act(func, given, named)
        except RuntimeError as error:
            raise errors.RecomputeError(_cannot_simulate(str(func), self._where(), error)) from error

    def _by_index(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Indices instead of a mask, whose number of entries a fake operation could not know."""
        masked: list[Any] = []
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                mask = self._made_up(index, "indexing with a mask") if type(index) is FakeTensor else index
                masked.append(mask)
                with without_modes():
                    indices.extend(mask.nonzero().unbind(1))
            else:
                masked.append(index)
                indices.append(index)
        if len(indices) > len(masked) or any(a is not b for a, b in zip(masked, indices, strict=True)):
            taken = self._composed or workspace(func, ((args[0], masked, *args[2:]), kwargs))
            self._taken = taken if isinstance(taken, int) else None
        return (args[0], indices, *args[2:])

    def _decided(self, func: Any, args: Any, out: Any) -> Any:
        """The results, with made-up integers as far as they are small."""

        def decide(value: Any) -> Any:
            return self._choice(func, args, value) if type(value) is FakeTensor and _is_decided(value) else value

        if isinstance(out, torch.Tensor):
            return decide(out)
        status = _status(func)
        if status is not None:  # of a factorization, which went well
            info = out[status]
            with without_modes():
                well = torch.zeros(info.shape, dtype=info.dtype, device=info.device)
            out = tuple(well if place == status else x for place, x in enumerate(out))
        return mapped(out, decide)

    def _choice(self, func: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        name = func.overloadpacket.__name__
        if name not in _CHOICES:
            return self._made_up(out, str(func))
        source = args[0]
        n = source.shape[-1] if out.dim() == source.dim() else max(1, source.numel() // max(1, out.numel()))
        self._note(str(func), "chooses evenly")
        with without_modes():
            return _laid_as(out, torch.arange(out.numel()) % max(1, n))

    def _made_up(self, fake: torch.Tensor, what: str) -> torch.Tensor:
        if fake.numel() > INTEGERS:
            raise errors.RecomputeError(
                f"simulate: {self._where() or 'the model'} reads the values of a tensor of shape {tuple(fake.shape)} "
                f"({what}), and simulated tensors have none.\n"
                "  Simulate a smaller batch, or pass arguments of integers and masks as real tensors, not on meta."
            )
        with without_modes():
            if fake.dtype is torch.bool:
                self._note(what, "finds every other one true")
                values = torch.arange(fake.numel()) % 2 == 0
            else:
                self._note(what, "finds ones")
                values = torch.ones(fake.numel(), dtype=fake.dtype)
            return _laid_as(fake, values)

    def _note(self, what: str, value: str) -> None:
        where = self._where()
        self.assumed[f"{what.removesuffix('.default')} {value}" + (f" in {where}" if where else "")] = None

    def _all_fake(self, values: Any) -> Any:
        return mapped(values, lambda value: value if type(value) is FakeTensor else self._fake(value))

    def _fake(self, real: torch.Tensor) -> torch.Tensor:
        with self._fakes:
            return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)

    def values_of(self, fake: torch.Tensor, what: str) -> torch.Tensor:
        """Made-up values of a fake tensor for what is not PyTorch, as NumPy."""
        return self._made_up(fake, what).requires_grad_(fake.requires_grad)

    def address_of(self, fake: torch.Tensor) -> int:
        """Refuses to say where a fake tensor is."""
        raise errors.RecomputeError(
            f"simulate: {self._where() or 'the model'} asks for the address of a tensor of shape {tuple(fake.shape)}, "
            "and simulated tensors have no memory.\n"
            "  Make the call that needs it an operation of its own, by torch.library.custom_op and register_fake."
        )

    # --- the results of an operation on fake tensors, remembered ---

    def _kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation none of whose arguments is a real tensor."""
        out = self._answer(func, args, kwargs)
        if func in _BATCH_NORMS:
            with self._fakes:
                return _dense(out)
        return out

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[FakeTensor] = []
        like = _LAID_OUT_AS.get(func, func)
        key = _key(func, args, kwargs, tensors)
        try:
            recipe, self._known, *_ = self._recipes.get(key, _UNKNOWN)
        except TypeError:  # an argument that cannot be looked up
            return on_fakes(self._fakes, like, args, kwargs)
        if recipe is None:
            before = [_layout(t, []) for t in tensors]
            recipe = None if kwargs else self._in_lists(func, args)
            if recipe is None:
                out = self._apart(on_fakes(self._fakes, like, args, kwargs), tensors)
                out = self._as_made(func, args, kwargs, out, tensors)
                recipe = _recipe(out, tensors, set())
            else:
                out = self._remade(recipe, tensors)
            if before != [_layout(t, []) for t in tensors]:
                recipe = _ASK
            if len(self._recipes) >= _MOST:
                self._recipes.clear()
            self._known = None if recipe is _ASK else {}
            is_all = recipe is not _ASK and bool(tensors) and _is_all(func, out)
            self._recipes[key] = recipe, self._known, is_all, func
            return out
        if recipe is _ASK:
            return on_fakes(self._fakes, like, args, kwargs)
        return self._remade(recipe, tensors)

    def _as_made(self, func: Any, args: Any, kwargs: Any, out: Any, tensors: Sequence[FakeTensor]) -> Any:
        """The results, laid out and in memory as large as their kernel makes them."""
        made = leaves(out)
        if func in _UNREDUCED:
            whole = (args[_UNREDUCED[func] :] or (kwargs.get("reduction", 1),))[0]
            seen: Sequence[tuple[int, ...]] = ((args[0].nbytes, *made[0].stride()),) if whole else ()
        else:
            seen = () if self._composed else results(func, (args, kwargs))
        given = {_torch.storage_id(tensor) for tensor in tensors}
        new = {id(x): each for x, each in zip(made, seen, strict=False) if _torch.storage_id(x) not in given}
        if len(seen) != len(made) or not new:
            return out
        return mapped(out, lambda x: self._made_as(x, *new[id(x)]) if id(x) in new else x)

    def _made_as(self, fake: torch.Tensor, nbytes: int, *stride: int) -> torch.Tensor:
        """A result with these strides, if they are others, in memory of at least these bytes."""
        if any(a != b and size > 1 for a, b, size in zip(fake.stride(), stride, fake.shape, strict=True)):
            with self._fakes:
                fake = torch.empty_strided(fake.shape, stride, dtype=fake.dtype, device=fake.device)
        if fake.untyped_storage().nbytes() < nbytes:
            fake.untyped_storage().resize_(nbytes)
        return fake

    def _in_lists(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The recipe of an operation that treats each place of some lists alone; None for another one.

        An optimizer's lists have hundreds of places and some ten layouts, so torch is asked for one place of each.
        """
        lists = [value for value in args if isinstance(value, (list, tuple))]
        if not func.name().startswith("aten::_foreach_") or len({*map(len, lists)}) != 1:
            return None
        kinds: dict[Any, int] = {}
        like = [kinds.setdefault(_layout(place, []), len(kinds)) for place in zip(*lists, strict=True)]
        firsts = [like.index(kind) for kind in range(len(kinds))]
        fewer = tuple([v[i] for i in firsts] if isinstance(v, (list, tuple)) else v for v in args)
        out = on_fakes(self._fakes, func, fewer, {})
        recipe = _recipe(out, [tensor for tensor in leaves(fewer) if type(tensor) is FakeTensor], set())
        if recipe is _NOTHING:
            return recipe
        parts = [] if recipe is _ASK else recipe[1]
        alone = parts and all(type(part) is _Made and part.source is None for part in parts)
        return (list, [parts[kind] for kind in like]) if alone else None

    def _apart(self, out: Any, tensors: Sequence[FakeTensor]) -> Any:
        """The results, of which no two are one tensor: some fakes return the gradient of two biases so."""
        if type(out) is not tuple:
            return out
        made: list[Any] = []
        for value in out:
            again = type(value) is FakeTensor and any(value is other for other in made)
            if again and not any(value is tensor for tensor in tensors):
                with self._fakes:
                    value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            made.append(value)
        return tuple(made)

    def _remade(self, recipe: Any, tensors: Sequence[FakeTensor]) -> Any:
        if type(recipe) is _Made:
            shape, stride, offset, dtype, device, source, nbytes = recipe
            if source is None:
                made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                if nbytes is not None:
                    made.untyped_storage().resize_(nbytes)
            else:
                made = lay(tensors[source].untyped_storage(), offset, (shape, stride), dtype, "meta")
            return self._make(made, device)
        if recipe is _NOTHING:
            return None
        if type(recipe) is int:
            return tensors[recipe]
        kind, parts = recipe
        return kind([self._remade(part, tensors) for part in parts])


def _laid_as(fake: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values in a tensor with the layout of a fake one."""
    values = values.view(fake.shape).to(fake.device, fake.dtype)
    if 0 in fake.stride():  # which cannot be written to
        return values
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).copy_(values)


def _floats(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _is_decided(result: torch.Tensor) -> bool:
    """Whether values are made up for the result of an operation on fake tensors."""
    return not _floats(result) and result.dtype not in _NO_CHOICE and result.numel() <= MADE_UP


def _stays(tensor: torch.Tensor) -> bool:
    """Whether a tensor that could be real is."""
    return tensor.numel() <= (FLOATS if _floats(tensor) else INTEGERS)


def _is_hollow(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta" or type(tensor) is FakeTensor


def keeps_values(tensor: torch.Tensor) -> bool:
    """Whether the copy of a tensor has its values, which the step may then depend on."""
    if isinstance(tensor, nn.Parameter) or tensor.requires_grad or is_wrapper(tensor):
        return False
    return tensor.layout is torch.strided and _stays(tensor) and not _is_hollow(tensor)


class _Made(NamedTuple):
    """How one tensor of a result is made; `source` is the argument whose memory it views, None for its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    source: int | None
    nbytes: int | None = None  # of its memory, where this is larger than it looks


_UNREDUCED = {  # losses that write every element into the memory of their result; where `reduction` is
    aten.binary_cross_entropy.default: 3,
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
}
_LAID_OUT_AS = dict.fromkeys(
    (aten.copysign.Tensor, aten.xlogy.Tensor, aten.special_xlog1py.default), aten.atan2.default
)
"""Operations whose fakes have another layout than their results, and one with the same result whose fakes have it."""
_BATCH_NORMS = {aten.native_batch_norm.default, aten.native_batch_norm_backward.default}
_BESIDES = frozenset({*_MASKED, *RECURRENT, *_BATCH_NORMS, _GROUPED})
"""Operations of which more is to be found out than what the fake ones return."""
_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}
_ASK = object()
_NOTHING = object()
_MOST = 2**16
_recipes: tuple[dict[Any, tuple[Any, dict[Any, Any] | None, bool, Any]], ...] = {}, {}
"""For this machine, and composed for another device, by layouts: the recipe; what `Operation.once` knows of such
operations; whether the recipe is all there is to do; the operation, which the key has by `id`."""
_UNKNOWN = None, None, False, None


def _dense(out: Sequence[Any]) -> tuple[Any, ...]:
    """What a batch norm returns: its kernels lay it out densely, and fakes as the input is."""
    first, *rest = out
    formats = (torch.contiguous_format, *_CHANNELS_LAST.get(first.dim() if first is not None else 0, ()))
    if first is not None and not any(first.is_contiguous(memory_format=each) for each in formats):
        first = first.new_empty(first.shape)
    return (first, *rest)


def _is_all(func: Any, out: Any) -> bool:
    """Whether nothing but what an operation on fake tensors returns is to be found out for it."""
    views, writing, reads = _kind(func)
    if reads or func in _BESIDES or _status(func) is not None:
        return False
    return views or writing or func in _DRAWS or not any(map(_is_decided, leaves(out)))


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[FakeTensor]) -> Any:
    """What the result of an operation depends on. Adds its tensors to a list."""
    named = tuple([(name, _layout(value, tensors)) for name, value in kwargs.items()]) if kwargs else ()
    return id(func), torch.get_default_dtype(), tuple([_layout(value, tensors) for value in args]), named


def _layout(value: Any, tensors: list[FakeTensor]) -> Any:
    """The part of an argument that the result depends on; adds its tensors to a list."""
    if type(value) is FakeTensor:
        tensors.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if isinstance(value, (list, tuple)):
        return type(value), tuple([_layout(item, tensors) for item in value])
    return type(value), value


def _recipe(out: Any, tensors: Sequence[FakeTensor], taken: set[int]) -> Any:
    """How to make this result again from these arguments; `_ASK` where that is not known."""
    if out is None:
        return _NOTHING
    if type(out) in (list, tuple):
        parts = [_recipe(item, tensors, taken) for item in out]
        return _ASK if any(part is _ASK for part in parts) else (type(out), parts)
    if type(out) is not FakeTensor or out.dtype.is_complex:
        return _ASK
    index = next((i for i, tensor in enumerate(tensors) if tensor is out), None)
    if index is not None:
        return index
    storage, offset = _torch.storage_id(out), int(out.storage_offset())
    source = next((i for i, tensor in enumerate(tensors) if _torch.storage_id(tensor) == storage), None)
    made = _Made(tuple(out.shape), out.stride(), offset, out.dtype, out.fake_device, source)
    if source is not None:
        return made
    size = out.untyped_storage().nbytes()
    exact = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta").untyped_storage().nbytes()
    if storage in taken or offset or size < exact:
        return _ASK
    taken.add(storage)
    return made if size == exact else made._replace(nbytes=size)


def grouped(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """A product of groups; what PyTorch has for fake tensors takes bfloat16 alone."""
    if offs is not None and a.dim() == b.dim() == 2:
        shape = [offs.shape[0], a.shape[0], b.shape[1]]
    else:
        shape = [*a.shape[:-1], b.shape[-1]]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


# --- copies with fake tensors -----------------------------------------------------------------------------------------


class Faker:
    """Makes fakes of tensors, one of each.

    Args:
        fakes: The mode that they belong to.
        device: Their device; None for that of the originals.
    """

    def __init__(self, fakes: FakeTensorMode, device: torch.device | None) -> None:
        self._fakes, self._maker = fakes, FakeMaker(fakes)
        self._device = device
        self._memo: dict[int, Any] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, object]] = {}
        self.assumed: dict[str, None] = {}

    def copy(self, things: Any) -> Any:
        """A deep copy with fake tensors of modules, optimizers and what they hold."""
        for thing in things if isinstance(things, (list, tuple)) else [things]:
            if isinstance(thing, nn.Module):
                for name, tensor in (*thing.named_parameters(), *thing.named_buffers()):
                    self.tensor(tensor, name)
        with _Copying(self):
            return copy.deepcopy(things, self._memo)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call: tensors as fakes, anything else as it is."""

        def faked(name: str, value: Any) -> Any:
            leaves, spec = _torch.tree_flatten(value)
            made = [self.tensor(leaf, name) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            return _torch.tree_unflatten(made, spec)

        positional = tuple(faked(f"args[{i}]", arg) for i, arg in enumerate(args))
        return positional, {name: faked(name, value) for name, value in kwargs.items()}

    def forget(self) -> None:
        """Forgets the tensors and their fakes, so that one of these can die that a step replaces."""
        self._memo.clear()
        self._storages.clear()

    def tensor(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """The fake of a tensor, or a copy of one that stays real; the same one each time."""
        made = self._memo.get(id(tensor))
        if made is None:
            made = self._memo[id(tensor)] = self._make(tensor, name)
            self._memo.setdefault(id(self._memo), []).append(tensor)  # alive as long as its identity is used
        return made

    def _make(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if is_sharded(tensor):
            raise errors.ArgumentError(
                f"simulate: {name or 'a tensor'} is a DTensor: the model is sharded (fully_shard, tensor parallelism), "
                "and its collectives cannot be simulated on one process.\n"
                "  Simulate the model as it was before sharding."
            )
        if is_wrapper(tensor):
            made = fake_like(self._fakes, tensor)
        elif tensor.layout is not torch.strided or not (_torch.is_plain(tensor) or type(tensor) is nn.Buffer):
            raise errors.ArgumentError(
                f"simulate: {name or 'a tensor'} is {errors.say(tensor)}, of which no fake copy can be made: its class "
                "or layout does not tell which memory it uses.\n"
                "  Simulate the model with plain tensors in its place (for a quantised module: before quantisation)."
            )
        else:
            made = self._plain(tensor, name)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
                if type(tensor) is nn.Parameter:
                    for attribute, value in vars(tensor).items():  # such as `sequence_parallel`, which others look at
                        setattr(made, attribute, value)
            else:
                made.requires_grad_(tensor.requires_grad)
        return made

    def _plain(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        device = self._device or tensor.device
        with torch.no_grad():
            if keeps_values(tensor):
                return tensor.detach().clone().to(device)
            if not isinstance(tensor, nn.Parameter) and _is_hollow(tensor) and not _floats(tensor) and _stays(tensor):
                self.assumed[f"{name or 'a tensor'} has no values: taken to be ones"] = None
                return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
            return self._over_storage(tensor, device)

    def _over_storage(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        identity, whole = _torch.storage_id(tensor), tensor.untyped_storage()
        if identity not in self._storages:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            place = made.untyped_storage()
            self._storages[identity] = place, whole
            if not tensor.storage_offset() and place.nbytes() == whole.nbytes():
                return self._maker(made, device)
            place.resize_(whole.nbytes())
        place, _ = self._storages[identity]
        return self._maker(over(place, tensor.storage_offset(), tensor), device)


class _Copying(TorchFunctionMode):
    """Answers `deepcopy` for tensors."""

    def __init__(self, faker: Faker) -> None:
        super().__init__()
        self._faker = faker

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ or func is torch.Tensor.clone:  # the latter by nn.Parameter
            return self._faker.tensor(args[0])
        return func(*args, **(kwargs or {}))
