"""The tables of the documentation, made from `benchmarks/results/*.json`; `pages.py` puts them where they belong."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
GIB, MIB = 2**30, 2**20
OUTCOMES = "passed", "failed", "skipped"
# What the ways of `what_it_saves.py` are called here.
WAYS = {
    "checkpoint every layer": "every_layer",
    "a plan, same peak": "same_peak",
    "a plan, half of that saving": "half_way",
}


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _way(plain: dict[str, Any], way: dict[str, Any]) -> str:
    """A peak, and how much longer the step takes."""
    return f"{_gib(way['peak_bytes'])} (+{_share(way['seconds'] / plain['seconds'] - 1)})"


def saves() -> str:
    """Whole models: the peak, and the time that it costs."""
    rows = [
        (
            f"{row['model']}, {row['batch']}",
            _gib(row["plain"]["peak_bytes"]),
            *(_way(row["plain"], row[way]) for way in WAYS.values()),
        )
        for row in _result("what_it_saves-h100-sheet")["figures"]
    ]
    return _table(("peak memory of a step (extra time)", "without recomputation", *WAYS), rows)


def on_gpu() -> str:
    """Steps on a GPU, beside what was planned and predicted without one: a row for each model, with all its ways."""
    cases: dict[str, list[dict[str, Any]]] = {}
    ran = [row for row in _result("on_gpu-h100")["figures"] if "peak_bytes" in row]
    for row in ran:
        cases.setdefault(row["case"], []).append(row)
    figures = ("predicted_peak_bytes", GIB), ("peak_bytes", GIB), ("predicted_ratio", 1), ("ratio", 1)
    table: list[tuple[str, ...]] = []
    for case, rows in cases.items():
        columns = ["/".join(f"{row[name] / unit:.2f}" for row in rows) for name, unit in figures]
        table.append((f"`{case}`", "/".join(row["way"] for row in rows), *columns))
    beside = sorted(row["reserved_bytes"] / row["peak_bytes"] - 1 for row in ran)
    ends = f"{_share(beside[0])} to {_share(beside[-1])} more than these peaks, {_share(statistics.median(beside))}"
    columns = _table(("`plan`", "recomputed, or budget", "GiB", "GiB there", "step x", "step x there"), table)
    return f"{columns}\n\nThe allocator reserved {ends} in the median. {_reserved()}"


def _reserved() -> str:
    """How far what an allocator reserved was from what is predicted without a device."""
    rows = _result("reserved")["figures"]
    off = [abs(row["predicted_reserved_bytes"] / row["reserved_bytes"] - 1) for row in rows if not row["failed"]]
    out = [row for row in rows if row["failed"]]
    foreseen = "as foreseen" if all(row["predicted_to_run_out"] for row in out) else "not foreseen"
    said = (
        f"The [prediction](plan-predictions.md#reserved-memory) is {_share(statistics.median(off))} off in the median"
    )
    return f"{said}, {_share(max(off))} at the worst; of {len(rows)} runs {len(out)} ran out of memory, {foreseen}."


def on_gpu_in_words() -> str:
    """How far peaks on a GPU were from those that were computed without one."""
    found = _result("on_gpu-h100")
    off = [abs(row["peak_error"]) for row in found["figures"] if "peak_error" in row]
    near = sum(error < 0.001 for error in off)
    device, most, little = found["device"].split()[1], _share(max(off)), _share(0.001)
    peaks = f"peaks are within {most} of the computed ones, {near} of them within {little}"
    return f"{len(off)} such steps ran on an {device}: {peaks}."


# What the forms of `peers discard` are called here; a form that is not named is left out.
FORMS: Mapping[str, str] = {
    "baseline": "without recomputation",
    "torch": "`torch.utils.checkpoint`",
    "saved_call": "`recompute` and a saved call",
    "no_extra_gemm": "no product made again",
    "tiled": "`tiles=16`",
}
PUBLISHED = "odc_cpp"


def blocks() -> str:
    """Single blocks of a layer: the peak of a step of eight of them, and how many of its FLOPs are done again."""
    found = [row for row in _result("discard-cpu")["rows"] if row["n_layers"] == 8 and row["dtype"] == "fp32"]
    rows = {(row["block"], row["form"]): row for row in found}

    def cell(block: str, form: str) -> str:
        row = rows.get((block, form))
        if row is None:
            return ""
        again = row["extra_flops_percent"]
        peak = row["published"]["peak_mib"] if form == PUBLISHED else row["computed_peak_bytes"] / MIB
        return f"{peak:,.0f}" + (f" (+{again:.0f} %)" if again else "")

    names = dict.fromkeys(row["block"] for row in found)
    forms = {**FORMS, PUBLISHED: "ODC, published"}
    return _table(
        ("peak MiB of eight blocks", *forms.values()),
        [(f"`{name}`", *(cell(name, form) for form in forms)) for name in names],
    )


def exact() -> str:
    """How far simulated peaks are from measured ones."""
    found = _result("simulated_peak-cpu")["figures"]
    models, equal = len({row["model"] for row in found}), sum(row["error"] == 0 for row in found)
    worst = max(abs(row["error"]) for row in found)
    return (
        f"Of {len(found)} steps ({models} models, each without and with a plan), the simulated peak of {equal} is the "
        f"measured one to the byte; the worst is off by {_share(worst)}."
    )


def promise() -> str:
    """How far the peaks of real loops are from the promised ones."""
    found = _result("promise-cpu")["figures"]
    rows: list[tuple[str, ...]] = []
    for loop in dict.fromkeys(row["loop"] for row in found):
        for budget in dict.fromkeys(row["budget"] for row in found):
            errors = [row["error"] for row in found if (row["loop"], row["budget"]) == (loop, budget)]
            rows.append((loop, f"{budget:g}", str(len(errors)), f"{max(errors):+.3%}", f"{min(errors):+.3%}"))
    return _table(("the output is", "budget", "models", "most above its promise", "most below"), rows)


def _frontiers() -> dict[str, dict[str, Any]]:
    """The runs of `peers frontier`, by what they ran."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("frontier-*-cpu.json")):
        result = _result(path.stem)
        config = result["config"]
        dropout = f", dropout {config['dropout']:g}" if config["dropout"] != 0.1 else ""
        found[f"{config['model']}, {config['layers']} layers{dropout}"] = result
    return found


