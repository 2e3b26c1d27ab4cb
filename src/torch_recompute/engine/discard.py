"""Dropping a region's result after its consumer has run.

A region frees what is inside it; its result stays alive, because the consumer saves it. Written as `recompute(lambda x:
no_recompute(consumer)(fn(x)))` the result is inside and is freed too. Code in the style of Megatron's and OLMo's
classes says it in two calls instead: run `fn` now, and later, when the consumer has run, name a tensor computed from
it.

Idea. PyTorch lets hooks be put on a tensor that a node *has* saved. So the consumer runs as it always does; then the
graph between the named tensor and the result is walked, and each saved tensor that is the result, or a view of it, is
replaced by a slot of the region. From there on it is the engine's ordinary business: the first slot that is opened
replays the region, which fills its own slots and those, and each rebuilt tensor dies when its node has read it.

Nothing is resized, no storage is swapped, no hook is put on a gradient, no backward runs inside another. So what cannot
be replaced is merely not freed: a tensor that a custom Function stashed on `ctx`, one that the caller still holds, one
saved by an operation that the named tensor does not depend on. It is right all the same.

An input of another region may be such a result, and would keep it alive. It is held by a `DeferredInput`: the tensor
for now, and once the output has been discarded the slot from which it is rebuilt. No caller has to say which regions
form a chain, nor in which order they are discarded.

The walk ends at the result and at nodes older than it, by autograd's sequence numbers: a few microseconds per node of
the consumer. In a region around this one nothing is done here: that one keeps neither tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from .. import _torch, errors
from .._torch import graphs, parameter_of, storage_id
from .._torch.tensors import meta, say
from ..state.tape import thread
from .region_call import Options, RegionCall
from .saved_call import SavedCall
from .slots import Slot, lend, unpack
from .taken import Taking


class _ResultOwner(Protocol):
    """The object that discards a result later."""

    def waits_for(self, late: DeferredInput) -> None:
        """Notes an input that is one of its results, or a view of one."""
        ...


class DeferredInput:
    """One input of a region, held as a tensor until it is given a slot."""

    __slots__ = ("__weakref__", "_region", "_slot", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, region: str) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self._region = region
        self._slot: Slot | None = None

    def give(self, slot: Slot | None) -> None:
        """Drops the tensor, which from now on comes out of the slot; without one it is kept."""
        if slot is not None:
            self.tensor, self._slot = None, slot

    def open(self) -> torch.Tensor:
        """The tensor, for a replay."""
        if self.tensor is None:
            return lend(self._slot)
        if self.tensor._version != self.version:
            text = errors.changed_input(self._region, "an argument", self.version, self.tensor._version)
            raise errors.ChangedError(text)
        return self.tensor


class DeferredStore:
    """The store of a region with such an input. The other inputs stay where they are, too."""

    __slots__ = ("_region",)

    def __init__(self, region: str) -> None:
        self._region = region

    def put(self, tensor: torch.Tensor) -> DeferredInput:
        """Holds the tensor, and says so to whom it will be taken from."""
        late = DeferredInput(tensor, self._region)
        ref = thread.waiting.get(storage_id(tensor))
        owner = None if ref is None else ref()
        if owner is not None:
            owner.waits_for(late)
        return late

    def get(self, handle: DeferredInput) -> torch.Tensor:
        """The tensor, rebuilt if need be."""
        return handle.open()


def store_for(
    region: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DeferredStore | None:
    """The store of a region with these inputs; None where none of them waits to be discarded."""
    taking = Taking(region, None)
    for value in (*args, *kwargs.values()):
        taking.take(value, "")
    taking.function(fn)
    return DeferredStore(region) if any(storage_id(tensor) in thread.waiting for tensor in taking.given) else None


def _wait(storage: int, owner: _ResultOwner) -> None:
    """Notes a result that waits to be discarded. The entry dies with its owner, which holds the result."""
    results = thread.waiting

    def forget(ref: weakref.ref[_ResultOwner]) -> None:
        if results.get(storage) is ref:
            del results[storage]

    results[storage] = weakref.ref(owner, forget)


class Results(SavedCall):
    """Slots that are views of a region's results."""

    __slots__ = ()

    def check(self, region: str, inputs: Sequence[torch.Tensor]) -> None:
        """Compares the results of a replay with those of the forward."""
        now = [meta(tensor) for tensor in inputs]
        if now != self._metas:
            then, found = (", ".join(map(say, metas)) for metas in (self._metas, now))
            raise errors.MismatchError(
                f"the replay of {region} returned other tensors than its forward, and its output was discarded:\n"
                f"      forward: {then}\n      replay:  {found}\n{errors.WHY}"
            )


