"""Law 11: state is per call: many live regions of one module, interleaved microbatches, backward on several threads."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch
from torch import nn

from laws.cases import BY_NAME
from laws.placements import NAMES, PLACEMENTS, PLAIN, chain
from laws.table import for_each
from laws.watch import Counted, InBackward, assert_same, backward, left_by, on_threads
from torch_recompute import (
    RecomputeError,
    _torch,
    doing_recompute,
    get_recompute_data,
    no_recompute,
    recompute,
    replay,
    save_for_recompute,
)
from torch_recompute.engine.exchange import Exchange
from torch_recompute.engine.slots import this_task

places = for_each(placement=PLACEMENTS)
ORDERS = {"first in first out": (0, 1, 2, 3), "last in first out": (3, 2, 1, 0), "mixed": (2, 0, 3, 1)}


def in_threads(tasks):
    """Runs `tasks` at the same time, each on a thread of its own; returns their results in order."""
    return on_threads(lambda task: task(), *tasks)


def test_a_call_that_ends_on_another_thread(monkeypatch):
    """A region call is told once that a backward call has ended, on whichever device's thread that is."""
    ends, told = [], []

    class Told:
        def end(self):
            told.append(self)

    one = Told()
    monkeypatch.setattr(_torch, "after_backward", ends.append)

    def half():
        task = this_task()
        task.told[id(one)] = task.told[id(one)] = weakref.ref(one)
        assert this_task() is task
        assert task.retains

    InBackward.apply(torch.ones(1, requires_grad=True), half).sum().backward(retain_graph=True)
    (end,) = ends
    in_threads([end])
    assert told == [one]


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
def test_backward_while_another_thread_replays_with_other_buffers(where):
    """While a replay has put other values into a module's buffers, a backward on another thread is right."""
    norm, got = nn.BatchNorm1d(3), []
    x = torch.randn(4, 3, requires_grad=True)

    def looks(y):
        if doing_recompute():
            got.extend(in_threads(others))
        return y.exp()

    def grad():
        return torch.autograd.grad(other.sum(), x, retain_graph=True)[0]

    other, others = where.put(norm, torch.exp, torch.exp)(x), [grad]
    out = recompute(chain(norm, looks, torch.sin))(x)
    out.sum().backward()
    assert len(got) == 1
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


class Scaled(nn.Module):
    """A layer that is scaled by an attribute, and calls something in between."""

    def __init__(self, between):
        super().__init__()
        self.linear, self.scale, self.between = nn.Linear(3, 3), 1.0, [between]

    def forward(self, x):
        y = self.linear(x).exp() * self.scale
        for fn in self.between:
            fn()
        return y.exp()


def test_replays_that_need_the_same_objects_in_opposite_order():
    """Each holds what the other one needs: an error that names both regions, on one thread at least, and no waiting."""
    gate = threading.Barrier(2, timeout=20)
    layers = [Scaled(lambda: None), Scaled(lambda: None)]
    said, losses = [], []

    def one(number, layer, other):
        pending = []

        def outer(x):
            y = layer(x)
            if doing_recompute():
                gate.wait()
                try:
                    pending[0].backward()
                except RecomputeError as error:
                    said.append(str(error))
                gate.wait()
            return y.exp()

        x = torch.randn(2, 3, requires_grad=True)
        pending.append(recompute(other, name=f"inner {number}")(x).sum())
        losses.append(recompute(outer, name=f"outer {number}")(x).sum())

    one(1, *layers)
    one(2, *layers[::-1])
    for layer in layers:
        layer.scale = 2.0
    in_threads([loss.backward for loss in losses])
    assert said
    assert all("outer 1" in text and "outer 2" in text for text in said)
    assert [layer.scale for layer in layers] == [2.0, 2.0]


