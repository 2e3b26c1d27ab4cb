"""What PyTorch's CUDA allocator reserves: its rules by hand, the course of steps, and an H100's own figures."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.zoo import mean_loss
from torch_recompute import Plan, errors, make_plan, peaks, simulate
from torch_recompute.memory.free import CONTEXT, host_memory
from torch_recompute.memory.ledger import Block, Place
from torch_recompute.memory.loop import COMMON
from torch_recompute.memory.reserved import EXPANDABLE, Allocator, expands, in_brief, in_words, reserved
from torch_recompute.planner.longest import Longest
from torch_recompute.planner.planner import Planner
from torch_recompute.simulation.training_step import TrainingStep

MIB, GIB = 2**20, 2**30
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

# What is allocated, in bytes, or given back, as the negative number of the allocation counted from 1; then the bytes
# that are allocated and reserved with segments of fixed sizes, and with expandable ones.
# Sizes are in MiB, but for the first.
BY_HAND: dict[str, tuple[list[float], tuple[float, float], tuple[float, float]]] = {
    "a number": ([4 / MIB], (512 / MIB, 2), (512 / MIB, 2)),
    "small ones share 2 MiB": ([1, 1, 512 / MIB], (2 + 512 / MIB, 4), (2 + 512 / MIB, 4)),
    "from 1 to 10 MiB they share 20": ([3, 9], (12, 20), (12, 20)),
    "from 10 MiB on each has its own": ([10, 12], (22, 22), (22, 40)),
    "up to 1 MiB is not split off": ([21], (22, 22), (21, 40)),
    "over 1 MiB is": ([30, -1, 28], (28, 30), (28, 40)),
    "the smallest that is large enough": ([40, 30, -1, -2, 25], (25, 70), (25, 80)),
    "what is free is joined": ([12, 12, 12, -1, -2, 24], (36, 60), (36, 40)),
    "one that expands goes on at its end": ([30, 4, -1, 50], (54, 100), (54, 100)),
    "which is taken last": ([15, 12, -1, 12, 13.5], (38, 42), (37.5, 60)),
}


def driven(allocator: Allocator, calls: list[int]) -> Allocator:
    """An allocator after some calls."""
    made: list[Any] = []
    for call in calls:
        if call > 0:
            made.append(allocator.take(call))
        else:
            allocator.give_back(made[-call - 1])
    return allocator


@pytest.mark.parametrize("name", BY_HAND)
def test_rules_of_the_allocator(name: str) -> None:
    """Blocks, segments, splits and joins are those of CUDACachingAllocator.cpp."""
    calls, *wanted = BY_HAND[name]
    found = [
        driven(Allocator(expandable), [round(MIB * call) if call > 0 else int(call) for call in calls])
        for expandable in (False, True)
    ]
    assert [(one.allocated, one.reserved) for one in found] == [(MIB * used, MIB * held) for used, held in wanted]


def calls_at_random(seed: int, count: int) -> list[int]:
    """Allocations of all kinds of sizes, about half of them given back meanwhile, and all at the end."""
    drawn = random.Random(seed)
    calls: list[int] = []
    waiting: list[int] = []
    made = 0
    for _ in range(count):
        if waiting and drawn.random() < 0.48:
            calls.append(-waiting.pop(drawn.randrange(len(waiting))))
        else:
            made += 1
            waiting.append(made)
            calls.append(int(2 ** drawn.uniform(3, 26)))
    return calls + [-one for one in waiting]


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost(seed: int, expandable: bool) -> None:
    """What is reserved holds what is allocated at any time; when all is given back, it is one free piece a segment."""
    allocator, made, sizes = Allocator(expandable), list[Any](), dict[int, int]()
    for call in calls_at_random(seed, 400):
        if call > 0:
            made.append(allocator.take(call))
            sizes[len(made)] = call
        else:
            allocator.give_back(made[-call - 1])
            del sizes[-call]
        assert sum(sizes.values()) <= allocator.allocated <= allocator.reserved
    assert allocator.allocated == 0
    assert allocator.most().allocated_bytes > 0
    allocator.empty_cache()
    assert (allocator.reserved == 0) is not expandable


@pytest.mark.gpu
@pytest.mark.parametrize("expandable", [False, True])
def test_it_is_what_a_device_does(expandable: bool) -> None:
    """The same calls, made of CUDA's allocator: both count the same bytes after each."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    older = torch.cuda.memory._set_allocator_settings
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", older)
    configure(f"expandable_segments:{expandable}")
    pool = torch.cuda.MemPool()
    allocator, made, ours = Allocator(expandable), list[Any](), list[Any]()
    start = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    try:
        with torch.cuda.use_mem_pool(pool):
            for number, call in enumerate(calls_at_random(0, 400)):
                if call > 0:
                    made.append(torch.empty(call, dtype=torch.uint8, device="cuda"))
                    ours.append(allocator.take(call))
                else:
                    made[-call - 1] = None
                    allocator.give_back(ours[-call - 1])
                found = torch.cuda.memory_allocated() - start[0], torch.cuda.memory_reserved() - start[1]
                assert found == (allocator.allocated, allocator.reserved), f"after call {number}"
    finally:
        configure("expandable_segments:False")


