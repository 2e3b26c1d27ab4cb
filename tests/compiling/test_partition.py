"""`Partition`: a budget in bytes for what `torch.compile` compiles."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from allocated import levels
from partitions import replayed_by, saved_by
from torch import nn

from support.compiler import COMPILES, as_they_are
from support.models import Made
from torch_recompute import Choice, Plan, apply, make_plan
from torch_recompute._torch.partitioning import split, tag
from torch_recompute.compiling import Partition, compile
from torch_recompute.compiling import step as compiled
from torch_recompute.compiling.choosing import Chooser
from torch_recompute.compiling.joint import Joint
from torch_recompute.errors import ArgumentError, BudgetError, RecomputeError
from torch_recompute.planner.prices import runs_alone

pytestmark = COMPILES
counts = pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.nightly)])

WIDTH, TOKENS, BATCH, VOCABULARY = 64, 32, 4, 96
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


class Layer(nn.Module):
    """A layer of a GPT, or with a gate and without biases one of a Llama; `memory` is attended to as well."""

    def __init__(self, dropout=0.0, gated=False, crossed=False):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) if gated else nn.LayerNorm(WIDTH) for _ in range(2 + crossed))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=not gated), nn.Linear(WIDTH, WIDTH, bias=not gated)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH) if gated else None
        self.query, self.pair = (nn.Linear(WIDTH, n * WIDTH) for n in (1, 2)) if crossed else (None, None)
        self.drop = nn.Dropout(dropout)

    def heads(self, x, parts):
        return x.view(*x.shape[:2], parts, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)

    def attend(self, q, k, v):
        return self.drop(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))

    def forward(self, x, memory=None):
        x = x + self.attend(*self.heads(self.qkv(self.norms[0](x)), 3))
        if self.query is not None:
            x = x + self.attend(*self.heads(self.query(self.norms[2](x)), 1), *self.heads(self.pair(memory), 2))
        y = self.up(self.norms[1](x))
        return x + self.drop(self.down(F.gelu(y) if self.gate is None else y * F.silu(self.gate(self.norms[1](x)))))


class Model(nn.Module):
    """Embedding, layers, loss; with an encoder where the layers are crossed."""

    def __init__(self, layers=2, **kind):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(**kind) for _ in range(layers))
        self.encoder = nn.ModuleList(Layer() for _ in range(layers)) if kind.get("crossed") else []

    def forward(self, ids):
        x = self.embedding(ids)
        memory = x if len(self.encoder) else None
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.layers:
            x = layer(x, memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


MODELS = {
    "gpt": {},
    "gpt with dropout": {"dropout": 0.1},
    "llama": {"gated": True},
    "encoder and decoder": {"crossed": True, "layers": 1},
}


def alone():
    """A layer and a loss, which are fewer kernels than a model with an embedding."""
    torch.manual_seed(0)
    return Made(lambda m, x: m.layer(x).square().mean(), layer=Layer(dropout=0.5))


def ids():
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


class Graphs:
    """An eager backend under a partition: what each graph keeps, and its joint graph."""

    def __init__(self, partition):
        from torch._inductor.compile_fx import select_decomp_table

        self.partition, self.saved, self.joints, self.again, self.grads = partition, [], [], [], []
        self.backend = as_they_are(self.split, decompositions=select_decomp_table())

    def split(self, graph, inputs, **more):
        joint = Joint(copy.deepcopy(graph).graph, more["num_fwd_outputs"])
        self.joints.append(joint)
        forward, backward = self.partition(graph, inputs, **more)
        self.saved.append(saved_by(joint, forward, more["num_fwd_outputs"]))
        self.again.append(replayed_by(joint, backward))
        return forward, backward


def used(model):
    """The parameters that have a gradient."""
    return [p for p in model.parameters() if p.grad is not None]


def step(run, model):
    """The loss and the gradients of a step."""
    torch.manual_seed(2)
    loss = run(ids())
    loss.backward()
    grads = [loss.detach(), *(p.grad for p in used(model))]
    model.zero_grad()
    return grads


def joint_of(model):
    """The joint graph of a model, and what torch's own partitioner saves with a share of the activations."""
    from functorch.compile import min_cut_rematerialization_partition

    found = []
    for share in (1.0, 0.5):
        torch.compiler.reset()
        graphs = Graphs(min_cut_rematerialization_partition)
        with torch._functorch.config.patch(activation_memory_budget=share):
            graphs.grads = step(torch.compile(model, backend=graphs.backend, fullgraph=True), model)
        found.append(graphs)
    (joint,), (saved,) = found[1].joints, found[1].saved
    return joint, saved, found[0].grads


