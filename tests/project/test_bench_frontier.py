"""`python benchmarks/peers frontier`: the instruments agree with others, ours keeps its promises, and lies are noticed.

The comparison runs once, on two small layers, with some of the settings.
"""

import json
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import comparisons
import frontier
import pytest
import torch
from frontier import Config, Failure, Match, Point, Promise, Result, comparing, measuring, plot, sac_ilp, ways
from frontier.comparing import run, ticks
from frontier.measuring import Step, difference
from frontier.models import MODELS, build
from frontier.result import MATCHED, OURS
from frontier.ways import COMPILED, COMPILED_WHOLE, PLAIN, Way, peers

from torch_recompute import measure
from torch_recompute.commands import cli
from torch_recompute.errors import ArgumentError

pytestmark = pytest.mark.nightly

TINY = Config(layers=2, width=64, tokens=32, batch=2, rounds=1, price="flops")
SIZE = (TINY.layers, TINY.width, TINY.tokens, TINY.batch)


@dataclass
class Ran:
    """A comparison, and how often it reported progress."""

    result: Result
    words: list[str]
    promised: int

    def peer(self, title: str) -> Point:
        """The peer of a title."""
        return next(point for point in self.result.peers if point.title == title)


def _broken(model: torch.nn.Module) -> None:
    raise RuntimeError("not this model\nand no other")


@pytest.fixture(scope="module")
def ran() -> Ran:
    """The comparison with two settings of `torch.compile`, two budgets, and a peer that fails."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # PyTorch's compiler looks at the gradients of what it is given.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        patch.setattr(ways, "SHARES", (0.5, 0.0))
        patch.setattr(sac_ilp, "SHARES", (0.9, 0.3))
        shape = replace(MODELS["gpt"], labels=(("core_attn",), ("core_attn", "mlp")))
        patch.setitem(MODELS, "gpt", shape)
        patch.setattr(comparing, "SHARES", (0.1, 0.6))
        patch.setattr(comparing, "peers", lambda *size: [*peers(*size), Way("broken", "as ever", _broken)])
        words: list[str] = []
        return Ran(run(TINY, words.append), words, ticks(TINY))


def test_every_peer_has_its_point(ran: Ran) -> None:
    """Each way is a point with a peak, a time and exact FLOPs, each but the plain one is answered, progress is told."""
    families = [point.family for point in ran.result.peers]
    by_layer = ["torch checkpoint", "uniform", "uniform", "block", "block"]
    compiled = [*[COMPILED] * 2, *[COMPILED_WHOLE] * 2]
    assert families == [
        PLAIN,
        *by_layer,
        *["selective"] * 2,
        "torch selective",
        *["torch_remat"] * 4,
        "sac_ilp",
        *compiled,
    ]
    assert len(ran.result.matches) == len(families) - 1
    assert [point.title for point in ran.result.ours] == [f"{OURS} {share}" for share in ("10%", "60%")]
    assert all(point.seconds > 0 and point.time_ratio > 0 for point in [*ran.result.peers, *ran.result.own])
    assert len(ran.words) == ran.promised
    small = "NoPolicyError: sac_milp finds no policy for so small a budget"
    broken = "RuntimeError: not this model"
    assert ran.result.failures == (Failure("sac_ilp 0.3", small), Failure("broken as ever", broken))
    assert ran.result.verdict[-2:] == [f"Left out: sac_ilp 0.3: {small}", f"Left out: broken as ever: {broken}"]


def test_peers_do_what_they_say(ran: Ran) -> None:
    """The same regions asked for in three ways are the same point; each setting of a family replays what it says."""
    every = ran.peer("torch checkpoint every layer")
    for other in (ran.peer("uniform 1"), ran.peer("block 2")):
        assert (other.peak_bytes, other.replay_flops) == (every.peak_bytes, every.replay_flops)
    assert 2 * ran.peer("block 1").replay_flops == every.replay_flops > 0
    assert ran.peer("selective core_attn").replay_flops == 0
    assert 0 < ran.peer("selective core_attn mlp").replay_flops < every.replay_flops
    assert 0 < ran.peer("torch selective torchtitan's list").replay_flops < every.replay_flops
    assert 0 < ran.peer("sac_ilp 0.9").replay_flops < every.replay_flops
    assert ran.peer("sac_ilp 0.9").peak_bytes < 0.9 * ran.peer(PLAIN).peak_bytes
    assert ran.peer("torch_remat every layer").replay_flops == every.replay_flops
    assert ran.peer("torch_remat attention mlp kept").replay_flops < ran.peer("torch_remat mlp kept").replay_flops
    assert ran.peer("torch.compile 0").replay_flops == every.replay_flops
    assert ran.peer("torch.compile 0.5").peak_bytes > ran.peer("torch.compile 0").peak_bytes
    assert all(point.peak_bytes <= ran.peer(PLAIN).peak_bytes for point in ran.result.peers)


def test_gradients_with_dropout(ran: Ran) -> None:
    """Every way has the plain gradients to the last bit, but compiled code that replays, which draws masks again."""
    wrong = [point.title for point in ran.result.peers if point.gradient_difference]
    assert wrong == [f"{family} {share}" for family in (COMPILED, COMPILED_WHOLE) for share in ("0.5", "0")]
    assert wrong[0] in ran.result.verdict[-3]
    assert all(point.gradient_difference == 0 for point in ran.result.own)


def test_our_promises_are_kept(ran: Ran) -> None:
    """Each point of ours is within its budget, at its predicted peak and FLOPs, and no bound is above it."""
    assert not ran.result.broken
    for point in ran.result.own:
        assert point.promise is not None
        assert point.peak_bytes <= point.promise.budget_bytes
        assert point.replay_flops == point.promise.replay_flops
        assert point.promise.least_added <= point.promise.added + 1e-12
        assert point.peak_error <= 0.005


def test_regions_by_hand_are_not_better(ran: Ran) -> None:
    """At the peaks of whole layers recomputed by hand, ours replays no more."""
    by_hand = [match for match in ran.result.matches if match.peer.family in ("torch checkpoint", "uniform", "block")]
    assert len(by_hand) == 5
    assert all(match.no_more_flops for match in by_hand)


@pytest.mark.parametrize(
    "lie",
    [
        {"peak_bytes": 10**9},
        {"gradient_difference": 1e-9},
        {"replay_flops": 1},
        {"promise": Promise(10**9, 1, 0, 0.0, 0.0)},
    ],
)
def test_broken_promises_are_noticed(ran: Ran, lie: dict, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A point over its budget, off its prediction or with other gradients is named, and `--check` ends with 1."""
    first, *rest = ran.result.ours
    broken = replace(ran.result, ours=[replace(first, **lie), *rest])
    assert [point.title for point in broken.broken] == [first.title]
    monkeypatch.setattr(frontier, "run", lambda config, progress: broken)
    argv = ["frontier", "--json", "--quiet"]
    assert (comparisons.main(argv), comparisons.main([*argv, "--check"])) == (cli.OK, cli.FAILED)
    document = json.loads(capsys.readouterr().out.split("\n{\n")[0])
    assert (document["broken"], document["reached"]) == ([first.title], False)


