"""Rows of the table: views, in-place operations, and signatures of every kind."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.utils import _pytree

from laws.table import case, program, rand


@case
def views():
    return program(
        lambda x: x.exp().t(),
        lambda y: (y[1:, ::2].tanh(), y.reshape(-1).unfold(0, 4, 2).sin(), y.unsqueeze(0).expand(2, 8, 4)),
        lambda p: p[0].sum() * p[1].square() + p[2].cos().mean(),
    )


@case
def view_of_the_input_returned():
    return program(lambda x: x.view(8, 4), lambda x: (x, x.t(), x * 2), lambda p: (p[0], p[1][1:].exp(), p[2].sin()))


@case
def strided_inputs_that_overlap():
    base = rand(6, 8)
    return program(lambda a, b: a * b, torch.exp, lambda y: y * y, args=(base[:4], base.detach()[2:, :]), holds=(base,))


def _in_place(x):
    y = x * 2
    y.add_(1).sigmoid_()
    z = y.clone()
    z[:, 0] = 3.0
    z[1:].mul_(y[1:])
    return z * y


@case
def in_place_inside():
    return program(torch.sin, _in_place, torch.tanh)


@case(inplace=True)
def in_place_on_what_a_stage_was_given():
    return program(lambda x: x.exp() + 1, lambda y: y.mul_(2).cos(), lambda z: z.add_(1) * 3)


@case(inplace=True)
def in_place_on_a_view_of_it():
    def halves(y):
        y[:, :4].mul_(2)
        return y.sin()

    return program(lambda x: x * 3, halves, lambda z: z.exp())


class Running(nn.Module):
    """Keeps averages of what it sees: one buffer updated in place, one replaced."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.count = self.count + 1
        return (x - self.mean).exp() / self.count


@case
def running_averages():
    return program(nn.Linear(8, 8), Running(), torch.tanh)


# --- signatures -----------------------------------------------------------------------------------------------------


@case
def keywords_and_nests():
    scale = rand(8)

    def first(x, *, mask, options, nothing=None, flag=True):
        assert nothing is None
        assert flag is True
        return {"y": x.exp() * options["scale"] * mask, "more": [x.sin(), (options["power"], "text")]}

    def second(d):
        return d["y"].pow(d["more"][1][0]), d["more"][0].tanh()

    options = {"scale": scale, "power": 3}
    return program(first, second, lambda p: p[0] * p[1], mask=torch.ones(4, 8), options=options)


@dataclass
class Batch:
    """A dataclass that PyTorch knows as a pytree."""

    x: torch.Tensor
    weights: list
    size: int


_pytree.register_dataclass(Batch)


class Result(NamedTuple):
    value: torch.Tensor
    index: torch.Tensor


@case
def dataclass_in_and_named_tuple_out():
    batch = Batch(rand(4, 8), [rand(8), None], 2)
    return program(
        lambda b: Batch(b.x.exp() * b.weights[0], [b.x.tanh(), None], b.size),
        lambda b: Result(b.x.pow(b.size) * b.weights[0], b.x.argmax(-1)),
        lambda r: Result(r.value.sin(), r.index),
        args=(batch,),
    )


@case
def constants_among_the_outputs():
    return program(
        lambda x: (x.exp(), x.detach() * 2, 7),
        lambda p: (p[0] * p[1], p[1] + p[2], None),
        lambda p: (p[0].sin(), p[1], 3),
    )


@case
def closures():
    scale, layer = rand(8), nn.Linear(8, 8)
    return program(
        lambda x: x * scale, lambda x: layer(x).exp() * scale, functools.partial(torch.mul, scale), holds=(scale, layer)
    )


@case
def no_input_requires_grad():
    return program(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), args=(rand(4, 8, grad=False),))


@case
def one_tensor_passed_twice():
    x = rand(4, 8)
    return program(lambda a, b, c: (a * b, c.exp()), lambda p: p[0].sin() * p[1], torch.tanh, args=(x, x, x))


@case
def parts_without_grad():
    def half(x):
        with torch.no_grad():
            scale = x.exp().sum()
        return x.sin() * scale

    return program(half, torch.tanh, lambda x: x.detach().exp() * x)


@case(backward_inside=True)
def gradient_taken_inside():
    def penalty(x):
        x = x.sin()
        energy = x.pow(3).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return slope.square() + x

    return program(nn.Linear(8, 8), penalty, torch.tanh)


@case
def data_dependent_branch():
    return program(nn.Linear(8, 8), lambda x: x.exp() if x.sum() > 0 else x.tanh().sin(), torch.tanh)
