"""Reports of a plan in a model: exact bytes and FLOPs, and choices that are not worth their cost."""

from __future__ import annotations

import copy
import json
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_recompute import ArgumentError, Choice, Plan, apply
from torch_recompute.plan.report import Report, Row
from torch_recompute.plan.wrappers import wrappers_on

ROWS, WIDTH, FAT = 32, 16, 64
UNIT = 4 * ROWS * WIDTH
"""Bytes of the input of each module below."""


class Block(nn.Module):
    """Two products with a sine between, whose input three operations save."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.down = (
            nn.Linear(*size, bias=False) for size in ((WIDTH, FAT), (WIDTH, FAT), (FAT, WIDTH))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.tanh()  # saved by itself and by both products: one storage
        return self.down(self.a(x).sin() * self.b(x))


def model(*modules: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*modules)


def steps(m: nn.Module, count: int) -> None:
    for _ in range(count):
        m(torch.ones(ROWS, WIDTH)).sum().backward()


def test_bytes_and_flops_are_exact() -> None:
    """Each storage that is dropped counts once; FLOPs are those of the products before the replay ends."""
    m = model(Block(), Block())
    handle = apply(m, Plan((Choice(("0",)), Choice(("1",), keep=("@product",)))))
    with handle.watch():
        steps(m, 3)
    first, second = handle.report().rows
    # tanh's result, a(x) for the sine, and sin and b(x) for the product, and the product for the last matrix
    assert first.saved_bytes == UNIT + 4 * 4 * UNIT
    assert first.flops == 2 * 2 * ROWS * WIDTH * FAT
    # what the first two products return is stored; what they and the last were given is dropped, and the sine
    assert second.saved_bytes == UNIT + 2 * 4 * UNIT
    assert second.flops == 0
    assert [row.replays for row in (first, second)] == [3, 3]
    assert all(row.seconds is not None and row.seconds > 0 for row in (first, second))


def test_a_group_is_one_row() -> None:
    """A choice of several modules has the sum of their figures."""
    m = model(Block(), Block(), Block())
    handle = apply(m, Plan((Choice(("0", "1")), Choice(("2",)))))
    with handle.watch():
        steps(m, 2)
    group, alone = handle.report().rows
    assert group.saved_bytes == 2 * (alone.saved_bytes or 0)
    assert group.modules == ("Block", "Block")
    assert group.replays == 2 * alone.replays
    # the group's first member is replayed to its end, for the second one's sake
    assert group.flops == 2 * alone.flops + 2 * ROWS * WIDTH * FAT


def test_watching_starts_again() -> None:
    """A report is of the steps last watched, and can be taken twice; what is not watched changes nothing in it."""
    m = model(Block())
    handle = apply(m, Plan((Choice(("0",)),)))
    with handle.watch():
        steps(m, 2)
    before = handle.report()
    m(torch.ones(2 * ROWS, WIDTH)).sum().backward()
    assert handle.report() == before
    with handle.watch():
        m(torch.ones(2 * ROWS, WIDTH)).sum().backward()
    row = handle.report().rows[0]
    assert row.saved_bytes == 2 * (before.rows[0].saved_bytes or 0) > 0
    assert (row.replays, row.seconds) == (1, None)
    assert "no seconds: watch two steps" in str(handle.report())


def test_without_watching_there_are_no_figures() -> None:
    """A report of steps that nobody watched says so, and what to write; so do its rows and its JSON."""
    m = model(Block())
    handle = apply(m, Plan((Choice(("0",)),)))
    steps(m, 2)
    report = handle.report()
    assert not report.watched
    assert report.remark(report.rows[0]) == "not watched"
    assert str(report).startswith(
        "not watched, so there are no figures. Write, for one step or more:  with handle.watch"
    )
    assert json.loads(report.to_json())["watched"] is False


def test_a_step_is_watched_wherever_its_backward_runs() -> None:
    """The call takes its figures along: replays of a watched forward count, those of one that was not do not."""
    m = model(Block())
    handle = apply(m, Plan((Choice(("0",)),)))
    early = m(torch.ones(ROWS, WIDTH)).sum()
    with handle.watch():
        watched = m(torch.ones(ROWS, WIDTH)).sum()
        early.backward()
    assert handle.report().rows[0].replays == 0
    watched.backward()
    assert handle.report().rows[0].replays == 1
    handle.remove()
    assert handle.report().rows[0].replays == 1
    with pytest.raises(ArgumentError, match="has been removed from Sequential"), handle.watch():
        pass


@pytest.mark.parametrize("every", [False, True], ids=["not watched", "watched before"])
def test_a_step_is_the_regions_and_nothing_else(every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a plan a step enters no mode, records no event, reads no clock and waits for nothing."""
    m = model(Block(), Block(), Block())
    handle = apply(m, Plan((Choice(("0",)), Choice(("1", "2")))))
    if every:
        with handle.watch():
            steps(m, 2)
    taken: list[str] = []

    def no(what: str) -> Any:
        return lambda *_, **__: taken.append(what)

    for mode in (TorchDispatchMode, TorchFunctionMode):
        real = mode.__enter__
        monkeypatch.setattr(
            mode, "__enter__", lambda self, real=real: (taken.append(type(self).__name__), real(self))[1]
        )
    monkeypatch.setattr(time, "perf_counter", no("perf_counter"))
    for name in ("Event", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, no(name))
    for _ in range(70):  # the 65th replay waited for its event
        steps(m, 1)
    assert taken == []


