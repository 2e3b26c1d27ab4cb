"""DDP with regions is DDP without: gradients, what it can and cannot do, and when its messages leave.

Every way of using layers, in every mode of DDP and every schedule of its reductions, runs three times: on one process
with all the data in float64, under plain DDP, and under DDP with regions. Where plain DDP refuses, so must DDP with
regions, with the same words.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from support.models import Residual
from torch_recompute import (
    Choice,
    Plan,
    Ranks,
    RecomputeError,
    apply,
    auto,
    make_plan,
    measure,
    no_recompute,
    recompute,
)
from torch_recompute.distributed import find_reentrant, fused_allreduce_gradients
from torch_recompute.errors import size
from torch_recompute.simulation.step import simulate_step
from torch_recompute.simulation.training_step import TrainingStep

nightly = pytest.mark.nightly
WORLD = 2
WIDTH = 8


def each_once(model, wrap, x):
    x = model.stem(x)
    for layer in model.layers:
        x = wrap(layer)(x)
    return x


def input_without_grad(model, wrap, x):
    return model.stem(wrap(model.layers[2])(wrap(model.layers[1])(wrap(model.layers[0])(x))))


def nested(model, wrap, x):
    def inner(x):
        return wrap(model.layers[1])(wrap(model.layers[0])(x))

    return wrap(lambda x: wrap(model.layers[2])(wrap(inner)(model.stem(x))).sin())(x)


def in_two_regions(model, wrap, x):
    first, second, third = model.layers
    return wrap(third)(wrap(first)(wrap(second)(wrap(first)(model.stem(x)))))


def region_and_plain_use(model, wrap, x):
    first, second, third = model.layers
    return third(wrap(second)(first(wrap(first)(model.stem(x)))))


def saved_calls(model, wrap, x):
    for layer in model.layers:
        x = wrap(lambda x, layer=layer: no_recompute(layer.down)(layer.up(layer.norm(x)).relu()) + x)(x)
    return model.stem(x)


def unused(model, wrap, x):
    return wrap(lambda x: (model.layers[0], model.layers[2])[0](x))(model.stem(x)) + model.layers[1](x)


def unused_by_turns(model, wrap, x):
    return wrap(lambda x, turn: model.layers[turn](x))(model.stem(x), model.step % 2)


PROGRAMS = (
    each_once,
    input_without_grad,
    nested,
    in_two_regions,
    region_and_plain_use,
    saved_calls,
    unused,
    unused_by_turns,
)
MODES = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}


class Model(nn.Module):
    """Three layers and a stem, called as a program says."""

    def __init__(self, program, wrap):
        super().__init__()
        self.stem, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Residual(WIDTH, 2) for _ in range(3))
        self.program, self.wrap, self.step = program, wrap, 0

    def forward(self, x):
        return self.program(self, self.wrap, x)


def plain(fn):
    return fn


def every_step(ddp, batches):
    """Reduces in each backward."""
    loss(ddp, batches[0]).backward()


def accumulation(ddp, batches):
    """Two batches under no_sync, and a third that reduces."""
    with ddp.no_sync():
        for batch in batches[:2]:
            loss(ddp, batch).backward()
    loss(ddp, batches[2]).backward()


def two_uses(ddp, batches):
    """Two forwards before one backward, under no_sync, and one that reduces."""
    with ddp.no_sync():
        (loss(ddp, batches[0]) + loss(ddp, batches[1])).backward()
    loss(ddp, batches[2]).backward()


def by_hand(ddp, batches):
    """A whole step under no_sync, reduced by hand."""
    with ddp.no_sync():
        loss(ddp, batches[0]).backward()
    fused_allreduce_gradients(ddp.parameters(), bucket_bytes=1000)


# A training run: one step of each, and how many batches of each rank a step takes. The first step reduces, because a
# static graph is learnt in it. The last does not: DDP with find_unused_parameters remembers what such a step used, and
# fails in the next one that reduces ("Encountered gradient which is undefined") if that does not use it.
BATCHES = {every_step: 1, accumulation: 3, two_uses: 3, by_hand: 1}
ALL = (every_step, accumulation, two_uses, every_step, by_hand)


def loss(model, x):
    return model(x).square().mean()


def data(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(3)]


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def reduced(program, wrap, mode, schedules):
    """The gradients of each step on this rank, and the error that ended them or None."""
    torch.manual_seed(0)
    ddp, steps = DDP(Model(program, wrap), bucket_cap_mb=0.004, **MODES[mode]), []
    try:
        for step, schedule in enumerate(schedules):
            ddp.module.step = step
            ddp.zero_grad(set_to_none=True)
            schedule(ddp, data(dist.get_rank(), step))
            steps.append(gradients(ddp))
    except RuntimeError as error:
        return steps, str(error).split("\nException raised from")[0]  # what follows are addresses
    return steps, None


@functools.cache
def single(program, schedules):
    """The same gradients from one process that has everybody's data, in float64."""
    torch.manual_seed(0)
    model, steps = Model(program, plain).double(), []
    for step, schedule in enumerate(schedules):
        model.step = step
        model.zero_grad(set_to_none=True)
        for rank in range(WORLD):
            for batch in data(rank, step)[: BATCHES[schedule]]:
                (loss(model, batch.double()) / WORLD).backward()
        steps.append(gradients(model))
    return steps