def block(nbytes: int, born: int, died: int | None, category: str = "activations") -> Block:
    return Block(category, nbytes, born, died, Place())


def test_the_first_step_has_no_states_before_its_backward() -> None:
    """Weights come first, states after the last allocation of the first step, into what its activations left."""
    weights, states = block(30 * MIB, 0, None, "parameters"), block(30 * MIB, 0, None, "optimizer")
    passing = block(64 * MIB, 1, 2)
    last = block(2 * MIB, 2, 3)
    found = reserved([weights, states, passing, last])
    # The last and the states are cut out of the segment of 64 MiB, so the next step's activations need another.
    assert found.reserved_bytes == (30 + 64 + 64) * MIB
    assert found.allocated_bytes == (30 + 30 + 64) * MIB
    assert reserved([weights, passing, last]).reserved_bytes == (30 + 64) * MIB


def test_the_output_waits_for_the_next_forward() -> None:
    """What a step leaves is there until the next one's forward returns; gradients that are there at first are, too."""
    output, old = block(40 * MIB, 2, None), block(40 * MIB + 4, 0, 3, "other")
    assert reserved([old, output]).reserved_bytes == 80 * MIB
    assert reserved([output]).reserved_bytes == 40 * MIB
    gradients = block(40 * MIB, 0, 5, "gradients")
    assert reserved([gradients, block(40 * MIB, 1, 2)]).reserved_bytes == 80 * MIB


def test_a_limit_gives_segments_back_first() -> None:
    """Where more would be reserved, free segments go; out of memory is what then does not fit."""
    blocks = [block(30 * MIB, 1, 2), block(50 * MIB, 3, 4)]
    assert reserved(blocks).reserved_bytes == 80 * MIB
    assert not reserved(blocks, limit=50 * MIB).ran_out
    assert reserved(blocks, limit=49 * MIB).ran_out
    held = [block(11 * MIB, 1, 9), block(30 * MIB, 1, 2), block(12 * MIB, 3, 9), block(31 * MIB, 4, 5)]
    assert reserved(held, limit=73 * MIB).ran_out  # 12 of the 30 MiB are in use, so the 31 need a segment
    assert not reserved(held, limit=74 * MIB).ran_out
    assert not reserved(held, True, limit=60 * MIB).ran_out


