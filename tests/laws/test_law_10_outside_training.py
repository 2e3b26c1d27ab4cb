"""Law 10: without grad, and in inference mode, a region is the plain call and nothing else."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from laws.cases import CASES
from laws.placements import PLACEMENTS, PLAIN
from laws.table import for_each
from laws.watch import Bytes, Counted, Operations, assert_same, left_by, no_collector
from torch_recompute import OnHost, checkpoint, doing_recompute, get_recompute_data, no_recompute, recompute, replay
from torch_recompute import save_for_recompute as save

modes = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


def hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.mark.parametrize("case", [c for c in CASES if not c.backward_inside], ids=lambda case: case.name)
@for_each(placement=PLACEMENTS, mode=[torch.no_grad, torch.inference_mode])
def test_the_result_is_the_plain_one(case, placement, mode):
    """Outputs, buffers and the random state are those of the plain call, whatever is placed around it."""
    assert_same(left_without_grad(case, placement, mode), once(case, PLAIN, mode))


def left_without_grad(case, placement, mode):
    program = case.build()
    with mode():
        result = placement.put(*program.stages)(*program.args, **program.kwargs)
    return left_by(program, result)


once = functools.cache(left_without_grad)  # for the plain program


@modes
def test_nothing_is_set_up(mode):
    """No hooks are pushed, no state is read, no store is asked, nothing counts as a region."""
    asked = []

    class Asked:
        put = get = capture = restore = lambda *_: asked.append(0)

    def body(x):
        assert hooks() is None
        assert not doing_recompute()
        return x.exp()

    with mode():
        recompute(body, inputs=Asked(), state=[Asked()], check="values")(torch.ones(3, requires_grad=True))
        no_recompute(body, store=Asked())(torch.ones(3))
    assert asked == []


@modes
def test_the_arguments_and_the_result_are_the_very_objects(mode):
    """What is passed and returned is not wrapped, detached or copied."""
    x, marker = torch.ones(3, requires_grad=True), object()
    with mode():
        got_x, got_marker = recompute(lambda x, marker: (x, marker))(x, marker)
    assert got_x is x
    assert got_marker is marker


@modes
def test_no_operation_and_no_byte_more(mode):
    """The operations and the live bytes are those of the plain call, and there is no garbage."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    with mode(), Bytes(), Operations():
        layer(torch.ones(4, 8))  # what torch keeps after a first run is not ours
    for run in (layer, recompute(layer), recompute(no_recompute(layer))):
        x = torch.ones(4, 8)
        with mode(), no_collector(), Bytes() as live, Operations() as seen:
            out = run(x)  # noqa: F841
            counts = dict(seen.counts), live.live
        if run is layer:
            wanted = counts
        assert counts == wanted


@modes
def test_iterators_and_anything_else_may_be_passed(mode):
    """What a region refuses in training, since it must call twice, is no problem when it is called once."""
    with mode():
        assert recompute(lambda parts: next(parts) + 1)(iter([1])) == 2


@modes
def test_saving_and_choosing_do_nothing(mode):
    """`save_for_recompute` may be given tensors that require grad, twice; `replay(fn)` is `fn`; nothing is kept."""
    count = Counted()

    def body(x):
        save(x)
        save(x)
        return replay(count("choice", torch.exp))(x)

    x = torch.ones(3, requires_grad=True)
    with mode():
        for _ in range(2):
            recompute(body)(x)
    assert count.calls["choice"] == 2
    with pytest.raises(AssertionError):
        get_recompute_data()


@modes
def test_checkpoint_is_the_plain_call_too(mode):
    """`checkpoint` pushes no hooks either."""
    with mode():
        checkpoint(lambda x: [hooks()] == [None] and x, torch.ones(3), use_reentrant=False)
        assert hooks() is None


def test_a_part_without_grad_inside_a_region():
    """A region under `no_grad` inside another runs with it, keeps its own choices, and changes no gradient."""
    count = Counted()
    choose = replay(count("choice", lambda x: x.argmax()))
    inner = recompute(lambda x: x.exp() + choose(x))

    def body(x):
        with torch.no_grad():
            scale = inner(x)
        return (x * scale).sin().exp()

    for run in (body, recompute(body), recompute(recompute(body))):
        x = torch.ones(3, requires_grad=True)
        run(x).sum().backward()
        if run is body:
            wanted = x.grad
        assert torch.equal(x.grad, wanted)
    assert count.calls["choice"] == 3


def test_grad_enabled_inside_a_plain_call():
    """A function that turns grad on for itself under `no_grad` trains as the plain call does."""

    def body(x):
        with torch.enable_grad():
            return x.exp().sin()

    grads = []
    for run in (body, recompute(body)):
        x = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            out = run(x)
        out.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_nothing_that_requires_grad():
    """With grad enabled but nothing to train, no graph is made and nothing is kept."""
    layer, x = nn.Linear(8, 8).requires_grad_(False), torch.ones(4, 8)
    for store in (None, OnHost()):
        with no_collector(), Bytes() as seen:
            out = recompute(layer, inputs=store)(x)
            assert not out.requires_grad
            assert seen.live == out.untyped_storage().nbytes()
            del out
            assert seen.live == 0
