"""The doctor on training scripts with one known fault each: the fault is named, and the advised line removes it.

The scripts are in `faults.py`. `PYTHONPATH=tests python tests/doctor/test_doctor_faults.py` runs all of them, and the
sound ones, and writes what was found for the table in `docs/doctor.md`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from doctor.faults import FAULTS, KEPT, LOOPS, PRELUDE, Fault
from support.advice import printed_code_runs
from support.zoo import build, scalar_loss
from torch_recompute import doctor
from torch_recompute.engine.region_call import RegionCall


def run(script: str) -> doctor.Report:
    """Runs a script and returns its report; what it leaves in the process is as before."""
    return executed(script)["report"]


def executed(script: str) -> dict[str, Any]:
    """Runs a script and returns its names, among them those of the arguments that the doctor was given."""
    module = types.ModuleType("script")
    before, names = shared(), vars(module)
    torch.manual_seed(0)

    def noting(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given.update(inspect.signature(function).bind(*args, **kwargs).arguments)
            return function(*args, **kwargs)

        return call

    given: dict[str, Any] = {}
    try:
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")
            for name in ("examine", "watch"):
                patch.setattr(doctor, name, noting(getattr(doctor, name)))
            exec(compile(PRELUDE + textwrap.dedent(script), "script.py", "exec"), names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert shared() == before
    return {**names, "given": given}


def shared() -> list[Any]:
    """What the doctor changes for the time of an examination, of that which all models share."""
    modules = nn.modules.module
    return [
        vars(inspect.unwrap(torch_checkpoint)).get("__dynamo_disable"),
        RegionCall.forward,
        dict(modules._global_forward_hooks),
        dict(modules._global_forward_pre_hooks),
        torch.is_grad_enabled(),
    ]


def _alone() -> Iterator[None]:
    """One thread, for tensors are small; and a compiler that has compiled nothing, and counted nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch_checkpoint(torch.sin, torch.ones(1), use_reentrant=False)  # which loads the compiler
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


alone = pytest.fixture(autouse=True)(_alone)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_named_and_mended(fault: Fault) -> None:
    """The doctor names the fault, its place and what mends it; with that it finds it no more, and nothing else."""
    if "transformers" in fault.script:
        pytest.importorskip("transformers")
    names = executed(fault.script)
    report = names["report"]
    named = [finding for finding in report.findings if finding.kind == fault.kind]
    assert fault.where in [finding.where for finding in named], report
    assert any((fault.says or fault.right) in finding.write for finding in named), report
    assert {finding.kind for finding in report.findings} == {fault.kind, *fault.also}, report
    assert fault.script.count(fault.wrong) == 1
    mended = run(fault.script.replace(fault.wrong, fault.right))
    assert {finding.kind for finding in mended.findings} <= {*fault.also, *fault.after}, mended
    assert fault.row(report, mended) in recorded()["faulty"], RECORD
    for finding in report.findings:
        printed_code_runs(finding.write, names)


@pytest.mark.parametrize(
    ("name", "where", "write"),
    [
        ("an attribute", "blocks.*.last", "into blocks.*.last"),
        ("a result on ctx", "ctx.y of ExpBackward", "ctx.save_for_backward"),
    ],
)
def test_who_keeps_activations(name: str, where: str, write: str) -> None:
    """What refers to activations after their step is said by its name."""
    watched = "with doctor.watch(model) as watching:\n    train(model)\nreport = watching.report()\n"
    names = executed(textwrap.dedent(KEPT[name]) + watched)
    (found,) = names["report"].findings
    printed_code_runs(found.write, names)
    assert (found.kind, found.where) == ("kept_alive", where)
    assert write in found.write
    assert found.figures["nbytes"] > 0


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "doctor-cpu.json"
RECORD = (
    "PYTHONPATH=tests python tests/doctor/test_doctor_faults.py writes the results again, and "
    "python tools/pages.py the page"
)


def recorded() -> dict[str, Any]:
    """What the doctor found in each set-up when the page was made."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_results_are_of_these_set_ups() -> None:
    """The table on the page is of every set-up here, and of no other; nothing was found in a sound one."""
    rows = recorded()
    assert [row["name"] for row in rows["faulty"]] == [fault.name for fault in FAULTS]
    assert [row["name"] for row in rows["healthy"]] == [*LOOPS, *MODELS]
    assert not [row for row in rows["healthy"] if row["found"]]


def looped(loop: str) -> doctor.Report:
    """What the doctor says of a training loop."""
    start = "model = Model()\noptimizer = torch.optim.SGD(model.parameters())\nwith doctor.watch(model) as watching:\n"
    body = textwrap.indent(textwrap.dedent(LOOPS[loop]).strip(), "    ")
    return run(f"{start}{body}\nreport = watching.report()\n")


@pytest.mark.parametrize("loop", LOOPS)
def test_sound_loops(loop: str) -> None:
    """A training loop that keeps what it needs and no more gets no finding."""
    report = looped(loop)
    assert report, report


SOUND = ["gpt2", "llama", "mixtral", "t5", "mamba", "lora_llama", "torch_decoder", "megatron_moe"]
MODELS = [*SOUND, *(f"{name}, checkpointing" for name in SOUND[:6])]


def trained(name: str) -> list[doctor.Report]:
    """What the doctor says of a model in a plain loop, and by itself."""
    name, _, checkpointing = name.partition(", ")
    model, batch = build(name)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with doctor.watch(model) as watching:
        for _ in range(3):
            out = model(**batch)
            scalar_loss(out).backward()
            optimizer.step()
            optimizer.zero_grad()
    watched = watching.report()
    del out
    return [watched, doctor.examine(model, (), batch, loss=scalar_loss, hold_output=False)]


NIGHTLY = {"t5", "t5, checkpointing", "mixtral, checkpointing", "mamba"}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in MODELS]
)
def test_sound_models(name: str) -> None:
    """A model in a plain loop gets no finding, with the checkpointing of transformers as without."""
    for report in trained(name):
        assert report, report


def main() -> None:
    """Runs every set-up and writes what the doctor found."""
    rows: dict[str, list[dict[str, Any]]] = {"faulty": [], "healthy": []}
    for fault in FAULTS:
        with contextlib.contextmanager(_alone)():
            mended = fault.script.replace(fault.wrong, fault.right)
            rows["faulty"].append(fault.row(run(fault.script), run(mended)))
    for name in [*LOOPS, *MODELS]:
        with contextlib.contextmanager(_alone)():
            reports = [looped(name)] if name in LOOPS else trained(name)
        found = [f"{one.kind} {one.where}" for report in reports for one in report.findings]
        rows["healthy"].append({"name": name, "found": found})
    sys.path.insert(0, str(RESULTS.parents[1]))
    from _measure import save

    save(RESULTS.stem, rows, command="PYTHONPATH=tests python tests/doctor/test_doctor_faults.py")


if __name__ == "__main__":
    main()
