"""A recorded call taken apart and put together again with other tensors."""

import enum
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from torch_recompute.planner.arguments import Call

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
    serialized_type_name="torch_recompute_tests.Recorded",
)

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
    "nests": (([T, {"a": (U, [1, None])}],), {"more": {"x": [T]}}),
    "named tuple": ((Pair(T, 1),), {}),
    "ordered dict": ((OrderedDict(b=T, a=1),), {}),
    "registered class": ((Batch(T, None),), {"batch": Batch(1, [U])}),
    "an object": ((T, THING), {"thing": THING}),
    "objects in a list": (([THING, T],), {}),
    "one tensor twice": ((T, T), {"again": [T]}),
    "an empty list": ((T, []), {}),
    "an empty dict by keyword": ((T,), {"options": {}}),
    "an empty tuple": (((),), {}),
    "empty and full": (([], [T]), {"a": {}, "b": {"x": T}}),
    "size": ((torch.Size([2, 3]),), {}),
    "module": ((nn.Identity(),), {}),
}

each_call = pytest.mark.parametrize(("args", "kwargs"), CALLS.values(), ids=CALLS.keys())


def same(a: Any, b: Any) -> bool:
    """Whether two pytrees have the same classes and structure, and the very same leaves."""
    leaves, spec = _pytree.tree_flatten(a)
    others, other_spec = _pytree.tree_flatten(b)
    return spec == other_spec and len(leaves) == len(others) and all(map(lambda x, y: x is y, leaves, others))


@each_call
def test_a_call_comes_back(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """From its leaves a call is put together with the same classes, structure, order of keywords and leaves."""
    call = Call(args, kwargs)
    for _ in range(2):
        again, more = call.arguments(call.leaves)
        assert same(tuple(again), args)
        assert same(more, kwargs)
        assert list(more) == list(kwargs)


@each_call
def test_containers_of_a_call_are_fresh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Lists and dicts are built again each time, so that what the caller or a replay does to them stays there."""
    call = Call(args, kwargs)
    again, more = call.arguments(call.leaves)
    for new, old in zip([*again, *more.values()], [*args, *kwargs.values()], strict=True):
        if isinstance(old, (list, dict)):
            assert new is not old


@each_call
def test_tensors_of_a_call_are_found(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Every tensor, at any depth, is one of the leaves marked as tensors, and nothing else is."""
    call = Call(args, kwargs)
    found = [call.leaves[i] for i in call.tensors]
    wanted = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    assert sorted(map(id, found)) == sorted(map(id, wanted))


@each_call
def test_leaves_of_a_call_can_be_replaced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Other tensors in the places of the old ones arrive in the same places of the arguments."""
    call = Call(args, kwargs)
    leaves = list(call.leaves)
    for i in call.tensors:
        leaves[i] = leaves[i] + 1
    again, more = call.arguments(leaves)
    new = [leaf for leaf in _pytree.tree_leaves((tuple(again), more)) if isinstance(leaf, torch.Tensor)]
    old = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    assert all(torch.equal(a, b + 1) for a, b in zip(new, old, strict=True))


def test_labels() -> None:
    """A leaf is named the way the caller would name it."""
    call = Call((T, [U], 1), {"mask": T, "more": {"a": [U, T]}})
    names = {call.label(i) for i in call.tensors}
    assert {"argument 0", "argument 'mask'"} < names
    assert any("argument 1" in name and name != "argument 1" for name in names)
    assert any("argument 'more'" in name and name != "argument 'more'" for name in names)
    assert len(names) == 4


class Context:
    """A user's own object that is passed on from layer to layer."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Kind(enum.Enum):
    """One of a kind."""

    CAUSAL = "causal"


class Slotted:
    """Has no dictionary."""

    __slots__ = ("tensor",)


class Named(dict[str, Any]):
    """Extends a class that is written in C."""


def test_an_object_comes_back_as_it_was() -> None:
    """With its class and attributes, objects within it too; one that is there twice, or within itself, is one again."""
    given = Context(tensor=T, scale=2, parts=[U], inner=Context(tensor=U))
    given.parts.append(given)
    call = Call((given, 1), {"again": given, "several": [given, {"a": given.inner}]})
    given.__dict__.clear()
    for _ in range(2):
        (made, one), more = call.arguments(call.leaves)
        assert type(made) is Context
        assert made is not given
        assert (made.scale, one, len(made.parts)) == (2, 1, 2)
        assert made.tensor is T
        assert made.parts[0] is made.inner.tensor is U
        assert made is more["again"] is more["several"][0] is made.parts[1]
        assert made.inner is more["several"][1]["a"]
        made.scale = 3


def test_an_object_that_may_be_one_of_a_kind_is_passed_on() -> None:
    """A handle, a member of an enumeration, and what has more than its attributes are no copies in a replay."""
    slotted, named = Slotted(), Named()
    named.tensor = T  # type: ignore[attr-defined]
    for one in (Kind.CAUSAL, Context(lock=threading.Lock()), Context(model=nn.Identity()), slotted, named, Context()):
        call = Call((one,), {})
        assert call.arguments(call.leaves)[0][0] is one
