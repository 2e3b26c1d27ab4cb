"""The tables of the documentation, made from `benchmarks/results/*.json`; `pages.py` puts them where they belong.

Each ends with a line that says when its figures were made, at which commit, on what, and by which command. What misses
its goal says so in the column of that goal.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from _measure import ELSEWHERE, RESULTS, UNKNOWN

GIB, MIB = 2**30, 2**20
OUTCOMES = "passed", "failed", "skipped"
MISSED = ", **not reached**"
TABLES: dict[str, Callable[[], str]] = {}
"""The name in a page's marker -> what is below it."""


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _when(result: Mapping[str, Any]) -> str:
    """The date and the commit of a result, or of a row that has its own."""
    day = date.fromisoformat(result["date"])
    return f"{day.day} {day:%b %Y}, {result['commit']}"


def _run(result: Mapping[str, Any]) -> str:
    """When a result was made; of one whose rows are of several runs, when the first and the last were."""
    rows = result.get("rows", result.get("figures", ()))
    runs = sorted((row for row in rows if "commit" in row), key=lambda row: row["date"])
    return " to ".join(dict.fromkeys(map(_when, (runs[0], runs[-1])))) if runs else _when(result)


def _machine(result: Mapping[str, Any]) -> str:
    """What a result was measured on."""
    name = result.get("gpu") or result["processor"]
    cores = "" if result["cores"] == UNKNOWN else f", {result['cores']} cores"
    return (f"processor {UNKNOWN}" if name == UNKNOWN else name) + cores


def made_by(names: Sequence[str]) -> str:
    """When, where and how results were made, those of one run together."""
    runs: dict[str, list[str]] = {}
    for result in map(_result, names):
        command = result["command"].partition(ELSEWHERE)[0]
        runs.setdefault(f"{_run(result)}, {_machine(result)}", []).append(f"`{command}`")
    return "; ".join(f"{run}: {', '.join(commands)}" for run, commands in runs.items())


def made_on(names: Sequence[str]) -> str:
    """What results were measured on, of which the table says the rest."""
    return "; ".join(dict.fromkeys(_machine(_result(name)) for name in names))


