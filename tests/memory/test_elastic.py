"""The pool of elastic regions: what it keeps, whom it evicts, and that the limit holds at every allocation.

The allocator of `support/limited.py` is the meter, and raises beyond the limit: a step that ends has kept it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_recompute as tr
from support.elastic import Script
from support.limited import Limited, limited, missing
from support.models import Gpt, ids_of
from torch_recompute import ArgumentError, Elastic, no_recompute, recompute
from torch_recompute.engine.region_call import Options
from torch_recompute.memory.elastic import _Learned, _Pool
from torch_recompute.memory.meter import HeapMeter
from torch_recompute.region import call

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
STEPS = 12
LENGTHS = [96, 40, 160, 100, 64, 200, 256, 48, 256, 120]


@functools.cache
def model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(6, width=32)


Wrap = Callable[[nn.Module], Callable[..., Any]]


def stepped(wrap: Wrap | None, length: int, model: Gpt | None = None) -> str:
    """A training step of one sequence; the digest of its gradients."""
    net = model or globals()["model"]()
    net.zero_grad(set_to_none=True)
    torch.manual_seed(length)
    ids = ids_of(length, 1)
    x = net.embed(ids)
    for block in net.blocks:
        x = (block if wrap is None else wrap(block))(x)
    F.cross_entropy(net.head(x).flatten(0, 1), ids.flatten()).backward()
    return digest(parameter.grad for parameter in net.parameters())


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """The bits of some tensors, without holding them."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


plain = functools.cache(functools.partial(stepped, None))


def peak(memory: Limited, wrap: Wrap | None, length: int) -> int:
    stepped(wrap, length)
    memory.reset_lap()
    stepped(wrap, length)
    return memory.lap()


@pytest.fixture
def memory() -> Iterator[Limited]:
    model()
    for length in LENGTHS:
        plain(length)
    with limited() as found:
        yield found
        model().zero_grad(set_to_none=True)
        gc.collect()


def between(memory: Limited, share: float, length: int = max(LENGTHS)) -> int:
    """A limit at a share of the way from all recomputed to none."""
    low, high = peak(memory, recompute, length), peak(memory, None, length)
    return low + round(share * (high - low))


def elastic(pool: Elastic) -> Wrap:
    return lambda block: recompute(block, elastic=pool)


def totals(pool: Elastic) -> dict[str, int]:
    rows = pool.report().rows
    return {name: sum(getattr(row, name) for row in rows) for name in ("kept", "dropped", "evicted", "replayed")}


@pytest.mark.parametrize("slack", [0.0, 0.1])
def test_slack_stays_free(memory: Limited, slack: float) -> None:
    """Steps take no more than the limit less `slack`, and what is below that is used."""
    pool, length = Elastic(between(memory, 0.7), slack=slack, meter=memory), max(LENGTHS)
    usable = round((1 - slack) * pool.limit)

    def failures() -> int:
        """Counts what finds no memory: steps, and forwards that ran again because of it."""
        right = 0
        for _ in range(3):
            with contextlib.suppress(RuntimeError):
                right += stepped(elastic(pool), length) == plain(length)
        return 3 - right + sum(row.run_again for row in pool.report().rows)

    memory.limit = usable
    assert failures() == 0
    memory.limit = round(0.9 * usable)
    assert failures() > 0
    memory.limit = None


@pytest.mark.parametrize("share", [1.1, 0.75, 0.5, 0.25, 0.1, 0.0])
def test_the_limit_holds_at_every_allocation(memory: Limited, share: float) -> None:
    """Sequences of ten lengths under six limits, without slack: no step fails, gradients are plain's to the bit."""
    limit = between(memory, share)
    pool = Elastic(limit, slack=0.0, meter=memory)
    memory.limit = limit
    for length in LENGTHS:
        assert stepped(elastic(pool), length) == plain(length)
    memory.limit = None
    found = totals(pool)
    assert found["dropped"] == 6 or not share  # the first call of each
    assert sum(row.run_again for row in pool.report().rows) == 0
    assert (found["evicted"] == 0) == (share > 1)


