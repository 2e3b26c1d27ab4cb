"""Law 1: gradients are those of the plain call, to the last bit; never silently wrong ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from laws.cases import BY_NAME, CASES, Case
from laws.placements import PLACEMENTS, PLAIN, Placement, chain
from laws.table import for_each
from laws.watch import assert_same, backward, floating, left_by, plain_step, step, weights_of
from torch_recompute import ChangedError, checkpoint, checkpoint_sequential, no_recompute, recompute

table = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
places = for_each(placement=PLACEMENTS)
smooth = [case for case in CASES if case.double]
ARGUMENT = "argument 0 of .* has been changed in place since the forward"
OUTPUT = "the output of the saved call .* has been changed in place"
REFUSED = {
    "nested at the end": ARGUMENT,
    "nested side by side": ARGUMENT,
    "region in a saved call": ARGUMENT,
    "stored outside of regions": ARGUMENT,
    "saved call three deep": OUTPUT,
    "a region in a saved call in a region in a region": OUTPUT,
}
IN_PLACE = {
    "in_place_on_what_a_stage_was_given": REFUSED,
    "in_place_on_a_view_of_it": {**REFUSED, "pair": ARGUMENT, "saved first": OUTPUT},
}
"""The placements that rows which change their own input refuse, and what the error says."""


def assert_same_or_refused(case: Case, placement: Placement, run: Callable[..., Any], wanted: dict[str, Any]) -> None:
    """A placed program leaves what the plain one leaves; where it cannot, it says what has been changed in place."""
    text = IN_PLACE.get(case.name, {}).get(placement.name)
    if text is None:
        assert_same(run(case, placement), wanted)
    else:
        with pytest.raises(ChangedError, match=text):
            run(case, placement)


@table
@places
def test_a_step_leaves_what_the_plain_step_leaves(case, placement):
    """Outputs, gradients, buffers and the random state after two steps are bitwise those of the plain program."""
    assert_same_or_refused(case, placement, functools.partial(step, times=2), plain_step(case, times=2))


@table
@for_each(check=["metadata", "values", "none"], early_stop=[False, True])
def test_options_do_not_change_gradients(case, check, early_stop):
    """Neither what is checked nor where the replay ends shows in the result."""
    program = case.build()
    run = recompute(chain(*program.stages), check=check, early_stop=early_stop)
    result = run(*program.args, **program.kwargs)
    backward(result)
    assert_same(left_by(program, result), plain_step(case))


@table
def test_checkpoint_gives_the_same_gradients(case):
    """So does the engine behind `checkpoint`."""
    program = case.build()
    result = checkpoint(chain(*program.stages), *program.args, use_reentrant=False, **program.kwargs)
    backward(result)
    assert_same(left_by(program, result), plain_step(case))


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_checkpoint_sequential_gives_the_same_gradients(segments):
    """Whatever the number of segments, the gradients are those of the plain sequence."""
    program = BY_NAME["conv_batchnorm"].build()
    result = checkpoint_sequential(list(program.stages), segments, *program.args)
    backward(result)
    assert_same(left_by(program, result), plain_step(BY_NAME["conv_batchnorm"]))


def two_backwards(case, placement):
    program = case.build()
    result = placement.put(*program.stages)(*program.args, **program.kwargs)
    backward(result, retain_graph=True)
    backward(result)
    return left_by(program, result)


once = functools.cache(two_backwards)  # for the plain program


@table
@places
def test_retained_graphs_give_the_same_gradients_twice(case, placement):
    """Two backwards through one retained graph add up to what two plain ones add up to."""
    assert_same_or_refused(case, placement, two_backwards, once(case, PLAIN))


@pytest.mark.parametrize("case", smooth, ids=lambda case: case.name)
@places
def test_second_derivatives(case, placement):
    """`gradgradcheck` holds, and `create_graph` gives the second derivatives of the plain program to the last bit."""
    program = case.build()
    (x,), (weight,) = program.args, program.holds
    run = placement.put(*program.stages)
    # The checks write to x past its version, which a store that holds a copy of it cannot see.
    assert torch.autograd.gradcheck(lambda x: run(x.clone()), (x,))
    assert torch.autograd.gradgradcheck(lambda x: run(x.clone()), (x,))

    def second(fn):
        outputs = floating(fn(x))
        first = torch.autograd.grad(outputs, (x, weight), weights_of(outputs), create_graph=True)
        return torch.autograd.grad([(g * g).sum() for g in first], (x, weight))

    for got, wanted in zip(second(run), second(PLAIN.put(*program.stages)), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["mlp", "norms", "dropouts", "custom_function", "attention_with_dropout"])
@places
def test_create_graph_backward(name, placement):
    """A gradient penalty through a region gives the plain penalty's gradients."""

    def penalty(where):
        program = BY_NAME[name].build()
        (x,) = program.args
        out = where.put(*program.stages)(x)
        (slope,) = torch.autograd.grad(out.exp().sum(), x, create_graph=True)
        (slope.square().sum() + out.sum()).backward()
        return left_by(program, out)

    if name == "attention_with_dropout":
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert_same(penalty(placement), penalty(PLAIN))
    else:
        assert_same(penalty(placement), penalty(PLAIN))


