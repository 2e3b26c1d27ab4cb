"""Law 12: inside `torch.compile` a region is traced, without a graph break; around a compiled function it is eager."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from laws.module_steps import STEPS, left, same
from laws.placements import NAMES, Placement, chain
from laws.watch import Counted, equal
from support.compiler import COMPILES, as_they_are
from support.training import gradients
from torch_recompute import (
    MismatchError,
    checkpoint,
    doing_recompute,
    get_recompute_data,
    no_recompute,
    recompute,
    replay,
    save_for_recompute,
)
from torch_recompute.engine import taken

pytestmark = COMPILES


def compiled(fn):
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


def model():
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)])


def batch():
    return torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.nightly), "aot_eager"])
def test_compiled_autograd_over_an_eager_region(backend):
    """A backward that is itself compiled opens what eager regions dropped: their replays are not compiled with it."""

    def step(wrap, keep, layers, backward):
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        block = wrap(lambda x: keep(layers[0])(x).tanh().exp())
        backward(layers[2](block(layers[2](block(x)).sin())).square().sum())
        return [x.grad, *(p.grad for m in (layers[0], layers[2]) for p in m.parameters())]

    wanted = step(lambda f: f, lambda f: f, model(), torch.Tensor.backward)
    with torch._dynamo.config.patch(compiled_autograd=True):
        backward = torch.compile(lambda loss: loss.backward(), backend=backend)
        assert equal(step(recompute, no_recompute, model(), backward), wanted)


PLACES = ["whole", "parts", "nested at the end", "saved middle", "saved everything", "region in a saved call"]


@pytest.mark.parametrize("place", PLACES)
def test_regions_are_traced_without_a_graph_break(place):
    """`fullgraph=True` accepts every placement; output and gradients are the plain eager ones."""
    layers = model()
    stages = [lambda x: layers[0](x).tanh(), lambda x: layers[1](x).sigmoid(), lambda x: layers[2](x).sin()]
    wanted = gradients(layers, batch(), run=chain(*stages))
    assert equal(gradients(layers, batch(), run=compiled(NAMES[place].put(*stages))), wanted)


def test_checkpoint_is_traced():
    """`checkpoint` too, with keyword arguments and its options."""
    layers = model()

    def body(x, *, scale):
        return layers[2](layers[1](layers[0](x)).tanh()) * scale

    def run(x):
        return checkpoint(body, x, use_reentrant=False, preserve_rng_state=False, determinism_check="none", scale=2.0)

    wanted = gradients(layers, batch(), run=lambda x: body(x, scale=2.0))
    assert equal(gradients(layers, batch(), run=compiled(run)), wanted)


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
    wanted = gradients(block, batch(), wrap=False)
    assert equal(gradients(block, batch(), run=compiled(block)), wanted)


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

    wanted = gradients(layers, batch(), run=body)
    assert equal(gradients(layers, batch(), run=compiled(recompute(body))), wanted)


@pytest.mark.parametrize("wrap", [recompute, no_recompute, replay], ids=lambda wrap: wrap.__name__)
def test_functions_that_are_made_and_wrapped_while_traced(wrap):
    """A function that closes over a module may be made, and wrapped, within a region that is traced."""
    layers = model()

    def body(x):
        first = layers[0]
        act = wrap(lambda y: torch.sign(first(y)).detach() if wrap is replay else first(y).tanh())
        return layers[2](layers[1](act(x) + first(x)).sin())

    def plainly(x):
        act = torch.sign(layers[0](x)).detach() if wrap is replay else layers[0](x).tanh()
        return layers[2](layers[1](act + layers[0](x)).sin())

    assert equal(gradients(layers, batch(), run=compiled(recompute(body))), gradients(layers, batch(), run=plainly))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_an_exported_region_is_the_plain_call(place, strict):
    """What `torch.export` makes of regions and saved calls trains as without them."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers = model()
            stages = [lambda x: layers[0](x).tanh(), lambda x: layers[1](x).sigmoid(), lambda x: layers[2](x).sin()]
            self.run = NAMES[place].put(*stages)

        def forward(self, x):
            return self.run(x)

    net = Net()
    wanted = gradients(net, batch())
    exported = torch.export.export(net, (torch.ones(4, 8),), strict=strict).module()
    assert equal(gradients(net, batch(), run=exported), wanted)


@pytest.mark.parametrize("exporting", [torch.compiler.is_exporting, torch.compiler.is_dynamo_compiling])
def test_the_graph_is_one_and_recomputes(exporting, monkeypatch):
    """The partitioner is told: fewer tensors cross from the forward graph to the backward graph.

    So they are where Dynamo takes each graph for one that is exported, as torch 2.11's does.
    """
    monkeypatch.setattr(torch.compiler, "is_exporting", exporting)
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
    wanted = gradients(layers, batch(), run=chain(*map(compiled, stages)))
    torch.compiler.reset()
    count = Counted()
    counted = [count(name, compiled(stage)) for name, stage in zip("abc", stages, strict=True)]
    assert equal(gradients(layers, batch(), run=NAMES[place].put(*counted)), wanted)
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


