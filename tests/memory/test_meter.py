"""Meters say the bytes alive and the most since a moment: those of the allocator, for little."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from support.acted import ActedAllocator
from torch_recompute import ArgumentError, recompute
from torch_recompute.memory import allocator, measure, meter
from torch_recompute.memory.elastic import Elastic, _Pool
from torch_recompute.memory.free import heap
from torch_recompute.memory.meter import HeapMeter, meter_for

# --- CUDA -------------------------------------------------------------------------------------------------------------


def test_on_cuda_it_is_the_allocators_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tensors have now, and the most since the lap began; each device and each meter has its own."""
    acted = ActedAllocator(monkeypatch)
    first, other, second = (meter_for(torch.device("cuda", index)) for index in (0, 0, 1))
    for each in (first, other, second):
        each.reset_lap()
    acted.hold(0, 50, 64)
    acted.hold(0, 20, 64)
    acted.hold(1, 7, 8)
    assert [(one.live(), one.lap()) for one in (first, other, second)] == [(20, 50), (20, 50), (7, 7)]
    first.reset_lap()
    acted.hold(0, 30, 64)
    acted.hold(0, 10, 64)
    assert [(one.live(), one.lap()) for one in (first, other, second)] == [(10, 30), (10, 50), (7, 7)]


def test_a_lap_and_a_measurement_take_nothing_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laps inside of a measurement leave its peaks, and measurements inside of a lap leave that; each asks little."""
    acted = ActedAllocator(monkeypatch)
    meter = meter_for(torch.device("cuda", 0))
    with measure() as around:
        acted.hold(0, 70, 90)
        acted.hold(0, 10, 90)
        meter.reset_lap()
        acted.hold(0, 40, 96)
        acted.hold(0, 20, 64)
        with measure() as inside:
            acted.hold(0, 30, 64)
            assert meter.lap() == 40
        meter.reset_lap()
        acted.hold(0, 25, 64)
        assert meter.lap() == 30
    assert around.on("cuda:0")[-2:] == (70, 96)
    assert inside.on("cuda:0")[-2:] == (30, 64)
    acted.asked = 0
    meter.reset_lap()
    assert acted.asked == 0
    assert (meter.live(), meter.lap(), acted.asked) == (25, 25, 2)


def test_a_meter_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meter that is gone is no longer kept up to date, and one before CUDA's first use says 0 and wakes nothing."""
    meter = meter_for(torch.device("cuda", 1))
    meter.reset_lap()
    assert (meter.live(), meter.lap(), torch.cuda.is_initialized()) == (0, 0, False)
    running = len(allocator._running)
    del meter
    gc.collect()
    assert len(allocator._running) == running - 1


# --- the CPU ----------------------------------------------------------------------------------------------------------

WITH_HEAP = pytest.mark.skipif(heap() is None, reason="the C library says nothing of the heap")
MIB = 2**20
LAYER = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
LAYERS = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)))
X = torch.randn(4, 128, 64)


class Laps:
    """Laps of a meter beside those of the allocator that counts."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.meter = memory, HeapMeter()
        self.found: list[tuple[str, int, int]] = []

    def begin(self) -> None:
        self.before = self.memory.live(), self.meter.live()
        self.memory.reset_lap()
        self.meter.reset_lap()

    def end(self, name: str) -> None:
        exact, told = self.memory.lap(), self.meter.lap()
        assert self.meter.missed == ""
        self.found.append((name, exact - self.before[0], told - self.before[1]))

    def cut(self, name: str) -> Callable[[torch.Tensor], None]:
        """A hook of a gradient at which one lap ends, unless it is the first, and the next begins."""

        def hook(_: torch.Tensor) -> None:
            if name:
                self.end(name)
            self.begin()

        return hook


def forwards(laps: Laps) -> Any:
    """A lap of each layer's forward."""
    y = X.repeat(1, 1, 4)
    for number, layer in enumerate(LAYERS):
        laps.begin()
        y = layer(y)
        laps.end(f"forward {number}")
    return y


