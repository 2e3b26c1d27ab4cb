"""`fully_shard` with regions is `fully_shard` without: gradients, all-gathers, policies; and memory is really lower.

Regions are placed in several ways (by hand around each layer's call, by a plan before sharding, after it, with saved
calls) and compared without recomputations and with `torch.utils.checkpoint`, on two ranks, in the second step of a
training, when FSDP knows the order of layers and fetches ahead. FSDP's first generation is held to the same.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from support.models import Residual
from torch_recompute import ArgumentError, Choice, Plan, RecomputeConfig, apply, measure, recompute

nightly = pytest.mark.nightly
WORLD, WIDTH, DEPTH, TOKENS = 2, 16, 3, 64


def each(model, wrap, x):
    for layer in model.layers:
        x = wrap(layer)(x)
    return x


def within(model, wrap, x):
    """Regions that begin before a layer and end after it."""
    for layer in model.layers:
        x = wrap(lambda x, layer=layer: layer(x * 2).sin())(x)
    return x


def around(model, wrap, x):
    """One region around several layers."""
    first, *others = model.layers
    return wrap(lambda x: nn.Sequential(*others)(x).sin())(wrap(first)(x))


def nested(model, wrap, x):
    first, second, third = model.layers
    return wrap(lambda x: wrap(third)(wrap(lambda x: second(first(x)).sin())(x)))(x)


def twice(model, wrap, x):
    """A layer in two regions and outside of any."""
    first, second, third = model.layers
    return first(wrap(third)(wrap(first)(wrap(second)(wrap(first)(x)))))


PROGRAMS = (each, within, around, nested, twice)


class Model(nn.Module):
    def __init__(self, program=each, wrap=lambda fn: fn):
        super().__init__()
        self.stem, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Residual(WIDTH) for _ in range(DEPTH))
        self.program, self.wrap = program, wrap

    def forward(self, x):
        return self.program(self, self.wrap, self.stem(x))


def checkpointed(fn):
    return functools.partial(torch_checkpoint, fn, use_reentrant=False)


def plan(layers, keep=()):
    return Plan(tuple(Choice((path,), keep) for path in layers))


PATHS = [f"layers.{i}" for i in range(DEPTH)]
WRAPS = {"plain": lambda fn: fn, "torch": checkpointed, "by hand": recompute}
WAYS = ("plain", "torch", "by hand", "plan before", "plan after", "plan with saved calls")
POLICIES = {
    "default": {},
    "kept after forward": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "root alone": {},
    "layers within layers": {},
}


def prepared(way, program):
    """The model as it is before it is sharded."""
    torch.manual_seed(0)
    model = Model(program, WRAPS.get(way, WRAPS["plain"]))
    if way in ("plan before", "plan with saved calls"):
        apply(model, plan(PATHS, ("@product",) if way == "plan with saved calls" else ()))
    return model


def sharded(way, policy, program=each):
    model = prepared(way, program)
    for layer in model.layers if policy != "root alone" else ():
        if policy == "layers within layers":
            fully_shard(layer.up)
        fully_shard(layer, **POLICIES[policy])
    fully_shard(model, **POLICIES[policy])
    if way == "plan after":
        apply(model, plan(PATHS))
    return model


class Gathers(TorchDispatchMode):
    """Counts all-gathers."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() in ("c10d::_allgather_base_", "c10d::allgather_")
        return func(*args, **(kwargs or {}))


def data(rank, step):
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model, step):
    return model(data(dist.get_rank(), step)).float().square().mean()


def trained(model, times=5):
    """The second of two steps: all-gathers in forward and in backward, the peak in bytes, and whole gradients.

    The peak is the lowest of five equal steps: gloo's worker thread may hold a gathered buffer a moment after `wait()`
    has returned (one step in ten, in plain FSDP and under torch's checkpoint as well). Who reads no peak asks for one.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model, 0).backward()
    optimizer.step()
    peaks = []
    for _ in range(times):
        optimizer.zero_grad()
        with measure(model) as memory, Gathers() as gathers:
            result = loss(model, 1)
            forward = gathers.count
            result.backward()
        peaks.append(memory.peak_bytes)
        del result
    grads = [whole(p.grad) for p in model.parameters()]
    return (forward, gathers.count - forward), min(peaks), grads


def whole(tensor):
    if tensor is None:  # the first generation gives a rank nothing of a small parameter
        return torch.zeros(0)
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def in_all_ways(policy):
    return {way: trained(sharded(way, policy)) for way in WAYS}


@functools.cache
def single():
    """The gradients of the second step of one process that has both ranks' data."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(WORLD):
            (model(data(rank, step)).square().mean() / WORLD).backward()
        if step == 0:
            optimizer.step()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("policy", [pytest.param(one, marks=[nightly] * (one != "default")) for one in POLICIES])
