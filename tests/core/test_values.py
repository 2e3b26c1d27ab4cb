"""Values carried from forward to replay: RoundPipe's words, as laws, and the examples that people write with them."""

import copy
import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

from laws.watch import Operations, equal, no_collector, vector
from support.training import gradients
from torch_recompute import (
    MismatchError,
    NotRecomputingError,
    SaveError,
    doing_recompute,
    get_recompute_data,
    is_recomputing,
    no_recompute,
    recompute,
    replay,
    save_for_recompute,
)

Pair = namedtuple("Pair", "left right")


@dataclass
class Routing:
    """A user's own container, made known to pytrees below."""

    indices: Any
    counts: Any


_pytree.register_pytree_node(
    Routing,
    lambda r: ([r.indices, r.counts], None),
    lambda leaves, _: Routing(*leaves),
    serialized_type_name="torch_recompute_tests.Routing",
)


def carried(make: Callable[[], Any], *, key: Any = None) -> tuple[Any, list[Any]]:
    """Saves `make()` in a region, and returns it with what two reads in the replay gave."""
    made: list[Any] = []
    read: list[Any] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            read.append(get_recompute_data(key))
            read.append(get_recompute_data(key))
        else:
            made.append(make())
            save_for_recompute(made[0], key=key)
        return x.sin().exp()

    recompute(fn)(vector()).sum().backward()
    assert len(made) == 1
    return made[0], read


# --- what is carried --------------------------------------------------------------------------------------------------

TREES = {
    "none": lambda: None,
    "number": lambda: 7,
    "text": lambda: "left",
    "tensor": lambda: torch.arange(3),
    "tuple": lambda: (1, torch.arange(2)),
    "list": lambda: [torch.arange(2), [torch.arange(1)]],
    "dict": lambda: {"b": torch.arange(2), "a": {"c": 3}},
    "named tuple": lambda: Pair(torch.arange(2), 1),
    "registered class": lambda: Routing(torch.arange(2), [1, 2]),
    "empty": dict,
}


def alike(a: Any, b: Any) -> bool:
    """Whether two pytrees have equal structure, classes and leaves."""
    leaves, spec = _pytree.tree_flatten(a)
    others, other_spec = _pytree.tree_flatten(b)
    equal = [torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(leaves, others, strict=True)]
    return type(a) is type(b) and spec == other_spec and all(equal)


@pytest.mark.parametrize("make", TREES.values(), ids=TREES.keys())
def test_any_pytree_is_carried(make: Callable[[], Any]) -> None:
    """Whatever was saved is read back, of the same classes and with the same contents, as often as it is asked for."""
    made, read = carried(make)
    assert len(read) == 2
    assert all(type(data) is tuple and len(data) == 1 and alike(data[0], made) for data in read)


@pytest.mark.parametrize("make", TREES.values(), ids=TREES.keys())
def test_any_pytree_is_replayed(make: Callable[[], Any]) -> None:
    """`replay(fn)` gives in the replay what it gave in forward, and does not call `fn` again."""
    calls: list[Any] = []
    seen: list[Any] = []

    def choose() -> Any:
        calls.append(make())
        return calls[-1]

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(replay(choose)())
        return x.sin().exp()

    recompute(fn)(vector()).sum().backward()
    assert len(calls) == 1
    assert len(seen) == 2
    assert alike(seen[1], calls[0])


def test_leaves_are_not_copied() -> None:
    """Objects and parameters are returned as they are, tensors over the same memory."""
    tensor, thing, frozen = torch.arange(3), object(), nn.Parameter(torch.ones(3), requires_grad=False)
    _, read = carried(lambda: (tensor, thing, frozen))
    assert read[0][0][0].data_ptr() == tensor.data_ptr()
    assert read[0][0][1] is thing
    assert read[0][0][2] is frozen


