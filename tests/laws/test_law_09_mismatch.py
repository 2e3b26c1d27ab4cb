"""Law 9: a replay that saves something else than the forward is one error: region, position, both sides, operation."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

from laws.placements import NAMES, chain
from laws.watch import ones, raised
from torch_recompute import MismatchError, RecomputeError, checkpoint, no_recompute, recompute

# Those whose first stage lies in a region that saves something in the stage itself and something after it.
WHOLE = [
    "whole",
    "each",
    "nested at the end",
    "nested at the start",
    "nested side by side",
    "saved last",
    "saved middle",
]


def second_time(first, then):
    """Does `first` when it is called, and `then` when it is called again."""
    calls = []

    def fickle(x):
        calls.append(0)
        return (first if len(calls) == 1 else then)(x)

    return fickle


OTHER = {
    "fewer tensors": (lambda x: x.exp().sin().exp(), lambda x: x.exp() * 1),
    "another shape": (lambda x: x.exp().sin(), lambda x: x[:2].exp().sin()),
    "another dtype": (lambda x: x.exp().sin(), lambda x: x.double().exp().sin()),
    "another device": (lambda x: x.exp().sin(), lambda x: x.to("meta").exp().sin()),
}


@pytest.mark.parametrize("kind", OTHER)
@pytest.mark.parametrize("placement", WHOLE)
def test_a_replay_that_saves_something_else(kind, placement):
    """Fewer tensors, another shape, dtype or device: an error of ours that is also a `CheckpointError`."""
    run = NAMES[placement].put(second_time(*OTHER[kind]), torch.relu, lambda x: x.sum().exp())
    out = run(ones(4, 3))
    with pytest.raises(MismatchError) as info:
        out.backward()
    assert isinstance(info.value, CheckpointError)
    assert isinstance(info.value, RecomputeError)


@pytest.mark.parametrize("check", ["metadata", "values", "none"])
def test_more_tensors(check):
    """A replay that goes on to save more tensors than the forward is an error, whatever else is compared."""
    region = recompute(second_time(torch.exp, lambda x: x.exp().sin().exp()), early_stop=False, check=check)
    assert "1 then, and now at least one more" in raised(MismatchError, region(ones(3)).sum().backward)


def test_the_error_names_region_position_both_sides_and_operation():
    """The text says which region, which tensor, what it was, what it is, and which operation waits for it."""
    region = recompute(second_time(*OTHER["another shape"]), name="block 7")
    text = raised(MismatchError, lambda: region(ones(4, 3)).sum().backward())
    for part in ("block 7", "position 0", "float32[4, 3]", "float32[2, 3]", "ExpBackward0", "replay(fn)"):
        assert part in text


def test_the_error_says_how_many():
    """Too few tensors are counted on both sides."""
    text = raised(
        MismatchError,
        lambda: recompute(second_time(lambda x: x.exp().sin().tanh(), torch.exp))(ones(3)).sum().backward(),
    )
    assert "1 now, 2 then" in text or "1 now, 3 then" in text


@pytest.mark.parametrize("check", ["metadata", "values", "none"])
def test_other_values_of_the_same_shape(check):
    """`check="values"` finds a replay with other numbers and says where; the cheaper checks cannot see it."""
    region = recompute(second_time(lambda x: x.exp().sin(), lambda x: (x + 1).exp().sin()), check=check)
    out = region(ones(3)).sum()
    if check == "values":
        assert "position 0" in raised(MismatchError, out.backward)
    else:
        out.backward()


@pytest.mark.parametrize(
    "change", [lambda t: t.neg(), lambda t: t.flip(0), lambda t: t + 1e-7, lambda t: t * float("nan")]
)
def test_values_are_compared_to_the_last_bit(change):
    """A sign, an order, the last bit and a NaN all show."""
    start = torch.linspace(0.1, 0.2, 32)
    region = recompute(second_time(lambda x: (x * start).exp(), lambda x: (x * change(start)).exp()), check="values")
    assert "position 1" in raised(MismatchError, region(ones(32)).sum().backward)  # after the input, which is kept


class Attention(torch.autograd.Function):
    """Saves what fused attention saves on CUDA without dropout: seeds and offsets that no kernel has written."""

    garbage = 0

    @staticmethod
    def forward(ctx, x):
        Attention.garbage += 1
        unwritten = [
            torch.full((2,), Attention.garbage, dtype=torch.uint64),  # flash's rng_state
            torch.tensor(Attention.garbage, dtype=torch.uint64),  # flash's unused
            torch.tensor(Attention.garbage),  # cuDNN's and the efficient kernel's seed
            torch.tensor(Attention.garbage),  # and offset
        ]
        ctx.save_for_backward(x, *unwritten)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


def test_what_no_kernel_has_written_is_not_compared():
    """Unwritten seeds and offsets of fused attention are no mismatch; positions in an index are."""
    x = ones(4)
    recompute(lambda x: Attention.apply(x.exp()).exp(), check="values")(x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().exp().sum(), x)[0])

    last = iter((1, 2))
    y = recompute(lambda x: x.exp().gather(0, torch.tensor([0, next(last)])).exp(), check="values")(ones(4))
    with pytest.raises(MismatchError, match="bits"):
        y.sum().backward()


def test_values_that_agree_pass():
    """`check="values"` has nothing to say about NaN, infinity, empty tensors and other dtypes that agree."""

    def body(x):
        y = (x / 0).exp() * (x - x).log()
        z = x[:0].exp().sum() + x.bfloat16().exp().sum() + torch.view_as_complex(x.view(2, 2)).exp().abs().sum()
        return y.nan_to_num().sin() + z

    x, y = ones(4), ones(4)
    recompute(body, check="values")(x).sum().backward()
    body(y).sum().backward()
    assert torch.equal(x.grad.view(torch.int32), y.grad.view(torch.int32))  # NaN among them


def test_a_saved_call_that_is_reached_with_another_input():
    """A saved call that finds another input than in forward is an error that names it."""
    save = no_recompute(lambda y: y.sin().exp(), name="attention")
    region = recompute(chain(second_time(lambda x: x * 2, lambda x: x[:1] * 2), save, torch.exp), name="layer")
    text = raised(MismatchError, lambda: region(ones(3)).sum().backward())
    assert "attention" in text
    assert "layer" in text


def test_a_saved_call_that_the_forward_did_not_make():
    """A replay that takes a branch with a saved call which its forward did not take is an error."""
    save = no_recompute(torch.exp)
    region = recompute(chain(second_time(lambda x: x * 2, save), torch.exp))
    assert "no more saved calls or choices" in raised(MismatchError, lambda: region(ones(3)).sum().backward())


def test_after_a_mismatch_the_region_is_usable():
    """One bad step does not poison the next: the same region, called again, gives the plain gradients."""
    fickle = iter([lambda x: x.exp().sin(), lambda x: x[:1].exp()] + [lambda x: x.exp().sin()] * 2)
    region = recompute(lambda x: next(fickle)(x))
    raised(MismatchError, region(ones(3)).sum().backward)
    x = ones(3)
    region(x).sum().backward()
    assert torch.equal(x.grad, x.detach().exp().cos() * x.detach().exp())


def test_a_mismatch_in_one_of_two_regions_is_that_ones():
    """The error names the region that differs, not its neighbours."""
    good = recompute(lambda x: x.exp().sin(), name="good")
    bad = recompute(second_time(*OTHER["another shape"]), name="bad")
    text = raised(MismatchError, lambda: good(bad(good(ones(4, 3)))).sum().backward())
    assert "bad" in text
    assert "good" not in text


def test_checkpoint_keeps_torchs_phrases():
    """What code greps for in `torch.utils.checkpoint`'s errors is in ours."""
    phrases = {
        "fewer tensors": "A different number of tensors was saved during the original forward and recomputation",
        "another shape": "Recomputed values for the following tensors have different metadata than",
    }
    for kind, phrase in phrases.items():
        out = checkpoint(second_time(*OTHER[kind]), ones(4, 3), use_reentrant=False)
        assert phrase in raised(CheckpointError, out.sum().backward)


def test_determinism_check_none_only_counts():
    """`determinism_check="none"` lets another dtype pass, as torch does, and still minds a missing tensor."""
    out = checkpoint(second_time(*OTHER["fewer tensors"]), ones(4, 3), use_reentrant=False, determinism_check="none")
    raised(CheckpointError, out.sum().backward)


def test_debug_shows_the_operations_of_both_runs():
    """`debug=True` lists what ran in forward and replay up to the first difference."""
    out = checkpoint(second_time(*OTHER["another shape"]), ones(4, 3), use_reentrant=False, debug=True)
    text = raised(CheckpointError, out.sum().backward)
    assert "aten.exp" in text
    assert "aten.slice" in text