def test_replays_that_change_nothing_do_not_wait_for_each_other():
    """Two threads are in replays of one module at the same time, with dropout too, and meet there."""
    gate = threading.Barrier(2, timeout=20)
    layer = Scaled(lambda: gate.wait() if doing_recompute() else None)
    for dropout in (False, True):
        torch.manual_seed(0)
        run = recompute(chain(layer, nn.Dropout(0.5)) if dropout else layer)
        x = torch.randn(2, 3, requires_grad=True)
        losses = [run(x).sum() for _ in range(2)]
        in_threads([lambda loss=loss, x=x: torch.autograd.grad(loss, x) for loss in losses])


def test_a_replay_that_changes_a_module_waits_for_another_one():
    """A replay that needs what another thread's has put back begins when that is over, and both are right."""
    busy, seen = threading.Lock(), []

    def alone():
        if doing_recompute():
            seen.append(busy.acquire(blocking=False))
            time.sleep(0.05)
            busy.release()

    layer, got, wanted = Scaled(alone), [], []
    for wrap, into in ((recompute, got), (lambda fn: fn, wanted)):
        x, losses = torch.ones(2, 3, requires_grad=True), []
        for scale in (2.0, 3.0):
            layer.scale = scale
            losses.append(wrap(layer)(x).sum())
        layer.scale = 1.0
        into += in_threads([lambda loss=loss, x=x: torch.autograd.grad(loss, x)[0] for loss in losses])
    assert seen == [True, True]
    assert all(map(torch.equal, got, wanted))
    assert layer.scale == 1.0


def test_a_replay_that_changes_nothing_is_not_disturbed():
    """While a replay runs that finds a module as it was, another thread's puts nothing into that module."""
    inside, wanted, got = threading.Event(), [], [None, None]

    def between():
        if doing_recompute():
            inside.set()
            time.sleep(0.2)

    layer, x, losses = Scaled(between), torch.ones(2, 3, requires_grad=True), []
    for scale in (2.0, 3.0):
        layer.scale = scale
        losses.append(recompute(layer)(x).sum())
        wanted.append(torch.autograd.grad(layer(x).sum(), x)[0])
    layer.scale = 2.0  # as the first forward found it

    def backward_of(i):
        if i:
            inside.wait(20)
        got[i] = torch.autograd.grad(losses[i], x)[0]

    in_threads([lambda i=i: backward_of(i) for i in range(2)])
    assert all(map(torch.equal, got, wanted))


def test_a_replay_that_ends_while_another_one_decides_to_wait_wakes_it(monkeypatch):
    """Between the look that finds an object in use and the wait for it, the replay that uses it may end."""
    inside, go, owns = threading.Event(), threading.Event(), Exchange._owns

    def between():
        if doing_recompute() and not inside.is_set():
            inside.set()
            go.wait(10)

    def looks(self, wanted):
        found = owns(self, wanted)
        if not found:
            go.set()
            ending.join(0.3)  # as long as it may take the other thread to end, unless it has to wait for this one
        return found

    layer, losses = Scaled(between), []
    for scale in (2.0, 3.0):
        layer.scale = scale
        losses.append(recompute(layer)(torch.ones(2, 3, requires_grad=True)).sum())
    layer.scale = 1.0
    monkeypatch.setattr(Exchange, "_owns", looks)
    ending, waiting = (threading.Thread(target=loss.backward, daemon=True) for loss in losses)
    ending.start()
    inside.wait(10)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()


def test_threads_that_begin_to_draw_while_others_are_counted(monkeypatch):
    """A replay that draws asks which other threads do; one more may begin to at that moment."""
    region, alive, began = recompute(nn.Dropout(0.5)), threading.Thread.is_alive, []
    drawn, done = threading.Barrier(3), threading.Event()

    def step():
        x = torch.ones(4, requires_grad=True)
        region(x.exp()).sum().backward()

    def stays():
        step()
        drawn.wait(10)
        done.wait(10)

    def is_alive(self):
        if len(began) < 3:
            began.append(self)
            in_threads([step])
        return alive(self)

    threads = [threading.Thread(target=stays) for _ in range(2)]
    for thread in threads:
        thread.start()
    drawn.wait(10)
    monkeypatch.setattr(threading.Thread, "is_alive", is_alive)
    try:
        step()
    finally:
        done.set()
    assert began
