"""Law 11: state is per call: many live regions of one module, interleaved microbatches, backward on several threads."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from laws.cases import BY_NAME
from laws.placements import NAMES, PLACEMENTS, PLAIN, chain
from laws.table import for_each
from laws.watch import Counted, InBackward, assert_same, backward, left_by, on_threads
from torch_recompute import (
    _torch,
    doing_recompute,
    get_recompute_data,
    no_recompute,
    recompute,
    replay,
    save_for_recompute,
)
from torch_recompute.engine.backward_task import this_task

places = for_each(placement=PLACEMENTS)
ORDERS = {"first in first out": (0, 1, 2, 3), "last in first out": (3, 2, 1, 0), "mixed": (2, 0, 3, 1)}


def in_threads(tasks):
    """Runs `tasks` at the same time, each on a thread of its own; returns their results in order."""
    return on_threads(lambda task: task(), *tasks)


def test_a_call_that_ends_on_another_thread(monkeypatch):
    """That a backward call was a half is known when it ends, on whichever device's thread that is."""
    ends, told = [], []

    class Told:
        def end(self, kept, split):
            told.append((kept, split))

    one = Told()
    monkeypatch.setattr(_torch, "after_backward", ends.append)

    def half():
        task = this_task()
        task.split = True
        task.region_calls.append(weakref.ref(one))
        assert this_task() is task

    InBackward.apply(torch.ones(1, requires_grad=True), half).sum().backward(retain_graph=True)
    (end,) = ends
    in_threads([end])
    assert told == [(True, True)]


@pytest.mark.parametrize("name", ["mlp", "encoder_layer", "dropouts", "lstm", "routed_to_experts"])
@pytest.mark.parametrize("order", ORDERS)
@places
def test_interleaved_microbatches(name, order, placement):
    """Four forwards of one module, then their backwards in another order, give the plain sum of gradients."""
    left = []
    for where in (PLAIN, placement):
        program = BY_NAME[name].build()
        run = where.put(*program.stages)
        results = [run(*(x * (i + 1) for x in program.args)) for i in range(4)]
        for i in ORDERS[order]:
            backward(results[i])
        left.append(left_by(program, results))
    assert_same(left[1], left[0])


@pytest.mark.parametrize("name", ["mlp", "encoder_layer", "conv_batchnorm", "in_place_inside"])
@places
def test_backward_in_several_threads_at_once(name, placement):
    """One module, live regions of many calls, their backwards all at the same time, each with its own gradients."""
    program = BY_NAME[name].build()
    leaves = list(program.leaves().values())
    got, wanted = [], []
    for where, into in ((PLAIN, wanted), (placement, got)):
        run = where.put(*program.stages)
        torch.manual_seed(0)
        outputs = [run(*(x * (i + 1) for x in program.args)) for i in range(6)]
        tasks = [lambda out=out: torch.autograd.grad(out.sum(), leaves) for out in outputs]
        into += in_threads(tasks) if where is placement else [in_threads([task])[0] for task in tasks]
    for a, b in zip(got, wanted, strict=True):
        assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("where", [PLAIN, NAMES["saved everything"]], ids=lambda placement: placement.name)
def test_backward_while_another_thread_puts_buffers_back(where, monkeypatch):
    """While a replay writes a module's buffers, a backward on another thread does not find them changed."""
    norm, copy, got = nn.BatchNorm1d(3), _torch.copy_each, []
    x = torch.randn(4, 3, requires_grad=True)
    out, other = recompute(chain(norm, torch.exp, torch.sin))(x), where.put(norm, torch.exp, torch.exp)(x)

    def grad():
        return torch.autograd.grad(other.sum(), x, retain_graph=True)[0]

    def copy_and_look(*args):
        copy(*args)
        got.extend(in_threads([grad]))

    monkeypatch.setattr(_torch, "copy_each", copy_and_look)
    out.sum().backward()
    assert len(got) == 2
    assert all(torch.equal(one, grad()) for one in got)


