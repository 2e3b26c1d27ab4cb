"""Elastic regions on two ranks: each evicts for itself, or both agree; gradients are plain PyTorch's either way.

A meter that is short of memory now and then, on each rank at moments of its own, makes the ranks keep, evict and empty
different calls.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.test_fsdp import PROGRAMS, Model, whole
from distributed.test_tensor_parallel import TOKENS, WIDTH, Layer, Reduce, split
from support.limited import limited, missing
from torch_recompute import ArgumentError, Elastic, doing_recompute, no_recompute, recompute, replay
from torch_recompute.distributed import keep_collectives

nightly = pytest.mark.nightly
LIMIT = 1_000_000
STEPS = 6


class Pressure:
    """A meter that says at random that the memory is short; in the first step it is not."""

    def __init__(self, seed: int, share: float = 0.3) -> None:
        self._draw, self._share = random.Random(seed), share
        self.on = False

    def live(self) -> int:
        return 2 * LIMIT if self.on and self._draw.random() < self._share else 0

    def lap(self) -> int:
        return 0

    def reset_lap(self) -> None:
        pass


class Sent(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented
        namespace, _, name = func.name().partition("::")
        self.counts[name] += namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap"))
        return func(*args, **(kwargs or {}))

    def all(self) -> dict[str, int]:
        return {name: count for name, count in self.counts.items() if count}


def pool(**options: Any) -> Elastic:
    return Elastic(LIMIT, meter=Pressure(dist.get_rank()), **options)


def elastically(memory: Elastic | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes regions; without memory there are none."""
    return (lambda fn: fn) if memory is None else lambda fn: recompute(fn, elastic=memory)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def replays(memory: Elastic) -> tuple[int, ...]:
    return tuple(row.replayed for row in memory.report().rows)


def trained(model: nn.Module, memory: Elastic | None) -> tuple[list[torch.Tensor], dict[str, int]]:
    """The gradients of some steps, on sequences whose lengths are each rank's own, and what the last steps sent."""
    draw = random.Random(10 + dist.get_rank())
    grads: list[torch.Tensor] = []
    for step in range(STEPS):
        x = noise(10 * step + dist.get_rank(), draw.randrange(8, 64), 16)
        model.zero_grad()
        with Sent() as sent:
            model(x).square().mean().backward()
        grads += [whole(p.grad) for p in model.parameters()]
        if memory is not None:
            memory._pool.meter.on = True
    return grads, sent.all()


def evicting_alone(sharded: bool) -> Any:
    found = []
    for memory in (None, pool()):
        torch.manual_seed(0)
        model: nn.Module = Model(wrap=elastically(memory))
        if sharded:
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        found.append(trained(model, memory))
    (plain, sent), (ours, our_sent) = found
    return all(map(torch.equal, plain, ours)), sent, our_sent, replays(memory)


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=nightly), True])
def test_ranks_may_evict_each_for_itself(ranks, sharded: bool) -> None:
    """DDP and FSDP2: gradients are plain PyTorch's, and no message more or less, though the ranks replay others."""
    results = ranks.run(evicting_alone, sharded)
    for same, sent, our_sent, _ in results:
        assert same
        assert our_sent == sent
        assert ("_allgather_base_" in sent) == sharded
    assert results[0][-1] != results[1][-1]


def reaching(name: str, agreed: bool) -> Any:
    """FSDP2 under a program whose regions are not its modules: what is refused, or whether gradients are the same."""
    found = []
    program = next(program for program in PROGRAMS if program.__name__ == name)
    for memory in (None, pool(group=dist.group.WORLD if agreed else None)):
        torch.manual_seed(0)
        model = Model(program, elastically(memory))
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        try:
            found.append(trained(model, memory)[0])
        except ArgumentError as error:
            return str(error)
    return all(map(torch.equal, *found)), replays(memory)