def test_what_fits_is_kept(memory: Limited) -> None:
    """With room for all, each region replays once, its first call, and then never again."""
    pool = Elastic(10**9, meter=memory)
    for step in range(4):
        stepped(elastic(pool), 100)
        assert totals(pool) == {"kept": 6 * step, "dropped": 6, "evicted": 0, "replayed": 6}


def test_always_keeps_nothing(memory: Limited) -> None:
    """With `always` each call is replayed, whatever is free."""
    pool = Elastic(10**9, meter=memory, always=True)
    for _ in range(3):
        assert stepped(elastic(pool), 100) == plain(100)
    assert totals(pool) == {"kept": 0, "dropped": 18, "evicted": 0, "replayed": 18}


def test_the_oldest_is_evicted_first(memory: Limited) -> None:
    """What backward needs last goes: of six layers those replayed are the first ones."""
    pool = Elastic(between(memory, 0.5), slack=0.0, meter=memory)
    for _ in range(3):
        stepped(elastic(pool), max(LENGTHS))
    replayed = [row.replayed for row in pool.report().rows]
    assert replayed == sorted(replayed, reverse=True)
    assert replayed[0] == 3
    assert replayed[-1] == 1


def test_the_limit_may_change_between_steps(memory: Limited) -> None:
    """A limit that falls evicts more in the next step, and one that rises keeps all again."""
    least, most = between(memory, 0.1), 10**9
    pool = Elastic(most, slack=0.0, meter=memory)
    stepped(elastic(pool), max(LENGTHS))
    counts: list[int] = []
    for limit in (most, least, most):
        pool.limit = memory.limit = limit
        before = totals(pool)["replayed"]
        assert stepped(elastic(pool), max(LENGTHS)) == plain(max(LENGTHS))
        counts.append(totals(pool)["replayed"] - before)
    assert counts[0] == counts[2] == 0
    assert counts[1] >= 4


def test_the_nearest_miss_is_the_allocators(memory: Limited) -> None:
    """What the report says was left under the limit is what the allocator's peak says."""
    pool = Elastic(between(memory, 0.5), slack=0.0, meter=memory)
    stepped(elastic(pool), max(LENGTHS))
    assert pool.report().miss is not None
    text = str(pool.report())
    assert "nearest to the limit" in text
    assert "Block" in text
    left = pool.report().miss
    assert 0 <= left <= pool.limit - memory.live()


# --- microbatches in flight ---


def test_under_1f1b_the_newest_microbatch_goes_first(memory: Limited) -> None:
    """Two microbatches in flight, backward of the older first: the newer one's older layers are replayed, and fewer."""
    net = model()

    def forward(block: Wrap, number: int) -> torch.Tensor:
        torch.manual_seed(number)
        ids = ids_of(max(LENGTHS), 1)
        x = net.embed(ids)
        for layer in net.blocks:
            x = block(layer)(x)
        return net.head(x).square().mean()

    def step(block: Wrap, count: int = 6) -> None:
        net.zero_grad(set_to_none=True)
        flying = [forward(block, 0)]
        for number in range(1, count):
            flying.append(forward(block, number))
            flying.pop(0).backward()
        flying.pop(0).backward()

    memory.reset_lap()
    step(lambda layer: layer)
    high = memory.lap()
    memory.reset_lap()
    step(recompute)
    low = memory.lap()
    limit = low + round(0.8 * (high - low))
    found: list[int] = []
    for overlapping in (True, None):
        pool = Elastic(limit, slack=0.0, meter=memory)
        step(elastic(pool))
        assert pool._pool.overlapping  # it is seen in the first step
        before = totals(pool)["replayed"]
        if overlapping is None:
            pool._pool.starts = functools.partial(_forgetful, pool._pool)  # a pool that does not see it
        memory.limit = limit if overlapping else None
        step(elastic(pool))
        memory.limit = None
        found.append(totals(pool)["replayed"] - before)
    assert found[0] < found[1]


