"""Sizes as lengths: calls made from one example, and the lengths at which a step begins to need more."""

from __future__ import annotations

import math

import pytest
import torch
from frontier.config import PRICES

from support.models import gpt, ids_of
from support.zoo import mean_loss
from torch_recompute import ArgumentError, Plan, apply, make_plan, measure, simulate
from torch_recompute.planner import sizes
from torch_recompute.planner.sizes import FINENESS, Lengths, longest

NAMES = ("ids", "mask")


def test_every_dimension_of_the_length_is_cut_or_repeated() -> None:
    """Tokens, labels, masks of two dimensions and places follow the length; what has none of it stays."""
    ids, other = torch.arange(10).view(2, 5), torch.zeros(2, 3)
    kwargs = {"mask": torch.ones(2, 1, 5, 5).tril(), "places": torch.arange(5), "other": other, "flag": True}
    lengths = Lengths(NAMES, (ids,), kwargs)
    assert lengths(5) == ((ids,), kwargs)
    args, found = lengths(3)
    assert torch.equal(args[0], ids[:, :3])
    assert torch.equal(found["mask"], torch.ones(2, 1, 3, 3).tril())
    assert torch.equal(found["places"], torch.arange(3))
    assert found["other"] is other
    assert found["flag"] is True
    args, found = lengths(7)
    assert torch.equal(args[0], torch.cat([ids, ids[:, :2]], 1))
    assert found["mask"].shape == (2, 1, 7, 7)
    (embedded,), _ = Lengths((), (torch.randn(2, 5, 4, requires_grad=True),), {})(9)
    assert embedded.shape == (2, 9, 4)
    assert embedded.is_leaf
    assert embedded.requires_grad
    assert Lengths((), (torch.zeros(2, 5, device="meta"),), {})(4)[0][0].device.type == "meta"