class Layer(nn.Module):
    """A layer that cannot be traced whole: a graph break in it, or an assignment to its buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("ema", torch.zeros(8))
        self.wrap = self.keep = self.choose = lambda fn: fn
        self.calls = []


class Assigns(Layer):
    def forward(self, x):
        y = self.linear(x)
        self.ema = 0.9 * self.ema + y.detach().mean(0)
        return (y * self.ema).tanh()


class Counts(Layer):
    def forward(self, x):
        y = self.norm(self.linear(x)).sin()
        torch._dynamo.graph_break()
        return self.norm(y).exp()


class Draws(Layer):
    def forward(self, x):
        y = self.drop(self.linear(x)).sin()
        torch._dynamo.graph_break()
        return self.drop(y).exp()


class Keeps(Layer):
    def kept(self, y):
        self.calls.append("kept")
        return y.cos()

    def chosen(self, y):
        self.calls.append("chosen")
        return y.topk(4, -1).indices

    def forward(self, x):
        y = self.keep(self.kept)(self.linear(x).sin())
        torch._dynamo.graph_break()
        index = self.choose(self.chosen)(y)
        return self.keep(self.linear)(y.exp()).gather(-1, index).exp()


class Carries(Layer):
    def forward(self, x):
        y = self.linear(x).sin()
        torch._dynamo.graph_break()
        if doing_recompute():
            (index,) = get_recompute_data()
        else:
            index = y.topk(4, -1).indices
            save_for_recompute(index)
        return y.exp().gather(-1, index).exp()


class Holds(Assigns):
    def forward(self, x):
        y = self.wrap(self.linear)(x).sin()
        y = self.wrap(super().forward)(y)
        return self.wrap(lambda y: self.norm(y).exp())(y)


UNTRACEABLE = [Assigns, Counts, Draws, Keeps, Carries, Holds]


def two_steps(run, layer):
    """Outputs, gradients and buffers of two steps."""
    found = [tensor for _ in range(2) for tensor in gradients(layer, batch(), run=run)]
    return [*found, *(buffer.clone() for buffer in layer.buffers())]


@pytest.mark.parametrize("kind", UNTRACEABLE)
def test_a_region_that_cannot_be_traced_runs_by_the_engine(kind):
    """A graph break or an assignment in a region: gradients and buffers of the plain step; saved calls made once."""
    torch.manual_seed(0)
    layer = kind()
    others = {backend: copy.deepcopy(layer) for backend in ("eager", "aot_eager")}
    wanted = two_steps(layer, layer)
    for backend, other in others.items():
        torch.compiler.reset()
        other.wrap, other.keep, other.choose = recompute, no_recompute, replay
        run = torch.compile(lambda x, other=other: recompute(other)(x) * 1, backend=backend)
        with pytest.warns(RuntimeWarning, match="is recomputed inside torch.compile, which cannot trace it whole"):
            assert equal(two_steps(run, other), wanted), backend
        assert other.calls == layer.calls
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(recompute(kind()))(torch.ones(4, 8))


@pytest.mark.filterwarnings("ignore:.* which cannot trace it whole:RuntimeWarning")
def test_what_such_a_region_calls_is_compiled():
    """It is compiled between its breaks, once for forward and replay; the engine is not."""
    seen = []

    def backend(graph, _):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_method")
        return graph.forward

    def inner(x):
        return x.cos().exp()

    def body(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return inner(y).tanh()

    run = torch.compile(recompute(body), backend=backend)
    for _ in range(2):
        run(torch.linspace(0, 1, 8).requires_grad_()).sum().backward()
    assert sorted(seen) == ["cos", "exp", "sin", "tanh"]


@pytest.mark.filterwarnings("ignore:.* which cannot trace it whole:RuntimeWarning")
def test_parts_that_are_compiled_otherwise_in_the_replay_are_named():
    """Where a part is another in the replay, the error says that parts are compiled and how not to."""
    count = []

    def body(x):
        torch._dynamo.graph_break()
        count.append(0)
        return x.sin().exp() if len(count) == 1 else x.expand(2, 8).cos().exp()

    out = torch.compile(recompute(body), backend="eager")(torch.linspace(0, 1, 8).requires_grad_())
    with pytest.raises(MismatchError, match=r"recompute\(torch.compiler.disable\(fn\)\)"):
        out.sum().backward()


def test_a_compiled_function_is_given_a_view():
    """Of an input that is a view compiled code saves an alias in forward, and in the replay the input itself."""
    weight, f = torch.ones(8, requires_grad=True), compiled(lambda x, w: x * (x * w).sin().sum(-1, keepdim=True))

    def run(wrap):
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        out = torch.cat([wrap(f)(x[:2], weight), wrap(f)(x[2:], weight)])
        return torch.autograd.grad(out.sum(), [x, weight])

    assert equal(run(recompute), run(lambda f: f))


WRITES = {
    "average": lambda held, h: held.lerp_(h.detach().mean(0), 0.5),
    "count": lambda held, h: held.add_(1),
    "two steps": lambda held, h: held.mul_(0.5).add_(h.detach().mean(0)),
    "a part": lambda held, h: held[2:5].copy_(h.detach()[0, 2:5]),
}
READS = {
    "once": lambda h, held: h * held.exp(),
    "twice": lambda h, held: (h * held).tanh().sin() * held,
    "a view": lambda h, held: (h @ held.view(2, 4).view(8).diag()).sin(),
}


class Written(nn.Module):
    """A layer that writes to a buffer and reads it, in one order or the other, in the region or around it."""

    def __init__(self, write, read, order, region):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("held", torch.linspace(0.5, 1, 8))
        self.write, self.read, self.order, self.region = write, read, order, region

    def forward(self, x):
        if self.order == "written outside, read":
            self.write(self.held, x)
            return self.region(self.body)(x)
        out = self.region(self.body)(x)
        if self.order == "read, written outside":
            self.write(self.held, x)
        return out

    def body(self, x):
        h = self.inner(x)
        if self.order == "written, read":
            self.write(self.held, h)
        # autograd saves none of what is read, which the program itself would then have changed
        out = self.read(h, self.held * 1)
        if self.order == "read, written":
            self.write(self.held, h)
        return out


ORDERS = ["written, read", "read, written", "read, written outside", "written outside, read"]


def written(write, kinds, region):
    """A layer for each of several ways to read, and orders."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {f"{read}: {order}": Written(WRITES[write], READS[read], order, region) for read, order in kinds}
    )


