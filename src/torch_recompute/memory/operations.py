"""The dispatch mode that shows operations, and who made a tensor's memory: operation, module, region, line of code.

Problem. After a forward the graph holds hundreds of storages, and a storage does not say where it comes from; autograd
gives the name of a node, not of a module, and its anomaly mode a traceback of each operation.

Idea. A dispatch mode sees every operation's result when it is made. A storage that was not among the operation's inputs
and is not known yet is an allocation, and at that moment the answers are at hand: the running module (a stack, kept by
torch's global module hooks), the region (`_observer.py`), and the Python frames. A weak reference to the storage's
Python object carries them; as in `ledger.py`, it dies with the memory and keeps nothing alive.

The line is that of the nearest frame outside torch, this library and the standard library, between the model and the
operation: in a model made of torch's modules alone there is none, and the line in `torch/nn` is given instead.

Rejected: `torch.utils.module_tracker`, which also hooks the tensors that go through a module and so stays in the
graph; hooks on each module, which change the model while it is looked at and miss a module made on the way.

Invariants. Nothing here refers to a tensor or a storage. Regions keep the modes that were active around them, and so
these, for as long as their graph lives: `Allocations.run` empties itself before it returns.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .._compat import TorchDispatchMode
from .._observer import observing, running
from ..values import thread
from .ledger import storages

_TORCH = os.path.dirname(torch.__file__) + os.sep
_NN = os.path.join(_TORCH, "nn") + os.sep
_STDLIB = os.path.dirname(contextlib.__file__)
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MODELS = (os.path.join(_OURS, "demo"), os.path.join(_OURS, "bench"))  # users of the library that live inside it


class Operations(TorchDispatchMode):
    """Runs operations as they are, and shows each.

    Args:
        seen: Called with an operation, its positional and keyword arguments, and its result.
    """

    supports_higher_order_operators = True

    def __init__(self, seen: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._seen(func, args, kwargs or {}, out)
        return out


class Allocation(weakref.ref[torch.UntypedStorage]):
    """A storage, by weak reference, and what is known of its making.

    Attributes:
        op: The operation, as `aten.gelu`.
        shape: Shape of the tensor that it made.
        dtype: Its type, as `float32`.
        device: Its device, as `cuda:0`.
        module: Path of the innermost module that was running.
        line: `file:line` of the code that ran the operation.
        region: Name of the region it was made in, then of the saved call, as `layer / attention`; else "".
        result: Whether the caller's result contains it.
    """

    __slots__ = ("device", "dtype", "line", "module", "op", "region", "result", "shape")

    op: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    module: str
    line: str
    region: str
    result: bool


class Allocations(TorchDispatchMode):
    """Sees operations and modules while a model runs.

    Args:
        names: What to call a module, by its `id`; others are called by their class.
    """

    supports_higher_order_operators = True

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._births: dict[int, Allocation] = {}
        self._modules: list[nn.Module] = []
        self._running = False

    def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[int, Allocation]]:
        """Calls `fn` and returns its result, and the storages born meanwhile by `id` of their Python object."""
        self._running = True
        try:
            with self._hooks(), observing(), self:
                result = fn(*args, **kwargs)
            return result, self._births
        finally:
            self._running = False
            self._births, self._names = {}, {}
            self._modules.clear()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._running:
            self._look(func, (args, kwargs), out)
        return out

    def _look(self, func: Any, inputs: object, outputs: object) -> None:
        known = {id(storage) for _, storage in storages(inputs)}
        if func is torch.ops.aten.lift_fresh.default:  # how `torch.tensor` and `from_numpy` announce a birth
            known.clear()
        place: tuple[str, str] | None = None
        for tensor in leaves(outputs):
            for device, storage in storages(tensor):
                old = self._births.get(id(storage))
                if id(storage) in known or (old is not None and old() is storage):
                    continue
                birth = Allocation(storage)
                birth.op = str(getattr(func, "overloadpacket", func))
                birth.shape = tuple(map(int, tensor.shape))
                birth.dtype = str(tensor.dtype).removeprefix("torch.")
                birth.device = str(device)
                birth.module = self.name(self._modules[-1]) if self._modules else ""
                birth.line, birth.region = place = place or place_in_code()
                birth.result = False
                self._births[id(storage)] = birth

    def name(self, module: nn.Module) -> str:
        """The path of a module; where it has none, its class."""
        return self._names.get(id(module), type(module).__name__)

    @contextlib.contextmanager
    def _hooks(self) -> Generator[None]:
        """Keeps the stack of running modules, those of this thread only."""
        here = threading.get_ident()

        def enter(module: nn.Module, _args: object) -> None:
            if threading.get_ident() == here:
                self._modules.append(module)

        def leave(module: nn.Module, _args: object, _result: object) -> None:
            if threading.get_ident() == here and module in self._modules:
                while self._modules.pop() is not module:
                    pass

        handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def leaves(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a nest of lists, tuples and dicts, as an operation returns them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in cast("dict[object, object]", value).values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("Iterable[object]", value):
            yield from leaves(item)


def place_in_code() -> tuple[str, str]:
    """The line of the user's code that runs the present operation, and the region that it runs in; each may be ""."""
    line = fallback = ""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code is not Allocations.run.__code__ and not line:
        kind = kind_of(frame.f_code.co_filename)
        if kind == "user":
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        elif kind == "nn" and not fallback:
            fallback = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return line or fallback, region_now()


def region_now() -> str:
    """Name of the region that runs, as far as it is observed; in a saved call as `layer / attention`; else ""."""
    if thread.run is not None:
        return thread.run.name
    inside = running()
    return f"{inside[-1].run.name} / {inside[-1].name}" if inside and inside[-1].kind == "saved call" else ""


def kind_of(file: str) -> str:
    """What code in a file is: "user", "nn" (torch's own modules) or "library" (torch, this package, Python's)."""
    kind = _KINDS.get(file)
    if kind is None:
        kind = _KINDS[file] = _kind(file)
    return kind


def _kind(file: str) -> str:
    if file.startswith(_MODELS):
        return "user"
    if file.startswith(_NN):
        return "nn"
    inside = file.startswith((_TORCH, _OURS, "<frozen")) or os.path.dirname(file) == _STDLIB
    return "library" if inside else "user"


_KINDS: dict[str, str] = {}