def test_containers_are_fresh() -> None:
    """A container changed by its reader, or by the caller after it was saved, does not change what is read next."""
    box: dict[str, Any] = {"a": [1]}
    made, read = carried(lambda: box)
    assert made is box
    assert read[0][0] == read[1][0]
    assert read[0][0] is not read[1][0]
    assert read[0][0] is not box
    assert read[0][0]["a"] is not box["a"]


@pytest.mark.parametrize("data", [None, (), (1, [2], "c")])
def test_several_values_or_none_come_back_as_a_tuple(data: tuple[Any, ...] | None) -> None:
    """`save_for_recompute(a, b, c)` is read as `(a, b, c)`; where nothing was saved, or `()`, so is the empty tuple."""
    got: list[Any] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            got.append(get_recompute_data())
        elif data is not None:
            save_for_recompute(*data)
        return x.sin().exp()

    recompute(fn)(vector()).sum().backward()
    assert got == [data or ()]


def test_empty_data_counts_as_saved() -> None:
    """`save_for_recompute()` takes the place without a key, so a second save is refused."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        save_for_recompute()
        save_for_recompute(1)
        return x

    with pytest.raises(SaveError, match="called twice without a key"):
        recompute(fn)(vector())


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["router", 3, ("block", 2), object(), None, torch.float32], ids=lambda key: type(key).__name__
)
def test_any_hashable_value_is_a_key(key: Any) -> None:
    """Data is found under the key that it was saved under, whatever hashable value that is."""
    made, read = carried(lambda: [1, 2], key=key)
    assert read[0] == (made,)


def test_keys_do_not_mix() -> None:
    """Each key holds its own data, and the place without a key is one of its own."""
    got: dict[Any, Any] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        for key in (None, "a", "b"):
            if doing_recompute():
                got[key] = get_recompute_data(key=key)
            else:
                save_for_recompute(f"data of {key}", key=key)
        return x.sin().exp()

    recompute(fn)(vector()).sum().backward()
    assert got == {None: ("data of None",), "a": ("data of a",), "b": ("data of b",)}


def test_a_refused_save_leaves_the_first() -> None:
    """After a second save was refused and the error caught, the replay still reads the first."""
    got: list[Any] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            got.append(get_recompute_data())
        else:
            save_for_recompute(1)
            with pytest.raises(SaveError):
                save_for_recompute(2)
            with pytest.raises(SaveError):
                save_for_recompute(x, key="grad")
        return x.sin().exp()

    recompute(fn)(vector()).sum().backward()
    assert got == [(1,)]


# --- where and when ---------------------------------------------------------------------------------------------------


def test_outside_of_regions_nothing_happens() -> None:
    """Outside of every region saving is a no-op, whatever is saved and however often; reading is an error."""
    save_for_recompute(vector())
    save_for_recompute(vector(), vector())
    assert not doing_recompute()
    with pytest.raises(NotRecomputingError):
        get_recompute_data()
    assert replay(lambda v: v.exp())(vector()).requires_grad


def test_no_grad_inside_a_region_still_saves() -> None:
    """A choice made under `no_grad` inside a region is carried: routers are often written so."""
    got: list[Any] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if doing_recompute():
                got.append(get_recompute_data())
            else:
                save_for_recompute(x.argmax())
            best = replay(lambda s: s.exp().argmax())(x)
        return x.sin().exp() * x[best]

    recompute(fn)(vector()).sum().backward()
    assert len(got) == 1
    assert int(got[0][0]) == 2


def test_saving_during_recomputation_does_nothing() -> None:
    """In a replay saving is a no-op, also of other data and without asking `doing_recompute` first."""
    got: list[Any] = []
    runs: list[bool] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        runs.append(doing_recompute())
        save_for_recompute(len(runs))
        save_for_recompute(len(runs), key="a")
        if doing_recompute():
            got.append((get_recompute_data(), get_recompute_data("a")))
        return x.sin().exp()

    recompute(fn)(vector()).sum().backward()
    assert runs == [False, True]
    assert got == [((1,), (1,))]


def test_doing_recompute_says_where_we_are() -> None:
    """False before, in forward and after backward; true in the replay and nowhere else."""
    seen: list[bool] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(doing_recompute())
        return x.sin().exp()

    x = vector()
    x.register_hook(lambda grad: seen.append(doing_recompute()))
    y = recompute(fn)(x)
    seen.append(doing_recompute())
    y.sum().backward()
    seen.append(doing_recompute())
    assert seen == [False, False, True, False, False]
    assert is_recomputing is doing_recompute


def test_saved_calls_are_outside() -> None:
    """Inside a saved call, which is never repeated, saving and reading behave as outside of every region."""
    seen: list[bool] = []

    def attention(x: torch.Tensor) -> torch.Tensor:
        seen.append(doing_recompute())
        save_for_recompute(x)
        with pytest.raises(NotRecomputingError):
            get_recompute_data()
        return x.sin()

    attend = no_recompute(attention)
    recompute(lambda x: attend(x.exp()).exp().exp())(vector()).sum().backward()
    assert seen == [False]


# --- per call ---------------------------------------------------------------------------------------------------------


class Tagged(nn.Module):
    """Saves the tag it is called with, and checks in the replay that it reads the tag of this very call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.read: list[list[int]] = [[]]  # a list in a list is not put back

    def forward(self, x: torch.Tensor, tag: int) -> torch.Tensor:
        if doing_recompute():
            (saved,) = get_recompute_data()
            assert saved == tag
            self.read[0].append(saved)
        else:
            save_for_recompute(tag)
        assert replay(lambda: tag)() == tag
        return (x * self.weight * tag).sin().exp()