@pytest.mark.parametrize("kind", [pytest.param("gpt", marks=pytest.mark.nightly), *list(MODELS)[1:]])
def test_a_smaller_budget_never_has_a_higher_peak(kind):
    """Along budgets peaks and saved bytes rise and FLOPs fall; at torch's own peak at most as much is run again.

    The graph that is compiled keeps and repeats what was said, with the gradients of the step without a budget.
    """
    model = Model(**MODELS[kind])
    joint, saved, wanted = joint_of(model)
    chooser = Chooser(joint)
    least, plain = chooser.least, chooser.plain.peak
    assert least < 0.9 * plain
    found = [chooser.choose(int(least + share * (plain - least))) for share in SHARES]
    for one, share in zip(found, SHARES, strict=True):
        assert one.lives.peak <= least + share * (plain - least)
    for row in zip(*((one.lives.peak, one.lives.saved, -one.flops) for one in found), strict=True):
        assert list(row) == sorted(row)
    assert found[-1].flops == 0
    theirs = joint.simulate(saved)
    ours = chooser.choose(theirs.peak)
    assert ours.lives.peak <= theirs.peak
    assert ours.flops < sum(joint.operations[i].flops for i in theirs.again if joint.operations[i].required)
    torch.compiler.reset()
    graphs = Graphs(Partition(0.4, exact=False))
    grads = step(torch.compile(model, backend=graphs.backend, fullgraph=True), model)
    (one,) = graphs.partition.graphs
    assert sum(graphs.joints[0].values[number].bytes for number in graphs.saved[0]) <= one.saved_bytes
    assert graphs.again[0] <= one.replay_flops
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_no_set_of_products_of_a_layer_is_better(kind):
    """Of layers compiled one by one as little is run again as with the best set of products for the same peak."""
    from functorch.compile import min_cut_rematerialization_partition

    model, graphs = Model(layers=1, **MODELS[kind]), Graphs(min_cut_rematerialization_partition)
    model.layers[0].compile(backend=graphs.backend, fullgraph=True)
    step(model, model)
    (joint,) = graphs.joints
    chooser, others = Chooser(joint, 3), 2
    products = [number for number, one in enumerate(joint.operations) if one.required and one.flops]
    cheap = {number for number, one in enumerate(joint.operations) if not one.flops}
    for chosen in itertools.product((False, True), repeat=len(products)):
        again = cheap | {number for number, repeated in zip(products, chosen, strict=True) if repeated}
        kept = {value for number, one in enumerate(joint.operations) if number not in again for value in one.makes}
        read = {value for number in joint.again(kept) for value in joint.operations[number].reads}
        read |= {number for number, value in enumerate(joint.values) if value.uses}
        lives = joint.simulate({number for number in kept & read if not joint.values[number].output})
        peak = lives.peak + others * lives.saved
        if peak >= chooser.least:
            flops = sum(joint.operations[number].flops for number in lives.again if number in products)
            assert chooser.choose(int(1.02 * peak)).flops <= flops