def backwards(laps: Laps) -> Any:
    """A lap of each layer's backward, from and to hooks of gradients."""
    ys = [X.repeat(1, 1, 4)]
    for number, layer in enumerate(LAYERS):
        ys.append(layer(ys[-1]))
        ys[-1].register_hook(laps.cut(f"backward {number + 1}" if number < 2 else ""))
    loss = ys.pop().square().sum()
    ys.clear()
    loss.backward()
    laps.end("backward 0")
    return LAYERS.zero_grad()


def replays(laps: Laps) -> Any:
    """A lap of a region's forward and of its replay, within a node of the backward."""

    def body(x: torch.Tensor) -> torch.Tensor:
        laps.begin()
        try:
            return LAYER(x)
        finally:
            laps.end("run")

    recompute(body)(X).square().sum().backward()
    return LAYER.zero_grad()


@WITH_HEAP
@pytest.mark.parametrize("stretches", [forwards, backwards, replays])
def test_on_the_cpu_a_lap_is_the_allocators_peak(stretches: Callable[[Laps], Any], limited: Any) -> None:
    """In forwards, in replays, and from node to node of a backward a lap rises as far as what tensors have rises."""
    with limited() as memory:
        stretches(Laps(memory))  # what is made once per process
        laps = Laps(memory)
        kept = stretches(laps)
        assert len(laps.found) >= 2
        for name, exact, told in laps.found:
            assert 0 <= told - exact <= 0.02 * exact + 2**16, (name, exact, told)
        del kept


def test_a_probe_may_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heap is taken where one of a few probes is seen, and is not probed again; it is not where none is."""
    seen = iter([0, 0, 0, 2**30])  # another thread frees what the first probe takes

    monkeypatch.setattr(meter, "heap", hidden := lambda: (next(seen), 0))
    assert isinstance(meter_for(torch.device("cpu")), HeapMeter)
    assert isinstance(meter_for(torch.device("cpu")), HeapMeter)
    meter._followed.remove(hidden)
    monkeypatch.setattr(meter, "heap", lambda: (0, 0))
    with pytest.raises(ArgumentError, match="bytes alive"):
        meter_for(torch.device("cpu"))


@WITH_HEAP
def test_what_is_alive_on_the_cpu() -> None:
    """The figure follows what tensors take and give back, to the allocator's own rounding."""
    meter = meter_for(torch.device("cpu"))
    before = meter.live()
    held = [torch.empty(size) for size in (1000, MIB, 10 * MIB)]
    assert 0 <= meter.live() - before - sum(x.nbytes for x in held) < 2**16
    held.clear()
    assert abs(meter.live() - before) < 2**16


def in_a_profile(run: Callable[[], None]) -> Any:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        run()
    return sorted(event.key for event in found.key_averages() if event.key.startswith("aten::"))


def in_a_measurement(run: Callable[[], None]) -> Any:
    with measure() as found:
        run()
    return found.peak_bytes


@WITH_HEAP
@pytest.mark.parametrize(
    ("watch", "why"),
    [(in_a_profile, "a profiler runs on this thread"), (in_a_measurement, "a measurement counts operations")],
)
def test_who_has_the_events_keeps_them(watch: Callable[[Any], Any], why: str) -> None:
    """A profile and a measurement find what they find without laps; the heap stands in for these, and it is said."""
    meter, peaks = HeapMeter(), list[int]()

    def lapped() -> None:
        before = meter.live()
        meter.reset_lap()
        made = [LAYER(X)]
        peaks.append(meter.lap() - before)
        assert meter.missed == why
        made.pop().square().sum().backward()

    wanted = watch(lambda: LAYER(X).square().sum().backward())
    LAYER.zero_grad()
    assert watch(lapped) == wanted
    LAYER.zero_grad()
    assert peaks[0] >= X.nbytes
    meter.reset_lap()
    meter.lap()
    assert meter.missed == ""
    assert in_a_profile(lambda: torch.ones(3).sin()) == ["aten::empty", "aten::fill_", "aten::ones", "aten::sin"]


