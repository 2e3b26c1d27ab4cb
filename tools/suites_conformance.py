"""Run others' own tests of gradient checkpointing on this library: transformers', PEFT's, DeepSpeed's.

    python tools/suites_conformance.py transformers CHECKOUT [-k EXPR] [--tests PATH ...] [--stock]
    python tools/suites_conformance.py transformers CHECKOUT --plan full      # or a name for recompute_modules: mlp

The functions of `torch.utils.checkpoint` (for DeepSpeed, those of `deepspeed.checkpointing`) are replaced by ours
before a test file is imported; calls that ask for `use_reentrant=True` still go to torch. `--stock` replaces nothing:
what fails there as well says nothing about this library.

With `--plan`, transformers' test of gradient checkpointing is another one for each of its models: the gradients under a
plan are those without it, to the last bit. Their own counts the runs of a layer from outside the region, where a replay
is not seen.

The tests of a release want that release: a folder `src` in the checkout comes before what is installed, unless
`--installed` says otherwise, and of DeepSpeed the installed one is used. Needed beside: what the tests import
(parameterized, among others); DeepSpeed on a CPU wants `DS_ACCELERATOR=cpu` and `LOCAL_SIZE=4`. PEFT's tests want
models from the hub.

With `--save` a run's counts replace those of the same run in `benchmarks/results/conformance.json`, of which
docs/compatibility.md has a table.

Exit status: 0 if nothing failed, 1 if a test failed or a file could not be imported, 2 if nothing was run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch_conformance

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from _measure import RESULTS, checked_out, save, today

SAVED = RESULTS / "conformance.json"
SAME = "the same to the last bit"
"""What is said of a model whose gradients under a plan are those without."""


@dataclass(frozen=True)
class Suite:
    """A project's tests: files by pattern, the tests in them that concern us, and the exceptions with reasons."""

    files: tuple[str, ...]
    wanted: str
    install: Callable[[], None]
    exceptions: dict[str, str] = field(default_factory=dict[str, str])
    options: tuple[str, ...] = ()


def install_deepspeed() -> None:
    """Put this library's functions in the place of DeepSpeed's, in the processes that its tests fork as well."""
    import multiprocessing

    import torch

    from torch_recompute.compat import deepspeed as ours

    torch_conformance.install()
    theirs: Any = importlib.import_module("deepspeed").checkpointing
    for name in ours.__all__:
        setattr(theirs, name, getattr(ours, name))
    start = multiprocessing.set_start_method
    mp: Any = torch.multiprocessing
    mp.set_start_method = lambda *_, **__: start("fork", force=True)  # other ways begin with DeepSpeed as it is


def run_deepspeed_on_cpu() -> None:
    """Let the tests run that DeepSpeed skips on a CPU, where they work."""
    skip: Any = pytest.skip

    def unless_for_cpu(reason: str = "", **kwargs: Any) -> None:
        if reason != "CPU accelerator does not support this test yet":
            skip(reason, **kwargs)

    pytest.skip = unless_for_cpu  # pyright: ignore[reportAttributeAccessIssue]


_REENTRANT = "is about use_reentrant=True, which this library refuses"

SUITES = {
    "transformers": Suite(
        ("tests/models/*/test_modeling_*.py",),
        r"test_training_gradient_checkpointing",
        torch_conformance.install,
        {
            "test_training_gradient_checkpointing_use_reentrant": _REENTRANT,
            "test_training_gradient_checkpointing_use_reentrant_true": _REENTRANT,
        },
    ),
    "peft": Suite(("tests/test_*.py",), r"gradient_checkpointing", torch_conformance.install),
    "deepspeed": Suite(
        ("tests/unit/runtime/activation_checkpointing/test_*.py",),
        r"",
        install_deepspeed,
        {
            "test_cpu_offload_matches_baseline": "counts what DeepSpeed's own offload engine has moved",
            "test_configure_with_contiguous_checkpointing_requires_num_checkpoints": (
                "wants the error for a missing number of layers; partition_activations=True is refused before that"
            ),
        },
    ),
}


