"""torch.distributed.pipelining: each schedule gives the plain gradients, and replays a layer once per microbatch."""

from __future__ import annotations

import pytest
import torch

from distributed.pipelines import LAYERS, MICROBATCHES, SCHEDULES, in_one_process, joined, replays, step
from distributed.ranks import RankError
from support.training import assert_same

ONCE = [1] * MICROBATCHES
FAST = ("1F1B", "InterleavedZeroBubble")
nightly = pytest.mark.nightly


@pytest.fixture(scope="module")
def plain(ranks):
    """The gradients of a schedule without regions, by schedule and rate of dropout; each is run once."""
    known = {}

    def gradients(schedule, dropout=0.0):
        if (schedule, dropout) not in known:
            known[schedule, dropout], _ = joined(ranks.run(step, schedule, "nothing", dropout))
        return known[schedule, dropout]

    return gradients


@pytest.fixture(scope="module")
def whole():
    return in_one_process()


@pytest.mark.parametrize("schedule", [pytest.param(one, marks=[nightly] * (one not in FAST)) for one in SCHEDULES])
def test_schedules_replay_once(ranks, plain, whole, schedule):
    """Plain gradients, those of one process, one replay per microbatch and layer, and no data of another microbatch."""
    gradients, notes = joined(ranks.run(step, schedule, "whole layers"))
    assert_same(gradients, plain(schedule))
    for name, wanted in whole.items():
        torch.testing.assert_close(gradients[name], wanted, rtol=1e-9, atol=1e-12)
    assert replays(notes) == dict.fromkeys(range(LAYERS), ONCE)
    assert not any(seen["mixed up"] for seen in notes.values())


@nightly
@pytest.mark.parametrize("place", ["uniform", "saved calls", "nested", "inputs on the host", "checkpoint"])
def test_a_backward_in_halves_replays_once_wherever_regions_are(ranks, plain, place):
    """Zero-bubble schedules replay once also with regions of two layers, saved calls, nesting, stores, `checkpoint`."""
    schedule = "InterleavedZeroBubble"
    gradients, notes = joined(ranks.run(step, schedule, place))
    assert_same(gradients, plain(schedule))
    assert replays(notes) == dict.fromkeys(range(LAYERS), ONCE)
    assert not any(seen["mixed up"] for seen in notes.values())


@nightly
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_dropout_is_that_of_the_forward(ranks, plain, schedule):
    """With random numbers drawn between the forwards of other microbatches, gradients are still the plain ones."""
    gradients, _ = joined(ranks.run(step, schedule, "whole layers", 0.5))
    assert_same(gradients, plain(schedule, 0.5))
    assert any(not torch.equal(gradients[name], other) for name, other in plain(schedule).items())


@nightly
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_configurations_count_the_layers_of_a_chunk(ranks, plain, schedule):
    """`block` with one layer recomputes the first layer of each stage module, be it one or two per rank."""
    gradients, notes = joined(ranks.run(step, schedule, "block"))
    assert_same(gradients, plain(schedule))
    each = LAYERS // (2 if schedule == "1F1B" else 4)
    never = [0] * MICROBATCHES
    assert replays(notes) == {layer: never if layer % each else ONCE for layer in range(LAYERS)}


@nightly
def test_torchs_own_checkpoint_replays_for_every_part(ranks, plain):
    """What the above is compared with: torch.utils.checkpoint replays layers several times, or its selection fails."""
    gradients, notes = joined(ranks.run(step, "InterleavedZeroBubble", "stock"))
    assert_same(gradients, plain("InterleavedZeroBubble"))
    runs = {layer: sum(key[0] == "forward" for key in seen) / MICROBATCHES for layer, seen in notes.items()}
    assert [runs[layer] for layer in range(2)] == [2, 2]  # the first stage has no inputs to be quick about
    assert min(runs[layer] for layer in range(2, LAYERS)) > 3
    with pytest.raises(RankError, match="backward an extra time"):
        ranks.run(step, "InterleavedZeroBubble", "stock selective")
