"""Plans with choices for several sizes: each call uses those of its own size, whatever runs beside it."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from laws.watch import equal, on_threads
from support.models import Gpt, gpt, ids_of
from support.replicas import replicas
from support.zoo import mean_loss
from torch_recompute import ArgumentError, BudgetError, Choice, Plan, SizeClass, apply, make_plan, measure, simulate

WIDTH, BATCH = 32, 2
SIZES = (16, 48, 128)


def grads(model: nn.Module, *calls: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of one step over some microbatches, all of whose forwards come first."""
    model.zero_grad()
    torch.manual_seed(1)
    for loss in [model(ids) for ids in calls]:
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Flops(TorchDispatchMode):
    """Counts FLOPs of products; torch's own counter does more and takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def counted(model: nn.Module, *calls: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Gradients and FLOPs of a step."""
    with Flops() as count:
        return grads(model, *calls), count.flops


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Planned for three sizes, with a budget at which the smallest needs no region and the largest many."""
    return make_plan(gpt(), budget=0.3, device="h100", sizes=[(ids_of(length),) for length in SIZES], hold_output=False)


# No replay at all, parts of the MLP, and everything: sets that share modules and nest differently.
BY_HAND = Plan(
    (Choice(("blocks.0",), ("mlp.0",)), Choice(("blocks.1", "blocks.2")), Choice(("blocks.3",), ("@product",))),
    sizes=(SizeClass((BATCH, 16)), SizeClass((BATCH, 48), (Choice(("blocks.0.mlp",)), Choice(("blocks.3",))))),
)


def test_a_stream_of_lengths_stays_under_the_budget(plan: Plan) -> None:
    """Lengths with a heavy tail: no step exceeds the budget, and fewer FLOPs are replayed than by one safe plan."""
    assert plan.prediction is not None
    torch.manual_seed(3)
    drawn = torch.distributions.Pareto(10.0, 1.1).sample((8,))
    lengths = [min(SIZES[-1], int(length)) for length in drawn] + [SIZES[1] + 1, SIZES[-1]]
    assert min(lengths) < SIZES[0] < sorted(lengths)[-3] < SIZES[-1]
    plain, planned, fixed = gpt(), gpt(), gpt()
    apply(planned, plan)
    apply(fixed, Plan(plan.choices))
    replayed = {"planned": 0, "fixed": 0}
    for length in lengths:
        wanted, without = counted(plain, ids_of(length))
        for name, model in (("planned", planned), ("fixed", fixed)):
            found, flops = counted(model, ids_of(length))
            assert equal(found, wanted)
            replayed[name] += flops - without
        planned.zero_grad()
        ids = ids_of(length)
        with measure(planned).track(ids) as measured:
            planned(ids).backward()
        assert measured.peak_bytes <= plan.prediction.budget_bytes
    assert 0 < replayed["planned"] < 0.8 * replayed["fixed"]


def test_each_size_is_promised_its_own_peak(plan: Plan) -> None:
    """Every size fits into the one budget; the simulated peak is the promised one, and short calls replay nothing."""
    assert [size.shape for size in plan.sizes] == [(BATCH, length) for length in SIZES]
    assert plan.prediction is not None
    assert plan.sizes[0].choices == ()
    assert plan.choices == plan.sizes[-1].choices != plan.sizes[1].choices
    for size, length in zip(plan.sizes, SIZES, strict=True):
        assert size.prediction is not None
        assert size.prediction.budget_bytes == plan.prediction.budget_bytes
        assert size.prediction.peak_bytes <= size.prediction.budget_bytes
        assert simulate(gpt(), (ids_of(length),), plan=plan, hold_output=False).peak_bytes == size.prediction.peak_bytes


def test_a_size_holds_up_to_its_shape() -> None:
    """At a size its choices are used, one above it those of the next, above all those of the plan itself."""
    plain, planned = gpt(), gpt()
    handle = apply(planned, BY_HAND)
    ran: dict[int, list[str]] = {}
    for length in (15, 16, 17, 48, 49):
        with handle.watch():
            assert equal(grads(planned, ids_of(length)), grads(plain, ids_of(length)))
        ran[length] = ["-".join(row.choice.paths) for row in handle.report().rows if row.replays]
    middle, large = ["blocks.0.mlp", "blocks.3"], ["blocks.0", "blocks.1-blocks.2", "blocks.3"]
    assert ran == {15: [], 16: [], 17: middle, 48: middle, 49: large}
    wide = torch.zeros(BATCH + 1, 4, dtype=torch.long)  # few elements, but more rows than any size
    with handle.watch():
        grads(planned, wide)
    assert ["-".join(row.choice.paths) for row in handle.report().rows if row.replays] == large


def test_calls_that_overlap_keep_their_own() -> None:
    """Microbatches of all sizes in flight, backward on another thread: each replays what its own size asks for."""
    calls = [ids_of(length) for length in (8, 40, 60, 30, 100)]
    plain, planned = gpt(), gpt()
    apply(planned, BY_HAND)
    found, flops = counted(planned, *calls)
    assert equal(found, grads(plain, *calls))
    assert flops == sum(counted(planned, ids)[1] for ids in calls)

    torch.manual_seed(1)
    losses = [planned(ids) for ids in calls]
    planned.zero_grad()
    on_threads(lambda losses: [loss.backward() for loss in losses], losses)
    assert equal([p.grad for p in planned.parameters() if p.grad is not None], grads(plain, *calls))


def test_a_part_called_by_itself_goes_by_the_plan_s_own_choices() -> None:
    """Outside of a call of the model no size is known, so the choices that are safe for all hold."""
    planned = gpt()
    handle = apply(planned, BY_HAND)
    with handle.watch():
        planned.blocks[0](torch.randn(1, 4, WIDTH)).sum().backward()
    assert [row.choice for row in handle.report().rows if row.replays] == [BY_HAND.choices[0]]


def test_copies_and_pickles_go_by_their_own_size() -> None:
    """A copy of a model, called inside of the model's own call, goes by the size that it is given itself."""
    planned = gpt()
    handle = apply(planned, BY_HAND)
    for other in (copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))):
        plain = gpt()
        hook = planned.embed.register_forward_hook(lambda *_, other=other: grads(other, ids_of(60)) and None)
        with handle.watch():
            found = grads(planned, ids_of(8))
        hook.remove()
        hook = plain.embed.register_forward_hook(lambda *_, other=other: grads(other, ids_of(60)) and None)
        assert equal(found, grads(plain, ids_of(8)))
        hook.remove()
        assert all(row.replays == 0 for row in handle.report().rows)
        assert equal(grads(other, ids_of(60)), grads(plain, ids_of(60)))
    handle.remove()
    assert all("forward" not in module.__dict__ for module in planned.modules())


