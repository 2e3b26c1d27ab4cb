"""What a report shows, as plain data: the step at every moment, for the plan, for none, and along the frontier.

Problem. A page must work from a file, without the model, and so must whoever wants to draw something else.

Idea. One document. Its `steps` are training steps that differ in their plans, the least peak first: the plan that is
reported, the step with no region, and plans along the curve of budget against seconds, each simulated with the same
batch, so that all figures are of one kind. A step is sampled: of the moments of its timeline, which may be a hundred
thousand, as many as a screen has columns, each the highest of its stretch. So the peak is always among them.

Bytes are stacked by category, and activations by who made them: the forward, a replay, or backward itself.

What a plan keeps in host memory is no part of the stack: it lies beside it, a series of its own.

Invariants, which the tests hold: the layers of a sample sum to what was alive; the largest sample is the peak; the
phases cover the step without a gap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .._loop import COMMON, Loop
from ..memory import Block
from ..plan.plan import Plan
from ..plan_command.task import curve
from ..planning.planner import Loss, MakeOptimizer, Planner
from ..simulation import Moment, Simulation
from .placements import in_force, rows
from .timed import Clock, Timed

POINTS = 10
SAMPLES = 600
LAYERS = ("parameters", "buffers", "optimizer", "gradients", "other", "activations", "rebuilt", "backward")


class Reported(NamedTuple):
    """What there is to show.

    Attributes:
        data: The document, of dictionaries, lists, texts and numbers.
        chosen: The step with the plan.
    """

    data: dict[str, Any]
    chosen: Simulation


def compared(
    plan: Plan,
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Loss = None,
    optimizer: MakeOptimizer = None,
    device: torch.device | str | None = None,
    loop: Loop = COMMON,
    points: int = POINTS,
) -> list[Plan]:
    """The plans along the curve of budget against seconds that one is compared with; the arguments are `report`'s."""
    if not points:
        return []
    profile = Planner(model, args, kwargs, loss=loss, optimizer=optimizer, device=device, loop=loop).profile
    return [one for one in curve(profile, points) if one.choices and one.choices != plan.choices]


def collect(
    plan: Plan,
    others: Sequence[Plan],
    clock: Clock,
    *,
    title: str = "",
    done: Callable[[str], object] = lambda _: None,
) -> Reported:
    """Simulates the steps of a report.

    Args:
        plan: The plan to report on.
        others: Plans to compare it with.
        clock: Simulates and times the step.
        title: What the step is of; by default the model's class.
        done: Called after each of the simulations, two more than there are others, with what it was of.
    """
    plain = clock.timed(Plan())
    done("no region")
    steps = [("no region", Plan(), plain)] if plan.all_choices else []
    for name, one in (("the plan", plan), *(("the frontier", other) for other in others)):
        steps.append((name, one, clock.timed(one) if one.all_choices else plain))
        done(name)
    steps.sort(key=lambda item: (item[2].simulation.peak_bytes, -item[2].seconds))
    names: dict[str, int] = {}
    shown = [{"name": name, **_step(timed, names), **_promise(one, timed, plain, clock)} for name, one, timed in steps]
    chosen = next(number for number, (name, _, _) in enumerate(steps) if name == "the plan")
    simulation = steps[chosen][2].simulation
    return Reported(
        {
            "title": title or type(clock.model).__name__,
            "source": plan.source,
            "device": clock.device,
            "layers": list(LAYERS),
            "chosen": chosen,
            "plain": next(number for number, (_, _, timed) in enumerate(steps) if timed is plain),
            "names": list(names),
            "steps": shown,
            "counted": str(simulation.loop),
            "notes": _notes(simulation, shown[chosen]),
        },
        simulation,
    )


