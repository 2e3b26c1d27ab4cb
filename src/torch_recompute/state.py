"""What a replay must find as the forward found it (law 5).

A region's function runs again during backward: later, perhaps on another thread, after the caller has left `with`
blocks, drawn random numbers, called `model.eval()` or updated running statistics. `World` takes what the function
can depend on besides its arguments when a region is entered, and puts it in place around each replay:

* settings: autocast, the SDPA / cuDNN / precision switches, the stack of `TorchFunctionMode`s (default device,
  context parallelism), dispatch modes, context variables. Reading them all takes about 3 us; they are compared at
  the replay and only written where they differ. Which kernels are preferred is read again after the forward: torch
  itself changes that for good in the first attention of a process, and the replay must find what that left.
* consumables: random generators and the user's own `Ambient` objects. A generator's state is read before and after
  the forward and dropped when the two are equal: that is how we know that nothing was drawn, and then the replay
  touches no generator (`_generators.py`).
* what the function reaches (`_reach.py`): the buffers of its modules, so that running statistics are updated once
  and not twice; `training` flags; hooks that were there for the forward only; closure cells that were rebound or
  deleted meanwhile.

Rejected: finding out what was touched with a dispatch mode (20 us per operation); copying every buffer always (a
1 GiB KV cache is a buffer too). Buffers up to 64 KiB of modules in training mode are copied; larger ones are copied
until a call has left them unchanged, after which a change is an error that names the buffer.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from . import _compat, errors
from ._compat import version_of
from ._generators import CPU_RNG, DEVICE_RNG, GENERATORS, elsewhere, same, undrawn
from ._generators import CpuRng as CpuRng
from ._generators import DeviceRng as DeviceRng
from ._generators import GeneratorRng as GeneratorRng
from ._generators import NumpyRng as NumpyRng
from ._generators import PythonRng as PythonRng
from ._reach import Reach, Seen
from ._task import leads_to
from ._tree import apart, each_once

SMALL = 64 * 1024
"""Buffers up to this many bytes are copied on every call; see the module's note."""


@runtime_checkable
class Ambient(Protocol):
    """Something outside a region's arguments that its function reads and changes.

    Pass objects of this kind as `recompute(fn, state=[...])`. `capture` is called before the forward, at each replay
    and after each saved call; `restore` gets one of its results back.
    """

    def capture(self) -> Any:
        """The present state, as a value that later changes do not touch."""
        ...

    def restore(self, value: Any) -> None:
        """Makes a captured state the present one."""
        ...


class TensorState:
    """Tensors that a region changes in place, to be updated once and not again by the replay.

    Buffers of modules are found without this; it is for tensors that the function reaches in other ways.

    Args:
        *tensors: Tensors of any shape, dtype and device that do not require grad.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def capture(self) -> list[torch.Tensor]:
        """A copy of each tensor."""
        return copies([_writable(tensor.detach()) for tensor in self.tensors])

    def restore(self, value: list[torch.Tensor]) -> None:
        """Copies the values back; version counters do not move, so what autograd saved of them remains valid."""
        targets = [_writable(tensor.data) for tensor in self.tensors]
        for some in _alike(targets):
            if len(some) == 1:
                targets[some[0]].copy_(value[some[0]])
            else:
                _compat.copy_each([targets[i] for i in some], [value[i] for i in some])


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of each tensor. Small ones that are alike share memory and one operation: BatchNorms have many."""
    found: dict[int, torch.Tensor] = {}
    for some in _alike(tensors):
        if len(some) == 1:
            found[some[0]] = tensors[some[0]].clone()
        else:
            flat = torch.cat([tensors[i].view(-1) for i in some])
            parts = flat.split([tensors[i].numel() for i in some])
            found.update((i, part.view(tensors[i].shape)) for i, part in zip(some, parts, strict=True))
    return [found[i] for i in range(len(tensors))]


def _alike(tensors: Sequence[torch.Tensor]) -> Iterable[list[int]]:
    """The places of tensors that one operation can copy: small, dense and of one device and dtype; others alone."""
    groups: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        plain = type(tensor) is torch.Tensor and _small(tensor) and tensor.is_contiguous()
        groups.setdefault((tensor.dtype, tensor.device) if plain else i, []).append(i)
    return groups.values()


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    return each_once(tensor) if tensor.layout is torch.strided else tensor


DEFAULT: tuple[Ambient, ...] = (CPU_RNG,) if _compat.ACCELERATOR is None else (CPU_RNG, DEVICE_RNG)
"""The generators that every region looks after."""
_cpu_state = torch.default_generator.get_state


