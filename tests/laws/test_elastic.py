"""Elastic regions over random programs: whatever is evicted, and whichever allocation fails, plain PyTorch's gradients.

What the laws say of an elastic region that is kept, evicted, or evicted between two halves of a backward is tried by
its rows in `placements.py`. Here random programs are run with evictions that their own seed draws, and the allocator
of `support/limited.py` fails the n-th allocation of a step.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, seed, settings

import torch_recompute as tr
from support.elastic import Script
from support.programs import Ours, Program, compare, programs

COUNT = int(os.environ.get("TORCH_RECOMPUTE_PROGRAMS", "1000")) // 4
SHARDS = 2
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
SCRIPTS = [(when, saved) for when in ("never", "forward", "half", "inside") for saved in (False, True)]


class Elastically(Ours):
    """The library, with each region elastic; evictions are drawn once for each region."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        draw = random.Random(program.seed)
        self.scripts = [Script(*draw.choice(SCRIPTS), keep=draw.random() < 0.8) for _ in range(3)]
        self._next = 0

    def names(self) -> dict[str, object]:
        def recompute(fn: object, **options: object) -> object:
            self._next += 1
            return tr.recompute(fn, elastic=self.scripts[self._next % 3], **options)

        return super().names() | {"recompute": recompute}


@pytest.mark.parametrize("shard", range(SHARDS))
def test_elastic_programs_do_what_plain_pytorch_does(shard: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs, gradients, random numbers and buffers are plain PyTorch's to the bit, kept, evicted and emptied."""
    seen: Counter[str] = Counter()
    number = shard if settings.default.derandomize else random.randrange(1 << 32)

    @seed(number)
    @settings(max_examples=COUNT // SHARDS, suppress_health_check=SLOW)
    @given(programs())
    def run(program: Program) -> None:
        mode = Elastically(program)
        verdict = compare(program, mode)
        seen["programs"] += 1
        seen["with an eviction"] += any(script.evicted for script in mode.scripts)
        seen["with a replay"] += any(script.replays for script in mode.scripts)
        assert not verdict.wrong, "\n".join([repr(program), *verdict.wrong])

    run()
    with capsys.disabled():
        print("\n  " + ", ".join(f"{count} {what}" for what, count in seen.items()), end=" ")
    assert seen["with an eviction"] > 0.2 * seen["programs"]
    assert seen["with a replay"] > 0.08 * seen["programs"]
