"""Plans and saved calls inside `torch.compile`: the graph keeps and repeats what the eager engine keeps and repeats."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._ops import HigherOrderOperator
from torch.distributed._functional_collectives import all_reduce
from torch.nn.attention import flex_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from laws.placements import chain
from laws.watch import equal
from support.compiler import COMPILES, as_they_are
from support.training import gradients
from torch_recompute import (
    Choice,
    OutputDiscardCheckpoint,
    Plan,
    apply,
    checkpoint,
    no_recompute,
    recompute,
    replay,
    saved_activations,
)
from torch_recompute.compat import paddle
from torch_recompute.state import NumpyRng
from torch_recompute.stores import OnHost

pytestmark = COMPILES

WIDTH, TOKENS, BATCH, LAYERS = 32, 8, 2, 2

backends = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])


class Split:
    """A backend that runs the two graphs of a partition as they are, and remembers what one keeps for the other."""

    def __init__(self):
        from functorch.compile import min_cut_rematerialization_partition

        self.kept = []
        self._split = min_cut_rematerialization_partition
        self.backend = as_they_are(self.split)

    def split(self, joint, inputs, *, num_fwd_outputs, **more):
        forward, backward = self._split(joint, inputs, num_fwd_outputs=num_fwd_outputs, **more)
        (last,) = forward.graph.find_nodes(op="output")
        outputs = [node for node in pytree.arg_tree_leaves(*last.args) if isinstance(node, torch.fx.Node)]
        elsewhere = [*forward.graph.find_nodes(op="placeholder"), *outputs[:num_fwd_outputs]]
        storages = {storage(node) for node in elsewhere}
        saved = {storage(node): size(node) for node in outputs[num_fwd_outputs:] if storage(node) not in storages}
        self.kept.append(sum(saved.values()))
        return forward, backward


def storage(node):
    value = node.meta["val"]
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def size(node):
    """Bytes that a node keeps; none for the state of a random generator, which the partitioner keeps on a CPU."""
    value = node.meta["val"]
    return 0 if not isinstance(value, torch.Tensor) or value.dtype is torch.uint8 else value.untyped_storage().nbytes()


class Attention(nn.Module):
    """Attention as torch writes it, or by hand."""

    def __init__(self, by_hand):
        super().__init__()
        self.qkv, self.out, self.by_hand = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), by_hand

    def forward(self, x):
        q, k, v = self.qkv(x).view(BATCH, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            y = torch.matmul(torch.matmul(q, k.transpose(-1, -2)).softmax(-1), v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """A transformer layer, the experts of its second half chosen per token."""

    def __init__(self, by_hand=False, routed=False):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(by_hand), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 4 * WIDTH) if routed else None

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        y = F.gelu(self.up(self.norm2(x)))
        if self.router is not None:
            scores, index = self.router(x).topk(WIDTH, -1)
            y = torch.zeros_like(y).scatter(-1, index, y.gather(-1, index) * scores.softmax(-1))
        return x + self.down(y)


def model(**settings):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**settings) for _ in range(LAYERS)))


def batch():
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def each(keep=(), module="", **more):
    return Plan(tuple(Choice((f"{i}.{module}".strip("."),), keep, **more) for i in range(LAYERS)))


TOGETHER = tuple(map(str, range(LAYERS)))
BY_HAND, ROUTED = {"by_hand": True}, {"by_hand": True, "routed": True}
PLANS = {
    "layers": (each(), BY_HAND),
    "modules in them": (each(("up", "attn.qkv")), BY_HAND),
    "a module with modules": (each(("attn",)), {}),
    "products and attention": (each(("@product", "@attention")), {}),
    "attention": (each(("@attention",)), {}),
    "products that narrow": (each(("@down",)), BY_HAND),
    "products without a parameter": (each(("@matmul",)), BY_HAND),
    "products of a module": (each(("up@product", "attn@attention")), {}),
    "values unused": (each(("attn@product", "down@values_unused")), BY_HAND),
    "decisions": (each(carry=True), ROUTED),  # here what was picked is kept too, and not gathered again
    "a part of each layer": (each(module="attn"), BY_HAND),
    "layers together": (Plan((Choice(TOGETHER),)), BY_HAND),
    "layers together, products kept": (Plan((Choice(TOGETHER, ("@product",)),)), BY_HAND),
    "layers together, nested": (Plan((Choice(TOGETHER, nested=True),)), BY_HAND),
}


def step(run, modules, x=None):
    """A step's FLOPs in backward, and its output and gradients."""
    x = batch() if x is None else x
    out = run(x)
    loss = out.square().sum()
    with FlopCounterMode(display=False) as count:
        loss.backward()
    grads = [out.detach(), x.grad, *(p.grad for p in modules.parameters() if p.grad is not None)]
    modules.zero_grad()
    return count.get_total_flops(), grads


