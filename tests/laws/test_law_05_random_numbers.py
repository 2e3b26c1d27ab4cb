"""Law 5, random numbers: the replay draws those of its forward, and takes none from anyone else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from laws.placements import chain
from laws.watch import ones
from torch_recompute import no_recompute, recompute, state


def noisy(generator):
    return lambda x: (x + torch.rand(x.shape, generator=generator)).exp()


GENERATOR = torch.Generator()


def by_global(x):
    return (x + torch.rand(x.shape, generator=GENERATOR)).exp()


REACHED = {
    "argument": lambda g: lambda run: run(lambda x, g: noisy(g)(x))(ones(3), g),
    "keyword": lambda g: lambda run: run(lambda x, g=None: noisy(g)(x))(ones(3), g=g),
    "nested": lambda g: lambda run: run(lambda x, d: noisy(d["g"][0])(x))(ones(3), {"g": [g]}),
    "closure": lambda g: lambda run: run(noisy(g))(ones(3)),
    "closure of a closure": lambda g: lambda run: run(lambda x: noisy(g)(x))(ones(3)),
    "global": lambda g: lambda run: globals().update(GENERATOR=g) or run(by_global)(ones(3)),
}


@pytest.mark.parametrize("place", REACHED)
def test_explicit_generators(place):
    """A `torch.Generator` among the arguments, in a closure or global gives the replay the numbers of forward, once."""
    results = []
    for wrap in (lambda fn: fn, recompute, lambda fn: recompute(no_recompute(fn)), lambda fn: recompute(recompute(fn))):
        generator = torch.Generator().manual_seed(3)
        y = REACHED[place](generator)(wrap)
        torch.rand(5, generator=generator)
        here = generator.get_state()
        (grad,) = torch.autograd.grad(y.sum(), y)
        y.sum().backward()
        assert torch.equal(generator.get_state(), here)
        leaf = y.grad_fn.next_functions
        results.append((y.detach(), here, grad, len(leaf)))
    for got in results[1:]:
        assert torch.equal(got[0], results[0][0])
        assert torch.equal(got[1], results[0][1])


AMBIENTS = {
    "numpy": (lambda: [state.NumpyRng()], lambda: float(np.random.rand()), lambda: np.random.seed(0)),
    "random": (lambda: [state.PythonRng()], random.random, lambda: random.seed(0)),
}


@pytest.mark.parametrize("kind", AMBIENTS)
@pytest.mark.parametrize("saved", [False, True])
def test_numpy_and_random_on_request(kind, saved):
    """With `state=` the replay draws the numbers of forward, also past a saved call, and takes none from the caller."""
    states, draw, seed = AMBIENTS[kind]
    results = []
    for wrap in (lambda fn: fn, lambda fn: recompute(fn, state=states())):
        seed()
        first = no_recompute(lambda x: x.sin() * draw()) if saved else lambda x: x.sin() * draw()
        x = ones(3)
        y = wrap(lambda x: (first(x) * draw()).exp() * draw())(x)  # noqa: B023
        between = draw()
        y.sum().backward()
        results.append((x.grad, between, draw()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@pytest.mark.parametrize("saved", [(), (0,), (1,), (0, 2)])
def test_random_numbers_after_a_saved_call(saved):
    """A skipped saved call leaves the generator as it left it in forward, so later dropout is the same."""
    results = []
    for wrap in (lambda fn: fn, recompute):
        stages = [nn.Dropout(0.5), lambda x: F.dropout(x, 0.3) + torch.rand(8), nn.Dropout(0.2)]
        if wrap is recompute:
            stages = [no_recompute(s) if i in saved else s for i, s in enumerate(stages)]
        torch.manual_seed(0)
        x = ones(4, 8)
        y = wrap(chain(*stages, torch.exp))(x)
        torch.rand(3)
        y.sum().backward()
        results.append((x.grad, torch.rand(3)))
    assert all(map(torch.equal, *results))
