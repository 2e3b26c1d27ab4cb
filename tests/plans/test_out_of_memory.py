"""Memory that runs out in a region: the error stays what it is, and says the region, what was alive and what would fit.

The error is torch's own, so these texts are not in `tests/project/test_messages.py`; they are pinned here.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.zoo import mean_loss
from torch_recompute import Choice, Plan, apply, doctor, make_plan, measure, no_recompute, recompute, simulate
from torch_recompute.commands import trials
from torch_recompute.doctor.checks import CHECKS, look_for
from torch_recompute.doctor.step_watcher import AllocatorStats, Observations
from torch_recompute.plan import exhausted
from torch_recompute.plan.exhausted import CAPACITY, FRAGMENTATION, Shortage, asked_for, fragmented

ASKED = "CUDA out of memory. Tried to allocate 20.00 KiB. GPU 0 has a total capacity of 79.10 GiB"
MEASURE = "run the step in `with torch_recompute.measure(model, optimizer):` to see all categories."


class Block(nn.Module):
    """A block that runs out of memory when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[Exception | None]] = [[None]]  # deeper than what a replay finds as in forward
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    @property
    def error(self) -> Exception | None:
        return self.told[0][0]

    @error.setter
    def error(self, error: Exception | None) -> None:
        self.told[0][0] = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if self.error is not None:
            raise self.error
        return x + self.down(F.gelu(hidden))


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(3)))


def batch() -> torch.Tensor:
    return torch.ones(256, 8)


def lines(error: BaseException) -> list[str]:
    return str(error).split("\n")


def everything(model: nn.Module) -> Plan:
    return Plan(tuple(Choice((name,)) for name, _ in model.named_children()))


def told(model: nn.Sequential, block: int, text: str = ASKED) -> list[str]:
    """The lines of the error that rises when memory runs out in the forward of a block."""
    model[block].error = torch.OutOfMemoryError(text)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(batch())
    return lines(caught.value)


def planned(model: nn.Sequential, budget: float) -> tuple[Plan, int]:
    """A plan for a budget, and the number of the first block in it."""
    plan = make_plan(model, (batch(),), budget=budget, device="h100", loss=mean_loss)
    return plan, int(plan.choices[0].paths[0].partition(".")[0])


def test_in_forward(model: nn.Sequential) -> None:
    """The same error object rises, of its own class, with the region, the model's bytes and the line to write."""
    apply(model, everything(model))
    error = model[1].error = torch.OutOfMemoryError(ASKED)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(batch())
    assert caught.value is error
    assert lines(error) == [
        ASKED,
        "  Out of memory in the region 1, in its forward.",
        f"  Alive then: parameters and buffers 6.47 KiB, gradients 0 bytes of Sequential; the rest was not counted: "
        f"{MEASURE}",
        '  For a plan that fits, write: apply(model, make_plan(model, (batch,), budget="24GiB", optimizer=...)) (what '
        "the device may hold), or: torch-recompute plan MODEL --budget 24GiB",
    ]
    assert len(error.args) == 1


def test_in_a_replay_on_a_cpu(model: nn.Sequential) -> None:
    """What the CPU's allocator raises is known too, and in a replay it is said that it was one."""
    apply(model, everything(model))
    out = model(batch()).sum()
    try:
        torch.empty(2**60)
    except RuntimeError as error:
        model[1].error = error
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        out.backward()
    assert lines(caught.value)[1] == "  Out of memory in the region 1, in its replay."
    assert "gradients 2.16 KiB of Sequential" in lines(caught.value)[2]  # those of the last block


def test_under_a_measurement(model: nn.Sequential) -> None:
    """Where a measurement runs, every category is said, and their sum."""
    apply(model, everything(model))
    with measure(model) as memory:
        said = told(model, 2)
    assert memory.live_by_category["parameters"] == 6624
    assert re.fullmatch(r"  Alive then on cpu, [\d.]+ KiB: parameters 6\.47 KiB, activations [\d.]+ KiB\.", said[2])


def test_the_nearest_plan_fits(model: nn.Sequential) -> None:
    """A plan made for a budget says the next one below it, and the budget that it says makes a plan that needs less."""
    plan, block = planned(model, 0.9)
    handle = apply(model, plan)
    promised, nearest = told(model, block)[3:]
    handle.remove()
    assert promised.startswith("  The plan in the model promises a peak of ")
    assert promised.endswith("torch_recompute.doctor tells which.")
    found = re.search(r'Write: make_plan\(\.\.\., budget="(\w+\.\w+)"\)\.', nearest)
    assert found is not None
    for block in model:
        block.error = None
    leaner = make_plan(model, (batch(),), budget=found[1], device="h100", loss=mean_loss)
    assert plan.predicted_peak_bytes is not None
    assert leaner.predicted_peak_bytes is not None
    assert leaner.predicted_peak_bytes <= plan.predicted_peak_bytes - asked_for(ASKED)
    assert simulate(model, (batch(),), plan=leaner, loss=mean_loss).peak_bytes == leaner.predicted_peak_bytes