def both_ways(program, mode, schedules):
    """One cell: what plain DDP and DDP with regions give on this rank."""
    named = globals()
    return [reduced(named[program], wrap, mode, [named[one] for one in schedules]) for wrap in (plain, recompute)]


def compare(ranks, program, mode, schedules):
    """Asserts that both give the same gradients, those of one process, and the same error; returns each rank's."""
    wanted, said = single(program, schedules), set()
    for (without, error), (ours, our_error) in ranks.run(
        both_ways, program.__name__, mode, [schedule.__name__ for schedule in schedules]
    ):
        assert our_error == error
        assert [len(ours), len(without)] == [len(schedules) if error is None else 1] * 2
        for step, pair in enumerate(zip(ours, without, strict=True)):
            for a, b, c in zip(*pair, wanted[step], strict=True):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a, b)
                absent = c is None and (a is None or not a.any())  # DDP may give zeros to what was unused
                # A reduction that cannot finish says so in the next step only.
                assert error is not None or absent or torch.allclose(a.double(), c, atol=1e-6)
        said.add(error)
    return said


# Plain DDP cannot do these: by default every parameter must get a gradient in every backward that reduces, and a
# static graph is one that does not change.
UNUSED = "Expected to have finished reduction in the prior iteration before starting a new one"
CHANGED = "Your training graph has changed in this iteration"
REFUSED = {(program, mode): UNUSED for program in (unused, unused_by_turns) for mode in MODES}
REFUSED |= {(unused_by_turns, "static_graph"): CHANGED}
for cell in ((unused, "find_unused_parameters"), (unused_by_turns, "find_unused_parameters"), (unused, "static_graph")):
    del REFUSED[cell]


FAST = ((each_once, "default"), (nested, "static_graph"), (unused, "find_unused_parameters"), (unused, "default"))


@pytest.mark.parametrize(
    ("program", "mode"),
    [
        pytest.param(program, mode, id=f"{program.__name__}-{mode}", marks=[] if (program, mode) in FAST else [nightly])
        for program in PROGRAMS
        for mode in MODES
    ],
)
def test_the_matrix(ranks, program, mode):
    """DDP with regions gives plain DDP's gradients to the last bit, those of one process, and plain DDP's errors."""
    expected = REFUSED.get((program, mode))
    for said in compare(ranks, program, mode, ALL):
        assert said is None if expected is None else said.startswith(expected)


@nightly
@pytest.mark.parametrize("program", [unused, unused_by_turns], ids=lambda program: program.__name__)
def test_unused_parameters_reduced_by_hand(ranks, program):
    """Where DDP does not allow unused parameters, steps under no_sync that are reduced by hand do."""
    assert compare(ranks, program, "default", (by_hand, by_hand)) == {None}


def first_step_under_no_sync():
    said = []
    for wrap in (plain, recompute):
        torch.manual_seed(0)
        ddp = DDP(Model(each_once, wrap), static_graph=True)
        try:
            accumulation(ddp, data(dist.get_rank(), 0))
        except RuntimeError as error:
            said.append(str(error).split("\nException raised from")[0])
    return said


@nightly
def test_a_static_graph_that_begins_under_no_sync(ranks):
    """PyTorch's DDP fails an assertion where a static graph's first backward is under no_sync; so it does with us."""
    for without, ours in ranks.run(first_step_under_no_sync):
        assert "expect_autograd_hooks_" in without
        assert ours == without