@contextlib.contextmanager
def _under(target: list[Any], present: list[Any]) -> Generator[None]:
    """Makes `target` the present settings. Dispatch modes only grow: one that watches the backward goes on watching."""
    flags, functions, dispatch = _compat.split_settings(target)
    old_flags, old_functions, old_dispatch = _compat.split_settings(present)
    missing = [mode for mode in dispatch if not any(mode is other for other in old_dispatch)]
    torch.autocast_increment_nesting()
    try:
        _compat.set_flags(flags)
        _compat.set_function_modes(functions)
        for mode in missing:
            _compat.push_dispatch_mode(mode)
        yield
    finally:
        for _ in missing:
            _compat.pop_dispatch_mode()
        _compat.set_function_modes(old_functions)
        _compat.set_flags(old_flags)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def _is_waited_for(tensor: torch.Tensor) -> bool:
    """Whether the running backward has yet to compute the gradient of `tensor`, so that a region may have used it."""
    return tensor.requires_grad and tensor.is_leaf and leads_to(tensor)


def _small(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.nbytes <= SMALL


_LAZY = frozenset({UninitializedParameter, UninitializedBuffer})
_quiet: Any = WeakIdKeyDictionary()  # large buffers that a call in training mode has left unchanged


_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


class _Hooks:
    """The hooks of modules that a forward found and left; who registers one for a forward alone takes it away then."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        some = [module.__dict__ for module in modules]
        hooked = [d for d in some if d.get("_forward_pre_hooks") or d.get("_forward_hooks")]
        every: list[dict[Any, Any]] = [d[name] for d in hooked for name in _HOOKS if name in d]
        self._kept = [(hooks, dict(hooks)) for hooks in every]

    def settle(self) -> None:
        """After the forward: what is gone already has removed itself and is not to run again."""
        if self._kept:
            self._kept = [(hooks, {key: then[key] for key in then if key in hooks}) for hooks, then in self._kept]

    @property
    def differ(self) -> bool:
        """Whether one of them is gone."""
        return any(key not in hooks for hooks, then in self._kept for key in then)

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Registers those again that are gone, in their order."""
        for hooks, then in self._kept:
            gone = [key for key in then if key not in hooks]
            if gone:
                every = {**then, **hooks}
                hooks.clear()
                hooks.update(every)
                stack.callback(_remove, hooks, gone)


def _remove(hooks: dict[Any, Any], keys: Sequence[Any]) -> None:
    for key in keys:
        hooks.pop(key, None)


class _Reached:
    """The tensors and modules that a region's function reaches, as the forward found them."""

    __slots__ = ("_buffers", "_copies", "_hooks", "_late", "_state", "_training", "_watched")

    def __init__(self, reach: Reach, cells: bool) -> None:
        self._training = [(module, module.training) for module in reach.modules]
        self._hooks = _Hooks(reach.modules)
        self._buffers = [(buffers, dict(buffers)) for buffers in reach.buffers()]
        self._watched: list[tuple[Seen, int]] = []
        self._late: list[torch.Tensor] = []  # buffers of a LazyModule, to which its first call gives memory
        copied: list[torch.Tensor] = []
        for seen in reach.mutable(cells):
            if type(seen.tensor) in _LAZY:
                self._late.append(seen.tensor)
                continue
            if seen.training and (_small(seen.tensor) or seen.tensor not in _quiet):
                copied.append(seen.tensor)
            self._watched.append((seen, version_of(seen.tensor)))
        self._watched.extend(
            (seen._replace(tensor=apart(seen.tensor)), version_of(seen.tensor))
            for seen in reach.parameters(cells)
            if type(seen.tensor) not in _LAZY
        )
        self._state = TensorState(*copied)
        self._copies = self._state.capture()

    def settle(self) -> None:
        self._hooks.settle()
        if self._copies:
            self._settle_copies()
        if self._late:  # they had no values before the forward; the replay may do to them what it likes
            self._state = TensorState(*self._state.tensors, *(tensor.detach() for tensor in self._late))
            self._copies = [*self._copies, *copies(self._state.tensors[len(self._copies) :])]
            self._late = []
        self._watched = [(seen._replace(tensor=apart(seen.tensor)), version) for seen, version in self._watched]

    def _settle_copies(self) -> None:
        changed = {id(seen.tensor) for seen, version in self._watched if version_of(seen.tensor) != version}
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        restored: set[int] = set()
        for tensor, copy in zip(self._state.tensors, self._copies, strict=True):
            if _small(tensor) or id(tensor) in changed:
                kept.append((tensor.detach(), copy))
                restored.add(id(tensor))
            else:
                _quiet[tensor] = None
        self._state, self._copies = TensorState(*[t for t, _ in kept]), [c for _, c in kept]
        self._watched = [(seen, version) for seen, version in self._watched if id(seen.tensor) not in restored]

    def check(self, region: str) -> None:
        for seen, version in self._watched:
            now = version_of(seen.tensor)
            if now != version and (seen.surely or _is_waited_for(seen.tensor)):
                raise errors.ChangedError(
                    f"{seen.label()}, which {region} reads, has been changed in place since the forward (version "
                    f"{version} then, {now} now): its replay would compute with other values than its forward.\n"
                    "  Change it after backward (optimizer.step() after loss.backward()). If the region itself "
                    "changes it, say so: recompute(fn, state=[torch_recompute.state.TensorState(tensor)])."
                )

    def restore(self, stack: contextlib.ExitStack) -> None:
        for buffers, then in self._buffers:  # a buffer may be replaced rather than written to
            stack.callback(buffers.update, dict(buffers))
            buffers.update(then)
        if self._copies:
            stack.callback(self._state.restore, self._state.capture())
            self._state.restore(self._copies)
        self._hooks.restore(stack)
        for module, training in self._training:
            if module.training is not training:
                stack.callback(setattr, module, "training", module.training)
                module.training = training

    def restored(self) -> frozenset[int]:
        return frozenset(map(_compat.storage_id, self._state.tensors))

    @property
    def differs(self) -> bool:
        return bool(self._copies or self._buffers or self._hooks.differ) or any(
            module.training is not training for module, training in self._training
        )


class World:
    """What one call of a region may depend on besides its arguments, taken when it is entered.

    Args:
        reach: What the region's function reaches.
        ambients: Consumables: random generators and the user's `state=`.
        cells: Whether to watch the tensors in closure cells; not where a store keeps copies of them.
    """

    __slots__ = ("_consumed", "_context", "_cpu", "_reached", "_settings")

    def __init__(self, reach: Reach | None, ambients: Sequence[Ambient], cells: bool) -> None:
        self._settings = _compat.settings()
        self._context = contextvars.copy_context()
        self._cpu: torch.Tensor | None = None  # every region's first ambient, taken without the detour
        if ambients and ambients[0] is CPU_RNG:
            self._cpu = _cpu_state()
            ambients = ambients[1:]
        self._consumed: Sequence[tuple[Ambient, Any]] = ()
        if ambients:
            self._consumed = [(ambient, ambient.capture()) for ambient in ambients]
        self._reached = None if reach is None or reach.idle(cells) else _Reached(reach, cells)

    def settle(self) -> None:
        """After the forward: forgets what it did not touch, and takes the kernels that it chose for good."""
        _compat.update_kernels(self._settings)
        if self._cpu is not None and _compat.same_bytes(self._cpu, _cpu_state()):
            self._cpu = None
        if self._consumed:
            self._consumed = [
                (ambient, before)
                for ambient, before in self._consumed
                if type(ambient) not in GENERATORS or not same(before, ambient.capture())
            ]
        if self._reached is not None:
            self._reached.settle()

    def forget(self) -> None:
        """After a forward that has failed: lets go of everything."""
        self._cpu = None
        self._consumed = ()
        self._reached = None

    def restored(self) -> frozenset[int]:
        """The storages of the tensors that have other contents during a replay than outside of it."""
        return _NOTHING if self._reached is None else self._reached.restored()

    def check(self, region: str) -> None:
        """Before a replay: raises if a weight or buffer that the function reaches has been changed since."""
        if self._reached is not None:
            self._reached.check(region)

    def run(self, region: str, fn: Callable[..., Any], *args: Any) -> None:
        """Calls `fn(*args)` with the world as it was taken, and puts the present one back afterwards."""
        present = _compat.settings()
        reached = self._reached
        context = self._context.copy()  # a context cannot be entered twice, and replays may nest
        consumed = self._consumed if self._cpu is None else [(CPU_RNG, self._cpu), *self._consumed]
        if not consumed and present == self._settings and (reached is None or not reached.differs):
            context.run(fn, *args)
            return
        with _exclusive, contextlib.ExitStack() as stack:
            for ambient, before in consumed:
                if elsewhere(ambient, before):
                    stack.enter_context(undrawn(ambient, region))
                    continue
                stack.callback(ambient.restore, ambient.capture())
                ambient.restore(before)
            if reached is not None:
                reached.restore(stack)
            if present != self._settings:
                stack.enter_context(_under(self._settings, present))
            context.run(fn, *args)


_exclusive = threading.RLock()
"""Held by a replay that puts something back which all threads share: generators, buffers, `training` flags."""

_NOTHING: frozenset[int] = frozenset()


def advanced(ambients: Sequence[Ambient], before: Sequence[Any]) -> list[tuple[Ambient, Any]]:
    """The consumables that a saved call has advanced, each with its state after the call."""
    after = [(ambient, ambient.capture()) for ambient in ambients]
    return [
        (ambient, now)
        for (ambient, now), old in zip(after, before, strict=True)
        if type(ambient) not in GENERATORS or not same(old, now)
    ]
