"""Saved calls: what `no_recompute` keeps in forward, and what it does instead of the call in a replay.

In forward the call runs under its own pack hook, which sorts by storage what autograd saves (see `region.py`). What
the record keeps for the replay is the least that lets later code run as it did: the output, unless it is a view of
something that the replay has; the contents of inputs that the call changed in place; the state of every generator
that it advanced, so that random numbers drawn after the call are the same ones. Of a call whose result is said to be
values_unused, the output's layout alone is kept, and a replay gets a tensor without values
(`engine/shape_only.py`), which can stand in for a plain one; a tensor subclass or a sparse one is kept.

A saved call belongs to the record of the innermost region. Replays of outer regions reach it as well and get the
same output, so a saved call runs once at any depth.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from .. import _torch, errors
from .._torch import is_parameter, parameter_of, storage_id, tracing, version_of
from .._torch.tensors import layout, meta, say, wants_grad
from ..state import Ambient, advanced
from ..state.observer import Observers, here
from ..state.tape import Entry, Run, inside, thread
from ..state.values import without_graph
from ..stores import Store, Stored
from .slots import Owner, Packed, Slot, check_values, unpack
from .taken import PLAIN, Taking, content_of, labelled
from .views import WHOLE, AnyGeometry, geometry

if TYPE_CHECKING:
    from .shape_only import TensorLayout


class View(NamedTuple):
    """An output that is a view of input number `source` of the call; `geometry` None where it is that input itself."""

    source: int
    geometry: AnyGeometry | None
    grad: bool


class Kept(NamedTuple):
    """A tensor that is kept: on the device with its version, or in a store."""

    packed: tuple[torch.Tensor, int] | Stored
    grad: bool


class Unkept(NamedTuple):
    """An output of which a replay needs the layout only."""

    layout: TensorLayout
    grad: bool


class Then(Enum):
    """The ways in which a replay of its own region goes on from a saved call."""

    ENDS_BEFORE = "ends: the forward has not returned from the call, and a backward inside it needs its inputs"
    TAKES = "takes the stored output"
    ENDS = "ends: the output has been dropped, because no replay was to get past the call"
    MAKES_AGAIN = "makes the call again for its values, which were said not to be needed"
    REPEATS = "makes the call again with history, because a gradient is asked for through it inside the region"
    REFILLS = "makes the call again and fills what it had stored, which is gone"


ENDINGS = (Then.ENDS_BEFORE, Then.ENDS)


class Owning(Owner, Protocol):
    """The interface a saved call needs from its region call."""

    saved_call: type[SavedCall]
    taking: Taking
    observers: Observers | None


class Scope(Protocol):
    """The interface a saved call needs from the forward around it."""

    alive: dict[int, int]  # versions of its inputs and parameters by identity, while the forward runs

    @property
    def region_call(self) -> Owning:
        """The call whose forward it is."""
        ...

    def alias(self, record: SavedCall) -> None:
        """Notes what a saved call has kept on the device: while the forward runs, the graph may hold it."""
        ...


class Filling(Protocol):
    """The interface a saved call needs from the replay that fills its slots."""

    name: str

    def fill(self, slot: Slot, rebuilt: torch.Tensor) -> None:
        """Fills a slot."""
        ...


def _other_inputs(region: str, call: str, position: int, then: str, now: str) -> str:
    """Text for a saved call that a replay reached with other inputs."""
    return (
        f"the replay of {region} reached the saved call {call} with another tensor than its forward as input "
        f"{position}:\n      forward: {then}\n      replay:  {now}\n{errors.WHY}"
    )


class SavedCall(Entry):
    """The record of one saved call.

    Attributes:
        then: What a replay does that comes to it.
        values_unused: Whether the values of its output are said not to be needed.
        pure: Whether it is known to draw no random numbers, to change nothing and to return memory of its own.
    """

    can_be_emptied = False  # whether a replay may have to make it again, though nothing went wrong
    then = Then.ENDS_BEFORE
    _outputs: Sequence[Any] | None = None
    _spec: Any = None
    _mutated: Sequence[tuple[int, Kept]] = ()
    _after: Sequence[tuple[Ambient, Any]] = ()

    def __init__(
        self, name: str, inputs: Sequence[torch.Tensor], values_unused: bool = False, pure: bool = False
    ) -> None:
        self.name = name
        self.pure = pure
        self.values_unused = values_unused
        self._metas = [*map(meta, inputs)]
        self._views: list[tuple[weakref.ref[Slot], int, AnyGeometry]] = []
        self._leaving: list[Stored] = []

    @property
    def needed(self) -> bool:  # type: ignore[override]
        """Whether backward still waits for a view of one of the call's inputs."""
        return any(ref() is not None for ref, _, _ in self._views)

    def drop(self) -> None:
        """Forgets what only a replay that goes on after the call would need."""
        self._outputs, self._mutated = None, ()
        if self.then is Then.TAKES:
            self.then = Then.ENDS

    def make_again(self) -> bool:
        """Has replays make the call for its values; False if they do so already."""
        if self.then is not Then.TAKES:
            return False
        self.then = Then.MAKES_AGAIN
        return True

    def take_stored(self) -> None:
        """Has replays take the stored output, as they did before `make_again`."""
        self.then = Then.TAKES

    def repeat(self) -> bool:
        """Has replays make the call with history; False if they do so already, or end here."""
        if self.then not in (Then.TAKES, Then.MAKES_AGAIN):
            return False
        self.then = Then.REPEATS
        return True

    def owns(self, slot: Slot) -> bool:
        """Whether `slot` is one of the call's."""
        return any(ref() is slot for ref, _, _ in self._views)

    def release(self) -> None:
        """Empties the slots."""
        for ref, _, _ in self._views:
            if (slot := ref()) is not None:
                slot.empty()

    def slot(self, owner: Owner, tensor: torch.Tensor, index: int, base: torch.Tensor) -> Slot | None:
        """A slot for a view of input number `index`; None where strides cannot describe it."""
        place = WHOLE if tensor is base else geometry(tensor, base)
        if place is None:
            return None
        slot = Slot(owner, meta(tensor))
        self._views.append((weakref.ref(slot), index, place))
        return slot

    def fill(self, replay: Filling, inputs: Sequence[torch.Tensor]) -> None:
        """Fills the slots that are views of the call's inputs."""
        for ref, index, place in self._views:
            if (slot := ref()) is not None:
                view = place.of(inputs[index])
                if view is None:
                    then, now = self._sides(index, inputs[index])
                    raise errors.MismatchError(_other_inputs(replay.name, self.name, index, then, now))
                if type(view) is not torch.Tensor:
                    check_values(view, self.name)
                replay.fill(slot, view)

    def held(self) -> Iterator[torch.Tensor]:
        """The outputs that are kept on the device."""
        for output in self._outputs or ():
            if isinstance(output, Kept) and type(output.packed) is tuple:
                yield output.packed[0]

    def check(self, region: str, inputs: Sequence[torch.Tensor]) -> None:
        """Compares the inputs of the replay with those of the forward."""
        metas = [*map(meta, inputs)]
        if metas == self._metas:
            return
        for i, (then, now) in enumerate(zip(self._metas, metas, strict=False)):
            if then != now:
                text = _other_inputs(region, self.name, i, say(then), say(now))
                raise errors.MismatchError(text)

    def result(self, region: str, inputs: Sequence[torch.Tensor], again: Callable[[], Any] | None) -> Any:
        """Does to inputs and generators what the call did, and returns its output; `again` makes missing values."""
        fresh = None if again is None else _torch.tree_leaves(again())
        for ambient, value in self._after:
            ambient.restore(value)
        for index, stored in self._mutated:
            tensor = inputs[index]
            with torch.no_grad():
                tensor.copy_(self._open(region, stored))
            if stored.grad and not tensor.requires_grad:
                tensor.requires_grad_()
        if self._outputs is None:
            raise errors.MismatchError(errors.missed_call(region, self.name))
        leaves = [self._output(region, output, inputs) for output in self._outputs]
        if self.values_unused:
            from .shape_only import ShapeOnly

            for place, output in enumerate(self._outputs):
                if isinstance(output, Unkept):
                    made = ShapeOnly.make(output.layout, self) if fresh is None else fresh[place].detach()
                    with torch.enable_grad():  # the function may change it in place, which no leaf may be
                        leaves[place] = made.requires_grad_(output.grad).clone()
        return leaves[0] if self._spec is None else _torch.tree_unflatten(leaves, self._spec)

    def _output(self, region: str, output: Any, inputs: Sequence[torch.Tensor]) -> Any:
        if isinstance(output, Kept):
            tensor = self._open(region, output).detach()
            if output.grad:
                tensor.requires_grad_()
            if isinstance(output.packed, Stored):
                with torch.enable_grad():  # the function may change it in place, and the store's must not change
                    return tensor.clone()
            return tensor
        if isinstance(output, View):
            base = inputs[output.source]
            if output.geometry is None:
                return base
            view = output.geometry.of(base)
            if view is None:
                then, now = self._sides(output.source, base)
                raise errors.MismatchError(_other_inputs(region, self.name, output.source, then, now))
            return view.requires_grad_() if output.grad else view
        return output

    def _sides(self, index: int, now: torch.Tensor) -> tuple[str, str]:
        then = next((g.base_stride for _, i, g in self._views if i == index), "other")
        found = f"{say(meta(now))}, stride {layout(now)}"
        return f"{say(self._metas[index])}, stride {then}", found

    def _open(self, region: str, stored: Kept) -> torch.Tensor:
        packed = stored.packed
        if isinstance(packed, Stored):
            return packed.open()
        tensor, version = packed
        if version_of(tensor) != version:
            raise errors.ChangedError(
                f"the output of the saved call {self.name} in {region} has been changed in place (version {version} "
                f"when it was returned, {version_of(tensor)} now), and the replay needs it as it was returned.\n"
                "  Use the out-of-place form (y = y + r, not y += r), or move the change into the saved call."
            )
        return tensor

    def again(self, run: Run, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the call again in a replay, with history."""
        return call_again(run, self.name, fn, args, kwargs, history=True)

    # --- forward --------------------------------------------------------------------------------------------------

    def record(
        self,
        result: Any,
        inputs: Sequence[torch.Tensor],
        versions: Sequence[int],
        store: Store | None,
        after: Sequence[tuple[Ambient, Any]],
    ) -> None:
        """Takes what a replay will need."""
        if after:
            self._after = after
        if self._leaving:
            put_all(self._leaving)
        if not self.pure and [*map(version_of, inputs)] != versions:
            each = enumerate(zip(inputs, versions, strict=True))
            self._mutated = [(i, self._keep(t, store)) for i, (t, version) in each if version_of(t) != version]
        if isinstance(result, torch.Tensor):
            leaves: list[Any] = [result]
        else:
            leaves, self._spec = _torch.tree_flatten(result)
        outputs: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or (not self.pure and parameter_of(leaf) is not None):
                made = isinstance(leaf, torch.Tensor) and not leaf.is_leaf  # by a node that may lead back to here
                outputs.append(leaf.detach().requires_grad_() if made else leaf)
                continue
            view = None if self.pure else _view(leaf, inputs)
            if view is None and self.values_unused and _torch.is_plain(leaf) and leaf.layout is torch.strided:
                from .shape_only import TensorLayout

                outputs.append(Unkept(TensorLayout.of(leaf), wants_grad(leaf)))
            else:
                outputs.append(view or self._keep(leaf, store))
        self._outputs = outputs
        self.then = Then.TAKES

    def _keep(self, tensor: torch.Tensor, store: Store | None) -> Kept:
        if store is None:
            return Kept((tensor.detach(), version_of(tensor)), wants_grad(tensor))
        return Kept(Stored(store, tensor.detach(), self.name), wants_grad(tensor))

    @tracing.as_it_is
    def pack(
        self,
        inputs: Sequence[torch.Tensor],
        versions: Sequence[int],
        scope: Scope | None,
        store: Store | None,
        tensor: torch.Tensor,
    ) -> Packed:
        """The pack hook of the call: sorts a tensor that autograd saves in it."""
        base: Any = tensor._base
        if base is None:
            base = tensor
        if scope is not None and id(base) in scope.alive:
            return tensor.detach(), tensor._version
        if not (type(base) is type(tensor) is torch.Tensor) and (is_parameter(base) or is_parameter(tensor)):
            return tensor if tensor.is_leaf else tensor.detach(), tensor._version
        if scope is not None:
            slot, region_call = None, scope.region_call
            for i, given in enumerate(inputs):
                if (given is tensor or given is base) and slot is None and given._version == versions[i]:
                    slot = self.slot(region_call, tensor, i, given)
            if slot is None and not (self.pure and base is tensor):  # else an input may be a view of that base
                storage = storage_id(tensor)
                if storage and storage in region_call.taking.storages:
                    return tensor.detach(), tensor._version
                for i, given in enumerate(inputs if storage else ()):
                    if storage_id(given) == storage and slot is None and given._version == versions[i]:
                        slot = self.slot(region_call, tensor, i, given)
            if slot is not None:
                if region_call.observers is not None:
                    region_call.observers.dropped(region_call, tensor)
                return slot
        return self.hold(tensor, scope, store)

    def hold(self, tensor: torch.Tensor, scope: Scope | None, store: Store | None) -> Packed:
        """Keeps a tensor that the replay does not rebuild."""
        if store is None:
            held = tensor.detach()
            return held, version_of(held)
        self._leaving.append(Stored(store, tensor.detach(), self.name, later=True))
        return self._leaving[-1]


def _view(tensor: torch.Tensor, inputs: Sequence[torch.Tensor]) -> View | None:
    for i, base in enumerate(inputs):
        if tensor is base:
            return View(i, None, wants_grad(tensor))
    storage = storage_id(tensor) if inputs else 0
    for i, base in enumerate(inputs):
        if storage and storage_id(base) == storage and (place := geometry(tensor, base)) is not None:
            return View(i, place, wants_grad(tensor))
    return None


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_LEAVES = _TENSORS | PLAIN


def tensors_of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call is made with: in its arguments, and in the cells of a closure."""
    leaves = (*args, *kwargs.values()) if kwargs else args
    if _LEAVES.issuperset(map(type, leaves)):
        found: list[torch.Tensor] = [*compress(leaves, map(_TENSORS.__contains__, map(type, leaves)))]
    else:
        found = [tensor for _, tensor in labelled(args, kwargs)]
    if isinstance(fn, types.FunctionType) and fn.__closure__:
        found += [value for value in map(content_of, fn.__closure__) if isinstance(value, torch.Tensor)]
    return found


@tracing.as_it_is
def record_call(
    run: Run,
    scope: Scope | None,
    store: Store | None,
    name: str,
    values_unused: bool,
    pure: bool,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs a saved call in forward, writes its record, and returns what the call returned.

    Args:
        run: What it is called in.
        scope: The same, where that is a region's forward; elsewhere nothing is left to a replay.
        store: Where it keeps its tensors.
        name: Its name.
        values_unused: Whether the values of its output are said not to be needed.
        pure: Whether it is known to draw no random numbers, to change nothing and to return memory of its own.
        fn: What is called.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    inputs = tensors_of(fn, args, kwargs)
    versions = [*map(version_of, inputs)]
    kind = SavedCall if scope is None else scope.region_call.saved_call
    record = kind(name, inputs, values_unused, pure)
    ambients = () if pure else run.ambients
    before = [ambient.capture() for ambient in ambients] if ambients else ()
    pack = partial(record.pack, inputs, versions, scope, store)
    pack.__dict__.update(_torch.SEE_THROUGH)
    run.write(record)
    if here.observers is not None:
        fn = here.observers.around("saved call", name, run, fn)
    _torch.push_hooks(pack, unpack)
    modules = thread.modules
    thread.run = None
    if not record.can_be_emptied:  # else no replay calls what it calls
        thread.modules = None
    try:
        try:
            result = fn(*args, **kwargs)
        finally:
            thread.run, thread.modules = run, modules
            _torch.pop_hooks()
        record.record(result, inputs, versions, store, advanced(ambients, before) if ambients else ())
    except BaseException:  # which the function may catch: a replay makes the call again, for the same error
        record.then = Then.REFILLS
        raise
    finally:
        inputs.clear()  # PyTorch keeps a pack hook, and so what it refers to, as long as what it packed
    if scope is not None:
        scope.alias(record)
    return result


def put_all(kept: list[Stored]) -> None:
    """Puts what a call has saved into its store, now that the call is over."""
    try:
        for one in kept:
            one.put()
    finally:
        kept.clear()


@tracing.as_it_is
def stored_call(store: Store, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call outside of every region: what autograd saves in it is put into a store, but for parameters."""

    def pack(tensor: torch.Tensor) -> Packed:
        base = tensor if tensor._base is None else tensor._base
        if is_parameter(base) or is_parameter(tensor):
            return tensor if tensor.is_leaf else tensor.detach(), tensor._version
        kept.append(Stored(store, tensor.detach(), name, later=True))
        return kept[-1]

    kept: list[Stored] = []
    thread.calls += 1  # what is put until the next one is one group of the store's
    _torch.push_hooks(_torch.see_through(pack), unpack)
    try:
        result = fn(*args, **kwargs)
    except BaseException:
        kept.clear()  # PyTorch keeps a pack hook, and so this closure, as long as what it packed
        raise
    finally:
        _torch.pop_hooks()
    put_all(kept)
    return result


def call_again(
    run: Run, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], history: bool = False
) -> Any:
    """Repeats a saved call in a replay, for the values of its output; with history, for gradients asked for there."""
    if here.observers is not None:
        fn = here.observers.around("saved call", name, run, fn)
    own_hooks = without_graph, without_graph  # the region's are not to count what is saved
    with inside(None, own_hooks), torch.set_grad_enabled(history):
        return fn(*args, **kwargs)