def test_two_outputs_with_separate_backwards():
    """Each output can be sent backward on its own, in either order."""
    for order in ((0, 1), (1, 0)):
        grads = []
        for run in (
            recompute(chain(torch.exp, lambda y: (y.sin(), y.cos()))),
            lambda x: (x.exp().sin(), x.exp().cos()),
        ):
            x = torch.linspace(0, 1, 8).requires_grad_()
            outputs = run(x)
            outputs[order[0]].sum().backward(retain_graph=True)
            outputs[order[1]].sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)


@pytest.mark.parametrize("change", ["add_", "relu_", "zero_", "view", "out="])
@pytest.mark.parametrize("last", [False, True])
def test_a_saved_output_changed_in_place(change, last):
    """Changing a saved call's output in place is an error where the replay needs it, and right after the region."""
    change_it = {
        "add_": lambda y: y.add_(1),
        "relu_": lambda y: y.relu_(),
        "zero_": lambda y: y.zero_(),
        "view": lambda y: (y[0].mul_(3), y)[1],
        "out=": lambda y: (torch.no_grad()(torch.mul)(y.detach(), 2, out=y.detach()), y)[1],
    }[change]

    def run(save):
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        saved = save(lambda x: (x * 3) @ torch.ones(4, 4))

        def body(x):
            y = saved(x.sin())
            z = y * y.detach().clone()
            return y if last else (change_it(y).sin() + z)

        y = (recompute(body) if save is no_recompute else body)(x)
        if last:
            y = change_it(y)
        y.exp().sum().backward()
        return x.grad

    if last:
        assert torch.equal(run(no_recompute), run(lambda fn: fn))
    else:
        with pytest.raises(ChangedError, match=OUTPUT):
            run(no_recompute)


def test_rebuilt_tensors_keep_stride_and_layout():
    """What a node reads in backward has the strides that it was saved with, and is not a leaf that grew a grad."""
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return tensors[0].clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append([(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in ctx.saved_tensors])
            return grad, *[None] * 4

    def body(x):
        y = x.exp()
        return Look.apply(y, y.t(), y[1:, ::2], y.expand(3, 4, 8), y.to_sparse().to_dense().bfloat16())

    for run in (body, recompute(body)):
        run(torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert seen[0] == seen[1]


def test_a_region_and_a_plain_use_of_one_module():
    """A module used once in a region and once outside gets the sum of both gradients."""
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    for run in (layer, recompute(layer)):
        (run(x).tanh() * layer(x.sin())).sum().backward()
    first, layer.weight.grad = layer.weight.grad.clone(), None
    (layer(x).tanh() * layer(x.sin())).sum().backward()
    assert torch.equal(first, layer.weight.grad * 2)
