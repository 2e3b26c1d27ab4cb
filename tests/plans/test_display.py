"""Results as Python displays them: a `repr` of one line, and in notebooks the printed text with HTML tables."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import torch_recompute
from torch_recompute import (
    Choice,
    Plan,
    SizeClass,
    StagePlan,
    StagePlans,
    apply,
    audit,
    doctor,
    make_plan,
    measure,
    profile,
    saved_activations,
    simulate,
    verify,
)
from torch_recompute.errors.text import counted, shown, table
from torch_recompute.plan.units import find_units

LAYERS = 12
X = torch.ones(16, 8)


class Net(nn.Module):
    """Many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Waits(nn.Linear):
    """A layer that waits for the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        return nn.functional.gelu(super().forward(x)) * x.sum().item()


REGIONS = Plan(tuple(Choice((f"layers.{number}",)) for number in range(LAYERS)))


@functools.cache
def planned() -> Plan:
    return make_plan(Net(), X, budget=0.3, loss=lambda out: out, device="h100")


@functools.cache
def measured() -> Any:
    net = Net()
    with measure(net) as memory:
        net(X).backward()
    return memory


def reported() -> Any:
    net = Net()
    handle = apply(net, REGIONS)
    with handle.watch():
        net(X).backward()
    return handle.report()


RESULTS: dict[str, Callable[[], Any]] = {
    "Plan": planned,
    "Plan by hand": lambda: REGIONS,
    "Prediction": lambda: planned().prediction,
    "SizeClass": lambda: SizeClass((2, 8), REGIONS.choices),
    "Profile": lambda: profile(Net(), X, device="h100"),
    "StagePlan": lambda: StagePlan(0, 0, 2, ("layers.0",), REGIONS),
    "StagePlans": lambda: StagePlans((StagePlan(0, 0, 2, ("layers.0",), planned()),)),
    "Simulation": lambda: simulate(Net(), X, plan=REGIONS),
    "Measurement": measured,
    "Reading": lambda: measured().on(),
    "SavedActivations": lambda: saved_activations(Net(), X),
    "Verification": lambda: verify(Net(), X, plan=REGIONS),
    "Audit": lambda: audit(nn.Sequential(Waits(8, 8)), X, modules=["0"]),
    "findings": lambda: doctor.examine(Net(), X, plan=REGIONS, run=False),
    "figures": reported,
    "units": lambda: find_units(Net()),
}
TABLES = {"Plan", "Prediction", "Profile", "StagePlans", "Simulation", "SavedActivations", "Audit", "figures"}
# Public classes that are no results: what a person writes, a handle, errors, stores.
WRITTEN = {
    "Choice",
    "RecomputeConfig",
    "Stages",
    "Ranks",
    "Applied",
    "OutputDiscardCheckpoint",
    "Elastic",
    "OnDevice",
    "OnDisk",
    "OnHost",
    "Store",
}


class Read(HTMLParser):
    """The text of a page, its tags and its cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.open, self.cells = "", [""], 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        """Counts."""
        self.cells += tag == "td"
        self.open += [tag] if tag != "br" else []

    def handle_endtag(self, tag: str) -> None:
        """Ends what began last."""
        assert self.open.pop() == tag
        self.text += " "

    def handle_data(self, data: str) -> None:
        """Adds it."""
        self.text += data


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_short_in_python_and_whole_in_a_notebook(name: str) -> None:
    """Its `repr` is a line; its HTML is well formed, has no mark left, and the words that `print` shows, in order."""
    result = RESULTS[name]()
    assert 0 < len(repr(result)) <= 400
    assert "\n" not in repr(result)
    assert "0x" not in repr(result)
    page = Read(result._repr_html_())
    printed = str(result).removeprefix("<").removesuffix(">")
    assert page.text.split() == printed.split()
    assert page.open == [""]
    assert not set(result._repr_html_()) & {"\x1d", "\x1e", "\x1f"}
    assert (page.cells > 0) == (name in TABLES)


def test_every_public_result_is_shown() -> None:
    """Each public class of data has a notebook's form, except those that a person writes."""
    for name in torch_recompute.__all__:
        kind = getattr(torch_recompute, name)
        if inspect.isclass(kind) and not issubclass(kind, BaseException) and name not in WRITTEN:
            assert hasattr(kind, "_repr_html_"), name


@shown
@dataclasses.dataclass(repr=False)
class Printed:
    """A result with a table."""

    rows: list[tuple[str, str]]

    def __str__(self) -> str:
        return "\n".join(["a < b & c", *(f"  {line}" for line in table(self.rows, right=1)), "end"])


def test_cells_are_escaped() -> None:
    """What looks like HTML is text; a line break in a cell stays in it; outside of a notebook nothing has changed."""
    result = Printed([("1", "<script>"), ("22", "two\nlines")])
    said = result._repr_html_()  # type: ignore[attr-defined]
    assert said.count("<tr>") == 2
    assert "&lt;script&gt;" in said
    assert "two<br>lines" in said
    assert "a &lt; b &amp; c" in said
    assert str(result) == "a < b & c\n   1  <script>\n  22  two\nlines\nend"
    assert repr(result) == "<Printed: a < b & c>"


def test_a_long_line_is_cut() -> None:
    """No first line makes a `repr` longer than a few lines of a screen."""
    result = Printed([])
    result.__class__ = type("Long", (Printed,), {"__str__": lambda self: "x" * 10_000})
    assert len(repr(result)) < 400


@pytest.mark.parametrize(
    ("number", "thing", "said"),
    [(1, "region", "1 region"), (3, "region", "3 regions"), (1, "batch", "1 batch"), (128, "batch", "128 batches")],
)
def test_a_number_of_things(number: int, thing: str, said: str) -> None:
    """More than one of a thing is its plural."""
    assert counted(number, thing) == said
