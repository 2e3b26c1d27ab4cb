"""The longest sequence and the largest batch that a budget holds: they fit, and little more does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.headed import WIDTH, model
from support.zoo import mean_loss
from torch_recompute import ArgumentError, BudgetError, Plan, apply, make_plan, peaks, simulate
from torch_recompute.planner.longest import FINE, UNIT, Longest
from torch_recompute.planner.planner import Planner
from torch_recompute.planner.sizes import Lengths
from torch_recompute.simulation.training_step import TrainingStep


def sequence(length: int = 32) -> torch.Tensor:
    return torch.ones(2, length, WIDTH)


def loss(logits: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(logits.shape[:2].numel(), dtype=torch.long))


pytestmark = pytest.mark.usefixtures("few_choices")
STEP: dict[str, Any] = {"loss": loss, "optimizer": "adamw-fused", "device": "h100"}


@pytest.mark.parametrize(
    ("along", "budget"),
    [
        (True, "600KiB"),
        ("batch", "64MiB"),
        pytest.param(True, "64MiB", marks=pytest.mark.nightly),
        pytest.param("batch", "600KiB", marks=pytest.mark.nightly),
    ],
)
def test_the_most_that_fits(along: bool | str, budget: str) -> None:
    """Each size of the plan fits into the budget, as simulated; a longer one than the last has no plan that does."""
    plan = make_plan(model(2), sequence(), budget=budget, longest=along, **STEP)
    found = [one.shape[0 if along == "batch" else 1] for one in plan.sizes]
    assert found == sorted(found)
    assert len(found) == min(5, found[-1])
    for size in plan.sizes:
        assert size.prediction is not None
        assert size.prediction.peak_bytes <= size.prediction.budget_bytes
        simulated = simulate(model(2), torch.ones(*size.shape), plan=Plan(size.choices), **STEP)
        assert simulated.peak_bytes == size.prediction.peak_bytes
    more = found[-1] + max(2, 6 * found[-1] // FINE) + (UNIT if along is True else 0)
    longer = torch.ones(more, 32, WIDTH) if along == "batch" else sequence(more)
    with pytest.raises(BudgetError):
        Planner(TrainingStep.of("", model(2), longer, None, **STEP)).plan(budget)
    apply(model(2), plan).remove()


@pytest.mark.nightly
def test_it_does_not_depend_on_the_call_that_is_given() -> None:
    """A longer or shorter call as the example gives the same length, to the fineness of the search."""
    found = [
        make_plan(model(2), sequence(length), budget="16MiB", longest=True, **STEP).sizes[-1].shape[1]
        for length in (33, 4000)
    ]
    assert max(found) - min(found) <= UNIT + 4 * max(found) // FINE


def test_no_more_than_the_model_takes() -> None:
    """Where the model has so many positions and no more, the search ends there."""
    search = Longest(TrainingStep.of("", model(2), sequence(), None, **STEP), "1GiB", most=100)
    assert search.plan().sizes[-1].shape == (2, 100, WIDTH)
    assert search.best == 100


@pytest.mark.parametrize("along", [True, "batch"])
def test_the_most_under_configurations(along: bool | str) -> None:
    """Each configuration is at the most that the budget holds: its peak is that of `simulate`, and more exceeds it."""
    budget = 2**22
    found = peaks(model(2), sequence(), recompute="none,full", budget=budget, longest=along, **STEP)
    none, full = found.named("none"), found.named("full")
    assert 2 < none.most < full.most
    for one in (none, full):
        more = one.most + max(UNIT if along is True else 0, one.most // FINE, 1)
        ends = (one.most, more)
        calls = [torch.ones(size, 32, WIDTH) if along == "batch" else sequence(size) for size in ends]
        fits, exceeds = (simulate(model(2), call, plan=one.plan, **STEP).peak_bytes for call in calls)
        assert one.peak_bytes == fits <= budget < exceeds
        assert one.as_data()["most"] == one.most
    title, *rows = str(found).splitlines()[1:4]
    assert [row.split()[1] for row in rows] == [f"{one.most:,}" for one in found]
    assert title.split()[0] == "most"
    assert "most" not in str(peaks(model(2), sequence(), recompute="none", **STEP)).splitlines()[1]


@pytest.mark.parametrize("more", ["offload", pytest.param("tiles", marks=pytest.mark.nightly)])
def test_the_most_of_a_configuration_with_other_means(more: str) -> None:
    """Where tiles or host memory are allowed, the most is that of the configuration with them."""
    words: dict[str, Any] = {"recompute": "full", "budget": 250 * 2**10, "longest": True, **STEP}
    plain, other = (peaks(model(2), sequence(), **words, **{more: allowed})[0] for allowed in (False, True))
    if more == "tiles":
        assert plain.most < other.most
        assert other.tiled
    else:
        assert plain.most <= other.most  # the loss is most of the peak
        assert other.host_bytes > plain.host_bytes == 0


def test_a_search_goes_far_where_the_peak_hardly_rises() -> None:
    """A long sequence is found from a short one in few steps: the next is where a line meets the budget."""
    search = Longest(TrainingStep.of("", model(2), sequence(), None, **STEP), 10**9)
    seen: list[int] = []

    def peak_of(length: int) -> tuple[int, str]:
        seen.append(length)
        return 10**6 + 100 * length, ""

    search.search(peak_of, 10**9, 64)
    assert len(seen) <= 10
    assert 0.99 * 9_990_000 < search.best <= 9_990_000


def test_positions_go_on_in_a_longer_call() -> None:
    """Numbers beside the tokens that count places go on counting in a longer call; all else is repeated."""
    ids, places, mask = torch.tensor([[5, 6, 7]]), torch.arange(4, 7)[None], torch.ones(1, 3, dtype=torch.bool)
    lengths = Lengths(
        ["ids"], (ids,), {"places": places, "mask": mask, "column": torch.arange(3)[:, None].expand(3, 2)}
    )
    (longer,), others = lengths(7)
    assert longer.tolist() == [[5, 6, 7, 5, 6, 7, 5]]
    assert others["places"].tolist() == [[*range(4, 11)]]
    assert others["mask"].all()
    assert others["column"].tolist() == [[place, place] for place in range(7)]
    assert len({*map(id, Lengths(["ids"], (ids, ids), {})(7)[0])}) == 1
    assert lengths(2)[1]["places"].tolist() == [[4, 5]]


def test_what_is_found_before_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search has at any time the most that is known to fit, with its simulated peak."""
    search = Longest(TrainingStep.of("", model(2), sequence(), None, **STEP), "16MiB")
    simulated, seen = search._peak, []

    def interrupted(*args: Any) -> Any:
        if len(seen) == 4:
            raise KeyboardInterrupt
        seen.append(args[-1])
        return simulated(*args)

    monkeypatch.setattr(search, "_peak", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search.plan()
    assert search.best == max(length for length in seen if length <= search.best) > 0
    assert 0 < search.best_peak_bytes <= 16 * 2**20


def test_an_interruption_that_python_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that was told of an interruption ends before its next simulation."""
    search = Longest(TrainingStep.of("", model(2), sequence(), None, **STEP), "16MiB")
    real, seen = search._next, []

    def told(*args: Any) -> int:
        search.interrupted = True
        seen.append(search.best)
        return real(*args)

    monkeypatch.setattr(search, "_next", told)
    with pytest.raises(KeyboardInterrupt):
        search.plan()
    assert seen == [search.best] == [32]


def test_what_cannot_be_asked() -> None:
    """A share, other sizes, and a budget that not one token fits into are refused in words."""
    with pytest.raises(ArgumentError, match="is a share of the activation memory"):
        make_plan(model(2), sequence(), budget=0.5, longest=True, **STEP)
    with pytest.raises(ArgumentError, match="is a share of the activation memory"):
        peaks(model(2), sequence(), budget="50%", longest=True, **STEP)
    with pytest.raises(ArgumentError, match="budget= goes with longest="):
        peaks(model(2), sequence(), budget="1MiB", **STEP)
    with pytest.raises(ArgumentError, match="longest= goes with budget="):
        peaks(model(2), sequence(), longest=True, **STEP)
    with pytest.raises(ArgumentError, match=r"peaks\(longest=...\) is str: 'tokens'"):
        peaks(model(2), sequence(), budget="1MiB", longest="tokens", **STEP)
    with pytest.raises(BudgetError, match=r"too small for a sequence of one token, .* with full"):
        peaks(model(2), sequence(), recompute="full", budget="100KiB", longest=True, **STEP)
    with pytest.raises(ArgumentError, match="with sizes; it looks for the most"):
        make_plan(model(2), sequence(), budget="1MiB", longest=True, sizes=[1, 2], **STEP)
    with pytest.raises(ArgumentError, match='longest=True for the longest sequence, longest="batch"'):
        make_plan(model(2), sequence(), budget="1MiB", longest="tokens", **STEP)
    with pytest.raises(ArgumentError, match="cannot be told where its sequence is"):
        make_plan(model(2), torch.ones(WIDTH), budget="1MiB", longest=True, loss=mean_loss, device="h100")
    with pytest.raises(BudgetError, match="too small for a sequence of one token, whose peak is") as raised:
        make_plan(model(2), sequence(), budget="100KiB", longest=True, **STEP)
    weights = sum(parameter.nbytes for parameter in model(2).parameters())
    assert raised.value.smallest > weights
    assert "weights" in str(raised.value)