def _not_a_consumer(region: str, hook: object, itself: bool) -> str:
    """Text for a hook tensor that was not computed from the output."""
    what = "the output itself" if itself else f"{errors.say(hook)}, which was not computed from the output"
    return (
        f"discard_output_and_register_recompute: the tensor given for {region} is {what}, so there is no operation "
        "that could let go of it.\n"
        "  Pass the result of what consumes the output:  y = consumer(h);  "
        "odc.discard_output_and_register_recompute(y)"
    )


class Discard:
    """One call of a region, whose results are dropped when their consumer has run.

    Attributes:
        result: What the function returned.
    """

    def __init__(self, options: Options, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outer = thread.run
        # not stopped early: the work after its last slot is needed too, the result
        make, options = options.make or RegionCall, options._replace(early_stop=False)
        call = make(options, fn, args, kwargs, outer)
        inside = call.taking.storages
        self.result = call.forward(fn, args, kwargs, outer)
        self._region_call = call.final
        self._late: list[weakref.ref[DeferredInput]] = []
        self._tensors = _torch.tensors_in(self.result)
        self._places: dict[int, int] = {}  # by storage, which of the tensors it is of
        self._nodes: set[Any] = set()
        if outer is None:  # else the region around this one keeps nothing of it anyway
            for i, tensor in enumerate(self._tensors):
                storage = storage_id(tensor)
                if storage and storage not in inside and parameter_of(tensor) is None:
                    self._places.setdefault(storage, i)
                    self._nodes.add(tensor.grad_fn)
                    _wait(storage, self)
        self._nodes.discard(None)
        self._versions = [tensor._version for tensor in self._tensors]

    def waits_for(self, late: DeferredInput) -> None:
        """Notes an input of another region that is one of the results."""
        self._late.append(weakref.ref(late))

    def drop(self, hook: torch.Tensor) -> None:
        """Puts slots in the place of the results, wherever they were saved on the way to `hook`; the last thing done.

        Raises:
            ArgumentError: `hook` was not computed from a result.
            ChangedError: A result has been changed in place.
        """
        try:
            if self._nodes:
                nodes = list(self._between(hook))
                for then, tensor in zip(self._versions, self._tensors, strict=True):
                    if tensor._version != then:
                        raise errors.ChangedError(
                            f"the output of {self._region_call.name} has been changed in place since (version {then} "
                            f"then, {tensor._version} now), so what would be rebuilt is not what its consumers saved.\n"
                            "  Change a copy (h = h * 2, not h.mul_(2)), or do it inside the function that is "
                            "recomputed."
                        )
                self._replace(nodes)
        finally:
            self._end()

    def hand_over(self) -> None:
        """Lets only the regions that took a result rebuild it; the last thing done.

        A result that has been changed in place meanwhile stays with them as it is.
        """
        try:
            if all(tensor._version == then for then, tensor in zip(self._versions, self._tensors, strict=True)):
                self._replace([])
        finally:
            self._end()

    def _end(self) -> None:
        for storage in self._places:
            thread.waiting.pop(storage, None)
        del self._region_call, self._tensors, self._nodes, self.result

    def _replace(self, nodes: list[Any]) -> None:
        region_call, tensors = self._region_call, self._tensors
        results = region_call.later = Results(region_call.name, tensors)

        def slot_for(tensor: torch.Tensor) -> Slot | None:
            index = self._places.get(storage_id(tensor))
            return None if index is None else results.slot(self._region_call, tensor, index, self._tensors[index])

        for node in nodes:
            graphs.replace_saved(node, slot_for, unpack)
        for ref in self._late:
            late = ref()
            if late is not None and late.tensor is not None:
                late.give(slot_for(late.tensor))
        if not results.needed:
            region_call.later = None

    def _between(self, hook: torch.Tensor) -> Iterator[Any]:
        """The nodes from `hook` down to the results."""
        oldest = min(map(_torch.sequence_of, self._nodes))
        todo: list[Any] = [hook.grad_fn]
        seen: set[Any] = {None}
        while todo:
            node = todo.pop()
            if node not in seen and (node in self._nodes or _torch.sequence_of(node) >= oldest):
                seen.add(node)
                if node not in self._nodes:
                    todo.extend(following for following, _ in node.next_functions)
                    yield node
        if seen.isdisjoint(self._nodes) or hook.grad_fn in self._nodes:
            raise errors.ArgumentError(_not_a_consumer(self._region_call.name, hook, hook.grad_fn in self._nodes))