def _forgetful(pool: Any, call: Any) -> None:
    type(pool).starts(pool, call)
    pool.overlapping = False


def test_a_layer_called_many_times_is_no_pipeline(memory: Limited) -> None:
    """Weights shared over depth: the calls of one region are no microbatches, and the oldest goes first."""
    block = model().blocks[0]
    pool = Elastic(10**9, meter=memory)
    layer = recompute(block, elastic=pool)
    for _ in range(2):
        x = torch.randn(1, 16, 32)
        for _ in range(4):
            x = layer(x)
        x.sum().backward()
    assert not pool._pool.overlapping


# --- when what was learned is not enough ---


class Bursts(nn.Module):
    """A layer that takes more memory when it is told to; nothing in its arguments' sizes says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(64, 64), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat([x.sin()] * self.times)[: len(x)])


def test_a_forward_that_fails_is_run_again(memory: Limited) -> None:
    """A region that suddenly takes more than it did: others are evicted, it runs again, with plain's gradients."""
    torch.manual_seed(0)
    layers = [Bursts() for _ in range(4)]
    x = torch.randn(256, 64)

    def step(wrap: Wrap) -> list[torch.Tensor]:
        y = x
        for layer in layers:
            y = F.dropout(wrap(layer)(y), 0.1)
        return list(torch.autograd.grad(y.square().sum(), [p for layer in layers for p in layer.parameters()]))

    torch.manual_seed(1)
    wanted = step(lambda layer: layer)
    pool = Elastic(10**9, slack=0.0, meter=memory)
    for _ in range(2):
        step(elastic(pool))
    layers[-1].times = 12
    pool.limit = memory.limit = memory.live() + 12 * x.nbytes + 10 * x.nbytes
    torch.manual_seed(1)
    got = step(elastic(pool))
    memory.limit = None
    assert all(map(torch.equal, got, wanted))
    assert sum(row.run_again for row in pool.report().rows) >= 1


def test_at_the_end_of_the_rope_the_error_says_what_the_step_needs(memory: Limited) -> None:
    """Below the floor of any recomputation the allocator's own error passes on, with the bytes that were not enough."""
    limit = between(memory, -0.3)
    pool = Elastic(limit, slack=0.0, meter=memory)
    memory.limit = limit
    with pytest.raises(torch.OutOfMemoryError, match="Nothing is left to evict") as caught:
        for length in (max(LENGTHS), max(LENGTHS)):
            stepped(elastic(pool), length)
    memory.limit = None
    assert "The step needs more than" in str(caught.value)
    assert "Out of memory in the region Block" in str(caught.value)
    del caught
    model().zero_grad(set_to_none=True)
    gc.collect()


