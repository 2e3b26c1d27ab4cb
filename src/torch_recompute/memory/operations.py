"""The dispatch mode that shows operations, and who made a tensor's memory: operation, module, region, line of code.

After a forward the graph holds hundreds of storages, and a storage does not say where it comes from. A dispatch mode
sees every operation's result when it is made; a storage that was not among the inputs and is not known yet is an
allocation, and at that moment the running module (a stack, kept by torch's global module hooks), the region
(`state/observer.py`) and the Python frames are at hand. The line is that of the nearest frame outside torch, this
library and the standard library; in a model made of torch's modules alone there is none, and the line in `torch/nn` is
given.

Nothing here refers to a tensor or a storage. Regions keep the modes that were active around them, and so these, for as
long as their graph lives: `Allocations.run` empties itself before it returns.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .._torch import TorchDispatchMode, current_node, in_backward, sequence_number, sequence_of
from .._torch.compiler import all_uncompiled
from .._torch.graphs import ENGINE, caller
from .._torch.modes import without_modes
from .._torch.storages import uses
from ..state.observer import observing, running
from ..state.tape import thread
from .ledger import laid, leaves, shape_of, storages

_TORCH = os.path.dirname(torch.__file__) + os.sep
_NN = os.path.join(_TORCH, "nn") + os.sep
_STDLIB = os.path.dirname(contextlib.__file__)
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep

Calls = tuple[tuple[str, int], ...]
PHASES = ("forward", "loss", "backward", "replay", "optimizer")


_Found = TypeVar("_Found")
Storages = list[tuple[torch.device, torch.UntypedStorage]]


class Operation:
    """One operation that has run. What several readers ask of it is computed once; no reader keeps it.

    Args:
        func: The overload, or an operator of other functions, such as `flex_attention`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        out: Its result.
        known: What is known of operations with arguments of these layouts, see `once`.
        tensors: All tensors among the arguments, where they are known.
        taken: The bytes that it took while it ran, where it was watched.
    """

    __slots__ = ("_given", "_known", "_results", "_tensors", "args", "func", "kwargs", "out", "taken")

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        known: dict[Any, Any] | None = None,
        tensors: Sequence[torch.Tensor] | None = None,
        taken: int | None = None,
    ) -> None:
        self.func, self.args, self.kwargs, self.out, self._known = func, args, kwargs, out, known
        self.taken = taken
        self._tensors = tensors
        self._given: Storages | None = None
        self._results: Storages | None = None

    def once(self, find: Callable[[Operation], _Found]) -> _Found:
        """Returns what a function says of the operation; in simulations, where layouts repeat, it is called once each.

        Args:
            find: Its answer must follow from the layouts of tensors and the values of other arguments.
        """
        if self._known is None:
            self._known = {}
        if find not in self._known:
            self._known[find] = find(self)
        return self._known[find]

    @property
    def given(self) -> Storages:
        """The storages among the arguments, with their devices."""
        if self._given is None:
            self._given = storages((self.args, self.kwargs) if self._tensors is None else self._tensors)
        return self._given

    @property
    def results(self) -> Storages:
        """The storages of the result, with their devices."""
        if self._results is None:
            self._results = storages(self.out)
        return self._results

    @property
    def made(self) -> Storages:
        """The storages of the result that are not among the arguments."""
        if self.func is _LIFT_FRESH:  # how `torch.tensor` and `from_numpy` announce a new storage
            return self.results
        if self.func is _OVER_STORAGE and caller(_OURS) is torch.Tensor.__deepcopy__.__code__:  # which copies it unseen
            return self.results
        given = {id(storage) for _, storage in self.given}
        return [(device, storage) for device, storage in self.results if id(storage) not in given]


Seen = Callable[[Operation], object]


Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Any, int | None]]


_SCATTERING = "scatter", "scatter_add", "index_add", "index_fill", "index_put", "masked_scatter", "put"
_aten: Any = torch.ops.aten
_ADD = _aten.add.Tensor
ADDED = _aten.add_.Tensor
"""The operation by which a plain step adds in place; under `Operations` its result has memory of its own."""
_LIFT_FRESH = _aten.lift_fresh.default
_OVER_STORAGE = _aten.set_.source_Storage_storage_offset
_ZEROS = frozenset({_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default})
_LOGITS = "BinaryCrossEntropyWithLogitsBackward0"  # the node whose formula writes into what it has made
_WRITING = {_aten.sub.Tensor: _aten.sub_.Tensor, _aten.mul.Tensor: _aten.mul_.Tensor}
_MAKING = frozenset({_aten.sigmoid.default, _aten.add.Scalar, *_WRITING, *_WRITING.values()})
_LENGTHS = {_aten._ctc_loss.Tensor: slice(2, 4), _aten._ctc_loss_backward.Tensor: slice(3, 5)}


@functools.cache
def _in_place(func: Any) -> Any:
    """The operation that scatters into its first argument, for one that does so into a copy; None for others."""
    name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
    if name not in _SCATTERING or func.namespace != "aten":
        return None
    return getattr(getattr(_aten, f"{name}_"), str(func).rpartition(".")[2], None)


def with_numbers(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """An operation and its arguments; a loss of sequences with their lengths as numbers.

    While a dispatch mode is on, PyTorch leaves lengths in tensors, and those on the host are refused by CUDA's kernel.
    """
    lengths = _LENGTHS.get(func)
    if lengths is None or not all(type(each) is torch.Tensor for each in args[lengths]):
        return func, args
    with without_modes():
        numbers = [each.tolist() for each in args[lengths]]
    return func.overloadpacket.default, (*args[: lengths.start], *numbers, *args[lengths.stop :])


class PlainFormulas:
    """Says which operations a step runs where no dispatch mode is on.

    While one is on, PyTorch writes to a copy in some places where it otherwise writes in place
    (`TensorSubclassLikeUtils.h`). Its formulas for the gradients of indexing, `gather`, `max` and others scatter into a
    copy of the zeros that they have made: for logits of which some rows are taken, as much again as the logits. A
    linear layer adds its bias so to a product of what is not contiguous. Binary cross-entropy with logits makes its
    gradient in one tensor otherwise, and in three so. The engine sums the gradients of a tensor that is used twice into
    the first one, where nothing else refers to that.
    """

    def __init__(self) -> None:
        self._zeros: Callable[[], object] = lambda: None
        self._last: tuple[Callable[[], object], Callable[[], object]] = self._zeros, self._zeros
        self._node, self._made = -1, list[Callable[[], object]]()  # of the node that runs: its number, what it made
        _uses_of_a_sum()

    def meant(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The operation that a plain step runs in the place of this one."""
        if func is _ADD:
            return ADDED if self._adds_in_place(args) else func
        if func in _WRITING and any(args[0] is made() for made in self._last) and not torch.is_grad_enabled():
            node = current_node()
            return _WRITING[func] if node is not None and node.name() == _LOGITS else func
        plain = _in_place(func)
        if plain is None or args[0] is not self._zeros() or torch.is_grad_enabled() or caller(_OURS) is not ENGINE:
            return func
        return plain

    def _adds_in_place(self, args: tuple[Any, ...]) -> bool:
        code, node = caller(_OURS), current_node()
        if code is not ENGINE or node is None or torch.is_grad_enabled():
            given = [one.shape for one in args[:2] if isinstance(one, torch.Tensor)]
            of_linear = code is nn.Linear.forward.__code__ and len(given) == 2  # a product and its bias
            return of_linear and given[0] == torch.broadcast_shapes(*given)  # under vmap it is the other way round
        mine = sequence_of(node) == self._node and any(args[0] is made() for made in self._made)
        if mine or not isinstance(args[0], torch.Tensor) or args[0].is_nested:  # what it made may be of its formula
            return False
        return laid(args[0].shape, args[0].stride()) < 2 and uses(args) == _uses_of_a_sum()

    def ran(self, func: Any, out: Any) -> None:
        """Is told of each operation that has run."""
        node = current_node() if in_backward() else None
        if node is None:
            return
        if (number := sequence_of(node)) != self._node:
            self._node, self._made = number, []
        self._made += map(weakref.ref, leaves(out))
        if func in _ZEROS and isinstance(out, torch.Tensor):
            self._zeros = weakref.ref(out)
        elif func in _MAKING and isinstance(out, torch.Tensor):
            self._last = self._last[1], weakref.ref(out)


