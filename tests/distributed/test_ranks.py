"""The launcher itself: results, failures and deaths of ranks reach the test, and none spoils the next scenario."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from distributed.ranks import RankError


def total(number):
    sums = torch.full((2,), float(number + dist.get_rank()))
    dist.all_reduce(sums)
    return sums


def fails_on_one():
    if dist.get_rank() == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def dies_on_one():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_every_rank_answers(ranks):
    """A scenario's result on each rank comes back, tensors too."""
    assert [value.tolist() for value in ranks.run(total, 3)] == [[7.0, 7.0]] * 2


def test_a_failure_is_told_and_does_not_last(ranks):
    """The traceback of the rank that failed is told, the other does not wait forever, and the next scenario works."""
    with pytest.raises(RankError, match="rank one has had enough"):
        ranks.run(fails_on_one)
    assert ranks.run(total, 0)[0].tolist() == [1.0, 1.0]


@pytest.mark.nightly
def test_a_death_is_told_and_does_not_last(ranks):
    """A killed rank is told by its exit code, the other fails in its collective, and the next scenario works."""
    survivor, dead = ranks.outcomes(dies_on_one)
    assert "exit code -9" in dead.error
    assert "RuntimeError" in survivor.error
    assert ranks.run(total, 0)[1].tolist() == [1.0, 1.0]
