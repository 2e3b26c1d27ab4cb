"""The mode under which a step is simulated: small values are real, memory is fake.

Where a tensor that stays real meets a fake one, the operation is simulated. `made_up.py` has the values that are read
and that no tensor has, `recipes.py` what operations on fake tensors return, `copies.py` the fakes that a step begins
with.

It is a mode of its own beside `memory.operations.Operations`, because it answers operations instead of running them; it
shows them to the same measurement (`showing`). Nothing fake ever holds memory, and nothing makes a reference cycle,
which would be counted. The generators are as they were before the mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .. import _torch, errors
from .._torch import TorchDispatchMode, is_operator
from .._torch.fakes import (
    APART,
    CPU,
    NOT_FAKED,
    FakeTensor,
    FakeTensorMode,
    answer_for,
    converted,
    device_of,
    fakes_quiet,
    flex_uncompiled,
    traced,
)
from .._torch.modes import without_modes
from .._torch.tensors import each_tensor
from ..memory.cuda_kernels import taken_on_cuda
from ..memory.ledger import leaves
from ..memory.operations import Operation, PlainFormulas, Seen, with_numbers
from ..memory.saved import BeforeWrites, generators_as_before
from ..memory.workspaces import RECURRENT, reserve, takes_nothing, target_of, watched, workspace
from .cuda_decompositions import AsOnCuda, autocast_of_cuda, capability_of
from .made_up import MadeUp, counts, is_code, is_empty_float, keeps_real_values
from .recipes import DRAWS, GROUPED, MASKED, UNKNOWN, Recipes, key_of, kind_of

aten: Any = torch.ops.aten
_DEVICE: Any = torch.ops.prim.device.default
_UNCHECKED = {aten.mm.default, aten.addmm.default}  # of whose operands the meta kernels do not compare the dtypes
_NO_SHAPES = "no fake impl registered", "tensors do not have strides"  # which torch says in a RuntimeError
_DROPOUT_STATE: Any = aten._cudnn_init_dropout_state.default


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
        target: "cuda", or "cuda 9.0" with a capability, where functions are decomposed as there, although the fakes
            are on the CPU.
        host: The device of what an optimizer keeps in host memory.

    Attributes:
        assumed: What had to be assumed, in words, each once.
        graph_of_gradients: Whether a backward has been recorded for another one, as by `create_graph=True`.
        failed_in: The path of the module in which an operation refused its arguments; None for none.
        capability: Of the CUDA device that is the target; None for none.
    """

    supports_higher_order_operators = True

    def __init__(
        self, fakes: FakeTensorMode, where: Callable[[], str], target: str = "", host: torch.device = CPU
    ) -> None:
        super().__init__()
        self._fakes, self._where, self._target, self.host = fakes, where, target, host
        answer_for(fakes, self)
        self._values, self._recipes = MadeUp(where), Recipes(fakes, target)
        self.assumed = self._values.assumed
        self.graph_of_gradients = False
        self.failed_in: str | None = None
        self._seen: Seen | None = None
        self._taken: int | None = None  # of the present operation
        self.capability = capability_of(target)
        self._workspace_there = _workspace_on(target, host)
        self._around: list[ExitStack] = []
        self._formulas = PlainFormulas()

    def __enter__(self) -> Any:
        with ExitStack() as stack:
            stack.enter_context(generators_as_before())
            stack.enter_context(flex_uncompiled())
            stack.enter_context(fakes_quiet())
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

    @property
    def fakes(self) -> FakeTensorMode:
        """The mode whose fake tensors they are."""
        return self._fakes

    def workspace(self, ran: Operation) -> int | str:
        """Bytes that an operation takes while it runs, or why they are not known."""
        if ran.taken is not None:
            return ran.taken
        if not self._target:
            return 0 if ran.once(_takes_nothing) else workspace(ran.func, (ran.args, ran.kwargs))
        return ran.once(self._workspace_there)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # no compiled code calls this, and torch's guard takes a third of a call
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # how a fake tensor is asked for its device, at every turn
            return device_of(args[0])
        if func is _DROPOUT_STATE:  # torch keeps it for the process, so it is neither fake nor the step's
            with without_modes():
                return func(*args, **(kwargs or {}))
        if traced():
            return func(*args, **(kwargs or {}))
        if _torch.graph_is_kept() and torch.is_grad_enabled():
            self.graph_of_gradients = True
        kwargs = kwargs or {}
        func, args = with_numbers(func, args)
        func = self._formulas.meant(func, args)
        tensors: list[FakeTensor] = []
        try:
            recipe, known, is_all, _ = self._recipes.by_layout.get(key_of(func, args, kwargs, tensors), UNKNOWN)
        except TypeError:  # an argument that cannot be looked up
            recipe, known, is_all, _ = UNKNOWN
        self._taken = None
        if is_all:
            self._recipes.known = known
            out = self._recipes.remade(recipe, tensors)
        else:
            self._recipes.known = None
            out = self._out(func, args, kwargs)
        self._formulas.ran(func, out)
        if self._seen is not None and out is not NotImplemented:
            self._seen(
                Operation(func, args, kwargs, out, self._recipes.known, tensors if is_all else None, self._taken)
            )
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
            args, kwargs = self._all_fake(args), self._all_fake(kwargs)
            with self._fakes:
                return func(*args, **kwargs)
        if not fake:
            return self._real(func, args, kwargs, real)
        views, writing, reads = kind_of(func)
        if func in MASKED:
            args = self._by_index(func, args, kwargs)
            real = True
        elif reads:  # integers stay as they are, the rest becomes fake
            out = self._run(func, args, kwargs)
            return each_tensor(out, lambda value: value if keeps_real_values(value) else self._fake(value))
        written = leaves(_torch.written_by(func, args, kwargs)) if real and writing else ()
        if any(type(tensor) is not FakeTensor for tensor in written):
            return self._run(func, args, kwargs)
        if func is GROUPED:
            with self._fakes:
                return grouped(*args, **kwargs)
        out = self._simulated(func, args, kwargs, real)
        if real or func in RECURRENT:
            self._recipes.known = None
        if func in RECURRENT:
            return self._with_reserve(func, args, kwargs, out)
        if views or writing or func in DRAWS:
            return out
        if counts(func, leaves((args, kwargs)), leaves(out)):
            self._recipes.known = None
            return self._run(func, args, kwargs)
        return self._values.decided(func, args, out)

    def _real(self, func: Any, args: Any, kwargs: Any, real: bool) -> Any:
        """An operation on real tensors alone, or on none."""
        if not any(kind_of(func)):
            out = self._simulated(func, args, kwargs, real)
            made, given = leaves(out), max((x.numel() for x in leaves((args, kwargs))), default=0)
            if not all(keeps_real_values(x, given) for x in made) or (
                not real and any(is_code(x) or is_empty_float(x) for x in made)
            ):
                return out
        return self._run_measuring_workspace(func, args, kwargs)

    def _run_measuring_workspace(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation on real tensors, and sees what it takes."""
        for watching in BeforeWrites.open:
            watching.see(func, args, kwargs)
        with without_modes():
            out, taken = watched(func, args, kwargs)
        self._taken = None if self._target else taken
        return out

    def _simulated(self, func: Any, args: Any, kwargs: Any, real: bool) -> Any:
        if real:
            args, kwargs = self._all_fake(args), self._all_fake(kwargs)
        try:
            if func in _UNCHECKED and args[-2].dtype != args[-1].dtype:
                both = f"{args[-2].dtype} and {args[-1].dtype}"
                raise RuntimeError(f"mat1 and mat2 have to be of one dtype, but are {both}")
            return self._recipes.result(func, args, kwargs)
        except NOT_FAKED as error:
            raise errors.RecomputeError(_cannot_simulate(str(func), self._where(), error)) from error
        except (RuntimeError, IndexError) as error:
            if any(words in str(error) for words in _NO_SHAPES):
                raise errors.RecomputeError(_cannot_simulate(str(func), self._where(), error)) from error
            self.failed_in = self._where()
            raise

    def _with_reserve(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """The results of a recurrent layer, with what its kernel keeps for backward, which fakes have none of."""
        if torch.is_grad_enabled() and not out[RECURRENT[func]].numel():
            taken = reserve(func, (args, kwargs))
            name = str(func).partition(".default")[0]
            if isinstance(taken, str):
                self.assumed[f"what {name} keeps for its backward is not known and counted as none: {taken}"] = None
                taken = 0
            elif self._target:
                self.assumed[f"{name} keeps as much for its backward on a GPU as on the CPU"] = None
            with self._fakes:
                made = torch.empty(taken, dtype=torch.uint8, device=device_of(out[0]))
            out = tuple(made if place == RECURRENT[func] else x for place, x in enumerate(out))
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that reads or writes real values, with made-up ones for the fake ones."""

        def real(value: Any) -> Any:
            return self._values.values(value, str(func)) if type(value) is FakeTensor else value

        given, named = each_tensor((args, kwargs), real)
        try:
            return self._run_measuring_workspace(func, given, named)
        except RuntimeError as error:
            raise errors.RecomputeError(_cannot_simulate(str(func), self._where(), error)) from error

    def _by_index(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Indices instead of a mask, whose number of entries a fake operation could not know."""
        masked: list[Any] = []
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                mask = self._values.values(index, "indexing with a mask") if type(index) is FakeTensor else index
                masked.append(mask)
                with without_modes():
                    indices.extend(mask.nonzero().unbind(1))
            else:
                masked.append(index)
                indices.append(index)
        if len(indices) > len(masked) or any(a is not b for a, b in zip(masked, indices, strict=True)):
            taken = self._target or workspace(func, ((args[0], masked, *args[2:]), kwargs))
            self._taken = taken if isinstance(taken, int) else None
        return (args[0], indices, *args[2:])

    def _all_fake(self, values: Any) -> Any:
        return each_tensor(values, lambda value: value if type(value) is FakeTensor else self._fake(value))

    def _fake(self, real: torch.Tensor) -> torch.Tensor:
        meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        return self._recipes.make(meta, real.device)

    def values_of(self, fake: torch.Tensor, what: str) -> torch.Tensor:
        """Made-up values of a fake tensor for what is not PyTorch, as NumPy."""
        return self._values.values(fake, what).requires_grad_(fake.requires_grad)

    def address_of(self, fake: torch.Tensor) -> int:
        """Refuses to say where a fake tensor is."""
        raise errors.RecomputeError(
            f"simulate: {self._where() or 'the model'} asks for the address of a tensor of shape {tuple(fake.shape)}, "
            "and simulated tensors have no memory.\n"
            "  Make the call that needs it an operation of its own, by torch.library.custom_op and register_fake."
        )


def _takes_nothing(ran: Operation) -> bool:
    inputs = ran.args, ran.kwargs
    return takes_nothing(ran.func, inputs, target_of(inputs))


@functools.cache
def _workspace_on(target: str, host: torch.device) -> Callable[[Operation], int | str]:
    """Returns what says the bytes that an operation takes on a device that is not here; see `FakeMode.workspace`."""
    capability = capability_of(target)

    def taken(ran: Operation) -> int | str:
        if host == APART and any(device == APART for device, _ in (*ran.given, *ran.results)):
            return 0
        inputs = ran.args, ran.kwargs
        known = taken_on_cuda(ran.func, *inputs, capability) if capability else None
        if known is not None:
            return known
        nothing = not ran.given or takes_nothing(ran.func, inputs, target)
        return 0 if nothing else f"there is no {target} device here to ask"

    return taken


def grouped(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """A product of groups; what PyTorch has for fake tensors takes bfloat16 alone."""
    if offs is not None and a.dim() == b.dim() == 2:
        shape = [offs.shape[0], a.shape[0], b.shape[1]]
    else:
        shape = [*a.shape[:-1], b.shape[-1]]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)
