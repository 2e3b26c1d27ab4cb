"""Elastic plans: what a plan says of its regions, and what these do under an allocator with a limit.

Every way to write a region in a plan is a row of `PLANS`. Over all of them: gradients are plain PyTorch's to the bit,
whatever is evicted, and the bytes alive stay under the limit, which the allocator enforces.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from support.elastic import Script
from support.limited import Limited, limited, missing
from torch_recompute import Applied, ArgumentError, Choice, Elastic, Plan, apply, no_recompute, simulate
from torch_recompute.plan.plan import Line, Prediction, SizeClass

ROWS, WIDTH, LAYERS = 64, 32, 6
needs_limit = pytest.mark.skipif(bool(missing()), reason=missing())
EVICTIONS = [("never", False), ("forward", False), ("forward", True), ("inside", True)]


class Block(nn.Module):
    """Two products around a call that has a name, with dropout at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = no_recompute(lambda h: torch.relu(h).sin().exp().cos(), name="wide")(self.up(x))
        return x + self.drop(self.down(wide))


def each(**options: Any) -> Plan:
    return Plan(tuple(Choice((str(number),), **options) for number in range(LAYERS)))


def in_threes(**options: Any) -> Plan:
    return Plan((Choice(("0", "1", "2"), **options), Choice(("3", "4", "5"), **options)))