@functools.cache
def _uses_of_a_sum() -> tuple[int, ...]:
    """Returns the `uses` of a gradient that the engine alone refers to, when it adds another."""
    found: list[tuple[int, ...]] = []

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD and in_backward():
                found.append(uses(args))
            return func(*args, **(kwargs or {}))

    def add() -> None:
        with Sums():
            x = torch.ones(2, requires_grad=True) * 1
            (x.sin() + x.cos()).backward(torch.ones(2))

    apart = threading.Thread(target=add)  # which is in no backward, transform, mode or inference
    apart.start()
    apart.join()
    return found[0]


class Operations(TorchDispatchMode):
    """Runs operations as they are, and calls `seen` with each.

    Args:
        seen: Is called with each.
        run: Runs one, and says what it took; by default nothing is said.
    """

    supports_higher_order_operators = True

    def __init__(self, seen: Seen, run: Run | None = None) -> None:
        super().__init__()
        self._seen, self._run, self._formulas = seen, run, PlainFormulas()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        func, args = with_numbers(func, args)
        meant = self._formulas.meant(func, args)
        func = func if meant is ADDED else meant  # values are not risked: a formula may read again what it adds to
        out, taken = (func(*args, **kwargs), None) if self._run is None else self._run(func, args, kwargs)
        self._formulas.ran(func, out)
        self._seen(Operation(meant, args, kwargs, out, taken=taken))
        return out


