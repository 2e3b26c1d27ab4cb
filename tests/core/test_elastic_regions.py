"""What the laws do not say of elastic regions: hooks around, compiled blocks inside, failures in turn, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from support.elastic import Script
from support.limited import Limited, limited, missing
from torch_recompute import no_recompute, recompute
from torch_recompute.state.observer import Observer, here, observing

SCRIPTS = [("never", False), ("forward", False), ("forward", True)]
each = pytest.mark.parametrize(("when", "saved"), SCRIPTS)
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 8))


def left(call: Callable[[nn.Sequential, torch.Tensor], Any], memory: Limited | None = None, nth: int = 0) -> list[Any]:
    """A step's gradients, buffers and random state."""
    model, x = net(), X.clone().requires_grad_()
    torch.manual_seed(5)
    if memory is not None:
        memory.fail_at(nth)
    try:
        call(model, x).sum().backward()
    finally:
        if memory is not None:
            memory.fail_at(None)
    return [x.grad, *(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]


def same(some: list[Any], others: list[Any]) -> bool:
    return all(map(torch.equal, some, others))


PLAIN = left(lambda model, x: model(x))


def parts(model: nn.Sequential, script: Script) -> Callable[[torch.Tensor], torch.Tensor]:
    """A region with a saved call in its middle."""
    first, norm, gelu, drop, last = model
    middle = no_recompute(lambda x: drop(gelu(x)))
    return recompute(lambda x: last(middle(norm(first(x)))), elastic=script)


@each
def test_hooks_around(when: str, saved: bool) -> None:
    """`save_on_cpu` around an elastic region changes no gradient."""
    script = Script(when, saved)
    with save_on_cpu():
        assert same(left(lambda model, x: parts(model, script)(x)), PLAIN)


@each
def test_a_compiled_block_inside(when: str, saved: bool) -> None:
    """A compiled function is kept and replayed as another is."""
    script = Script(when, saved)
    wanted = left(lambda model, x: torch.compile(model, backend="aot_eager")(x))
    got = left(lambda model, x: recompute(torch.compile(model, backend="aot_eager"), elastic=script)(x))
    assert same(got, wanted)
    assert script.replays == (when == "forward")


@pytest.fixture
def memory() -> Iterator[Limited]:
    if missing():
        pytest.skip(missing())
    with limited() as found:
        yield found


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_forward_that_fails_several_times_in_turn(memory: Limited, times: int) -> None:
    """Batch norm's statistics and the generator are those of one forward, however often it began."""
    script = Script("never")
    script.retries = times

    def call(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        calls = 0

        def body(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            x = model[:4](x)
            if calls <= times:
                memory.fail_at(1)
            return model[4](x)

        return recompute(body, elastic=script)(x)

    assert same(left(call, memory), PLAIN)
    assert script.failures == times
    assert not here.again


def test_inner_regions_leave_it_to_the_outermost(memory: Limited) -> None:
    """Of nested elastic regions only the outermost runs again, and an error that passes is told once, by it."""
    outer, inner = Script("never"), Script("never")
    outer.retries, inner.retries = 1, 9

    def call(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        region = recompute(model, elastic=inner)
        return recompute(lambda x: region(x.sin().cos()), elastic=outer)(x)

    wanted = left(lambda model, x: model(x.sin().cos()))
    seen, texts = set(), []
    for nth in range(1, 60):
        outer.failures = inner.failures = 0
        try:
            assert same(left(call, memory, nth), wanted)
            seen.add((outer.failures, inner.failures))
        except torch.OutOfMemoryError as error:
            texts.append(str(error))
    assert seen == {(0, 0), (1, 0)}
    assert max(text.count("Out of memory in the region") for text in texts) <= 1


def test_two_threads_share_one_memory() -> None:
    """Forwards and backwards on two threads, each evicting what the other's regions keep: plain's gradients."""
    script = Script("inside")
    models = [nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))) for _ in range(2)]
    wanted: list[Any] = []
    found: list[list[Any]] = [[], []]
    x = torch.randn(8, 16)

    def steps(number: int, wrap: Callable[[nn.Module], Callable[..., Any]], into: list[Any]) -> None:
        for _ in range(20):
            y = x
            for layer in models[number]:
                y = wrap(layer)(y).tanh()
            into.extend(torch.autograd.grad(y.sum(), [*models[number].parameters()]))

    for number in range(2):
        steps(number, lambda layer: layer, wanted)
    run = [threading.Thread(target=steps, args=(n, lambda m: recompute(m, elastic=script), found[n])) for n in range(2)]
    for thread in run:
        thread.start()
    for thread in run:
        thread.join()
    assert same(found[0] + found[1], wanted)
    assert script.evicted > 0


def test_a_kept_tensor_that_was_changed_raises_as_plain_autograd_does() -> None:
    """Kept, a change in place of what was saved is an error; evicted, the gradient is right. Never a wrong one."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    for when in ("never", "forward"):
        x = X.clone().requires_grad_()
        y = recompute(body, elastic=Script(when))(x)
        total = y.sum()
        with torch.no_grad():
            y.mul_(2)
        if when == "never":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                total.backward()
        else:
            total.backward()
            assert torch.equal(x.grad, X.exp())


def test_without_grad_nothing_is_asked() -> None:
    """Outside of training an elastic region is the plain call."""
    script = Script("never")
    script.forward = None
    with torch.no_grad():
        assert torch.equal(recompute(torch.sin, elastic=script)(X), X.sin())


class Dropped(Observer):
    """Counts the tensors that regions do not keep."""

    count = 0

    def dropped(self, region_call: Any, tensor: torch.Tensor) -> None:
        self.count += 1


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_kept_is_not_said_to_be_dropped(keep: bool) -> None:
    """Observers are shown the tensors of a call that keeps nothing, also of its saved calls, and none of a kept one."""
    seen = Dropped()
    with observing(seen):
        left(lambda model, x: parts(model, Script("never", keep=keep))(x))
    assert bool(seen.count) != keep
