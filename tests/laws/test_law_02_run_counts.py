"""Law 2: once in forward, at most once per backward call and once for one split in two; a saved call never again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import GraphExecGroup

from laws.cases import CASES
from laws.placements import NAMES, PLACEMENTS, PLAIN, chain
from laws.table import for_each
from laws.watch import Counted, Operations, backward
from torch_recompute import checkpoint, no_recompute, recompute

places = for_each(placement=PLACEMENTS)


def placed(placement, count, make=lambda: torch.exp):
    """Three counted stages that each save something, placed."""
    return placement.put(*(count(name, make()) for name in "abc"))


def runs(count):
    return tuple(count.calls[name] for name in "abc")


@places
def test_forward_runs_once(placement):
    """Before backward, and when backward never comes, each stage has run once."""
    count = Counted()
    out = placed(placement, count)(torch.ones(4, requires_grad=True))
    assert runs(count) == (1, 1, 1)
    del out
    assert runs(count) == (1, 1, 1)


@places
def test_a_step_runs_each_stage_as_often_as_its_regions_say(placement):
    """Once in forward, once more for each region around it whose replay gets that far, never more in a saved call."""
    count = Counted()
    placed(placement, count)(torch.ones(4, requires_grad=True)).sum().backward()
    assert runs(count) == placement.runs


@places
def test_each_backward_call_replays_once(placement):
    """Three backward calls through a retained graph replay three times; what was saved never runs again."""
    count = Counted()
    out = placed(placement, count)(torch.ones(4, requires_grad=True)).sum()
    for _ in range(3):
        out.backward(retain_graph=True)
    assert runs(count) == placement.after(3)


@pytest.mark.parametrize("case", [c for c in CASES if not c.backward_inside], ids=lambda case: case.name)
def test_whole_programs_run_twice(case):
    """For every row of the table: one region around all runs it twice; one around a saved call runs it once."""
    for wrap, most in ((recompute, 2), (lambda fn: recompute(no_recompute(fn)), 1)):
        program, count = case.build(), Counted()
        run = wrap(count("all", chain(*program.stages)))
        backward(run(*program.args, **program.kwargs))
        assert count.calls["all"] <= most
        assert count.calls["all"] == most or case.name == "nothing_saved"


def test_a_region_that_saves_nothing_is_not_replayed():
    """Sums, views and copies need no replay, nor does a region whose saved tensors are its own inputs and weights."""
    count, weight = Counted(), torch.ones(4, requires_grad=True)
    for fn in (lambda x: (x + 1).flatten().sum(), lambda x: x * weight, lambda x: (x * x.t(), x[0].sin())):
        x = torch.ones(4, 4, requires_grad=True)
        backward(recompute(count("fn", fn))(x))
    assert count.calls["fn"] == 3


def split_in_two(run, first, order):
    """Backward as zero-bubble pipelines do it: inputs' gradients first and weights' later, or the other way round."""
    layer, x = first
    loss = run(x).square().sum()
    halves = [[x], list(layer.parameters())]
    if not order:
        halves.reverse()
    with GraphExecGroup():
        one = torch.autograd.grad(loss, halves[0], retain_graph=True)
        two = torch.autograd.grad(loss, halves[1])
    return (one, two) if order else (two, one)


@pytest.mark.parametrize("inputs_first", [True, False])
@pytest.mark.parametrize("nested", [False, True])
def test_a_backward_split_in_two_replays_once(inputs_first, nested):
    """Inputs first, then weights, or the other way round: the two share one replay, and the gradients are plain."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    count = Counted()
    inner = count("layer", layer)
    run = recompute(lambda x: recompute(inner)(x.sin())) if nested else recompute(inner)
    got = split_in_two(run, (layer, x), inputs_first)
    plain = (lambda x: layer(x.sin())) if nested else layer
    wanted = split_in_two(plain, (layer, x), inputs_first)
    for a, b in zip(got, wanted, strict=True):
        assert all(map(torch.equal, a, b))
    assert count.calls["layer"] == 2