def events(wrap, **mode):
    """What happens in a backward, in order: a layer run again, a gradient delivered, a bucket sent off."""
    torch.manual_seed(0)
    model = Model(each_once, wrap)
    ddp, seen = DDP(model, bucket_cap_mb=0.001, **mode), []
    for i, layer in enumerate(model.layers):
        layer.up.register_forward_pre_hook(lambda *_, i=i: seen.append(f"run {i}"))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(f"gradient {name}"))

    def send(state, bucket):
        seen.append(f"bucket {bucket.index()}")
        work = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, send)
    for step in range(3):  # buckets are put in the order of backward in the second, or for static graphs the third
        result = loss(ddp, data(dist.get_rank(), step)[0])
        seen.clear()
        result.backward()
    return seen


def all_events():
    return [(events(plain, **mode), events(recompute, **mode)) for mode in ({}, {"static_graph": True})]


def test_communication_overlaps_as_without_regions(ranks):
    """Buckets leave as early as under plain DDP: before the last gradient, and before earlier layers are run again."""
    for modes in ranks.run(all_events):
        for without, ours in modes:
            assert [event for event in ours if not event.startswith("run")] == without
            last = max(i for i, event in enumerate(ours) if event.startswith("gradient"))
            early = [event for event in ours[:last] if event.startswith("bucket")]
            assert len(early) >= 3
            assert ours.index(early[0]) < ours.index("run 0")
            assert [event for event in ours if event.startswith("run")] == ["run 2", "run 1", "run 0"]


def placed_by_a_plan():
    results = []
    for when in ("never", "before", "after"):
        torch.manual_seed(0)
        model = Model(each_once, plain)
        plan = Plan((Choice(("layers.0",)), Choice(("layers.1",), ("@product",)), Choice(("layers.2",))))
        if when == "before":
            apply(model, plan)
        ddp = DDP(model)
        if when == "after":
            apply(ddp.module, plan)
        every_step(ddp, data(dist.get_rank(), 0))
        results.append(gradients(ddp))
    return results


def test_a_plan_before_or_after_ddp(ranks):
    """A plan gives plain DDP's gradients, whether it is applied before the model is wrapped or after."""
    for wanted, *others in ranks.run(placed_by_a_plan):
        assert all(torch.equal(a, b) for other in others for a, b in zip(wanted, other, strict=True))


# --- gradients reduced by hand -------------------------------------------------------------------------------------


def parameters(*shapes, dtype=torch.float32):
    """Parameters, each with this rank's own gradient."""
    result = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for i, parameter in enumerate(result):
        parameter.grad = torch.full_like(parameter, float(10 * i + dist.get_rank()))
    return result


def in_buckets():
    params = parameters((4, 4), (8,), (2, 2)) + parameters((4,), (4,), dtype=torch.bfloat16)
    params[0].grad = params[0].grad.t()  # strided otherwise
    counts = [fused_allreduce_gradients(params, bucket_bytes=size) for size in (1, 64, 96, 128 * 2**20)]
    return counts, [(p.grad, p.grad.dtype) for p in params]


def test_buckets(ranks):
    """Gradients are reduced to their mean in buckets of one dtype and at most the size asked for."""
    for counts, grads in ranks.run(in_buckets):
        # 64, 32 and 16 bytes, and 8 and 8 of another dtype.
        assert counts == [5, 3, 3, 2]
        for index, (grad, dtype) in enumerate(grads):
            assert dtype is (torch.float32 if index < 3 else torch.bfloat16)
            assert grad.float().unique().tolist() == [10.0 * (index % 3) + 0.5]


def peak_while_reducing():
    params = parameters(*[(256,)] * 64)
    with measure() as memory:
        count = fused_allreduce_gradients(params, bucket_bytes=4096)
    return count, memory.peak_bytes


def test_few_buckets_exist_at_a_time(ranks):
    """Reducing takes the memory of two buckets, or a few more while gloo lets go of them, however many there are."""
    for count, peak in ranks.run(peak_while_reducing):
        assert count == 16
        assert 4096 <= peak <= 5 * 4096


def some_without():
    first, second, third, fourth = parameters((2,), (3,), (4,), (5,))
    second.grad = second.grad if dist.get_rank() == 1 else None
    third.grad = None
    fourth.main_grad, fourth.grad = fourth.grad.double(), None
    count = fused_allreduce_gradients(iter([first, second, third, fourth, first]))
    return count, [first.grad, second.grad, third.grad, fourth.main_grad], fourth.grad


