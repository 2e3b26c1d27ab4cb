"""Law 12: inside `torch.compile` a region is traced, without a graph break; around a compiled function it is eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compiler import COMPILES, as_they_are
from laws.placements import NAMES, chain
from laws.watch import Counted
from torch_recompute import (
    checkpoint,
    doing_recompute,
    get_recompute_data,
    no_recompute,
    recompute,
    replay,
    save_for_recompute,
)

pytestmark = COMPILES


def compiled(fn):
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


def model():
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)])


def gradients(run, layers):
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    out = run(x)
    out.exp().sum().backward()
    grads = [out.detach(), x.grad, *(p.grad for p in layers.parameters())]
    for p in layers.parameters():
        p.grad = None
    return grads


def assert_equal(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_autograd_over_an_eager_region(backend):
    """A backward that is itself compiled opens what eager regions dropped: their replays are not compiled with it."""

    def step(wrap, keep, layers):
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        block = wrap(lambda x: keep(layers[0])(x).tanh().exp())
        loss = layers[2](block(layers[2](block(x)).sin())).square().sum()
        torch.compile(lambda loss: loss.backward(), backend=backend)(loss)
        return [x.grad, *(p.grad for m in (layers[0], layers[2]) for p in m.parameters())]

    with torch._dynamo.config.patch(compiled_autograd=True):
        assert_equal(step(recompute, no_recompute, model()), step(lambda f: f, lambda f: f, model()))


PLACES = ["whole", "parts", "nested at the end", "saved middle", "saved everything", "region in a saved call"]


@pytest.mark.parametrize("place", PLACES)
def test_regions_are_traced_without_a_graph_break(place):
    """`fullgraph=True` accepts every placement; output and gradients are the plain eager ones."""
    layers = model()
    stages = [lambda x: layers[0](x).tanh(), lambda x: layers[1](x).sigmoid(), lambda x: layers[2](x).sin()]
    wanted = gradients(chain(*stages), layers)
    assert_equal(gradients(compiled(NAMES[place].put(*stages)), layers), wanted)


def test_checkpoint_is_traced():
    """`checkpoint` too, with keyword arguments and its options."""
    layers = model()

    def body(x, *, scale):
        return layers[2](layers[1](layers[0](x)).tanh()) * scale

    def run(x):
        return checkpoint(body, x, use_reentrant=False, preserve_rng_state=False, determinism_check="none", scale=2.0)

    assert_equal(gradients(compiled(run), layers), gradients(lambda x: body(x, scale=2.0), layers))


class Block(nn.Module):
    """A layer that wraps its own parts."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def body(self, x, save):
        attend = no_recompute(self.attend) if save else self.attend
        q, k, v = self.qkv(self.norm(x)).view(2, 4, 2, 12).transpose(1, 2).chunk(3, -1)
        return x + self.out(attend(q, k, v).transpose(1, 2).reshape(2, 4, 8))

    def forward(self, x, wrap=True):
        x = x.view(1, 4, 8).expand(2, 4, 8)
        return recompute(self.body)(x, save=True) if wrap else self.body(x, save=False)


def test_a_layer_with_saved_attention_inside():
    """A transformer block with its attention saved compiles as one graph and trains as without."""
    torch.manual_seed(0)
    block = Block()
    wanted = gradients(lambda x: block(x, wrap=False), block)
    assert_equal(gradients(compiled(block), block), wanted)


def test_values_and_choices_inside():
    """`save_for_recompute`, `doing_recompute` and `replay(fn)` are traced away: the compiler keeps what it must."""
    layers = model()

    def body(x):
        scores = layers[0](x)
        if doing_recompute():
            (index,) = get_recompute_data()
        else:
            index = replay(lambda s: s.topk(8, -1).indices)(scores)
            save_for_recompute(index)
        return layers[2](layers[1](scores).tanh()).gather(1, index % 8)

    wanted = gradients(body, layers)
    assert_equal(gradients(compiled(recompute(body)), layers), wanted)


def test_the_graph_is_one_and_recomputes():
    """The partitioner is told: fewer tensors cross from the forward graph to the backward graph."""
    from functorch.compile import min_cut_rematerialization_partition

    saved = []

    def partition(*args, **more):
        forward, backward = min_cut_rematerialization_partition(*args, **more)
        saved.append(sum(len(n.args[0]) for n in forward.graph.nodes if n.op == "output"))
        return forward, backward

    weight = torch.ones(8, 8, requires_grad=True)

    def body(x):
        for _ in range(3):
            x = (x @ weight).sort(-1).values
        return x

    for run in (body, recompute(body)):
        torch.compiler.reset()
        step = torch.compile(run, fullgraph=True, backend=as_they_are(partition))
        step(torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert len(saved) == 2
    assert saved[1] < saved[0]


@pytest.mark.parametrize("place", ["whole", "each", "nested at the start", "saved middle"])
def test_a_region_around_compiled_functions(place):
    """Compiled functions inside eager regions and saved calls give the plain gradients."""
    layers = model()
    stages = [lambda x: layers[0](x).tanh(), lambda x: layers[1](x).sigmoid(), lambda x: layers[2](x).sin()]
    wanted = gradients(chain(*map(compiled, stages)), layers)
    torch.compiler.reset()
    count = Counted()
    counted = [count(name, compiled(stage)) for name, stage in zip("abc", stages, strict=True)]
    assert_equal(gradients(NAMES[place].put(*counted), layers), wanted)
    assert all(count.calls[name] <= n for name, n in zip("abc", NAMES[place].runs, strict=True))


def test_an_eager_region_holds_a_compiled_model_with_dropout():
    """Random numbers drawn by compiled code are the same ones in the replay."""
    drop = nn.Dropout(0.5)
    torch.manual_seed(0)
    x = torch.ones(64, requires_grad=True)
    out = recompute(chain(compiled(lambda x: drop(x).exp()), torch.sin))(x)
    out.sum().backward()
    kept = out.detach() != torch.ones(()).exp().sin()
    dropped = (x.grad == 0) if kept.any() else kept
    assert torch.equal(dropped, ~torch.isclose(out.detach(), torch.tensor(2.0).exp().sin()))


def test_without_grad_inside_a_compiled_frame():
    """Under `no_grad` a compiled region is the plain compiled call."""
    layers = model()
    run = compiled(recompute(chain(layers[0], layers[1], layers[2])))
    x = torch.ones(4, 8)
    with torch.no_grad():
        assert torch.equal(run(x), layers[2](layers[1](layers[0](x))))


def test_a_compiled_step_twice_compiles_once():
    """A second step with the same shapes does not compile again: nothing of a region is a guard that fails."""
    layers, compilations = model(), []

    def backend(graph, _):
        compilations.append(0)
        return graph

    run = torch.compile(recompute(chain(layers[0], layers[1], layers[2])), backend=backend, fullgraph=True)
    for _ in range(3):
        run(torch.ones(4, 8)).sum().backward()
    assert len(compilations) == 1
