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

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import torch_recompute as tr
from support.elastic import Script
from support.limited import Limited, limited, missing
from support.programs import Ours, Plain, Program, compare, counted, execute, programs

pytestmark = pytest.mark.filterwarnings("ignore:.* within saved-tensor hooks that it enters:RuntimeWarning")

COUNT = int(os.environ.get("TORCH_RECOMPUTE_PROGRAMS", "300")) // 4
PROGRAMS_THAT_FAIL, MOST_ALLOCATIONS = COUNT * 4 // 25, 600
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
SCRIPTS = [(when, saved) for when in ("never", "forward", "half", "inside") for saved in (False, True)]


class Elastically(Ours):
    """The library, with each region elastic; evictions are drawn once for each region."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        draw = random.Random(repr(program))
        self.scripts = [Script(*draw.choice(SCRIPTS), keep=draw.random() < 0.8) for _ in range(3)]
        self.saved_calls_last = not any(script.saved for script in self.scripts)
        self._next = 0

    def names(self) -> dict[str, object]:
        def recompute(fn: object, **options: object) -> object:
            self._next += 1
            return tr.recompute(fn, elastic=self.scripts[self._next % 3], **options)

        return super().names() | {"recompute": recompute}


def test_elastic_programs_do_what_plain_pytorch_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs, gradients, random numbers and buffers are plain PyTorch's to the bit, kept, evicted and emptied."""
    seen: Counter[str] = Counter()
    fixed = settings.default.derandomize
    number = 0 if fixed else random.randrange(1 << 32)

    @seed(number)
    @settings(max_examples=COUNT, suppress_health_check=SLOW)
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
    assert seen["with a replay"] > 0.08 * seen["programs"] or not fixed  # of few programs it may be less


class Failing(Elastically):
    """The library, with elastic or ordinary regions, on an allocator whose n-th allocation in the program fails."""

    def __init__(self, program: Program, elastic: bool, memory: Limited, nth: int) -> None:
        super().__init__(program)
        self._elastic, self._memory, self._nth = elastic, memory, nth
        for script in self.scripts:
            script.retries = 2

    def names(self) -> dict[str, object]:
        found = super().names() | ({} if self._elastic else {"recompute": tr.recompute})
        self._memory.fail_at(self._nth)
        return found

    def finish(self) -> None:
        self._memory.fail_at(None)
        super().finish()


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("elastic", [True, False])
def test_an_allocation_that_fails_changes_nothing(elastic: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Every third allocation of a step fails in turn: its gradients are plain PyTorch's, or the error passes."""
    seen: Counter[str] = Counter()

    @seed(2)
    @settings(max_examples=PROGRAMS_THAT_FAIL, suppress_health_check=SLOW, phases=[Phase.generate], database=None)
    @given(programs())
    def run(program: Program) -> None:
        plain = Plain()
        with counted(), limited() as memory:
            wanted = execute(program, plain)
            if wanted.raised is not None or wanted.leaked:
                return
            for nth in range(1, MOST_ALLOCATIONS, 3):
                before = memory.count
                mode = Failing(program, elastic, memory, nth)
                try:
                    got = execute(program, mode)
                except torch.OutOfMemoryError:  # of an allocation of the comparison itself
                    memory.fail_at(None)
                    continue
                failed = got.raised is torch.OutOfMemoryError
                seen["failures that pass"] += failed
                seen["steps run again"] += any(script.failures for script in mode.scripts) and not failed
                wrong = [*got.stray, *([f"{got.leaked} tensors are still alive"] if got.leaked else [])]
                if not failed and not (got.raised is tr.ChangedError and plain.changed):
                    same = (got.outputs, got.gradients, got.state) == (wanted.outputs, wanted.gradients, wanted.state)
                    wrong += [] if same else [f"differs from plain PyTorch: {got.error}"]
                assert not wrong, "\n".join([repr(program), f"allocation {nth} failed", *wrong])
                if memory.count - before < nth:
                    break

    run()
    with capsys.disabled():
        print("\n  " + ", ".join(f"{count} {what}" for what, count in seen.items()), end=" ")
    assert seen["failures that pass"] > 3.75 * PROGRAMS_THAT_FAIL
    assert seen["steps run again"] > 1.5 * PROGRAMS_THAT_FAIL or not elastic
