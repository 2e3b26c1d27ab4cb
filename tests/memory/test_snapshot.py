"""Blocks of memory at each moment of a step, and the snapshot of them for PyTorch's viewer."""

import inspect
import linecache
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from support.blocks import alive
from support.models import Residual
from support.zoo import mean_loss
from torch_recompute import Choice, Plan, Simulation, measure, recompute, simulate
from torch_recompute.memory.ledger import ACTIVATIONS, GRADIENTS, Ledger, blocks_of
from torch_recompute.memory.snapshot import snapshot_of

WHOLE = Plan(tuple(Choice((str(i),)) for i in range(3)))
PART = Plan((Choice(("0",), keep=("up",)), Choice(("2",))))
STEPS = {
    "forward and backward": {},
    "regions": {"plan": WHOLE},
    "regions with a saved call": {"plan": PART, "optimizer": torch.optim.SGD},
    "an optimizer with state": {"optimizer": torch.optim.AdamW},
    "regions and state": {"plan": WHOLE, "optimizer": torch.optim.AdamW},
    "two batches": {"plan": WHOLE, "optimizer": torch.optim.AdamW, "accumulate": 2},
    "in whole kilobytes": {"optimizer": torch.optim.AdamW, "rounding": 1024},
}


@pytest.fixture(scope="module", params=STEPS, ids=str)
def step(request: pytest.FixtureRequest) -> Simulation:
    """One simulated step of each kind."""
    model = nn.Sequential(*(Residual(16) for _ in range(3)), nn.BatchNorm1d(16))
    return simulate(model, (torch.ones(32, 16),), **STEPS[request.param], loss=mean_loss)


def test_blocks_sum_to_the_timeline(step: Simulation) -> None:
    """At every moment the blocks alive sum to the bytes alive, and at the peak by category, too."""
    assert [moment.live_bytes for moment in step.timeline] == [
        sum(alive(step.blocks, moment.event).values()) for moment in step.timeline
    ]
    assert alive(step.blocks, step.peak.event) == step.by_category
    assert all(block.nbytes > 0 for block in step.blocks)
    assert [block.born for block in step.blocks] == sorted(block.born for block in step.blocks)


def test_events_rise(step: Simulation) -> None:
    """The timeline is in the order of its events, which are those of the operations."""
    events = [moment.event for moment in step.timeline]
    assert events == sorted(set(events))
    operations = {place.event: place for place in step.operations}
    assert [place.event for place in step.operations] == sorted(operations)
    assert all(moment.event in operations for moment in step.timeline if moment.op)
    assert {block.made.op for block in step.blocks if block.born} <= {place.op for place in step.operations}


def test_state_is_there_from_the_beginning() -> None:
    """An optimizer's state is one block from the first moment to the last, like the parameters that it is for."""
    model = nn.Linear(4, 4)
    found = simulate(model, (torch.ones(2, 4),), optimizer=torch.optim.AdamW, loss=mean_loss)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    lasting = [block for block in found.blocks if block.born == 0 and block.died is None]
    assert sorted(block.nbytes for block in lasting if block.category == "parameters") == sorted(sizes)
    state = sorted(block.nbytes for block in lasting if block.category == "optimizer")
    assert state == sorted([*sizes, *sizes, *([4] * len(sizes))])  # two moments, and the number of the step


def test_a_storage_that_is_emptied_and_filled_is_two_blocks() -> None:
    """Sizes that change end a block and begin another; what was there for no moment is none; names come late."""
    ledger = Ledger()
    storage = torch.ones(8).untyped_storage()
    ledger.mark(storage, ACTIVATIONS)
    ledger.sample(1, "made")
    storage.resize_(0)
    ledger.touch(storage)
    ledger.sample(2, "emptied")
    storage.resize_(64)
    ledger.touch(storage)
    ledger.sample(3, "filled")
    ledger.mark(storage, GRADIENTS)
    passing = torch.ones(4).untyped_storage()
    ledger.mark(passing, ACTIVATIONS)
    del passing
    ledger.book_deaths()
    ledger.sample(4, "passed")
    assert [block[:4] for block in blocks_of(ledger.changes)] == [("gradients", 32, 1, 2), ("gradients", 64, 3, None)]


def shown(snapshot: dict[str, Any], device: int = 0) -> tuple[int, int]:
    """The most bytes of a snapshot's trace, and those at its end."""
    live = most = 0
    alive_at: dict[int, int] = {}
    for entry in snapshot["device_traces"][device]:
        if entry["action"] == "alloc":
            assert entry["addr"] not in alive_at
            alive_at[entry["addr"]] = entry["size"]
            live += entry["size"]
        elif entry["action"] == "free_completed":
            live -= alive_at.pop(entry["addr"])
        most = max(most, live)
    assert {seg["address"]: seg["total_size"] for seg in snapshot["segments"]} == alive_at
    return most, live