def test_where_no_plan_fits(model: nn.Sequential) -> None:
    """An allocation larger than any plan frees is answered with the least peak there is."""
    plan, block = planned(model, 0.5)
    apply(model, plan)
    said = told(model, block, "Tried to allocate 9.00 GiB")
    assert re.search(r"No plan would fit: with this batch the least has a peak of \d", said[-1])


def test_a_plan_from_a_file(model: nn.Sequential) -> None:
    """A plan that was read has no costs with it; then the line to write has the budget that is left."""
    made, block = planned(model, 0.5)
    plan = Plan.from_json(made.to_json())
    assert plan.profile is None
    apply(model, plan)
    said = told(model, block)
    assert plan.predicted_peak_bytes is not None
    left = (plan.predicted_peak_bytes - 20 * 2**10) * 100 // 2**10 / 100
    assert said[-1].endswith(f"torch-recompute plan MODEL --budget {left:.2f}KiB")


def test_on_cuda(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the allocator's figures are said, and the budget is what this process can have, less five per cent."""
    gib = 2**30
    plan, block = planned(model, 0.5)
    apply(model, plan)
    monkeypatch.setattr(exhausted, "_device", lambda model: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 40 * gib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * gib, 80 * gib))
    said = told(model, block)
    assert "optimizer state and activations 40.00 GiB together" in said[2]
    assert said[3] == (
        "  On cuda:0 40.00 GiB were allocated, 70.00 GiB reserved by the allocator, of 80.00 GiB: 30.00 GiB lay unused "
        "between them."
    )
    assert "and this process can have 68.00 GiB: this step is a larger one" in said[4]


def test_without_plan_and_measurement() -> None:
    """A region in anybody's code says its name and what to write."""
    error = torch.OutOfMemoryError("out")

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise error

    with pytest.raises(torch.OutOfMemoryError):
        recompute(fails, name="mine")(batch())
    assert lines(error)[:3] == [
        "out",
        "  Out of memory in the region mine, in its forward.",
        f"  Alive then: not counted by category: {MEASURE}",
    ]


def nested(error: Exception) -> Callable[[torch.Tensor], torch.Tensor]:
    calls = iter([None, None, error])

    def inner(x: torch.Tensor) -> torch.Tensor:
        failing = next(calls)
        if failing is not None:
            raise failing
        return x.sin().exp()

    return recompute(lambda x: recompute(inner, name="inner")(x.exp()).sin(), name="outer")


def test_it_is_said_once() -> None:
    """Where the error passes through several regions, and rises twice, the innermost has told, once."""
    error = torch.OutOfMemoryError("out")
    out = nested(error)(batch().requires_grad_()).sum()
    with pytest.raises(torch.OutOfMemoryError):
        out.backward()
    assert [line for line in lines(error) if "Out of memory" in line] == [
        "  Out of memory in the region inner, in its replay."
    ]


def test_other_errors_are_left_alone() -> None:
    """An error that is not about memory keeps its arguments."""
    error = RuntimeError("something", 7)

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise error

    with pytest.raises(RuntimeError) as caught:
        recompute(fails)(batch())
    assert caught.value.args == ("something", 7)
    assert vars(error) == {}


def test_a_witness_that_fails_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where looking fails, that is said, and the error is still the one that rises."""
    monkeypatch.setattr(exhausted.measurement, "running", lambda: 1 / 0)
    error = torch.OutOfMemoryError("out")

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise error

    with pytest.raises(torch.OutOfMemoryError):
        recompute(fails, name="mine")(batch())
    assert lines(error)[-1] == "  What was alive could not be found out (ZeroDivisionError: division by zero)."


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("saved", [False, True], ids=["region", "with a saved call"])
def test_nothing_leaks(saved: bool) -> None:
    """After the error every tensor of the step dies without the collector, and the next step is right."""
    calls = 0

    def fails(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        hidden = x.exp()
        made.append(weakref.ref(hidden))
        if calls == 2:
            raise torch.OutOfMemoryError("out")
        return (no_recompute(torch.sin)(hidden) if saved else hidden.sin()).exp()

    made: list[weakref.ref[torch.Tensor]] = []
    x = batch().requires_grad_()
    out = recompute(fails)(x).sum()
    with pytest.raises(torch.OutOfMemoryError, match="in its replay") as caught:
        out.backward()
    caught.value.__traceback__ = None  # which holds the function's variables, as that of any error does
    del out, caught
    assert [ref() for ref in made] == [None, None]
    x.grad = None
    recompute(fails)(x).sum().backward()
    plain = batch().requires_grad_()
    plain.exp().sin().exp().sum().backward()
    assert plain.grad is not None
    assert x.grad is not None
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (ASKED, 20 * 2**10),
        ("Tried to allocate 2.50 GiB.", 2**31 + 2**29),
        ("you tried to allocate 4096 bytes. Error code 12", 4096),
        ("out of memory", 0),
    ],
)
def test_what_was_asked_for(text: str, count: int) -> None:
    """The size of the allocation is read from both allocators' texts."""
    assert asked_for(text) == count


