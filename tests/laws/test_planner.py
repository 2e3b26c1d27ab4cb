"""The laws of the planner, over the models of the zoo; a row added there gains them all.

Each row is profiled once, for a data sheet, so that nothing depends on this machine; the laws of a row share what was
found: its options, the operations of its layers, its plans for two budgets, and their simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import nn

from support import zoo
from support.training import promise_is_kept
from support.zoo import each_row, scalar_loss
from support.zoo_rows import Row
from torch_recompute import Plan
from torch_recompute.memory.loop import Loop
from torch_recompute.plan.plan import Prediction
from torch_recompute.plan.roles import inside
from torch_recompute.planner.cost import complaints
from torch_recompute.planner.planner import Planner
from torch_recompute.simulation.training_step import TrainingStep

pytestmark = each_row

SHARES = (0.2, 0.7)  # of the activation memory

# How many tokens an expert gets is not known before the step runs, and is taken as the most.
SIZES_OF_DATA = {"megatron_moe"}
# transformers collects the scores of routers in a context variable, and regions hold the context of their forward.
HELD_IN_CONTEXT = {"mixtral", "olmoe", "qwen3_moe"}


@dataclass
class Planned:
    """A model of the zoo, and what its planner found."""

    name: str
    planner: Planner

    @cached_property
    def predictions(self) -> list[tuple[Plan, Prediction]]:
        """Plans for rising budgets, with what they promise."""
        plans = [self.planner.plan(share) for share in SHARES]
        return [(plan, plan.prediction) for plan in plans if plan.prediction is not None]


@pytest.fixture(scope="module")
def planned(row: Row) -> Iterator[Planned]:
    """A row with two layers, the first of a stack and one like those after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "LAYERS", 2)
        model, inputs = row.build()
        loop = Loop(hold_output=False)
        yield Planned(row.name, Planner(TrainingStep(model, (), inputs, loss=scalar_loss, device="h100", loop=loop)))


def test_the_costs_obey_their_rules(planned: Planned) -> None:
    """What the planner makes is not validated where it is used; no rule for what is read from a file is broken."""
    assert [*complaints(planned.planner.costs)] == []


def test_a_prediction_is_what_is_simulated_and_measured(planned: Planned) -> None:
    """A step under a plan takes the bytes and FLOPs that were predicted, and has the gradients of the plain one."""

    def fresh() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        model, inputs = zoo.build(planned.name)
        return model, lambda: scalar_loss(model(**inputs))

    for plan, promise in planned.predictions:
        assert planned.planner.simulated(Plan(plan.choices)).peak_bytes == promise.peak_bytes
    promise_is_kept(
        fresh, planned.predictions[0][0], zoo.build(planned.name)[1], exact=planned.name not in SIZES_OF_DATA
    )


def test_a_larger_budget_never_costs_more(planned: Planned) -> None:
    """Seconds fall as the budget rises, down to those of the step without regions; no peak is above its budget."""
    seconds = [promise.step_seconds for _, promise in planned.predictions]
    assert seconds == sorted(seconds, reverse=True)
    assert all(promise.peak_bytes <= promise.budget_bytes for _, promise in planned.predictions)
    most = planned.planner.plan(planned.planner.plain.peak_bytes).prediction
    assert most is not None
    assert most.step_seconds == most.plain_step_seconds <= seconds[-1]


def test_no_plan_is_faster_than_its_bound(planned: Planned) -> None:
    """What is said to be the least that any schedule takes within the budget is no more than what the plan takes."""
    for _, promise in planned.predictions:
        assert promise.plain_step_seconds <= promise.bound_seconds <= promise.step_seconds


def test_what_a_plan_says_it_frees_is_freed(planned: Planned) -> None:
    """Between forward and backward the layers keep so much less as the lines of the plan say."""

    def kept(choices: Plan) -> int:
        """Bytes but those that the model made outside of its layers, and passed to them."""
        made = planned.planner.simulated(choices).saved_by_module.items()
        first = planned.planner.paths[0]
        return sum(n for module, n in made if module == first or not inside(first, module))

    for plan, promise in planned.predictions:
        freed = kept(Plan()) - kept(Plan(plan.choices))
        assert freed >= sum(line.count * line.freed_bytes for line in promise.lines) or planned.name in HELD_IN_CONTEXT


def test_a_budget_of_nothing_is_the_least_peak(planned: Planned) -> None:
    """`budget=0` and `"0%"` give the plan with the smallest peak, below which no budget is enough."""
    least = planned.planner.least[1].peak_bytes
    assert [planned.planner.plan(budget).predicted_peak_bytes for budget in (0, "0%")] == [least, least]