@pytest.mark.parametrize("name", PLANS)
def test_a_compiled_plan_keeps_and_repeats_what_the_eager_one_does(name):
    """Bytes kept and FLOPs repeated are at most those of the eager regions; gradients are the plain ones, bitwise."""
    plan, settings = PLANS[name]
    modules = model(**settings)
    plain, wanted = step(modules, modules)
    handle = apply(modules, plan)
    eager, grads = step(modules, modules)
    assert equal(grads, wanted)
    kept = saved_activations(modules, (batch(),)).total_bytes
    split = Split()
    run = torch.compile(modules, backend=split.backend, fullgraph=True)
    step(run, modules)
    compiled, grads = step(run, modules)
    assert equal(grads, wanted)
    assert split.kept[0] <= kept + (LAYERS * BATCH * TOKENS * WIDTH * 4 if name == "decisions" else 0)
    assert compiled <= eager
    assert (compiled > plain) == (eager > plain)
    handle.remove()


def compiled_bytes(modules, run=None, x=None, **options):
    """What one compiled step keeps, for each graph."""
    torch.compiler.reset()
    split = Split()
    step(torch.compile(run or modules, backend=split.backend, fullgraph=True, **options), modules, x)
    return split.kept


def test_a_copy_of_a_planned_model_compiles_as_the_model_does():
    """Deep copies and pickles keep what the plan says, too."""
    (plain,) = compiled_bytes(model(by_hand=True))
    modules = model(by_hand=True)
    apply(modules, each(("up", "attn@product")))
    copies = copy.deepcopy(modules), pickle.loads(pickle.dumps(modules))
    (kept,) = compiled_bytes(modules)
    assert 0 < kept < plain
    assert [compiled_bytes(one) for one in copies] == [[kept], [kept]]


def test_layers_compiled_one_by_one_and_dynamic_shapes():
    """A planned layer that is compiled alone keeps what it keeps in the whole, with symbolic shapes as well."""
    modules = model(by_hand=True)
    apply(modules, each(("up",)))
    (whole,) = compiled_bytes(modules)
    torch.compiler.reset()
    split = Split()
    for layer in modules:
        layer.compile(backend=split.backend, fullgraph=True)
    step(modules, modules)
    inputs = BATCH * TOKENS * WIDTH * 4  # of the second layer; the first one's is the batch
    assert sum(split.kept) in (whole, whole - inputs)
    one = model(by_hand=True)[:1]
    _, wanted = step(one, one)
    apply(one, Plan((Choice(("0",), ("up",)),)))
    torch.compiler.reset()
    run = torch.compile(one, backend=Split().backend, fullgraph=True, dynamic=True)
    assert equal(step(run, one)[1], wanted)


def test_a_plan_applied_to_a_compiled_model_compiles_it_again():
    """`torch.compile` first and `apply` afterwards: the next step is compiled with the plan, and `remove` undoes it."""
    modules, split = model(by_hand=True), Split()
    run = torch.compile(modules, backend=split.backend, fullgraph=True)
    step(run, modules)
    handle = apply(modules, each())
    step(run, modules)
    handle.remove()
    step(run, modules)
    plain, planned = split.kept[:2]
    assert planned < plain
    assert len(split.kept) == 2  # the third step finds the first graph again
    with pytest.raises(Exception, match="_orig_mod"):
        apply(run, each())