def frontier_goals() -> str:
    """Peers and plans: each goal with the points at which it held."""
    rows: list[tuple[str, ...]] = []
    for title, result in _frontiers().items():
        goals = {goal["name"]: goal for goal in result["goals"]}
        counts = {name: f"{goal['held']} of {goal['of']}" for name, goal in goals.items()}
        median, least, most = re.findall(r"(?:is|least|most) (.+?)(?:,|$)", goals["between"]["seen"])
        missed = "" if goals["between"]["reached"] else ", **not reached**"
        between = f"{counts['between']}: {median} ({least} to {most}){missed}"
        rows.append((title, counts["flops"], counts["time"], between, counts["peak"]))
    head = ("model", "no more FLOPs", "no more time", "20 % less between them, in the median", "peak within 0.5 %")
    return _table(head, rows)


def compiled() -> str:
    """Compiled steps: torch's budget of 10 %, and `Partition` at the peaks that it came to; then what is claimed."""
    result = _result("compiled-cpu")
    rows: list[tuple[str, ...]] = []
    for row in result["figures"]:
        if row["by"] != "torch" or row["budget"] != "10%":
            continue
        ours = [one for one in result["figures"] if one["model"] == row["model"] and one["by"] != "torch"]
        low = [one for one in ours if one["peak_mib"] <= row["peak_mib"]]
        best = min(low, key=lambda one: one["replayed_gflop"], default=None)
        wrong = f"**{row['gradients_off']:.1f}**" if row["gradients_off"] > 1e-3 else "0"
        halves = [(f"{one['peak_mib']:.1f} MiB", f"{one['replayed_gflop']:.2f}") for one in (row, best) if one]
        theirs, half = halves if best else (*halves, ("none as low", ""))
        rows.append((row["model"], *theirs, wrong, *half))
    head = ("model", "torch's 10 %: peak", "GFLOP again", "gradients off", "`Partition`: peak", "GFLOP again")
    claims = ((said, figure, goal, "yes" if holds else "**no**") for said, figure, goal, holds in result["claims"])
    return _table(head, rows) + "\n\n" + _table(("claim", "figure", "goal", "holds"), claims)


def doctor() -> str:
    """The doctor: how many faulty set-ups it finds, and how many healthy ones it finds something in."""
    found = _result("doctor-cpu")
    missed = sum(not row["where"] for row in found["faulty"])
    left = sum(row["kind"] in row["after"] for row in found["faulty"])
    wrong = sum(bool(row["found"]) for row in found["healthy"])
    return (
        f"Of {len(found['faulty'])} faulty set-ups {missed} are missed, and {left} keep the finding after its fix; "
        f"of {len(found['healthy'])} healthy ones {wrong} get a finding."
    )


def _title(point: dict[str, Any]) -> str:
    return f"{point['family']} {point['setting']}".strip()


# The name in a page's marker -> what is below it.
def matrix() -> str:
    """Releases of torch: what ran, and how it ended."""
    rows = [
        (row["torch"], row["python"], ", ".join(row["tests"]), *(f"{row[what]:,}" for what in OUTCOMES), row["date"])
        for row in json.loads((RESULTS / "matrix.json").read_text(encoding="utf-8"))
    ]
    return _table(("torch", "Python", "tests", *OUTCOMES, "on"), rows)


