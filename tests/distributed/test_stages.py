"""Plans for a pipeline, kept by real runs over gloo: the peak of each rank, and gradients to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.pipelines import SCHEDULES
from distributed.ranks import started
from distributed.staged import plans_for, trained

ranks = pytest.fixture(scope="module")(started(2))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_promise_is_kept(ranks: Any, schedule: str) -> None:
    """On each rank of each schedule the measured peak is the predicted one, within the budget; gradients are plain."""
    for rank in ranks.run(trained, schedule, plans_for(schedule, 0.3)):
        print(schedule, rank)
        assert rank["equal"]
