"""What a region takes: its arguments and what its function holds, and what a replay finds in their places."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import gc
import math
import threading
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from laws.watch import on_threads, vector
from support.models import Made
from torch_recompute import ArgumentError, ChangedError, RecomputeError, doing_recompute, no_recompute, recompute
from torch_recompute.engine import exchange as exchanges
from torch_recompute.engine import taken
from torch_recompute.engine.exchange import Exchange
from torch_recompute.engine.taken import MANY, SMALL, Taking, globals_of, labelled, open_

Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    """A user's own container, made known to pytrees below."""

    tokens: Any
    mask: Any


_pytree.register_pytree_node(
    Batch,
    lambda b: ([b.tokens, b.mask], None),
    lambda leaves, _: Batch(*leaves),
    serialized_type_name="torch_recompute_tests.Batch",
)


class Context:
    """A user's own object that is passed on from layer to layer."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


T = torch.arange(3.0)
U = torch.arange(4.0)
THING = object()

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "nothing": ((), {}),
    "tensors": ((T, U), {}),
    "plain values": ((1, 2.0, True, "text", None, b"bytes", 1j, torch.float32, torch.device("cpu")), {}),
    "keywords": ((T,), {"mask": U, "scale": 2}),
    "keywords only": ((), {"y": T}),
    "a list": (([T, U],), {}),
    "a dict": (({"b": T, "a": U},), {}),
    "a deque": ((deque([T, 1], maxlen=3),), {}),
    "a set": (({1, "a"},), {}),
    "nests": (([T, {"a": (U, [1, None])}],), {"more": {"x": [T]}}),
    "named tuple": ((Pair(T, 1),), {}),
    "ordered dict": ((OrderedDict(b=T, a=1),), {}),
    "dict with a default": ((defaultdict(list, b=[T]),), {}),
    "registered class": ((Batch(T, None),), {"batch": Batch(1, [U])}),
    "plain object": ((SimpleNamespace(a=T, b=[U]),), {}),
    "an object": ((T, THING), {"thing": THING}),
    "objects in a list": (([THING, T],), {}),
    "one tensor twice": ((T, T), {"again": [T]}),
    "an empty list": ((T, []), {}),
    "an empty dict by keyword": ((T,), {"options": {}}),
    "an empty tuple": (((),), {}),
    "empty and full": (([], [T]), {"a": {}, "b": {"x": T}}),
    "size": ((torch.Size([2, 3]),), {}),
    "module": ((nn.Identity(),), {}),
    "function": ((torch.sin, lambda x: x), {}),
}

each_call = pytest.mark.parametrize(("args", "kwargs"), CALLS.values(), ids=CALLS.keys())


def seen_in_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments that the function of a region is called with, in forward and replay."""
    seen: list[Any] = []

    def fn(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((args, kwargs))
        return x.sin().exp()

    recompute(fn)(torch.ones(3, requires_grad=True), *args, **kwargs).sum().backward()
    assert len(seen) == 2
    return seen


@each_call
def test_a_call_of_a_region_arrives(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The replay is called with what the forward was called with: objects, memory, and which tensors are one."""
    seen = seen_in_step(args, kwargs)
    assert list(seen[1][1]) == list(kwargs)
    (then, structure), (now, again) = map(_pytree.tree_flatten, seen)
    assert structure == again
    assert [[a is b for b in then] for a in then] == [[a is b for b in now] for a in now]
    for a, b in zip(then, now, strict=True):
        assert a is b or (isinstance(a, torch.Tensor) and a.data_ptr() == b.data_ptr() and torch.equal(a, b))


@each_call
def test_what_can_be_changed_is_the_callers_own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Lists, dicts, sets, deques and objects are the caller's in the forward and in the replay."""
    for run, more in seen_in_step(args, kwargs):
        for new, old in zip((*run, *more.values()), (*args, *kwargs.values()), strict=True):
            assert type(new) is type(old)
            if not isinstance(old, (tuple, torch.Tensor)):
                assert new is old


@each_call
def test_tensors_of_a_call_are_found(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Every tensor, at any depth, is found once, and nothing else is."""
    found = [tensor for _, tensor in labelled(args, kwargs)]
    opened = [[*vars(one).values()] if isinstance(one, SimpleNamespace) else one for one in args]
    wanted = {id(leaf) for leaf in _pytree.tree_leaves((opened, kwargs)) if isinstance(leaf, torch.Tensor)}
    assert sorted(map(id, found)) == sorted(wanted)


HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "itself": (lambda t: t, lambda held: held),
    "list": (lambda t: [1, t], lambda held: held[1]),
    "dict": (lambda t: {"a": t}, lambda held: held["a"]),
    "deque": (lambda t: deque([t]), lambda held: held[0]),
    "set": (lambda t: {t}, lambda held: next(iter(held))),
    "tuple": (lambda t: (1, t), lambda held: held[1]),
    "named tuple": (lambda t: Pair(t, 1), lambda held: held.left),
    "ordered dict": (lambda t: OrderedDict(a=t), lambda held: held["a"]),
    "registered class": (lambda t: Batch([t], 1), lambda held: held.tokens[0]),
    "plain object": (lambda t: Context(a=t), lambda held: held.a),
    "list of a tuple of a dict": (lambda t: [({"a": t},)], lambda held: held[0][0]["a"]),
    "tuple of an object": (lambda t: (Context(a=[t]),), lambda held: held[0].a[0]),
}

each_holder = pytest.mark.parametrize(("hold", "get"), HOLDERS.values(), ids=HOLDERS.keys())


@each_holder
@pytest.mark.parametrize("by_name", [False, True])
def test_a_result_among_the_arguments(hold: Any, get: Any, by_name: bool) -> None:
    """A replay is given the memory of a result, the same tensor at each place; its gradient is the plain one."""
    source = torch.ones(3, requires_grad=True)
    given = source * 2
    held, seen = hold(given), []

    def fn(x: torch.Tensor, again: torch.Tensor, held: Any) -> torch.Tensor:
        inside = get(held)
        seen.append((inside is again, inside.requires_grad, inside.data_ptr()))
        return (x * inside).sin().exp()

    call, x = recompute(fn), vector()
    y = call(x, again=given, held=held) if by_name else call(x, given, held)
    y.sum().backward()
    assert seen == [(True, True, given.data_ptr())] * 2
    assert get(held) is given
    plain, other = vector(), torch.ones(3, requires_grad=True)
    (plain * (other * 2)).sin().exp().sum().backward()
    assert torch.equal(x.grad, plain.grad)
    assert torch.equal(source.grad, other.grad)


@each_holder
def test_a_result_that_the_caller_drops(hold: Any, get: Any) -> None:
    """A region holds the memory of a result and not the result: its replay is given a leaf over that memory."""
    given = torch.ones(3, requires_grad=True).exp()
    held, seen = hold(given), []
    memory, gone = given.data_ptr(), weakref.ref(given)

    def fn(x: torch.Tensor, held: Any) -> torch.Tensor:
        inside = get(held)
        seen.append((inside.is_leaf, inside.requires_grad, inside.data_ptr()))
        return (x + inside).sin().exp()

    y = recompute(fn)(vector(), held)
    del held, given
    assert gone() is None
    y.sum().backward()
    assert seen == [(False, True, memory), (True, True, memory)]


def test_labels() -> None:
    """A tensor is named the way the caller would name it."""
    found = labelled((T, [U], 1), {"mask": T + 1, "more": {"a": [U + 1, T]}})
    assert [label for label, _ in found] == [
        *("argument 0", "an element of argument 1", "argument 'mask'", "an element of argument 'more'"),
    ]


ONCE: dict[str, Callable[[], Any]] = {
    "generator": lambda: (n for n in range(3)),
    "map": lambda: map(abs, [1]),
    "zip": lambda: zip([1], [2], strict=True),
    "iterator of a list": lambda: iter([1]),
}


@pytest.mark.parametrize("make", ONCE.values(), ids=ONCE.keys())
@pytest.mark.parametrize("by_name", [False, True])
def test_what_can_be_consumed_once_is_refused(make: Callable[[], Any], by_name: bool) -> None:
    """An iterator is an error that names the argument, before anything of it is read."""
    once, label = make(), "argument 'several'" if by_name else "argument 1"
    with pytest.raises(ArgumentError, match=f"{label} of .* can be consumed only once"):
        recompute(torch.add)(vector(), several=once) if by_name else recompute(torch.add)(vector(), once)
    assert next(once) is not None


# --- the caller's own containers and objects --------------------------------------------------------------------------


class Named(dict[str, Any]):
    """Extends a class that is written in C."""


class Change:
    """A container or plain object, what its caller makes of it before backward, and what a replay does to it."""

    def __init__(self, make: Callable[[], Any], caller: Callable[[Any], Any], run: Callable[[Any], Any]) -> None:
        self.make, self.caller, self.run = make, caller, run


OWN: dict[str, Change] = {
    "list that grows": Change(lambda: [1.0, 2.0], lambda v: v.append(5.0), lambda v: v.append(3.0)),
    "list that shrinks": Change(lambda: [1.0, 2.0], lambda v: v.pop(), lambda v: v.pop(0)),
    "list that is emptied": Change(lambda: [1.0, 2.0], lambda v: v.clear(), lambda v: v.insert(0, 3.0)),
    "list in another order": Change(lambda: [1.0, 2.0], lambda v: v.reverse(), lambda v: v.append(3.0)),
    "list with another entry": Change(
        lambda: [1.0, 2.0], lambda v: v.__setitem__(0, 5.0), lambda v: v.__setitem__(1, v[1] + 3.0)
    ),
    "list that only the region changes": Change(lambda: [1.0], lambda v: None, lambda v: v.append(3.0)),
    "dict that grows": Change(lambda: {"a": 1.0}, lambda v: v.update(b=5.0), lambda v: v.update(c=3.0)),
    "dict that is emptied": Change(lambda: {"a": 1.0}, lambda v: v.clear(), lambda v: v.update(a=v["a"] + 3.0)),
    "dict with another entry": Change(lambda: {"a": 1.0, "b": 2.0}, lambda v: v.update(a=5.0), lambda v: v.pop("b")),
    "ordered dict": Change(lambda: OrderedDict(a=1.0), lambda v: v.update(a=5.0), lambda v: v.update(b=2.0)),
    "dict with a default": Change(lambda: defaultdict(float, a=1.0), lambda v: v["c"], lambda v: v["b"]),
    "user's own dict": Change(lambda: Named(a=1.0), lambda v: v.update(a=5.0), lambda v: v.update(b=v["a"] + 1)),
    "set that grows": Change(lambda: {1.0}, lambda v: v.add(5.0), lambda v: v.add(3.0)),
    "set that is emptied": Change(lambda: {1.0}, lambda v: v.clear(), lambda v: v.add(3.0)),
    "deque that turns": Change(lambda: deque([1.0, 2.0]), lambda v: v.rotate(), lambda v: v.appendleft(3.0)),
    "deque with an end": Change(
        lambda: deque([1.0, 2.0], maxlen=2), lambda v: v.append(5.0), lambda v: v.appendleft(3.0)
    ),
    "object": Change(lambda: SimpleNamespace(a=1.0), lambda v: setattr(v, "a", 5.0), lambda v: setattr(v, "b", v.a)),
    "object without an attribute": Change(
        lambda: SimpleNamespace(a=1.0), lambda v: delattr(v, "a"), lambda v: setattr(v, "a", v.a + 3.0)
    ),
    "empty object": Change(SimpleNamespace, lambda v: setattr(v, "a", 5.0), lambda v: setattr(v, "b", 3.0)),
    "registered class": Change(
        lambda: Batch(1.0, 2.0), lambda v: setattr(v, "mask", 5.0), lambda v: setattr(v, "b", 1)
    ),
    "object of objects": Change(
        lambda: SimpleNamespace(inner=SimpleNamespace(a=1.0)),
        lambda v: setattr(v.inner, "a", 5.0),
        lambda v: setattr(v.inner, "a", v.inner.a + 3.0),
    ),
}
DEEP: dict[str, Change] = {  # as attributes of modules, of these the outer one alone is put back
    "list in a list": Change(lambda: [[1.0]], lambda v: v[0].append(5.0), lambda v: v[0].append(3.0)),
    "list in a tuple": Change(lambda: ([1.0], 2.0), lambda v: v[0].append(5.0), lambda v: v[0].append(3.0)),
    "object of a list": Change(
        lambda: SimpleNamespace(parts=[1.0]), lambda v: v.parts.append(5.0), lambda v: v.parts.append(3.0)
    ),
    "object in a dict": Change(
        lambda: {"a": SimpleNamespace(b=1.0)}, lambda v: setattr(v["a"], "b", 5.0), lambda v: v.update(c=1.0)
    ),
    "lists that are exchanged": Change(
        lambda: {"a": [1.0], "b": [2.0]},
        lambda v: v.update(a=v["b"], b=v["a"]),
        lambda v: v["a"].append(v["b"].pop()),
    ),
}


class Turned(nn.Module):
    """Calls a function with what it holds."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held, self.does = held, Tuple()

    def forward(self, x: torch.Tensor, held: Any = None) -> torch.Tensor:
        return self.does.fn(x, self.held)


class Tuple:
    """Holds a function where no region looks for it."""

    __slots__ = ("fn",)


def of_module(fn: Any, held: Any, x: torch.Tensor) -> torch.Tensor:
    module = Turned(held)
    module.does.fn = fn
    return recompute(module)(x)


def of_called_module(fn: Any, held: Any, x: torch.Tensor) -> torch.Tensor:
    module = Turned(held)
    module.does.fn = fn
    return recompute(lambda x: module(x))(x)


VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE")


def of_variable(fn: Any, held: Any, x: torch.Tensor) -> torch.Tensor:
    token = VARIABLE.set(held)
    try:
        return recompute(lambda x: fn(x, VARIABLE.get()))(x)
    finally:
        VARIABLE.reset(token)


ARGUMENTS: dict[str, Callable[[Any, Any, torch.Tensor], torch.Tensor]] = {
    "argument": lambda fn, held, x: recompute(fn)(x, held),
    "keyword": lambda fn, held, x: recompute(fn)(x, held=held),
    "in a tuple": lambda fn, held, x: recompute(lambda x, pair: fn(x, pair[1]))(x, (0, held)),
    "argument of two regions": lambda fn, held, x: recompute(lambda x, held: recompute(fn)(x, held))(x, held),
}
PLACES = {
    **ARGUMENTS,
    "attribute of the module": of_module,
    "attribute of a called module": of_called_module,
}
ROWS = [
    *(
        pytest.param(change, place, id=f"{name}-{where}")
        for name, change in OWN.items()
        for where, place in PLACES.items()
    ),
    *(
        pytest.param(change, place, id=f"{name}-{where}")
        for name, change in DEEP.items()
        for where, place in ARGUMENTS.items()
    ),
    *(
        pytest.param(change, of_variable, id=f"{name}-context variable")
        for name, change in {**OWN, **DEEP}.items()
        if not isinstance(change.make(), (set, tuple))
    ),
]


def shown(held: Any) -> Any:
    """The classes and contents of a container or object."""
    if isinstance(held, dict):
        return type(held), [(key, shown(one)) for key, one in held.items()]
    if isinstance(held, (list, tuple, deque)):
        return type(held), [*map(shown, held)]
    if isinstance(held, set):
        return type(held), sorted(held)
    return (type(held), shown(vars(held))) if hasattr(held, "__dict__") else held


@pytest.mark.parametrize(("change", "place"), ROWS)
@pytest.mark.parametrize("fails", [False, True])
def test_what_the_forward_found_is_put_back_and_taken_out_again(change: Change, place: Any, fails: bool) -> None:
    """The replay finds the same object with the forward's entries; then those of the caller are back, and no others."""
    held, seen = change.make(), []

    def fn(x: torch.Tensor, held: Any) -> torch.Tensor:
        seen.append((held, shown(held)))
        change.run(held)
        seen.append((held, shown(held)))
        if fails and len(seen) == 4:
            raise KeyError("in the replay")
        return x.sin().exp()

    y = place(fn, held, vector())
    change.caller(held)
    left = shown(held)
    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        y.sum().backward()
    assert shown(held) == left
    assert [state for _, state in seen[:2]] == [state for _, state in seen[2:]]
    assert len(seen) == 4
    assert isinstance(held, tuple) or all(one is held for one, _ in seen)
    assert not exchanges.OWNED


class Kind(enum.Enum):
    """One of a kind."""

    CAUSAL = "causal"


class Slotted:
    """Has no dictionary."""

    __slots__ = ("tensor",)


OF_A_KIND: dict[str, Callable[[], Any]] = {
    "member of an enumeration": lambda: Kind.CAUSAL,
    "object with a lock": lambda: Context(lock=threading.Lock()),
    "object with a model": lambda: Context(model=nn.Identity()),
    "object three deep": lambda: Context(a=Context(a=Context(a=Context()))),
    "object with slots": Slotted,
}


@pytest.mark.parametrize("make", OF_A_KIND.values(), ids=OF_A_KIND.keys())
def test_an_object_that_may_be_one_of_a_kind_is_passed_on(make: Callable[[], Any]) -> None:
    """A handle, a member of an enumeration, and what is nested deeply are passed on; nothing in them is put back."""
    one, seen = make(), []

    def fn(x: torch.Tensor, one: Any) -> torch.Tensor:
        seen.append((one, getattr(one, "tensor", None)))
        return x.sin().exp()

    y = recompute(fn)(vector(), one)
    with contextlib.suppress(AttributeError):
        one.tensor = 5
    now = getattr(one, "tensor", None)
    y.sum().backward()
    assert [found is one for found, _ in seen] == [True, True]
    assert seen[1][1] == now
    assert getattr(one, "tensor", None) == now


def test_an_object_that_is_gone_comes_back() -> None:
    """An object is not kept by a region. Its replays then find one of its class and attributes, one at each place."""
    seen: list[list[Any]] = []

    def fn(x: torch.Tensor, first: Any, several: Any, again: Any) -> torch.Tensor:
        seen.append([type(first), first.scale, first.parts, type(first.inner), first.inner.a, first.tensor.tolist()])
        seen[-1] += [again is first, several[0] is first, several[1] is first.inner]
        first.scale = 3
        return (x * first.tensor).sin().exp()

    given = Context(tensor=torch.arange(3.0), scale=2, inner=Context(a=1.0), parts=(1, 2))
    gone = weakref.ref(given.inner), weakref.ref(given)
    loss = recompute(fn)(vector(), given, (given, given.inner), again=given).sum()
    given.__dict__.clear()
    del given
    assert [ref() for ref in gone] == [None, None]
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen[0] == [Context, 2, (1, 2), Context, 1.0, [0.0, 1.0, 2.0], True, True, True]
    assert seen[1] == seen[2] == seen[0]


LARGE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [0.0] * (MANY + 1), lambda v: v.append(1.0), lambda v: v.pop()),
    "dict": (lambda: dict.fromkeys(range(MANY + 1)), lambda v: v.update(a=1.0), lambda v: v.pop(0)),
    "deque": (lambda: deque([0.0] * (MANY + 1)), lambda v: v.append(1.0), lambda v: v.popleft()),
    "set": (lambda: {*range(MANY + 1)}, lambda v: None, lambda v: v.add("a")),
}


@pytest.mark.parametrize(("make", "grow", "spoil"), LARGE.values(), ids=LARGE.keys())
@pytest.mark.parametrize("place", [ARGUMENTS["argument"], of_module], ids=["argument", "attribute"])
def test_a_large_container(make: Any, grow: Any, spoil: Any, place: Any) -> None:
    """What was added at the end of a large container is not there in the replay; what was removed is an error."""
    held, sizes = make(), []

    def fn(x: torch.Tensor, held: Any) -> torch.Tensor:
        sizes.append(len(held))
        return x.sin().exp()

    y = place(fn, held, vector())
    grow(held)
    now = len(held)
    y.sum().backward()
    assert sizes == [MANY + 1] * 2
    assert len(held) == now
    held = make()
    y = place(fn, held, vector())
    spoil(held)
    with pytest.raises(ChangedError, match="has changed since the forward"):
        y.sum().backward()


# --- a container with a history ---------------------------------------------------------------------------------------


class Sentinel:
    """Can be referred to weakly, as a list cannot."""

    __slots__ = ("__weakref__",)


HISTORIES: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "list": lambda t, s: [t, s],
    "dict": lambda t, s: {"a": t, "b": s},
    "deque": lambda t, s: deque([t, s]),
    "set": lambda t, s: {t, s},
    "list in a dict": lambda t, s: {"a": [t], "b": s},
    "tuple in a list": lambda t, s: [(t, 1), s],
}