def test_every_way_under_every_policy(ranks, policy):
    """Gradients are plain FSDP's to the last bit and one process's, no gather is added, and the peak is lower."""
    for results in ranks.run(in_all_ways, policy):
        gathers, peak, wanted = results["plain"]
        assert gathers[0] > 0
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(wanted, single(), strict=True))
        for way in WAYS[2:]:
            ours, our_peak, grads = results[way]
            assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True)), way
            assert ours == gathers == results["torch"][0], way
            assert our_peak < 0.9 * peak, way
            if way != "plan with saved calls":
                assert our_peak <= results["torch"][1], way


def programs():
    names = ("plain", "torch", "by hand")
    return [
        [trained(sharded(way, policy, program), times=1) for way in names]
        for program in PROGRAMS
        for policy in ("default", "kept after forward")
    ]


@nightly
def test_regions_that_are_not_sharding_units(ranks):
    """Regions that reach beyond a sharded layer, hold several, nest or share one give the gradients of plain FSDP."""
    for cells in ranks.run(programs):
        for (gathers, _, wanted), (theirs, _, _), (ours, _, grads) in cells:
            assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
            assert gathers <= ours <= theirs


def accumulated():
    results = []
    for way in ("plain", "by hand", "plan before"):
        model = sharded(way, "default")
        for step, last in enumerate((False, True)):
            model.set_requires_gradient_sync(last)
            loss(model, step).backward()
        results.append([whole(p.grad) for p in model.parameters()])
    return results


@nightly
def test_accumulation(ranks):
    """Accumulating without reducing, and then reducing, gives the gradients of plain FSDP."""
    for wanted, *others in ranks.run(accumulated):
        assert all(torch.equal(a, b) for grads in others for a, b in zip(grads, wanted, strict=True))


def compiled():
    results = []
    for with_regions in (False, True):
        torch.manual_seed(0)
        model, kept = Model(), []
        if with_regions:
            apply(model, plan(PATHS))
            for layer in model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            # Nothing is compiled while `measure` looks on, so what autograd saves of the tokens is counted.
            with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.shape) or x, lambda x: x):
                result = loss(model, step)
            result.backward()
            if step == 0:
                kept.clear()
                optimizer.step()
                optimizer.zero_grad()
        numbers = sum(shape.numel() for shape in kept if TOKENS in shape)
        results.append((numbers, [whole(p.grad) for p in model.parameters()]))
    return results


@nightly
def test_recompute_then_compile_then_shard(ranks):
    """A plan, then compiled layers, then sharding: one process's gradients, and less saved than in eager."""
    for (plain, _), (ours, grads) in ranks.run(compiled):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(grads, single(), strict=True))
        assert ours < plain / 3


def pairs(together):
    config = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    results = []
    for with_regions in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Residual(WIDTH) for _ in range(4)))
        for i in (0, 2):
            fully_shard([model[i], model[i + 1]]) if together else [fully_shard(model[j]) for j in (i, i + 1)]
        fully_shard(model)
        if with_regions:
            apply(model, config.plan(model))
        try:
            results.append(trained(model))
        except ArgumentError as error:
            results.append(str(error))
    return results


def test_layers_recomputed_together_are_sharded_together(ranks):
    """Layers of one group may be one sharding unit; sharded one by one they are refused, with what to write."""
    for (gathers, peak, wanted), (ours, our_peak, grads) in ranks.run(pairs, True):
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
        assert ours == gathers
        assert our_peak < peak
    for _, refused in ranks.run(pairs, False):
        assert refused.startswith("the plan recomputes 2 layers together, but each of them was sharded on its own")


# --- mixed precision -------------------------------------------------------------------------------------------------

MIXED = {
    "bfloat16 inside, float32 out": MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32),
    "bfloat16 throughout": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "inputs as they come": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
}


class Seen(nn.Module):
    """Notes the dtypes that a layer meets, in forward and in replays."""

    def __init__(self, layer, dtypes):
        super().__init__()
        self.layer, self.dtypes = layer, dtypes

    def forward(self, x):
        inner = x.to(self.layer.up.weight.dtype)
        y = self.layer(inner)
        self.dtypes.append((x.dtype, self.layer.up.weight.dtype, y.dtype))
        return y