class Scaled(nn.Module):
    """A layer and a weight that is not saved where it is used."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8))


SPLIT = {
    "a scale made of a weight": lambda m, x: m.layer(x).tanh() * m.weight.exp(),
    "a shift made of a weight": lambda m, x: m.layer(x).tanh() + m.weight.exp() * torch.full((8,), 2.0),
    "a bias": lambda m, x: m.layer(x).tanh() + m.weight,
    "a gate that leads to no input": lambda m, x: x * m.layer(torch.full((4, 8), 2.0)).sigmoid() * m.weight,
    "the branch before is done with": lambda m, x: m.layer(x.sin()) * m.weight + x.exp(),
    "a weight frozen": lambda m, x: m.layer(x.exp()).tanh() * m.weight.detach().exp(),
}


@pytest.mark.parametrize("fn", SPLIT.values(), ids=SPLIT.keys())
def test_what_the_second_half_needs_stays_whatever_it_is(fn):
    """Two halves share a replay also where weights are used in ways that do not save them."""
    count = Counted()
    module, x = Scaled(), torch.randn(4, 8, requires_grad=True)
    frozen = "detach" in fn.__code__.co_names
    wanted = split_in_two(lambda x: fn(module, x), (module.layer if frozen else module, x), True)
    got = split_in_two(recompute(count("fn", lambda x: fn(module, x))), (module.layer if frozen else module, x), True)
    for a, b in zip(got, wanted, strict=True):
        assert all(map(torch.equal, a, b))
    assert count.calls["fn"] == 2


@pytest.mark.parametrize("trained", [True, False])
def test_a_retained_graph_keeps_no_replay(trained):
    """A call that retains its graph and leaves nothing out lets go of what it rebuilt, with frozen weights too."""
    count = Counted()
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    layer[0].requires_grad_(trained)
    out = recompute(count("layer", layer))(torch.randn(4, 8, requires_grad=True)).sum()
    for calls in (2, 3, 4):
        out.backward(retain_graph=True)
        assert count.calls["layer"] == calls


@places
def test_an_exec_group_replays_once(placement):
    """Backward calls inside one `GraphExecGroup` share their replays."""
    count = Counted()
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    run = placement.put(*map(count, "abc", layers))
    x = torch.randn(2, 4, requires_grad=True)
    parameters = [p for layer in layers for p in layer.parameters()]
    loss = run(x).sum()
    with GraphExecGroup():
        got = torch.autograd.grad(loss, [x], retain_graph=True)
        got += torch.autograd.grad(loss, parameters)
    assert all(a <= b for a, b in zip(runs(count), placement.after(2 if placement.later else 1), strict=True))
    wanted = torch.autograd.grad(PLAIN.put(*layers)(x).sum(), [x, *parameters])
    assert all(map(torch.equal, got, wanted))


def test_a_saved_call_costs_no_operation_in_backward():
    """With its only matmul saved, the backward of a region runs the backward's matmuls and not one more."""
    weight = torch.ones(8, 8, requires_grad=True)
    matmul = no_recompute(torch.mm)
    x = torch.ones(4, 8, requires_grad=True)
    out = recompute(lambda x: matmul(x.sin(), weight).exp())(x).sum()
    with Operations() as seen:
        out.backward()
    assert seen.counts["mm"] == 2
    out = recompute(lambda x: torch.mm(x.sin(), weight).exp())(x).sum()
    with Operations() as seen:
        out.backward()
    assert seen.counts["mm"] == 3


def test_two_outputs_backward_separately():
    """Each of two backward calls over different outputs of a region replays it once, a saved call in it never."""
    count = Counted()
    matmul = no_recompute(count("saved", lambda x: x @ x))

    def body(x):
        y = matmul(x.sin())
        return y.exp(), y.cos()

    one, two = recompute(count("region", body))(torch.ones(4, 4, requires_grad=True))
    one.sum().backward(retain_graph=True)
    two.sum().backward()
    assert count.calls == {"region": 3, "saved": 1}


def test_a_backward_that_needs_nothing_of_a_region_does_not_replay_it():
    """`autograd.grad` of an output with respect to something behind the region only runs what it needs."""
    count, weight = Counted(), torch.ones(4, requires_grad=True)
    y = recompute(count("region", lambda x: x.exp()))(torch.ones(4, requires_grad=True))
    torch.autograd.grad((y * weight).sum(), weight)
    assert count.calls["region"] == 1


def test_checkpoint_runs_twice():
    """`checkpoint` has the counts of `recompute`."""
    count = Counted()
    checkpoint(count("fn"), torch.ones(4, requires_grad=True), use_reentrant=False).sum().backward()
    assert count.calls["fn"] == 2


def test_modules_forward_hooks_run_with_the_module():
    """A module in a region has its forward hooks run once in forward and once in the replay, in the same order."""
    layer, calls = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), []
    for i, part in enumerate((layer, *layer)):
        part.register_forward_pre_hook(lambda *_, i=i: calls.append(("before", i)))
        part.register_forward_hook(lambda *_, i=i: calls.append(("after", i)))
    out = recompute(layer, early_stop=False)(torch.ones(2, 4, requires_grad=True))
    forward = list(calls)
    out.sum().backward()
    assert calls == forward * 2


def test_placements_are_what_their_counts_say():
    """The table of placements holds one that replays and one that does not, so that counting means something."""
    assert NAMES["whole"].runs == (2, 2, 2)
    assert NAMES["saved everything"].runs == (1, 1, 1)