# Tensors in MiB with their events, a limit, what is reserved under it, and the flushes after one step, two, and so on.
FLUSHES: dict[str, tuple[list[tuple[int, int, int]], int, int, list[int]]] = {
    "at the limit": ([(30, 1, 2), (50, 3, 4)], 80, 80, [0, 0, 0, 0]),
    "in the first step alone": ([(30, 1, 2), (50, 3, 4)], 79, 50, [1, 1, 0, 0]),
    "in each": ([(40, 5, 9), (40, 3, 8), (50, 6, 7), (40, 4, 7), (40, 2, 6)], 200, 200, [1, 1, 1, 1]),
    "in every other": ([(60, 6, 8), (50, 4, 8), (40, 1, 5), (50, 2, 6), (10, 5, 9)], 180, 180, [1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize("case", FLUSHES)
def test_the_cache_is_emptied_at_a_limit(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Counted is how often a later step gives free segments back; without a limit none does."""
    tensors, limit, held, flushes = FLUSHES[case]
    blocks = [block(size * MIB, born, died) for size, born, died in tensors]
    assert reserved(blocks).cache_flushes == 0
    assert reserved(blocks, True, limit=limit * MIB).cache_flushes is None
    for steps, count in enumerate(flushes, 1):
        monkeypatch.setattr("torch_recompute.memory.reserved._STEPS", steps)
        found = reserved(blocks, limit=limit * MIB)
        assert (found.ran_out, found.cache_flushes) == (False, count)
    assert found.reserved_bytes == held * MIB


# Reserved, the same with expandable segments, the room and what is reserved in it, in GiB; flushes. Then both texts.
ALONE, BY = f"22.66 GiB with {EXPANDABLE}", "by PyTorch's CUDA allocator"
MORE = f"; 25.62 GiB without that limit, {ALONE}"
SAID: dict[str, tuple[tuple[float, float, float, float, int | None], str, str]] = {
    "no limit": ((25.62, 22.66, 0, 0, None), "", f"25.62 GiB {BY}, {ALONE}"),
    "a budget in bytes": ((25.62, 22.66, 26, 0, None), "", f"25.62 GiB {BY}, {ALONE}"),
    "a smaller one": (
        (25.62, 22.66, 22, 0, None),
        "PyTorch's allocator reserves 25.6 GiB for it, more than the budget",
        f"25.62 GiB {BY}, {ALONE}",
    ),
    "it fits": (
        (25.62, 22.66, 26, 25.62, 0),
        "PyTorch's allocator reserves 25.6 of 26.0 GiB",
        f"25.6 of 26.0 GiB {BY}, {ALONE}",
    ),
    "by flushes in each step": (
        (25.62, 22.66, 23.17, 22.77, 3),
        "PyTorch's allocator reserves 22.8 of 23.2 GiB",
        f"22.8 of 23.2 GiB {BY}, which empties its cache at most 3 times a step to stay within{MORE}",
    ),
    "by one": (
        (25.62, 22.66, 23.17, 22.77, 1),
        "PyTorch's allocator reserves 22.8 of 23.2 GiB",
        f"22.8 of 23.2 GiB {BY}, which empties its cache at most once a step to stay within{MORE}",
    ),
    "by flushes at first": (
        (25.62, 22.66, 23.17, 22.77, 0),
        "PyTorch's allocator reserves 22.8 of 23.2 GiB",
        f"22.8 of 23.2 GiB {BY}, which empties its cache in the first steps alone{MORE}",
    ),
    "with segments that expand": (
        (25.62, 22.66, 23.17, 22.66, None),
        "PyTorch's allocator reserves 22.7 of 23.2 GiB",
        f"22.7 of 23.2 GiB {BY}{MORE}",
    ),
    "it does not fit": (
        (25.62, 22.66, 20, 24.1, 1),
        "PyTorch's allocator reserves 24.1 of 20.0 GiB, so the step does not fit",
        f"24.1 of 20.0 GiB {BY}, so the step does not fit{MORE}",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_what_is_reserved_in_words(case: str) -> None:
    """What is reserved under a limit is said beside the limit; without one, that it is above a budget in bytes."""
    (*sizes, flushes), brief, words = SAID[case]
    usual, expandable, room, limited = (round(size * GIB) for size in sizes)
    assert in_brief(usual, room, limited) == brief
    assert in_words(usual, expandable, room, limited, flushes) == words


@pytest.mark.parametrize(
    "case", ["gpt2-xl --batch 8 --sequence 1024", pytest.param("vit-h --batch 64", marks=pytest.mark.nightly)]
)
def test_an_h100_reserved_as_much(case: str) -> None:
    """What the allocator of an H100 counted, for a model of a published size: within 0.1 and 1 %."""
    from torch_recompute.commands import cli, models

    rows = json.loads((RESULTS / "on_gpu-h100.json").read_text("utf-8"))["figures"]
    real = next(row for row in rows if (row["case"], row["way"]) == (case, "none"))
    args = cli.build_parser().parse_args(["plan", *case.split(), "--recompute", "none"])
    model = models.load(args.model, None, "meta").model.train()
    batch = models.batch_for(model, args.model, args.batch, args.sequence)
    found = peaks(model, batch, recompute="none", optimizer="adamw-fused", device="h100")[0]
    counted = found.simulation.reserved()
    assert counted.allocated_bytes == pytest.approx(real["peak_bytes"], rel=0.001)
    assert counted.reserved_bytes == pytest.approx(real["reserved_bytes"], rel=0.01)
    assert found.as_data()["reserved_bytes"] == counted.reserved_bytes


def layers(count: int = 6) -> tuple[nn.Module, torch.Tensor]:
    made = (nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(count))
    model = nn.Sequential(*made)
    return model.to("meta"), torch.empty(65_536, 512, device="meta")


def test_plans_for_cuda_say_what_is_reserved() -> None:
    """A prediction for a CUDA device has both figures and prints them; one for a CPU has none."""
    model, x = layers(2)
    for device, there in (("h100", True), ("cpu", False)):
        plan = Planner(TrainingStep.of("make_plan", model, (x,), {}, mean_loss, "adamw", device, COMMON)).plan(0.5)
        assert plan.prediction is not None
        assert bool(plan.prediction.reserved_bytes) is bool(plan.prediction.expandable_bytes) is there
        assert ("reserved: " in str(plan)) is there
        assert plan.prediction.room_bytes == 0  # a share of what recomputation can free is no room for an allocator
        assert type(plan).from_json(plan.to_json()).prediction == plan.prediction
        step = simulate(model, (x,), loss=mean_loss, device=device)
        assert ("by PyTorch's CUDA allocator" in str(step)) is there is step.on_cuda


def on_a_card(memory: int, count: int = 6) -> tuple[Planner, TrainingStep]:
    """A planner for a device that has so many bytes, with 5 % for what is not followed."""
    model, x = layers(count)
    step = TrainingStep.of("make_plan", model, (x,), {}, mean_loss, "adamw", "h100", COMMON)
    assert step.where.roofline is not None
    step = replace(step, device=step.where._replace(roofline=replace(step.where.roofline, memory=memory)))
    return Planner(step), step


@pytest.mark.parametrize(("setting", "limits"), [("", True), ("expandable_segments:True", False)])
def test_a_plan_for_what_a_card_has_fits_with_what_is_unused(
    monkeypatch: pytest.MonkeyPatch, setting: str, limits: bool
) -> None:
    """With "fit" the allocator does not run out of what a device has: its plan is for less, where that has to be."""
    middle = on_a_card(GIB)[0].plan(0.5).prediction
    assert middle is not None
    planner, step = on_a_card(round((middle.peak_bytes + CONTEXT) / 0.95) + 1)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    free, spare = step.memory
    assert free == pytest.approx(middle.peak_bytes, abs=2)
    assert planner.simulated(planner.plan_for("fit")).reserved(expands(), limit=free + spare).ran_out is limits
    plan = planner.plan("fit")
    assert plan.prediction is not None
    found = planner.simulated(plan).reserved(expands(), limit=free + spare)
    assert not found.ran_out
    assert ("since the allocator leaves memory unused" in plan.prediction.budget) is limits
    fields = "room_bytes", "limited_bytes", "cache_flushes"
    assert {name: getattr(plan.prediction, name) for name in fields} == found.within(free + spare)
    first, *lines = str(type(plan).from_json(plan.to_json())).splitlines()
    of = errors.brief(found.reserved_bytes, free + spare)
    assert first.endswith(f"; PyTorch's allocator reserves {of}")
    assert any(line.startswith(f"reserved: {of} by") for line in lines)


def test_a_budget_in_bytes_is_compared_with_what_is_reserved() -> None:
    """The first line says where the allocator reserves more than a number of bytes; nothing where it does not."""
    planner, _ = on_a_card(GIB)
    plain = planner.plain
    for budget, above in ((plain.peak_bytes, True), (plain.reserved().reserved_bytes, False)):
        plan = planner.plan(budget)
        assert plan.prediction is not None
        assert (plan.prediction.room_bytes, plan.prediction.limited_bytes) == (budget, 0)
        said = f"; PyTorch's allocator reserves {errors.brief(plain.reserved().reserved_bytes)} for it, more than the"
        assert (said in str(plan).splitlines()[0]) is above


def test_a_card_for_which_no_plan_is_small_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the allocator runs out under the least plan, too, the advice says so."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr("torch_recompute.memory.free.RESERVE", 0)
    least = on_a_card(GIB)[0].least[1].peak_bytes
    plan = on_a_card(least + CONTEXT)[0].plan("fit")
    assert plan.prediction is not None
    assert plan.prediction.advice.startswith("PyTorch's allocator runs out of ")
    assert EXPANDABLE in plan.prediction.advice
    assert plan.prediction.limited_bytes > plan.prediction.room_bytes
    assert plan.summary.endswith(", so the step does not fit")


def test_a_device_by_name_has_its_own_memory() -> None:
    """What fits on a device that is not here is what that device has, and not the machine that plans."""
    model, x = layers()
    for device, gib in (("h100", 78.6), ("h200", 139), ("l4", 21.5)):
        step = TrainingStep.of("make_plan", model, (x,), {}, mean_loss, "adamw", device, COMMON)
        free, spare = step.memory
        assert (free + spare) / GIB == pytest.approx(gib, rel=0.002)
        assert spare == pytest.approx(0.05 * (free + spare + CONTEXT), abs=2)
    plan = make_plan(model, x, budget="fit", loss=mean_loss, device="h100")
    assert plan.prediction is not None
    assert plan.prediction.budget == "fit (74.6 GiB for tensors: what is free less 5 %)"
    here = TrainingStep.of("make_plan", model, (x,), {}, mean_loss, "adamw", "cpu", COMMON)
    assert here.free_bytes() == pytest.approx(host_memory()[0] - 0.05 * host_memory()[1], rel=0.1)


def test_the_longest_on_a_card_fits_with_what_is_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With "fit" a search looks for what the allocator can hold, which is less than tensors alone would be."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr("torch_recompute.memory.free.RESERVE", 0.002)
    planner, step = on_a_card(8 * GIB, 3)
    free, spare = step.memory
    plan = Plan(planner.plan_for(0.2).choices)
    most: list[int] = []
    for budget in ("fit", free):
        found = Longest(step, budget, batch=True).stated({"a plan": plan})[0]
        most.append(found.most)
        assert found.peak_bytes <= free
        ran_out = found.simulation.reserved(limit=free + spare).ran_out
        assert ran_out is not (budget == "fit")
        assert ("PyTorch's allocator reserves" in str(found).splitlines()[0]) is (budget == "fit") or ran_out
        held = found.simulation.reserved(limit=free + spare)
        assert found.limited == (held.within(free + spare) if budget == "fit" else {"room_bytes": free})
        assert found.limited.items() <= found.as_data().items()
    assert most[0] < most[1]
    planned = Longest(step, "fit", batch=True).plan()
    assert planned.prediction is not None
    assert planned.prediction.peak_bytes <= free
    for size in planned.sizes:  # each is compared with what the allocator may reserve
        assert size.prediction is not None
        assert 0 < size.prediction.limited_bytes <= size.prediction.room_bytes == free + spare
