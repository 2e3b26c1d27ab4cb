"""The tape: what a forward leaves, in its order, and replays that must come to the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_recompute import MismatchError, no_recompute, recompute, replay
from torch_recompute.state.observer import Observer, Running, observing
from torch_recompute.state.tape import HELD, Entry, Tape

STEPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "saved call": no_recompute(torch.sin, name="kept"),
    "choice": replay(torch.argmax),
    "region": recompute(lambda x: x.sin().sin(), name="inner"),
}


def chain(kind: str, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Four operations that each save a tensor, with a step of another kind after `place` of them."""

    def run(x: torch.Tensor) -> torch.Tensor:
        result = x
        for i in range(4):
            if i == place:
                found = STEPS[kind](result)
                result = result + found if found.is_floating_point() else result
            result = result.exp()
        return result

    return run


@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2), (3, 0)])
@pytest.mark.parametrize("kind", STEPS)
def test_a_step_at_another_place_is_an_error(kind: str, then: int, now: int) -> None:
    """A replay with as many tensors and steps as its forward, but in another order, is an error that says where."""
    runs = iter([chain(kind, then), chain(kind, now)])
    x = torch.full((3,), 0.1, requires_grad=True)
    result = recompute(lambda x: next(runs)(x), name="outer")(x)
    with pytest.raises(MismatchError, match=r"the replay of outer (reached|saved)"):
        result.sum().backward()
    assert x.grad is None


class Runs(Observer):
    """Notes the runs of regions, by the name of the region."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {}

    def around(self, running: Running) -> Any:
        """Notes a forward or replay."""
        if running.kind in ("forward", "replay"):
            self.seen.setdefault(running.name, []).append(running.run)
        return super().around(running)


def shape_of(tape: Tape) -> list[Any]:
    """What is on a tape, without the objects themselves."""
    return [
        shape_of(entry) if isinstance(entry, Tape) else "tensor" if isinstance(entry, weakref.ref) else entry.name
        for entry in tape.entries
    ]


def test_a_region_that_runs_again_writes_the_same_tape() -> None:
    """In the replay of a region around it, at any depth: the same kinds in the same order, with the same entries."""
    keep, pick = no_recompute(torch.sin, name="kept"), replay(torch.argmax)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return keep(x.exp()).exp() * pick(x)

    def middle(x: torch.Tensor) -> torch.Tensor:
        return keep(recompute(inner, name="inner")(x.exp())).exp()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return recompute(middle, name="middle")(x.exp()).exp()

    runs = Runs()
    with observing(runs):
        recompute(outer, name="outer")(torch.rand(3, requires_grad=True)).sum().backward()
    for name in ("middle", "inner"):
        first, *others = [run.tape for run in runs.seen[name]]
        assert others
        for other in others:
            assert shape_of(other) == shape_of(first)
            assert [*other.all_calls(Entry)] == [*first.all_calls(Entry)]


class Waiting(Entry):
    """An entry that backward waits for."""

    __slots__ = ()
    needed = True


class Place:
    """Stands for a slot."""


ALIVE = Place()
ENDS: dict[str, tuple[list[Any], int]] = {
    "nothing": ([], -1),
    "held by the graph": ([HELD, HELD], -1),
    "a slot": ([HELD, weakref.ref(ALIVE), HELD], 1),
    "slots that are gone": ([weakref.ref(ALIVE), weakref.ref(Place())], 0),
    "a saved call that has slots": ([weakref.ref(ALIVE), Waiting(), HELD], 1),
    "a saved call without": ([weakref.ref(ALIVE), Entry()], 0),
    "a region inside": ([weakref.ref(ALIVE), Tape()], 0),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_is_the_last_entry_that_backward_waits_for(name: str) -> None:
    """Slots in the graph, and saved calls that have some; a region inside waits for itself."""
    tape = Tape()
    tape.entries, end = ENDS[name]
    assert tape.end() == end