class ModuleStack:
    """Knows which module runs, in which phase of a step, and whose backward runs.

    A module is on the stack while it is called. In backward no module runs; there the node of the graph says it, by the
    number that autograd gave it when the operation of some module made it. A replay calls modules again, and ends by an
    exception, which no hook of a module sees; so each entry of the stack belongs to a run of a region (or to none), and
    only those of the present run count. Runs are known by `id`: a reference would keep alive what they have rebuilt.

    Args:
        names: The paths of modules, by `id`.
        others: Whether other modules are on the stack too, under the name of their class.

    Attributes:
        step: The part of the step that runs: any of `PHASES` but "replay", which is found out.
        calls: Of the module that was last found to run and those around it, the path and the number of the call; in
            backward and in replays those of the node.
    """

    def __init__(self, names: Mapping[int, str], others: bool = False) -> None:
        self.step = "forward"
        self.calls: Calls = ()
        self._names, self._others = names, others
        self._stack: list[tuple[str, int, Calls]] = []
        self._nodes: dict[int, tuple[str, Calls]] = {}
        self._counts: Counter[str] = Counter()
        self._part = ""

    @property
    def module(self) -> str:
        """Path of the module that runs in a forward; "" for none."""
        return self._stack[-1][0] if self._stack else ""

    def has_called(self, module: nn.Module) -> bool:
        """Whether a module, or a part of it, has been called."""
        return any(self._names.get(id(part)) in self._counts for part in module.modules())

    @contextlib.contextmanager
    def within(self, part: str) -> Generator[None]:
        """Calls what runs in the block a part of the module that runs, of that name."""
        self._part = part
        try:
            yield
        finally:
            self._part = ""

    def now(self) -> tuple[str, str]:
        """Returns the phase and the path of the module; "" where that is the model itself or none."""
        phase, module = self._now()
        return phase, f"{module}.{self._part}".lstrip(".") if self._part else module

    def _now(self) -> tuple[str, str]:
        run = thread.run
        if self.step == "optimizer":
            self.calls = ()
            return "optimizer", ""
        replaying = run is not None and run.replaying
        if replaying or self.step == "backward":
            node = current_node()
            module, self.calls = ("", ()) if node is None else self._nodes.get(sequence_of(node), ("", ()))
            if replaying:
                return "replay", self._within(run)
            self._stack.clear()
            return "backward", module
        module, _, self.calls = self._stack[-1] if self._stack else ("", 0, ())
        self._nodes.setdefault(sequence_number() - 1, (module, self.calls))  # later ones may have made no node
        return self.step, module

    def _within(self, run: Any) -> str:
        for i in range(len(self._stack) - 1, -1, -1):
            if self._stack[i][1] == id(run):
                del self._stack[i + 1 :]
                return self._stack[i][0]
        return run.name

    @contextlib.contextmanager
    def following(self) -> Generator[None]:
        """Follows the calls of modules on this thread."""
        here = threading.get_ident()

        def name_of(module: nn.Module) -> str | None:
            if torch.compiler.is_compiling() or threading.get_ident() != here:
                return None
            return self._names.get(id(module), type(module).__name__ if self._others else None)

        def enter(module: nn.Module, _args: object) -> None:
            name = name_of(module)
            if name is not None:
                self._counts[name] += thread.run is None or not thread.run.replaying
                around = self._stack[-1][2] if self._stack else ()
                self._stack.append((name, id(thread.run), (*around, (name, self._counts[name]))))

        def leave(module: nn.Module, _args: object, _result: object) -> None:
            name = name_of(module)
            if name is not None and any(name == on for on, *_ in self._stack):
                while self._stack.pop()[0] != name:
                    pass

        handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()
            self._nodes.clear()
            self._counts.clear()