def mixed(name):
    """By way: the dtypes of each layer's runs, and the gradients. A region is around a sharded layer or within it."""
    found = {}
    for way in ("plain", "torch", "around", "within", "both", "plan"):
        torch.manual_seed(0)
        model, dtypes = Model(), []
        model.layers = nn.ModuleList(Seen(layer, dtypes) for layer in model.layers)
        if way in ("around", "both", "torch"):
            model.wrap = checkpointed if way == "torch" else recompute
        if way in ("within", "both"):
            for layer in model.layers:
                layer.layer.forward = recompute(layer.layer.forward)
        if way == "plan":
            apply(model, plan(PATHS))
        for layer in model.layers:
            fully_shard(layer, mp_policy=MIXED[name])
        fully_shard(model, mp_policy=MIXED[name] if MIXED[name].cast_forward_inputs else MixedPrecisionPolicy())
        result = loss(model, 0)
        forward = list(dtypes)
        result.backward()
        found[way] = forward, dtypes[len(forward) :], [whole(p.grad) for p in model.parameters()]
    return found


@nightly
@pytest.mark.parametrize("name", MIXED)
def test_the_replay_has_the_dtypes_of_the_forward(ranks, name):
    """Under FSDP2's mixed precision a replay's tensors have the forward's dtypes, and gradients are the plain ones."""
    for found in ranks.run(mixed, name):
        forward, none, wanted = found["plain"]
        assert (len(forward), none) == (DEPTH, [])
        assert {weight for _, weight, _ in forward} == {torch.bfloat16}
        for way in ("torch", "around", "within", "both", "plan"):
            same, replayed, grads = found[way]
            assert same == forward, way
            assert set(replayed) <= set(forward), way
            assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True)), way


# --- the first generation --------------------------------------------------------------------------------------------


def wrapped(way, strategy, original):
    fsdp = FullyShardedDataParallel(
        prepared(way, each),
        auto_wrap_policy=ModuleWrapPolicy({Residual}),
        sharding_strategy=getattr(ShardingStrategy, strategy),
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )
    if way == "plan after":
        apply(fsdp, plan([path for path, module in fsdp.named_modules() if isinstance(module, Residual)]))
    return fsdp


def first_generation(strategy, original):
    return {way: trained(wrapped(way, strategy, original)) for way in WAYS}


@nightly
@pytest.mark.parametrize(
    ("strategy", "original"), [("FULL_SHARD", True), ("FULL_SHARD", False), ("SHARD_GRAD_OP", True)]
)
def test_first_generation(ranks, strategy, original):
    """FullyShardedDataParallel with regions: plain gradients to the last bit, no gather more, and a lower peak."""
    for results in ranks.run(first_generation, strategy, original):
        gathers, peak, wanted = results["plain"]
        assert gathers == (DEPTH + 1, DEPTH if strategy == "FULL_SHARD" else 0)
        for way in WAYS[2:]:
            ours, our_peak, grads = results[way]
            assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True)), way
            assert ours == gathers, way
            assert our_peak < 0.9 * peak, way


def pairs_wrapped(strategy, when):
    config = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    results = []
    for with_regions in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Residual(WIDTH) for _ in range(4)))
        if with_regions and when == "before":
            apply(model, config.plan(model))
        fsdp = FullyShardedDataParallel(
            model,
            auto_wrap_policy=None if strategy == "one unit" else ModuleWrapPolicy({Residual}),
            sharding_strategy=getattr(ShardingStrategy, strategy, ShardingStrategy.FULL_SHARD),
            device_id=torch.device("cpu"),
        )
        if with_regions and when == "after":
            paths = [path for path, module in fsdp.named_modules() if isinstance(module, Residual)]
            apply(fsdp, Plan((Choice(tuple(paths[:2])), Choice(tuple(paths[2:])))))
        try:
            results.append(trained(fsdp))
        except ArgumentError as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize(
    ("strategy", "when"),
    [
        pytest.param(strategy, when, marks=[nightly] * ((strategy, when) != ("FULL_SHARD", "after")))
        for strategy in ("one unit", "SHARD_GRAD_OP", "FULL_SHARD")
        for when in ("before", "after")
    ],
)
def test_groups_in_the_first_generation(ranks, strategy, when):
    """Layers recomputed together work where their parameters stay or are gathered together; else they are refused."""
    for (gathers, peak, wanted), ours in ranks.run(pairs_wrapped, strategy, when):
        if strategy == "FULL_SHARD":
            assert "FullyShardedDataParallel was put around each of them alone" in ours
        else:
            assert all(torch.equal(a, b) for a, b in zip(ours[2], wanted, strict=True))
            assert ours[0] == gathers
            assert ours[1] < 0.9 * peak