each_history = pytest.mark.parametrize("make", HISTORIES.values(), ids=HISTORIES.keys())


@each_history
@pytest.mark.parametrize("holder", ["nobody", "caller", "attribute", "element"])
def test_a_container_with_a_history_is_one_in_all_its_places(make: Any, holder: str) -> None:
    """An argument, a variable and an attribute that were one container are one in the replay.

    It is the caller's own where a module still has it.
    """
    layer: Any = Made(lambda m, x: x * 2)
    held: Any = make(vector().exp(), Sentinel())
    layer.kept, several = held, {"a": held}
    seen: list[Any] = []

    def region(held: Any) -> Callable[..., torch.Tensor]:
        def fn(x: torch.Tensor, given: Any, several: Any) -> torch.Tensor:
            seen.append((given is held, several["a"] is held, layer.kept is held, id(held), type(held), len(held)))
            return layer(x).sin().exp()

        return recompute(fn)

    y = region(held)(vector(), held, several)
    was = id(held), type(held), len(held)
    tensors = tensors_in(held)
    if holder != "attribute":
        layer.kept = None
    if holder != "element":
        several["a"] = None
    if holder != "caller":
        held = None
    y.sum().backward()
    assert seen[0] == (True, True, True, *was)
    assert seen[1][:3] == (True, True, True)
    assert seen[1][4:] == was[1:]
    assert seen[1][3] == was[0] or holder != "attribute"
    now = {"caller": held, "attribute": layer.kept, "element": several["a"], "nobody": None}[holder]
    if now is not None:
        assert (id(now), type(now), len(now)) == was
        assert [*map(id, tensors_in(now))] == [*map(id, tensors)]