@pytest.mark.parametrize(
    "name", [pytest.param("around", marks=nightly), "nested", pytest.param("twice", marks=nightly)]
)
def test_replays_that_gather_weights_are_refused_or_agreed_on(ranks, name: str) -> None:
    """FSDP2: a region whose replay gathers weights is refused in its first replay; agreed on, gradients are plain's."""
    gathers = name != "twice"
    for refused in ranks.run(reaching, name, False):
        if gathers:
            assert "a replay of it gathers the weights of a sharded module" in refused
        else:
            assert refused[0]
    (same, first), (also, second) = ranks.run(reaching, name, True)
    assert same
    assert also
    assert first == second
    assert sum(first) > len(first)


# --- tensor parallelism -----------------------------------------------------------------------------------------------

IN_FLIGHT, MICROBATCHES = 2, 4


def microbatches(layers: list[Callable[..., Any]], overlapping: bool) -> None:
    """A step of some microbatches, one after the other or as 1F1B has them on its first stage."""
    waiting: list[torch.Tensor] = []
    for number in range(MICROBATCHES):
        x = noise(number, 3, TOKENS, WIDTH)
        for layer in layers:
            x = layer(x)
        waiting.append(x.square().mean())
        if len(waiting) > IN_FLIGHT * overlapping:
            waiting.pop(0).backward()
    for loss in waiting:
        loss.backward()


def tensor_parallel(around: Callable[..., Any], overlapping: bool, memory: Elastic | None) -> Any:
    """Gradients of some steps, and what the last sent."""
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
    torch.manual_seed(1)
    layers = nn.ModuleList(Layer(0.0) for _ in range(3))
    split(layers, sequence=False)
    called = [layer if memory is None else recompute(around(layer), elastic=memory) for layer in layers]
    grads: list[torch.Tensor] = []
    for _ in range(STEPS):
        layers.zero_grad()
        with Sent() as sent:
            microbatches(called, overlapping)
        grads += [whole(p.grad) for p in layers.parameters()]
        if memory is not None:
            memory._pool.meter.on = True
    return grads, sent.all()


def product_kept(layer: Layer) -> Callable[..., Any]:
    """The layer with its collectives and one product as saved calls."""
    layer.up.forward = no_recompute(layer.up.forward, name="up")
    return keep_collectives(layer)


def keeping(overlapping: bool) -> Any:
    memory = pool()
    plain, sent = tensor_parallel(product_kept, overlapping, None)
    ours, our_sent = tensor_parallel(product_kept, overlapping, memory)
    emptied = sum(row.emptied for row in memory.report().rows)
    return all(map(torch.equal, plain, ours)), sent, our_sent, replays(memory), emptied


@nightly
@pytest.mark.parametrize("overlapping", [False, True])
def test_kept_collectives(ranks, overlapping: bool) -> None:
    """TP: with its collectives kept, each rank evicts for itself, also what other saved calls keep; nothing is sent."""
    results = ranks.run(keeping, overlapping)
    for same, sent, our_sent, _, emptied in results:
        assert same
        assert our_sent == sent
        assert emptied > 0
    assert results[0][3] != results[1][3]


def agreeing(overlapping: bool) -> Any:
    memory = pool(group=dist.new_group(backend="gloo"))
    plain, sent = tensor_parallel(lambda layer: layer, overlapping, None)
    ours, our_sent = tensor_parallel(lambda layer: layer, overlapping, memory)
    rows = memory.report().rows
    return all(map(torch.equal, plain, ours)), sent, our_sent, replays(memory), [row.evicted for row in rows]


@nightly
@pytest.mark.parametrize("overlapping", [False, True])
def test_ranks_agree_on_what_they_replay(ranks, overlapping: bool) -> None:
    """TP: ranks under different pressure replay the same regions, so that collectives in them meet."""
    results = ranks.run(agreeing, overlapping)
    for same, sent, our_sent, *_ in results:
        assert same
        assert our_sent["allreduce_"] == MICROBATCHES  # one agreement before the backward of each
        assert our_sent["all_reduce"] > sent["all_reduce"]
    (*_, first, evicted), (*_, second, others) = results
    assert first == second
    assert evicted != others  # the pressure was not the same
    assert sum(first) < 3 * STEPS * MICROBATCHES