@WITH_HEAP
def test_a_lap_that_nobody_asks_for_is_in_nobodys_way() -> None:
    """One that is begun in a backward ends with its nodes: no event is left, the graph is freed, and others follow."""
    meter = HeapMeter()
    y = LAYERS(X.repeat(1, 1, 4))
    y.register_hook(lambda _: meter.reset_lap())
    kept = weakref.ref(y)
    y.sum().backward()
    del y
    assert kept() is None
    assert "aten::sin" in in_a_profile(lambda: torch.ones(3).sin())
    assert meter.lap() >= meter.live() - 2**16
    before = meter.live()
    meter.reset_lap()
    meter.reset_lap()
    held = torch.empty(MIB)
    del held
    assert meter.lap() - before >= 4 * MIB - 2**16
    LAYERS.zero_grad()


@WITH_HEAP
def test_a_lap_around_a_backward_does_not_end_in_it() -> None:
    """Asked for within, it says so, as does one that begins there; asked for afterwards it has ended."""
    meter, told = HeapMeter(), list[str]()
    y = LAYERS(X.repeat(1, 1, 4))

    def hook(_: torch.Tensor) -> None:
        meter.lap()
        told.append(meter.missed)
        meter.reset_lap()
        meter.lap()
        told.append(meter.missed)

    y.register_hook(hook)
    meter.reset_lap()
    y.sum().backward()
    meter.lap()
    assert told == ["it began before the backward that runs", "a profiler runs on this thread"]
    assert "aten::sin" in in_a_profile(lambda: torch.ones(3).sin())
    LAYERS.zero_grad()


@WITH_HEAP
def test_a_lap_is_its_threads() -> None:
    """A thread that began none is told so, and takes nothing from the lap of another."""
    meter, told = HeapMeter(), list[str]()
    meter.reset_lap()
    held = torch.empty(MIB)
    del held
    thread = threading.Thread(target=lambda: (meter.lap(), told.append(meter.missed)))
    thread.start()
    thread.join()
    assert told == ["no lap began on this thread"]
    assert (meter.lap() - meter.live() >= 4 * MIB - 2**16, meter.missed) == (True, "")


# --- in a pool of elastic regions -------------------------------------------------------------------------------------


@WITH_HEAP
def test_elastic_regions_on_the_cpu_leave_the_profiler_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between regions, between steps and after an error a profile can begin, at a size that is new or known."""
    monkeypatch.setattr(_Pool, "device", torch.device("cpu"))
    memory, wrong = Elastic("1TiB"), [False]

    def body(x: torch.Tensor) -> torch.Tensor:
        if wrong[0]:
            raise KeyError("wrong")
        return LAYER(x)

    region = recompute(body, elastic=memory)
    for size in (2, 4, 4):
        y = region(X[:size])
        assert "aten::sin" in in_a_profile(lambda y=y: y.sin())
        y.sum().backward()
        assert "aten::sin" in in_a_profile(lambda: torch.ones(3).sin())
        wrong[0] = True
        with pytest.raises(KeyError):
            region(X[:size])
        wrong[0] = False
        assert "aten::sin" in in_a_profile(lambda: torch.ones(3).sin())
    LAYER.zero_grad()


@WITH_HEAP
def test_a_stretch_is_measured_once_per_size_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a size is known, no forward of it and hardly a backward is measured again."""
    monkeypatch.setattr(_Pool, "device", torch.device("cpu"))
    begun = list[int]()
    reset = HeapMeter.reset_lap
    monkeypatch.setattr(HeapMeter, "reset_lap", lambda meter: (begun.append(1), reset(meter)))
    memory = Elastic("1TiB")
    regions = [recompute(LAYERS[number], name=str(number), elastic=memory) for number in range(3)]
    counts = []
    for size in (4, 4, 4, 4, 2, 4, 2):
        y = X[:size].repeat(1, 1, 4)
        for region in regions:
            y = region(y)
        y.square().sum().backward()
        counts.append(len(begun))
        begun.clear()
    # The last backwards of a step end with the step, so nothing is learned of them.
    assert all(count <= 2 < counts[0] for count in (counts[3], *counts[5:])), counts
    LAYERS.zero_grad()
