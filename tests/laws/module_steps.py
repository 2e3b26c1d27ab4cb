"""Rows of the table of law 5: training steps that change what a module holds between a forward and its backward.

A row gets the placed stages as a function of the module, and returns everything that it leaves.
"""

from __future__ import annotations

import collections
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from laws.watch import bits
from torch_recompute.engine import taken

STEPS = {}


def step(make):
    STEPS[make.__name__] = make
    return make


class Layer(nn.Module):
    """A layer whose forward is a function of itself and its input."""

    def __init__(self, body=None, **attributes):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4))
        self.body = body
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        y = (self.linear(x) * self.weight).sin()
        return y if self.body is None else self.body(self, y)


class Lent(nn.Module):
    """A layer, to which `functional_call` lends weights, and a region around it."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x):
        return self.call(x)


class Tagged(nn.Module):
    """A layer that reads an attribute of its input."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, h):
        return self.layer(h) * h.tag


def grads(*modules):
    return [None if p.grad is None else p.grad.clone() for m in modules for p in m.parameters()]


def rand(*size):
    return torch.randn(*size, requires_grad=True)


# --- weights --------------------------------------------------------------------------------------------------------


@step
def functional_call_with_other_weights(place):
    layer, x = Layer(), rand(2, 4)
    other = {name: torch.randn_like(p).requires_grad_() for name, p in layer.named_parameters()}
    y = functional_call(Lent(layer, place(layer)), {f"layer.{name}": value for name, value in other.items()}, (x,))
    y.sum().backward()
    return [x.grad, *(value.grad for value in other.values()), *grads(layer)]


@step
def functional_call_with_computed_weights(place):
    layer, x = Layer(), rand(2, 4)
    sources = {name: torch.randn_like(p).requires_grad_() for name, p in layer.named_parameters()}
    y = functional_call(
        Lent(layer, place(layer)), {f"layer.{name}": value.tanh() for name, value in sources.items()}, (x,)
    )
    y.sum().backward()
    return [x.grad, *(value.grad for value in sources.values()), *grads(layer)]


@step
def maml(place):
    """Two inner steps with `create_graph=True`, an outer backward through both."""
    layer, x, target = Layer(), torch.randn(3, 4), torch.randn(3, 4)
    holder = Lent(layer, place(layer))
    fast = dict(holder.named_parameters())
    for _ in range(2):
        loss = F.mse_loss(functional_call(holder, fast, (x,)), target)
        found = torch.autograd.grad(loss, [*fast.values()], create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), found, strict=True)}
    F.mse_loss(functional_call(holder, fast, (x,)), target).backward()
    return grads(layer)


@step
def weight_in_the_dictionary_for_one_forward(place):
    layer, x = Layer(), rand(2, 4)
    own, layer._parameters["weight"] = layer._parameters["weight"], nn.Parameter(torch.randn(4))
    other = layer._parameters["weight"]
    y = place(layer)(x)
    layer._parameters["weight"] = own
    y.sum().backward()
    return [x.grad, other.grad, own.grad, layer.weight is own]


@step
def parameter_replaced_before_backward(place):
    layer, x = Layer(), rand(2, 4)
    own = layer.linear.weight
    y = place(layer)(x)
    layer.linear.weight = nn.Parameter(torch.zeros(4, 4))
    y.sum().backward()
    return [x.grad, own.grad, layer.linear.weight.grad, layer.linear.weight]


@step
def submodule_replaced_before_backward(place):
    layer, x = Layer(), rand(2, 4)
    own, y = layer.linear, place(layer)(x)
    layer.linear = nn.Linear(4, 4, bias=False)
    y.sum().backward()
    return [x.grad, *grads(own, layer), type(layer.linear.bias)]


@step
def submodule_added_and_deleted_before_backward(place):
    def body(layer, y):
        return layer.extra(y) if hasattr(layer, "extra") else layer.last(y)

    layer, x = Layer(body, last=nn.Linear(4, 4)), rand(2, 4)
    last, y = layer.last, place(layer)(x)
    del layer.last
    layer.extra = nn.Linear(4, 4)
    y.sum().backward()
    return [x.grad, *grads(last, layer), [name for name, _ in layer.named_children()]]


@step
def submodule_made_by_the_first_forward(place):
    def body(layer, y):
        if not hasattr(layer, "late"):
            layer.late = nn.Linear(4, 4)
            nn.init.constant_(layer.late.weight, 0.5)
            nn.init.zeros_(layer.late.bias)
        return layer.late(y).exp()

    layer, x = Layer(body), rand(2, 4)
    call = place(layer)
    y = call(x)
    late = layer.late
    y.sum().backward()
    return [x.grad, *grads(layer)] if late is layer.late else ["another module"]


@step
def nothing_that_changes(place):
    layer, x = Layer(), rand(2, 4)
    y = place(layer)(x)
    (y * 2).sum().backward()
    return [x.grad, *grads(layer)]


