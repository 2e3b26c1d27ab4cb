"""Law 8, exceptions: one in forward, replay or backward leaves no byte, no hook and no thread state."""

from __future__ import annotations

import contextlib

import pytest
import torch

from laws.cases import BY_NAME
from laws.placements import NAMES, PLACEMENTS, PLAIN, chain
from laws.table import for_each
from laws.watch import Bytes, Counted, assert_same, big, no_collector, plain_step, raised, step
from torch_recompute import RecomputeError, no_recompute, recompute


@pytest.fixture(scope="module", autouse=True)
def warm():
    """What torch sets up in a first run, such as cached constants, is not ours."""
    with Bytes():
        step(BY_NAME["smooth"], PLAIN)
        step(BY_NAME["mlp"], PLAIN)


class Broken(Exception):
    pass


def breaks(when):
    """An identity that raises in forward, in the replay (its second run) or in backward."""
    runs = []

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            runs.append(0)
            if len(runs) == {"forward": 1, "replay": 2}.get(when):
                raise Broken
            ctx.save_for_backward(x * 2)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if when == "backward":
                raise Broken
            return grad * (ctx.saved_tensors[0] / ctx.saved_tensors[0])

    return Breaks.apply


@pytest.mark.parametrize("when", ["forward", "replay", "backward"])
@for_each(placement=(PLAIN, *PLACEMENTS), where=range(3))
def test_after_an_exception_nothing_leaks_and_the_next_step_is_right(placement, when, where):
    """Whichever stage raises, and whenever: no byte, hook or thread state is left, and the next step is right."""
    if when == "replay" and placement.runs[where] == 1:
        return
    broken = breaks(when)  # classes are cycles, so it is made here

    def one_step():
        stages = [torch.exp, torch.sin, torch.exp]
        stages[where] = chain(stages[where], broken, torch.cos)
        placement.put(*stages)(big()).sum().backward()

    with no_collector(), Bytes() as seen:
        raised(Broken, one_step)
        assert seen.live == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.is_grad_enabled()
    assert no_recompute(doubled)(torch.ones(1)).item() == 2  # not taken for a call inside a region
    assert_same(step(BY_NAME["mlp"], placement), plain_step(BY_NAME["mlp"]))


def doubled(x):
    return x * 2


def test_a_replay_that_fails_lets_go_of_what_it_had_rebuilt():
    """While the graph lives on after an exception in its replay, it holds what it held before."""
    x, broken = big(), breaks("replay")
    with no_collector(), Bytes() as seen:
        out = recompute(chain(torch.exp, torch.sin, torch.exp, broken))(x)
        before = seen.live
        raised(Broken, out.sum().backward)
        assert seen.live == before
        del out
        assert seen.live == 0


@pytest.mark.parametrize("wrap", [recompute, no_recompute])
def test_an_exception_caught_inside_a_region(wrap):
    """A region that catches what a region or saved call in it raised goes on: right gradient and counts."""
    count = Counted()
    later = no_recompute(count("later", torch.exp))

    @wrap
    def fails(x):
        raise Broken(x.exp())

    def body(x):
        with contextlib.suppress(Broken):
            fails(x)
        return later(x.sin()).cos()

    for run in (body, recompute(body)):
        x = big()
        run(x).sum().backward()
        if run is body:
            wanted = x.grad
        assert torch.equal(x.grad, wanted)
    assert count.calls["later"] == 2


def _tries_a_region(x):
    def other(x):
        return no_recompute(torch.mm)(x.sin(), x.cos()).sin()

    def fast(x):
        raise Broken(no_recompute(torch.exp)(x.sin()).cos())

    try:
        return recompute(fast)(x)
    except Broken:
        return recompute(other)(x)


def _tries_a_saved_call(x):
    def fast(a, b):
        raise Broken((a * b).view(9).exp())

    try:
        return no_recompute(fast)(x.sin(), x)
    except Broken:
        return no_recompute(torch.mm)(x.sin(), x.cos())


def _tries_without_grad(x):
    with torch.no_grad():
        found = _tries_a_region(x)
    return found * recompute(lambda x: no_recompute(torch.exp)(x).sin())(x)


@pytest.mark.parametrize("tries", [_tries_a_region, _tries_a_saved_call, _tries_without_grad])
def test_what_is_called_in_the_place_of_what_failed(tries):
    """A region that catches an error of a fast way, and calls another, does the same in its replay."""
    grads = []
    for wrap in (recompute, lambda fn: fn):
        x = torch.linspace(0, 1, 9).view(3, 3).requires_grad_()
        wrap(lambda x: tries(x).exp().sin())(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", ["whole", "nested at the start", "saved middle", "region in a saved call"])
def test_after_a_mismatch_nothing_leaks(name):
    """A replay that saves something else leaves no byte behind its error."""
    calls = []

    def other(x):
        calls.append(0)
        return x.exp() if len(calls) == 1 else x[:32].exp().repeat(2, 1)

    stages = [torch.exp, torch.sin, torch.exp]
    stages[1 if name == "region in a saved call" else 0] = other
    with no_collector(), Bytes() as seen:
        raised(RecomputeError, lambda: NAMES[name].put(*stages)(big()).sum().backward())
        assert seen.live == 0
