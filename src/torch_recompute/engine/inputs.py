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

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Protocol

import torch

from .. import errors
from .._torch import is_parameter, storage_id, version_of
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
_is_view = operator.methodcaller("_is_view")
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
        self._call = call
        self._store = store
        self._spoiled: tuple[int, int] | None = None
        self._storages: set[int] | None = None
        leaves = call.leaves
        self.given: Sequence[torch.Tensor]
        self.given = given = [*map(leaves.__getitem__, call.tensors), *cells]
        for i in call.tensors:
            leaves[i] = None
        self._versions = versions = [*map(version_of, given)]
        ids = dict(zip(map(id, given), versions, strict=True))
        self.ids: dict[int, int] = ids if store is None else {}
        self._shared = len(ids) != len(given)
        self._attributes: dict[int, dict[str, Any]] = {}
        if any(map(_attributes_of, given)):
            self._attributes = {n: dict(found) for n, found in enumerate(map(_attributes_of, given)) if found}
        self.views = any(map(_is_view, given))
        self._held: list[Any] = []
        if store is not None or self.views or self._shared or not _ORDINARY.issuperset(map(type, given)):
            hold = functools.partial(self._hold, region)
            self._held = [*map(hold, given)] if not self._shared else self._each_once(given, hold)
            return
        for tensor in given:  # as `_hold` does, for tensors that are no views
            held: Any = tensor
            if not tensor.requires_grad:
                held = tensor.detach()
            elif not tensor.is_leaf:
                held = _Detached()
                held.tensor = tensor.detach()
            self._held.append(held)

    def _each_once(self, given: Sequence[torch.Tensor], hold: Callable[[torch.Tensor], Any]) -> list[Any]:
        """Holds tensors of which some are passed more than once: one tensor stays one."""
        held: dict[int, Any] = {}
        for tensor in given:
            if id(tensor) not in held:
                held[id(tensor)] = hold(tensor)
            elif isinstance(self._store, Around):
                self._store.put(tensor)
        return [held[id(tensor)] for tensor in given]

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
        """After the forward: lets go of the tensors themselves, of which a store has copies."""
        for n, tensor in enumerate(self.given):
            if tensor._version != self._versions[n]:
                self._spoiled = n, tensor._version
        self.given = ()

    def forget(self) -> None:
        """Lets go of everything: there will be no replay."""
        self._held, self._call.leaves, self._attributes = [], [], {}

    def check(self, region: str) -> None:
        """Before a replay: raises if an argument has been changed in place, by the region itself or since."""
        found = self._spoiled
        if self._store is None:
            for n in range(len(self._call.tensors)):
                held = self._held[n]
                version = (held.tensor if type(held) is _Detached else held)._version
                if version != self._versions[n]:
                    found = n, version
                    break
        if found is not None:
            n, now = found
            places = self._call.tensors
            label = self._call.label(places[n]) if n < len(places) else "a closure variable"
            raise errors.ChangedError(errors.changed_input(region, label, self._versions[n], now))

    def open(self) -> tuple[Sequence[Any], dict[str, Any], Sequence[torch.Tensor], Container[int]]:
        """Returns a replay's arguments, keyword arguments and closure tensors, and ids that the graph may hold."""
        opened: dict[int, torch.Tensor] = {}  # by what is held: of one tensor that was passed twice one is made
        tensors: list[torch.Tensor] = []
        for held in self._held:
            tensor = opened.get(id(held))
            if tensor is None:
                if type(held) is _Detached:
                    tensor = held.tensor.detach().requires_grad_()
                elif type(held) is Kept:
                    tensor = held.open()
                else:
                    tensor = held if held.requires_grad else held.detach()  # what the replay does to it must not stay
                opened[id(held)] = tensor
            tensors.append(tensor)
        for n, found in self._attributes.items():
            _attributes_of(tensors[n]).update(found)
        leaves = list(self._call.leaves)
        for i, tensor in zip(self._call.tensors, tensors, strict=False):
            leaves[i] = tensor
        args, kwargs = (leaves, {}) if self._call.flat else self._call.arguments(leaves)
        ids = set(map(id, tensors)) if self._store is None else ()
        return args, kwargs, tensors[len(self._call.tensors) :], ids


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
        """Lets go of the tensor, which from now on comes out of the slot; without one it is kept."""
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
        owner = waiting.owner(storage_id(tensor))
        if owner is not None:
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
