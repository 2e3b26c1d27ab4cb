"""`auto(elastic=)`: the plan with the least peak is the floor, and the budget is the limit that regions share."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.limited import limited, missing
from torch_recompute import ArgumentError, BudgetError, Elastic, Plan, auto, make_plan
from torch_recompute.simulation.devices import Roofline

pytest.importorskip("numpy", reason="numpy is not installed (planning needs it)")

pytestmark = pytest.mark.usefixtures("given_prices")

WIDTH, ROWS, LAYERS = 32, 64, 4


@pytest.fixture
def given_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations take what a device of these speeds takes, and no step is timed: a step has one plan.

    Its host takes longer to keep a call (`beside`) than to launch the product that this saves.
    """
    given = Roofline("given", {4: 1e11}, 1e10, 1e-6, kind="cpu")
    monkeypatch.setattr("torch_recompute.planner.planner.prices_for", lambda step, device: given)


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
        replays: list[list[int]] = []
        for limit in (10 * need, round(1.1 * need)):
            resident = memory.live()
            mine = Training().auto(elastic=Elastic(resident + limit, slack=0.0, meter=memory))
            assert "recomputed when memory is short" in capsys.readouterr().out
            assert mine.handle.plan.choices == tuple(replace(choice, elastic=True) for choice in least)
            memory.limit = resident + limit
            replays.append([])
            for number in range(5):
                got = mine.step()
                assert all(map(torch.equal, got, wanted[number]))
                del got
                replays[-1].append(sum(row.replayed for row in mine.handle.report().elastic.rows))
            memory.limit = None
            assert not any(row.run_again for row in mine.handle.report().elastic.rows)
            mine.handle.remove()
            del mine
        nested = any(choice.nested for choice in least)  # whose parts are called in replays, too
        assert replays[0][0] == replays[0][-1]  # of the first step, in which nothing is kept
        assert replays[0][0] > len(least.choices) if nested else replays[0][0] == len(least.choices)
        assert replays[1][-1] > replays[0][-1]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"elastic": True, "budget": 1000}, BudgetError, "is too small"),
        ({"elastic": Elastic(1000)}, BudgetError, "is too small"),
        ({"elastic": True, "offload": True}, ArgumentError, "elastic and offload"),
        ({"elastic": Elastic("1GiB"), "budget": "2GiB"}, ArgumentError, "a limit of its own"),
        ({"elastic": "fit"}, ArgumentError, "takes the memory that regions share"),
        ({"elastic": True, "sizes": "all"}, ArgumentError, "Write the lengths that come"),
        ({"sizes": [torch.ones(2)]}, ArgumentError, "takes lengths of sequences"),
        ({"elastic": True, "sizes": 64}, ArgumentError, "takes several lengths"),
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
    mine = Training().auto(elastic=True)
    assert mine.handle.elastic.limit == 0
    mine.step()
    assert mine.handle.elastic.limit > need


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_share_is_of_the_step_whatever_else_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process holds besides the step is no part of the share, nor of the slack; a CPU's heap is full of it."""
    need, prediction = floor().predicted_peak_bytes or 0, floor().prediction
    assert prediction is not None
    half = need + (prediction.plain_peak_bytes - need) // 2
    with limited() as memory, monkeypatch.context() as patch:
        patch.setattr("torch_recompute.memory.elastic.meter_for", lambda _: memory)
        other = torch.zeros(1 << 22)
        mine = Training()
        others = memory.live() - sum(weight.nbytes for weight in mine.model.parameters())
        mine.auto(elastic=True, budget=0.5)
        assert others >= other.nbytes
        assert mine.handle.elastic.limit == pytest.approx(half + others / 0.95, rel=1e-3)
    usual = Training().auto(elastic=True, budget=0.5)
    for _ in range(3):
        usual.step()
    assert sum(row.kept for row in usual.handle.report().elastic.rows) > 0


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("own", [False, True])
def test_a_limit_that_only_the_step_alone_fits_under_is_refused_at_once(own: bool) -> None:
    """In words of who wrote the limit, with bytes that are enough; the limit counts what is alive beside the step."""
    need = floor().predicted_peak_bytes or 0
    given = {"elastic": Elastic(2 * need)} if own else {"elastic": True, "budget": 2 * need}
    with pytest.raises(BudgetError, match=r"^Elastic\('" if own else r"^budget=[0-9,]+ bytes") as caught:
        Training().auto(**given)
    assert caught.value.smallest > 2 * need
    enough = Training().auto(elastic=True, budget=caught.value.smallest)
    for _ in range(3):
        enough.step()
    assert (enough.handle.report().elastic.miss or 0) > 0


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_other_tensors_that_are_alive_are_part_of_the_limit() -> None:
    """A limit between the step's and that with another tensor is refused; without the tensor it is enough."""
    need = floor().predicted_peak_bytes or 0
    with limited() as memory:
        mine = Training()
        before = memory.live() - sum(weight.nbytes for weight in mine.model.parameters())
        limit, other = before + 2 * need, torch.zeros(need)
        with pytest.raises(BudgetError, match="are alive beside this step"):
            mine.auto(elastic=Elastic(limit, slack=0.0, meter=memory))
        del other
        mine.auto(elastic=Elastic(limit, slack=0.0, meter=memory)).step()


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
    before, after = mine.handle.history
    same = {choice.paths[0] for choice in before if choice in [*after]}  # measured prices may change the others
    assert same
    assert {row.kept + row.dropped for row in rows if row.name in same} == {4}  # before and after
    assert all(row.dropped <= 2 for row in rows)


