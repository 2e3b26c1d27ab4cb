"""Law 8: after backward, after the graph is dropped, after any exception, every byte is free without the collector."""

from __future__ import annotations

import contextvars
import gc
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import GraphExecGroup
from torch.utils.checkpoint import checkpoint as stock

from laws.cases import CASES
from laws.placements import PLACEMENTS, PLAIN, chain
from laws.table import for_each
from laws.watch import Bytes, backward, big, floating, no_collector, ones, step, weights_of
from torch_recompute import measure, no_recompute, recompute

table = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
places = for_each(placement=(PLAIN, *PLACEMENTS))
SIZE = 4 * 64 * 64  # bytes of one tensor in the tests that count them


@pytest.fixture(scope="module", autouse=True)
def warm():
    """What torch sets up in a first run, such as cached constants, is not ours."""
    with Bytes():
        for case in CASES:
            step(case, PLAIN)
    gc.freeze()  # what these imported: each test looks at all objects


def may_refuse(case, placement):
    """A region around a stage that changes its own input: such rows are tried in one region alone."""
    return case.inplace and placement.pieces


@table
@places
def test_after_backward_only_gradients_are_left(case, placement):
    """The gradients, replaced buffers and nothing else are alive after backward; there is no reference cycle."""
    if may_refuse(case, placement):
        return
    program = case.build()
    run = placement.put(*program.stages)
    with no_collector(), Bytes() as seen:
        result = run(*program.args, **program.kwargs)
        backward(result)
        del result
        for leaf in program.leaves().values():
            leaf.grad = None
        held = {b.untyped_storage()._cdata for b in program.buffers().values()}
        assert seen.live_except(held) == 0


@table
@places
def test_after_the_graph_is_dropped_nothing_is_left(case, placement):
    """A forward whose result is thrown away leaves no byte, and neither does a retained graph."""
    for retain in (False, True) if not may_refuse(case, placement) else ():
        program = case.build()
        run = placement.put(*program.stages)
        with no_collector(), Bytes() as seen:
            result = run(*program.args, **program.kwargs)
            if retain:
                outputs = floating(result)
                leaves = list(program.leaves().values())
                grads = torch.autograd.grad(outputs, leaves, weights_of(outputs), retain_graph=True, allow_unused=True)
                del outputs, grads
            del result
            held = {b.untyped_storage()._cdata for b in program.buffers().values()}
            assert seen.live_except(held) == 0


def three(x):
    return x.exp().sin().exp()


def test_a_region_keeps_its_output_and_nothing_else():
    """After forward exactly the output's bytes are alive, where the plain call keeps another."""
    for run, tensors in ((three, 2), (recompute(three), 1), (recompute(chain(recompute(three), torch.cos)), 1)):
        x = big()
        with Bytes() as seen:
            out = run(x)  # noqa: F841
            assert seen.live == tensors * SIZE


@pytest.mark.parametrize(
    ("stages", "tensors"),
    [
        ((torch.exp, torch.cos), 2),  # exp's output, which is what cos saves, and the result
        ((torch.cos, lambda y: y + 1), 1),  # cos saves the input; nothing later is recomputed from its output ...
        ((torch.cos, torch.exp), 2),  # ... unless there is something
        ((torch.sigmoid, torch.relu), 2),
        ((lambda x: x.view(-1), torch.exp), 1),  # a view of the input costs nothing
        ((lambda x: x.t() @ x, torch.exp), 2),
    ],
)
def test_what_a_saved_call_keeps(stages, tensors):
    """A saved call keeps what its backward needs and, only if something recomputed needs it, its output."""
    first, *rest = stages
    x = big()
    with Bytes() as seen:
        out = recompute(chain(no_recompute(first), *rest))(x)  # noqa: F841
        assert seen.live == tensors * SIZE


def test_a_saved_call_at_the_end_keeps_no_input():
    """What a trailing saved call saves of its input is rebuilt by the replay and not stored."""
    weight, x = big(), big()
    with Bytes() as seen:
        out = recompute(chain(torch.exp, no_recompute(lambda y: y @ weight)))(x)  # noqa: F841
        assert seen.live == SIZE


class Same(torch.autograd.Function):
    """Returns a view of what it is given, and saves that view."""

    @staticmethod
    def forward(ctx, weight):
        view = weight.view_as(weight)
        ctx.save_for_backward(view)
        return view

    @staticmethod
    def backward(ctx, grad):
        assert ctx.saved_tensors[0]._version == 0
        return grad