def _point(family: str, peak: int, replay: int, budget: int | None = None) -> Point:
    promise = None if budget is None else Promise(budget, peak, replay, 0.0, 0.0)
    return Point(family, "", peak, replay, 0.0, 0.0, promise=promise)


@pytest.mark.parametrize(
    ("budget", "best", "less"),
    [(100, PLAIN, None), (99, "b", 50.0), (60, "b", 50.0), (59, "a", 75.0), (39, None, None)],
)
def test_between(budget: int, best: str | None, less: float | None) -> None:
    """The best peer is the one that fits and replays least; what replays nothing cannot be undercut."""
    others = [_point(PLAIN, 100, 0), _point("a", 40, 40), _point("b", 60, 20), _point("c", 55, 80)]
    seen = Result(TINY, others, [_point(OURS, 30, 10, budget)], [], 0.0)
    (entry,) = seen.between
    assert (None if entry.peer is None else entry.peer.family, entry.less_percent) == (best, less)


def test_goals() -> None:
    """Each goal counts the points at which it held, and is reached by what it asks for: all points, or a median."""
    plain, half, twice = (
        _point(PLAIN, 100, 0),
        _point("a", 40, 40),
        replace(_point("b", 60, 20), gradient_difference=0.1),
    )
    ours = [_point(OURS, peak, replay, peak) for peak, replay in ((40, 20), (99, 30), (100, 0), (100, 5), (39, 80))]
    matches = [Match(half, _point(MATCHED, 40, 41, 40), 1.2), Match(twice, _point(MATCHED, 60, 9, 60), 0.9)]
    seen = Result(TINY, [plain, half, twice], ours, matches, 0.05)
    flops, seconds, between, peaks = seen.goals
    assert [(goal.held, goal.of, goal.reached) for goal in (flops, seconds)] == [(0, 1, False)] * 2
    assert (between.held, between.of, between.reached) == (2, 3, True)
    assert between.seen == "the median is 25 %, the least a loss, the most 50 %"
    assert (peaks.held, peaks.of, peaks.reached) == (7, 7, True)
    kept = replace(seen, matches=[Match(half, _point(MATCHED, 40, 40, 40), 1.1)])
    assert [goal.reached for goal in kept.goals[:2]] == [True, True]
    assert str(kept.goals[0]) == ("Reached: with a peer's peak as budget ours replays no more FLOPs. Held at 1 of 1.")
    over = replace(kept, ours=[replace(ours[0], peak_bytes=50)])
    assert (seen.reached, kept.reached, over.reached) == (False, True, False)
    missed = replace(seen, matches=[Match(half, None, None)], ours=[replace(ours[0], peak_bytes=50)])
    assert [(goal.held, goal.of, goal.reached) for goal in missed.goals] == [
        (0, 1, False),
        (0, 1, False),
        (0, 1, False),
        (0, 1, False),
    ]


