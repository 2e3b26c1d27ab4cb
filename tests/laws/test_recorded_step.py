"""The law of the recorded step: what is read from a record is what the engine does, for any choice.

The planner knows the engine's rules a second time (`planner/evaluate.py`). Each kind of layer of the zoo and of the odd
models is recorded once, two in a row too, and sampled choices are evaluated by the record and tried with the engine on
fake tensors: all three figures are equal to the byte, and the same operations run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from support import zoo
from support.odd_models import ODD
from support.odd_models import made as made_odd
from support.recorded import flops, segment_options
from support.zoo import FEW, ZOO, scalar_loss
from torch_recompute import ArgumentError, ChangedError, Choice
from torch_recompute.memory.loop import Loop
from torch_recompute.planner.alone import SegmentCall
from torch_recompute.planner.evaluate import evaluate
from torch_recompute.planner.options import TRIED, SegmentOptions
from torch_recompute.planner.record import RecordedSegment
from torch_recompute.planner.segments import capture, group, regions_of_groups, spans
from torch_recompute.planner.tape import Tape, What
from torch_recompute.planner.trials import attempt
from torch_recompute.simulation.devices import ITSELF
from torch_recompute.simulation.training_step import TrainingStep

SAMPLES = 8
"""Choices of each kind of layer."""
# Of these rows layers are tried one by one, for the reason that the plan says.
NO_RECORD = {
    "jagged batch": "autograd saves a NestedTensor",
    "jagged batch between residual layers": "autograd saves a NestedTensor",
    "a checkpoint of its own": "it enters saved-tensor hooks of its own",
    "a router in a checkpoint": "it enters saved-tensor hooks of its own",
    "storages that are emptied": "it resizes the memory of tensors",
    "layers that return an attribute": "its modules hold other tensors in attributes",
    "spectral norm by hooks": "its modules hold other tensors in attributes",
    "reversible blocks": "its modules hold other tensors in attributes",
    "a buffer that is replaced": "its modules hold other tensors in attributes",
    "a gradient in the forward": "it runs a backward in its forward",
    "a saved call of its own": "it calls functions that do something else in a region",
    "a choice of its own": "it calls functions that do something else in a region",
    "a function that keeps its result": "something holds a tensor of its forward",
    "a backward that runs a part": "its backward runs a forward",
}
NO_REGION = {"torch.func.grad", "torch.func.grad, in tiles"}
# A replay gives the modules of these rows the buffers of the forward back, in operations of its own.
PUTS_BACK = {
    *("deepseek_v3", "odd: u-net", "odd: spectral norm"),
    *("odd: tables in attributes", "odd: a large buffer", "odd: buffers in evaluation"),
}
ROWS = [
    *(pytest.param(name, id=name, marks=[] if name in FEW else [pytest.mark.nightly]) for name in ZOO),
    *(pytest.param(f"odd: {name}", id=f"odd: {name}") for name in ODD),
]


@dataclass(frozen=True)
class Sampled:
    """A kind of layer, or several of it in a row, and choices for them in the paths of their record."""

    segment: SegmentOptions
    call: SegmentCall
    record: RecordedSegment
    choices: list[list[Choice]]


def step_of(name: str) -> TrainingStep:
    """A step of a row, for a data sheet."""
    kind, _, odd = name.partition("odd: ")
    loop = Loop(hold_output=False)
    if odd:
        model, x, loss = made_odd(odd)
        return TrainingStep(model, (x,), {}, loss=loss, device="h100", loop=loop)
    model, inputs = zoo.build(kind)
    return TrainingStep(model, (), inputs, loss=scalar_loss, device="h100", loop=loop)


def sampled(name: str) -> Iterator[Sampled]:
    """Each kind of layer of a row that allows regions, with no region and some choices; and two in a row, as one."""
    step, chosen = step_of(name), random.Random(0)
    captured = capture(step, step.runs_on)
    for kind in dict.fromkeys(captured.kinds):
        try:
            segment = SegmentOptions(captured, captured.kinds.index(kind), flops, ITSELF, frees=False)
        except ArgumentError:
            assert name.removeprefix("odd: ") in NO_REGION
            continue
        if segment.segment.tape.why_not:
            assert segment.segment.tape.why_not.startswith(NO_RECORD[name.removeprefix("odd: ")])
            continue
        every = [option.regions for option in segment.evaluated()[1:]]
        some = chosen.sample(every, min(SAMPLES, len(every)))
        products = (Choice(("",), words) for words in segment.candidates.calls)  # which may be refused
        choices = [segment.placed(regions) for regions in ((), *some, *((choice,) for choice in products))]
        yield Sampled(segment, segment.call, segment.segment, choices)
        start, numbers = spans(captured, kind)
        if numbers:
            call, paths = group(captured, start, numbers[0])
            groups = [segment.placed([region], paths) for region in regions_of_groups(segment.candidates.kinds)]
            yield Sampled(segment, call, segment.recorded(call), groups)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore:.*, so what it decides is not carried:RuntimeWarning")
def test_a_record_says_what_the_engine_does(name: str) -> None:
    """Bytes stored, the most of forward and of backward, and what runs are those of a trial, for sampled choices.

    What it says is refused the engine refuses.
    """
    for one in sampled(name):
        captured, segment = one.segment.captured, one.record
        for choices in one.choices:
            tape = segment.carrying if any(choice.carry for choice in choices) else segment.tape
            found = evaluate(tape, choices)
            assert not tape.why_not
            if found.is_refused:
                with captured.running(), pytest.raises(ChangedError):
                    attempt(one.call, choices, captured.pretend)
                continue
            with captured.running():
                tried = attempt(one.call, choices, captured.pretend)
            levels = found.saved_bytes, found.forward_bytes, found.backward_bytes
            assert levels == (tried.saved_bytes, tried.forward_bytes, tried.backward_bytes), choices
            assert found.calls == tried.calls, choices
            if name not in PUTS_BACK:
                assert found.watched == tried.watched, choices
                assert operations(tape, found.replayed) == Counter(str(op.func) for op in tried.ops.elements()), choices


def operations(tape: Tape, replayed: dict[int, int]) -> Counter[str]:
    """How often each operation runs, by name: a mask is drawn for the layout of a tensor on another device."""
    ran: Counter[str] = Counter()
    for counts in (tape.counts, replayed):
        for key, count in counts.items():
            ran[str(tape.keys[key].func)] += count
    return ran


def test_the_rows_without_a_record_are_those_that_are_named() -> None:
    """Layers whose memory a record cannot follow are few, each with its reason."""
    for name, why in NO_RECORD.items():
        step = step_of(f"odd: {name}")
        captured = capture(step, step.runs_on)
        firsts = [captured.kinds.index(kind) for kind in dict.fromkeys(captured.kinds)]
        segments = [SegmentOptions(captured, first, flops, ITSELF, frees=False) for first in firsts]
        refused = [segment for segment in segments if segment.segment.tape.why_not]
        assert refused
        for segment in refused:
            assert segment.segment.tape.why_not.startswith(why)
            assert len(segment.evaluated()) <= 1 + TRIED


def test_a_record_is_plain_data() -> None:
    """A record is printed an event a line, and one that was written as JSON says the same of any choice."""
    import torch
    from torch import nn

    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Dropout(0.1))
    segment = segment_options(block, torch.randn(4, 8, requires_grad=True))
    tape = segment.segment.tape
    again = Tape.from_json(tape.to_json())
    for regions in (option.regions for option in segment.evaluated()):
        placed = segment.placed(regions)
        assert evaluate(again, placed) == evaluate(tape, placed)
    lines = str(tape).splitlines()
    assert len(lines) == len(tape.events)
    assert sum(What.SAVE.name in line for line in lines) == len(tape.saves)
