"""The mode under which a step is simulated: what decides runs for real, what costs memory is fake.

Problem. A fake tensor has no values, and models read some. Hugging Face looks at the attention mask: where nothing is
masked it hands none to the kernel, which then keeps nothing of it. On a fake mask it cannot look (it asks for the
tensor's class, and takes the other way for fake ones), so a plain fake run keeps masks that no real run has: 9 % too
much for a small Llama. A mixture of experts reads which tokens go where, an optimizer the number of its step.

Idea. What is read is small and made of integers: token ids, positions, masks, routes. So tensors of integers and
booleans stay real as long as they come from real ones, up to `INTEGERS` elements, and so do floating tensors of up to
`FLOATS` (an optimizer's counters, constants). They are computed as ever; where one meets a fake tensor, the operation
is simulated. The other way round, where integers come out of fake ones, a stand-in is taken: indices are spread evenly
(`topk` of a router then sends as many tokens to each expert), booleans alternate, a float that is read is 1, also where
values leave PyTorch (`x.numpy()` for a matcher), and a factorization succeeds. Each such decision is noted by the
operation and the module that made it.

Rejected: `propagate_real_tensors` and `FakeTensor.constant`, whose tensors are fake by class all the same; patching
the functions that look.

Invariants. No tensor of the caller's is written to: what stays real is a copy. Nothing fake ever holds memory. What is
drawn for real is given back: the generators stand where they stood before the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from .. import _compat, errors
from .._compat import TorchDispatchMode
from .._compat.fakes import (
    NOT_FAKED,
    FakeTensor,
    FakeTensorMode,
    device_of,
    flex_uncompiled,
    is_operator,
    returned,
    traced,
    without_modes,
    writes,
)
from .._tree import mapped
from ..memory.workspaces import RECURRENT, attention_on_cuda, reserve, takes, workspace
from ..state import DEFAULT
from .autocasting import autocast_of_cuda
from .composing import AsOnCuda, capability_of
from .kernels import Kernels, grouped

INTEGERS = 2**24
FLOATS = 2**10
STAND_INS = 2**22

aten: Any = torch.ops.aten
_MASKED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
_DRAWS: set[Any] = {  # whose integers are states of generators
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
_DEVICE: Any = torch.ops.prim.device.default
_GROUPED: Any = aten._grouped_mm.default
_CHOICES = {"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "multinomial", "mode", "median", "kthvalue"}
_LEAVING = {torch.Tensor.numpy, torch.Tensor.__array__}
_NO_CHOICE = (torch.bool, torch.uint64)  # the latter are states of generators
_READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


class _Kind(NamedTuple):
    """Whether an operation returns views, writes to its arguments, reads values."""

    views: bool
    writes: bool
    reads: bool


_kinds: dict[Any, _Kind] = {}


def _kind(func: Any) -> _Kind:
    kind = _kinds.get(func)
    if kind is None:
        kind = _kinds[func] = _Kind(func.is_view, writes(func), not _READS.isdisjoint(func.tags))
    return kind


@cache
def _status(func: Any) -> int | None:
    """Which result of an operation says whether it failed."""
    return next((place for place, name in enumerate(returned(func)) if name == "info"), None)


class _Leaving(TorchFunctionMode):
    """Gives stand-ins for the values of fake tensors to what is not PyTorch.

    Args:
        stand_in: Makes them.
        where: Says which module is running.
    """

    def __init__(self, stand_in: Callable[[torch.Tensor, str], torch.Tensor], where: Callable[[], str]) -> None:
        super().__init__()
        self._stand_in = stand_in
        self._where = where

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LEAVING and type(args[0]) is FakeTensor:
            values = self._stand_in(args[0], f"Tensor.{func.__name__}")
            args = (values.requires_grad_(args[0].requires_grad), *args[1:])
        elif func is torch.Tensor.data_ptr and type(args[0]) is FakeTensor:
            raise errors.RecomputeError(
                f"simulate: {self._where() or 'the model'} asks for the address of a tensor of shape "
                f"{tuple(args[0].shape)}, and simulated tensors have no memory.\n"
                "  Make the call that needs it an operation of its own, by torch.library.custom_op and register_fake."
            )
        return func(*args, **(kwargs or {}))


def _cannot_simulate(op: str, where: str, error: Exception) -> str:
    """Text for an operation that cannot be run on tensors without values."""
    return (
        f"simulate: {op} in {where or 'the model'} cannot be run on tensors without values: it depends on them, is of "
        "a layout without strides (sparse), or is an operation of a library that says nothing of its shapes "
        f"({type(error).__name__}).\n"
        "  Use RecomputeConfig, which simulates nothing, or measure() a real step; for an operation of your own, write "
        "torch.library.register_fake."
    )


class Pretend(TorchDispatchMode):
    """Runs operations on real small tensors, simulates those on fake ones.

    Args:
        fakes: What simulates; it is not active itself, which saves a turn of each operation.
        where: Says which module is running.
        composed: "cuda", or "cuda 9.0" with a capability, where functions are to be composed as there, although the
            fakes lie on the CPU.

    Attributes:
        assumed: What had to be assumed, in words, each once.
        capability: Of the CUDA device that functions are composed for; None for none.
    """

    supports_higher_order_operators = True

    def __init__(self, fakes: FakeTensorMode, where: Callable[[], str], composed: str = "") -> None:
        super().__init__()
        self._fakes = fakes
        self._kernels = Kernels(fakes)
        self._where = where
        self.assumed: dict[str, None] = {}
        self._seen: Callable[[Any, Any, Any], None] | None = None
        self._composed = composed
        self.capability = capability_of(composed)
        self._around: list[ExitStack] = []

    def __enter__(self) -> Any:
        with ExitStack() as stack:
            for ambient in DEFAULT:
                stack.callback(ambient.restore, ambient.capture())
            stack.enter_context(flex_uncompiled())
            stack.enter_context(_Leaving(self._stand_in, self._where))
            if self.capability is not None:
                stack.enter_context(autocast_of_cuda())
                stack.enter_context(AsOnCuda(self.capability))
            self._around.append(stack.pop_all())
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._around.pop().__exit__(*exception)

    @contextmanager
    def showing(self, seen: Callable[[Any, Any, Any], None]) -> Generator[None]:
        """Calls `seen` with each operation in the block, its arguments and its result."""
        self._seen = seen
        try:
            yield
        finally:
            self._seen = None

    def workspace(self, func: Any, inputs: Any) -> int:
        """Bytes that an operation takes while it runs; where they are not known, that is noted."""
        if self._composed:
            known = attention_on_cuda(func, inputs[0]) if self.capability else None
            unknown = f"operations are not run on {self._composed} here" if takes(func) else 0
            taken = unknown if known is None else known
        else:
            taken = workspace(func, inputs)
        if isinstance(taken, str):
            kind = str(func).partition(".default")[0].removesuffix("_backward")
            self.assumed[f"workspaces of {kind} are not known and counted as none: {taken}"] = None
            return 0
        return taken

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE:  # how a fake tensor is asked for its device, at every turn
            return device_of(args[0])
        if traced():
            return func(*args, **(kwargs or {}))
        out = self._out(func, args, kwargs or {})
        if self._seen is not None and out is not NotImplemented:
            self._seen(func, (args, kwargs), out)
        return out

    def _out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fake = real = False
        for kind in map(type, _tensors(args, kwargs)):
            if kind is FakeTensor:
                fake = True
            elif _compat.is_plain_kind(kind):
                real = True
            else:
                return NotImplemented
        if not is_operator(func):
            with self._fakes:
                return func(*self._all_fake(args), **self._all_fake(kwargs))
        if not fake:
            return self._real(func, args, kwargs, real)
        kind = _kind(func)
        if func in _MASKED:
            args = self._by_index(args)
            real = True
        elif kind.reads:
            return self._kept(self._run(func, args, kwargs))
        if real and kind.writes:
            written = _tensors(_compat.written_by(func, args, kwargs), {})
            if any(type(tensor) is not FakeTensor for tensor in written):
                return self._run(func, args, kwargs)
        if func is _GROUPED:
            with self._fakes:
                return grouped(*args, **kwargs)
        out = self._simulated(func, args, kwargs, real)
        if func in RECURRENT:
            return self._with_reserve(func, args, kwargs, out)
        if kind.views or kind.writes or func in _DRAWS:
            return out
        return self._decided(func, args, out)

    def _real(self, func: Any, args: Any, kwargs: Any, real: bool) -> Any:
        """An operation on real tensors alone, or on none."""
        if not any(_kind(func)):
            out = self._simulated(func, args, kwargs, real)
            if not all(map(_stays, _tensors(out, {}))):
                return out
        with without_modes():
            return func(*args, **kwargs)

    def _simulated(self, func: Any, args: Any, kwargs: Any, real: bool) -> Any:
        if real:
            args, kwargs = self._all_fake(args), self._all_fake(kwargs)
        try:
            return self._kernels.run(func, args, kwargs)
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
        """An operation that reads or writes real values, with stand-ins for the fake ones."""

        def real(value: Any) -> Any:
            return self._stand_in(value, str(func)) if type(value) is FakeTensor else value

        given, named = mapped(args, real), mapped(kwargs, real)
        try:
            with without_modes():
                return func(*given, **named)
        except RuntimeError as error:
            if given is args and named is kwargs:
                raise
            raise errors.RecomputeError(_cannot_simulate(str(func), self._where(), error)) from error

    def _by_index(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Indices instead of a mask, whose number of entries a fake operation could not know."""
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                mask = self._stand_in(index, "indexing with a mask") if type(index) is FakeTensor else index
                with without_modes():
                    indices.extend(mask.nonzero().unbind(1))
            else:
                indices.append(index)
        return (args[0], indices, *args[2:])

    def _decided(self, func: Any, args: Any, out: Any) -> Any:
        """The results with stand-ins for integers, as far as they are new and small."""

        def decide(value: Any) -> Any:
            integers = type(value) is FakeTensor and not _floats(value) and value.dtype not in _NO_CHOICE
            if not integers or value.numel() > STAND_INS:
                return value
            return self._choice(func, args, value)

        if isinstance(out, torch.Tensor):
            return decide(out) if not _floats(out) else out
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
            return self._stand_in(out, str(func))
        source = args[0]
        n = source.shape[-1] if out.dim() == source.dim() else max(1, source.numel() // max(1, out.numel()))
        self._note(str(func), "chooses evenly")
        with without_modes():
            return (torch.arange(out.numel()) % max(1, n)).view(out.shape).to(device=out.device, dtype=out.dtype)

    def _stand_in(self, fake: torch.Tensor, what: str) -> torch.Tensor:
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
            return values.view(fake.shape).to(fake.device)

    def _note(self, what: str, value: str) -> None:
        where = self._where()
        self.assumed[f"{what.removesuffix('.default')} {value}" + (f" in {where}" if where else "")] = None

    def _kept(self, out: Any) -> Any:
        """Results of a real operation on stand-ins: integers as they are, the rest fake."""
        return mapped(out, lambda value: value if _stays(value) else self._fake(value))

    def _all_fake(self, values: Any) -> Any:
        return mapped(values, lambda value: value if type(value) is FakeTensor else self._fake(value))

    def _fake(self, real: torch.Tensor) -> torch.Tensor:
        with self._fakes:
            return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)


def _floats(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _stays(tensor: torch.Tensor) -> bool:
    """Whether a tensor that could be real is."""
    return tensor.numel() <= (FLOATS if _floats(tensor) else INTEGERS)


def _tensors(values: Any, more: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operation's arguments or results, which are at most lists of them."""
    found: list[torch.Tensor] = []
    if isinstance(values, torch.Tensor):
        return [values]
    if not isinstance(values, (list, tuple)):
        return found
    for value in (*values, *more.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found