def plan_instead(what: str, seen: Counter[str]) -> None:
    """Make transformers' test compare the gradients under a plan with those without.

    Args:
        what: "full", or the name of modules in `recompute_modules`.
        seen: Gets how many models there were, by what was found.
    """
    import torch
    from transformers import set_seed

    from torch_recompute import RecomputeConfig, RecomputeError
    from torch_recompute.integrations import huggingface

    def gradients(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        set_seed(0)
        model.zero_grad()
        model(**inputs).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    def look(self: Any, model_class: Any) -> str:
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        config.use_cache = config.get_text_config().use_cache = (
            False  # with a cache keys are laid out otherwise, and round otherwise
        )
        config.return_dict = True
        model = model_class(config).train()
        inputs = self._prepare_for_class(inputs, model_class, return_labels=True)
        if getattr(model(**inputs), "loss", None) is None:
            return "without a loss"
        try:
            plain = gradients(model, inputs)
            if not same(plain, gradients(model, inputs)):
                return "not the same twice without a plan"
        except Exception as error:
            return f"not trained without a plan ({type(error).__name__})"
        try:
            plan: Any = (
                "full"
                if what == "full"
                else RecomputeConfig(recompute_granularity="selective", recompute_modules=[what]).plan(model)
            )
            handle = huggingface.apply(model, plan)
        except RecomputeError as error:
            return f"without such a plan ({type(error).__name__})"
        planned = gradients(model, inputs)
        handle.remove()
        return SAME if same(plain, planned) else "DIFFERENT"

    def check(self: Any, gradient_checkpointing_kwargs: Any = None) -> None:
        if not self.model_tester.is_training:
            self.skipTest("the tester of this model trains nothing")
        for model_class in self.all_model_classes:
            if model_class.supports_gradient_checkpointing:
                with self.subTest(model_class.__name__):
                    found = look(self, model_class)
                    seen[found] += 1
                    assert found != "DIFFERENT"

    common = importlib.import_module("tests.test_modeling_common")
    common.ModelTesterMixin.check_training_gradient_checkpointing = check


@dataclass
class Chosen(torch_conformance.Outcome):
    """Selects the tests of a suite."""

    suite: Suite | None = None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests that concern checkpointing and are not excepted."""
        assert self.suite is not None
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            wanted = re.search(self.suite.wanted, item.name) is not None
            why = self.suite.exceptions.get(item.name.partition("[")[0])
            if wanted and why is not None:
                self.excepted[item.name] = why
            (kept if wanted and why is None else dropped).append(item)
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def keep(row: dict[str, Any]) -> None:
    """Writes the counts of a run to the result, in the place of those of the same run."""
    which = "project", "plan", "stock"
    known = json.loads(SAVED.read_text("utf-8"))["rows"] if SAVED.is_file() else []
    others = [one for one in known if any(one[name] != row[name] for name in which)]
    made = {"date": today(), "commit": checked_out()}
    save(SAVED.stem, {"rows": [*others, {**row, **made}]}, elsewhere="on a checkout of each project")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and say how they went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("project", choices=SUITES)
    parser.add_argument("checkout", type=Path, help="a checkout of the project's sources")
    parser.add_argument("-k", metavar="EXPR", default="", help="only tests that match, as with pytest -k")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="these files of the checkout instead of all")
    parser.add_argument(
        "--plan", metavar="WHAT", help="transformers: under a plan, full or the name of modules, such as mlp"
    )
    parser.add_argument("--installed", action="store_true", help="test the project that is installed, not its src")
    parser.add_argument("--stock", action="store_true", help="run on the project as it is, for comparison")
    parser.add_argument("--save", action="store_true", help="write the counts to benchmarks/results/conformance.json")
    options = parser.parse_args(arguments)

    suite, checkout = SUITES[options.project], options.checkout.resolve()
    files = sorted(str(file) for pattern in options.tests or suite.files for file in checkout.glob(pattern))
    if not files:
        sys.stderr.write(f"no tests of {options.project} in {checkout}\n")
        return 2
    if not options.installed:
        sys.path.insert(0, str(checkout / "src"))
    outcome = Chosen(suite=suite)
    if options.stock:
        suite.exceptions.clear()
    else:
        suite.install()
    if options.project == "deepspeed":
        run_deepspeed_on_cpu()
        sys.path.insert(0, str(checkout / "tests"))
    os.chdir(checkout)  # tests open files of theirs by relative paths
    seen: Counter[str] = Counter()
    if options.plan is not None:
        sys.path.insert(0, str(checkout))
        plan_instead(options.plan, seen)
        suite.exceptions["test_training_gradient_checkpointing_use_reentrant_false"] = "is the same test with a plan"
    command = [
        "-q",
        "-W",
        "ignore",
        "-c",
        "/dev/null",
        f"--rootdir={checkout}",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    ]
    command.append(
        "--continue-on-collection-errors"
    )  # a file that wants what is not installed says so, and the rest run
    pytest.main([*command, *suite.options, "-k", options.k, *files], plugins=[outcome])
    sys.stdout.write(outcome.summary(f"{options.project} as it is" if options.stock else f"{options.project} on ours"))
    for found, count in sorted(seen.items()):
        sys.stdout.write(f"  {count:5} models: gradients under the plan {options.plan!r}: {found}\n")
    if options.save:
        keep(
            {
                "project": options.project,
                "version": importlib.import_module(options.project).__version__,
                "plan": options.plan,
                "stock": options.stock,
                "passed": len(outcome.passed - outcome.failed - outcome.skipped),
                "failed": len(outcome.failed),
                "models": dict(seen),
            }
        )
    if outcome.failed:
        return 1
    return 0 if outcome.passed or outcome.skipped else 2


if __name__ == "__main__":
    sys.exit(main())