def test_what_was_changed_in_place_is_not_run_again(memory: Limited) -> None:
    """A forward that has changed its input before it failed cannot be undone; the error says so."""

    def careless(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return (x.sin() @ torch.ones(64, 64)).exp()

    pool = Elastic(10**9, meter=memory)
    region = recompute(careless, elastic=pool)
    x = torch.randn(8, 64, requires_grad=True).clone()
    memory.fail_at(4)
    with pytest.raises(torch.OutOfMemoryError, match="is not run again with less kept: a tensor that it was given"):
        region(x)
    memory.fail_at(None)


def test_other_errors_are_left_alone(memory: Limited) -> None:
    """An error whose text speaks of memory, of another class, is not taken for one."""

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(RuntimeError, match=r"^CUDA out of memory\. Tried to allocate 2\.00 GiB$"):
        recompute(fails, elastic=Elastic(10**9, meter=memory))(torch.ones(2, requires_grad=True))


# --- data-dependent sizes ---


@pytest.mark.parametrize("share", [0.6, 0.35, 0.15])
def test_sizes_that_nobody_knows(memory: Limited, share: float) -> None:
    """Experts that get other numbers of tokens in each step: no failure, and plain's gradients."""
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6))
    tokens = torch.randn(600, 32)

    def step(number: int, wrap: Wrap) -> str:
        generator = torch.Generator().manual_seed(number)
        cuts = [0, *sorted(torch.randint(1, 600, (5,), generator=generator).tolist()), 600]
        parts = [wrap(e)(tokens[a:b]) for e, (a, b) in zip(experts, itertools.pairwise(cuts), strict=True)]
        return digest(torch.autograd.grad(torch.cat(parts).square().sum(), [*experts.parameters()]))

    def most(wrap: Wrap) -> int:
        memory.reset_lap()
        for number in range(STEPS):
            step(number, wrap)
        return memory.lap()

    low, high = most(recompute), most(lambda e: e)
    limit = low + round(share * (high - low))
    pool = Elastic(limit, slack=0.05, meter=memory)
    for number in range(STEPS):
        wanted = step(number, lambda e: e)
        memory.limit = limit
        assert step(number, elastic(pool)) == wanted
        memory.limit = None


# --- what is kept in saved calls, and stores ---


def test_saved_calls_are_the_second_grade(memory: Limited) -> None:
    """Where dropping all but saved calls is not enough, they are emptied as well; where it is, they stay."""
    linear = nn.Linear(64, 64)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return no_recompute(lambda y: (y.exp() + 1).log())(x.sin()).cos() @ linear.weight

    x = torch.randn(512, 64, requires_grad=True)

    def step(wrap: Wrap) -> torch.Tensor:
        y = x
        for _ in range(5):
            y = wrap(layer)(y)
        return torch.autograd.grad(y.sum(), x)[0]

    wanted = step(lambda fn: fn)
    memory.reset_lap()
    floor = step(recompute)
    low, live = memory.lap(), memory.live()
    assert torch.equal(floor, wanted)
    emptied: list[int] = []
    for limit in (low + 3 * x.nbytes, low - 4 * x.nbytes):
        pool = Elastic(limit, slack=0.0, meter=memory)
        for _ in range(3):
            memory.limit = limit if emptied or limit < low else None
            got = step(elastic(pool))
            memory.limit = None
            assert torch.equal(got, wanted)
        emptied.append(sum(row.emptied for row in pool.report().rows))
    assert emptied[0] == 0
    assert emptied[1] > 0
    assert live <= low


class Shelf:
    """A store that counts what it is given."""

    def __init__(self) -> None:
        self.puts = self.gets = 0

    def put(self, tensor: torch.Tensor) -> Any:
        self.puts += 1
        return tensor.numpy().copy()

    def get(self, handle: Any) -> torch.Tensor:
        self.gets += 1
        return torch.from_numpy(handle).clone()


@pytest.mark.parametrize("retain", [False, True])
def test_an_evicted_call_is_moved_where_a_copy_is_cheaper(memory: Limited, retain: bool) -> None:
    """With a store whose link is fast, what is evicted comes back from there and no region is replayed."""
    shelf = Shelf()
    pool = Elastic(between(memory, 0.3), slack=0.0, meter=memory, to=shelf)
    stepped(elastic(pool), max(LENGTHS))
    for part in pool._pool.parts:
        part.replay_micros = lambda size: 10**9
    before = totals(pool)["replayed"]
    assert stepped(elastic(pool), max(LENGTHS)) == plain(max(LENGTHS))
    assert totals(pool)["replayed"] == before
    assert shelf.puts >= shelf.gets > 0
    assert sum(row.moved for row in pool.report().rows) > 0


def test_an_evicted_call_is_replayed_where_that_is_cheaper(memory: Limited) -> None:
    """With a store that is slower than the replay, nothing is put there."""
    shelf = Shelf()
    pool = Elastic(between(memory, 0.3), slack=0.0, meter=memory, to=shelf)
    stepped(elastic(pool), max(LENGTHS))
    for part in pool._pool.parts:
        part.replay_micros = lambda size: 0
    assert stepped(elastic(pool), max(LENGTHS)) == plain(max(LENGTHS))
    assert not shelf.puts


