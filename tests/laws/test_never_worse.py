"""Where PyTorch's checkpoint gives the plain gradient so does a region, whatever shape the program has.

Each row is a training step that somebody writes, given how the region's function is wrapped. A row returns what it
leaves: gradients, and whatever else must be as in the plain step.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as stock

from laws.module_steps import same
from laws.watch import bits, on_threads, raised
from torch_recompute import Choice, Plan, RecomputeError, apply, checkpoint, recompute

STEPS = {}


def step(make):
    STEPS[make.__name__] = make
    return make


def rand(*size):
    return torch.randn(*size, requires_grad=True)


# --- an argument that has another name --------------------------------------------------------------------------------


class Reads(nn.Module):
    """A layer that reads the scale of a context which it holds as well."""

    def __init__(self, context):
        super().__init__()
        self.linear, self.context = nn.Linear(4, 4), context

    def forward(self, x):
        return (self.linear(x) * self.context.scale).sin()

    def method(self, x):
        return (self.linear(x) * self.context.scale).cos()


def set_before(read):
    """A block that sets something of what it is given, and then calls what reads it under another name."""

    def run(wrap):
        context, x = SimpleNamespace(scale=1.0), rand(2, 4)
        layer = Reads(context)

        def block(x, ctx, value):
            ctx.scale = value
            return read(layer, context)(x)

        call = wrap(block)
        y = call(call(x, context, 2.0), context, 3.0)
        y.sum().backward()
        return [x.grad, layer.linear.weight.grad, context.scale]

    return run


STEPS["an object that a module holds"] = set_before(lambda layer, context: layer)
STEPS["an object that a closure holds"] = set_before(lambda layer, context: lambda x: (x * context.scale).sin())
STEPS["an object that a bound method reads"] = set_before(lambda layer, context: layer.method)
STEPS["an object that a partial reads"] = set_before(
    lambda layer, context: functools.partial(lambda c, x: (x * c.scale).sin(), context)
)


class Listed(nn.Module):
    """A layer that reads a list, a dict or a set that its caller writes to."""

    def __init__(self, held, read):
        super().__init__()
        self.linear, self.held, self.read = nn.Linear(4, 4), held, read

    def forward(self, x):
        return (self.linear(x) * self.read(self.held)).sin()


def container(make, write, read, by_name=False):
    def run(wrap):
        held, x = make(), rand(2, 4)
        layer = Listed(held, read)

        def block(x, held, value):
            write(held, value)
            return layer(x)

        call = wrap(block)
        y = x
        for value in (2.0, 3.0):
            y = call(y, held=held, value=value) if by_name else call(y, held, value)
        y.sum().backward()
        return [x.grad, layer.linear.weight.grad, held]

    return run


STEPS["a list"] = container(lambda: [1.0], lambda h, v: h.__setitem__(0, v), lambda h: h[0])
STEPS["a list that grows"] = container(lambda: [1.0], lambda h, v: h.append(v), sum)
STEPS["a list that is emptied"] = container(
    lambda: [1.0, 2.0, 3.0], lambda h, v: (h.clear(), h.append(v)), lambda h: h[0] * len(h)
)
STEPS["a dict"] = container(lambda: {"scale": 1.0}, lambda h, v: h.update(scale=v), lambda h: h["scale"])
STEPS["a dict by keyword"] = container(
    lambda: {"scale": 1.0}, lambda h, v: h.update(scale=v), lambda h: h["scale"], by_name=True
)
STEPS["a set"] = container(lambda: {1.0}, lambda h, v: h.add(v), sum)
STEPS["a list in a dict"] = container(
    lambda: {"scales": [1.0]}, lambda h, v: h["scales"].append(v), lambda h: h["scales"][-1]
)
STEPS["a list of tensors"] = container(
    lambda: [torch.ones(4)], lambda h, v: h.__setitem__(0, torch.full((4,), v)), lambda h: h[0]
)
STEPS["a list of results"] = container(
    lambda: [torch.ones(4, requires_grad=True).exp()], lambda h, v: h.append(h[-1] * v), lambda h: h[-1]
)


@step
def a_list_within_an_object(wrap):
    context, x = SimpleNamespace(scales=[1.0]), rand(2, 4)
    layer = Listed(context.scales, lambda held: held[-1])

    def block(x, ctx, value):
        ctx.scales.append(value)
        return layer(x)

    call = wrap(block)
    call(call(x, context, 2.0), context, 3.0).sum().backward()
    return [x.grad, layer.linear.weight.grad, context.scales]


@step
def two_arguments_that_are_one(wrap):
    held, x = [1.0], rand(2, 4)

    def block(x, a, b):
        a.append(2.0)
        return (x * sum(b) * len(a)).sin().exp()

    call = wrap(block)
    call(call(x, held, held), held, held).sum().backward()
    return [x.grad, held]


@step
def what_the_caller_changes_before_backward(wrap):
    """As a pipeline sets the next microbatch's before this one's backward."""
    context, held, x = SimpleNamespace(scale=2.0), [3.0], rand(2, 4)
    layer = Reads(context)
    y = wrap(lambda x, ctx, h: layer(x) * ctx.scale * h[0])(x, context, held)
    context.scale, held[0] = 7.0, 8.0
    y.sum().backward()
    return [x.grad, layer.linear.weight.grad, context.scale, held]


@step
def the_order_of_a_dict_changes(wrap):
    x, held = rand(2, 4), {"a": 1.0, "b": 2.0}
    y = wrap(lambda x, held: (x * next(iter(held.values()))).sin().exp())(x, held)
    held["a"] = held.pop("a")
    y.sum().backward()
    return [x.grad, [*held]]


@step
def the_order_of_children_changes(wrap):
    layers, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), rand(2, 4)
    y = wrap(layers)(x)
    layers._modules["0"] = layers._modules.pop("0")
    y.sum().backward()
    return [x.grad, [*layers._modules]]


class Node:
    """A node of a tree, which leads to its parent and its children."""

    def __init__(self, parent=None):
        self.parent, self.children, self.scale = parent, [], 2.0
        if parent is not None:
            parent.children.append(self)


@step
def an_object_that_leads_to_itself(wrap):
    root, x = Node(), rand(2, 4)
    Node(root)
    wrap(lambda x, node: (x * node.scale).sin().exp())(x, root).sum().backward()
    return [x.grad]


@step
def an_attribute_that_leads_to_itself(wrap):
    layer, x = Listed(Node(), lambda root: root.scale), rand(2, 4)
    Node(layer.held)
    wrap(layer)(x).sum().backward()
    return [x.grad]


@step
def losses_by_name(wrap):
    x, losses = rand(2, 4), collections.defaultdict(list)

    def block(x, losses, name):
        losses[name].append(x.mean())
        return x.sin().exp()

    call = wrap(block)
    y = call(call(x, losses, "a"), losses, "b")
    (y.sum() + sum(map(sum, losses.values()))).backward()
    return [x.grad, {name: len(held) for name, held in losses.items()}]


@step
def the_last_two_results(wrap):
    x = rand(2, 4)
    past = collections.deque([x * 2, x * 3], maxlen=2)

    def block(x, past):
        past.append(x.sin())
        return (x * len(past)).sin().exp()

    wrap(block)(x, past).sum().backward()
    return [x.grad, len(past)]


NAMES = contextvars.ContextVar("NAMES")


@step
def a_set_in_a_context_variable(wrap):
    x, names = rand(2, 4), {1.0}
    token = NAMES.set(names)
    y = wrap(lambda x: (x * len(NAMES.get())).sin().exp())(x)
    names.add(2.0)
    y.sum().backward()
    NAMES.reset(token)
    return [x.grad, len(names)]


# --- a model around the region ----------------------------------------------------------------------------------------


class Model(nn.Module):
    """Calls its layers by a method of its own, in regions."""

    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(4))

    def run(self, i, x):
        return self.layers[i](x).exp()

    def scaled(self, i, x):
        return (self.layers[i](x) * self.scale).exp()


def release(optimizer, p):
    optimizer.step()
    p.grad = None


def releasing(call):
    """An optimizer steps each weight as soon as its gradient is there."""

    def run(wrap):
        model = Model()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(functools.partial(release, torch.optim.SGD([p], lr=0.1)))
        for _ in range(2):
            x = torch.ones(2, 4)
            for i in range(len(model.layers)):
                x = call(wrap, model, i, x)
            x.sum().backward()
        return [*model.parameters()]

    return run


STEPS["a bound method and an optimizer in backward"] = releasing(lambda wrap, m, i, x: wrap(m.run)(i, x))
STEPS["a closure over the model and one"] = releasing(lambda wrap, m, i, x: wrap(lambda x: m.run(i, x))(x))
STEPS["a partial of the model and one"] = releasing(lambda wrap, m, i, x: wrap(functools.partial(m.run, i))(x))
STEPS["a weight that all share and one"] = releasing(lambda wrap, m, i, x: wrap(m.scaled)(i, x))


class Codebook(nn.Module):
    """A codebook larger than what is copied at every call, first updated after a warm-up."""

    def __init__(self, late):
        super().__init__()
        self.linear, self.late, self.calls = nn.Linear(4, 4), late, 0
        self.register_buffer("codes", torch.linspace(-1, 1, 5000 * 4).view(5000, 4))

    def forward(self, x):
        z = self.linear(x)
        with torch.no_grad():
            nearest = torch.cdist(z, self.codes).argmin(-1)
        chosen = self.codes[nearest]
        self.calls += 1
        if self.training and self.calls > self.late:
            with torch.no_grad():
                self.codes[nearest] = 0.9 * self.codes[nearest] + 0.1 * z.detach()
        return ((z - chosen) ** 2).exp()


def warming_up(late):
    def run(wrap):
        module, found = Codebook(late), []
        call = wrap(module)
        for _ in range(5):
            x = rand(3, 4)
            call(x).sum().backward()
            found.append(x.grad)
        return [*found, module.codes, module.linear.weight.grad]

    return run


for late in (0, 1, 3):
    STEPS[f"a large buffer that changes after {late} calls"] = warming_up(late)


class Configured(nn.Module):
    """Reads an attribute that may be empty when it is first called."""

    def __init__(self, config):
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4), config

    def forward(self, x):
        scale = self.config if isinstance(self.config, float) else self.config.get("scale", 1.0)
        return (self.linear(x) * scale).sin()


def first_seen(empty, full, other):
    def run(wrap):
        layer, x = Configured(empty), rand(2, 4)
        call = wrap(layer)
        y = call(x)
        layer.config = full
        y = call(y)
        layer.config = other
        y.sum().backward()
        return [x.grad, layer.linear.weight.grad]

    return run


STEPS["a config that is empty at the first call"] = first_seen({}, {"scale": 2.0}, {"scale": 5.0})
STEPS["one that is a dict and then a number"] = first_seen({"scale": 2.0}, 3.0, 4.0)


@step
def a_config_that_is_filled_after_the_first_call(wrap):
    layer, x = Configured({}), rand(2, 4)
    call = wrap(layer)
    y = call(x)
    layer.config["scale"] = 2.0
    y = call(y)
    layer.config["scale"] = 5.0
    y.sum().backward()
    return [x.grad, layer.linear.weight.grad, layer.config]


@step
def a_plain_object_that_is_empty_at_the_first_call(wrap):
    context = SimpleNamespace()
    layer, x = nn.Linear(4, 4), rand(2, 4)
    layer.context = context
    call = wrap(lambda x, m=layer: (m(x) * getattr(m.context, "scale", 1.0)).sin())
    y = call(x)
    context.scale = 2.0
    y = call(y)
    y.sum().backward()
    return [x.grad, layer.weight.grad, context.scale]


# --- what the function sets before it calls a module ------------------------------------------------------------------


class Scaled(nn.Module):
    """A layer with a scale: a number, or something that holds one."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, x):
        return (self.linear(x) * getattr(self.scale, "now", self.scale)).sin()