def test_peaks_are_those_of_the_lens() -> None:
    """The allocator's peak of a checkpointed step is what the lens says, except for what lives inside one operation."""
    model, text = build("gpt", *SIZE)
    step = Step(model, text, peers(TINY)[1])
    seen = step.seen()
    with measure(model) as lens:
        step()
    step.drop_gradients()
    assert 0 <= seen.peak_bytes - lens.peak_bytes <= 0.001 * lens.peak_bytes


@pytest.mark.parametrize("name", ["gpt", "moe", "convnext"])
def test_flops_by_shapes_are_those_of_the_counter(name: str) -> None:
    """Of a plain step the formulas on what the profiler saw give what PyTorch's counter gives."""
    model, text = build(name, TINY.layers, TINY.width, 64, TINY.batch)
    counted, by_shapes = (Step(model, text, Way(PLAIN, first=first)).seen() for first in (None, nullcontext))
    assert counted.flops == by_shapes.flops > 0
    assert counted.peak_bytes == by_shapes.peak_bytes


def test_flops_that_are_not_known() -> None:
    """The FLOPs of a product are not made up where the profiler did not see enough of it."""
    seen = {"name": "aten::convolution", "shapes": [[1, 2, 3]], "concrete_inputs": [None]}
    event = SimpleNamespace(**{name: partial(seen.__getitem__, name) for name in seen})
    with pytest.raises(NotImplementedError, match="aten::convolution do not follow from what the profiler saw"):
        measuring._flops(event)
    seen.update(name="aten::addmm", shapes=[[4], [2, 3], [3, 4], [], [], [2, 4]])  # compiled: the last is written to
    assert measuring._flops(event) == 2 * 2 * 3 * 4


def test_difference() -> None:
    """Equal bits are no difference, others are relative to the whole, and a missing gradient is infinitely far."""
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([0.0])
    assert difference([a, b], [a.clone(), b]) == 0
    assert difference([a, b], [a, b + 1]) == pytest.approx(0.2)
    assert difference([a, b], [a]) == float("inf")


def test_what_is_printed(ran: Ran, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The tables hold every peer and budget, and the verdict follows."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(frontier, "run", lambda config, progress: ran.result)
    assert comparisons.main(["frontier", "--quiet", "--check"]) == cli.OK
    out = capsys.readouterr().out
    for point in [*ran.result.peers, *ran.result.ours]:
        assert f" {point.title} " in out
    assert f"of {len(ran.result.own)} points of ours {len(ran.result.own)} are within" in " ".join(out.lower().split())


def test_a_saved_comparison(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--save` the comparison is a result: when and where it was made, its goals, and whether all are reached."""
    monkeypatch.setattr(frontier, "run", lambda config, progress: ran.result)
    monkeypatch.setattr("_measure.RESULTS", tmp_path)
    assert comparisons.main(["frontier", "--quiet", "--json", "--save", "small"]) == cli.OK
    saved = json.loads((tmp_path / "small.json").read_text("utf-8"))
    assert list(saved)[:3] == ["date", "commit", "processor"]
    assert saved["reached"] is all(goal["reached"] for goal in saved["goals"])
    assert len(saved["peers"]) == len(ran.result.peers)


def test_plot(ran: Ran, tmp_path: Path) -> None:
    """The picture names every family, and what has other gradients."""
    plot.draw(ran.result, tmp_path / "points.svg")
    text = (tmp_path / "points.svg").read_text(encoding="utf-8")
    other = {True: "", False: ", other gradients"}
    families = {f"{point.family}{other[not point.gradient_difference]}" for point in ran.result.peers}
    assert f"{COMPILED}{other[False]}" in families
    for word in ("our plans", *families):
        assert f"<!-- {word} -->" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, r"--layers is 0; expected a whole number of at least 1. Write for example --layers 8"),
        ({"rounds": -1}, r"--rounds is -1; expected"),
        ({"model": "bert"}, r"--model is bert; expected one of gpt, llama, moe, convnext, encoder-decoder. Write"),
        ({"price": "euro"}, r"--price is euro; expected one of measured, flops"),
        ({"width": 100}, r"--width is 100; expected a multiple of 64, .* Write --width 128"),
    ],
)
def test_what_cannot_run(change: dict, message: str) -> None:
    """What cannot run is refused with what was passed, what was expected and what to write."""
    with pytest.raises(ArgumentError, match=message):
        run(replace(TINY, **change))


def test_without_the_setting_of_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no such setting, the peer is left out and the others stay."""
    one = replace(TINY, layers=1)
    others = [(way.family, way.setting) for way in peers(one) if way.family not in (COMPILED, COMPILED_WHOLE)]
    monkeypatch.setattr(ways, "activation_memory_budget", lambda share: None)
    assert [(way.family, way.setting) for way in peers(one)] == others
    assert len(others) > 3