# --- attributes -----------------------------------------------------------------------------------------------------


def scaled(layer, y):
    return y * layer.scale + (y * layer.cond).exp()


@step
def attributes_set_before_each_forward(place):
    layer, x = Layer(scaled, scale=1.0, cond=torch.zeros(4)), rand(2, 4)
    call, y = place(layer), x
    for i in range(3):
        layer.scale, layer.cond = 1.5 + i, torch.full((4,), 0.1 * i)
        y = call(y)
    layer.scale, layer.cond = None, None
    y.sum().backward()
    return [x.grad, *grads(layer), layer.scale, layer.cond]


@step
def attribute_with_a_history(place):
    layer, x, source = Layer(scaled, scale=2.0), rand(2, 4), rand(4)
    call, y = place(layer), x
    for i in range(2):
        layer.cond = source.sin() * (i + 1)
        y = call(y)
    layer.cond = None
    y.sum().backward()
    return [x.grad, source.grad, *grads(layer)]


@step
def attribute_of_a_child(place):
    layer, x = Layer(lambda layer, y: layer.child(y)), rand(2, 4)
    layer.child = Layer(scaled, scale=2.0, cond=torch.ones(4))
    y = place(layer)(x)
    layer.child.scale, layer.child.cond = 7.0, torch.zeros(4)
    y.sum().backward()
    return [x.grad, *grads(layer), layer.child.scale, layer.child.cond]


@step
def attribute_deleted_before_backward(place):
    layer, x = Layer(scaled, scale=2.0, cond=torch.ones(4)), rand(2, 4)
    y = place(layer)(x)
    del layer.scale
    y.sum().backward()
    return [x.grad, *grads(layer), hasattr(layer, "scale")]


@step
def attribute_added_before_backward(place):
    layer, x = Layer(lambda layer, y: y.exp() * getattr(layer, "scale", 1.0)), rand(2, 4)
    y = place(layer)(x)
    layer.scale = 5.0
    y.sum().backward()
    return [x.grad, *grads(layer), layer.scale]


@step
def attribute_of_a_layer_of_torch(place):
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.LeakyReLU(0.1)), rand(2, 4)
    y = place(layer)(x)
    layer[1].eps, layer[2].negative_slope = 10.0, 0.9
    y.sum().backward()
    return [x.grad, *grads(layer), layer[1].eps, layer[2].negative_slope]


@step
def memory_of_the_segment_before(place):
    """As in Transformer-XL: what the layer has seen last is read by its next call."""

    def body(layer, y):
        before, layer.memory = layer.memory, y.detach()
        return torch.cat([before, y]).exp().mean(0, keepdim=True) * y

    layer, x = Layer(body, memory=torch.zeros(1, 4)), rand(2, 4)
    call, y = place(layer), x
    for _ in range(3):
        y = call(y)
    y.sum().backward()
    return [x.grad, *grads(layer), layer.memory]


@step
def cache_made_by_the_first_forward(place):
    def body(layer, y):
        if layer.cache is None:
            layer.cache = layer.weight.detach().exp()
        return (y * layer.cache).exp()

    layer, x = Layer(body, cache=None), rand(2, 4)
    call = place(layer)
    call(call(x)).sum().backward()
    return [x.grad, *grads(layer), layer.cache]


@step
def counter_of_calls(place):
    def body(layer, y):
        layer.calls += 1
        return y.exp() * layer.calls

    layer, x = Layer(body, calls=0), rand(2, 4)
    call = place(layer)
    call(call(call(x))).sum().backward()
    return [x.grad, *grads(layer), layer.calls]


@step
def result_left_as_an_attribute(place):
    """As the auxiliary loss of a mixture of experts: the parent reads what the forward left."""

    def body(layer, y):
        layer.aux = y.square().mean()
        return y.exp()

    layer, x = Layer(body, aux=None), rand(2, 4)
    call = place(layer)
    y = call(x)
    aux = layer.aux
    (y.sum() + aux.detach()).backward()
    return [x.grad, *grads(layer), layer.aux is aux]


@step
def attribute_of_a_config(place):
    config = SimpleNamespace(scale=2.0, cond=torch.ones(4), act="gelu")
    layer, x = Layer(lambda layer, y: scaled(layer.config, y), config=config), rand(2, 4)
    y = place(layer)(x)
    config.scale, config.cond = 9.0, torch.zeros(4)
    y.sum().backward()
    return [x.grad, *grads(layer), config.scale, config.cond]