def tensors_in(held: Any) -> list[torch.Tensor]:
    leaves = _pytree.tree_leaves([*held] if isinstance(held, (set, deque)) else held)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


GIVEN: dict[str, Callable[[nn.Module, Any], torch.Tensor]] = {
    "argument": lambda layer, held: recompute(layer)(vector(), held),
    "keyword": lambda layer, held: recompute(layer)(vector(), more=held),
    "tuple": lambda layer, held: recompute(layer)(vector(), (1, held)),
    "object": lambda layer, held: recompute(layer)(vector(), Context(a=held)),
    "attribute": lambda layer, held: setattr(layer, "kept", held) or recompute(layer)(vector()),
}


def add(held: Any, one: Any) -> None:
    """Puts something into a container."""
    if isinstance(held, dict):
        held["more"] = one
    elif isinstance(held, set):
        held.add(one)
    else:
        held.append(one)


@each_history
@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN.keys())
def test_a_container_with_a_history_is_let_go_of(make: Any, give: Any) -> None:
    """A region keeps no container that holds a result, so that one that also holds the region's own is freed."""
    sentinel = Sentinel()
    held, gone = make(vector().exp(), sentinel), weakref.ref(sentinel)
    layer: Any = Made(lambda m, x, *held, **more: x.sin().exp())
    y = give(layer, held)
    add(held, y)
    del sentinel, held, y
    layer.kept = None
    gc.collect()
    assert gone() is None


