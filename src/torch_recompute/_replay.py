"""One replay of a region's call: its function run again, to fill the slots that backward still waits for.

The replay's pack hook meets as many tensors in the same order as the forward's did and puts each, detached, into the
slot of its turn, if it has one: what the forward kept in the graph is passed by. So the forward alone tells inputs and
stored outputs from the rest. A replay could not: one tensor of the forward may be two there, if it is an input and also
a global, a carried value, or the output of a saved call.

Returning the tensor itself from a pack hook would tie an operation's output to its own node and leak (softmax, exp), so
what the replay's own graph holds is the detached tensor too; that graph is dropped at once.

Where it ends is said in `region.py`. Ending means raising `Stop` through the user's function; nothing else leaves it.
A module that ends after the last slot was filled ends the replay before its own forward hooks run: backward is inside
that module, and under ZeRO-3 its forward hook would take away the weights that the next node reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from . import _compat, _tree, errors
from ._compat import storage_id
from ._hollow import Hollow, missing
from ._mismatch import Fingerprints, reader_of
from ._saved_call import SavedCall
from ._slots import KEPT, Packed, Slot, Stop, unpack, without_history
from ._tree import meta
from .state import copies
from .values import Key, Run, thread

if TYPE_CHECKING:
    from ._frame import Frame


class Replay(Run):
    """One replay of a frame: fills the slots that are still open, then stops."""

    __slots__ = (
        "_borrowed",
        "_check",
        "_done",
        "_fingerprints",
        "_frame",
        "_ids",
        "_last",
        "_module_hook",
        "_restored",
        "_slots",
        "_stop",
        "_unfinished",
        "filled",
    )

    def __init__(self, frame: Frame, ids: Container[int], stop: Key | None) -> None:
        super().__init__(frame.name, frame.trace, True, frame.ambients)
        self._frame = frame
        self._stop = stop
        self._last = stop[0] if stop is not None and stop[1] == math.inf else -1
        self._slots = frame.slots
        self._unfinished = -1
        self._fingerprints = None if frame.fingerprints is None else Fingerprints()
        self._check = frame.options.check != "none"
        self._done = False
        self._module_hook: RemovableHandle | None = None
        self.filled = 0
        self._ids = ids
        self._restored = frame.restored
        self._borrowed: list[tuple[Slot, torch.Tensor]] = []

    def go(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Runs the function under the hooks, as far as it is needed."""
        _compat.push_hooks(self.pack, unpack)
        try:
            result = fn(*args, **kwargs)
        except Stop as stop:
            if stop.args[0] is not self:
                raise
            return
        finally:
            _compat.pop_hooks()
            if self._module_hook is not None:
                self._module_hook.remove()
            if self._borrowed:  # before the world is put back, and running statistics with it
                self._keep_borrowed()
            if self._fingerprints is not None:
                self._fingerprints.flush()
        expected = len(self._frame.slots)
        if self.filled < expected and not self._done:
            waiting = [slot for ref in self._slots[self.filled :] if (slot := ref()) is not None]
            op = reader_of(waiting[0]) if waiting else ""
            raise errors.MismatchError(errors.fewer(self.name, expected, self.filled, op))
        if self._frame.later is not None:
            results = [leaf for leaf in _compat.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self._frame.later.check(self.name, results)
            self._frame.later.fill(self.name, results, self._restored)

    def _keep_borrowed(self) -> None:
        """Fills slots with what will have other contents after the replay.

        What the function has changed since it was saved keeps its version, so that its reader is told, as by autograd.
        """
        kept = copies([tensor for _, tensor in self._borrowed])
        for (slot, tensor), copy in zip(self._borrowed, kept, strict=True):
            changed = tensor._version != slot.version
            slot.version = slot.version if changed else copy._version
            slot.tensor = tensor if changed else copy

    def saved(self) -> int:
        """How many tensors autograd has saved by now."""
        return self.filled

    def skip(self, saved: int, records: int, children: int) -> bool:
        """Goes on at the moment at which a value was saved.

        The function might do the work all the same and fill the wrong slots, so from here on the replay does not stop
        early: it runs to its end, and the number of slots must come out exactly.
        """
        if (saved, records, children) == (self.filled, self._record, self._child):
            return True
        skipped = super().skip(saved, records, children)
        if skipped:
            self.filled = saved
            self._last = -1
            self._stop = None
        return skipped

    def event(self) -> None:
        """Ends the replay if every open slot has been filled."""
        if self._done:
            raise Stop(self)

    def _module_ends(self, *_: Any) -> None:
        if thread.run is self:
            raise Stop(self)

    @_compat.see_through
    def pack(self, tensor: torch.Tensor, finished: bool = False) -> Packed:
        """The pack hook of the replay: fills the next slot."""
        index = self.filled
        ref = self._slots[index] if index < len(self._slots) else None
        if ref is KEPT:
            self.filled = index + 1
            return tensor, tensor._version
        if self._done:
            raise Stop(self)
        self.filled = index + 1
        slot = None if ref is None else ref()
        if type(tensor) is Hollow:
            raise missing(tensor, "autograd, which saves it")
        rebuilt = tensor.detach()
        restored = self._restored and storage_id(tensor) in self._restored
        if slot is not None:
            if self._check and (slot.meta != meta(tensor) or id(tensor) in self._ids):
                self._differs(slot, index, tensor)
            slot.stream = _compat.stream_for(rebuilt) if self._frame.streams else None
            slot.version = rebuilt._version  # before the tensor: another thread may be waiting for that
            if restored:
                self._borrowed.append((slot, rebuilt))
            else:
                slot.tensor = rebuilt
        elif ref is None and self._frame.complete:  # else for a backward inside its own forward, not there yet
            raise errors.MismatchError(errors.more(self.name, len(self._slots)))
        if self._fingerprints is not None and not restored:
            self._fingerprints.add(index, tensor)
        if not tensor.requires_grad:
            self._unfinished = _compat.sequence_number()
        if index == self._last:
            self._done = True
            if finished or (tensor.requires_grad and self._unfinished != _compat.sequence_number()):
                raise Stop(self)
            self._module_hook = register_module_forward_hook(self._module_ends)
        return rebuilt

    def put(self, tensor: torch.Tensor) -> Packed:
        """Keeps an input of a region inside this one; it is finished, whether it requires grad or not."""
        return without_history(self.pack(tensor, finished=True))

    def _differs(self, slot: Slot, index: int, tensor: torch.Tensor) -> None:
        then, now = _tree.say(slot.meta), _tree.say(meta(tensor))
        if id(tensor) in self._ids:
            now += ", an input of the region"
        raise errors.MismatchError(
            f"the replay of {self.name} saved another tensor than its forward at position {index}:\n"
            f"      forward: {then}\n"
            f"      replay:  {now}\n"
            "  (Recomputed values for the following tensors have different metadata than during the forward pass.)"
            f"{errors.needed_by(reader_of(slot))}\n{errors.WHY}"
        )

    def compare_values(self) -> None:
        """With `check="values"`, compares strides and bits of what was rebuilt with the forward's."""
        then, now = self._frame.fingerprints, self._fingerprints
        if then is None or now is None:
            return
        found = then.difference(now)
        if found is not None:
            index, was, new = found
            raise errors.MismatchError(
                f"the replay of {self.name} saved a tensor with other values than its forward at position {index}; "
                f"those before it are the same to the last bit.{errors.needed_by(reader_of(self._slots[index]()))}\n"
                f"      forward: {was}\n"
                f"      replay:  {new}\n"
                f"{errors.REASONS}"
            )

    def saved_call(self, record: SavedCall, inputs: Sequence[torch.Tensor]) -> None:
        """Fills the slots of a saved call of this frame; the replay may end here."""
        record.fill(self.name, inputs, self._restored)
        if self._stop == record.key or not record.finished or record.dropped:
            raise Stop(self)