@pytest.mark.parametrize("inner", [lambda fn: fn, no_recompute, recompute], ids=["plain", "saved", "region"])
@pytest.mark.parametrize("outer", [lambda fn: fn, no_recompute, recompute], ids=["", "in saved", "in region"])
@pytest.mark.parametrize("retain", [False, True, None], ids=["", "retained", "without backward"])
def test_a_node_that_saves_its_own_view_of_a_parameter(inner, outer, retain):
    """Neither the forward's graph nor a replay's holds itself by such a view; the gradient is the plain one."""
    weight = nn.Parameter(torch.ones(64, 64))
    run = recompute(chain(outer(lambda x: (inner(Same.apply)(weight) * x).exp()), torch.sin))
    with no_collector(), Bytes() as seen:
        x = big()
        loss = run(x + 1).sum()
        if retain is not None:
            loss.backward(retain_graph=retain)
            wanted = (x + 1) * (x + 1).exp() * (x + 1).exp().cos()
            torch.testing.assert_close(weight.grad, wanted.detach())
            weight.grad = wanted = None
        del x, loss
        assert seen.live == 0


@pytest.mark.parametrize("retain", [False, True])
def test_rebuilt_tensors_die_one_by_one(retain):
    """During backward each rebuilt tensor dies with its node, also where the graph is retained."""

    def during(run):
        live = []

        def body(x):
            for _ in range(6):
                x = x.exp()
                x.register_hook(lambda grad: live.append(seen.live // SIZE))
                x = x.sin()
            return x

        with Bytes() as seen:
            out = run(body)(big()).sum()
            out.backward(retain_graph=retain and run is recompute)
        return live

    plain, ours = during(lambda fn: fn), during(recompute)
    assert plain == sorted(plain, reverse=True)
    assert ours == sorted(ours, reverse=True)
    assert max(a - b for a, b in zip(ours, plain, strict=True)) <= 1


def test_a_retained_graph_keeps_what_it_kept_before():
    """After a backward with `retain_graph=True` a region holds what it held after forward, as often as that is done."""
    x = big()
    region = recompute(chain(torch.exp, no_recompute(torch.cos), torch.sin, torch.exp))
    with no_collector(), Bytes() as seen:
        out = region(x).sum()
        before = seen.live
        for _ in range(3):
            out.backward(retain_graph=True)
            x.grad = None
            assert seen.live == before
        out.backward()
        x.grad = None
        del out
        assert seen.live == 0


@pytest.mark.parametrize("of", ["input", "weight", "output of one part"])
def test_a_partial_gradient_that_retains_the_graph_keeps_no_replay(of):
    """Saliency, a penalty: a gradient of some of the inputs, with the graph retained, leaves what was there before."""
    layer, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), big()
    with no_collector(), Bytes() as seen:
        h = recompute(layer)(x)
        loss = recompute(torch.exp)(h).sum()
        wanted = {"input": x, "weight": layer[0].weight, "output of one part": h}[of]
        before = seen.live
        for _ in range(2):
            (found,) = torch.autograd.grad(loss, wanted, retain_graph=True)
            del found
            assert seen.live == before
        del h, loss, wanted
        assert seen.live == 0


def test_what_a_partial_backward_did_not_read_is_freed():
    """A backward through one of two outputs leaves nothing of what its replay rebuilt for the other."""
    x = big()
    with no_collector(), Bytes() as seen:
        one, two = recompute(lambda x: (x.sin().exp().cos(), x.cos().exp().sin()))(x)
        before = seen.live
        one.sum().backward()
        x.grad = None
        assert seen.live == before
        two.sum().backward()
        x.grad = None
        del one, two
        assert seen.live == 0


def test_the_second_half_frees_what_the_first_kept():
    """Of a backward split in two nothing is left after the second half."""
    layer, x = nn.Conv1d(4, 4, 1), torch.ones(2, 4, 8, requires_grad=True)
    with no_collector(), Bytes() as seen, GraphExecGroup():
        loss = recompute(chain(layer, torch.exp, torch.sin))(x).sum()
        one = torch.autograd.grad(loss, [x], retain_graph=True)
        two = torch.autograd.grad(loss, list(layer.parameters()))
        del one, two, loss
        assert seen.live == 0


def test_a_group_holds_one_microbatch_at_a_time():
    """With the two halves of each microbatch after its forward, the peak in a group is that of one microbatch."""
    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(2))
    )
    weights, peaks = list(layers.parameters()), []

    def step(microbatches):
        with Bytes() as seen, GraphExecGroup():
            for _ in range(microbatches):
                x = torch.ones(64, 64, requires_grad=True)
                h = x
                for layer in layers:
                    h = recompute(layer)(h)
                loss = h.sum()
                torch.autograd.grad(loss, [x], retain_graph=True)
                torch.autograd.grad(loss, weights)
        return seen.peak

    with no_collector():
        peaks = [step(count) for count in (1, 2, 8)]
    assert peaks[0] == peaks[1] == peaks[2]