# --- functions --------------------------------------------------------------------------------------------------------


class Function:
    """A function as a region takes it."""

    def __init__(self, fn: Any) -> None:
        self.taking = Taking("block", None)
        self._taken = self.taking.function(fn)
        self.taking.settle()

    def open(self) -> Any:
        """The function for a replay."""
        exchange = Exchange("block")
        opened = open_(self._taken, exchange)
        exchange.enter()
        exchanges.OWNED.clear()  # it is never left
        return opened


def test_the_function_comes_back() -> None:
    """Code, name, defaults, keyword defaults, attributes and cells are those of the original."""
    scale, offset = torch.tensor(2.0), 3

    def fn(x: torch.Tensor, power: int = 2, *, extra: int = 1) -> torch.Tensor:
        return x**power * scale + offset + extra

    fn.note = "kept"  # type: ignore[attr-defined]
    function = Function(fn)
    assert function.open() is fn
    offset = 4
    again = function.open()
    assert again is not fn
    offset = 3
    x = torch.ones(3) * 3
    assert torch.equal(again(x), fn(x))
    assert torch.equal(again(x, 3, extra=5), fn(x, 3, extra=5))
    assert (again.__name__, again.__qualname__) == (fn.__name__, fn.__qualname__)
    assert again.__dict__ == {"note": "kept"}


