"""The demonstration at a tiny size: exact FLOPs, ordered bytes, equal bits, and that it would notice unequal ones."""

import json
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from torch_recompute import Plan
from torch_recompute.commands import demo_elastic
from torch_recompute.commands.demo import (
    HEADS,
    SETTINGS,
    VOCABULARY,
    DemoConfig,
    DemoResult,
    DemoSetting,
    Outcome,
    batches,
    build,
    read_text,
    run,
    ticks,
)
from torch_recompute.memory import CATEGORIES

TINY = DemoConfig(steps=3, layers=2, d_model=32, seq=64, batch=4)


WORDS: list[str] = []


@pytest.fixture(scope="module")
def result() -> DemoResult:
    """The demonstration, once for all tests that only read it."""
    return run(TINY, progress=WORDS.append)


@pytest.fixture(scope="module")
def outcomes(result: DemoResult) -> dict[str, Outcome]:
    """By the setting's name."""
    return {outcome.name: outcome for outcome in result.outcomes}


def test_same_bits(result: DemoResult) -> None:
    """All settings have the plain setting's losses, bit by bit, and the losses go somewhere."""
    assert result.identical
    curves = {tuple(loss.hex() for loss in outcome.losses) for outcome in result.outcomes}
    (curve,) = curves
    assert len(curve) == len(set(curve)) == TINY.steps


def test_flops_by_hand(outcomes: dict[str, Outcome]) -> None:
    """FLOPs are those counted by hand: a step is three forwards, and each setting repeats what it says."""
    positions = TINY.batch * TINY.seq
    square = 2 * positions * TINY.d_model**2  # one matrix product of d_model x d_model
    core = 2 * (2 * positions * TINY.seq * TINY.d_model)  # scores, and their product with the values
    layer = (3 + 1 + 4 + 4) * square + core
    head = 2 * positions * TINY.d_model * VOCABULARY
    assert outcomes["none"].flops == 3 * (TINY.layers * layer + head)
    repeated = {name: outcome.recomputed_flops for name, outcome in outcomes.items()}
    planned = repeated.pop("planned")
    assert 0 < planned < repeated["layers"]
    assert repeated == {
        "none": 0,
        # All of it: the dropout behind the last matrix product saves its mask, which is drawn after that product.
        "layers": TINY.layers * layer,
        # The replay stops early: nobody needs the result of the output projection.
        "attention": TINY.layers * (3 * square + core),
        "layers_save_attention": TINY.layers * (layer - core),
    }


def test_bytes_are_ordered(outcomes: dict[str, Outcome]) -> None:
    """Recomputing everything keeps least, recomputing nothing keeps most, the two others lie between."""
    kept = {name: outcome.by_category["activations"] for name, outcome in outcomes.items()}
    assert kept["layers"] < kept["layers_save_attention"] < kept["none"]
    assert kept["layers"] < kept["attention"] < kept["none"]
    # A saved call keeps its output and the log-sum-exp of each head. Its inputs are rebuilt.
    saved = 4 * TINY.batch * TINY.seq * (TINY.d_model + HEADS)
    peak = {name: outcome.peak_bytes for name, outcome in outcomes.items()}
    assert peak["layers"] < peak["layers_save_attention"] <= peak["layers"] + TINY.layers * saved


def test_the_plan_keeps_its_promise(outcomes: dict[str, Outcome]) -> None:
    """The measured peak of the planned setting is the predicted one, within 35 % of what lies above the least."""
    planned = outcomes["planned"]
    assert planned.peak_bytes == planned.predicted_peak_bytes
    most, layers = outcomes["none"].peak_bytes, outcomes["layers"].peak_bytes
    assert planned.peak_bytes <= layers + 0.35 * (most - layers)
    assert [outcome.name for outcome in outcomes.values() if outcome.predicted_peak_bytes is not None] == ["planned"]


def test_bytes_of_what_does_not_change(result: DemoResult) -> None:
    """Parameters are the same in all settings, and Adam keeps twice that and a counter per tensor."""
    with torch.random.fork_rng(devices=[]):
        model = build(TINY)
    tensors = len(list(model.parameters()))
    for outcome in result.outcomes:
        assert outcome.by_category["parameters"] == 4 * result.parameters
        assert outcome.by_category["optimizer"] >= 4 * (2 * result.parameters + tensors)
        assert sum(outcome.by_category.values()) == outcome.peak_bytes