def test_weak_references_die_with_the_step():
    """The function, its arguments and its closure are freed when the graph is: no registry holds them."""

    class Thing:
        def __call__(self, x):
            return x.exp().sin()

    with no_collector():
        thing, layer = Thing(), nn.Linear(3, 3)
        out = recompute(chain(thing, layer))(torch.ones(2, 3, requires_grad=True))
        refs = [weakref.ref(thing), weakref.ref(layer), weakref.ref(layer.weight)]
        del thing, layer
        assert all(ref() is not None for ref in refs)
        out.sum().backward()
        del out
        assert [ref() for ref in refs] == [None] * 3


def test_bytes_are_really_counted():
    """The ruler of these tests sees a tensor that is kept, and sees it go."""
    with Bytes() as seen:
        kept = big() * 2
        assert seen.live >= SIZE
        del kept
        assert seen.live == 0


def test_a_tensor_goes_with_the_node_that_reads_it():
    """The peak is that of torch's engine, plus at most a bias's gradient, which is reduced before a node is emptied."""
    x, weight, bias = (torch.ones(*shape, requires_grad=True) for shape in ((64, 1024), (4, 1024), (4,)))

    def fn(x):
        return F.linear(x * 2, weight, bias).exp()

    peaks = []
    for run in (lambda x: stock(fn, x, use_reentrant=False), recompute(fn)):
        x.grad = weight.grad = bias.grad = None
        with measure() as lens:
            run(x).sum().backward()
        peaks.append(lens.peak_bytes)
    assert peaks[0] <= peaks[1] <= peaks[0] + bias.nbytes


def test_a_saved_call_holds_no_history_of_an_input():
    """An input that regions in a saved call keep and then change in place is freed with the rest."""

    def outer(given):
        other = given.sin()

        def saved():
            return recompute(lambda _: recompute(torch.relu_)(given))(other)

        return no_recompute(saved)()

    with no_collector():
        given = torch.ones(2, requires_grad=True).sin()
        gone = weakref.ref(given)
        result = recompute(outer)(given)
        del given, result
        assert gone() is None


def test_large_context_variables_are_passed_on() -> None:
    """A configuration of many entries is not taken apart for each call of a region; a small one is as it was."""
    large, small = {str(i): [i] for i in range(300)}, {"scale": [2.0]}
    variable, other = contextvars.ContextVar[Any]("large"), contextvars.ContextVar[Any]("small")
    seen: list[Any] = []

    def fn(x):
        seen.append((variable.get(), other.get()))
        return (x * other.get()["scale"][0]).sin()

    context = contextvars.Context()
    context.run(variable.set, large)
    context.run(other.set, small)
    x = ones(3)
    out = context.run(recompute(fn), x)
    small["scale"][0] = 3.0
    out.sum().backward()
    assert seen[0][0] is seen[1][0] is large
    assert seen[0][1] is seen[1][1] is small
    assert small == {"scale": [3.0]}
    assert torch.equal(x.grad, 2 * (2 * x).cos().detach())


TAPS = contextvars.ContextVar("taps")


class Taps:
    """An object in which a layer leaves its results."""

    def __init__(self):
        self.of = []