def test_gradients_that_are_not_everywhere(ranks):
    """One that another rank has counts as zero; one that no rank has stays away; `main_grad` is reduced as it is."""
    for count, (first, second, third, fourth), grad in ranks.run(some_without):
        assert count == 2
        assert third is grad is None
        assert (first.tolist(), second.tolist()) == ([0.5] * 2, [5.5] * 3)
        assert (fourth.tolist(), fourth.dtype) == ([30.5] * 5, torch.float64)


def disagreeing(how):
    params = parameters((2,), (3,))
    if dist.get_rank() == 1:
        if how == "sparse":
            params[1].grad = params[1].grad.to_sparse()
        elif how == "order":
            params.reverse()
        elif how == "none":
            params = []
        elif how == "dtype":
            params[0] = parameters((2,), dtype=torch.float64)[0]
    try:
        fused_allreduce_gradients(params)
    except RecomputeError as error:
        dist.barrier()  # nobody waits in a collective
        return str(error)


@pytest.mark.parametrize("how", ["sparse", "order", "none", "dtype"])
def test_ranks_that_disagree_all_say_so(ranks, how):
    """What one rank cannot reduce is refused by all ranks, so that none waits for another."""
    said = ranks.run(disagreeing, how)
    if how == "sparse":
        assert "some parameter, on another rank, has a sparse gradient" in said[0]
        assert "parameter 1 has a sparse gradient" in said[1]
    else:
        assert all("some other rank different ones" in text for text in said)


def sharded(groups):
    mesh = init_device_mesh("cpu", groups, mesh_dim_names=("dp", "tp"))
    weight = nn.Parameter(DTensor.from_local(torch.zeros(2, 3), mesh["tp"], [Shard(0)], run_check=False))
    weight.grad = DTensor.from_local(torch.full((2, 3), float(dist.get_rank())), mesh["tp"], [Shard(0)])
    fused_allreduce_gradients([weight], mesh["dp"].get_group())
    kept = weight.grad.to_local().clone()
    try:
        fused_allreduce_gradients([weight])
    except RecomputeError as error:
        return kept, weight.grad.placements == (Shard(0),), str(error)
    return kept, weight.grad.placements == (Shard(0),), ""


@pytest.mark.parametrize("groups", [(2, 1), (1, 2)], ids=["data parallel", "tensor parallel"])
def test_sharded_parameters(ranks, groups):
    """Shards are reduced over the ranks that hold the same one, and refused over those that hold others."""
    for rank, (local, still_sharded, refused) in enumerate(ranks.run(sharded, groups)):
        assert still_sharded
        assert local.unique().tolist() == [0.5 if groups == (2, 1) else float(rank)]
        assert ("is sharded over ranks 0, 1" in refused) == (groups == (1, 2))


# --- who calls backward inside backward ------------------------------------------------------------------------------


def marked_twice():
    torch.manual_seed(0)

    def reentrant(fn):
        return lambda x: torch_checkpoint(fn, x, use_reentrant=True)

    ddp = DDP(Model(in_two_regions, reentrant))
    result = loss(ddp, data(dist.get_rank(), 0)[0])
    try:
        result.backward()
    except RuntimeError as error:
        return str(error), find_reentrant(result, ddp), find_reentrant({"loss": [result]})


def test_the_cause_of_a_parameter_ready_twice(ranks):
    """After DDP's error the graph still says which module was checkpointed reentrantly, by whom and how often."""
    for said, found, without_model in ranks.run(marked_twice):
        assert "marked as ready twice" in said
        assert [(one.function, one.path, one.calls) for one in found] == [
            ("Residual", "module.layers.2", 1),
            ("Residual", "module.layers.0", 2),
            ("Residual", "module.layers.1", 1),
        ]
        assert {one.library for one in found} == {"torch.utils.checkpoint"}
        assert [(one.path, one.calls) for one in without_model] == [("", 4)]
        said = "Residual (module.layers.0) is checkpointed 2 times by torch.utils.checkpoint, reentrant"
        assert said in str(found[1])