@pytest.mark.parametrize("name", ["mlp", "norms", "custom_function", "multiple_outputs", "views"])
@places
def test_whole_steps_in_several_threads_at_once(name, placement):
    """Forward and backward of a program of its own on each of six threads, many times over."""

    def train(where):
        for _ in range(5):
            result = where.put(*program.stages)(*program.args, **program.kwargs)
            grads = torch.autograd.grad(
                [t for t in [result] if torch.is_tensor(t)], list(program.leaves().values()), torch.ones_like(result)
            )
        return grads

    program = BY_NAME[name].build()
    (wanted,) = in_threads([lambda: train(PLAIN)])  # on a thread: how a matmul is split depends on it
    for got in in_threads([lambda: train(placement)] * 6):
        assert all(map(torch.equal, got, wanted))


def test_one_graph_from_several_threads():
    """Several threads send different outputs of one region backward at once; each gets the right gradient."""
    count = Counted()
    saved = no_recompute(count("saved", torch.sin))
    x = torch.linspace(0, 1, 1000).requires_grad_()
    outputs = recompute(lambda x: [(saved(x.exp()) * (i + 1)).cos() for i in range(8)])(x)
    tasks = [lambda out=out: torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out in outputs]
    got = in_threads(tasks)
    for i, grad in enumerate(got):
        (wanted,) = torch.autograd.grad((x.exp().sin() * (i + 1)).cos().sum(), x)
        assert torch.equal(grad, wanted)
    assert count.calls["saved"] == 8


def test_values_belong_to_their_call():
    """What calls save for their replay does not mix between microbatches or threads."""

    def body(x, tag):
        if doing_recompute():
            (kept,) = get_recompute_data()
            assert kept == tag
        else:
            save_for_recompute(tag)
        return x.exp().sin() * replay(lambda: tag)()

    region = recompute(body)
    live = [(tag, region(torch.ones(3, requires_grad=True), tag)) for tag in range(6)]
    for tag, out in reversed(live):
        out.sum().backward()
        assert tag in range(6)

    def run(tag):
        x = torch.ones(3, requires_grad=True)
        for _ in range(10):
            region(x, tag).sum().backward()
        return x.grad

    grads = in_threads([lambda tag=tag: run(tag) for tag in range(6)])
    for tag, grad in enumerate(grads):
        assert torch.allclose(grad, grads[1] * tag)


def test_a_region_on_one_thread_is_none_on_another():
    """While one thread is in a region, forward or replay, another thread's calls are plain."""
    seen = []

    def body(x):
        save_for_recompute(1) if not doing_recompute() else None

        def elsewhere():
            seen.append(doing_recompute())
            save_for_recompute(torch.ones(1, requires_grad=True))  # would be an error inside the region
            seen.append(no_recompute(lambda: torch._C._autograd._top_saved_tensors_default_hooks(True))())

        in_threads([elsewhere])
        return x.exp()

    recompute(body)(torch.ones(3, requires_grad=True)).sum().backward()
    assert seen == [False, None] * 2


def test_no_flag_on_the_module():
    """A region changes nothing on its module: same attributes, same hooks, same `state_dict` keys, before and after."""
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def face():
        return [
            (sorted(vars(m)), {k: len(v) for k, v in vars(m).items() if k.endswith("_hooks")}) for m in layer.modules()
        ]

    before = face(), list(layer.state_dict())
    out = recompute(layer)(torch.randn(4, 3))
    assert (face(), list(layer.state_dict())) == before
    out.sum().backward()
    assert (face(), list(layer.state_dict())) == before


def test_dropout_replays_in_threads():
    """Regions with random numbers, replayed one after the other on other threads, draw the numbers of their forward."""
    drop = nn.Dropout(0.5)
    outs, wanted = [], []
    for wrap, into in ((recompute, outs), (lambda fn: fn, wanted)):
        torch.manual_seed(0)
        x = torch.ones(64, requires_grad=True)
        into += [(x, wrap(chain(drop, torch.exp))(x)) for _ in range(4)]
    for (x, out), (y, plain) in zip(outs, wanted, strict=True):
        ((grad,),) = in_threads([lambda x=x, out=out: torch.autograd.grad(out.sum(), x)])
        assert torch.equal(grad, torch.autograd.grad(plain.sum(), y)[0])