def block(
    *names: str, says: Callable[[Sequence[str]], str] = made_by
) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Registers what makes a table from some results, under its own name, and adds the line on these."""

    def register(make: Callable[[], str]) -> Callable[[], str]:
        TABLES[make.__name__] = lambda: f"{make()}\n\n_{says(names)}_"
        return make

    return register


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _missed(reached: bool) -> str:
    return "" if reached else MISSED


def _goals(result: Mapping[str, Any]) -> str:
    """The goals of a result, in one sentence."""
    said = (
        f"{one['claim']}: {one['figure']} (goal: {one['goal']}{_missed(one['reached'])})" for one in result["goals"]
    )
    return f"{'; '.join(said)}."


# What the ways of `what_it_saves.py` are called here.
WAYS = {
    "checkpoint every layer": "every_layer",
    "a plan, same peak": "same_peak",
    "a plan that saves half as much": "half_way",
}


def _way(plain: dict[str, Any], way: dict[str, Any]) -> str:
    """A peak, and how much longer the step takes."""
    return f"{_gib(way['peak_bytes'])} (+{_share(way['seconds'] / plain['seconds'] - 1)})"


@block("what_it_saves-h100-sheet")
def saves() -> str:
    """Whole models: the peak, and the time that it costs; and when plans for them last ran on a GPU."""
    found = _result("what_it_saves-h100-sheet")["figures"]
    rows = [
        (
            f"{row['model']}, {row['batch']}",
            _gib(row["plain"]["peak_bytes"]),
            *(_way(row["plain"], row[way]) for way in WAYS.values()),
        )
        for row in found
    ]
    head = "predicted from an H100's data sheet: peak of a step (extra time)", "without recomputation", *WAYS
    last: dict[str, list[str]] = {}
    for model in (row["model"] for row in found):
        ran = [row for row in _result("on_gpu-h100")["figures"] if row["case"].split()[0] == model]
        last.setdefault(max(ran, key=lambda row: row["date"])["commit"], []).append(model)
    since = ", ".join(f"of {' and '.join(models)} not run since {commit}" for commit, models in last.items())
    return f"{_table(head, rows)}\n\nOn a GPU, plans {since}."


@block("on_gpu-h100", "reserved")
def on_gpu() -> str:
    """Steps on a GPU, beside what was planned and predicted without one: a row for each model, with all its ways."""
    cases: dict[str, list[dict[str, Any]]] = {}
    result = _result("on_gpu-h100")
    ran = [row for row in result["figures"] if "peak_bytes" in row]
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
    goals = _goals(result)
    return f"{columns}\n\n{goals[0].upper()}{goals[1:]}\n\nThe allocator reserved {ends} in the median. {_reserved()}"


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


@block("on_gpu-h100")
def on_gpu_in_words() -> str:
    """How far peaks and times on a GPU were from those that were predicted without one."""
    found = _result("on_gpu-h100")
    off = [abs(row["peak_error"]) for row in found["figures"] if "peak_error" in row]
    near = sum(error < 0.001 for error in off)
    steps = [row["ratio"] / row["predicted_ratio"] - 1 for row in found["figures"] if "ratio" in row]
    slow = sum(more > 0.05 for more in steps)
    peaks = f"peaks are within {_share(max(off))} of the predicted ones, {near} of them within {_share(0.001)}"
    times = f"beside the first step of each model {slow} took over 5 % longer than predicted ({_share(max(steps))})"
    return f"{len(off)} steps of published sizes ran on an {found['gpu'].split()[1]}: {peaks}; {times}."


# What the forms of `peers discard` are called here; a form that is not named is left out.
FORMS: Mapping[str, str] = {
    "baseline": "without recomputation",
    "torch": "`torch.utils.checkpoint`",
    "saved_call": "`recompute` and a saved call",
    "no_extra_gemm": "no product made again",
    "tiled": "`tiles=16`",
}
PUBLISHED = "odc_cpp"


@block("discard-cpu")
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


@block("simulated_peak-cpu")
def exact() -> str:
    """How far simulated peaks are from measured ones."""
    found = _result("simulated_peak-cpu")["figures"]
    models, equal = len({row["model"] for row in found}), sum(row["error"] == 0 for row in found)
    worst, allocator = (max(abs(row[error]) for row in found) for error in ("error", "allocator_error"))
    return (
        f"Of {len(found)} steps ({models} models, each without and with a plan), the simulated peak of {equal} is the "
        f"measured one to the byte; the worst is off by {worst:.2%}, beside the allocator's events by {allocator:.2%}."
    )


@block("promise-cpu")
def promise() -> str:
    """How far the peaks of real loops are from the promised ones."""
    found = _result("promise-cpu")["figures"]
    rows: list[tuple[str, ...]] = []
    for loop in dict.fromkeys(row["loop"] for row in found):
        for budget in dict.fromkeys(row["budget"] for row in found):
            errors = [row["error"] for row in found if (row["loop"], row["budget"]) == (loop, budget)]
            rows.append((loop, f"{budget:g}", str(len(errors)), f"{max(errors):+.3%}", f"{min(errors):+.3%}"))
    return _table(("the output is", "budget", "models", "most above its promise", "most below"), rows)


CLAIMS = (
    *("region_overhead-cpu", "block_cost-cpu", "saved_call_overhead-cpu", "idle_costs-cpu", "offload-cpu"),
    *("planning_time-cpu", "solver-cpu", "promise-cpu", "simulated_peak-cpu", "predicted_time-cpu"),
    *("what_it_saves-h100-sheet", "reserved"),
)
"""The results whose goals are a table of their own."""


@block(*CLAIMS, says=made_on)
def claims() -> str:
    """What is claimed, what it came to, and the benchmark that measures it."""
    rows: list[tuple[str, ...]] = []
    for result in map(_result, CLAIMS):
        (program,) = re.findall(r"(\w+\.py)", result["command"])
        for one in result["goals"]:
            reached = "yes" if one["reached"] else "**not reached**"
            rows.append((one["claim"], one["figure"], one["goal"], reached, f"`{program}`", _when(result)))
    return _table(("claim", "figure", "goal", "reached", "`python benchmarks/`", "run"), rows)


@block("gap-cpu")
def gaps() -> str:
    """What plans add to the step, and how far that is from the lower bound, at the least and the largest budget."""
    rows: list[tuple[str, ...]] = []
    found = _result("gap-cpu")["figures"]
    for model in dict.fromkeys(row["model"] for row in found):
        own = [row for row in found if row["model"] == model]
        goal, held = own[0]["goal_percent"], sum(row["gap_percent"] <= row["goal_percent"] for row in own)
        cells = [
            f"{row['budget_percent']} %: +{row['more_percent']:.1f} %, gap {row['gap_percent']:.1f} %"
            f"{_missed(row['gap_percent'] <= goal)}"
            for row in (own[0], own[-1])
        ]
        rows.append((model, f"{goal:g} %", *cells, f"{held} of {len(own)}{_missed(held == len(own))}"))
    head = "model", "goal", "the least budget adds", "the largest budget adds", "budgets within the goal"
    return _table(head, rows)


def _title(point: dict[str, Any]) -> str:
    return f"{point['family']} {point['setting']}".strip()


FRONTIERS = tuple(path.stem for path in sorted(RESULTS.glob("frontier-*-cpu.json")))


def _frontiers() -> Iterator[tuple[str, dict[str, Any]]]:
    """The runs of `peers frontier`, with what they ran."""
    for result in map(_result, FRONTIERS):
        config = result["config"]
        dropout = f", dropout {config['dropout']:g}" if config["dropout"] != 0.1 else ""
        yield f"{config['model']}, {config['layers']} layers{dropout}", result


@block(*FRONTIERS, says=made_on)
def frontier_goals() -> str:
    """Peers and plans: each goal with the points at which it held; where a peer replays less, and promised peaks."""
    rows: list[tuple[str, ...]] = []
    less, off, points = list[float](), 0, 0
    for title, result in _frontiers():
        goals = {goal["name"]: goal for goal in result["goals"]}
        counts = {name: f"{goal['held']} of {goal['of']}" for name, goal in goals.items()}
        median, least, most = re.findall(r"(?:is|least|most) (.+?)(?:,|$)", goals["between"]["seen"])
        counts["between"] += f": {median} ({least} to {most})"
        cells = (f"{counts[name]}{_missed(goals[name]['reached'])}" for name in ("flops", "time", "between", "peak"))
        rows.append((title, *cells, _when(result)))
        peers = {_title(peer): peer for peer in result["peers"]}
        own = [*result["ours"], *(match["ours"] for match in result["matches"] if match["ours"])]
        points, off = points + len(own), off + sum(one["promise"]["peak_bytes"] != one["peak_bytes"] for one in own)
        less += [
            match["ours"]["replay_percent"] - peers[match["peer"]]["replay_percent"]
            for match in result["matches"]
            if match["ours"] and not match["no_more_flops"] and not peers[match["peer"]]["gradient_difference"]
        ]
    head = (
        "model",
        "no more FLOPs",
        "no more time",
        "20 % less between them, in the median",
        "peak within 0.5 %",
        "run",
    )
    more = (
        f"A peer replays less than a plan at its own peak at {len(less)} points, by up to {max(less, default=0):.1f} %"
    )
    peaks = f"Of {points} plans the predicted peak of {points - off} is the measured one to the byte"
    return f"{_table(head, rows)}\n\n{more} of the step. {peaks}."


@block("compiled-cpu")
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
    goals = (
        (one["claim"], one["figure"], one["goal"], "yes" if one["reached"] else "**not reached**")
        for one in result["goals"]
    )
    return _table(head, rows) + "\n\n" + _table(("claim", "figure", "goal", "reached"), goals)


@block("doctor-cpu")
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


@block("matrix")
def matrix() -> str:
    """Releases of torch: what ran, and how it ended."""
    rows = [
        (row["torch"], row["python"], ", ".join(row["tests"]), *(f"{row[what]:,}" for what in OUTCOMES), _when(row))
        for row in _result("matrix")["rows"]
    ]
    return _table(("torch", "Python", "tests", *OUTCOMES, "run"), rows)


@block("conformance")
def conformance() -> str:
    """Others' tests of checkpointing, on this library and as they are; and their models under a plan."""
    table: list[tuple[str, ...]] = []
    runs: dict[tuple[str, ...], dict[bool, dict[str, Any]]] = {}
    for row in _result("conformance")["rows"]:
        runs.setdefault((row["project"], row["version"], row["plan"] or ""), {})[row["stock"]] = row
    for (project, version, plan), of in runs.items():
        name = f"{project} {version}" + (f", models under `--plan {plan}`" if plan else "")
        cells = [f"{row['passed']} passed, {row['failed']} failed" if row else "" for row in map(of.get, (False, True))]
        if plan:
            models = dict(of[False]["models"])
            same = models.pop("the same to the last bit", 0)
            cells[0] = ", ".join(
                [f"{same} have the plain gradients to the last bit", *(f"{n} {x}" for x, n in models.items())]
            )
        table.append((name, *cells, _when(next(iter(of.values())))))
    return _table(("suite", "here", "as it is", "run"), table)