def summed(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x.sin(), "sum", dist.group.WORLD)


class Pair(nn.Module):
    """Two products, the second one a saved call, and a reduction over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Backward reads the result of `exp`, reduces, and only then reads what was saved before: replays must not wait.
        return summed(no_recompute(self.down, name="down")(self.up(x).tanh()).cos()).exp() / 4 + x


Region = Callable[[Callable[..., Any]], Callable[..., Any]]


def nested(a: Pair, b: Pair, c: Pair, region: Region) -> Callable[..., Any]:
    inner = region(a), region(b)
    outer = region(lambda x: summed(inner[1](inner[0](x).sin())).tanh())
    return lambda x: region(c)(outer(x))


def mixed(a: Pair, b: Pair, c: Pair, region: Region) -> Callable[..., Any]:
    first, alone, saved = region(a), region(lambda x: b.up(x).tanh().exp()), region(no_recompute(c, name="c"))
    return lambda x: alone(saved(alone(first(x))))


def saved_region(a: Pair, b: Pair, c: Pair, region: Region) -> Callable[..., Any]:
    inner = region(a)
    outer = region(lambda x: no_recompute(inner, name="inner")(x.sin()).cos() + summed(x.exp()))
    return lambda x: outer(x) + inner(x)


SHAPES: dict[str, Callable[..., Callable[..., Any]]] = {
    "in turn": lambda a, b, c, region: lambda x: region(c)(region(b)(region(a)(x))),
    "branches": lambda a, b, c, region: lambda x: region(a)(x) * region(b)(x.cos()) + region(c)(x),
    "nested": nested,
    "mixed": mixed,
    "a region in a saved call": saved_region,
}


def one_by_one(loss: Callable[[int], torch.Tensor]) -> None:
    for number in range(3):
        loss(number).backward()


def retained(loss: Callable[[int], torch.Tensor]) -> None:
    result = loss(0)
    result.backward(retain_graph=True)
    result.backward()


def interleaved(loss: Callable[[int], torch.Tensor]) -> None:
    first, second = loss(0), loss(1)
    first.backward()
    third = loss(2)
    second.backward()
    third.backward()


def last_first(loss: Callable[[int], torch.Tensor]) -> None:
    for result in [loss(number) for number in range(3)][::-1]:
        result.backward()


def dropped(loss: Callable[[int], torch.Tensor]) -> None:
    first, _, third = loss(0), loss(1).item(), loss(2)
    first.backward()
    third.backward()


def together(loss: Callable[[int], torch.Tensor]) -> None:
    (loss(0) + loss(1)).backward()


def in_order(order: Callable[..., None]) -> Any:
    """By shape: whether gradients are plain PyTorch's, and how often each region was replayed and evicted."""
    answers = {}
    for shape, make in SHAPES.items():
        found = []
        for memory in (None, pool(group=dist.group.WORLD)):
            torch.manual_seed(0)
            pairs = nn.ModuleList(Pair() for _ in range(3))
            run = make(*pairs, elastically(memory))
            grads: list[torch.Tensor | None] = []
            for step in range(STEPS):
                pairs.zero_grad()
                seed = 10 * step
                order(lambda number, run=run, seed=seed: run(noise(seed + number, 4, 8)).square().mean())
                grads += [None if p.grad is None else p.grad.clone() for p in pairs.parameters()]
                if memory is not None:
                    memory._pool.meter.on = True
            found.append(grads)
        same = all(a is b or torch.equal(a, b) for a, b in zip(*found, strict=True))
        rows = memory.report().rows
        answers[shape] = same, replays(memory), [(row.evicted, row.emptied) for row in rows]
    return answers


