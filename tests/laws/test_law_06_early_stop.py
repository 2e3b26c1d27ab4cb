"""Law 6: the replay ends at the last tensor that backward still needs, wherever it is and whatever is around it."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from laws.cases import BY_NAME, CASES
from laws.placements import chain
from laws.watch import Bytes, Counted, Operations, assert_same, backward, left_by, ones, plain_step
from torch_recompute import checkpoint, no_recompute, recompute


def operations_in_backward(run, *args):
    """How often each operation runs in the backward of `run(*args)`, its replays included."""
    result = run(*args)
    with Operations() as seen:
        backward(result)
    return seen.counts


def two_matmuls():
    first, last = torch.eye(8).requires_grad_(), torch.eye(8).requires_grad_()
    return lambda x: (x.sin() @ first).exp() @ last


@pytest.mark.parametrize(
    ("wrap", "matmuls"),
    [
        (lambda fn: fn, 4),
        (recompute, 5),
        (lambda fn: recompute(fn, early_stop=False), 6),
        (lambda fn: lambda x: checkpoint(fn, x, use_reentrant=False), 5),
        (lambda fn: lambda x: checkpoint(fn, x, use_reentrant=False, early_stop=False), 6),
        (lambda fn: recompute(recompute(fn)), 5),
    ],
    ids=["plain", "region", "no early stop", "checkpoint", "checkpoint without early stop", "nested"],
)
def test_a_trailing_matmul_is_skipped(wrap, matmuls):
    """Of two matmuls the replay repeats only the first: the second's inputs are the last thing that is needed."""
    assert operations_in_backward(wrap(two_matmuls()), ones(4, 8))["mm"] == matmuls


CONSTANT = [torch.eye(8), torch.eye(8)]
WITH_A_CONSTANT = {
    "one": lambda x, w: (x @ w).sin() @ CONSTANT[0],
    "two": lambda x, w: (x @ w).sin() @ CONSTANT[0] @ CONSTANT[1],
    "a linear layer without a gradient": lambda x, w: F.linear(F.linear((x @ w).sin(), CONSTANT[0]), CONSTANT[1]),
}


@pytest.mark.parametrize("name", WITH_A_CONSTANT)
def test_a_trailing_product_with_a_constant_is_skipped(name):
    """Where the last product saves a constant alone, the replay ends before it, as torch's checkpoint does."""
    weight = torch.eye(8).requires_grad_()
    counts = [
        operations_in_backward(wrap(lambda x: WITH_A_CONSTANT[name](x, weight)), ones(4, 8))["mm"]
        for wrap in (recompute, lambda fn: lambda x: torch_checkpoint(fn, x, use_reentrant=False))
    ]
    assert counts[0] == counts[1]