def test_json(result: DemoResult) -> None:
    """The JSON document has integer bytes and FLOPs, float seconds, and losses that come back exactly."""
    document = json.loads(result.to_json())
    assert list(document) == [
        *("schema_version", "command", "torch", "threads", "text"),
        *("config", "parameters", "identical", "settings"),
    ]
    assert (document["schema_version"], document["command"], document["identical"]) == (1, "demo", True)
    assert DemoConfig(**document["config"]) == TINY
    assert [setting["name"] for setting in document["settings"]] == [setting.name for setting in SETTINGS]
    for setting, outcome in zip(document["settings"], result.outcomes, strict=True):
        assert list(setting["by_category"]) == list(CATEGORIES)
        integers = [setting[key] for key in ("peak_bytes", "flops", "recomputed_flops")]
        assert all(type(number) is int for number in (*integers, *setting["by_category"].values()))
        assert type(setting["step_seconds"]) is float
        assert [float.fromhex(loss["hex"]) for loss in setting["losses"]] == outcome.losses
        assert [loss["value"] for loss in setting["losses"]] == outcome.losses


def test_a_replay_with_other_random_numbers_is_noticed() -> None:
    """A recomputation that does not restore the random generator changes the loss after the first update."""

    def careless(model, *_):
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        return Plan()

    result = run(TINY, settings=(SETTINGS[0], DemoSetting("careless", "careless", careless)))
    assert [outcome.first_difference for outcome in result.outcomes] == [None, 1]
    assert not result.identical


def test_global_generator_is_left_alone() -> None:
    """The demonstration does not move the caller's random numbers."""
    before = torch.get_rng_state()
    run(DemoConfig(steps=1, layers=1, d_model=8, seq=8, batch=1), settings=SETTINGS[:1])
    assert torch.equal(before, torch.get_rng_state())


def test_progress(result: DemoResult) -> None:
    """Progress is reported as often as promised, and says the loss."""
    assert len(WORDS) == ticks(TINY)
    assert WORDS[: len(SETTINGS)] == [f"planning: {setting.title}" for setting in SETTINGS]
    assert WORDS[len(SETTINGS)].startswith("step 1 of 3, loss ")


def test_text_is_the_same_for_the_same_seed(tmp_path) -> None:
    """Batches depend on the seed only, and every byte of a short text can be drawn."""
    path = tmp_path / "text"
    path.write_bytes(b"recompute")
    name, text = read_text(path, 8)
    assert name == str(path)
    config = DemoConfig(seq=8, batch=3)
    drawn, again = ([batch for _, batch in zip(range(2), batches(text, config), strict=False)] for _ in range(2))
    assert all(map(torch.equal, drawn, again))
    assert bytes(drawn[0][0].tolist()) == b"recompute"


def test_default_text_is_real_and_bounded() -> None:
    """Without a text the standard library is read, a few megabytes of it."""
    name, text = read_text(None, 256)
    assert name == "the Python standard library"
    assert 10**6 < len(text) <= 4 * 2**20
    assert b"import" in bytes(text[:10000].tolist())


VARIED = DemoConfig(steps=6, layers=2, d_model=16, seq=128, batch=1)


@pytest.fixture(scope="module")
def elastic() -> demo_elastic.ElasticResult:
    """The demonstration of elastic regions, once."""
    return demo_elastic.run(VARIED)


def test_elastic_keeps_a_limit_that_plain_breaks(elastic: demo_elastic.ElasticResult) -> None:
    """Some steps of plain training are above the limit and none of the elastic ones is; losses are the same bits."""
    assert elastic.passed
    over = [step.plain_peak_bytes > elastic.limit_bytes for step in elastic.steps]
    assert 0 < sum(over) < len(over)
    assert all(step.peak_bytes <= elastic.limit_bytes for step in elastic.steps)
    assert all(step.replays for step, long in zip(elastic.steps, over, strict=True) if long)
    assert elastic.least_bytes < elastic.limit_bytes < max(step.plain_peak_bytes for step in elastic.steps)
    losses = [step.loss for step in elastic.steps]
    assert len(set(losses)) == VARIED.steps


def test_elastic_recomputes_first_calls_and_what_does_not_fit(elastic: demo_elastic.ElasticResult) -> None:
    """The first step replays every layer, and some replay none; the report counts the same replays."""
    first, *others = elastic.steps
    assert first.replays == VARIED.layers
    assert any(step.replays == 0 for step in others)
    assert sum(row.replayed for row in elastic.report.rows) == sum(step.replays for step in elastic.steps)
    assert [row.name for row in elastic.report.rows] == [f"layers.{i}" for i in range(VARIED.layers)]


def test_elastic_is_the_same_each_time(elastic: demo_elastic.ElasticResult) -> None:
    """Bytes, replays and losses depend on the seed alone; a curve reaches the peak, and replays lie within the step."""
    assert demo_elastic.run(VARIED).steps == elastic.steps
    for step in elastic.steps:
        assert len(step.replayed_at) == step.replays
        assert all(0 < share < 1 for share in step.replayed_at)
        assert max(step.curve) <= step.peak_bytes
    longest = max(elastic.steps, key=lambda step: step.tokens)
    assert max(longest.plain_curve) == longest.plain_peak_bytes