def written(wrap, keep, carry):
    """A model that says itself what is recomputed, in functions."""
    layers = model(by_hand=True)
    first, second = layers

    def body(x):
        x = x + keep(first.attn)(first.norm1(x))
        index = carry(lambda x: x.topk(WIDTH // 2, -1).indices)(x)
        y = keep(wrap(lambda x: second.up(x).sin()))(x)
        return second.down(y).gather(-1, index).square()

    return lambda x: wrap(lambda x: wrap(body)(x.cos()).exp())(x), layers


def test_what_a_function_says_reaches_the_graph():
    """Regions in regions, a region in a saved call, carried values: as many bytes and FLOPs as eagerly."""
    plain, layers = written(lambda f: f, lambda f: f, lambda f: f)
    least, wanted = step(plain, layers)
    run, layers = written(recompute, no_recompute, replay)
    eager, grads = step(run, layers)
    assert equal(grads, wanted)
    kept = saved_activations(nn.ModuleList([Calls(run)]).append(layers)[0], (batch(),)).total_bytes
    split = Split()
    compiled_run = torch.compile(run, backend=split.backend, fullgraph=True)
    step(compiled_run, layers)
    compiled, grads = step(compiled_run, layers)
    assert equal(grads, wanted)
    assert split.kept[0] <= kept
    assert least < compiled <= eager


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_saved_calls_in_the_regions_of_other_systems():
    """`checkpoint` and `OutputDiscardCheckpoint` trace regions, too: saved calls in them are kept."""
    layer = model(by_hand=True)[0]

    def whole(x):
        return checkpoint(lambda x: no_recompute(layer.up)(x.sin()).exp(), x, use_reentrant=False).sum(-1)

    def discarded(x):
        discard = OutputDiscardCheckpoint()
        y = discard.checkpoint(lambda x: no_recompute(layer.up)(x.sin()).exp(), x)
        z = layer.down(y)
        discard.discard_output_and_register_recompute(z)
        return z

    up = BATCH * TOKENS * 4 * WIDTH * 4
    for run in (whole, discarded):
        (kept,) = compiled_bytes(layer, run)
        assert kept == up


def nothing(x):
    return x.sin().exp()


SILENT = {
    "inputs=OnHost()": lambda: recompute(nothing, inputs=OnHost()),
    'check="values"': lambda: recompute(nothing, check="values"),
    "state=[NumpyRng()]": lambda: recompute(nothing, state=[NumpyRng()]),
    "store=OnHost()": lambda: recompute(chain(no_recompute(torch.sin, store=OnHost()), torch.exp)),
    "offload_indices=[0]": lambda: lambda x: paddle.recompute(nothing, x, offload_indices=[0]),
}


@pytest.mark.parametrize("option", SILENT)
def test_what_the_compiler_cannot_be_told_is_said(option):
    """An option without a place in the graph is warned of, and the graph computes what it computes without it."""
    run = torch.compile(SILENT[option](), backend="aot_eager", fullgraph=True)
    x = torch.linspace(0, 1, 8).requires_grad_()
    with pytest.warns(RuntimeWarning, match=f"{re.escape(option)} has no effect"):
        out = run(x)
    assert torch.equal(out, nothing(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        run(x).sum().backward()


def test_a_planned_store_is_said():
    """So is a plan that keeps a layer's inputs in host memory."""
    modules = model(by_hand=True)
    apply(modules, each(store="host"))
    with pytest.warns(RuntimeWarning, match=r"[01] is in a function .* inputs=OnHost\(\) has no effect"):
        compiled_bytes(modules)


class Breaks(Block):
    """A layer with a graph break in it, which assigns its buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        torch._dynamo.graph_break()
        self.mean = 0.9 * self.mean + x.detach().mean((0, 1))
        return x + self.down(F.gelu(self.up(self.norm2(x * self.mean)))).topk(4, -1).values.sum(-1, keepdim=True)


def breaks():
    torch.manual_seed(0)
    return nn.Sequential(Breaks(), Breaks())


BROKEN = {
    "layers": each(),
    "a module in them": each(("up",)),
    "products": each(("@product",)),
    "decisions": each(carry=True),
    "layers together": Plan((Choice(TOGETHER),)),
    "inputs on the host": each(store="host"),
}


def products(run, modules):
    """A step's output and gradients, and how many products its backward makes."""
    x = batch()
    out = run(x)
    loss = out.square().sum()
    with torch.autograd.profiler.profile() as seen:  # under a mode, as FlopCounterMode is one, nothing is compiled
        loss.backward()
    grads = [out.detach(), x.grad, *(p.grad for p in modules.parameters()), *modules.buffers()]
    return grads, sum(event.name in ("aten::addmm", "aten::mm", "aten::bmm") for event in seen.function_events)


@pytest.mark.filterwarnings("ignore:.*has no effect:RuntimeWarning")
@pytest.mark.parametrize("name", BROKEN)
def test_a_planned_layer_that_cannot_be_traced_keeps_and_repeats_what_it_does_eagerly(name):
    """Products in backward, gradients and buffers are those of the eager plan, and a warning names the layer."""
    modules = breaks()
    apply(modules, BROKEN[name])
    wanted, count = products(modules, modules)
    modules = breaks()
    apply(modules, BROKEN[name])
    with pytest.warns(RuntimeWarning, match=r"[01] is recomputed inside torch.compile, which cannot trace it"):
        grads, found = products(torch.compile(modules, backend="aot_eager"), modules)
    assert equal(grads, wanted)
    assert count <= found <= count + LAYERS  # a replay ends between two parts, or in what is not compiled


FACES = {
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "paddle": lambda layer, x: paddle.recompute(layer, x),
    "output discarded": lambda layer, x: discarded(layer, x),
    "tiles": lambda layer, x: recompute(layer, tiles=2, tile_dim=0)(x),
}


def discarded(layer, x):
    discard = OutputDiscardCheckpoint()
    y = discard.checkpoint(layer, x).sin()
    discard.discard_output_and_register_recompute(y)
    return y


@pytest.mark.filterwarnings("ignore:.* which cannot trace it whole:RuntimeWarning")
@pytest.mark.parametrize("face", FACES)
def test_every_face_runs_what_cannot_be_traced(face):
    """So it is for regions that other functions make: gradients and buffers are those of the eager call."""
    found = []
    for compile in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager")):
        layer = breaks()[0]
        found.append(products(compile(lambda x, layer=layer: FACES[face](layer, x)), layer)[0])
    assert equal(*found)


@backends
@pytest.mark.parametrize("keep", [(), ("up",), ("@product",)])
def test_dropout_in_a_compiled_plan(keep, backend):
    """Backward finds the mask of the forward, where the mask is drawn by compiled code: a bias counts its entries."""
    torch.manual_seed(0)
    modules = nn.Sequential(Dropped(), Dropped())
    apply(modules, Plan((Choice(("0",), keep), Choice(("1",), keep))))
    run = torch.compile(modules, fullgraph=True, backend=backend)
    out = run(torch.randn(64, 8, requires_grad=True))
    (grad,) = torch.autograd.grad(out.sum(), modules[1].down.bias)
    assert torch.equal(grad, 2.0 * (out != 0).sum(0))


class Dropped(nn.Module):
    """Two layers, each with dropout behind it."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.down(self.drop(self.up(x).tanh())))


@pytest.mark.nightly
def test_a_warm_cache_knows_plans_apart(tmp_path, monkeypatch):
    """The cache of compiled graphs is asked for the plan as well: what one plan left there is not another's."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for keep in ((), ("up",), (), ("up",)):
        torch.manual_seed(0)
        counters.clear()
        torch.compiler.reset()
        modules = nn.Sequential(Dropped()).eval()
        apply(modules, Plan((Choice(("0",), keep),)))
        out = torch.compile(modules, fullgraph=True)(torch.randn(4, 8, requires_grad=True))
        sizes = sorted(tuple(x.shape) for x in out.grad_fn.saved_tensors)
        found.append((sizes, counters["aot_autograd"]["autograd_cache_hit"]))
        out.sum().backward()
    assert [hits for _, hits in found] == [0, 0, 1, 1]
    assert found[0][0] == found[2][0] != found[1][0] == found[3][0]


class Flexible(nn.Module):
    """Attention that is one higher-order operator of the graph."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).view(BATCH, -1, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        return x + flex_attention.flex_attention(q, k, v).transpose(1, 2).flatten(2)


class Branching(nn.Module):
    """A branch that is chosen when the graph runs."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.cond(x.sum() > 0, torch.sin, torch.exp, (self.up(x),))


class Marked(nn.Module):
    """A layer whose forward is traced once for all layers."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.up(x).sin().exp()


@pytest.mark.parametrize(
    ("kind", "keep", "again"),
    [(Flexible, ("@attention",), 0), (Flexible, ("qkv",), 2), (Branching, ("up",), 1), (Marked, ("up",), 2)],
)
def test_higher_order_operators_are_kept_or_repeated_as_others_are(kind, keep, again, monkeypatch):
    """A region that keeps something may call flex_attention, cond and nested compiled regions."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # which refuses gradients on a CPU
    torch.manual_seed(0)
    modules = nn.Sequential(kind(), kind())
    repeated = []

    def partition(joint, inputs, **more):
        forward, backward = Split()._split(joint, inputs, **more)
        ops = [node.target for node in backward.graph.nodes if isinstance(node.target, HigherOrderOperator)]
        repeated.append(sum("backward" not in str(op) for op in ops))
        return forward, backward

    plain, got = [], []
    for grads in (plain, got):
        torch.compiler.reset()
        run = torch.compile(modules, backend=as_they_are(partition), fullgraph=True)
        grads += gradients(modules, batch(), run=run)
        apply(modules, each(keep)) if grads is plain else None
    assert equal(got, plain)
    assert repeated[1] - repeated[0] == again


@pytest.mark.parametrize("keep", [(), ("up",)])
def test_layers_that_are_traced_once_have_their_own_weights(keep):
    """Dynamo reuses the graph of a marked forward for the next layer, with what that layer holds."""
    torch.manual_seed(0)
    modules = nn.Sequential(*(Marked() for _ in range(4)))
    wanted = gradients(modules, batch())
    apply(modules, Plan(tuple(Choice((f"{i}",), keep) for i in range(4))))
    assert equal(gradients(modules, batch(), run=torch.compile(modules, backend="aot_eager", fullgraph=True)), wanted)


class Around(nn.Module):
    """A layer that calls one with a forward of its own."""

    def __init__(self):
        super().__init__()
        self.inner = Dropped()

    def forward(self, x):
        return x + self.inner(x)


@pytest.mark.parametrize("kind", ["@product", "@attention", "@values_unused"])
def test_a_module_compiled_inside_an_uncompiled_region_runs_under_kept_calls(kind):
    """The plan keeps nothing of it, and its gradients are the plain ones."""
    torch.manual_seed(0)
    modules, x = nn.Sequential(Around(), Around()).eval(), torch.randn(4, 8)
    wanted = torch.autograd.grad(modules(x).sum(), [*modules.parameters()])
    for layer in modules:
        layer.inner.compile(backend="aot_eager", fullgraph=True)
    apply(modules, Plan((Choice(("0",), (kind,)), Choice(("1",), (kind,)))))
    for _ in range(2):
        assert equal(torch.autograd.grad(modules(x).sum(), [*modules.parameters()]), wanted)


@pytest.fixture
def one_of_two_ranks():
    """A process group of two ranks, without the other one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Reduced(Dropped):
    """A layer that sums over ranks what it has made."""

    def forward(self, x):
        return all_reduce(super().forward(x).tanh(), "sum", dist.group.WORLD).cos()


@pytest.mark.usefixtures("one_of_two_ranks")
@backends
@pytest.mark.parametrize("keep", [("@product",), ("@collective", "@product"), ("@collective",)])
def test_products_of_compiled_code_are_not_kept(keep, backend):
    """Inductor's code calls products with `out=`, and its kernels and collectives then write over these in place."""
    torch.manual_seed(0)
    layer, x = Around(), torch.randn(4, 8)
    layer.inner = Reduced()
    modules = nn.Sequential(layer, nn.Linear(8, 8)).eval()
    layer.inner.compile(backend=backend)
    wanted = torch.autograd.grad(modules(x).sum(), [*modules.parameters()])
    apply(modules, Plan((Choice(("0", "1"), keep),)))
    for _ in range(2):
        got = torch.autograd.grad(modules(x).sum(), [*modules.parameters()])
        assert all(map(torch.allclose, got, wanted))


@pytest.mark.usefixtures("one_of_two_ranks")
@pytest.mark.parametrize("kind", ["@reduction", "@collective"])
def test_a_module_compiled_inside_a_region_that_keeps_collectives_is_compiled(kind):
    """Once; and what its graph as it is communicates is kept, too."""
    torch.manual_seed(0)
    layer, x, graphs = Around(), torch.randn(4, 8), []
    layer.inner = Reduced()
    modules = nn.Sequential(layer, nn.Linear(8, 8)).eval()
    wanted = torch.autograd.grad(modules(x).sum(), [*modules.parameters()])
    layer.inner.compile(backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=True)
    apply(modules, Plan((Choice(("0",), (kind,)), Choice(("1",), (kind,)))))
    for _ in range(2):
        assert equal(torch.autograd.grad(modules(x).sum(), [*modules.parameters()]), wanted)
    assert len(graphs) == 1
