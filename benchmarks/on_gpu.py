"""Claim: a plan made without a GPU holds on one: no peak is above it by 1 %, no step slower than it says by 5 %.

    python benchmarks/on_gpu.py --plan h100                   # on any machine: plans and what is predicted, saved
    python benchmarks/on_gpu.py "batch 16" vit --plan h100    # of these cases alone
    python benchmarks/on_gpu.py --predict h100                # there too: what is predicted today for the saved plans
    python benchmarks/on_gpu.py --rounds 5 --save on_gpu-h100 # on that GPU: the same steps, run

Each case is a command line of `torch-recompute plan`, for a model of a published size. Without a GPU it is asked for
the peak of configurations and for plans; on the GPU that model is built with random weights, in a process of its own,
and each way trains it: two steps, then as many as there are rounds. Their peak is that of CUDA's allocator, which
rounds up what tensors ask for (that sum is saved, too), their time the median, compared as a ratio to the first way of
the case. A ratio needs no clock of the predicted device; the column of milliseconds is there to see.

A way that ends out of memory counts as missed.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _measure import RESULTS, Goal, arguments, finish, save
from published import answer

from torch_recompute import Plan, apply
from torch_recompute.commands import cli, models
from torch_recompute.memory.reserved import expands
from torch_recompute.planner.configurations import configurations
from torch_recompute.simulation.training_step import OPTIMIZERS, USUAL, TrainingStep

GIB = 2**30
HIGH, SLOW = 0.01, 0.05
WARM = 2  # steps
CASES: dict[str, tuple[str, ...]] = {  # ways: a configuration, or a budget
    "llama3.2-3b --batch 2 --sequence 4096": ("none", "full", "52GiB", "40GiB"),
    "gpt2-xl --batch 8 --sequence 1024": ("none", "full", "30GiB"),
    "vit-h --batch 64": ("none", "full", "15GiB"),
    "llama3-8b --batch 2 --sequence 4096": ("full", "64GiB", "72GiB"),
    "gpt2-xl --batch 4 --sequence 1024 --dtype fp32 --autocast bf16": ("none", "full", "36GiB"),
    "llama3-8b --batch 2 --sequence 4096 --lora 16:all-linear": ("full", "60GiB"),
    "llama3.2-3b --batch 2 --sequence 4096 --layers compiled": ("none", "full"),
    "llama3.2-3b --sequence 32768 --tiles --offload": ("30GiB", "40GiB"),
    "gpt-oss-20b --sequence 4096 --lora 16": ("full", "60GiB"),
    # What "fit" would leave of 80 GB without the allocator, and with it: is that enough for what it holds unused?
    "gpt2-xl --batch 16 --sequence 1024": ("75GiB", "73.1GiB"),
    "llama3-8b --batch 4 --sequence 4096": ("75GiB", "73.4GiB"),
}


def planned_file(device: str) -> Path:
    """Where the predictions for a device are."""
    return RESULTS / f"on_gpu-{device}-planned.json"


def asked(*words: str) -> Any:
    """The document that `torch-recompute plan` prints."""
    found = answer(" ".join(words))
    assert not isinstance(found, str), found
    return found


def predicted(case: str, way: str, device: str, plan: str | None) -> dict[str, Any]:
    """What is predicted of a way; of a budget for its plan, which is made where it is not given."""
    words = [*case.split(), "--device", device]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        if plan is None and way not in ("none", "full"):
            asked(*words, "--budget", way, "--out", str(path))
            plan = path.read_text()
        if plan is not None:
            path.write_text(plan)
        stated = [word for word in words if word not in ("--tiles", "--offload")]  # a plan says itself where
        said = asked(*stated, "--recompute", way if plan is None else str(path))["configurations"][0]
    print(f"{case}, {way}: {said['peak_bytes'] / GIB:.2f} GiB, {said['step_seconds'] * 1000:.1f} ms", flush=True)
    figures = {"peak_bytes": said["peak_bytes"], "step_seconds": said["step_seconds"]}
    return {"case": case, "way": way, **figures, "plan": None if plan is None else choices_of(Plan.from_json(plan))}


def compiled(model: torch.nn.Module) -> None:
    """Compiles each of a model's layers by itself."""
    torch._dynamo.config.recompile_limit = 64
    for layer in model.get_submodule("model.layers").children():
        layer.compile()


def run_case(case: str, ways: list[dict[str, Any]], rounds: int, on: str) -> Iterator[dict[str, Any]]:
    """Trains the model of a case in each way."""
    args = cli.build_parser().parse_args(["plan", *case.split(), "--recompute", "none"])
    torch.manual_seed(0)
    around = allocated(on)
    model = models.load(args.model, models.DTYPES.get(args.dtype or ""), on).model.train()
    batch = models.random_batch(models.batch_for(model, args.model, args.batch, args.sequence), model, on)
    model = models.with_adapters(model, args)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    make = OPTIMIZERS[USUAL]
    assert make is not None
    optimizer = make(trained)
    for way in ways:
        step = TrainingStep(model, (), batch)
        plan = Plan.from_json(way["plan"]) if way["plan"] else configurations("way", way["way"], step)[way["way"]]
        if args.layers == "compiled":
            torch.compiler.reset()
            compiled(model)
        handle = apply(model, plan)
        row = {"case": case, "way": way["way"], **({"expandable": True} if expands() else {})}
        try:
            yield {**row, **trained_as(model, batch, optimizer, args, rounds, on, around)}
        except torch.OutOfMemoryError as error:
            yield {**row, "failed": str(error).partition(". GPU")[0]}
        handle.remove()
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if on == "cuda":
            torch.cuda.empty_cache()


