"""Observers of regions: the events they receive, on which stack and until when; without one nothing is collected."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from laws.watch import no_collector, on_threads
from torch_recompute import no_recompute, recompute, replay
from torch_recompute.state import observer
from torch_recompute.state.observer import Observer, Running, observing, running


class Log(Observer):
    """Writes down what runs, with what runs around it, and how many bytes are dropped."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.threads: set[int] = set()
        self.dropped_bytes = 0

    @contextmanager
    def around(self, running: Running) -> Generator[None]:
        """Notes the stack, and that it is left."""
        self.seen.append(" / ".join(f"{at.kind} {at.name}" for at in observer.running()))
        self.threads.add(threading.get_ident())
        yield
        self.seen.append(f"end of {running.kind} {running.name}")

    def dropped(self, frame: Any, tensor: torch.Tensor) -> None:
        """Adds up."""
        self.dropped_bytes += tensor.nbytes


def program() -> Callable[[torch.Tensor], torch.Tensor]:
    """A region with a choice, a saved call and a region in it."""
    save, choose = no_recompute(torch.exp, name="exp"), replay(torch.argmax)
    inner = recompute(lambda x: x.sin().cos(), name="inner")
    return recompute(lambda x: inner(save(x.tanh())) * choose(x), name="outer")


def leaf() -> torch.Tensor:
    return torch.rand(8, requires_grad=True)


def test_what_is_shown() -> None:
    """Forwards, saved calls and choices on the stack they run in; replays also after the block, and what is dropped."""
    log = Log()
    with observing(log):
        loss = program()(leaf()).sum()
    assert [line for line in log.seen if not line.startswith("end")] == [
        "forward outer",
        "forward outer / saved call exp",
        "forward outer / forward inner",
        "forward outer / choice replay(argmax)",
    ]
    assert log.dropped_bytes >= 2 * 8 * 4
    assert len([line for line in log.seen if line.startswith("end")]) == 4
    log.seen.clear()
    loss.backward()
    shown = [line for line in log.seen if not line.startswith("end")]
    assert shown[:2] == ["rebuild outer", "rebuild outer / replay outer"]
    assert not any("saved call" in line or "choice" in line for line in shown)  # no replay runs these again
    assert any(line.endswith("replay inner") for line in shown)
    assert running() == ()


def test_observers_add_up_and_only_see_their_block() -> None:
    """Two observers see a region that is called where both observe; one that is called outside is shown to neither."""
    first, second = Log(), Log()
    region = recompute(lambda x: x.sin().cos(), name="region")
    with observing(first):
        region(leaf()).sum().backward()
        with observing(second):
            region(leaf()).sum().backward()
    later = region(leaf())
    with observing(first):
        seen = len(first.seen)
        later.sum().backward()  # began unobserved
    assert len(first.seen) == seen == 2 * len(second.seen) > 0


def test_a_replay_on_another_thread_has_a_stack_of_its_own() -> None:
    """What a backward on another thread replays is shown there, with nothing of this thread around it."""
    log = Log()
    with observing(log):
        loss = recompute(lambda x: x.sin().cos(), name="region")(leaf()).sum()
        log.seen.clear()
        on_threads(torch.Tensor.backward, loss)
    assert log.seen[0] == "rebuild region"
    assert len(log.threads) == 2


def test_an_exception_leaves_the_stack_empty() -> None:
    """A region that raises is off the stack, and observing ends with its block."""

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), observing(Log()):
        recompute(fails)(leaf())
    assert running() == ()
    assert observer.here.observers is None


def test_a_region_that_nobody_observes_calls_nothing() -> None:
    """No function of the observers' file runs in an unobserved forward and backward."""
    region, x = program(), leaf()
    called: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == observer.__file__:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        region(x).sum().backward()
    finally:
        sys.setprofile(None)
    assert called == []


def test_nothing_is_kept_alive() -> None:
    """With the graph dies what was observed, and the observer with it."""
    with no_collector():
        log = Log()
        with observing(log):
            result = recompute(lambda x: x.sin().cos(), name="region")(leaf())
        died = weakref.ref(log)
        del log
        assert died() is not None
        del result
        assert died() is None