PLANS = {
    "layers": each(),
    "products kept": each(keep=("@product",)),
    "modules kept": each(keep=("down",)),
    "values unused": each(keep=("down@values_unused",)),
    "decisions carried": each(carry=True),
    "together": in_threes(),
    "together, then each again": in_threes(nested=True),
    "calls of a name": Plan(tuple(Choice((f"{number}@wide",)) for number in range(LAYERS))),
    "with an offload": Plan((Choice(("0@product",), offload=True), *each().choices[1:])),
    "two sizes": Plan(in_threes().choices, sizes=(SizeClass((ROWS // 2, WIDTH), each().choices),)),
}


rows = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def batch(length: int = ROWS) -> torch.Tensor:
    return torch.linspace(-1, 1, length * WIDTH).view(length, WIDTH)


def step(m: Callable[..., Any], parameters: Iterator[nn.Parameter], x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of one training step."""
    torch.manual_seed(1)
    held = list(parameters)
    for parameter in held:
        parameter.grad = None
    m(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in held if parameter.grad is not None]


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


# --- as data ---


def test_elastic_is_in_json_where_it_is_true() -> None:
    """A choice's JSON says `"elastic": true`, or nothing; reading gives it back, and a digest and a diff tell it."""
    plain, elastic = each(), each(elastic=True)
    written = [json.loads(plan.to_json())["choices"] for plan in (plain, elastic)]
    assert all("elastic" not in choice for choice in written[0])
    assert all(choice["elastic"] is True for choice in written[1])
    assert Plan.from_json(elastic.to_json()) == elastic != plain == Plan.from_json(plain.to_json())
    assert plain.digest() != elastic.digest() == Plan.from_json(elastic.to_json()).digest()
    assert "+0 recomputed when memory is short" in plain.diff(elastic)
    sizes = Plan(sizes=(SizeClass((8, WIDTH), elastic.choices),))
    assert Plan.from_json(sizes.to_json()) == sizes
    assert sizes.digest() != Plan(sizes=(SizeClass((8, WIDTH), plain.choices),)).digest()


def test_a_printed_plan_says_when_its_regions_are_recomputed() -> None:
    """Choices, a prediction's sentence and its lines say `recomputed when memory is short`; `explain` says what."""
    kept = Choice(("0", "1"), ("@product",), nested=True, elastic=True, labels=("asked",))
    words = "0 to 1 recomputed when memory is short, then each again, matmuls kept  (asked)"
    assert str(kept) == words
    assert str(Choice(("",), elastic=True)) == "the model recomputed when memory is short"
    lines = (
        Line("0", 1, "not recomputed", 8, 0, 0.0),
        Line("*", 3, "recomputed, matmuls kept", 8, 8, 1.0, whole=True),
    )
    prediction = Prediction(100, 80, 120, 2.0, 1.0, 5, 1.0, "cpu", "", lines)
    handle = apply(model(), Plan(each().choices, prediction=prediction), elastic=Elastic("1GiB"))
    printed = str(handle.plan)
    assert handle.plan.summary == (
        "at least 80 of 120 bytes at the peak, up to 100.0 % slower, 3 of 4 layers recomputed when memory is short"
    )
    assert "0: not recomputed" in printed
    assert "*: recomputed when memory is short, matmuls kept" in printed
    assert "keeps its activations while memory lasts" in " ".join(handle.plan.explain().split())
    again = apply(model(), handle.plan, elastic=Elastic("1GiB")).plan
    assert str(again) == printed


@pytest.mark.parametrize("plan", [Plan((Choice(("0",), offload=True),))])
def test_a_plan_without_regions_cannot_be_elastic(plan: Plan) -> None:
    """What is offloaded is recomputed in no step: asking for it to be elastic is an error, which leaves nothing."""
    m = model()
    with pytest.raises(ArgumentError, match="no region of this plan elastic: offload 0"):
        apply(m, plan, elastic=Elastic("1GiB"))
    with pytest.raises(ArgumentError, match="nothing is recomputed"):
        Plan((Choice(("0",), offload=True, elastic=True),))
    with pytest.raises(ArgumentError, match="takes the memory that regions share"):
        apply(m, each(), elastic=True)  # type: ignore[arg-type]
    apply(m, plan).remove()


class ShardedOver:
    """A store of that name: what is put there is gathered by all ranks."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def get(self, handle: torch.Tensor) -> torch.Tensor:
        return handle


def test_sharded_inputs_are_not_elastic() -> None:
    """A region whose inputs all ranks gather is recomputed in every step, which the report says; asked for, refused."""
    m = model()
    plan = Plan((Choice(("0",), store="sharded"), Choice(("1",), store="sharded"), *each().choices[2:]))
    handle = apply(m, plan, stores={"sharded": ShardedOver()}, elastic=Elastic("1GiB"))
    assert [choice.elastic for choice in handle.plan] == [False, False, True, True, True, True]
    assert "in every step: recompute *, inputs sharded over ranks" in str(handle.report())
    handle.remove()
    with pytest.raises(ArgumentError, match="the plan says: 0 recomputed when memory is short"):
        apply(m, each(elastic=True, store="sharded"), stores={"sharded": ShardedOver()})


# --- in a model ---


@pytest.mark.parametrize(("when", "saved"), EVICTIONS)
@rows
def test_evictions_do_not_change_gradients(plan: Plan, when: str, saved: bool) -> None:
    """Kept, evicted when a forward ends or in the middle of others, with saved calls or without: plain gradients."""
    for length in (ROWS, ROWS // 2) if plan.sizes else (ROWS,):
        plain = model()
        wanted = step(plain, plain.parameters(), batch(length))
        m, script = model(), Script(when, saved)
        handle = apply(m, plan, elastic=script)  # type: ignore[arg-type]
        assert all(choice.elastic or choice.offload for choice in handle.plan.all_choices)
        for _ in range(2):
            assert same(step(m, m.parameters(), batch(length)), wanted)
        assert bool(script.replays) == (when != "never")


@needs_limit
@pytest.mark.parametrize("name", PLANS)
def test_bytes_alive_stay_under_the_limit(name: str) -> None:
    """From more than plain takes down to what the plan takes: no allocation fails, and only then there are replays."""
    plan = PLANS[name]
    with limited() as memory:
        m = model()
        wanted = step(m, m.parameters(), batch())
        most = peak(memory, m)
        handle = apply(m, plan)
        step(m, m.parameters(), batch())
        least = peak(memory, m)
        handle.remove()
        replays: list[int] = []
        for limit in (4 * most, (most + least) // 2, least):
            pool = Elastic(limit, slack=0.0, meter=memory)
            handle = apply(m, plan, elastic=pool)
            step(m, m.parameters(), batch())  # in which nothing is kept
            first = replayed(handle)
            memory.limit = pool.limit
            for _ in range(2):
                assert same(step(m, m.parameters(), batch()), wanted)
            memory.limit = None
            assert not any(row.run_again for row in pool.report().rows)
            replays.append(replayed(handle) - first)
            handle.remove()
        assert replays[0] == 0
        assert 0 < min(replays[1:]) <= max(replays[1:]) <= 2 * first


def replayed(handle: Applied) -> int:
    report = handle.report().elastic
    assert report is not None
    return sum(row.replayed for row in report.rows)


def peak(memory: Limited, m: nn.Module) -> int:
    for parameter in m.parameters():
        parameter.grad = None
    memory.reset_lap()
    step(m, m.parameters(), batch())
    return memory.lap()


@needs_limit
@pytest.mark.parametrize("name", ["layers", "products kept", "together", "together, then each again"])
@pytest.mark.parametrize("when", ["never", "forward"])
def test_an_allocation_that_fails_changes_nothing(name: str, when: str) -> None:
    """Every seventh allocation of a step fails in turn: plain gradients, or the error passes and nothing is left."""
    with limited() as memory:
        m = model()
        wanted = step(m, m.parameters(), batch())
        x = batch()
        script: Any = Script(when)
        script.retries = 2
        apply(m, PLANS[name], elastic=script)
        for _ in range(2):
            step(m, m.parameters(), x)
        before, passed = memory.live(), 0
        count = memory.count
        step(m, m.parameters(), x)
        for nth in range(1, memory.count - count, 7):
            memory.fail_at(nth)
            try:
                got = step(m, m.parameters(), x)
            except torch.OutOfMemoryError:
                passed += 1
            else:
                assert same(got, wanted)
                del got
            finally:
                memory.fail_at(None)
        assert script.failures > 5
        assert passed > 0  # in the backward itself
        step(m, m.parameters(), x)
        assert memory.live() <= before


def test_a_plan_read_from_json_has_memory_of_its_own() -> None:
    """Choices that are elastic need no `elastic=`: they share one `Elastic("fit")`; the others stay as they are."""
    m = model()
    plan = Plan((Choice(("0",), elastic=True), Choice(("1",)), Choice(("2",), elastic=True)))
    handle = apply(m, Plan.from_json(plan.to_json()))
    assert isinstance(handle.elastic, Elastic)
    assert handle.plan == plan
    for _ in range(2):
        step(m, m.parameters(), batch())
    report = handle.report()
    assert report.elastic is not None
    assert [(row.name, row.kept, row.dropped, row.replayed) for row in report.elastic.rows] == [
        ("0", 1, 1, 1),
        ("2", 1, 1, 1),
    ]
    assert "in every step: recompute 1" in str(report)
    handle.remove()
    assert apply(m, each()).elastic is None


def test_the_report_is_of_the_regions_of_the_plan() -> None:
    """Two models share memory: each handle reports on its own regions, and the memory on both; JSON has all of it."""
    pool, handles = Elastic("1GiB"), list[Any]()
    for _ in range(2):
        m = model()
        handles.append(apply(m, PLANS["together"], elastic=pool))
        with handles[-1].watch():
            for _ in range(3):
                step(m, m.parameters(), batch())
    for handle in handles:
        report = handle.report()
        assert [row.name for row in report.elastic.rows] == [str(number) for number in range(LAYERS)]
        assert all((row.kept, row.dropped, row.replayed) == (2, 1, 1) for row in report.elastic.rows)
        data = json.loads(report.to_json())
        assert data["elastic"]["rows"][0]["kept"] == 2
        assert data["elastic"]["limit"] == 2**30
        assert data["elastic"]["miss"] == report.elastic.miss > 0
        assert "nearest to the limit" in str(report)
        assert "MiB dropped" in str(report)  # was watched
    assert len(pool.report().rows) == 2 * LAYERS
    plain = apply(model(), each()).report()
    assert plain.elastic is None
    assert "elastic" not in plain.to_json()


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", ["layers", "together, then each again", "calls of a name"])
def test_copies_are_elastic(way: str, name: str) -> None:
    """A deep copy shares the memory, and learns for itself; a pickle begins with one of the same settings."""
    m, pool = model(), Elastic("1GiB", slack=0.25)
    apply(m, PLANS[name], elastic=pool)
    wanted = step(m, m.parameters(), batch())
    if way == "deepcopy":
        other: Any = copy.deepcopy(m)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(m))
    else:
        torch.save(m, buffer := io.BytesIO())
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    theirs = {id(module.forward.memory): module.forward.memory for module in other}
    assert len(theirs) == 1
    (memory,) = theirs.values()
    assert (memory is pool) == (way == "deepcopy")
    assert (memory.limit, memory._pool.slack) == (2**30, 0.25)
    for _ in range(2):
        assert same(step(other, other.parameters(), batch()), wanted)
    rows_of_copy = memory.report().rows[-LAYERS:]
    assert all((row.dropped, row.kept) == (1, 1) for row in rows_of_copy)


def test_a_replica_is_recomputed_in_every_step() -> None:
    """What `DataParallel` makes for another device does not take part: the memory is of one device."""
    m, pool = nn.Sequential(Block()), Elastic("1GiB")
    apply(m, Plan((Choice(("0",)),)), elastic=pool)
    block: Any = m[0]
    replica = block._replicate_for_data_parallel()
    assert (replica.forward.memory, block.forward.memory) == (None, pool)
    replica.up, replica.down, replica.drop = m[0].up, m[0].down, m[0].drop
    step(replica, m.parameters(), batch())
    assert not pool.report().rows


def test_regions_that_are_put_there_again_keep_what_was_learned() -> None:
    """The same choice in the same model is the same region; another choice is another, and begins at the first call."""
    m, pool = model(), Elastic("1GiB")
    for plan, dropped in ((each(), 1), (each(), 1), (each(keep=("@product",)), 1)):
        handle = apply(m, plan, elastic=pool)
        step(m, m.parameters(), batch())
        report = handle.report().elastic
        assert report is not None
        assert all(row.dropped == dropped for row in report.rows)
        handle.remove()
    assert [row.kept for row in pool.report().rows] == [1] * LAYERS + [0] * LAYERS


def test_a_simulated_step_is_the_floor() -> None:
    """A model with an elastic plan is simulated as one whose regions drop all, and takes nothing of the memory."""
    floor = simulate(model(), batch(), plan=each(), loss=torch.Tensor.mean).peak_bytes
    pool, m = Elastic("1GiB"), model()
    assert simulate(model(), batch(), plan=each(elastic=True), loss=torch.Tensor.mean).peak_bytes == floor
    apply(m, each(), elastic=pool)
    assert simulate(m, batch(), loss=torch.Tensor.mean).peak_bytes == floor
    assert not pool.report().rows


@pytest.mark.parametrize(
    "name", ["layers", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("together", "calls of a name"))]
)
def test_inside_torch_compile_it_is_said_to_have_no_effect(name: str) -> None:
    """A compiled step keeps and repeats the same in every step: a warning says so, and gradients are plain's."""
    plain = model()
    wanted = step(plain, plain.parameters(), batch())
    m, pool = model(), Elastic("1GiB")
    apply(m, PLANS[name], elastic=pool)
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    with pytest.warns(RuntimeWarning, match="elastic= has no effect"):
        got = step(compiled, m.parameters(), batch())
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, wanted, strict=True))
    assert not pool.report().rows
    torch.compiler.reset()


def test_around_compiled_blocks_it_works() -> None:
    """What the regions call is compiled: they keep and replay it, and nothing is said."""
    m = model()
    for block in m.children():
        block.forward = torch.compile(block.forward, backend="aot_eager")  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "The .grad attribute of a Tensor", UserWarning
        )  # the compiler looks at inputs
        wanted = step(m, m.parameters(), batch())
        for pool in (Elastic("1GiB", always=True), Elastic("1GiB")):
            handle = apply(m, each(), elastic=pool)
            for _ in range(3):
                assert same(step(m, m.parameters(), batch()), wanted)
            report = handle.report().elastic
            assert report is not None
            assert all(row.replayed == (3 if pool._pool.always else 1) for row in report.rows)
            handle.remove()
    torch.compiler.reset()
