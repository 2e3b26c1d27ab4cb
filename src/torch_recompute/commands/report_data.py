"""Collects the document of a report: the step at every moment, with the plan, without, and along the frontier.

Page and picture are made from the document alone, which is plain data. Its `steps` differ in their plans, the least
peak first, and are simulated with the same batch, so that all figures are comparable. Of the moments of a step, which
may be a hundred thousand, it has as many as a screen has columns, each the highest of its stretch; so the peak is
always among them.

The time of a moment is the sum of the prices of the operations before it, without gaps. Where operations are timed on
this machine a plan's seconds are also scaled to whole steps that were run, which is not possible for a single moment.
Bytes are stacked by category, and activations by what made them: the forward, a replay, or backward itself; the layers
of a sample sum to the bytes alive. Host memory is a series of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from ..errors.text import grouped, starred
from ..memory import Block
from ..memory.ledger import Place
from ..memory.operations import Operation
from ..plan.apply import apply
from ..plan.choice import RECOMPUTED, SHORT, Choice, kept_in_words, stored_in
from ..plan.plan import Line, Plan, Prediction
from ..plan.roles import inside
from ..plan.sizes import Sizes, parameters, size_of
from ..planner.hosts import stores_for
from ..planner.ops import Op, op_of
from ..planner.planner import Planner
from ..planner.prices import Measured, prices_for
from ..simulation import Moment, Simulation, simulate_step, with_carried_state
from ..simulation.devices import DEVICES, Roofline
from ..simulation.training_step import TrainingStep
from .models import POINTS, curve

SAMPLES = 600
LAYERS = ("parameters", "buffers", "optimizer", "gradients", "other", "activations", "rebuilt", "backward")


class Span(NamedTuple):
    """A stretch of the step in one phase ("forward", "loss", "backward", "replay" or "optimizer"), in seconds."""

    phase: str
    start: float
    end: float


class Timed:
    """A simulated step and its clock, from its operations (None for one without a price) and bytes in host memory."""

    def __init__(
        self, simulation: Simulation, ran: list[Op | None], held: list[int], price: Callable[[Op], float]
    ) -> None:
        self.simulation = simulation
        self.seconds = 0.0
        self.spans: list[Span] = []
        self.replayed: dict[str, float] = {}  # seconds, by path of the module that ran again
        self.sent: dict[str, int] = {}  # bytes to host memory, by path of the module that was about to run
        self.most_hosted = max(held, default=0)
        self._after: dict[int, tuple[float, int]] = {0: (0.0, 0)}  # by event: seconds since the step began, host bytes
        before = 0
        for place, op, hosted in zip(simulation.operations, ran, held or [0] * len(ran), strict=True):
            start, seconds = self.seconds, 0.0 if op is None else price(op)
            self.seconds += seconds
            if self.spans and self.spans[-1].phase == place.phase:
                self.spans[-1] = self.spans[-1]._replace(end=self.seconds)
            else:
                self.spans.append(Span(place.phase, start, self.seconds))
            self._after[place.event] = self.seconds, hosted
            if place.phase == "replay":
                self.replayed[place.module] = self.replayed.get(place.module, 0.0) + seconds
            if hosted > before:
                self.sent[place.module] = self.sent.get(place.module, 0) + hosted - before
            before = hosted

    def after(self, event: int) -> tuple[float, int]:
        """Returns the seconds and the bytes in host memory after an event, or after the operation before it."""
        return self._after.get(event) or self._after.get(event - 1, (0.0, 0))


class Clock:
    """Simulates a step with different plans, and times it.

    `device` is the name of the device; it is known after the first simulation.
    """

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        self._price: Roofline | Measured | None = None
        self.device = ""

    def frontier(self, plan: Plan, points: int = POINTS) -> list[Plan]:
        """Returns the plans along the curve of budget against seconds that one is compared with."""
        if not points:
            return []
        profile = Planner(self.step).profile
        return [one for one in curve(profile, points) if one.choices and one.choices != plan.choices]

    def timed(self, plan: Plan | None) -> Timed:
        """Simulates the step with a plan; without one where it is None."""
        ran: list[Op | None] = []
        held: list[int] = []
        stores = stores_for(plan or Plan(), self.step)

        def watch(_: Place, operation: Operation) -> None:
            ran.append(op_of(operation))
            held.append(sum(store.host_bytes for store in stores.values()))

        prepare = None if plan is None else lambda copy: apply(copy, plan, stores=stores)
        simulation = simulate_step(self.step, prepare=prepare, watch=watch)
        later = with_carried_state(self.step, simulation)
        if later is not None:
            self.step = later
            return self.timed(plan)
        price = self._price = self._price or prices_for(self.step, simulation.device)
        self.device = price.name
        return Timed(simulation, ran, held if stores else [], price)


class Reported(NamedTuple):
    """The document, of dictionaries, lists, texts and numbers, and the step with the plan."""

    data: dict[str, Any]
    chosen: Simulation


def collect(
    plan: Plan,
    others: Sequence[Plan],
    clock: Clock,
    *,
    title: str = "",
    done: Callable[[str], object] = lambda _: None,
) -> Reported:
    """Simulates the steps of a report on a plan, beside others.

    `done` is called after each of the simulations, two more than there are others, with the name of its plan. The
    title is by default the model's class.
    """
    plain = clock.timed(Plan())
    done("without recomputation")
    steps = [("without recomputation", Plan(), plain)] if plan.all_choices else []
    for name, one in (("the plan", plan), *(("another budget", other) for other in others)):
        steps.append((name, one, clock.timed(one) if one.all_choices else plain))
        done(name)
    switched = plan.prediction and plan.prediction.switched
    steps += [("without a plan", Plan(), clock.timed(None))] if switched else []
    steps.sort(key=lambda item: (item[2].simulation.peak_bytes, -item[2].seconds))
    names: dict[str, int] = {}
    shown = [{"name": name, **_step(timed, names), **_promise(one, timed, plain, clock)} for name, one, timed in steps]
    chosen = next(number for number, (name, _, _) in enumerate(steps) if name == "the plan")
    simulation = steps[chosen][2].simulation
    return Reported(
        {
            "title": title or type(clock.step.model).__name__,
            "source": plan.source,
            "device": clock.device,
            "layers": list(LAYERS),
            "chosen": chosen,
            "plain": next(number for number, (_, _, timed) in enumerate(steps) if timed is plain),
            "names": list(names),
            "steps": shown,
            "counted": str(simulation.loop),
            "notes": [*([f"In every plan {switched}."] if switched else []), *_notes(simulation, shown[chosen])],
        },
        simulation,
    )


def _notes(simulation: Simulation, step: dict[str, Any]) -> list[str]:
    """Returns the notes below the table."""
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
        elif promised["device"] in DEVICES:
            how = "in which the host takes longer to launch operations than the device to run them"
        notes.append(
            f"The plan has promised a step of {1000 * promised['step_seconds']:,.2f} ms, {how}; the pictures are in "
            "seconds of single operations."
        )
    return notes


def _promise(plan: Plan, step: Timed, plain: Timed, clock: Clock) -> dict[str, Any]:
    """Returns the placements of a plan, and the figures that it promised."""
    choices, prediction = in_force(plan, clock.step.model, *clock.step.call)
    lines = placements(choices, prediction, step, plain)
    names = ("budget", "budget_bytes", "peak_bytes", "step_seconds", "device")
    return {
        "regions": len(choices),
        "promised": None if prediction is None else {name: getattr(prediction, name) for name in names},
        "placements": [{**dataclasses.asdict(line), "why": line.why} for line in lines],
    }


def _step(timed: Timed, names: dict[str, int]) -> dict[str, Any]:
    """Returns one step as data; modules and operations are numbers of `names`, which grows."""

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    simulation = timed.simulation
    moments = sampled(simulation.timeline, SAMPLES)
    layers = stacked(simulation.blocks, [moment.event for moment in moments])
    after = [timed.after(moment.event) for moment in moments]
    return {
        "peak_bytes": simulation.peak_bytes,
        "step_seconds": timed.seconds,
        "replay_seconds": sum(timed.replayed.values(), 0.0),
        "replay_flops": simulation.flops["replay"],
        "kept_bytes": simulation.saved_bytes,
        "host_bytes": timed.most_hosted,
        "advice": simulation.advice,
        "peak": moments.index(simulation.peak),
        "phases": [list(span) for span in timed.spans],
        "samples": {
            "ends": [end for end, _ in after],
            "phase": [number(moment.phase) for moment in moments],
            "module": [number(moment.module) for moment in moments],
            "op": [number(moment.op.removesuffix(".default")) for moment in moments],
            "layers": {layer: series for layer, series in layers.items() if any(series)},
            "host": [hosted for _, hosted in after] if timed.sent else [],
        },
    }


def sampled(timeline: Sequence[Moment], most: int) -> list[Moment]:
    """Returns the first and last moment, and the highest of each of at most `most` stretches."""
    length = -(-len(timeline) // most)
    stretches = [timeline[start : start + length] for start in range(0, len(timeline), length)]
    highest = [max(stretch, key=lambda moment: moment.live_bytes) for stretch in stretches]
    first = [timeline[0]] if highest[0] != timeline[0] else []
    last = [timeline[-1]] if highest[-1] != timeline[-1] else []
    return [*first, *highest, *last]


def stacked(blocks: Sequence[Block], events: Sequence[int]) -> dict[str, list[int]]:
    """Returns the bytes alive after some events, in rising order, by layer."""
    changes: dict[int, list[tuple[str, int]]] = {}
    for block in blocks:
        layer = block.category
        if layer == "activations":
            layer = {"replay": "rebuilt", "backward": "backward"}.get(block.made.phase, layer)
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


def in_force(
    plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Choice, ...], Prediction | None]:
    """Returns the choices that a call uses, by its size, and the prediction for them."""
    number = Sizes(plan).number(size_of(parameters(model), args, kwargs))
    if number < len(plan.sizes):
        return plan.sizes[number].choices, plan.sizes[number].prediction
    return plan.choices, plan.prediction


def placements(
    choices: tuple[Choice, ...], prediction: Prediction | None, step: Timed, plain: Timed
) -> tuple[Line, ...]:
    """Returns the rows of the table: what the plan does with each part of the model, and its bytes and seconds.

    A plan for a budget has this table, and it is used as long as the step is the one that was planned.
    For any other plan the rows follow from two simulations, with the choices (`step`) and without (`plain`): a region
    keeps and frees the bytes that the modules in it made and left for backward, and costs the seconds of replays in
    them.
    """
    if prediction is not None and prediction.peak_bytes == step.simulation.peak_bytes:
        return prediction.lines
    groups = grouped(choices, lambda choice: (starred(", ".join(choice.paths)), _what(choice)))
    lines: list[Line] = []
    for (pattern, what), alike in groups.items():  # figures are the mean of regions that are treated alike
        paths, count = [path for choice in alike for path in choice.modules], len(alike)
        kept = _sum(step.simulation.saved_by_module, paths)
        freed = max(0, _sum(plain.simulation.saved_by_module, paths) - kept)
        where = pattern if count > 1 else ", ".join(alike[0].paths)
        seconds, sent = _sum(step.replayed, paths) / count, round(_sum(step.sent, paths) / count)
        lines.append(Line(where, count, what, round(kept / count), round(freed / count), seconds, sent))
    return tuple(lines)


def _sum(by_module: dict[str, Any], paths: list[str]) -> Any:
    return sum(value for module, value in by_module.items() if any(inside(module, path) for path in paths))


def _what(choice: Choice) -> str:
    together = f"{len(choice.paths)} together " if len(choice.paths) > 1 else ""
    kept = f", {kept_in_words(choice.kept)}" if choice.keep else ""
    stored = f"; inputs {stored_in(choice.store)}" if choice.store else ""
    labels = f" ({' '.join(choice.labels)})" if choice.labels else ""
    return f"{together}{SHORT if choice.elastic else RECOMPUTED}{kept}{stored}{labels}"
