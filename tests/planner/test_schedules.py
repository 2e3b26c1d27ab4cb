"""Microbatches in flight: counted from what a schedule does, and as the published formulas have them."""

from __future__ import annotations

import pytest

from torch_recompute import ArgumentError
from torch_recompute.planner.schedules import (
    NAMES,
    Action,
    Orders,
    gpipe,
    in_flight,
    one_f_one_b,
    orders_named,
    schedule_steps,
)

CHUNKS = {"GPipe": 1, "1F1B": 1}  # all others have two here


def action(text: str) -> Action:
    return Action(int(text[0]), text[1], int(text[2]))


def in_flight_on_rank(orders: Orders) -> dict[int, int]:
    return {
        rank: max(sum(step.live(stage) for stage in step.forwards) for step in schedule_steps(actions))
        for rank, actions in orders.items()
    }


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 8), (4, 4), (8, 64), (6, 7)])
def test_gpipe_holds_all_and_1f1b_what_lies_between_it_and_the_end(stages: int, microbatches: int) -> None:
    """GPipe holds all microbatches on every stage, 1F1B the smaller of p - s and their number on stage s of p."""
    assert in_flight(gpipe(stages, microbatches)) == dict.fromkeys(range(stages), microbatches)
    assert in_flight(one_f_one_b(stages, microbatches)) == {
        stage: min(stages - stage, microbatches) for stage in range(stages)
    }


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 5, 8), (8, 3, 16)])
def test_interleaved_1f1b_holds_its_warmup_and_one(ranks: int, chunks: int, microbatches: int) -> None:
    """Rank r of p with v chunks holds 2 (p - r - 1) + (v - 1) p microbatches of its warmup and the one that runs."""
    orders = orders_named("Interleaved1F1B", ranks, microbatches, chunks)
    assert in_flight_on_rank(orders) == {
        rank: min(2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1, microbatches * chunks) for rank in range(ranks)
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_looped_bfs_holds_all_of_all_chunks(ranks: int) -> None:
    """Breadth first, each chunk runs all microbatches forward before any goes back."""
    orders = orders_named("LoopedBFS", ranks, 6, 3)
    assert in_flight(orders) == dict.fromkeys(range(3 * ranks), 6)
    assert in_flight_on_rank(orders) == dict.fromkeys(range(ranks), 18)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zbv_holds_the_same_on_every_rank(ranks: int) -> None:
    """In the V of zero bubbles each rank holds 2 p halves of chunks, no more than 1F1B's first stage."""
    held = in_flight_on_rank(orders_named("ZBVZeroBubble", ranks, 3 * ranks, 2))
    assert set(held.values()) <= {2 * ranks, 2 * ranks + 1}


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_begins_and_ends_with_nothing(name: str) -> None:
    """Each stage of each schedule lies on one rank, and each microbatch goes through it once."""
    orders = orders_named(name.lower(), 2, 6, CHUNKS.get(name, 2))
    stages = [stage for actions in orders.values() for stage in {action.stage for action in actions}]
    assert sorted(stages) == list(range(2 * CHUNKS.get(name, 2)))
    for actions in orders.values():
        last = schedule_steps(actions)[-1]
        assert last.live(last.action.stage) == sum(last.live(stage) for stage in last.forwards) == 1
        for stage in last.forwards:
            assert last.forwards[stage] == 6


def test_a_half_is_held_until_its_weights_have_their_gradients() -> None:
    """Between the halves of a backward a microbatch is no more whole, but counts as in flight."""
    actions = [action(text) for text in ("0F0", "0F1", "0I0", "0I1", "0W0", "0W1")]
    found = schedule_steps(actions)
    assert [moment.whole(0) for moment in found] == [0, 1, 1, 0, 0, 0]
    assert [moment.half(0) for moment in found] == [0, 0, 0, 1, 1, 0]
    assert [moment.live(0) for moment in found] == [1, 2, 2, 2, 2, 1]
    assert [str(action) for action in actions] == ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]


def test_zero_bubbles_of_one_chunk_per_rank_hold_what_1f1b_holds() -> None:
    """With weights' gradients made late, the stages of ZB1P hold as many microbatches as 1F1B's first."""
    late = in_flight(orders_named("InterleavedZeroBubble", 4, 8))
    assert late == {0: 4, 1: 4, 2: 4, 3: 4}


@pytest.mark.parametrize("texts", [("0B0",), ("0F0", "0F0"), ("0F0", "0B0", "0W0"), ("0F0", "0I0", "0B0")])
def test_an_order_that_cannot_be_is_refused(texts: tuple[str, ...]) -> None:
    """Backward before forward, work done twice, and halves of what was done whole."""
    with pytest.raises(ArgumentError):
        schedule_steps([action(text) for text in texts])