def around_a_call(enter, make=Scaled):
    """A function that sets something of a module, calls it, and puts back what was there."""

    def run(wrap):
        model, x = nn.ModuleList([make(), make()]), rand(5, 4)

        def block(x):
            layer = model[0]
            put_back = enter(layer, model[1])
            y = layer(x)
            put_back()
            return layer(y).exp()

        wrap(block)(x).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters()), *model.buffers()]

    return run


def setting(name, value, of=lambda layer: layer):
    def enter(layer, other):
        held, new = of(layer), value(other) if callable(value) else value
        put_back = functools.partial(setattr, held, name, getattr(held, name))
        setattr(held, name, new)
        return put_back

    return enter


def in_evaluation(layer, _):
    return functools.partial(layer.eval().train, True)


def by_a_hook(layer, _):
    return layer.register_forward_hook(lambda module, args, out: out * 2).remove


def normed():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


STEPS["an attribute, around a call"] = around_a_call(setting("scale", 2.0))
STEPS["a submodule, around a call"] = around_a_call(setting("linear", lambda other: other.linear))
STEPS["an object's attribute, around a call"] = around_a_call(
    setting("now", 2.0, lambda layer: layer.scale), lambda: Scaled(SimpleNamespace(now=1.0))
)
STEPS["the training flag, around a call"] = around_a_call(in_evaluation, normed)
STEPS["a hook, around a call"] = around_a_call(by_a_hook)