@pytest.mark.parametrize(
    ("choice", "modes"),
    [(Choice(("0",), keep=("@product",)), {"KeepCalls"}), (Choice(("0",), carry=True), {"Carry"})],
    ids=["kept by kind", "carried"],
)
def test_a_plan_that_meets_calls_by_kind_has_its_mode(
    choice: Choice, modes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that are kept or carried by their kind are met by one function mode, and no other mode is entered."""
    m = model(Block())
    apply(m, Plan((choice,)))
    entered: set[str] = set()
    for mode in (TorchDispatchMode, TorchFunctionMode):
        real = mode.__enter__
        monkeypatch.setattr(
            mode, "__enter__", lambda self, real=real: (entered.add(type(self).__name__), real(self))[1]
        )
    steps(m, 2)
    assert entered == modes


def test_measuring_changes_nothing() -> None:
    """The step that is looked at has the gradients of one that is not."""
    m = model(Block())
    handle = apply(m, Plan((Choice(("0",)),)))
    grads = []
    for watched in (True, True, False):
        m.zero_grad(set_to_none=True)
        with handle.watch() if watched else nullcontext():
            steps(m, 1)
        grads.append([p.grad.clone() for p in m.parameters()])
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))


def test_a_copy_has_figures_of_its_own() -> None:
    """What a copy of the model does is not in the report of the original."""
    m = model(Block())
    handle = apply(m, Plan((Choice(("0",)),)))
    with handle.watch():
        other = copy.deepcopy(m)
        steps(other, 2)
    assert handle.report().rows[0].replays == 0
    assert all(placed.figures is None for module in other for placed in wrappers_on(module))


@pytest.mark.parametrize(
    ("run", "remark"),
    [
        (lambda m: None, "has not run with gradients"),
        (
            lambda m: steps(m, 2),
            "drops nothing: all that is saved inside are inputs, parameters and what saved calls store",
        ),
    ],
)
def test_a_region_that_drops_nothing_is_marked(run: object, remark: str) -> None:
    """A region around one product drops nothing and says so; one that never ran says that."""
    m = model(nn.Linear(WIDTH, WIDTH))
    handle = apply(m, Plan((Choice(("0",)),)))
    with handle.watch():
        run(m)
    report = handle.report()
    assert report.remark(report.rows[0]) == remark
    assert remark in str(report)


def row(path: str, saved_bytes: int, seconds: float) -> Row:
    return Row(Choice((path,)), ("Block",), saved_bytes, 10**9, seconds, 2)


def test_a_region_that_drops_too_little_for_its_time_is_marked() -> None:
    """Less than one percent of the bytes per share of the time is marked with both figures."""
    report = Report((row("a", 10**6, 0.001), row("b", 100, 0.009)))
    assert report.remark(report.rows[0]) == ""
    assert report.remark(report.rows[1]) == "drops 0.01% of the bytes for 90% of the time"


def test_prints_alike_regions_in_one_line() -> None:
    """Regions that differ in a number only are one line with their count, and the total comes first."""
    rows = [row(f"layers.{i}", 2**20, 0.002) for i in range(3)] + [row("head", 2**21, 0.004)]
    assert str(Report(tuple(rows))).split("\n") == [
        "5.00 MiB dropped, 10.000 ms replayed per step and call",
        "dropped MiB  replay ms  GFLOP  replays       region",
        "       1.00      2.000      1        2  3 x  recompute layers.*",
        "       2.00      4.000      1        2       recompute head",
    ]


def test_json_has_every_figure() -> None:
    """The JSON holds the rows with plain numbers and the remarks."""
    data = json.loads(Report((row("a", 100, 0.5),)).to_json())
    assert data["saved_bytes"] == 100
    assert data["rows"][0]["choice"]["paths"] == ["a"]
    assert data["rows"][0]["seconds"] == 0.5
    assert data["rows"][0]["remark"] == ""