def test_one_module_twice_in_one_graph() -> None:
    """Two calls of one module in one graph read each their own data, in each of three backward calls."""
    module = Tagged()
    region = recompute(module)
    loss = region(region(vector(), 1), 2).sum()
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert module.read[0] == [2, 1] * 3


def test_plain_calls_inside_a_region_share_its_data() -> None:
    """The unit is the region, not the function: two blocks in one region need keys, two regions do not."""

    def block(x: torch.Tensor) -> torch.Tensor:
        save_for_recompute(1)
        return x.sin().exp()

    with pytest.raises(SaveError, match="called twice"):
        recompute(lambda x: block(block(x)))(vector())
    recompute(block)(recompute(block)(vector())).sum().backward()


def test_values_die_with_the_graph() -> None:
    """A carried tensor is freed when the graph is dropped, and when backward is done and the output dropped."""
    for backward in (False, True):
        made: list[StorageWeakRef] = []

        def fn(x: torch.Tensor, made: list[StorageWeakRef]) -> torch.Tensor:
            if not doing_recompute():
                mask = torch.ones(3)
                made.append(StorageWeakRef(mask.untyped_storage()))
                save_for_recompute(mask)
            chosen = replay(lambda: torch.zeros(3))()
            if not doing_recompute():
                made.append(StorageWeakRef(chosen.untyped_storage()))
            return x.sin().exp()

        loss = recompute(fn)(vector(), made).sum()
        assert not any(ref.expired() for ref in made)
        if backward:
            loss.backward()
        del loss
        assert all(ref.expired() for ref in made)


# --- replay(fn) -------------------------------------------------------------------------------------------------------


def test_replay_keeps_order_and_position() -> None:
    """Several choices, of one function or of several, come back each in its place."""
    source = iter(range(100))
    draw = replay(lambda: next(source))
    seen: list[list[int]] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append([draw(), draw(), replay(lambda: next(source) * 10)(), draw()])
        return x.sin().exp()

    recompute(fn)(vector()).sum().backward()
    assert seen == [[0, 1, 20, 3]] * 2


def test_what_a_choice_computes_is_not_kept() -> None:
    """What autograd would save inside a choice dies with it: indices are kept, the scores behind them are not."""
    inside: list[weakref.ref[torch.Tensor]] = []

    def choose(x: torch.Tensor) -> torch.Tensor:
        hidden = x.exp()
        inside.append(weakref.ref(hidden))
        return hidden.sin().argmax()

    loss = recompute(lambda x: x.sin().exp() * replay(choose)(x))(vector()).sum()
    assert inside[0]() is None
    loss.backward()
    assert len(inside) == 1