@pytest.mark.nightly
@torch._functorch.config.patch(enable_autograd_cache=False)
@torch._inductor.config.patch(fx_graph_cache=False)  # a graph from a cache has no figures
def test_a_plan_of_a_compiled_step(monkeypatch):
    """The allocator's peak of a compiled step is the one that its plan promised, and masks are the forward's.

    No choice is simulated twice, and the products of each are there to be timed, those that run again as well.
    """
    model = alone()
    batch = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    drawn = torch.get_rng_state()
    steps, real = [], compiled._simulated

    def simulated(*args):
        steps.append(real(*args))
        return steps[-1]

    monkeypatch.setattr(compiled, "_simulated", simulated)
    plan = make_plan(model, (batch,), budget=0.3, optimizer=torch.optim.AdamW, compiled=True)
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    choices = [(one.graph.peak_bytes, one.graph.replay_flops) for one in steps]
    assert len(choices) == len({*choices}) > 1
    products = [[op for op, _ in one.ran if op.all_flops] for one in steps]
    assert all(runs_alone(op) for op in itertools.chain(*products))
    for (_, again), ran in zip(choices, products, strict=True):
        assert sum(op.all_flops for op in ran) - sum(op.all_flops for op in products[0]) == again
    prediction = plan.prediction
    assert prediction.peak_bytes <= prediction.budget_bytes < prediction.plain_peak_bytes
    assert prediction.replay_flops > 0
    plan = Plan.from_json(plan.to_json())
    assert plan.digest() != Plan().digest()
    assert "operations of the compiled graph recomputed" in str(plan)
    run = compile(model, plan, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(0)
    run(batch).backward()
    once = [p.grad.clone() for p in used(model)]
    optimizer.step()
    optimizer.zero_grad()

    def again():
        run(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    before = sum(p.nbytes for p in model.parameters()) + batch.nbytes
    before += sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    peak = before + max(levels(again))
    assert abs(peak - plan.predicted_peak_bytes) <= 0.02 * peak
    torch.compiler.reset()
    model = alone()
    plain = torch.compile(model, fullgraph=True)
    torch.manual_seed(0)
    plain(batch).backward()
    for a, b in zip(once, (p.grad for p in used(model)), strict=True):
        torch.testing.assert_close(a, b)


def test_the_smallest_share_has_a_plan():
    """A share begins at the least that the code of the compiler needs, which may be more than the graph says.

    The plan is plain data, and making it leaves neither gradients nor other random numbers.
    """
    model, drawn = Model(layers=1, **MODELS["llama"]), torch.get_rng_state()
    plan = make_plan(model, (ids(),), budget=0.001, compiled=True)
    prediction = plan.prediction
    assert prediction.peak_bytes <= prediction.budget_bytes < prediction.plain_peak_bytes
    assert prediction.replay_flops > 0
    assert torch.equal(drawn, torch.get_rng_state())
    assert used(model) == []
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest() != Plan().digest()
    assert "operations of the compiled graph recomputed" in str(again)


def partitioned(model, budget):
    """What a partition made of the graph of a model, for which inductor writes code."""
    partition = Partition(budget)
    torch.compiler.reset()
    with torch._inductor.config.patch({k: v for k, v in partition.options.items() if v is not partition}):
        step(torch.compile(model, backend=Graphs(partition).backend, fullgraph=True), model)
    return partition.graphs[0]


@pytest.mark.nightly
def test_counted_in_the_code_of_the_compiler(monkeypatch):
    """A budget in bytes holds for the code that inductor writes, which is kept in the order of the graph."""
    model = Model(layers=1, crossed=True)
    small = partitioned(model, 0.01)
    assert small.counted == "the code"
    allowed = int(1.1 * small.peak_bytes)
    assert small.peak_bytes <= partitioned(model, allowed).peak_bytes <= allowed
    monkeypatch.setattr("torch_recompute.compiling.partition.in_order", dict)
    assert partitioned(model, 0.01).peak_bytes > 1.1 * small.peak_bytes


def test_where_no_code_is_written_the_graph_is_counted(monkeypatch):
    """A device for which inductor writes no code is said, and the budget holds in the graph."""

    def fail(*args, **how):
        raise NotImplementedError("no device")

    monkeypatch.setattr("torch_recompute.compiling.partition.generated", fail)
    with pytest.warns(UserWarning, match="counted in the graph, since .* NotImplementedError: no device"):
        assert partitioned(Model(layers=1), 0.5).counted == "the graph"


def test_one_function_for_both_kinds_of_plan():
    """A plan of modules is applied before its model is compiled; one for a compiled graph cannot be applied."""
    model = Model()
    compile(model, Plan((Choice(("layers.0",)),)), backend="aot_eager")
    with pytest.raises(ArgumentError, match="has a plan already"):
        apply(model, Plan((Choice(("layers.0",)),)))
    with pytest.raises(ArgumentError, match=r"is for the graph of torch\.compile"):
        apply(Model(), Plan(graph_bytes=2**20))
    with pytest.raises(ArgumentError, match="a plan of 1 region, which speaks of modules"):
        Partition(Plan((Choice(("layers.0",)),)))


def test_steps_that_cannot_be_planned_compiled():
    """A graph break, a budget below the least, and options for eager plans alone are said."""

    class Breaks(nn.Linear):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x).sum()

    with pytest.raises(ArgumentError, match="Breaks cannot be compiled as one graph"):
        make_plan(Breaks(8, 8), (torch.zeros(2, 8),), budget=0.4, compiled=True)
    model = Model(layers=1)
    with pytest.raises(BudgetError) as caught:
        make_plan(model, (ids(),), budget=1000, compiled=True)
    assert caught.value.smallest == caught.value.solution.predicted_peak_bytes > 1000
    with pytest.raises(ArgumentError, match="stages, sizes, offload or tiles"):
        make_plan(model, (ids(),), budget=0.4, compiled=True, offload=True)
    with torch.device("meta"):
        meta = Model(layers=1)
    with pytest.raises(ArgumentError, match="known on a machine without one"):
        make_plan(meta, (ids(),), budget=0.4, compiled=True, device="h100")


@counts
def test_a_budget_that_is_too_small(exact):
    """The error says the least bytes, with which it compiles."""
    model = Model(layers=1)
    partition = Partition(2000, exact=exact)
    with pytest.raises(Exception, match="needs at least") as caught:
        step(torch.compile(model, backend=Graphs(partition).backend, fullgraph=True), model)
    error = caught.value
    while not isinstance(error, BudgetError):
        error = error.__cause__ or error.__context__ or error.inner_exception
    torch.compiler.reset()
    partition = Partition(error.smallest, exact=exact)
    step(torch.compile(model, backend=Graphs(partition).backend, fullgraph=True), model)
    assert partition.graphs[0].peak_bytes <= error.smallest


def test_layers_compiled_one_by_one_share_a_budget():
    """A share is of each graph; told how many layers there are, less of each is saved, with the same gradients."""
    found = []
    for layers in (1, 8):
        torch.compiler.reset()
        model = Model(**MODELS["llama"])
        partition = Partition("1%", exact=False, layers=layers)
        graphs = Graphs(partition)
        wanted = step(model, model)
        for layer in model.layers:
            layer.compile(backend=graphs.backend, fullgraph=True)
        for a, b in zip(step(model, model), wanted, strict=True):
            torch.testing.assert_close(a, b)
        assert len(partition.graphs) in (1, 2)  # the second layer is compiled again where its input requires grad
        for one in partition.graphs:
            assert one.least_bytes <= one.peak_bytes <= one.budget_bytes <= one.plain_peak_bytes
        found.append(partition.graphs[0].saved_bytes)
    assert found[1] < found[0]


def test_an_operation_that_runs_again_for_one_of_its_results():
    """Attention whose output is saved runs again where its statistics are not."""
    torch.manual_seed(0)
    model, found = Layer(), []

    class Mixed:
        def __call__(self, gm, joint_inputs, **more):
            joint = Joint(gm.graph, more["num_fwd_outputs"])
            (attention,) = (one for one in joint.operations if len(one.makes) > 1 and one.flops)
            kept = {key for key, number in joint.index.items() if number not in attention.makes[1:]}
            tag(gm.graph, joint.backward, kept, {attention.node})
            forward, backward = split(gm, joint_inputs, **more)
            found.append(replayed_by(joint, backward))
            return forward, backward

    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    (wanted,) = torch.autograd.grad(model(x).square().sum(), x)
    run = torch.compile(model, backend=Graphs(Mixed()).backend, fullgraph=True)
    (got,) = torch.autograd.grad(run(x).square().sum(), x)
    torch.testing.assert_close(got, wanted)
    assert found[0] > 0


class Average(nn.Module):
    """A layer that multiplies by a matrix which it moves towards what it sees."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("seen", torch.linspace(0.5, 1, 64 * 64).view(64, 64))

    def forward(self, x):
        h = self.up(x)
        with torch.no_grad():
            self.seen.lerp_(h.mean(0), 0.5)
        return x + self.down((h @ self.seen.sin()).tanh())


@pytest.mark.parametrize("budget", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_buffer_that_the_graph_writes_to(budget, inductor):
    """What runs again reads the buffer as the forward did, though it is written to before backward begins."""
    torch.manual_seed(0)
    model, results, partition = nn.Sequential(Average(), Average()), [], Partition(budget, exact=inductor)
    how = {"options": partition.options} if inductor else {"backend": Graphs(partition).backend}
    for run in (copy.deepcopy(model), torch.compile(model, fullgraph=True, **how)):
        for seed in range(2):
            x = torch.randn(2, 32, generator=torch.Generator().manual_seed(seed))
            run(x).square().sum().backward()
        results.append([*(p.grad for p in run.parameters()), *(b.clone() for b in run.buffers())])
    torch.testing.assert_close(*results)


@counts
def test_symbolic_shapes(exact):
    """Sizes that are symbols are counted by the batch that they were traced with, also in generated code."""
    model = Model(layers=1)
    wanted = step(model, model)
    partition = Partition(0.3, exact=exact)
    grads = step(torch.compile(model, backend=Graphs(partition).backend, fullgraph=True, dynamic=True), model)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b)
    (one,) = partition.graphs
    assert one.counted == ("the code" if exact else "the graph")
    assert one.peak_bytes < one.plain_peak_bytes


def test_a_graph_that_cannot_be_read(monkeypatch):
    """What goes wrong in reading is said with the way out, and the model is as it was."""

    def fail(*args):
        raise KeyError("a strange operation")

    monkeypatch.setattr("torch_recompute.compiling.joint.flops_of", fail)
    model = Model(layers=1)
    with pytest.raises(Exception, match=r"Partition cannot read a graph .*a strange operation") as caught:
        step(torch.compile(model, options=Partition(0.5).options, fullgraph=True), model)
    assert "Compile without options=partition.options" in str(caught.value)
    assert RecomputeError.__name__ in str(caught.value)
    step(model, model)


def test_budgets_that_are_none():
    """Bad budgets are refused at once, `"fit"` with a reason."""
    for budget in (-1, 1.5, "12 potatoes", None):
        with pytest.raises(ArgumentError):
            Partition(budget)
    with pytest.raises(ArgumentError, match="a graph is compiled within one"):
        Partition("fit")


def test_what_the_cache_of_graphs_sees():
    """The key has the budget; copies that inductor makes of its options are the partition itself."""
    one, other = Partition("1GiB"), Partition("2GiB")
    assert one.uuid() == Partition(2**30).uuid() != other.uuid()
    assert copy.deepcopy(one) is one
    assert pickle.dumps(one) == pickle.dumps(Partition(2**30)) != pickle.dumps(other)
    assert "no graph was compiled yet" in str(one)