def with_other_parameters(buffers):
    """A module is called with parameters of its caller's, and then with its own."""

    def run(wrap):
        model, x = nn.ModuleList([normed()]), rand(6, 4)

        def block(x):
            net = model[0]
            other = {name: p * 2 for name, p in net.named_parameters()}
            if buffers:
                other.update((name, buffer.clone()) for name, buffer in net.named_buffers())
            return (torch.func.functional_call(net, other, (x,)) * net(x)).sin().exp()

        wrap(block)(x).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters()), *model.buffers()]

    return run


STEPS["functional_call, and then a call"] = with_other_parameters(False)
STEPS["functional_call with buffers, and then a call"] = with_other_parameters(True)


@step
def a_norm_that_trains_for_one_call(wrap):
    class TrainsOnce(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            y = self.norm.train()(x)
            return (self.norm.eval()(y) * 2).exp().sin()

    module, x = TrainsOnce().eval(), rand(6, 4)
    wrap(module)(x).sum().backward()
    return [x.grad, *module.buffers()]


@step
def an_object_that_becomes_plain(wrap):
    layer, x = Scaled(SimpleNamespace(now=1.0, handle=object())), rand(2, 4)
    call = wrap(layer)
    call(rand(2, 4))
    del layer.scale.handle
    layer.scale.now = 2.0
    y = call(x)
    layer.scale.now = 5.0
    y.sum().backward()
    return [x.grad, layer.linear.weight.grad, layer.scale.now]


# --- modes, threads, retained graphs ----------------------------------------------------------------------------------


class Writes(TorchDispatchMode):
    """Writes to a file while it is entered."""

    def __init__(self):
        super().__init__()
        self.open = False

    def __enter__(self):
        self.open = True
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.open = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.open:
            raise ValueError("I/O operation on closed file")
        return func(*args, **(kwargs or {}))


@step
def a_mode_that_has_ended(wrap):
    layer, x = nn.Linear(4, 4), rand(2, 4)
    with Writes():
        y = wrap(lambda x: layer(x).sin().exp())(x)
    y.sum().backward()
    return [x.grad, layer.weight.grad]


def meeting(body):
    """Two threads, as ranks, meet in the replay of a region, as in a collective."""

    def run(wrap):
        barrier, meet = threading.Barrier(2, timeout=20), []

        def block(layer, x):
            y = body(layer(x))
            if meet and wrap is not plain:
                barrier.wait()
            return body(y.exp())

        pairs = []
        for layer in (nn.Linear(4, 4), nn.Linear(4, 4)):
            x = rand(2, 4)
            pairs.append((wrap(functools.partial(block, layer))(x), x))
        meet.append(True)

        def gradient(pair):
            out, x = pair
            return torch.autograd.grad(out.sum(), x)[0]

        return [*map(gradient, pairs)] if wrap is plain else on_threads(gradient, *pairs)

    return run


def plain(fn):
    return fn


STEPS["threads that meet in a region"] = meeting(torch.sin)
STEPS["threads that meet after dropout"] = meeting(lambda y: F.dropout(y, 0.5))
STEPS["threads that meet after noise"] = meeting(lambda y: y * torch.rand(4))


@step
def a_gradient_of_the_input_and_then_a_step(wrap):
    """Saliency, a gradient penalty: a partial gradient that retains the graph, then the whole backward."""
    layers, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), rand(2, 4)
    loss = wrap(layers)(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return [first, x.grad, *(p.grad for p in layers.parameters())]


# --- a memory that has two names --------------------------------------------------------------------------------------


class WritesTo(nn.Module):
    """A layer that writes to a tensor which another one reads; `register` says as what each holds it."""

    def __init__(self, register, held):
        super().__init__()
        register(self, held)

    def forward(self, x):
        with torch.no_grad():
            self.held.copy_(1 + x.abs().mean())
        return x.sin()


class ReadsBack(WritesTo):
    """A layer that reads it."""

    def forward(self, x):
        return (x / self.held.clone().mean()).sin().exp()


def as_buffer(module, held):
    module.register_buffer("held", held)


def as_attribute(module, held):
    module.held = held


SCALE = torch.ones(())


def through_a_global(x):
    return (x * SCALE.clone()).sin().exp()


def a_closure_and(register):
    def make():
        layer = ReadsBack(register, torch.ones(()))
        held = layer.held

        def block(x):
            with torch.no_grad():
                held.copy_(1 + x.abs().mean())
            return layer(x)

        return block, held

    return make


def a_closure_and_an_object():
    held = torch.ones(())
    context = SimpleNamespace(scale=held)

    def block(x):
        held.copy_(1 + x.detach().abs().mean())
        return (x * context.scale.clone()).sin().exp()

    return block, held


class HasHelper:
    """An object whose helper holds a tensor of its own."""

    def __init__(self):
        self.scale = torch.ones(())
        self.helper = SimpleNamespace(scale=self.scale)

    def run(self, x):
        self.scale.copy_(1 + x.detach().abs().mean())
        return (x * self.helper.scale.clone()).sin().exp()


def a_method_and_its_helper():
    owner = HasHelper()
    return owner.run, owner.scale


def a_partial_and_a_global():
    def block(x, held):
        held.copy_(1 + x.detach().abs().mean())
        return through_a_global(x)

    global SCALE
    SCALE = torch.ones(())
    return functools.partial(block, held=SCALE), SCALE


def two_layers(first, second, size=(), view=None):
    def make():
        held = torch.ones(size)
        return nn.Sequential(WritesTo(first, held), ReadsBack(second, held if view is None else held[view])), held

    return make


ALIASES = {
    "two buffers": two_layers(as_buffer, as_buffer),
    "a buffer and an attribute": two_layers(as_buffer, as_attribute),
    "two attributes": two_layers(as_attribute, as_attribute),
    "two large attributes": two_layers(as_attribute, as_attribute, 40_000),
    "a large attribute and a buffer": two_layers(as_attribute, as_buffer, 40_000),
    "a buffer and a view of it": two_layers(as_buffer, as_buffer, (4, 3), 1),
    "a buffer and an attribute that is a view of it": two_layers(as_buffer, as_attribute, (4, 3), 1),
    "a closure and a buffer": a_closure_and(as_buffer),
    "a closure and an attribute": a_closure_and(as_attribute),
    "a closure and an object": a_closure_and_an_object,
    "a method and its helper": a_method_and_its_helper,
    "a partial and a global": a_partial_and_a_global,
}


def microbatches(make):
    """Two forwards that each write to the memory, and then their backwards."""

    def run(wrap):
        block, held = make()
        call, xs = wrap(block), [rand(2, 3), rand(2, 3)]
        ys = [call(x).sum() for x in xs]
        for y in ys:
            y.backward()
        return [*(x.grad for x in xs), held.clone(), held._version]

    return run


STEPS.update({f"one memory: {name}": microbatches(make) for name, make in ALIASES.items()})


@step
def an_argument_that_is_a_global(wrap):
    x = rand(2, 3)
    wrap(lambda x, scale: ((x * scale).sin() if scale is UNIT else x.cos()).exp())(x, UNIT).sum().backward()
    return [x.grad]


UNIT = torch.full((3,), 2.0)


@step
def a_closure_variable_that_is_an_attribute(wrap):
    x, unit = rand(2, 3), torch.full((3,), 2.0)
    context = SimpleNamespace(unit=unit)
    wrap(lambda x: ((x * unit).sin() if unit is context.unit else x.cos()).exp())(x).sum().backward()
    return [x.grad]


# --- what is put back before the forward ends -------------------------------------------------------------------------


def drawing(draw):
    def run(wrap):
        x = rand(8)
        y = wrap(lambda x: (x.sin() * draw()).exp().sin())(x).sum()
        torch.rand(3)  # as data, or a layer that is no region, draws before backward
        y.backward()
        return [x.grad, torch.rand(1)]

    return run


def forked():
    with torch.random.fork_rng(devices=[]):
        return torch.rand(8)


def put_back(generator):
    def draw():
        state = generator.get_state()
        drawn = torch.rand(8, generator=generator)
        generator.set_state(state)
        return drawn

    return draw


STEPS["draws in fork_rng"] = drawing(forked)
STEPS["draws after a seed, and puts the state back"] = drawing(put_back(torch.default_generator))
STEPS["draws from its own generator, and puts the state back"] = drawing(put_back(torch.Generator().manual_seed(3)))


def written_cell(by_hook):
    def run(wrap):
        layer, x, scale = nn.Linear(4, 4), rand(2, 4), 1.0

        def write(*given):
            nonlocal scale
            scale = 1 + given[-1].detach().abs().mean().item()

        def block(x):
            y = layer(x)
            if not by_hook:
                write(y)
            return (y * scale).sin().exp()

        if by_hook:
            layer.register_forward_hook(write)
        wrap(block)(x).sum().backward()
        return [x.grad, scale]

    return run


STEPS["a cell that a hook writes"] = written_cell(True)
STEPS["a cell that another function writes"] = written_cell(False)


def scaling(wrap, x, by_method):
    """A closure over a variable that something sets for a while; returns it with the result."""
    scale = 1.0

    @contextlib.contextmanager
    def scaled(value):
        nonlocal scale
        before, scale = scale, value
        yield
        scale = before

    class Scaled:
        def __init__(self, value):
            self.value = value

        def __enter__(self):
            nonlocal scale
            self.before, scale = scale, self.value

        def __exit__(self, *_):
            nonlocal scale
            scale = self.before

    def read(x):
        return (x * scale).sin()

    context = Scaled if by_method else scaled

    def block(x):
        with context(2.0):
            y = read(x).exp()
        return (y * scale).sin()

    return block, wrap(block)(x)


@step
def a_cell_that_is_set_for_a_while(wrap):
    x = rand(2, 4)
    y = scaling(wrap, x, by_method=False)[1]  # the functions are gone
    y.sum().backward()
    return [x.grad]


@step
def a_cell_that_a_method_sets_for_a_while(wrap):
    x = rand(2, 4)
    block, y = scaling(wrap, x, by_method=True)
    y.sum().backward()
    return [x.grad, block(x.detach())]


def key(make):
    def run(wrap):
        x, scale, scales = rand(2, 4), 2.0, {}

        def act(x):
            return (x * scale * scales.get(chosen, 1.0)).sin()

        chosen = make(act)
        scales[chosen] = 3.0
        wrap(lambda x: (chosen(x) * scales.get(chosen, 1.0)).exp())(x).sum().backward()
        return [x.grad]

    return run


STEPS["a function that is a key"] = key(lambda act: act)
STEPS["a partial that is a key"] = key(functools.partial)


@step
def a_function_with_attributes(wrap):
    x = rand(2, 4)

    def scaled(x):
        scaled.scale += 1
        return (x * scaled.scale).sin().exp()

    def block(x):
        scaled.scale = 1.0
        return scaled(x)

    wrap(block)(x).sum().backward()
    return [x.grad, scaled.scale]


def two_of_eleven():
    held = set(range(11))
    for one in {*held} - {1, 8}:
        held.discard(one)
    return held


def each_in_turn(x, held):
    for place, one in enumerate(held, 1):
        x = (x * (1 + 0.1 * one * place)).sin()
    return x.exp()


@step
def a_set_that_has_shrunk(wrap):
    x, held = rand(2, 4), two_of_eleven()
    wrap(lambda x, held: (held.add(5), each_in_turn(x, held))[1])(x, held).sum().backward()
    return [x.grad, [*held]]


@step
def a_set_that_has_shrunk_and_grows_later(wrap):
    x, held = rand(2, 4), two_of_eleven()
    y = wrap(each_in_turn)(x, held)
    held.add(5)
    y.sum().backward()
    return [x.grad, sorted(held)]


@step
def threads_that_need_one_tensor(wrap):
    """The second thread's replay begins while the first one's runs, and ends after it."""
    scale, turns, meet = torch.ones(4), [threading.Event(), threading.Event(), threading.Event()], []

    def block(x, number):
        y = x * scale.clone()
        if meet and wrap is not plain:
            turns[number].set()
            turns[number + 1].wait(0.3)
        return (y * scale.clone()).exp().sin()

    call, xs = wrap(block), [rand(2, 4), rand(2, 4)]
    ys = [call(x, number) for number, x in enumerate(xs)]
    scale.fill_(5.0)
    meet.append(True)

    def gradient(number):
        if number and wrap is not plain:
            turns[0].wait(5)
        found = torch.autograd.grad(ys[number].sum(), xs[number])[0]
        turns[2 - number].set()
        return found

    found = [gradient(0), gradient(1)] if wrap is plain else on_threads(gradient, (0), (1))
    return [*found, scale.clone()]


# --- the law ----------------------------------------------------------------------------------------------------------


def planned(fn):
    if not isinstance(fn, nn.Module):
        return recompute(fn)
    model = nn.Sequential(fn)
    apply(model, Plan((Choice(("0",)),)))
    return model


WRAPS = {
    "recompute": recompute,
    "twice": lambda fn: recompute(recompute(fn)),
    "in a closure": lambda fn: recompute(lambda *args, **kwargs: fn(*args, **kwargs)),
    "checkpoint": lambda fn: functools.partial(checkpoint, fn, use_reentrant=False),
    "plan": planned,
}


def left(name, wrap):
    torch.manual_seed(0)
    found = STEPS[name](wrap)
    return tree_map(lambda value: bits(value) if isinstance(value, torch.Tensor) else value, found)


@pytest.mark.parametrize("way", WRAPS)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_leaves_what_the_plain_step_leaves(name, way):
    """Gradients, and what the program holds afterwards, are those of the plain step to the last bit."""
    got, wanted = left(name, WRAPS[way]), left(name, plain)
    assert same(got, wanted), f"{got} instead of {wanted}"


@pytest.mark.parametrize("way", [way for way in WRAPS if way != "plan"])
def test_a_gradient_through_an_argument_is_an_error(way):
    """A replay has no operations behind its arguments: it raises, and says what to write."""
    x = rand(2, 4)
    y = x.sin() * 2

    def block(y, x):
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (slope * y).exp()

    text = raised(RecomputeError, lambda: WRAPS[way](block)(y, x).sum().backward())
    assert "is a leaf there" in text
    assert "Compute it inside the region" in text


def test_pytorchs_checkpoint_gives_the_gradient_of_most_rows():
    """The rows are programs that PyTorch's own checkpoint gives the plain gradient of its input for, most of them."""
    right = []
    for name in STEPS:
        try:
            found = left(name, lambda fn: functools.partial(stock, fn, use_reentrant=False))[0]
        except CheckpointError:
            found = None
        right.append(same(found, left(name, plain)[0]))
    assert sum(right) > len(right) / 2
