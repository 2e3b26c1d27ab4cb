"""Calls taken apart and put together, views rebuilt over other memory, and fingerprints of bits."""

import enum
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from torch_recompute import recompute
from torch_recompute._torch.tensors import layout, meta, say
from torch_recompute.engine.arguments import Call
from torch_recompute.engine.mismatch import digest
from torch_recompute.engine.views import geometry

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


@each_call
def test_a_call_of_a_region_arrives(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The replay is called with what the forward was called with: objects, memory, and which tensors are one."""
    seen: list[Any] = []

    def fn(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((args, kwargs))
        return x.sin().exp()

    recompute(fn)(torch.ones(3, requires_grad=True), *args, **kwargs).sum().backward()
    assert len(seen) == 2
    (then, structure), (now, again) = map(_pytree.tree_flatten, seen)
    assert structure == again
    assert [[a is b for b in then] for a in then] == [[a is b for b in now] for a in now]
    for a, b in zip(then, now, strict=True):
        assert a is b or (isinstance(a, torch.Tensor) and a.data_ptr() == b.data_ptr() and torch.equal(a, b))


def test_labels() -> None:
    """A leaf is named the way the caller would name it."""
    call = Call((T, [U], 1), {"mask": T, "more": {"a": [U, T]}})
    names = {call.label(i) for i in call.tensors}
    assert {"argument 0", "argument 'mask'"} < names
    assert any("argument 1" in name and name != "argument 1" for name in names)
    assert any("argument 'more'" in name and name != "argument 'more'" for name in names)
    assert len(names) == 4


# --- views ------------------------------------------------------------------------------------------------------------

BASES: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(24.0).view(4, 6),
    "transposed": lambda: torch.arange(24.0).view(6, 4).mT,
    "offset": lambda: torch.arange(30.0)[6:].view(4, 6),
    "slices": lambda: torch.arange(48.0).view(4, 12)[:, ::2],
}

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda b: b.detach(),
    "row": lambda b: b[1],
    "rows": lambda b: b[1:3],
    "column": lambda b: b[:, 2],
    "every other": lambda b: b[::2, 1::2],
    "transposed": lambda b: b.mT,
    "flipped order": lambda b: b.unflatten(1, (2, 3)).permute(2, 0, 1),
    "one more dimension": lambda b: b[:, None],
    "expanded": lambda b: b[0].expand(3, 6),
    "diagonal": lambda b: b.diagonal(),
    "windows": lambda b: b.unfold(1, 3, 1),
    "nothing": lambda b: b[:0],
    "number": lambda b: b[1, 2],
}


@pytest.mark.parametrize("make", BASES.values(), ids=BASES.keys())
@pytest.mark.parametrize("look", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_is_rebuilt_over_other_memory(make: Any, look: Any) -> None:
    """A view placed relative to its base is found again over another base that is laid out like the first."""
    base = make()
    view = look(base)
    place = geometry(view, base)
    assert place is not None
    new = torch.empty_strided(base.shape, base.stride())
    new.copy_(base + 100)
    rebuilt = place.of(new)
    assert rebuilt is not None
    assert torch.equal(rebuilt, look(new))
    assert rebuilt.stride() == view.stride()
    if rebuilt.numel():
        assert rebuilt.untyped_storage().data_ptr() == new.untyped_storage().data_ptr()


@pytest.mark.parametrize("look", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_may_lie_outside_of_its_base(look: Any) -> None:
    """Two views of one memory are placed relative to each other also where neither holds the other."""
    memory = torch.arange(48.0).view(8, 6)
    base, other = memory[4:], look(memory[:4])
    place = geometry(other, base)
    assert place is not None
    copy = memory.clone() + 100
    assert torch.equal(place.of(copy[4:]), look(copy[:4]))


def test_a_base_laid_out_otherwise() -> None:
    """Over a base with other strides the view has the same elements; where the old one was expanded, none."""
    base = torch.arange(24.0).view(4, 6)
    place = geometry(base[1], base)
    assert place is not None
    again = place.of(base.mT.contiguous().mT)
    assert again is not None
    assert torch.equal(again, base[1])
    expanded = torch.arange(6.0).expand(4, 6)
    place = geometry(expanded[:, 1], expanded)
    assert place is not None
    assert place.of(expanded.contiguous()) is None


class Wrapped(torch.Tensor):
    """A subclass, whose memory may be anywhere."""


NOT_PLACED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "another dtype": lambda b: (b.view(torch.int32), b),
    "a part of complex numbers": lambda b: (torch.view_as_real(b.to(torch.complex64)), b.to(torch.complex64)),
    "a conjugate": lambda b: (b.to(torch.complex64).conj(), b.to(torch.complex64)),
    "a negative": lambda b: (b.to(torch.complex64).conj().imag, b),
    "a subclass": lambda b: (b.as_subclass(Wrapped), b),
    "a sparse matrix": lambda b: (b.to_sparse(), b),
}


@pytest.mark.parametrize("make", NOT_PLACED.values(), ids=NOT_PLACED.keys())
def test_what_strides_cannot_say_is_refused(make: Any) -> None:
    """A view of another dtype, with a lazy bit, of a subclass or a sparse layout has no place."""
    view, base = make(torch.arange(24.0).view(4, 6))
    assert geometry(view, base) is None
    assert geometry(base, view) is None


# --- what is compared -------------------------------------------------------------------------------------------------


def test_meta_in_words() -> None:
    """What is compared, and what an error says of it, is dtype, shape and device."""
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert say(meta(tensor)) == "bfloat16[2, 3] on cpu"
    assert meta(tensor) == meta(torch.ones(3, 2, dtype=torch.bfloat16).mT)
    for other in (tensor[:1], tensor.float(), tensor.to("meta")):
        assert meta(other) != meta(tensor)


def test_layout() -> None:
    """Strides tell dense tensors apart; of sparse and nested ones, which may have none, something can be compared."""
    assert layout(torch.zeros(2, 3)) == (3, 1)
    assert layout(torch.zeros(3, 2).mT) == (1, 2)
    for other in (torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)):
        assert layout(other) == layout(other.clone())


DIGESTED: dict[str, Callable[[], torch.Tensor]] = {
    "floats": lambda: torch.linspace(-1, 1, 5000),
    "short": lambda: torch.arange(3.0),
    "number": lambda: torch.tensor(2.0),
    "half": lambda: torch.linspace(-1, 1, 700).bfloat16(),
    "integers": lambda: torch.arange(2000),
    "flags": lambda: torch.arange(100) % 3 == 0,
    "complex": lambda: torch.complex(torch.arange(5.0), torch.ones(5)),
    "rows": lambda: torch.linspace(0, 1, 3000).view(30, 100),
}

each_digested = pytest.mark.parametrize("make", DIGESTED.values(), ids=DIGESTED.keys())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@each_digested
def test_equal_bits_have_equal_fingerprints(make: Any) -> None:
    """The fingerprint depends on the bits alone: not on memory, strides or whether grad is required."""
    tensor = make()
    assert torch.equal(digest(tensor), digest(tensor.clone()))
    wide = torch.stack([tensor, tensor], -1)[..., 0]
    assert torch.equal(digest(tensor), digest(wide))
    if tensor.is_floating_point():
        assert torch.equal(digest(tensor), digest(tensor.clone().requires_grad_().exp().log().detach() * 0 + tensor))
    assert digest(tensor).shape == (2,)


@each_digested
def test_any_changed_byte_shows(make: Any) -> None:
    """A fingerprint changes with any single bit; every byte of a sample of positions is tried."""
    tensor = make()
    whole = digest(tensor)
    count = bits(tensor).numel()
    for position in {0, count - 1, count // 2, *range(0, count, max(1, count // 40))}:
        changed = tensor.clone()
        bits(changed)[position] ^= 1
        assert not torch.equal(digest(changed), whole)


@each_digested
def test_any_exchange_shows(make: Any) -> None:
    """A fingerprint changes when two different elements change places."""
    tensor = make().reshape(-1)
    whole = digest(tensor)
    for i, j in ((0, -1), (0, tensor.numel() // 2), (tensor.numel() // 3, -1)):
        changed = tensor.clone()
        changed[i], changed[j] = tensor[j].clone(), tensor[i].clone()
        if not torch.equal(changed, tensor):
            assert not torch.equal(digest(changed), whole)


def test_special_values_are_told_apart() -> None:
    """Zero and minus zero, and two NaNs with other bits, have other fingerprints; a NaN equals itself."""
    nan = torch.tensor([float("nan")])
    other = nan.clone()
    bits(other)[0] ^= 1
    assert torch.equal(digest(nan), digest(nan.clone()))
    assert not torch.equal(digest(nan), digest(other))
    assert not torch.equal(digest(torch.tensor([0.0])), digest(torch.tensor([-0.0])))


def test_other_layouts_have_fingerprints() -> None:
    """Sparse and nested tensors are compared by their contents."""
    a, b = torch.eye(3).to_sparse(), (torch.eye(3) * 2).to_sparse()
    assert torch.equal(digest(a), digest(a.clone()))
    assert not torch.equal(digest(a), digest(b))
    rows = [torch.arange(2.0), torch.arange(3.0)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert torch.equal(digest(nested), digest(nested.clone()))
    assert not torch.equal(digest(nested), digest(nested * 2))


def test_digest_of_one_element_with_a_stride():
    """A single element has a digest whatever its stride is, the same one."""
    base = torch.arange(4.0)
    assert torch.equal(digest(base[1:2]), digest(base[1::3]))
    assert not torch.equal(digest(base[1:2]), digest(base[2:3]))


class Context:
    """A user's own object that is passed on from layer to layer."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


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