def test_a_function_that_comes_back_has_its_names() -> None:
    """A wrapper rebuilt for a replay is called what it was, so that a saved call of it is found again."""
    weight = torch.ones(3, requires_grad=True)
    inner = recompute(lambda x: (x * weight).exp())
    outer = recompute(lambda x: no_recompute(inner)(x.sin()).cos())
    assert Function(outer).open().__qualname__ == outer.__qualname__
    outer(vector()).sum().backward()


@pytest.mark.parametrize("fn", [torch.sin, torch.Tensor.sin, len, int, lambda x: x, functools.partial(len)])
def test_a_function_that_holds_nothing_is_itself(fn: Any) -> None:
    """A builtin, a class, and a function without cells are held as they are."""
    assert Function(fn).open() is fn


def test_a_variable_is_that_of_its_turn() -> None:
    """A loop variable is that of its own turn: in the function, in functions in it, in partials and tuples."""
    said: list[Any] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        said.append(turn)
        return x * turn

    losses, wanted = [], []
    x = vector()
    for turn in (2.0, 3.0, 4.0):
        pair, call = (turn, [turn]), functools.partial(torch.mul, torch.tensor(turn))

        def fn(x: torch.Tensor) -> torch.Tensor:
            y = inner(x) * pair[0] * pair[1][0]  # noqa: B023 - the property
            return call(y).sin().exp() * turn  # noqa: B023 - the property

        losses.append(recompute(fn)(x).sum())
        wanted.append(torch.autograd.grad(fn(x).sum(), x)[0])
    said.clear()
    for i in (2, 0, 1):
        assert torch.equal(torch.autograd.grad(losses[i], x)[0], wanted[i])
    assert said == [4.0, 2.0, 3.0]


def test_a_variable_that_the_function_assigns_is_its_own() -> None:
    """What a function, or one in it, assigns with `nonlocal` is left to it: each run finds what the last has left."""
    count = other = 0
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal count

        def more() -> None:
            nonlocal other
            other += 1

        count += 1
        more()
        seen.append((count, other))
        return x.sin().exp()

    y = recompute(fn)(vector())
    count = 5
    y.sum().backward()
    assert seen == [(1, 1), (6, 2)]
    assert (count, other) == (6, 2)


READ: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1.0], lambda v: v.append(2.0)),
    "dict": (lambda: {"a": 1.0}, lambda v: v.update(b=2.0)),
    "set": (lambda: {1.0}, lambda v: v.add(2.0)),
    "deque": (lambda: deque([1.0]), lambda v: v.append(2.0)),
    "object": (lambda: SimpleNamespace(a=1.0), lambda v: setattr(v, "a", 2.0)),
}


@pytest.mark.parametrize(("make", "change"), READ.values(), ids=READ.keys())
@pytest.mark.parametrize("where", ["variable", "global"])
def test_containers_that_a_function_holds_are_read_where_they_are(make: Any, change: Any, where: str) -> None:
    """Entries of a container in a variable or global are those of now, and what a replay adds to it stays."""
    held, seen = make(), []

    def note(held: Any) -> None:
        seen.append((held, shown(held)))
        change(held)

    if where == "variable":

        def fn(x: torch.Tensor) -> torch.Tensor:
            note(held)
            return x.sin().exp()

    else:
        fn = made_of("def fn(x):\n    NOTE(HELD)\n    return x.sin().exp()", NOTE=note, HELD=held)
    y = recompute(fn)(vector())
    now = shown(held)
    y.sum().backward()
    assert [one is held for one, _ in seen] == [True, True]
    assert seen[1][1] == now
    assert shown(held) != seen[0][1]


def made_of(text: str, **scope: Any) -> Any:
    """A function of a text, and no other reference to its code."""
    exec(text, scope)
    return scope.pop("fn")


def test_functions_that_hold_each_other_come_back() -> None:
    """Functions that hold each other do not hang a region, and are found again."""

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    assert Function(even).open()(10) is True


def test_the_function_is_not_kept_alive() -> None:
    """What is held of a closure is not the function, which would hold the tensors in its cells."""

    def make() -> tuple[weakref.ref[Any], weakref.ref[Any], Function]:
        scale = torch.ones(3, requires_grad=True).exp()

        def fn(x: torch.Tensor) -> torch.Tensor:
            return x * scale

        return weakref.ref(fn), weakref.ref(scale), Function(fn)

    function, tensor, held = make()
    assert (function(), tensor()) == (None, None)
    assert torch.equal(held.open()(torch.ones(3)), torch.ones(3).exp())