class Said:
    """A meter that says what it was told."""

    def __init__(self, alive: int) -> None:
        self.alive = alive

    def live(self) -> int:
        return self.alive

    lap = live

    def reset_lap(self) -> None:
        """Begins a lap."""


@pytest.mark.parametrize("budget", [0, 0.3])
def test_planning_again_takes_the_share_again(
    budget: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a larger batch a share is a higher limit, above what is alive beside the step then, and regions go by it."""
    meter = Said(0)
    monkeypatch.setattr("torch_recompute.memory.elastic.meter_for", lambda _: meter)
    mine = Training().auto(elastic=True, budget=budget)
    assert mine.handle.elastic.limit == _share_of(mine.handle.plan, budget)
    for count in (ROWS, 2 * ROWS, 2 * ROWS, ROWS):
        mine.step(count)
    assert len(mine.handle.history) == 2
    assert "without success" not in capsys.readouterr().out
    large = Training()
    plan = make_plan(large.model, batch(2 * ROWS), budget=0, optimizer=large.optimizer)
    assert mine.handle.report().elastic.limit == _share_of(plan, budget)


@pytest.mark.parametrize(("alive", "counted"), [(1_700_000, 1_700_000), (1_800_000, 1_700_000)])
def test_planning_again_counts_what_python_took_since(
    alive: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a sixteenth more than at first: an optimizer's states, which a plan knows by name alone, are no more."""
    weights = sum(weight.nbytes for weight in Stack().parameters())
    held, meter = weights + batch().nbytes, Said(0)
    monkeypatch.setattr("torch_recompute.memory.elastic.meter_for", lambda _: meter)
    mine = Training()
    meter.alive = held + 1_600_000
    mine.auto(elastic=True, budget=0.5)
    mine.step()
    meter.alive = held + batch().nbytes + alive
    for count in (2 * ROWS, 2 * ROWS, ROWS):
        mine.step(count)
    assert len(mine.handle.history) == 2
    assert mine.handle.elastic.limit == _share_of(mine.handle.plan, 0.5) + math.ceil(counted / 0.95)


def _share_of(plan: Plan, share: float) -> int:
    """The bytes that a share means for the step of a plan with the least peak."""
    prediction = plan.prediction
    assert prediction is not None
    return prediction.peak_bytes + int(share * (prediction.plain_peak_bytes - prediction.peak_bytes))


def test_planning_again_leaves_a_limit_that_was_set_since() -> None:
    """Between two steps the limit is the user's own to change, whatever share it was given as at first."""
    mine = Training().auto(elastic=True, budget=0.3)
    mine.step()
    mine.handle.elastic.limit = "2GiB"
    for count in (2 * ROWS, 2 * ROWS, ROWS):
        mine.step(count)
    assert len(mine.handle.history) == 2
    assert mine.handle.elastic.limit == 2**31


LENGTHS = 16, 32, 48, 64, 96, 128
HEADS = 4


class Attention(nn.Module):
    """Scores of all tokens with all: what is kept grows with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return x + self.out((scores @ v).transpose(1, 2).flatten(2))


def tokens(length: int) -> torch.Tensor:
    """A batch of embeddings [batch, sequence, width]."""
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))


def attending() -> Stack:
    """Layers with attention and a loss."""
    torch.manual_seed(3)
    model = Stack()
    model.layers = nn.ModuleList(Attention() for _ in range(LAYERS))
    return model


@pytest.mark.parametrize("sizes", [(), LENGTHS], ids=["one size", "sizes"])
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_what_was_simulated_is_known_before_the_first_step(sizes: tuple[int, ...]) -> None:
    """What each stretch takes at each size is what steps that keep nothing then take, to the byte.

    A region also copies the state of the CPU's generator, which no operation makes.
    """
    with limited() as memory:
        model = attending()
        pool = Elastic(2**30, slack=0.0, meter=memory, always=True)
        handle = auto(model, tokens(LENGTHS[-1]), elastic=pool, sizes=sizes, replan=False)
        expected = learned(handle)
        assert len(sizes or (1,)) == min(len(points) for stretches in expected for points in stretches.values())
        for length in sizes or LENGTHS[-1:]:
            for _ in range(2):
                out = model(tokens(length))
                out["loss"].backward()
                del out
                model.zero_grad()
        state = torch.get_rng_state().nbytes
        for mine, theirs in zip(learned(handle), expected, strict=True):
            for kind, points in theirs.items():
                more = {mine[kind][size][1] - taken for size, (_, taken) in points.items()}
                assert more <= {0, state}, (kind, more)


def learned(handle: Any) -> list[dict[str, Any]]:
    """The table of each region: stretches, each with its sizes and bytes."""
    parts = handle.elastic._pool.parts or [make.args[0] for one in handle._watched for make in one.makes.values()]
    return [
        {kind: dict(known._points) for kind, known in part.needs.items() if known._points}
        for part in sorted(parts, key=lambda part: part.name)
    ]


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_longest_call_is_kept_when_it_first_comes() -> None:
    """Where it fits: nothing has to be guessed from shorter calls."""
    with limited() as memory:
        plain = attending()
        before = memory.live()
        memory.reset_lap()
        plain(tokens(LENGTHS[-1]))["loss"].backward()
        most = memory.lap() - before
        replays: list[int] = []
        for sizes in ((), LENGTHS):
            model = attending()
            limit = memory.live() + round(1.2 * most)
            handle = auto(
                model, tokens(LENGTHS[-1]), elastic=Elastic(limit, slack=0.0, meter=memory), sizes=sizes, replan=False
            )
            for length in (LENGTHS[0], LENGTHS[-1]):
                model(tokens(length))["loss"].backward()
                model.zero_grad()
            replays.append(sum(row.replayed for row in handle.report().elastic.rows) - len(handle.plan.choices))
            handle.remove()
        assert replays == [0, 0]


def test_sizes_are_planned_without_elastic_regions_too(tmp_path: Path) -> None:
    """As by `make_plan`; a longer call in the first steps becomes a size, and a file is read again for its sizes."""
    model, file = attending(), tmp_path / "plan.json"
    plan = make_plan(model, tokens(64), budget=0.5, sizes=LENGTHS[:4])
    handle = auto(model, tokens(64), budget=0.5, sizes=LENGTHS[:4], cache=file)
    assert [one.choices for one in handle.plan.sizes] == [one.choices for one in plan.sizes]
    model(tokens(64))["loss"].backward()
    model.zero_grad()
    with pytest.warns(RuntimeWarning, match="is called with a first tensor of 2 x 96 x 32"):
        loss = model(tokens(96))["loss"]
    loss.backward()
    model.zero_grad()
    model(tokens(64))["loss"].backward()
    assert [one.shape[1] for one in handle.plan.sizes] == [16, 32, 48, 64, 96]
    handle.remove()
    texts = file.read_text()
    auto(model, tokens(64), budget=0.5, sizes=LENGTHS[:4], cache=file).remove()
    assert file.read_text() == texts
    auto(model, tokens(64), budget=0.5, sizes=LENGTHS[:3], cache=file).remove()
    assert file.read_text() != texts