@block("published")
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


@block("side_by_side-cpu")
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
    equal = sum(not plan["gradient_difference"] for plan in plans)
    ways_equal = [not row["gradient_difference"] for row in rows.values() if row["plan"]]
    goals = _goals(result)
    return (
        f"{table}\n\nEqual to the plain step's gradients, to the last bit, are those of {equal} of {len(plans)} plans "
        f"and of {sum(ways_equal)} of the {len(ways_equal)} others. {goals[0].upper()}{goals[1:]} Medians of "
        f"{result['rounds']} rounds on one of the cores, with a load of {result['load']:.0f} from other work."
    )


@block("memory_over_step-cpu")
def step() -> str:
    """What the picture of a step shows."""
    goals = _goals(_result("memory_over_step-cpu"))
    return f"A small GPT with AdamW on a CPU, as PyTorch's allocator counted it. {goals[0].upper()}{goals[1:]}"


@block("catalogue")
def operations() -> str:
    """The operations whose simulated peaks are wrong, by name."""
    result = _result("catalogue")
    wrong = [row for row in result["figures"] if row["verdict"] == "wrong"]
    sides: dict[str, list[dict[str, Any]]] = {"too high": [], "too low": []}
    for row in wrong:
        sides["too high" if max(row["off"], key=abs) > 0 else "too low"].append(row)

    def said(side: str) -> str:
        names = (
            re.sub(r" (of a view|in \w+)$", "", row["name"]).removesuffix(" reduction_no_dim") for row in sides[side]
        )
        return f"{len(sides[side])} {side} ({', '.join(f'`{name}`' for name in dict.fromkeys(names))})"

    listed = sum(count for verdict, count in result["counts"].items() if verdict not in ("none", "plain"))
    counts = f"Of {listed:,} cases {result['counts']['exact']:,} are exact and {len(wrong)} are wrong"
    return f"{counts}: {', '.join(map(said, (side for side in sides if sides[side])))}."