def published() -> str:
    """Published runs beside ours: both figures, and whether the goal is reached."""
    rows: list[tuple[str, ...]] = []
    for row in _result("published")["figures"]:
        ours, off = "refused", ""
        if "refused" not in row:
            ours = f"{row['ours']:,.{0 if row['unit'] == 'tokens' else 1}f} {row['unit']}"
            off = f"{row['off']:+.1%}"
        goal = f"{row['within']:.0%}, {'reached' if row['reached'] else '**not reached**'}"
        rows.append((row["case"], f"{row['published']:,} {row['unit']} ({row['measures']})", ours, off, goal))
    return _table(("run", "published", "here", "difference", "goal"), rows)


def side_by_side() -> str:
    """What people use, and at the peak of each a plan, on two models."""
    result = _result("side_by_side-cpu")
    rows = {(row["model"], row["way"]): row for row in result["figures"]}
    models, ways = dict.fromkeys(model for model, _ in rows), dict.fromkeys(way for _, way in rows)

    def cells(row: dict[str, Any] | None) -> tuple[str, str, str]:
        if row is None:
            return "", "", ""
        plan = f"{row['plan']['time_ratio']:.2f}" if row["plan"] else "" if row["way"] == "plain" else "none as low"
        return f"{row['peak_bytes'] / MIB:.0f}", f"{row['time_ratio']:.2f}", plan

    table = _table(
        ("way", *(word for model in models for word in (f"{model}: MiB", "step", "a plan"))),
        [(way, *(cell for model in models for cell in cells(rows.get((model, way))))) for way in ways],
    )
    plans = [row["plan"] for row in rows.values() if row["plan"]]
    equal, (held, of) = sum(not plan["gradient_difference"] for plan in plans), result["held"]
    ways_equal = [not row["gradient_difference"] for row in rows.values() if row["plan"]]
    return (
        f"{table}\n\nEqual to the plain step's gradients, to the last bit, are those of {equal} of {len(plans)} plans "
        f"and of {sum(ways_equal)} of the {len(ways_equal)} others. Beside what runs eagerly {held} of {of} plans "
        f"replay no more FLOPs and take no longer, within noise. Medians of {result['rounds']} rounds on one of two "
        f"cores, with a load of {result['load']:.0f} from other work."
    )


def evidence() -> str:
    """What is checked, how many times, and the command that does it."""
    tests, promised = _result("tests")["counts"], _result("promise-cpu")["figures"]
    listed = [row["verdict"] for row in _result("catalogue")["figures"] if row["verdict"] not in ("none", "plain")]
    verdicts = Counter(listed)
    faults = _result("doctor-cpu")
    models, worst = len({row["model"] for row in promised}), max(row["error"] for row in promised)
    rows: list[tuple[str, str, str]] = [
        (
            "laws of a region",
            f"{tests['laws']:,} tests, over {tests['programs']} programs in {tests['placements']} placements",
            "pytest tests/laws",
        ),
        ("random programs", f"{tests['random']:,} a run", "pytest tests/laws/test_random_programs.py"),
        ("with elastic regions", f"{tests['elastic']:,} a run", "pytest tests/laws/test_elastic.py"),
        (
            "promised peaks, beside real loops with AdamW",
            f"{len(promised)} loops of {models} models, at most {worst:.2%} above",
            "python benchmarks/promise.py",
        ),
        (
            "each operation and layer of PyTorch's own lists, under a plan",
            f"{len(listed):,} cases: {verdicts['exact']:,} exact, {verdicts['refused']} refused, "
            f"{verdicts['said']} said to be uncertain, **{verdicts['wrong']} wrong**",
            "python benchmarks/catalogue.py",
        ),
        ("unusual layers", f"{tests['unusual_layers']} tests", "pytest tests/planner/test_unusual_layers.py"),
        ("laws of the planner", f"{tests['planner_laws']} tests", "pytest tests/laws/test_planner.py"),
        ("other systems' calls", f"{tests['others']} tests", "pytest tests/compat"),
        ("DDP, FSDP2, tensor and pipeline ranks", f"{tests['ranks']} tests on gloo", "pytest tests/distributed"),
        ("texts of errors, word for word", f"{tests['messages']}", "pytest tests/project/test_messages.py"),
        (
            "private names of torch, with and without each",
            f"{tests['names']} tests",
            "pytest tests/core/test_torch_shims.py",
        ),
        (
            "faulty scripts that the doctor has to find",
            f"{len(faults['faulty'])}, and {len(faults['healthy'])} sound ones",
            "pytest tests/doctor",
        ),
    ]
    return _table(("what is checked", "how much", "command"), [(*row, f"`{command}`") for *row, command in rows])


TABLES: Mapping[str, Callable[[], str]] = {
    "saves": saves,
    "on_gpu": on_gpu,
    "on_gpu_in_words": on_gpu_in_words,
    "blocks": blocks,
    "exact": exact,
    "promise": promise,
    "frontier_goals": frontier_goals,
    "compiled": compiled,
    "doctor": doctor,
    "matrix": matrix,
    "published": published,
    "evidence": evidence,
    "side_by_side": side_by_side,
}