class Device:
    """A device whose allocator caches segments: each is cut up, and only one with nothing in it is given back."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # MiB, as all below
        self.segments: list[list[tuple[int, str]]] = []  # pieces in their order; "" is a free one

    @property
    def reserved(self) -> int:
        return sum(size for segment in self.segments for size, _ in segment)

    @property
    def allocated(self) -> int:
        return sum(size for segment in self.segments for size, name in segment if name)

    def take(self, size: int, name: str, segment: int = 0) -> None:
        """Takes a piece of a hole, else of a new segment of at least `segment`, else raises torch's error."""
        for pieces in self.segments:
            for place, (hole, owner) in enumerate(pieces):
                if not owner and hole >= size:
                    pieces[place : place + 1] = [(size, name), *([(hole - size, "")] if hole > size else [])]
                    return
        self.segments = [pieces for pieces in self.segments if any(owner for _, owner in pieces)]
        new = max(size, segment)
        if self.reserved + new > self.capacity:
            unused = self.reserved - self.allocated
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size:.2f} MiB. GPU 0 has a total capacity of 79.10 GiB of "
                f"which 0 bytes is free. {self.capacity:.2f} MiB allowed; Of the allocated memory {self.allocated:.2f} "
                f"MiB is allocated by PyTorch, and {unused:.2f} MiB is reserved by PyTorch but unallocated."
            )
        self.segments.append([(size, name), *([(new - size, "")] if new > size else [])])

    def free(self, name: str) -> None:
        self.segments = [[(size, "" if owner == name else owner) for size, owner in s] for s in self.segments]


@pytest.mark.parametrize(("in_pieces", "verdict"), [(True, FRAGMENTATION), (False, CAPACITY)])
def test_capacity_or_fragmentation(in_pieces: bool, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose free memory is in pieces, bench and doctor say fragmentation; on a full one, capacity."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    device = Device(100)
    for number in range(10):  # segments of 10 with 6 that goes and 4 that stays
        device.take(6, f"goes {number}", 10)
        device.take(4, "stays")
    if in_pieces:
        for number in range(10):
            device.free(f"goes {number}")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        device.take(20, "large")
    mib = 2**20
    short = Shortage.of(str(caught.value), None, None, None, cuda=False)
    assert short.as_data() == {
        "requested_bytes": 20 * mib,
        "allocated_bytes": device.allocated * mib,
        "reserved_bytes": 100 * mib,
        "capacity_bytes": 100 * mib,
        "verdict": verdict,
        "write": short.write,
    }
    assert short.write.startswith("PYTORCH_ALLOC_CONF=expandable_segments:True") == in_pieces
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert ("is on already" in short.write) == in_pieces
    books = AllocatorStats("cuda:0", device.allocated * mib, device.reserved * mib, 1, device.capacity * mib)
    found = look_for(CHECKS, doctor.Evidence("Model", observed=Observations(allocator=books))).findings
    assert [finding.kind for finding in found] == ["fragmentation"] * in_pieces
    assert all(finding.write == short.write for finding in found)

    def runs_out() -> None:
        raise caught.value

    monkeypatch.setattr(trials._Trial, "run", lambda self: runs_out())
    record = trials.run_task(trials.TrialTask(trials.Workload("gpt-tiny"), trials.Setting("a"), 1, 0))
    assert (record.status, record.shortage) == (trials.OUT, short.as_data())


def test_the_rule() -> None:
    """What is reserved and unused is held against the request; where that is not known, against a fifth of it all."""
    assert fragmented(40, 70, 30)
    assert not fragmented(40, 70, 31)
    assert fragmented(40, 50)
    assert not fragmented(41, 50)
    assert Shortage(None, 40, 70, 80).verdict == Shortage(5, None, None, 80).verdict == Shortage().write == ""
    assert Shortage(5, 40, 70, 80, cuda=False).write.startswith("MALLOC_MMAP_THRESHOLD_=")