class Negated(functools.partial[torch.Tensor]):
    """A partial that does something of its own."""

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return -super().__call__(*args)


@pytest.mark.parametrize(("kind", "sign"), [(functools.partial, 1), (Negated, -1)])
@pytest.mark.parametrize("inside", [False, True])
def test_partials_come_back(kind: Any, sign: int, inside: bool) -> None:
    """A partial of a closure is made again around the closure made again, and is of the class that it was."""
    scale = torch.tensor(2.0)

    def fn(x: torch.Tensor, power: int, *, offset: torch.Tensor) -> torch.Tensor:
        return x**power * scale + offset

    partial = kind(fn, power=3, offset=torch.tensor(1.0))
    partial.note = "kept"
    held = Function((lambda: lambda x: partial(x))() if inside else partial)
    scale.add_(5)
    partial.keywords["offset"].add_(5)
    again = held.open()
    assert float(again(torch.tensor(2.0))) == sign * 17
    if not inside:
        assert (type(again), again.__dict__) == (kind, {"note": "kept"})


# --- tensors that a function reaches ----------------------------------------------------------------------------------

MANY_ELEMENTS = SMALL // 4 + 3


def made(size: int, grad: bool = False) -> torch.Tensor:
    """A vector, or a larger one whose first elements it is."""
    return torch.linspace(1, 2, size).requires_grad_(grad)


def cell(tensor: torch.Tensor) -> Any:
    return lambda x: (x + tensor[:3]).sin().exp()


def deeper_cell(tensor: torch.Tensor) -> Any:
    inner = cell(tensor)
    return lambda x: inner(x)


def in_list(tensor: torch.Tensor) -> Any:
    held = [tensor]
    return lambda x: (x + held[0][:3]).sin().exp()


def in_dict(tensor: torch.Tensor) -> Any:
    held = {"a": (tensor,)}
    return lambda x: (x + held["a"][0][:3]).sin().exp()


def in_global(tensor: torch.Tensor) -> Any:
    return made_of("def fn(x):\n    return (x + HELD[:3]).sin().exp()", HELD=tensor)


def in_global_list(tensor: torch.Tensor) -> Any:
    return made_of("def fn(x):\n    return (x + HELD[0][:3]).sin().exp()", HELD=[tensor])


def default(tensor: torch.Tensor) -> Any:
    def fn(x: torch.Tensor, held: torch.Tensor = tensor) -> torch.Tensor:
        return (x + held[:3]).sin().exp()

    return fn


def partial(tensor: torch.Tensor) -> Any:
    return functools.partial(lambda held, x: (x + held[:3]).sin().exp(), tensor)


class Scaler:
    """An object whose method is called."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.lock = tensor, threading.Lock()

    def method(self, x: torch.Tensor) -> torch.Tensor:
        held = self.tensor[0] if isinstance(self.tensor, list) else self.tensor
        return (x + held[:3]).sin().exp()

    __call__ = method


REACHED: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {  # and whether a small one is put back
    "variable": (cell, True),
    "variable of a function in it": (deeper_cell, True),
    "default": (default, True),
    "partial": (partial, True),
    "method": (lambda tensor: Scaler(tensor).method, True),
    "object that is called": (Scaler, True),
    "list": (in_list, False),
    "dict of a tuple": (in_dict, False),
    "global": (in_global, False),
    "global list": (in_global_list, False),
    "list of an object": (lambda tensor: Scaler([tensor]).method, False),
}


@pytest.mark.parametrize("kind", ["small", "view", "large", "trained"])
@pytest.mark.parametrize(("form", "copied"), REACHED.values(), ids=REACHED.keys())
def test_a_reached_tensor_that_is_changed_before_backward(form: Any, copied: bool, kind: str) -> None:
    """A small one that needs no gradient is read as it was, where the function holds it; any other is an error."""
    whole = made(MANY_ELEMENTS if kind == "large" else 6, kind == "trained")
    tensor = whole[1:5] if kind == "view" else whole
    x, y = vector(), vector()
    form(tensor)(y).sum().backward()
    loss = recompute(form(tensor))(x).sum()
    with torch.no_grad():
        tensor.add_(1)
    now = whole.detach().clone()
    if copied and kind in ("small", "view"):
        loss.backward()
        assert torch.equal(x.grad, y.grad)
    else:
        with pytest.raises(ChangedError, match="has been changed in place since the forward"):
            loss.backward()
    assert torch.equal(whole, now)


def test_tensors_that_share_memory_share_it_in_a_replay() -> None:
    """What a region writes to one small tensor is seen in another over its memory, and is there once."""
    memory = torch.zeros(4)
    first, row = memory[:2], memory.view(2, 2)[0]
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            first.add_(1)
        seen.append(row.tolist())
        return x.sin().exp()

    recompute(fn)(vector()).sum().backward()
    assert seen == [[1.0, 1.0]] * 2
    assert memory.tolist() == [1.0, 1.0, 0.0, 0.0]


def counts(held: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Counts its calls in place in a tensor, and reads it."""
    with torch.no_grad():
        held.add_(1)
    return (x * held.clone()).sin().exp()