def test_random_numbers_after_a_choice_are_the_same() -> None:
    """A choice that draws random numbers is not repeated, and dropout after it still drops the same elements."""
    masks: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        order = replay(lambda: torch.randperm(3))()
        mask = torch.rand(3)
        masks.append(mask)
        return (x[order] * mask).sin().exp()

    recompute(fn)(vector()).sum().backward()
    assert len(masks) == 2
    assert torch.equal(masks[0], masks[1])


# --- what people write with it ----------------------------------------------------------------------------------------


class MoE(nn.Module):
    """Top-2 of 4 experts. `choose` picks the experts from the scores; the weights of the two are differentiable."""

    def __init__(self, choose: Callable[[torch.Tensor], torch.Tensor], width: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)) for _ in "abcd"
        )
        self.choose = choose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x)
        chosen = self.choose(scores)
        weights = scores.gather(1, chosen).softmax(1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            tokens, place = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, tokens, expert(x[tokens]) * weights[tokens, place, None])
        return x + out


def top_2(scores: torch.Tensor) -> torch.Tensor:
    return scores.topk(2).indices


def by_hand(choose: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same in RoundPipe's words."""

    def chosen(scores: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            (indices,) = get_recompute_data()
        else:
            indices = choose(scores)
            save_for_recompute(indices)
        return indices

    return chosen


def rows() -> torch.Tensor:
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


CARRY = {"replay": replay, "by hand": by_hand}


@pytest.mark.parametrize("carry", CARRY.values(), ids=CARRY.keys())
def test_the_router_gets_its_gradient(carry: Any) -> None:
    """In a top-2 MoE with replayed routing every gradient, the router's included, is that of the plain module."""
    torch.manual_seed(0)
    plain = MoE(top_2)
    ours = copy.deepcopy(plain)
    ours.choose = carry(top_2)
    expected = gradients(plain, rows())
    assert equal(gradients(ours, rows(), run=recompute(ours)), expected)
    router = [name for name, _ in plain.named_parameters()].index("router.weight")
    assert expected[2 + router].abs().sum() > 0


class Unseeded:
    """Scores plus noise from a source that no one can rewind: two calls never agree on near-ties."""

    def __init__(self) -> None:
        self.calls = 0
        self.chosen: list[torch.Tensor] = []

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        noise = torch.tensor([[(hash((self.calls, i, j)) % 1000) / 100 for j in range(4)] for i in range(len(scores))])
        self.chosen.append((scores.detach() + noise).topk(2).indices)
        return self.chosen[-1]


@pytest.mark.parametrize("carry", CARRY.values(), ids=CARRY.keys())
def test_routing_that_is_not_deterministic(carry: Any) -> None:
    """Where the router would choose otherwise if asked again, the replay takes the forward's choice."""
    torch.manual_seed(0)
    choose = Unseeded()
    ours = MoE(carry(choose))
    got = gradients(ours, rows(), run=recompute(ours))
    assert choose.calls == 1
    plain = copy.deepcopy(ours)
    plain.choose = lambda _: choose.chosen[0]
    assert equal(gradients(plain, rows()), got)


SINE, BEST = no_recompute(torch.sin), replay(torch.argmax)
INNER = recompute(lambda x: SINE(x).exp())

# What chooses, and what uses the same calls afterwards.
BRANCHES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "operations": (lambda x: x.exp().argmax(), lambda x: x.cos().exp()),
    "a saved call": (lambda x: SINE(x.exp()).argmax(), lambda x: SINE(x.cos()).exp()),
    "a choice": (lambda x: BEST(-x), lambda x: x.exp() * BEST(x)),
    "a region": (lambda x: INNER(x.exp()).argmax(), lambda x: INNER(x.cos()).exp()),
    "everything": (lambda x: INNER(SINE(x)).argmax() + BEST(x) * 0, lambda x: INNER(SINE(x)) * (1 + BEST(x))),
}


@pytest.mark.parametrize(("choose", "use"), BRANCHES.values(), ids=BRANCHES.keys())
def test_a_choosing_branch_may_hold_anything(choose: Callable[..., Any], use: Callable[..., Any]) -> None:
    """What only the forward's branch does, of whatever kind, is not mistaken for what comes after it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            (best,) = get_recompute_data()
        else:
            best = choose(x)
            save_for_recompute(best)
        return use(x).exp().sin() * x[best]

    x, y = vector(), vector()
    fn(y).sum().backward()
    recompute(fn)(x).sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize(("choose", "use"), BRANCHES.values(), ids=BRANCHES.keys())
def test_choosing_again_is_right_or_an_error(choose: Callable[..., Any], use: Callable[..., Any]) -> None:
    """A replay that reads the data and does the work all the same gets the plain gradient or an error."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            get_recompute_data()
        best = choose(x)
        if not doing_recompute():
            save_for_recompute(best)
        return use(x).exp().sin() * x[best]

    x, y = vector(), vector()
    fn(y).sum().backward()
    try:
        recompute(fn)(x).sum().backward()
    except MismatchError:
        return
    assert torch.equal(x.grad, y.grad)


def test_nonzero_once() -> None:
    """`replay` around `nonzero` leaves one call of it, and thus one sync, in forward and backward together."""

    def picked(x: torch.Tensor, find: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        rows = find(x > 0)
        return x.index_select(0, rows).sin().exp().sum()

    def find(mask: torch.Tensor) -> torch.Tensor:
        return mask.nonzero().squeeze(1)

    x = torch.tensor([-1.0, 0.5, 2.0, -3.0, 1.0])
    results: list[tuple[int, torch.Tensor]] = []
    for call in (picked, recompute(picked)):
        for chosen in (find, replay(find)):
            leaf = x.clone().requires_grad_()
            with Operations() as mode:
                call(leaf, chosen).backward()
            results.append((mode.counts["nonzero"], leaf.grad))
    assert [count for count, _ in results] == [1, 1, 2, 1]
    assert all(torch.equal(grad, results[0][1]) for _, grad in results)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_branch_that_depends_on_data(sign: float) -> None:
    """A branch taken in forward is taken in the replay, although what decided it has changed meanwhile."""
    state = {"limit": 0.0}

    def fn(x: torch.Tensor) -> torch.Tensor:
        if replay(lambda s: bool(s.sum() > state["limit"]))(x.detach()):
            return x.sin().exp()
        return (x * 2).cos().exp().exp()

    x, other = (torch.full((3,), sign, requires_grad=True) for _ in range(2))
    fn(other).sum().backward()
    y = recompute(fn)(x)
    state["limit"] = 100.0 * sign
    y.sum().backward()
    assert torch.equal(x.grad, other.grad)


def test_a_number_of_steps_that_depends_on_data() -> None:
    """A loop whose length is read from a tensor runs as often in the replay, without reading it again."""
    reads: list[int] = []

    def steps(x: torch.Tensor) -> int:
        reads.append(int(x.detach().abs().max().ceil()))
        return reads[-1]

    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(replay(steps)(x)):
            x = x.sin() + 1
        return x.exp()

    x, other = vector(), vector()
    recompute(fn)(x).sum().backward()
    fn(other).sum().backward()
    assert reads == [3, 3]
    assert torch.equal(x.grad, other.grad)


def test_a_value_that_gets_a_history_later_is_freed() -> None:
    """A carried value that the region writes a gradient's work into leaves nothing alive (law 8)."""
    made: list[StorageWeakRef] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        mask = replay(torch.sign)(x.detach())
        made.append(StorageWeakRef(mask.untyped_storage()))
        mask[0] = x.exp().sin()[0]
        return mask.exp()

    with no_collector():
        recompute(body)(torch.randn(3, requires_grad=True))
        assert made[0].expired()