def test_partials_and_methods_are_followed_to_their_module():
    """A checkpointed method, partial or plain function is named by its module, where there is one."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(2, 3, requires_grad=True)

    def both(x):
        return model(x)

    for function, name, path in (
        (model[1].forward, "Linear", "1"),
        (functools.partial(functools.partial(model[0].__call__)), "Linear", "0"),
        (both, both.__qualname__, ""),
    ):
        (found,) = find_reentrant(torch_checkpoint(function, x, use_reentrant=True), model)
        assert (found.function, found.path) == (name, path)


def test_regions_and_other_checkpoints_are_not_named():
    """Regions, and PyTorch's checkpoints that are not reentrant, call no backward inside backward: not listed."""
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    assert find_reentrant(torch_checkpoint(layer, recompute(layer)(x), use_reentrant=False)) == []


def held_by_ddp():
    """Steps of which no ranks are said, and of replicas: peaks, bytes of "fit" and words; and DDP's own buckets."""
    model, x = nn.Sequential(*(Residual(WIDTH) for _ in range(4))), torch.randn(4, WIDTH)
    model[0].requires_grad_(False)
    alone = TrainingStep(model, (x,), loss=torch.sum, device="h100")
    steps = alone, replace(alone, ranks=Ranks(dp=2, zero=0))
    found = [(step.free_bytes(), simulate_step(step)) for step in steps]
    held = DDP(model)._get_ddp_logging_data()["bucket_sizes"]
    return [(free, one.peak_bytes, str(one)) for free, one in found], sum(map(int, held.split(",")))


def test_the_buckets_of_ddp_count(ranks):
    """DDP holds all gradients once more: a peak of replicas counts that, and one without ranks says and spares it."""
    for ((free, peak, said), (most, counted_peak, counted)), held in ranks.run(held_by_ddp):
        assert counted_peak - peak == most - free == held > 0
        assert f"DDP's buckets ({size(held)})" in counted
        assert f"under DDP its buckets ({size(held)}; ranks=Ranks(dp=2, zero=0) counts them)" in said


def planned_everywhere(budgets, folder):
    """What `auto` puts into the model of each rank, which is given a budget of its own, and the plan of that budget."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Residual(WIDTH) for _ in range(4))), torch.randn(64, WIDTH)
    if budgets == "stages" and dist.get_rank():
        model = model[1:]  # another stage of a pipeline
    share = 0.5 if budgets == "stages" else budgets[dist.get_rank()]

    def loss(out):
        if share == "raises":
            raise ValueError("no labels here")
        return out.square().mean()

    step = {"loss": loss, "device": "h100", "budget": 0.5 if share == "raises" else share}
    file = folder / "plan.json"
    try:
        handle = auto(model, x, cache=file, **step)
    except (RecomputeError, ValueError) as error:
        dist.barrier()  # nobody waits in a collective
        return str(error), None
    handle.remove()
    return handle.plan.digest(), make_plan(model, x, **step).digest()


@pytest.mark.parametrize("budgets", [(0.9, 0.2), pytest.param("stages", marks=nightly)])
def test_auto_gives_ranks_one_plan(ranks, budgets, tmp_path):
    """Ranks with the same parameters use the plan with the lowest peak; stages of a pipeline have one each."""
    (first, alone), (second, other) = ranks.run(planned_everywhere, budgets, tmp_path)
    assert alone != other
    assert (first, second) == ((alone, other) if budgets == "stages" else (other, other))


def planned_again(folder):
    """The plans of a rank whose optimizer was not named, of which only the last rank gets a larger batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(WIDTH) for _ in range(4)))
    x, larger = torch.randn(64, WIDTH), torch.randn(96, WIDTH)
    handle = auto(model, x, loss=lambda out: out.square().mean(), device="h100", budget=0.5, optimizer="sgd")
    ddp = DDP(model)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        ddp(larger if dist.get_rank() else x).square().mean().backward()
        sgd.step()
        sgd.zero_grad()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return [plan.digest() for plan in handle.history], weights.double().sum().item(), handle.looking.out


def test_ranks_plan_again_together(ranks, tmp_path):
    """Where the step of one rank is not the planned one, all ranks plan again before the same step, and agree."""
    first, second = ranks.run(planned_again, tmp_path)
    assert first == second
    assert len(first[0]) == 2
    assert first[2]


@pytest.mark.parametrize(
    ("budget", "words"), [pytest.param("1KiB", "1KiB", marks=nightly), ("raises", "no labels here")]
)
def test_auto_fails_on_all_ranks_or_none(ranks, tmp_path, budget, words):
    """Where one rank finds no plan, or the model's code raises there, every rank says so, with its words."""
    for text, _ in ranks.run(planned_everywhere, (0.5, budget), tmp_path):
        assert words in text