class Allocation(NamedTuple):
    """A storage that was made while a model ran.

    Attributes:
        storage: The storage, by weak reference.
        op: The operation, as `aten.gelu`.
        shape: Shape of the tensor that it made.
        dtype: Its type, as `float32`.
        device: Its device, as `cuda:0`.
        module: Path of the innermost module that was running.
        line: `file:line` of the code that ran the operation.
        region: Name of the region it was made in, then of the saved call, as `layer / attention`; else "".
    """

    storage: weakref.ref[torch.UntypedStorage]
    op: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    module: str
    line: str
    region: str


class Allocations:
    """Notes the storages that are made while a model runs.

    Args:
        names: Paths of modules, by `id`; others are called by their class.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._modules = ModuleStack(names, others=True)
        self._found: dict[int, Allocation] = {}
        self._running = False

    def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[int, Allocation]]:
        """Calls `fn` and returns its result, and the storages made meanwhile by `id` of their Python object."""
        self._running = True
        try:
            with self._modules.following(), observing(), all_uncompiled(), Operations(self._note):
                result = fn(*args, **kwargs)
            return result, self._found
        finally:
            self._running = False
            self._found, self._modules = {}, ModuleStack({})

    def _note(self, ran: Operation) -> None:
        if not self._running:
            return
        made = {id(storage) for _, storage in ran.made}
        place: tuple[str, str] | None = None
        for tensor in leaves(ran.out):
            for device, storage in storages(tensor):
                key, old = id(storage), self._found.get(id(storage))
                if key not in made or (old is not None and old.storage() is storage):
                    continue
                place = place or place_in_code()
                func, dtype = ran.func, str(tensor.dtype).removeprefix("torch.")
                name = str(getattr(func, "overloadpacket", func))
                shape, module = shape_of(tensor), self._modules.module
                self._found[key] = Allocation(weakref.ref(storage), name, shape, dtype, str(device), module, *place)


def place_in_code() -> tuple[str, str]:
    """Returns the line of the user's code that runs the present operation, and the region around it; each may be ""."""
    line = fallback = ""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code is not Allocations.run.__code__ and not line:
        kind = kind_of(frame.f_code.co_filename)
        if kind == "user":
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        elif kind == "nn" and not fallback:
            fallback = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    if thread.run is not None:
        return line or fallback, thread.run.name
    inside = running()
    saved_call = bool(inside) and inside[-1].kind == "saved call"
    return line or fallback, f"{inside[-1].run.name} / {inside[-1].name}" if saved_call else ""


@functools.cache
def kind_of(file: str) -> str:
    """Returns whose code a file is: the "user"'s, that of torch's own modules ("nn"), or of another "library"."""
    if file.startswith(_NN):
        return "nn"
    python = file.startswith(_STDLIB) and "-packages" not in file
    inside = python or file.startswith((_TORCH, _OURS, "<frozen"))
    return "library" if inside else "user"