@pytest.mark.parametrize(
    "order",
    [
        retained,
        *(pytest.param(order, marks=nightly) for order in (one_by_one, interleaved, last_first, dropped, together)),
    ],
)
def test_ranks_agree_in_every_order_of_backwards(ranks, order: Callable[..., None]) -> None:
    """Nested, branching, retained: each rank evicts others, both replay the same, and gradients are plain PyTorch's."""
    first, second = ranks.run(in_order, order)
    for shape in SHAPES:
        (same, replayed, _), (also, others, _) = first[shape], second[shape]
        assert same, shape
        assert also, shape
        assert replayed == others or shape == "mixed", shape  # one of its regions has no collective
    assert any(first[shape][2] != second[shape][2] for shape in SHAPES)


# --- what is refused --------------------------------------------------------------------------------------------------


def some(x: torch.Tensor) -> torch.Tensor:
    """What a choice decides together with the other ranks."""
    total = x.detach().sum()
    dist.all_reduce(total)
    return total


def alone() -> list[dist.ProcessGroup]:
    return [dist.new_group([rank]) for rank in range(2)]


CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "functional": (lambda x: summed(x).exp(), "_c10d_functional.all_reduce"),
    "in place": (lambda x: Reduce.apply(x.sin()).exp(), "c10d.allreduce_"),
    "in a region": (lambda x: recompute(summed)(x).exp(), "_c10d_functional.all_reduce"),
    "not in the first call": (lambda x: summed(x) if len(x) > 2 else x.exp(), "_c10d_functional.all_reduce"),
    "compiled": (lambda x: compiled(x).exp(), "_c10d_functional.all_reduce"),
    "saved": (lambda x: no_recompute(summed)(x).exp(), ""),
    "in a region in a saved call": (lambda x: no_recompute(recompute(lambda x: summed(x).exp()))(x).exp(), ""),
    "saved in a region": (lambda x: recompute(no_recompute(summed))(x).exp(), ""),
    "kept": (keep_collectives(lambda x: summed(x).exp()), ""),
    "a choice": (lambda x: (x.sin() * replay(some)(x)).exp(), ""),
    "alone": (lambda x: functional.all_reduce(x.sin(), "sum", alone()[dist.get_rank()]).exp(), ""),
}
compiled = torch.compile(summed, backend="aot_eager")


def detecting() -> Any:
    """By case: what was refused, or nothing where three steps went well."""
    warnings.simplefilter("ignore")
    found = {}
    for name, (body, _) in CASES.items():
        memory = pool()
        region = recompute(body, elastic=memory)
        try:
            for _ in range(3):
                (region(torch.randn(2, 3, requires_grad=True)) + region(torch.randn(4, 3)).sum()).sum().backward()
                memory._pool.meter.on = True
            found[name] = ""
        except ArgumentError as error:
            found[name] = str(error)
    return found


def test_which_collectives_are_refused(ranks) -> None:
    """A collective that a replay would repeat is refused by name; not one in a saved call, or among nobody else."""
    for found in ranks.run(detecting):
        for name, (_, operation) in CASES.items():
            assert bool(found[name]) == bool(operation), (name, found[name])
            assert f"would make a collective again ({operation}, among the ranks 0, 1)" in found[name] or not operation


def short_of_memory(where: str) -> str:
    """An allocation fails after a collective, in a forward or a replay."""
    memory = pool(group=dist.group.WORLD)
    with limited() as heap:

        def body(x: torch.Tensor) -> torch.Tensor:
            y = (no_recompute(summed) if where == "forward" else summed)(x)
            if doing_recompute() == (where == "replay"):
                heap.fail_at(1)
            return y.exp().cos()

        try:
            recompute(body, elastic=memory)(torch.randn(64, 64, requires_grad=True)).sum().backward()
        except torch.OutOfMemoryError as error:
            return str(error)
        finally:
            heap.fail_at(None)
    return ""


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("where", [pytest.param("forward", marks=nightly), "replay"])
def test_a_collective_is_not_made_again_after_a_failure(ranks, where: str) -> None:
    """Where memory runs out after a collective that a second run would make again, the error goes on and says so."""
    for said in ranks.run(short_of_memory, where):
        assert "is not run again with less kept: it makes a collective (_c10d_functional.all_reduce" in said