def trained_as(
    model: torch.nn.Module, batch: Any, optimizer: Any, args: Any, rounds: int, on: str, around: int
) -> dict[str, Any]:
    """The peak and the seconds of a model's steps as it is now."""
    taken: list[float] = []
    for number in range(WARM + rounds):
        if number == WARM and on == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = clock(on)
        with models.autocasting(model, args.autocast):
            out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        taken.append(clock(on) - start)
    loss = float(out.loss.detach())
    said = torch.cuda.memory_stats() if on == "cuda" else {}
    names = {"peak_bytes": "allocated_bytes", "asked_bytes": "requested_bytes", "reserved_bytes": "reserved_bytes"}
    peaks = {name: said.get(f"{stat}.all.peak", around) for name, stat in names.items()}
    peaks["peak_bytes"] -= around
    return {**peaks, "loss": loss, "seconds": statistics.median(taken[WARM:])}


def allocated(on: str) -> int:
    return torch.cuda.memory_allocated() if on == "cuda" else 0


def clock(on: str) -> float:
    if on == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run_apart(case: str, device: str, rounds: int, on: str) -> list[dict[str, Any]]:
    """The rows of a case, run in a process of its own."""
    command = [sys.executable, __file__, case, "--here", device, on, "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        rows += [{"case": case, "way": way, "failed": last} for way in CASES[case][len(rows) :]]
    return rows


def compared(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows that were run, beside what was predicted; the first of a case is what the others' seconds are ratios to."""
    first: dict[str, tuple[float, float]] = {}
    for row, said in zip(rows, before, strict=True):
        assert (row["case"], row["way"]) == (said["case"], said["way"])
        whole = {**row, "predicted_peak_bytes": said["peak_bytes"], "predicted_seconds": said["step_seconds"]}
        if "failed" not in row:
            base = first.setdefault(row["case"], (row["seconds"], said["step_seconds"]))
            whole["peak_error"] = row["peak_bytes"] / said["peak_bytes"] - 1
            whole["ratio"], whole["predicted_ratio"] = row["seconds"] / base[0], said["step_seconds"] / base[1]
        yield whole


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """What was claimed of the rows: that each runs, with a peak and a time that are not above the predicted ones."""
    ran = [row for row in rows if "failed" not in row]
    held = {
        "ways to train that did not run out of memory": (len(ran), len(rows)),
        f"peaks at most {HIGH:.0%} above the predicted one": (sum(row["peak_error"] <= HIGH for row in ran), len(ran)),
        f"steps at most {SLOW:.0%} slower than predicted, beside the first of their case": (
            sum(row["ratio"] / row["predicted_ratio"] - 1 <= SLOW for row in ran),
            len(ran),
        ),
    }
    return [Goal(claim, f"{count} of {of}", "all", count == of) for claim, (count, of) in held.items()]


def choices_of(plan: Plan) -> str:
    """A plan as text that `Plan.from_json` reads, with its choices alone: neither its prediction nor its model."""
    data = json.loads(plan.to_json())
    choices = [{name: value for name, value in choice.items() if value} for choice in data["choices"]]
    return json.dumps({"version": data["version"], "source": data["source"], "choices": choices})


def show(row: dict[str, Any]) -> None:
    """Prints a row."""
    where = f"  {row['way']:>6}  predicted {row['predicted_peak_bytes'] / GIB:6.2f} GiB"
    if "failed" in row:
        print(f"{where}, {row['failed']}", flush=True)
        return
    print(
        f"{where}, {row['peak_bytes'] / GIB:6.2f} on the device ({row['peak_error']:+.2%}; reserved "
        f"{row['reserved_bytes'] / GIB:.2f}); step x {row['predicted_ratio']:.3f}, there {row['ratio']:.3f} "
        f"({row['predicted_seconds'] * 1000:,.0f} ms by the data sheet, {row['seconds'] * 1000:,.0f} ms)",
        flush=True,
    )


def main() -> None:
    """Plans, or runs what was planned and prints both."""
    lists = {
        "plan": "plan and predict for this device",
        "predict": "predict what is planned for this device",
        "here": "this case alone, in this process",
        "device": "whose plans",
    }
    options = arguments(__doc__ or "", words="words of the cases to run (all)", **lists, on="cuda, or cpu to try it")
    chosen = [case for case in CASES if not options.words or any(word in case for word in options.words)]
    device = (options.plan or options.predict or options.here or options.device or ["h100"])[0]
    saved = planned_file(device)
    before = json.loads(saved.read_text())["ways"] if saved.exists() else []
    if options.plan or options.predict:
        plans = {(way["case"], way["way"]): way["plan"] for way in before if options.predict}
        ways = [(case, way) for case in chosen for way in CASES[case]]
        rows = [predicted(*way, device, plans.get(way)) for way in ways]
        new = {(way["case"], way["way"]): way for way in [*before, *rows]}
        save(saved.stem, {"ways": [*new.values()]})
        return
    if options.here:
        for row in run_case(chosen[0], [w for w in before if w["case"] == chosen[0]], options.rounds, options.here[1]):
            print(json.dumps(row), flush=True)
        return
    on = (options.on or ["cuda"])[0]
    if on == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no CUDA device here; --plan h100 needs none.")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if on == 'cuda' else 'CPU'}")
    figures: list[dict[str, Any]] = []
    for case in chosen:
        print(case)
        said = [way for way in before if way["case"] == case]
        for row in compared(run_apart(case, device, options.rounds, on), said):
            show(row)
            figures.append(row)
    gpu = torch.cuda.get_device_name() if on == "cuda" else ""
    finish(options, figures, goals(figures), gpu, rounds=options.rounds)


if __name__ == "__main__":
    main()
