"""The tensors that a region was given, between its forward and its replays.

Without a store they are kept where they are, with their versions, so that a change in place is noticed. What is held
is detached, unless it is a leaf that requires grad: the tensor itself may get a history later that leads back to the
region (`h += recompute(block)(h)`), and a cycle through the graph is never collected. A replay gets fresh leaves over
the same memory, with the attributes that the tensor had (`h.tag = 1`); two arguments that were one tensor are one
tensor again, because code asks (`k is v` in attention).

An input may be the result of a region whose output will be discarded (`discard.py`), and would keep it alive. It is
held by a `DeferredInput`: the tensor for now, and once the output has been discarded the slot from which it is rebuilt.
No caller has to say which regions form a chain, nor in which order they are discarded.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Protocol

import torch

from .. import errors
from .._torch import is_parameter, storage_id
from .._torch.tensors import apart, wants_grad
from ..stores import Hooks, Kept, Store
from .arguments import Call
from .shape_only import ShapeOnly, missing
from .slots import Slot, lend


class _Detached:
    """An input that is part of a graph, held without it."""

    __slots__ = ("tensor",)
    tensor: torch.Tensor


_ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})
_attributes_of: Callable[[torch.Tensor], dict[str, Any]] = operator.attrgetter("__dict__")


class Around(Hooks):
    """The region around this one, as its store.

    It counts what it is given, and so it is given a tensor that is passed twice twice: its replay may find two tensors
    there, as where one is a carried value, and has to count the same.
    """


class Inputs:
    """The tensors among a call's arguments, then those in the cells of its function's closure.

    Attributes:
        given: The tensors themselves, while the forward runs.
        ids: Identity and version of each while the forward runs; empty where a store keeps copies.
        views: Whether a tensor that is no view of an input may have the memory of one, since an input is a view itself.
    """

    __slots__ = (
        *("_attributes", "_call", "_held", "_shared", "_spoiled", "_storages", "_store", "_versions"),
        *("given", "ids", "views"),
    )

    def __init__(self, call: Call, cells: Sequence[torch.Tensor], store: Store | None, region: str) -> None:
        self._call, self._store = call, store
        self._spoiled: tuple[int, int] | None = None
        self._storages: set[int] | None = None
        self._attributes: dict[int, dict[str, Any]] = {}
        self.views = False
        leaves = call.leaves
        given: list[torch.Tensor] = [*map(leaves.__getitem__, call.tensors), *cells]
        for i in call.tensors:
            leaves[i] = None
        self._held: list[Any] = []
        self._versions: list[int] = []
        ids: dict[int, int] = {}
        hold, holds = self._hold, self._held.append
        for n, tensor in enumerate(given):
            # One made in inference mode has no version: a copy has, and what reads it now reads the tensor itself.
            tensor = given[n] = tensor.clone() if tensor.is_inference() else tensor
            self._versions.append(tensor._version)
            if tensor.__dict__:
                self._attributes[n] = dict(tensor.__dict__)
            if id(tensor) in ids:
                holds(self._again(tensor, given))
                continue
            ids[id(tensor)] = tensor._version
            view = tensor._is_view()
            self.views = self.views or view
            if store is not None or view or type(tensor) not in _ORDINARY:
                holds(hold(region, tensor))
            elif not tensor.requires_grad:  # from here on as `_hold` does, for tensors that are no views
                holds(tensor.detach() if tensor.is_floating_point() or tensor.is_complex() else tensor)
            elif tensor.is_leaf:
                holds(tensor)
            else:
                detached = _Detached()
                detached.tensor = tensor.detach()
                holds(detached)
        self.given: Sequence[torch.Tensor] = given
        self.ids: dict[int, int] = ids if store is None else {}
        self._shared = len(ids) != len(given)

    def _again(self, tensor: torch.Tensor, given: Sequence[torch.Tensor]) -> Any:
        """Returns the object by which a tensor is held that is passed again: one tensor stays one."""
        if isinstance(self._store, Around):
            self._store.put(tensor)
        return next(held for held, one in zip(self._held, given, strict=False) if one is tensor)

    def _hold(self, region: str, tensor: torch.Tensor) -> Any:
        if type(tensor) is ShapeOnly:
            raise missing(tensor, f"the region {region}, whose input it is")
        if self._store is not None:
            return tensor if is_parameter(tensor) else Kept(self._store, tensor, region)
        held = apart(tensor)
        if held is tensor or not wants_grad(tensor):
            return held
        detached = _Detached()
        detached.tensor = held
        return detached

    @property
    def storages(self) -> set[int]:
        """The storages of the inputs, where there is no store."""
        if self._storages is None:
            held = self._held if self._store is None else ()
            self._storages = {storage_id(h.tensor if type(h) is _Detached else h) for h in held} - {0}
        return self._storages

    def settle(self) -> None:
        """After the forward: drops the tensors themselves, of which a store has copies."""
        for n, tensor in enumerate(self.given):
            if tensor._version != self._versions[n]:
                self._spoiled = n, tensor._version
        self.given = ()

    def forget(self) -> None:
        """Drops everything: there will be no replay."""
        self._held, self._call.leaves, self._attributes = [], [], {}

    def open(
        self, region: str | None = None
    ) -> tuple[Sequence[Any], dict[str, Any], Sequence[torch.Tensor], Container[int]]:
        """Returns a replay's arguments, keyword arguments and closure tensors, and ids that the graph may hold.

        Args:
            region: The name of the region that is replayed; None to open the arguments even if they have changed.

        Raises:
            ChangedError: An argument has been changed in place, by the region itself or since.
        """
        if region is not None and self._spoiled is not None:
            raise self._changed(region, *self._spoiled)
        call, tensors = self._call, list[torch.Tensor]()
        checked = len(call.tensors) if region is not None and self._store is None else 0
        opened: dict[int, torch.Tensor] = {}  # by what is held: of one tensor that was passed twice one is made
        for n, held in enumerate(self._held):
            tensor = opened.get(id(held)) if self._shared else None
            if tensor is None:
                if type(held) is Kept:
                    tensor = held.open()
                else:
                    detached = type(held) is _Detached
                    tensor = held.tensor if detached else held
                    if n < checked and tensor._version != self._versions[n]:
                        raise self._changed(str(region), n, tensor._version)
                    if detached:
                        tensor = tensor.detach().requires_grad_()
                    elif not tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex()):
                        tensor = tensor.detach()  # what the replay does to it must not stay
                opened[id(held)] = tensor
            tensors.append(tensor)
        for n, found in self._attributes.items():
            if tensors[n] is not self._held[n]:  # else it is the caller's own, with the attributes that it has now
                _attributes_of(tensors[n]).update(found)
        leaves = list(call.leaves)
        for i, tensor in zip(call.tensors, tensors, strict=False):
            leaves[i] = tensor
        args, kwargs = (leaves, {}) if call.flat else call.arguments(leaves)
        return args, kwargs, tensors[len(call.tensors) :], set(map(id, tensors)) if self._store is None else ()

    def _changed(self, region: str, n: int, now: int) -> errors.ChangedError:
        """The error for an argument that has been changed in place."""
        places = self._call.tensors
        label = self._call.label(places[n]) if n < len(places) else "a closure variable"
        return errors.ChangedError(errors.changed_input(region, label, self._versions[n], now))


class ResultOwner(Protocol):
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
        if (owner := waiting.owner(storage_id(tensor))) is not None:
            owner.waits_for(late)
        return late

    def get(self, handle: DeferredInput) -> torch.Tensor:
        """The tensor, rebuilt if need be."""
        return handle.open()


class Waiting(threading.local):
    """The results of this thread that wait to be discarded, by storage; each entry dies with its owner.

    The owner holds the result, so that the storage's identity means something. A plain dict, because every region
    asks whether it is empty.
    """

    def __init__(self) -> None:
        self.results: dict[int, weakref.ref[ResultOwner]] = {}

    def put(self, storage: int, owner: ResultOwner) -> None:
        """Notes that a result waits."""
        results = self.results

        def forget(ref: weakref.ref[ResultOwner]) -> None:
            if results.get(storage) is ref:
                del results[storage]

        results[storage] = weakref.ref(owner, forget)

    def owner(self, storage: int) -> ResultOwner | None:
        """Returns the object that discards this result later; None where there is none."""
        ref = self.results.get(storage)
        return None if ref is None else ref()


waiting = Waiting()


def store_for(region: str, tensors: Iterable[torch.Tensor]) -> DeferredStore | None:
    """The store of a region with these inputs; None where none of them waits to be discarded."""
    return DeferredStore(region) if any(storage_id(tensor) in waiting.results for tensor in tensors) else None