def test_replicas_go_by_the_size_that_they_are_given(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica of `DataParallel` chooses by its own call, and a warning is said once for all of them."""
    plain, planned = gpt(), gpt()
    apply(planned, plan)
    lengths = (SIZES[0], SIZES[-1] + 1)

    def step(m: Gpt) -> list[torch.Tensor]:
        torch.manual_seed(1)
        m.zero_grad()
        losses = [copy(ids_of(length)) for copy, length in zip(replicas(m, monkeypatch), lengths, strict=True)]
        torch.stack(losses).sum().backward()
        return [p.grad for p in m.parameters() if p.grad is not None]

    with pytest.warns(RuntimeWarning, match="is called with") as w:
        found = [step(planned) for _ in range(2)]
    assert len(w) == 1
    assert equal(found[1], step(plain))


def test_a_call_beyond_the_largest_is_said_once(plan: Plan) -> None:
    """A promise that does not hold is said, once, and gradients are right; at the largest itself nothing is said."""
    plain, planned = gpt(), gpt()
    apply(planned, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grads(planned, ids_of(SIZES[-1]))
        with torch.no_grad():
            planned(ids_of(SIZES[-1] + 1))  # saves nothing
    ids = ids_of(SIZES[-1] + 1)
    with pytest.warns(
        RuntimeWarning, match=rf"Gpt is called with .* 2 x {SIZES[-1] + 1}; .* is 2 x {SIZES[-1]}\."
    ) as w:
        found = [grads(planned, ids) for _ in range(2)]
    assert len(w) == 1
    assert equal(found[1], grads(plain, ids))


def test_plain_data(plan: Plan) -> None:
    """JSON loses nothing; print, difference and digest know of sizes."""
    for one in (plan, BY_HAND):
        assert Plan.from_json(one.to_json()) == one
        assert one.digest() == Plan.from_json(one.to_json()).digest() != Plan(one.choices).digest()
        assert one.diff(Plan.from_json(one.to_json())) == ""
    assert str(BY_HAND).split("\n") == [
        "plan of 2 sizes",
        "calls up to 2 x 16: 0 regions",
        "calls up to 2 x 48: 2 regions",
        "  recompute blocks.0.mlp",
        "  recompute blocks.3",
        "calls larger than 2 x 48: 3 regions",
        "  recompute blocks.0, mlp.0 kept",
        "  recompute blocks.1 to blocks.2",
        "  recompute blocks.3, matmuls kept",
    ]
    assert str(plan).count("calls up to") == 3
    assert "larger than" not in str(plan)
    changed = BY_HAND.diff(Plan(BY_HAND.choices, sizes=BY_HAND.sizes[:1])).split("\n")
    assert [line for line in changed if line.startswith("-up")] == [
        "-up to 2 x 48: recompute blocks.0.mlp",
        "-up to 2 x 48: recompute blocks.3",
    ]


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((SizeClass((2, 8)), SizeClass((2, 8))), "sizes rise from one to the next, but 2 x 8 comes after 2 x 8"),
        ((SizeClass((2, 8)), SizeClass((1, 9))), "sizes rise from one to the next, but 1 x 9 comes after 2 x 8"),
        ((SizeClass(()),), r"\(\) is not the shape of a tensor with elements"),
        ((SizeClass((2, 0)),), r"\(2, 0\) is not the shape"),
        ((SizeClass((2, 8), (Choice(("a",)), Choice(("a",)))),), "'a' is in two choices"),
    ],
)
def test_sizes_that_cannot_be(sizes: tuple[SizeClass, ...], why: str) -> None:
    """Sizes that do not rise, are none, or whose regions contradict each other are refused in words."""
    with pytest.raises(ArgumentError, match=why):
        Plan(sizes=sizes)


def test_keyword_arguments_and_what_does_not_fit() -> None:
    """An example may be keyword arguments, in any order; a size that no plan fits is named, with its least budget."""
    model = gpt(1)
    with pytest.raises(BudgetError, match="sizes: for calls of 2 x 8, budget=") as caught:
        sizes = [{"mask": torch.zeros(2), "ids": ids_of(8)}]
        make_plan(model, budget="1KiB", device="h100", sizes=sizes, loss=mean_loss)
    assert caught.value.smallest > 1024


def test_compiles_in_one_graph() -> None:
    """A compiled model is compiled for each size with the regions of that size."""
    torch.compiler.reset()
    regions: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        regions.append(sum("tag_activation_checkpoint" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    apply(
        model, Plan((Choice(("0",)), Choice(("2",))), sizes=(SizeClass((2, 4)), SizeClass((3, 4), (Choice(("2",)),))))
    )
    call = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    for rows in (2, 3, 4):
        call(torch.randn(rows, 4)).sum().backward()
    assert regions == [0, 1, 2]
    torch.compiler.reset()