class CountsInMethod:
    """An object with a method that counts."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.lock = tensor, threading.Lock()

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return counts(self.tensor, x)


def counts_in_default(tensor: torch.Tensor) -> Any:
    def fn(x: torch.Tensor, held: torch.Tensor = tensor) -> torch.Tensor:
        return counts(held, x)

    return fn


COUNTING: dict[str, Callable[[torch.Tensor], Any]] = {
    "variable": lambda tensor: lambda x: counts(tensor, x),
    "variable of a function in it": lambda tensor: (lambda inner: lambda x: inner(x))(lambda x: counts(tensor, x)),
    "default": counts_in_default,
    "partial": lambda tensor: functools.partial(counts, tensor),
    "method": lambda tensor: CountsInMethod(tensor).method,
}


@pytest.mark.parametrize("form", COUNTING.values(), ids=COUNTING.keys())
def test_each_replay_begins_with_the_values_of_the_forward(form: Any) -> None:
    """However often a retained graph is read, a small tensor that a region changes has the forward's values in it."""
    tensor, x = torch.ones(3), vector()
    (wanted,) = torch.autograd.grad((x * 2).sin().exp().sum(), x)
    loss = recompute(form(tensor))(x).sum()
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], wanted)
        assert tensor.tolist() == [2.0] * 3