def test_a_trailing_linear_layer_is_skipped():
    """The last layer of an MLP, with its bias, is not run again."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    assert operations_in_backward(model, torch.ones(4, 8))["addmm"] == 0
    assert operations_in_backward(recompute(model), torch.ones(4, 8))["addmm"] == 1


def test_nothing_after_the_last_saved_tensor_runs():
    """Code behind the last saved tensor is not reached in the replay; code before it is, once."""
    count = Counted()
    before, after = count("before", torch.exp), count("after", lambda x: x + 1)
    recompute(lambda x: after(before(x).sin()))(ones(3)).sum().backward()
    assert count.calls == {"before": 2, "after": 1}


class Residual(nn.Module):
    """A layer whose last operation that saves is a norm, or another that saves what needs no gradient."""

    def __init__(self, last):
        super().__init__()
        self.last = last

    def forward(self, x):
        return self.last(x.exp()) + torch.arange(8.0).cumsum(0)


@pytest.mark.parametrize("watched", [False, True], ids=["alone", "watched"])
@pytest.mark.parametrize(
    "last",
    [
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.5),
        nn.MaxPool1d(3, 1, 1),
        lambda y: F.layer_norm(y, (8,)),
        lambda y: y.topk(8).values,
    ],
    ids=lambda last: getattr(last, "__name__", type(last).__name__),
)
def test_what_follows_a_norm_is_skipped(last, watched):
    """What a norm keeps of its results needs no gradient; the replay ends with it, also where others follow modules."""
    layer = recompute(Residual(last))
    hooks = [nn.modules.module.register_module_forward_hook(lambda *_: None)] if watched else []
    try:
        assert operations_in_backward(layer, ones(4, 8))["cumsum"] == 0
    finally:
        for hook in hooks:
            hook.remove()


def test_torchs_switch_is_obeyed_by_checkpoint():
    """`set_checkpoint_early_stop(False)` around forward makes `checkpoint` replay to the end."""
    with set_checkpoint_early_stop(False):
        out = checkpoint(two_matmuls(), ones(4, 8), use_reentrant=False)
    with Operations() as seen:
        backward(out)
    assert seen.counts["mm"] == 6


def rrelu(x):
    return F.rrelu(x.exp() - 2, training=True)


LAST = {
    "rrelu": rrelu,
    "rrelu in place": lambda x: F.rrelu(x.exp() * 2 - 3, training=True, inplace=True),
    "rrelu then sum": lambda x: rrelu(x).sum(),
    "dropout": lambda x: F.dropout(x.exp(), 0.5),
    "softmax": lambda x: x.exp().softmax(-1),
    "topk": lambda x: x.exp().topk(2).values,
    "max pool": lambda x: F.max_pool1d(x.exp(), 2),
    "batch norm": lambda x: F.batch_norm(x.exp(), None, None, training=True),
    "layer norm": lambda x: F.layer_norm(x.exp(), (8,)),
    "var_mean": lambda x: torch.var_mean(x.exp(), -1),
    "in place": lambda x: (x.exp() + 1).mul_(2).tanh_(),
    "cross entropy": lambda x: F.cross_entropy(x.exp(), torch.tensor([1, 2, 0, 3])),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.exp().view(1, 1, 4, 8),) * 3),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2]), x.exp()),
    "cumprod": lambda x: x.exp().cumprod(-1),
    "norm": lambda x: x.exp().norm(dim=-1),
    "std": lambda x: x.exp().std(-1),
    "prod": lambda x: x.exp().prod(-1),
}


@pytest.mark.parametrize("name", LAST)
def test_no_operation_is_left_between_saving_and_computing(name):
    """Whatever the last operation saves is computed in full: gradients are the plain ones, and never NaN."""
    grads = []
    for wrap in (lambda fn: fn, recompute, lambda fn: recompute(recompute(fn))):
        torch.manual_seed(0)
        x = torch.randn(4, 8, requires_grad=True)
        out = wrap(LAST[name])(x)
        torch.full((4, 8), float("nan"))  # what a buffer that nobody fills might find
        backward(out)
        grads.append(x.grad)
    assert not grads[0].isnan().any()
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("kind", ["except Exception", "suppress", "finally", "context"])
def test_user_code_that_catches_exceptions(kind):
    """The end of a replay passes through `except Exception` unseen, and runs `finally` and `__exit__` on its way."""
    left = []

    @contextlib.contextmanager
    def context():
        try:
            yield
        finally:
            left.append("left")

    def body(x):
        y = x.exp()
        if kind == "except Exception":
            try:
                y = y.sin()
                return y + torch.cos(x)
            except Exception:
                left.append("caught")
                return y * 100
        if kind == "suppress":
            with contextlib.suppress(Exception):
                y = y.sin()
                return y + torch.cos(x)
            left.append("caught")
        if kind == "finally":
            try:
                return y.sin() + torch.cos(x)
            finally:
                left.append("left")
        with context():
            return y.sin() + torch.cos(x)

    grads = []
    for run in (body, recompute(body)):
        x = torch.linspace(0, 1, 4).requires_grad_()
        run(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    assert left == ({"finally": ["left"] * 3, "context": ["left"] * 3}.get(kind, []))


def test_a_dead_branch_is_not_replayed_to():
    """When the graph of a later output is gone, the replay ends before it and keeps nothing for it."""
    count = Counted()
    branch = count("branch", lambda y: (y @ y).exp())

    def body(x):
        y = x.exp()
        return y, branch(y.sin())

    kept, dropped = recompute(body)(ones(4, 4))
    del dropped
    with Operations() as seen:
        kept.sum().backward()
    assert count.calls["branch"] == 1
    assert seen.counts["mm"] == 0


@pytest.mark.parametrize("after", ["a save", "a region", "a saved call"])
def test_after_an_unfinished_tensor_the_next_event_is_the_end(after):
    """Where the last tensor is yet to be filled by its kernel, the replay ends at the next save, region or call."""
    count = Counted()
    branch = count("branch", lambda y: (y @ y).exp())
    if after != "a save":
        branch = (recompute if after == "a region" else no_recompute)(branch)

    def body(x):
        y = F.rrelu(x.exp() - 2, training=True)
        return y, branch(y)

    kept, dropped = recompute(body)(ones(4, 4))
    del dropped
    with Operations() as seen:
        kept.sum().backward()
    assert count.calls["branch"] == (2 if after == "a save" else 1)
    assert seen.counts["mm"] == 0


def test_tensors_of_a_dead_branch_are_not_kept():
    """A branch in the middle whose graph is gone runs again, but its tensors die at once."""
    weight = torch.ones(64, 64, requires_grad=True)

    def body(x, middle):
        y = x.exp()
        z = ((y @ weight).exp() @ weight).exp() @ weight if middle else None
        return z, y.sin()

    live = []
    for middle in (True, False):
        region = recompute(body)
        with Bytes() as seen:
            z, out = region(ones(64, 64), middle)
            del z
            out.register_hook(lambda grad: None)
            first = out.grad_fn.next_functions[0][0]
            first.register_prehook(lambda _: live.append(seen.live))
            out.sum().backward()
    assert live[0] == live[1]


def test_settings_are_left_when_a_replay_ends_early():
    """Autocast, grad mode and function modes entered by the function are left although it does not return."""

    def body(x):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), torch.device("cpu"), torch.enable_grad():
            return x.exp().sin() + 1

    out = recompute(body)(ones(3)).sum()
    out.backward()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("saved", [True, False])
def test_a_trailing_saved_call_is_not_reached(saved):
    """A saved call at the end costs the replay nothing, and its inputs are rebuilt all the same."""
    count, weight = Counted(), torch.eye(8).requires_grad_()
    last = count("last", lambda y: (y @ weight).exp())
    body = chain(count("first", torch.exp), no_recompute(last) if saved else last)
    counts = operations_in_backward(recompute(body), ones(4, 8))
    assert count.calls == {"first": 2, "last": 1 if saved else 2}
    assert counts["mm"] == (2 if saved else 3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stopping_early_saves_work_and_changes_nothing(case):
    """For every row of the table the replay that stops early does not do more than the one that runs to its end."""
    totals = []
    for early_stop in (True, False):
        program = case.build()
        result = recompute(chain(*program.stages), early_stop=early_stop)(*program.args, **program.kwargs)
        with Operations() as seen:
            backward(result)
        totals.append(sum(seen.counts.values()))
        assert_same(left_by(program, result), plain_step(case))
    assert totals[0] <= totals[1]


def test_the_table_has_something_to_skip():
    """At least the row made for it ends in work that an early stop skips."""
    program = BY_NAME["trailing_matmul"].build()
    early = operations_in_backward(recompute(chain(*program.stages)), *program.args)
    late = operations_in_backward(recompute(chain(*program.stages), early_stop=False), *program.args)
    assert early["addmm"] == 1
    assert late["addmm"] == 2