# --- refusals ---


def test_a_limit_below_what_is_resident_is_refused(memory: Limited) -> None:
    """The first forward says what is alive and what may be."""
    held = torch.ones(1_000_000)
    pool = Elastic("2MiB", meter=memory)
    with pytest.raises(ArgumentError, match=r"3\.8.* MiB are alive before the first elastic region runs"):
        recompute(torch.sin, elastic=pool)(torch.ones(2, requires_grad=True))
    del held
    assert recompute(torch.sin, elastic=pool)(torch.ones(2, requires_grad=True)).requires_grad


def test_a_limit_below_the_heap_says_that_all_of_it_counts() -> None:
    """On a CPU the bytes alive are those of the process, which are far more than those of a small model."""
    with pytest.raises(ArgumentError, match=r"runs \(the whole heap: weights, gradients, optimizer, Python and librar"):
        recompute(torch.sin, elastic=Elastic("1KiB"))(torch.ones(2, requires_grad=True))


def test_a_cpu_says_once_that_more_is_alive_than_the_limit() -> None:
    """In the step in which it happens, also where all sizes are known; a new limit is watched again."""
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    pool = Elastic("1TiB")
    wrapped = [recompute(layer, elastic=pool) for layer in layers]

    def steps() -> None:
        for _ in range(3):
            x = torch.ones(16_000, 64)
            for layer in wrapped:
                x = layer(x)
            x.sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps()
    for _ in range(2):
        gc.collect()  # what other tests have left is no room
        pool.limit = round((HeapMeter().live() + 2**23) / 0.95)
        with pytest.warns(RuntimeWarning, match="above the limit of elastic regions. A CPU") as said:
            steps()
        assert len(said) == 1
    assert (pool.report().miss or 0) < -(2**21)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"limit": 0.5}, "is no number of bytes"),
        ({"limit": "lots"}, "is no number of bytes"),
        ({"slack": 1}, "from 0 to below 1"),
        ({"to": 3}, "to="),
    ],
)
def test_bad_arguments(options: dict[str, Any], text: str) -> None:
    """Each wrong argument is refused where it is written."""
    with pytest.raises(ArgumentError, match=text):
        Elastic(**options)


def test_a_pool_is_asked_for() -> None:
    """`elastic=True` says what to write."""
    with pytest.raises(ArgumentError, match=r"memory = torch_recompute\.Elastic"):
        recompute(torch.sin, elastic=True)


def test_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch, memory: Limited) -> None:
    """A captured step would do in every launch what the captured one did."""
    monkeypatch.setattr("torch_recompute.engine.elastic.capturing", lambda: True)
    with pytest.raises(ArgumentError, match="a CUDA graph is captured"):
        recompute(torch.sin, elastic=Elastic(meter=memory))(torch.ones(2, requires_grad=True))


# --- the table of needs ---


@pytest.mark.parametrize(
    ("seen", "size", "need"),
    [
        ({}, 100, None),
        ({1000: 50}, 1000, 50),
        ({1000: 50}, 500, 50),  # less than anything seen: no less is promised
        ({1000: 50}, 2000, 200),  # more than anything seen: as attention's scores grow
        ({1000: 50, 2000: 100}, 4000, 300),  # two sizes: all that it grew by may be the square
        ({1000: 50, 2000: 300}, 4000, 1200),  # never more than the square
        ({1000: 50, 2000: 50}, 4000, 50),  # a constant
        ({1000: 50, 2000: 100, 4000: 200}, 8000, 400),  # three sizes: what grew with its size goes on so
        ({1000: 110, 2000: 220, 4000: 500}, 8000, 1300),  # 40 + 0.06 n + 0.00001 n^2 at first, here 1220 + the bend
        ({1000: 50, 3000: 150}, 2000, 100),  # the chord
        ({1000: 50, 3000: 30}, 2000, 50),
    ],
)
def test_needs_are_interpolated(seen: dict[int, int], size: int, need: int | None) -> None:
    """Between two sizes the chord, which bounds whatever grows faster than its size; beyond, a bound."""
    needs = _Learned()
    for known, taken in seen.items():
        needs.learn(known, taken)
    assert needs.of(size) == need