def test_the_callers_cells_are_not_written() -> None:
    """A replay leaves the caller's variables, functions and their attributes as they are."""
    layer = nn.Linear(3, 3)
    scale = torch.ones(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (layer(x) * scale).sin().exp()

    before = [cell.cell_contents for cell in fn.__closure__ or ()]
    recompute(fn)(vector()).sum().backward()
    assert len(before) == 2
    assert all(a is b for a, b in zip(before, [c.cell_contents for c in fn.__closure__ or ()], strict=True))


def test_a_tensor_with_grad_in_a_closure_gets_its_gradient() -> None:
    """A leaf or a result of other operations that is reached by closure is differentiated like an argument."""
    results = []
    for wrap in (recompute, lambda fn: fn):
        x, leaf, source = vector(), vector(), vector()
        scale = source * 2

        def fn(x: torch.Tensor, leaf: torch.Tensor = leaf) -> torch.Tensor:
            return (x * scale * leaf).sin().exp()  # noqa: B023 - called within its turn

        def over_leaf(x: torch.Tensor) -> torch.Tensor:
            return (x * leaf).cos().exp()  # noqa: B023 - called within its turn

        wrap(over_leaf)(wrap(fn)(x)).sum().backward()
        results.append((x.grad, leaf.grad, source.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("captured", [False, True])
def test_a_replay_leaves_the_attributes_of_a_parameter(captured: bool) -> None:
    """What is set at a parameter after the forward, as by a fused kernel in backward, is not what it was before."""
    weight, x = nn.Parameter(torch.ones(3, 3)), torch.ones(2, 3, requires_grad=True)
    flags = vars(weight)
    flags["added"] = False
    if captured:
        y = recompute(lambda x: torch.sin(x @ weight))(x)
    else:
        y = recompute(lambda x, weight: torch.sin(x @ weight))(x, weight)
    flags["added"] = True
    y.sum().backward()
    assert flags == {"added": True}


def of_inference(*size: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.linspace(0, 1, math.prod(size)).view(*size)


MADE_IN_INFERENCE = of_inference(3, 3)


class Holds(nn.Module):
    """Reads a buffer and an attribute that were made in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.attribute = of_inference(3, 3)
        self.register_buffer("scores", of_inference(3, 3))
        self.register_buffer("large", of_inference(300, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.attribute + self.scores + self.large.sum()).sin()


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: f(lambda x, made: (x + made).sin())(x, of_inference(3, 3)),
        lambda f, x: f(lambda x, made: (x + made[0]).sin())(x, [of_inference(3, 3)]),
        lambda f, x: (lambda made: f(lambda x: (x + made).sin())(x))(of_inference(3, 3)),
        lambda f, x: f(lambda x: (x + MADE_IN_INFERENCE).sin())(x),
        lambda f, x: f(Holds())(x),
        lambda f, x: f(lambda x: no_recompute(lambda x: (x + MADE_IN_INFERENCE).sin())(x).exp())(x),
    ],
    ids=["argument", "list", "closure", "global", "module", "saved call"],
)
def test_tensors_made_in_inference_mode_may_be_read(call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """What has no version, and is not saved for backward, is read in forward and replay as it is."""
    x = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()
    found, expected = (torch.autograd.grad(call(f, x).sum(), x) for f in (recompute, lambda fn: fn))
    assert torch.equal(*found, *expected)


class Touchy:
    """An object that must not be asked for anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    @property
    def value(self) -> Any:
        raise AssertionError("asked for value")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise AssertionError("asked for truth")

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("asked for its elements")

    def __len__(self) -> int:
        raise AssertionError("asked for its length")


def test_taking_calls_no_user_code() -> None:
    """Properties, `__getattr__`, `__eq__` and `__len__` of what a region is given or holds are never called."""
    touchy = Touchy()
    vars(touchy)["held"] = 1.0
    held = {"a": [touchy]}

    def fn(x: torch.Tensor, *given: Any, default: Any = touchy) -> torch.Tensor:
        return x.sin().exp() if given[0] is touchy and default is touchy else x

    y = recompute(fn)(vector(), touchy, [touchy], held, (touchy,))
    held["a"].append(touchy)
    y.sum().backward()


# --- what a function names --------------------------------------------------------------------------------------------


def names_nothing(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def names_a_module(x: torch.Tensor) -> Any:
    return x, T


def names_in_an_inner_function(x: torch.Tensor) -> Any:
    def inner() -> Any:
        return [(lambda: (T, one))() for one in (x, U)]

    return inner()


def reads_attributes_of_that_name(x: Any) -> Any:
    return x.T, x.U.THING


NAMED: dict[str, tuple[Any, set[str]]] = {
    "none": (names_nothing, set()),
    "one": (names_a_module, {"T"}),
    "of inner functions": (names_in_an_inner_function, {"T", "U"}),
    "attributes": (reads_attributes_of_that_name, set()),
}


@pytest.mark.parametrize(("fn", "wanted"), NAMED.values(), ids=NAMED.keys())
def test_the_globals_of_a_function(fn: FunctionType, wanted: set[str]) -> None:
    """A function names the globals that it and functions in it read; what it reads of an object is none of them."""
    assert set(globals_of(fn)) == wanted
    assert globals_of(fn) is globals_of(fn)


def test_what_is_known_of_a_function_goes_with_it() -> None:
    """The names of a function are looked up once for its code, and forgotten with that; nothing keeps it."""
    fn = made_of("def fn(x):\n    return (lambda: SCALE)() * x", SCALE=2.0)
    assert globals_of(fn) == ("SCALE",)
    keys = [id(fn.__code__), *(id(const) for const in fn.__code__.co_consts if hasattr(const, "co_code"))]
    gone = weakref.ref(fn.__code__)
    assert len(keys) == 2
    assert {*keys} <= {*taken._codes}
    del fn
    gc.collect()
    assert gone() is None
    assert not {*keys} & {*taken._codes}


# --- whose contents are in an object ----------------------------------------------------------------------------------


def exchange_of(*pairs: tuple[Any, Any], region: str = "block") -> Exchange:
    """One that writes contents into containers."""
    one = Exchange(region)
    for inside, content in pairs:
        one.want(inside, inside, content)
    return one


CONTENTS: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "list": (lambda: [1, 2], [1, 2], [2, 3, 4]),
    "dict": (lambda: {"a": 1, "b": 2}, {"a": 1, "b": 2}, {"b": 3, "c": 4}),
    "set": (lambda: {1, 2}, [1, 2], [2, 3]),
    "deque": (lambda: deque([1, 2], maxlen=3), [1, 2], [2, 3, 4]),
    "empty": (list, [], [1]),
    "emptied": (lambda: {"a": 1}, {"a": 1}, {}),
}

each_content = pytest.mark.parametrize(("make", "then", "other"), CONTENTS.values(), ids=CONTENTS.keys())


@each_content
def test_an_exchange_is_undone(make: Any, then: Any, other: Any) -> None:
    """Between `enter` and `leave` a container holds the contents wanted, whatever is done to it there, then its own."""
    inside = make()
    exchange = exchange_of((inside, other))
    exchange.enter()
    assert shown(inside) == shown(type(inside)(other))
    inside.clear()
    exchange.leave()
    assert shown(inside) == shown(make())
    assert not exchanges.OWNED


@each_content
def test_what_is_as_it_was_is_owned_by_nobody(make: Any, then: Any, other: Any) -> None:
    """A thread owns the objects that it writes to, for the length of its replay, and no others."""
    same, written = make(), make()
    exchange = exchange_of((same, then), (written, other))
    exchange.enter()
    owned = {*exchanges.OWNED}
    exchange.leave()
    assert owned == {id(written)}
    assert not exchanges.OWNED


def test_exchanges_nest_on_a_thread() -> None:
    """A replay inside another one may write to the objects that the outer one has written to, and puts that back."""
    held = [1]
    outer, inner = exchange_of((held, [2])), exchange_of((held, [3]))
    outer.enter()
    inner.enter()
    assert held == [3]
    inner.leave()
    assert held == [2]
    assert {*exchanges.OWNED} == {id(held)}
    outer.leave()
    assert held == [1]
    assert not exchanges.OWNED


@pytest.mark.parametrize("wanted", [[1], [2], [3]], ids=["what was there", "what is there", "something else"])
def test_a_thread_waits_for_an_object_that_another_one_has_written_to(wanted: list[int]) -> None:
    """One that owns nothing begins when the other has put back what was there, whatever it wants."""
    held, free, entered = [1], threading.Event(), threading.Event()

    def writer() -> list[int]:
        exchange = exchange_of((held, [2]))
        exchange.enter()
        entered.set()
        free.wait(20)
        found = [*held]
        exchange.leave()
        return found

    def waiter() -> tuple[bool, list[int]]:
        entered.wait(20)
        threading.Timer(0.2, free.set).start()
        exchange = exchange_of((held, wanted))
        exchange.enter()
        found = free.is_set(), [*held]
        exchange.leave()
        return found

    found = on_threads(lambda run: run(), writer, waiter)
    assert found == [[2], (True, wanted)]
    assert held == [1]
    assert not exchanges.OWNED


def test_a_thread_that_owns_an_object_does_not_wait() -> None:
    """It raises an error that names both regions and its own; what it has written is put back, and it owns no more."""
    first, second, gate = [1], [1], threading.Barrier(2, timeout=20)

    def other() -> None:
        exchange = exchange_of((second, [2]), region="theirs")
        exchange.enter()
        gate.wait()
        gate.wait()
        exchange.leave()

    def mine() -> str:
        outer, inner = exchange_of((first, [2]), region="outer"), exchange_of((second, [3]), region="inner")
        outer.enter()
        gate.wait()
        try:
            with pytest.raises(RecomputeError) as error:
                inner.enter()
        finally:
            gate.wait()
        inner.leave()
        outer.leave()
        return str(error.value)

    _, text = on_threads(lambda run: run(), other, mine)
    assert all(name in text for name in ("inner", "outer", "theirs"))
    assert (first, second) == ([1], [1])
    assert not exchanges.OWNED


def test_a_thread_that_needs_nothing_else_waits_for_nobody() -> None:
    """Objects that one thread owns do not keep another one from writing to its own."""
    held: list[list[int]] = [[1], [1]]
    gate = threading.Barrier(2, timeout=20)

    def write(mine: list[int]) -> None:
        exchange = exchange_of((mine, [2]))
        exchange.enter()
        gate.wait()
        exchange.leave()

    on_threads(write, *held)
    assert held == [[1], [1]]


def test_the_owners_end_with_a_failing_replay() -> None:
    """A replay owns what it has written to while it runs, and nothing any more when it has raised."""
    held = [1.0]

    def fn(x: torch.Tensor, held: list[float]) -> torch.Tensor:
        if doing_recompute():
            assert {*exchanges.OWNED} == {id(held)}
            raise KeyError("in the replay")
        return x.sin().exp()

    y = recompute(fn)(vector(), held)
    held.append(2.0)
    with pytest.raises(KeyError):
        y.sum().backward()
    assert not exchanges.OWNED
    assert held == [1.0, 2.0]
