"""`auto(elastic=)`: the plan with the least peak is the floor, and the budget is the limit that regions share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.limited import limited, missing
from torch_recompute import ArgumentError, BudgetError, Elastic, Plan, auto, make_plan

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("numpy", reason="numpy is not installed (planning needs it)")

WIDTH, ROWS, LAYERS = 32, 64, 4


class Block(nn.Module):
    """Two products with an activation between, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.up(x).relu().sin()))


class Stack(nn.Module):
    """Layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


class Training:
    """A model, its optimizer and steps of it."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = Stack()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.handle: Any = None

    def auto(self, **options: Any) -> Training:
        self.handle = auto(self.model, batch(), optimizer=self.optimizer, **options)
        return self

    def step(self, rows: int = ROWS) -> list[torch.Tensor]:
        """Runs a step and returns its gradients."""
        torch.manual_seed(5)
        self.model(batch(rows))["loss"].backward()
        found = [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found


def batch(rows: int = ROWS) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH)


def floor() -> Plan:
    mine = Training()
    return make_plan(mine.model, batch(), budget=0, optimizer=mine.optimizer)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_every_step_stays_under_the_limit_and_all_is_kept_where_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is that with the least peak; steps are plain's to the bit, from far above its peak down to near it."""
    least = floor()
    with limited() as memory:
        plain = Training()
        wanted = [plain.step() for _ in range(5)]
        need = least.predicted_peak_bytes or 0
        replays: list[int] = []
        for limit in (10 * need, round(1.1 * need)):
            resident = memory.live()
            mine = Training().auto(elastic=Elastic(resident + limit, slack=0.0, meter=memory))
            assert "recomputed when memory is short" in capsys.readouterr().out
            assert mine.handle.plan.choices == tuple(replace(choice, elastic=True) for choice in least)
            memory.limit = resident + limit
            for number in range(5):
                got = mine.step()
                assert all(map(torch.equal, got, wanted[number]))
                del got
            memory.limit = None
            rows = mine.handle.report().elastic.rows
            replays.append(sum(row.replayed for row in rows))
            assert not any(row.run_again for row in rows)
            mine.handle.remove()
            del mine
        assert replays[0] == len(least.choices)  # the first step, in which nothing is kept
        assert replays[1] > replays[0]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"elastic": True, "budget": 1000}, BudgetError, "is too small"),
        ({"elastic": Elastic(1000)}, BudgetError, "is too small"),
        ({"elastic": True, "offload": True}, ArgumentError, "elastic and offload"),
        ({"elastic": Elastic("1GiB"), "budget": "2GiB"}, ArgumentError, "a limit of its own"),
        ({"elastic": "fit"}, ArgumentError, "takes the memory that regions share"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    """A limit below the floor, two limits, and offloading beside it are refused, and leave the model as it was."""
    mine = Training()
    with pytest.raises(error, match=text):
        mine.auto(**options)
    Training.auto(mine).handle.remove()


def test_a_budget_is_the_limit() -> None:
    """In bytes as it is, as a share by what recomputation can free, and "fit" until the first step."""
    need, plain = floor().predicted_peak_bytes or 0, floor().prediction
    assert plain is not None
    assert Training().auto(elastic=True, budget="1GiB").handle.elastic.limit == 2**30
    half = Training().auto(elastic=True, budget=0.5).handle.elastic.limit
    assert half == need + (plain.plain_peak_bytes - need) // 2
    mine = Training().auto(elastic=True)
    assert mine.handle.elastic.limit == 0
    mine.step()
    assert mine.handle.elastic.limit > need


def test_a_file_keeps_the_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan in the file is the one with the least peak, for any limit; regions become elastic as it is applied."""
    file = tmp_path / "plan.json"
    first = Training().auto(elastic=True, budget="1GiB", cache=file)
    assert '"elastic"' not in file.read_text()
    again = Training().auto(elastic=True, budget="2GiB", cache=file)
    assert again.handle.plan.choices == first.handle.plan.choices
    assert "planned again" not in capsys.readouterr().out


def test_planning_again_keeps_the_memory() -> None:
    """The first steps show a larger batch: another plan comes, for which the regions share what they did before."""
    mine = Training().auto(elastic=True, budget="1GiB")
    pool = mine.handle.elastic
    for count in (ROWS, 2 * ROWS, 2 * ROWS, ROWS):
        mine.step(count)
    assert len(mine.handle.history) == 2
    assert mine.handle.elastic is pool
    assert all(choice.elastic for choice in mine.handle.plan)
    rows = mine.handle.report().elastic.rows
    assert len(rows) == len(mine.handle.plan)
    assert all(row.kept + row.dropped == 4 for row in rows)  # the same regions, before and after
    assert all(row.dropped <= 2 for row in rows)
