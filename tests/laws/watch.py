"""Instruments of the laws: one training step with everything it leaves, live bytes, counts of calls and operations."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laws.cases import Case, Program
from laws.placements import PLAIN, Placement


def floating(tree: Any) -> list[torch.Tensor]:
    """The tensors of a result that have a gradient."""
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.requires_grad]


def weights_of(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """A gradient for each output: fixed, and not ones, which would hide errors of order."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in outputs]


def backward(result: Any, **options: Any) -> None:
    outputs = floating(result)
    torch.autograd.backward(outputs, weights_of(outputs), **options)


def left_by(program: Program, result: Any) -> dict[str, Any]:
    """Everything that can be seen after a step."""
    left: dict[str, Any] = {f"output {i}": t for i, t in enumerate(tree_leaves(result))}
    left.update((f"grad of {name}", leaf.grad) for name, leaf in program.leaves().items())
    left.update((f"buffer {name}", buffer) for name, buffer in program.buffers().items())
    left["random numbers"] = torch.get_rng_state()
    return left


def step(case: Case, placement: Placement, times: int = 1) -> dict[str, Any]:
    """Builds the program of `case`, places it, and runs forward and backward."""
    program = case.build()
    run = placement.put(*program.stages)
    result = None
    for _ in range(times):
        result = run(*program.args, **program.kwargs)
        backward(result)
    return left_by(program, result)


@functools.cache
def plain_step(case: Case, times: int = 1) -> dict[str, Any]:
    """What the step of the plain program leaves; run once for all placements."""
    return step(case, PLAIN, times)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, as bytes."""
    dense = tensor.detach().resolve_conj().resolve_neg()
    return dense.contiguous().reshape(-1).view(torch.uint8)


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Equal to the last bit: same names, kinds, shapes, strides of gradients, and bytes."""
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        other = got[name]
        assert type(other) is type(value), name
        if isinstance(value, torch.Tensor):
            assert other.requires_grad == value.requires_grad, name
            assert (other.shape, other.dtype, other.stride()) == (value.shape, value.dtype, value.stride()), name
            assert torch.equal(bits(other), bits(value)), f"{name}: {other} is not {value}"
        else:
            assert other == value, name


def equal(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Whether all tensors, and there are any, are equal to the last bit."""
    pairs = list(zip(some, others, strict=True))
    return len(pairs) > 0 and all(torch.equal(a, b) for a, b in pairs)


def ones(*size: int) -> torch.Tensor:
    return torch.ones(*size, requires_grad=True)


def vector() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def big() -> torch.Tensor:
    return torch.linspace(0, 1, 64 * 64).view(64, 64).requires_grad_()


class Turns:
    """Does something else each time it is called: what a region must not be given."""

    def __init__(self, *bodies: Callable[..., Any]) -> None:
        self.bodies = bodies
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        body = self.bodies[min(self.calls, len(self.bodies) - 1)]
        self.calls += 1
        return body(*args, **kwargs)


class Counted:
    """Counts the calls of what it wraps, by name."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __call__(self, name: str, fn: Callable[..., Any] = torch.exp) -> Callable[..., Any]:
        def counted(*args, **kwargs):
            self.calls[name] += 1
            return fn(*args, **kwargs)

        return counted


class Tally:
    """A count that a module may hold and a replay does not put back, being a list in a list of an object."""

    def __init__(self) -> None:
        self.inside = [[0]]

    def __call__(self) -> int:
        """One more."""
        self.inside[0][0] += 1
        return self.count

    @property
    def count(self) -> int:
        """How many."""
        return self.inside[0][0]


class InBackward(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


class Operations(TorchDispatchMode):
    """Counts the operations that reach the dispatcher, by their short name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Bytes(TorchDispatchMode):
    """Knows every storage that operations make while it is active, and which of them are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _strided(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_strided, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    @property
    def live(self) -> int:
        """Bytes that were made under this mode and are still there."""
        return self.live_except(())

    def live_except(self, storages: Collection[int]) -> int:
        """Bytes alive, those of `storages` (their identities) left out."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(size for key, (_, size) in self._made.items() if key not in storages)


def _strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Without the garbage collector: what dies here dies by reference counting. Ends with a look for cycles."""
    gc.collect()  # what others have left; all that is older is frozen (`conftest.py`), so a look takes a millisecond
    gc.disable()
    try:
        yield
        found = gc.collect()
        assert found == 0, f"{found} objects in reference cycles"
    finally:
        gc.enable()


def on_threads(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What `fn` returns for each argument, each on a thread of its own at the same time; raises what one has raised."""
    gate, count = threading.Barrier(len(args)), torch.get_num_threads()

    def run(arg: Any) -> Any:
        torch.set_num_threads(count)  # OpenMP's number is each thread's own, and torch 2.14's attention rounds by it
        gate.wait(30)
        return fn(arg)

    with ThreadPoolExecutor(len(args)) as pool:
        return [future.result(60) for future in [pool.submit(run, arg) for arg in args]]


def raised(kind: type[BaseException], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text of the `kind` that `fn` raises, with nothing kept of its traceback."""
    try:
        fn(*args, **kwargs)
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")