def test_a_snapshot_has_the_peak_of_the_step(step: Simulation) -> None:
    """Played back, a snapshot's allocations reach exactly the peak, and end with the segments that it lists."""
    most, live = shown(snapshot_of(step.blocks))
    assert most == step.peak_bytes
    assert live == sum(alive(step.blocks, step.timeline[-1].event).values())


def test_pytorch_reads_a_snapshot(step: Simulation, tmp_path: Path) -> None:
    """PyTorch's own functions for snapshots take the file: they add it up, list it and plot it."""
    path = tmp_path / "step.pickle"
    step.to_snapshot(path)
    snapshot = pickle.loads(path.read_bytes())
    total = sum(block.nbytes for block in step.blocks if block.died is None)
    summary = _memory_viz.segsum(snapshot)
    assert f"total_allocated: {_memory_viz.Bytes(total)}\n" in summary
    assert f"total_reserved: {_memory_viz.Bytes(total)}\n" in summary
    listed = _memory_viz.trace(snapshot)
    assert listed.count("= cudaMalloc(") == len(step.blocks)
    assert listed.count("# free completed") == sum(block.died is not None for block in step.blocks)
    for page in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)):
        assert "snapshot.pickle" in page


def test_a_snapshot_says_who_made_the_bytes() -> None:
    """A frame names the operation and the module, the next the category and the phase; the viewer's own is there."""
    model = nn.Sequential(Residual(16), Residual(16))
    found = simulate(model, (torch.ones(32, 16),), plan=Plan((Choice(("1",)),)), loss=mean_loss)
    (trace,) = snapshot_of(found.blocks)["device_traces"]
    said = {(frame["filename"], frame["name"]) for entry in trace for frame in entry["frames"]}
    assert {("0.up", "aten.addmm.default"), ("1.up", "aten.addmm.default"), ("activations", "replay")} <= said
    assert ("parameters", "there when the step began") in said
    categories = {entry["category"] for entry in trace}
    assert {"parameters", "gradients", "activations"} <= categories
    # https://github.com/pytorch/pytorch, torch/utils/viz/MemoryViz.js: colours need a category of this name.
    assert "unknown" in categories


def test_a_measured_step_has_a_snapshot(tmp_path: Path) -> None:
    """What was measured is exported as what was simulated is: the same peak, and who made the bytes, by line."""
    model = nn.Sequential(*(Residual(16) for _ in range(3)))
    adam = torch.optim.AdamW(model.parameters())
    inner = recompute(model[1], name="second")
    with measure(model, adam) as memory:
        model[2](inner(model[0](torch.ones(32, 16)))).sum().backward()
        adam.step()
        within = tmp_path / "within.pickle"
        memory.to_snapshot(within)
        at_the_end = memory.live_bytes
    adam.zero_grad()
    after = tmp_path / "after.pickle"
    memory.to_snapshot(after)
    found = pickle.loads(after.read_bytes())
    assert shown(pickle.loads(within.read_bytes())) == (memory.peak_bytes, at_the_end)
    assert shown(found) == (memory.peak_bytes, memory.live_bytes)
    assert memory.live_bytes < at_the_end
    (trace,) = found["device_traces"]
    stacks = [entry["frames"] for entry in trace if entry["action"] == "alloc"]
    assert {stack[0]["name"] for stack in stacks if len(stack) == 1} == {"there when the step began"}
    made = [stack for stack in stacks if len(stack) == 2]
    assert {op["filename"] for op, _ in made} == {__file__, inspect.getfile(Residual)}
    of_gelu = [where["name"] for op, where in made if "gelu(" in linecache.getline(op["filename"], op["line"])]
    assert set(of_gelu) == {"forward", "forward, in second", "replay, in second"}
    assert {where["name"] for op, where in made} >= {"backward", "optimizer"}
    assert {where["filename"] for _, where in made} == {"activations", "gradients", "optimizer"}


def test_a_measured_step_has_blocks_at_every_moment() -> None:
    """The blocks of a measured step sum to its timeline, as those of a simulated one do."""
    model = nn.Sequential(*(Residual(16) for _ in range(2)))
    with measure(model) as memory:
        model(torch.ones(32, 16)).sum().backward()
    blocks = blocks_of(memory._ledgers[memory.device].changes)
    assert [sample.live_bytes for sample in memory.timeline] == [
        sum(alive(blocks, sample.event).values()) for sample in memory.timeline
    ]


def test_a_snapshot_of_another_device() -> None:
    """The trace stands in the place of its device."""
    found = simulate(nn.Linear(4, 4), (torch.ones(2, 4),), loss=mean_loss)
    snapshot = snapshot_of(found.blocks, 2)
    assert [bool(trace) for trace in snapshot["device_traces"]] == [False, False, True]
    assert {segment["device"] for segment in snapshot["segments"]} == {2}
    assert shown(snapshot, 2)[0] == found.peak_bytes
