"""Law 5: a replay finds each module as the forward found it, and leaves it as backward found it."""

from __future__ import annotations

import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from laws.module_steps import STEPS, Layer, left, rand, run, same
from laws.placements import PLACEMENTS, PLAIN, Placement
from laws.table import for_each
from laws.watch import Bytes, no_collector, raised
from torch_recompute import ChangedError, Choice, Plan, apply, checkpoint, recompute

MORE = [
    Placement("in a closure", lambda a, b, c: recompute(lambda *args: c(b(a(*args)))), (2, 2, 2)),
    Placement("twice", lambda a, b, c: recompute(recompute(lambda *args: c(b(a(*args))))), (2, 2, 2)),
    Placement("to its end", lambda a, b, c: recompute(lambda *args: c(b(a(*args))), early_stop=False), (2, 2, 2)),
    Placement("checkpoint", lambda a, b, c: lambda *args: c(b(checkpoint(a, *args))), (2, 1, 1)),
    Placement("method", lambda a, b, c: lambda *args: c(b(recompute(a.forward)(*args))), (2, 1, 1)),
    Placement("plan", lambda a, b, c: planned(a, b, c), (2, 1, 1)),
]


def planned(a, b, c):
    model = nn.Sequential(a)
    apply(model, Plan((Choice(("0",)),)))
    return lambda *args: c(b(model(*args)))


@pytest.mark.parametrize("name", STEPS)
@for_each(placement=[*PLACEMENTS, *MORE])
def test_a_replay_finds_modules_as_the_forward_found_them(name, placement):
    """Whatever a module held in forward it holds in the replay, and afterwards what backward found."""
    got, wanted = left(name, placement), left(name, PLAIN)
    assert same(got, wanted), f"{got} instead of {wanted}"


@pytest.mark.parametrize("name", STEPS)
@for_each(placement=[PLACEMENTS[0], PLACEMENTS[5]])
def test_nothing_that_a_replay_finds_outlives_the_step(name, placement):
    """What was kept of modules dies with the step, by reference counting alone."""
    run(name, placement)  # what torch and the scan of modules make once
    with no_collector():
        run(name, placement)


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_computed_weights_between_steps(norm):
    """Between steps exactly the bytes of plain steps are alive: each computed weight once."""

    def alive(wrap):
        seen = []
        with warnings.catch_warnings(), Bytes() as made:
            warnings.simplefilter("ignore", FutureWarning)  # the old functions say that there are new ones
            layers = [nn.Sequential(norm(nn.Linear(64, 64)), nn.Tanh()) for _ in range(3)]
            for _ in range(3):
                y = torch.ones(2, 64, requires_grad=True)
                for layer in layers:
                    y = wrap(layer)(y)
                y.sum().backward()
                del y
                seen.append(made.live)
        return seen

    assert alive(recompute) == alive(lambda layer: layer)


@pytest.mark.parametrize("container", [dict.fromkeys(range(1001), 1), [1] * 1001, {*range(1001)}])
def test_a_container_too_large_to_be_put_back(container):
    """What was removed from more than a thousand entries is not there: an error with module, attribute and numbers."""
    layer, x = Layer(lambda layer, y: y.exp() * len(layer.table), table=container), rand(2, 4)
    y = recompute(layer)(x).sum()
    container.clear()
    said = raised(ChangedError, y.backward)
    assert "attribute 'table' of Layer" in said
    assert "1001 entries then, 0 now" in said


def test_objects_that_are_no_plain_data_are_left_alone():
    """A handle keeps its own state: what it counts in a replay it counts, as a trainer or a wrapper does."""
    handle = SimpleNamespace(calls=0, lock=threading.Lock())

    def body(layer, y):
        layer.handle.calls += 1
        return y.exp()

    recompute(Layer(body, handle=handle))(rand(2, 4)).sum().backward()
    assert handle.calls == 2


def test_modules_are_left_as_they_are_if_a_replay_fails():
    """What was put back for a replay that raises is taken away again."""

    def body(layer, y):
        layer.calls += 1
        if layer.fails[0][0]:
            raise ValueError
        return y.exp() * layer.scale

    layer = Layer(body, calls=0, scale=2.0, fails=[[False]])
    y = recompute(layer)(rand(2, 4)).sum()
    layer.scale, layer.fails[0][0] = 3.0, True
    raised(ValueError, y.backward)
    assert (layer.calls, layer.scale) == (1, 3.0)


def test_modules_that_did_not_change_are_not_written_to():
    """Where a module is as the forward found it, no attribute is set on it, nor a dictionary of its own written."""

    class Watched(dict):
        writes = 0

        def __setitem__(self, key, value):
            Watched.writes += 1
            super().__setitem__(key, value)

    layer = Layer(lambda layer, y: y.exp() * layer.scales[0], scales=[2.0])
    for module in layer.modules():
        module.__dict__["_parameters"] = Watched(module._parameters)
    recompute(layer)(rand(2, 4)).sum().backward()
    assert Watched.writes == 0