def steps_of(layers, run):
    """What two steps leave of each layer."""
    results = {}
    for scale in (1, 2):
        inputs = [(torch.linspace(-1, 1, 32).view(4, 8) * scale).requires_grad_() for _ in layers]
        sum(out.sum() for out in run(inputs)).backward()
        for x, (name, layer) in zip(inputs, layers.items(), strict=True):
            left = {"x": x.grad, "weight": layer.inner.weight.grad.clone(), "buffer": layer.held.clone()}
            results.update({f"{name}, step {scale}, {what}": tensor for what, tensor in left.items()})
    return results


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("write", WRITES)
def test_a_buffer_that_a_compiled_region_reads_and_something_writes(write, backend):
    """What backward runs again reads what the forward read, not what the buffer is by then.

    Inductor's passes over the joint graph remove clones, and make a write to a part in place in the buffer itself.
    """

    def each(layers):
        every = list(layers.values())
        return lambda inputs: [every[i](x) for i, x in enumerate(inputs)]

    kinds = [*itertools.product(READS, ORDERS)] if backend == "aot_eager" else [("once", "written, read")]
    plain, other = written(write, kinds, lambda fn: fn), written(write, kinds, recompute)
    wanted = steps_of(plain, each(plain))
    for name, got in steps_of(other, torch.compile(each(other), fullgraph=True, backend=backend)).items():
        if backend == "inductor":
            torch.testing.assert_close(got, wanted[name])
        else:
            assert torch.equal(got, wanted[name]), name


class Child(Block):
    """A layer that recomputes its parent's forward."""

    def forward(self, x):
        return checkpoint(super().forward, x, False)


def test_a_parents_forward_is_traced():
    """`checkpoint(super().forward, x)` is one graph, with gradients and without."""
    torch.manual_seed(0)
    block = Child()
    wanted = gradients(block, batch(), run=lambda x: block.body(x.view(1, 4, 8).expand(2, 4, 8), save=False))
    assert equal(gradients(block, batch(), run=compiled(block)), wanted)
    with torch.no_grad():
        compiled(block)(torch.ones(4, 8))


def placed_and_compiled(region, backend):
    put = lambda a, b, c: torch.compile(region(lambda *x: c(b(a(*x)))), backend=backend)  # noqa: E731
    return Placement("compiled", put, (2, 2, 2))


@pytest.mark.filterwarnings("ignore:.*cannot trace it whole:RuntimeWarning")
@pytest.mark.parametrize("name", STEPS)
def test_modules_that_change_in_a_step(name, monkeypatch):
    """Whatever a step changes of its modules, a compiled region gives what the compiled program without it gives."""
    monkeypatch.setattr(taken, "MANY", 10)  # the compiler looks at each entry
    wanted = left(name, placed_and_compiled(lambda fn: fn, "eager"))
    for backend in ("eager", "aot_eager"):
        if (name, backend) == ("maml", "aot_eager"):
            continue  # AOTAutograd has no second derivatives
        if (name, backend) == ("old_spectral_norm", "aot_eager"):
            torch._dynamo.reset()
            wanted = left(name, placed_and_compiled(lambda fn: fn, backend))  # it adds up in another order
        torch._dynamo.reset()
        got = left(name, placed_and_compiled(recompute, backend))
        assert same(got, wanted), f"{got} instead of {wanted}, by {backend}"