@pytest.mark.parametrize(
    "way", ["a list in a context variable", "an object in one", "an object", "a list", "a namespace"]
)
@pytest.mark.parametrize("does", [backward, lambda _: None], ids=["backward", "dropped"])
def test_results_that_are_left_in_a_collector(way, does):
    """They die with the collector, which a replay leaves as the forward has left it."""
    layer, x = nn.Linear(64, 64), ones(64, 64)

    def fn(x, given=None):
        y = torch.tanh(layer(x))
        taps = TAPS.get() if given is None else given
        getattr(taps, "of", taps).append(y)
        return layer(y)

    for _ in range(3):
        with no_collector():
            taps = Taps() if "object" in way else types.SimpleNamespace(of=[]) if "namespace" in way else []
            token = TAPS.set(taps)
            out = recompute(fn)(x) if "one" in way or "variable" in way else recompute(fn)(x, taps)
            TAPS.reset(token)
            found = getattr(taps, "of", taps)
            ref = weakref.ref(found[0])
            does(out)
            assert len(found) == 1
            del taps, found, out
            assert ref() is None


class KeepsStatistics(nn.Module):
    """A layer that leaves a statistic, which no backward goes through, in an attribute."""

    def __init__(self, put):
        super().__init__()
        self.layer, self.put, self.found = nn.Linear(4, 4), put, put(torch.zeros(()))

    def forward(self, x):
        y = self.layer(x).sin()
        self.found = self.put(y.square().mean())
        return y.sin()


class Found:
    """Holds a statistic."""

    def __init__(self, of):
        self.of = of


CONTAINERS = {
    "itself": lambda z: z,
    "tuple": lambda z: (z,),
    "list": lambda z: [z, 1],
    "dict": lambda z: {"of": z},
    "list in a list": lambda z: [z, [z]],
    "object": Found,
}


@pytest.mark.parametrize("put", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_a_statistic_that_a_module_keeps_holds_its_own_step_only(put):
    """No step holds the one before, and with it all before that, through what the module held then."""
    layer, inputs = KeepsStatistics(put), []
    with no_collector():
        for _ in range(3):
            x = ones(2, 4)
            inputs.append(weakref.ref(x))
            recompute(layer)(x).sum().backward()
            del x
        assert [ref() is not None for ref in inputs] == [False, False, True]


@pytest.mark.parametrize("deep", [lambda t: [t], lambda t: {"a": [t]}, lambda t: types.SimpleNamespace(a=[t])])
def test_a_constant_in_a_list_that_a_result_is_written_to_later(deep):
    """Without a backward, a region lets go of the list once Python collects garbage: it may lead to the region now."""

    def fn(x, held):
        return x.sin().exp()

    x, cache = ones(2, 4), torch.zeros(2, 4)
    with no_collector():
        seen = weakref.ref(cache)
        cache.copy_(recompute(fn)(x, deep(cache)))
        del cache
        assert seen() is not None
        assert gc.collect() == 0
        assert seen() is None


class Recurrent(nn.Module):
    """Holds its state in an attribute."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind
        self.state = kind([torch.ones(2, 4), torch.ones(2, 4)])

    def forward(self, x):
        h, c = self.state
        h = (self.layer(x) * h * c).sin()
        self.state = self.kind([h, c.sin()])
        return h.exp().sin()


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_replay_finds_the_state_that_a_module_held_in_a_container(kind):
    """Through two steps, whose graph it ties together; afterwards it is that of the last step."""
    results = []
    for wrap in (recompute, lambda fn: fn):
        torch.manual_seed(0)
        layer, x = Recurrent(kind), ones(2, 4)
        (wrap(layer)(x) + wrap(layer)(x.cos())).sum().backward()
        results.append([x.grad, layer.layer.weight.grad, *(part.detach() for part in layer.state)])
    assert all(map(torch.equal, *results))


class Masked(nn.Module):
    """A layer whose caller sets its mask before each call."""

    def __init__(self):
        super().__init__()
        self.linear, self.mask = nn.Linear(4, 4), None

    def forward(self, x):
        return (self.linear(x) * self.mask).sin()


@pytest.mark.parametrize("stays", [False, True])
def test_what_a_function_sets_in_a_module_before_its_call_is_freed(stays):
    """A result in an attribute dies with the graph, or with the attribute, where that still holds it."""
    layers, seen = nn.ModuleList([Masked()]), []

    def block(x):
        y = x.exp()
        layers[0].mask = y
        z = layers[0](y.sin())
        if not stays:
            layers[0].mask = None
        seen.append(weakref.ref(y))
        return z.exp()

    with no_collector():
        y = recompute(block)(torch.randn(2, 4, requires_grad=True))
        layers[0].mask = None
        del y
        assert seen[0]() is None