def test_the_table_stays_small() -> None:
    """A thousand sizes of a run are some dozens of entries."""
    needs = _Learned()
    for size in range(100_000, 1_100_000, 997):
        needs.learn(size, size)
    assert len(needs._seen) < 64
    assert all(needs.of(size) >= size * 0.999 for size in range(100_000, 1_000_000, 1009))


def test_wrapping_anew_finds_the_same_part(memory: Limited) -> None:
    """`recompute(block, elastic=memory)(x)` in every call is one region, and a lambda's code is one, too."""
    pool = Elastic(10**9, meter=memory)
    for _ in range(3):
        stepped(elastic(pool), 64)
        recompute(lambda x: x.sin(), elastic=pool)(torch.ones(2, requires_grad=True)).sum().backward()
    assert len(pool.report().rows) == 7
    assert tr.Elastic is Elastic


# --- CUDA, acted ---


def test_the_cuda_allocator_is_the_second_fence(monkeypatch: pytest.MonkeyPatch, memory: Limited) -> None:
    """A limit in bytes is told to the allocator, which gives back what it holds above it; "fit" ends that.

    So does the end of the pool that told it last, and not that of another.
    """
    told: list[Any] = []
    monkeypatch.setattr(_Pool, "device", torch.device("cuda", 0))
    properties = types.SimpleNamespace(total_memory=8 * 10**9)
    for name, act in {
        "get_device_properties": lambda device: properties,
        "set_per_process_memory_fraction": lambda fraction, device: told.append(fraction),
        "memory_reserved": lambda device: 3 * 10**9,
        "empty_cache": lambda: told.append("emptied"),
        "memory_allocated": lambda device: 0,
        "mem_get_info": lambda device: (5 * 10**9, 8 * 10**9),
    }.items():
        monkeypatch.setattr(torch.cuda, name, act)
    pools = [Elastic(4 * 10**9, meter=memory) for _ in range(2)]
    for pool, limits in zip(pools, ((4 * 10**9, 2 * 10**9, "fit"), (4 * 10**9,)), strict=True):
        for limit in limits:
            pool.limit = limit
            recompute(torch.sin, elastic=pool)(torch.ones(2, requires_grad=True)).sum().backward()
    assert told == [0.5, 0.25, "emptied", 1.0, 0.5]
    del pool
    for left, last in ((1, 0.5), (0, 1.0)):
        del pools[0]
        gc.collect()
        assert (len(pools), told[-1]) == (left, last)


def test_backward_waits_only_for_what_a_replay_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """On streams, a kept tensor is read as plain autograd reads it; a rebuilt one after the replay's stream."""
    waited: list[Any] = []
    monkeypatch.setattr("torch_recompute.engine.slots.wait_for", lambda stream, tensor: waited.append(stream))
    monkeypatch.setattr("torch_recompute._torch.stream_for", lambda tensor: "stream")
    monkeypatch.setattr("torch_recompute._torch.on_streams", lambda streams: contextlib.nullcontext())
    for when, count in (("never", 0), ("forward", 1)):
        made = Script(when).calls(None, "")

        def make(*args: Any, made: Any = made) -> Any:
            call = made(*args)
            call.streams = ("stream",)
            return call

        x = torch.ones(2, requires_grad=True)
        call(Options("region", make=make), lambda x: x.exp().sin(), (x,), {}).sum().backward()
        assert bool(waited) == bool(count)