# What the ways of `elastic.py` are called here.
ELASTIC = {
    "torch's checkpoint": "torch's checkpoint around each layer",
    "a plan for the longest": "a plan for the longest",
    "a plan with 11 sizes": "a plan with 11 sizes",
    "elastic": "elastic layers",
    "elastic over 11 sizes": "that plan, elastic",
}


def _elastic(name: str) -> str:
    """What each way takes beyond the plain step, in the steps that fit and in the others."""
    result = _result(name)
    missed = {one["claim"] for one in result["goals"] if not one["reached"]}
    rows: list[tuple[str, ...]] = []
    for row in result["figures"]:
        if row["run"] != "lengths" or row["way"] == "plain":
            continue
        claim = f"{row['way']}, width {row['width']}, limit at {100 * row['share']:.0f} %: "
        cells = [
            ("-" if row[what] is None else f"{100 * row[what]:+.1f} %") + _missed(f"{claim}steps {words}" not in missed)
            for what, words in (("short", "that fit"), ("long", "that do not"))
        ]
        every = f"{100 * row['all']:+.1f} %{_missed(f'{claim}all steps' not in missed)}"
        failed = f"{row['out_of_memory']}{_missed(f'{claim}steps out of memory' not in missed)}"
        where = f"{100 * row['share']:.0f} %, {row['long_steps']} of {row['steps']} steps above"
        rows.append((where, ELASTIC[row["way"]], every, *cells, failed))
    head = "limit", "beside the plain step", "all steps", "that fit", "that do not", "out of memory"
    rounds = f"Medians of {result['rounds']} rounds" if result["rounds"] > 1 else "One round"
    goal = "at most 2 % in steps that fit, 9 % in others, less than a plan for the longest in all, none out of memory"
    return f"{_table(head, rows)}\n\n{rounds}. The goal of elastic layers, and of that plan: {goal}."