@pytest.mark.parametrize("budget", [-1, 0, 1, 999, 10**4, 123_456, 10**6, 10**8])
@pytest.mark.parametrize("steps", [1, 16, 700])
def test_the_longest_that_fits_is_found(budget: int, steps: int) -> None:
    """For lines, parabolas and stairs: what is found fits, the next sixty-fourth does not, and few are tried."""
    for peak in (lambda n: 40 * n, lambda n: 3 * n * n + 5 * n, lambda n: 7 * (n // steps * steps) ** 2 + n):
        for most in (1, 2, 100, 4096):
            tried: list[int] = []

            def fits(n: int, peak=peak, tried: list[int] = tried) -> bool:
                tried.append(n)
                return peak(n) <= budget

            found = longest(fits, most)
            near = max(1, most // FINENESS)
            assert found == 0 or peak(found) <= budget
            assert found + near >= most or peak(found + near) > budget
            assert all(0 < n < most for n in tried)
            assert len(tried) <= math.log2(FINENESS) + 1


def test_lengths_are_planned_as_examples_are() -> None:
    """Lengths of one call give the plan that examples of these lengths give, longer or shorter, in any order."""
    model = gpt(1)
    ids = torch.arange(40).view(2, 20)
    longer = torch.cat([ids, ids], 1)
    by_length = make_plan(model, (ids,), budget=0.3, device="h100", sizes=[8, 40], loss=mean_loss)
    by_example = make_plan(model, budget=0.3, device="h100", sizes=[(ids[:, :8],), (longer,)], loss=mean_loss)
    assert by_length == by_example
    assert make_plan(model, (ids,), budget=0.3, device="h100", sizes=[40, 8], loss=mean_loss) == by_length
    assert [size.shape for size in by_length.sizes] == [(2, 8), (2, 40)]


def test_lengths_may_be_in_anything_that_holds_numbers() -> None:
    """Lengths as NumPy's numbers, a tensor or a generator are those of a list, and None is none."""
    model, ids = gpt(1), torch.arange(40).view(2, 20)
    np = pytest.importorskip("numpy")
    for given in (np.array([8, 20]), [np.int64(8), 20], torch.tensor([8, 20]), (n for n in (8, 20))):
        plan = make_plan(model, ids, budget=0.3, device="h100", loss=mean_loss, sizes=given)  # type: ignore[arg-type]
        assert [size.shape for size in plan.sizes] == [(2, 8), (2, 20)]
    assert not make_plan(model, ids, budget=0.3, device="h100", loss=mean_loss, sizes=None).sizes  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"float: 8\.0; lengths are whole numbers"):
        make_plan(model, ids, budget=0.3, loss=mean_loss, sizes=[8.0, 20.0])  # type: ignore[list-item]


def test_all_lengths_keep_one_budget_and_pay_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each class fits where it ends, simulated and measured; the first needs no region; one plan would replay more."""
    top = 64
    monkeypatch.setattr(sizes, "MOST", 2)
    plan = make_plan(gpt(2), (ids_of(top),), budget=0.25, device=PRICES["flops"], sizes="all", loss=mean_loss)
    assert plan.prediction is not None
    budget = plan.prediction.budget_bytes
    lengths, replayed = [size.shape[1] for size in plan.sizes], list[int]()
    assert len(lengths) >= 3
    assert lengths[-1] == top
    assert plan.sizes[0].choices == ()
    assert plan.sizes[-1].choices == plan.choices
    for size in plan.sizes:
        assert size.prediction is not None
        assert size.prediction.peak_bytes <= budget == size.prediction.budget_bytes
        step = simulate(gpt(2), (ids_of(size.shape[1]),), plan=plan, loss=mean_loss)
        assert step.peak_bytes == size.prediction.peak_bytes
        assert step.flops["replay"] == size.prediction.replay_flops
        replayed.append(step.flops["replay"])
    every = Plan(plan.choices)
    fixed = [simulate(gpt(2), (ids_of(n),), plan=every, loss=mean_loss).flops["replay"] for n in lengths]
    assert sum(replayed) < 0.8 * sum(fixed)
    # The shortest class ends where a step without regions would no longer fit.
    assert simulate(gpt(2), (ids_of(lengths[0] + max(1, top // FINENESS)),), loss=mean_loss).peak_bytes > budget
    model = gpt(2)
    apply(model, plan)
    for length in (lengths[0], lengths[0] + 1, lengths[1], top // 2 + 3, top):
        model.zero_grad()
        ids = ids_of(length)
        with measure(model).track(ids) as measured:
            model(ids).backward()
        assert measured.peak_bytes <= budget
    assert Plan.from_json(plan.to_json()) == plan


def test_a_budget_for_everything_has_one_size() -> None:
    """Where the longest call needs no region, there is one class, without any."""
    plan = make_plan(gpt(1), (ids_of(16),), budget="1GiB", device="h100", sizes="all", loss=mean_loss)
    assert [(size.shape, size.choices) for size in plan.sizes] == [((2, 16), ())]


@pytest.mark.parametrize(
    ("args", "asked", "why"),
    [
        ((ids_of(8),), [4, (ids_of(8),)], "sizes holds lengths of sequences and tuple"),
        ((ids_of(8),), [4, 0], "sizes holds lengths of sequences and int: 0"),
        ((ids_of(8),), [True, 4], "sizes holds lengths of sequences and bool"),
        ((), [4, 8], "missing a required argument: 'ids'"),
        ((torch.zeros(8),), [4], r"the call has a first tensor of shape \(8,\)"),
        ((torch.zeros(2, 2),), "all", r"a first tensor of shape \(2, 2\), in which it could be two"),
        ((torch.zeros(1, 3, 8, 8),), "all", r"a first tensor of shape \(1, 3, 8, 8\)"),
        ((ids_of(8),), "learn", "sizes='learn' is not a choice of sizes"),
    ],
)
def test_what_cannot_be_told_is_refused(args, asked, why) -> None:
    """Lengths that are none, and calls without one sequence that can be found, are refused in words."""
    with pytest.raises(ArgumentError, match=why):
        make_plan(gpt(1), args, budget=0.5, device="h100", sizes=asked, loss=mean_loss)