def _notes(simulation: Simulation, step: dict[str, Any]) -> list[str]:
    """What a reader should know besides."""
    notes = [f"Assumed: {words}" for words in simulation.assumed]
    times = simulation.loop.accumulate
    if times > 1:
        notes.append(f"The pictures are of the last of {times} forwards and backwards, and of the optimizer's step.")
    promised = step["promised"]
    if promised is not None and promised["peak_bytes"] != step["peak_bytes"]:
        notes.append(
            f"The plan has promised a peak of {promised['peak_bytes']:,} bytes, and this step has one of "
            f"{step['peak_bytes']:,}: it is not the step that the plan was made for. The table is of this step."
        )
    elif promised is None or times > 1:
        return notes
    elif not math.isclose(promised["step_seconds"], step["step_seconds"], rel_tol=0.01):
        how = "scaled to whole steps that were run"
        if step["host_bytes"]:
            how = "in which copies to and from host memory are waited for"
        notes.append(
            f"The plan has promised a step of {1000 * promised['step_seconds']:,.2f} ms, {how}; the pictures are in "
            "seconds of single operations."
        )
    return notes


def _promise(plan: Plan, step: Timed, plain: Timed, clock: Clock) -> dict[str, Any]:
    """What the plan places, and what it has promised."""
    choices, prediction = in_force(plan, clock.model, clock.args, clock.kwargs)
    lines = rows(choices, prediction, step, plain)
    return {
        "regions": len(choices),
        "promised": None
        if prediction is None
        else {
            "budget_bytes": prediction.budget_bytes,
            "peak_bytes": prediction.peak_bytes,
            "step_seconds": prediction.step_seconds,
            "device": prediction.device,
        },
        "placements": [{**dataclasses.asdict(line), "why": line.why} for line in lines],
    }


def _step(timed: Timed, names: dict[str, int]) -> dict[str, Any]:
    """One step; modules and operations are numbers of `names`, which grows."""

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    simulation = timed.simulation
    moments = sampled(simulation.timeline, SAMPLES)
    layers = stacked(simulation.blocks, [moment.event for moment in moments])
    return {
        "peak_bytes": simulation.peak_bytes,
        "step_seconds": timed.seconds,
        "replay_seconds": sum(timed.replayed.values(), 0.0),
        "replay_flops": simulation.flops["replay"],
        "kept_bytes": simulation.saved_bytes,
        "host_bytes": max(timed.hosted.values(), default=0),
        "advice": simulation.advice,
        "peak": moments.index(simulation.peak),
        "phases": [list(span) for span in timed.spans],
        "samples": {
            "ends": [timed.end(moment.event) for moment in moments],
            "phase": [number(moment.phase) for moment in moments],
            "module": [number(moment.module) for moment in moments],
            "op": [number(moment.op) for moment in moments],
            "layers": {layer: series for layer, series in layers.items() if any(series)},
            "host": [timed.in_host(moment.event) for moment in moments] if timed.sent else [],
        },
    }


def sampled(timeline: Sequence[Moment], most: int) -> list[Moment]:
    """The first and the last moment, and of each stretch in between the highest: the first, if several are.

    Args:
        timeline: The moments in order.
        most: How many stretches there are at most.
    """
    length = -(-len(timeline) // most)
    stretches = [timeline[start : start + length] for start in range(0, len(timeline), length)]
    highest = [max(stretch, key=lambda moment: moment.live_bytes) for stretch in stretches]
    first = [timeline[0]] if highest[0] != timeline[0] else []
    last = [timeline[-1]] if highest[-1] != timeline[-1] else []
    return [*first, *highest, *last]


def stacked(blocks: Sequence[Block], events: Sequence[int]) -> dict[str, list[int]]:
    """The bytes alive after some events, by layer.

    Args:
        blocks: What lay in memory.
        events: In rising order.
    """
    changes: dict[int, list[tuple[str, int]]] = {}
    for block in blocks:
        layer = layer_of(block)
        changes.setdefault(block.born, []).append((layer, block.nbytes))
        if block.died is not None:
            changes.setdefault(block.died, []).append((layer, -block.nbytes))
    ahead = sorted(changes, reverse=True)
    live: dict[str, int] = dict.fromkeys(LAYERS, 0)
    found: dict[str, list[int]] = {layer: [] for layer in LAYERS}
    for event in events:
        while ahead and ahead[-1] <= event:
            for layer, nbytes in changes[ahead.pop()]:
                live[layer] += nbytes
        for layer in LAYERS:
            found[layer].append(live[layer])
    return found


def layer_of(block: Block) -> str:
    """Where a block is stacked."""
    if block.category != "activations":
        return block.category
    return {"replay": "rebuilt", "backward": "backward"}.get(block.made.phase, "activations")