@block("elastic-cpu")
def elastic_cpu() -> str:
    """Elastic layers on a CPU."""
    return _elastic("elastic-cpu")


@block("elastic-h100")
def elastic_gpu() -> str:
    """Elastic layers on a GPU."""
    return _elastic("elastic-h100")


@block("elastic_counts-cpu")
def elastic_counts() -> str:
    """What is counted of elastic regions: steps out of memory, and replays of overlapping microbatches."""
    found = _result("elastic_counts-cpu")["figures"]
    routed = [
        (
            f"{100 * row['share']:.0f} %",
            f"{row['plain_over']} of {row['steps']}",
            str(row["out_of_memory"]),
            str(row["run_again"]),
        )
        for row in found
        if row["run"] == "routed"
    ]
    replays = [
        (
            f"{100 * row['share']:.0f} %",
            f"{replayed} of {row['forwards']}",
            f"{row['bar']}{_missed(replayed <= row['bar'])}",
        )
        for row in found
        if row["run"] == "1F1B"
        for replayed in [row["replays"]["second step"]]
    ]
    head = "limit", "steps in which plain is above it", "steps that fail", "forwards and replays run again"
    return f"{_table(head, routed)}\n\n{_table(('limit', 'forwards replayed in 1F1B', 'goal'), replays)}"


@block("offload-cpu")
def offload() -> str:
    """How fast a file is, beside a copy in host memory."""
    speeds = {name: f"{rate / 1e9:.1f} GB/s" for name, rate in _result("offload-cpu")["bytes_per_second"].items()}
    file = f"To a file {speeds['out']} and back {speeds['back']}, by four threads"
    return f"{file}; a copy in host memory {speeds['host']}, a checksum {speeds['checksum']}."


def _checks(*numbers: int) -> str:
    """Some of the checks on a device, with what they said."""
    found = (check for check in _result("gpu-h100")["checks"] if check["check"] in numbers)
    return "; ".join(f"{one['title']}: {one['verdict']} ({one['note'].partition(';')[0]})" for one in found) + "."


@block("gpu-h100")
def gpu_checks() -> str:
    """How the checks on a device ended, and what the others than passed ones said."""
    result = _result("gpu-h100")
    ends = Counter(check["verdict"] for check in result["checks"])
    counts = ", ".join(f"{count} {verdict}" for verdict, count in ends.most_common())
    others = _checks(*(check["check"] for check in result["checks"] if check["verdict"] != "passed"))
    device = f"an {result['gpu'].split()[1]}, torch {result['torch']}"
    return f"Of {len(result['checks'])} checks on {device}: {counts}. Not passed: {others}"


@block("gpu-h100")
def gpu_graphs() -> str:
    """The check of CUDA graphs on a device."""
    said = _checks(13)
    return f"On a GPU, {said}"


@block("gpu-h100")
def gpu_offload() -> str:
    """The checks of host memory on a device."""
    return f"On a GPU, {_checks(10, 11)}"


@block("first_minutes-cpu")
def first_minutes() -> str:
    """How long the quick start takes."""
    rows = [(row["what"], f"{row['seconds']:.1f}") for row in _result("first_minutes-cpu")["rows"]]
    return _table(("", "seconds"), rows)


@block("tests", "promise-cpu", "catalogue", "doctor-cpu")
def evidence() -> str:
    """What is checked, how many times, and the command that does it."""
    tests, promised = _result("tests")["counts"], _result("promise-cpu")["figures"]
    verdicts = Counter(_result("catalogue")["counts"])
    listed = verdicts.total() - verdicts["none"] - verdicts["plain"]
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
            f"{len(promised)} loops of {models} models, at most {worst:.3%} above",
            "python benchmarks/promise.py",
        ),
        (
            "each operation and layer of PyTorch's own lists, under a plan",
            f"{listed:,} cases: {verdicts['exact']:,} exact, {verdicts['refused']} refused, "
            f"{verdicts['said']} said to be uncertain, **{verdicts['wrong']} wrong**",
            "python benchmarks/catalogue.py",
        ),
        ("odd models and layers", f"{tests['odd_models']} tests", "pytest tests/planner/test_odd_models.py"),
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
