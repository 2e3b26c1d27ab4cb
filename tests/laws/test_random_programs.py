"""The laws of a region, over random programs: what plain PyTorch computes, with nothing left behind.

`tests/support/programs.py` draws the programs and says what it means to have run as plain PyTorch does. Here is how
many are run, the proof that the generator still draws what it is meant to draw, and the proof that the comparison would
see a fault.

`TORCH_RECOMPUTE_PROGRAMS=10000` runs that many instead of the usual 300; `make test-all` runs 1,000.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

pytest.importorskip("hypothesis")

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch.utils.checkpoint import checkpoint

from support.programs import Mode, Ours, Plain, Program, Verdict, compare, programs

pytestmark = pytest.mark.filterwarnings("ignore:.* within saved-tensor hooks that it enters:RuntimeWarning")

COUNT = int(os.environ.get("TORCH_RECOMPUTE_PROGRAMS", "300"))
SHARDS = max(1, COUNT // 250)  # within the time that a test may take, and enough to count shares of them
FEATURES_FROM = 600
SHRINK_SECONDS = 90  # Hypothesis itself would take 300, as much as a test may take in all

# A program takes a millisecond or two to draw and ten to run; Hypothesis thinks of both as slow and large.
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def drawn(count: int, shard: int, **options: object) -> settings:
    """Hypothesis settings for `count` programs of their own; the same ones each time where the profile says so."""
    number = shard if settings.default.derandomize else random.randrange(1 << 32)
    chosen = settings(max_examples=count, suppress_health_check=SLOW, **options)
    return lambda test: seed(number)(chosen(test))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_programs_do_what_plain_pytorch_does(shard: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs, gradients, random numbers and buffers are plain PyTorch's to the bit; nothing is left over."""
    seen: Counter[str] = Counter()
    failed: dict[Program, list[str]] = {}
    since: list[float] = []

    @drawn(COUNT // SHARDS, shard)
    @given(programs())
    def run(program: Program) -> None:
        if since and time.monotonic() - since[0] > SHRINK_SECONDS:
            assert program not in failed, "\n".join([repr(program), *failed[program]])
            return
        verdict = compare(program)
        if verdict.wrong:
            failed[program] = verdict.wrong
            since.append(time.monotonic())
        seen["programs"] += 1
        seen["refused by plain PyTorch"] += verdict.plain_raised
        seen["leaked by plain PyTorch"] += verdict.plain_leaked
        seen["that change what a replay needs"] += bool(verdict.exempt)
        seen["raise ChangedError for it"] += verdict.used
        assert not verdict.wrong, "\n".join([repr(program), *verdict.wrong])

    run()
    with capsys.disabled():
        print("\n  " + ", ".join(f"{count} {what}" for what, count in seen.items()), end=" ")
    # None of the ways out may swallow the programs.
    assert seen["programs"] >= 0.9 * (COUNT // SHARDS)
    assert seen["refused by plain PyTorch"] < 0.25 * seen["programs"]
    assert seen["leaked by plain PyTorch"] < 0.25 * seen["programs"]
    assert seen["raise ChangedError for it"] < 0.08 * seen["programs"]


AT_LEAST = {  # percent of the programs
    "region": 90,
    "regions 2 deep": 15,
    "regions 3 deep": 5,
    "saved call": 40,
    "saved call in a region": 20,
    "region in a saved call": 12,
    "called again": 10,
    "closure only": 20,
    "option": 15,
    "in-place": 30,
    "in-place in a call": 20,
    "view": 30,
    "several outputs": 25,
    "copy": 15,
    "random": 25,
    "explicit generator": 15,
    "shared parameter": 25,
    "module": 8,
    "module with buffers": 5,
    "custom function": 10,
    "stop gradient": 12,
    "no_grad": 8,
    "enable_grad": 0.2,
    "autocast": 5,
    "hooks around": 1,
    "replay": 20,
    "save_for_recompute": 8,
    "decided value used": 3,
    "same tensor": 30,
    "name deleted": 2,
    "poke": 1,
    "backward:sum": 5,
    "backward:tensors": 4,
    "backward:each": 4,
    "backward:forgotten": 4,
    "backward:twice": 4,
    "backward:split": 4,
    "backward:inputs": 4,
    "backward:second": 4,
    "backward:none": 2,
    "backward:thread": 3,
}


def test_every_feature_is_drawn_often_enough() -> None:
    """A change of the generator cannot quietly stop it from drawing nested regions, saved calls, in-place changes."""
    having: Counter[str] = Counter()

    # The same programs under every profile: this is about the generator, and rare features sit close to their bound.
    @seed(3)
    @settings(max_examples=FEATURES_FROM, suppress_health_check=SLOW, phases=[Phase.generate], database=None)
    @given(programs())
    def look(program: Program) -> None:
        having.update(program.features | {"programs"})

    look()
    percent = {feature: 100 * having[feature] / having["programs"] for feature in AT_LEAST}
    assert not {feature: found for feature, found in percent.items() if found < AT_LEAST[feature]}


def fault(call: Callable[..., object]) -> type[Ours]:
    """Programs whose regions are a call of this function, with the region's function first."""
    names = {"recompute": lambda fn, **_: partial(call, fn), "no_recompute": lambda fn, **_: fn}
    return type(call.__name__, (Ours,), {"names": lambda self: Ours.names(self) | names})


@fault
def forgetful(fn: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Regions of torch's own checkpoint, with the random state forgotten."""
    options = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
    return checkpoint(fn, *args, **options, **kwargs)


@fault
def hoarding(fn: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Every result of a region is kept in a cycle."""
    cycle = [fn(*args, **kwargs)]
    cycle.append(cycle)
    return cycle[0]


@fault
def careless(fn: Callable[..., object], *args: object, **kwargs: object) -> object:
    """The region's function runs twice in forward."""
    with torch.random.fork_rng():
        fn(*args, **kwargs)
    return fn(*args, **kwargs)


@pytest.mark.parametrize(
    ("fault", "said"),
    [(forgetful, "gradient"), (hoarding, "still alive"), (careless, "runs in forward")],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_comparison_sees_a_fault(fault: type[Mode], said: str) -> None:
    """Wrong random numbers, tensors held in a cycle and extra runs are all found within 150 programs."""

    class Seen(Exception):
        """The fault is seen: no more programs are needed."""

    @drawn(150, 1, phases=[Phase.generate], database=None, report_multiple_bugs=False)
    @given(programs())
    def look(program: Program) -> None:
        if any(said in line for line in compare(program, fault()).wrong):
            raise Seen

    with pytest.raises(Seen):
        look()


def test_the_comparison_accepts_plain_pytorch() -> None:
    """Plain PyTorch compared with itself differs in nothing: what is compared is deterministic."""
    found: list[Verdict] = []

    @drawn(COUNT // 6, 2, phases=[Phase.generate], database=None)
    @given(programs())
    def look(program: Program) -> None:
        found.append(compare(program, Plain()))

    look()
    assert [verdict.wrong for verdict in found if verdict.wrong] == []
