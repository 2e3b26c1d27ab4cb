"""Law 5, random numbers: the replay draws those of its forward, and takes none from anyone else."""

from __future__ import annotations

import pytest
import torch

from laws.watch import ones
from torch_recompute import no_recompute, recompute


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