@step
def containers_changed_in_place(place):
    """Lists, dicts, sets and queues: what was appended, replaced or removed."""

    def body(layer, y):
        scale = sum(layer.list) + layer.dict["scale"] + len(layer.set) + layer.queue[0]
        scale += layer.dict.get("training", 0.0)  # a name that every module has as well
        layer.list.append(1.0)
        layer.dict["calls"] = layer.dict.get("calls", 0) + 1
        return (y * scale * layer.list[0]).sin() * layer.dict["calls"]

    layer = Layer(body, list=[0.5], dict={"scale": 1.0}, set={1}, queue=collections.deque([0.25]))
    x, call = rand(2, 4), place(layer)
    y = call(call(x))
    layer.list[0], layer.dict["scale"], layer.dict["training"] = 7.0, 3.0, 1.0
    layer.set.add(2)
    layer.queue.appendleft(4.0)
    y.sum().backward()
    return [x.grad, *grads(layer), layer.list, layer.dict, layer.set, list(layer.queue)]


@step
def large_containers_that_grow(place):
    """As a list of statistics that every call appends to."""

    def body(layer, y):
        layer.list.append(1)
        layer.dict[len(layer.dict)] = 1
        return y.exp() * len(layer.list) * len(layer.dict)

    more = taken.MANY + 1
    layer = Layer(body, list=[1] * more, dict=dict.fromkeys(range(more), 1))
    x, call = rand(2, 4), place(layer)
    y = call(call(x))
    layer.list += [2, 3]
    y.sum().backward()
    return [x.grad, *grads(layer), layer.list, layer.dict]


@step
def tensors_in_a_container(place):
    layer, x = Layer(lambda layer, y: (y * layer.conds[0]).exp(), conds=[torch.ones(4)]), rand(2, 4)
    call, y = place(layer), x
    for i in range(2):
        layer.conds[0] = torch.full((4,), 0.2 + i)
        y = call(y)
    layer.conds[0] = torch.zeros(4)
    y.sum().backward()
    return [x.grad, *grads(layer), layer.conds]


@step
def method_of_the_instance(place):
    layer, x = Layer(lambda layer, y: layer.act(y)), rand(2, 4)
    layer.act = torch.exp
    y = place(layer)(x)
    layer.act = torch.sin
    y.sum().backward()
    return [x.grad, *grads(layer), layer.act is torch.sin]


@step
def buffer_assigned_by_the_forward(place):
    def body(layer, y):
        layer.ema = 0.9 * layer.ema + 0.1 * y.detach().mean(0)
        return (y * layer.ema).exp()

    layer, x = Layer(body), rand(2, 4)
    layer.register_buffer("ema", torch.ones(4))
    call = place(layer)
    call(call(x)).sum().backward()
    return [x.grad, *grads(layer), layer.ema]


@step
def old_weight_norm(place):
    with pytest.warns(FutureWarning):
        layer = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))
    x, call = rand(2, 4), place(layer)
    call(call(x)).sin().sum().backward()
    return [x.grad, *grads(layer)]


@step
def old_spectral_norm(place):
    layer, x = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4))), rand(2, 4)
    call = place(layer)
    call(call(x)).sin().sum().backward()
    return [x.grad, *grads(layer), layer[0].weight_u]


# --- generators -----------------------------------------------------------------------------------------------------


def noisy(generator_of):
    def body(layer, y):
        return y.exp() * torch.rand(y.shape, generator=generator_of(layer))

    return body


def generators(generator_of, **attributes):
    def run(place):
        layer, x = Layer(noisy(generator_of), **attributes), rand(2, 4)
        generator_of(layer).manual_seed(3)
        call = place(layer)
        call(call(x)).sum().backward()
        return [x.grad, *grads(layer), generator_of(layer).get_state()]

    return run


STEPS["generator"] = lambda place: generators(lambda m: m.g, g=torch.Generator())(place)
STEPS["generator of a child"] = lambda place: generators(lambda m: m.child.g, child=Layer(g=torch.Generator()))(place)
STEPS["generator in a list"] = lambda place: generators(lambda m: m.gs[0], gs=[torch.Generator()])(place)
STEPS["generator in a config"] = lambda place: generators(
    lambda m: m.config.g, config=SimpleNamespace(g=torch.Generator(), scale=1)
)(place)


# --- tensors with attributes ----------------------------------------------------------------------------------------


@step
def attribute_of_an_argument(place):
    def body(layer, y):
        return (y * layer.cond).exp()

    layer, x = Layer(body, cond=1.0), rand(2, 4)

    h = x.sin()
    h.tag = 3.0
    place(Tagged(layer))(h).sum().backward()
    return [x.grad, *grads(layer)]


# --- what a row leaves ----------------------------------------------------------------------------------------------


def run(name, placement):
    torch.manual_seed(0)
    return STEPS[name](lambda module: placement.put(module, torch.exp, lambda y: (y.sin() * y).tanh()))


def left(name, placement):
    found = run(name, placement)
    return tree_map(lambda x: bits(x) if isinstance(x, torch.Tensor) else x, found)


def same(one, other):
    flat, spec = torch.utils._pytree.tree_flatten(one)
    others, other_spec = torch.utils._pytree.tree_flatten(other)
    return spec == other_spec and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(flat, others, strict=True)
    )
