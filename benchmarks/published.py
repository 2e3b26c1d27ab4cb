"""Published runs beside what is predicted for them: the command, both figures, and what the difference is made of.

    python benchmarks/published.py                    # all but the slow ones: some minutes of one core
    python benchmarks/published.py torchtune 70B      # those with one of these words in their names, slow ones too

Each figure of ours is that of a command line of `torch-recompute plan`, which is printed with it; nothing is run on a
device. A row has what was published, in which unit and of which bytes (of tensors that are active or allocated, or
reserved by the allocator), and the named terms that the published run has and ours has not, each by arithmetic. Where
reserved bytes were published, ours is the predicted peak and what the allocator reserved beside peaks on a device: the
median of the steps of `benchmarks/on_gpu.py`. What all these leave of the difference is called unexplained. No case has
code or a constant of its own; what the command line refuses counts as missed, and its sentence is printed.

Beside a peak with recomputation is a plan for that same peak, and how much longer its step takes than without regions.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import statistics
from dataclasses import dataclass
from typing import Any

from _measure import RESULTS, Goal, arguments, finish

from torch_recompute.commands import cli

GIB, GB, TOKENS = 2**30, 10**9, 1
UNITS = {GIB: "GiB", GB: "GB", TOKENS: "tokens"}


@dataclass(frozen=True)
class Case:
    """One published figure.

    Attributes:
        name: The run.
        command: The options of `torch-recompute plan`.
        published: The figure, in `unit`.
        within: How near ours is to be, as a share of it.
        what: What of the answer is compared: "peak"; "saved", the first configuration's peak less the last's;
            "activations", all but weights, gradients and states; "longest"; or parts of a peak, as "weights+gradients".
        rank: Of which rank of the pipeline; None for the one that needs the most.
        measures: What the published figure counts.
        terms: What the published run holds beside ours, in bytes.
        slow: Whether it takes more than two minutes, and runs only when it is named.
    """

    name: str
    command: str
    published: float
    within: float
    unit: int = GIB
    what: str = "peak"
    rank: int | None = None
    measures: str = "allocated"
    terms: tuple[tuple[str, int], ...] = ()
    slow: bool = False


TUNE = "llama3.2-3b --batch 2 --sequence 4096 --no-hold-output --device a100"
CHUNKS = f"{TUNE} --layers compiled --tiles"
LOGITS = "logits of all chunks until backward, 8192 tokens x 128256 x 2 bytes", 2 * 8192 * 128256
HEADS = "keys and values copied to all heads, 28 layers x 8192 tokens x 2 x 16 heads x 128 x 2 bytes"
DEEPSEEK = "deepseek-v3 --pp 4 --vpp 4 --ep 64 --dp 64 --batch 8192 --reduce-dtype float32 --device gb200 --layers"
TITAN = "llama3.1-8b --recompute full --device h100-96 --layers compiled"
ALST, ALST_H200 = (f"llama3.1-8b --weights-on-host --device {device}" for device in ("h100", "h200"))
LONGEST = "--layers fused --recompute full --tiles --offload --longest --budget 80GB"
MEGATRON = "llama3-70b --tp 4 --sequence-parallel --pp 4 --vpp 5 --dp 2 --batch 32 --sequence 4096 --device h100"

CASES = (
    # torchtune, README of 2024-11: Llama 3.2 3B, 2 x 4096 packed tokens, all in bfloat16, one A100.
    Case(
        "torchtune 3B",
        f"{TUNE} --recompute none",
        60.0,
        0.04,
        measures="active",
        terms=((HEADS, 2 * 16 * 256 * 8192 * 28),),
    ),
    Case("torchtune 3B, compiled", f"{TUNE} --layers compiled --recompute none", 51.0, 0.06, measures="active"),
    Case(
        "torchtune 3B, and the loss in chunks",
        f"{CHUNKS} --recompute none",
        42.9,
        0.06,
        measures="active",
        terms=(LOGITS,),
    ),
    Case("torchtune 3B, and every layer recomputed", f"{CHUNKS} --recompute full", 24.9, 0.06, measures="active"),
    Case(
        "torchtune 3B, and the optimizer in backward",
        f"{CHUNKS} --recompute full --optimizer-in-backward",
        23.1,
        0.06,
        measures="active",
        terms=(LOGITS,),
    ),
    Case(
        "torchtune 3B, and activations offloaded",
        f"{CHUNKS} --recompute full --optimizer-in-backward --offload",
        21.8,
        0.06,
        measures="active",
        terms=(LOGITS,),
    ),
    Case(
        "torchtune 3B, and 8 bit states",
        f"{CHUNKS} --recompute full --optimizer-in-backward --offload --states 8bit",
        17.6,
        0.06,
        measures="active",
        terms=(LOGITS,),
    ),
    # Megatron-Core, arXiv 2603.07685, tables 3 to 5: 256 GB200.
    Case(
        "DeepSeek-V3, weights and gradients",
        f"{DEEPSEEK} fused --recompute none",
        36.4,
        0.01,
        what="weights+gradients",
        rank=1,
    ),
    Case("DeepSeek-V3, states", f"{DEEPSEEK} fused --recompute none", 32.1, 0.01, what="states", rank=1),
    Case("DeepSeek-V3, activations", f"{DEEPSEEK} fused --recompute none", 131.0, 0.03, what="activations", rank=2),
    Case(
        "DeepSeek-V3, saved by MLA's up-projection",
        f"{DEEPSEEK} fused --recompute none,mla_up_proj",
        30.4,
        0.05,
        what="saved",
        rank=2,
    ),
    # torchtitan, llama3_h100_202412, table 2: full recomputation, compiled, 8 H100 with 96 GB.
    Case("torchtitan 8B, 32k tokens, FSDP 8", f"{TITAN} --fsdp 8 --sequence 32768", 83.9, 0.08, measures="reserved"),
    Case(
        "torchtitan 8B, 64k, FSDP 4 x CP 2",
        f"{TITAN} --fsdp 4 --cp 2 --sequence 65536",
        84.2,
        0.08,
        measures="reserved",
    ),
    Case(
        "torchtitan 8B, 128k, FSDP 2 x CP 4",
        f"{TITAN} --fsdp 2 --cp 4 --sequence 131072",
        84.0,
        0.08,
        measures="reserved",
    ),
    Case(
        "torchtitan 8B, 256k, CP 8",
        f"{TITAN} --cp 8 --zero 3 --sequence 262144",
        84.5,
        0.08,
        measures="reserved",
    ),
    # ALST, arXiv 2506.13996: weights and optimizer in host memory, every layer recomputed, one H100.
    Case(
        "ALST 8B, 32k tokens",
        f"{ALST} --recompute full --sequence 32768",
        71.91,
        0.05,
        unit=GB,
    ),
    Case("ALST 8B, 64k tokens on an H200", f"{ALST_H200} --recompute full --sequence 65536", 137.36, 0.05, unit=GB),
    Case(
        "ALST 8B, 1.2M tokens on an H200, fused, in tiles, offloaded",
        f"{ALST_H200} --layers fused --recompute full --tiles --offload --sequence 1200000",
        136.15,
        0.05,
        unit=GB,
    ),
    Case(
        "ALST 8B, the longest on one H100",
        f"{ALST} {LONGEST}",
        500_000,
        0.15,
        unit=TOKENS,
        what="longest",
        measures="longest",
        slow=True,
    ),
    Case(
        "ALST 8B, the longest on 8 H100",
        f"{ALST} --cp 8 --cp-kind ulysses --zero 3 {LONGEST}",
        3_700_000,
        0.15,
        unit=TOKENS,
        what="longest",
        measures="longest",
        slow=True,
    ),
    # Megatron-Bridge, April 2026: Llama-3 70B on 32 H100 in FP8.
    Case(
        "Megatron-Bridge 70B, every MLP recomputed",
        f"{MEGATRON} --layers fused+fp8 --recompute mlp",
        55.6,
        0.05,
        unit=GB,
    ),
    Case(
        "Megatron-Bridge 70B, nothing recomputed",
        f"{MEGATRON} --layers fused+fp8 --recompute none",
        58.8,
        0.05,
        unit=GB,
        measures="when it ran out of memory",
    ),
)

_asked: dict[str, Any] = {}


def answer(command: str) -> Any:
    """The document that a command line prints, or the sentence with which it refuses."""
    if command not in _asked:
        said, refused = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(refused):
            try:
                code = cli.main(["plan", *command.split(), "--json", "--quiet"])
            except SystemExit as end:
                code = end.code
        _asked[command] = refused.getvalue().strip().partition("\n")[0] if code else json.loads(said.getvalue())
    return _asked[command]


def figure(case: Case, found: Any) -> float:
    """What is compared of an answer, in bytes or tokens."""
    if case.what == "longest":
        return found["configurations"][-1]["most"]
    rows = [row if case.rank is None else row["ranks"][case.rank] for row in found["configurations"]]
    peak, made_of = rows[-1]["peak_bytes"], rows[-1]["made_of"]
    if case.what == "saved":
        return rows[0]["peak_bytes"] - peak
    parts = "weights+gradients+states" if case.what == "activations" else case.what
    held = sum(made_of.get(f"{part}_bytes", 0) for part in parts.split("+"))
    return peak if case.what == "peak" else peak - held if case.what == "activations" else held


@functools.cache
def reserved_beside() -> tuple[float, int]:
    """What the allocator reserved beside a peak on a device, as a share of it, in the median; and of how many steps."""
    saved = json.loads((RESULTS / "on_gpu-h100.json").read_text("utf-8"))
    rows = [row for row in saved["figures"] if "reserved_bytes" in row]
    return statistics.median(row["reserved_bytes"] / row["peak_bytes"] - 1 for row in rows), len(rows)


def plan_beside(case: Case, peak: float) -> float | None:
    """How much longer a step takes under a plan for the same peak, as a share; None where it is not asked for."""
    words = case.command.split()
    if case.what != "peak" or words[words.index("--recompute") + 1] == "none" or "compiled" in words:
        return None
    del words[words.index("--recompute") : words.index("--recompute") + 2]
    found = answer(" ".join([*words, "--budget", f"{round(peak)}B"]))
    if isinstance(found, str):
        return None
    if "ranks" in found and "plain_step_seconds" in found:
        return found["step_seconds"] / found["plain_step_seconds"] - 1
    return found["plan"]["prediction"]["step_seconds"] / found["plain"]["step_seconds"] - 1


def row_of(case: Case) -> dict[str, Any]:
    """The row of a case."""
    row: dict[str, Any] = {"case": case.name, "command": case.command, "unit": UNITS[case.unit]}
    row |= {"published": case.published, "measures": case.measures, "within": case.within, "rank": case.rank}
    found = answer(case.command)
    if isinstance(found, str):
        return {**row, "refused": found, "reached": False}
    ours = predicted = figure(case, found)
    if case.measures == "reserved":
        share, steps = reserved_beside()
        ours *= 1 + share
        row |= {"predicted": predicted / case.unit, "reserved_beside": share, "steps_on_a_device": steps}
    terms = {name: nbytes / case.unit for name, nbytes in case.terms}
    off = ours / case.unit / case.published - 1
    row |= {"ours": ours / case.unit, "off": off, "reached": abs(off) <= case.within, "terms": terms}
    row["unexplained"] = case.published - ours / case.unit - sum(terms.values())
    return {**row, "plan_slower": plan_beside(case, predicted)}


def show(row: dict[str, Any]) -> None:
    """Prints a row."""
    print(f"\n{row['case']}: torch-recompute plan {row['command']}")
    unit = row["unit"]
    if "refused" in row:
        print(f"  published {row['published']:,} {unit}; refused here: {row['refused']}")
        return
    where = "" if row["rank"] is None else f" on rank {row['rank']}"
    ours = f"ours {row['ours']:,.2f}{where}: {row['off']:+.1%}"
    print(f"  published {row['published']:,} {unit} ({row['measures']}), {ours}")
    if "predicted" in row:
        beside = f"{row['reserved_beside']:.1%}, the median of {row['steps_on_a_device']} steps on an H100"
        print(f"  predicted {row['predicted']:,.2f} {unit} allocated; the allocator reserves more beside it: {beside}")
    for name, amount in row["terms"].items():
        print(f"  {amount:+.2f} {unit}: {name}")
    print(f"  unexplained: {row['unexplained']:+,.2f} {unit}; the goal is {row['within']:.0%} of what was published")
    if row["plan_slower"] is not None:
        print(f"  a plan for the same peak takes {row['plan_slower']:+.1%} of the step without recomputation")


def main() -> None:
    """Prints all rows, and how many reach their goals."""
    options = arguments((__doc__ or "").splitlines()[0], words="words of the names of cases (all but the slow ones)")
    chosen = [
        case for case in CASES if any(word in case.name for word in options.words) or not (case.slow or options.words)
    ]
    rows: list[dict[str, Any]] = []
    for case in chosen:
        rows.append(row_of(case))
        show(rows[-1])
    reached = sum(row["reached"] for row in rows)
    print()
    figure, all_of_them = f"{reached} of {len(rows)}", reached == len(rows)
    finish(options, rows, [Goal("published runs that are predicted within their goals", figure, "all", all_of_them)])


if __name__ == "__main__":
    main()
