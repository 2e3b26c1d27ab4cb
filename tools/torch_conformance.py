"""Run PyTorch's own tests of activation checkpointing on this library.

    python tools/torch_conformance.py --pytorch PATH_TO_PYTORCH_CHECKOUT [-k EXPR] [--slow] [--stock]

PyTorch's tests call `torch.utils.checkpoint.checkpoint` and `checkpoint_sequential`. Both are replaced by those of
`torch_recompute` before a test file is imported, and the tests that concern checkpointing are run by pytest in this
process, those of `use_reentrant=True` too, which is the same engine here. `--stock` replaces nothing: what fails there
as well says nothing about this library.

The checkout should be of the release that is installed (`git clone --branch v2.13.0 --depth 1 ...`); it need not be
built, and its `conftest.py` and pytest settings are not used. Any folder will do that holds `test_autograd.py` or
`test_utils.py`, itself or under `test/`, such as an extract with just the classes named in `SELECTED`. A missing file
is reported and left out. Needed beside torch: pytest, expecttest, and numpy.

Exit status: 0 if nothing failed, 1 if a test failed or a file could not be imported, 2 if nothing was run.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

# File -> {class: pattern that the names of its tests must match}.
SELECTED: dict[str, dict[str, str]] = {
    "test_autograd.py": {
        "TestAutograd": r"checkpoint|access_saved_tensor_twice_without_recomputation",
        "TestNestedCheckpoint": r"",
        "TestSelectiveActivationCheckpoint": r"",
    },
    "test_utils.py": {"TestCheckpoint": r""},
}

_DEFAULT = "wants the warning that leaving out use_reentrant means True; here it means False"
_HELPER = "calls a helper of torch.utils.checkpoint alone"
_GRAD = "wants the error of the reentrant engine under torch.autograd.grad; here it works"

# Test -> why it is not asked of this library.
EXCEPTIONS: dict[str, str] = {
    "test_checkpoint_valid": _GRAD,
    "test_checkpoint_valid_reset_on_error": _GRAD,
    "test_checkpointing_without_reentrant_detached_tensor_use_reentrant_True": (
        "wants the error of the reentrant engine when no output requires grad; here it works"
    ),
    "test_checkpoint_partial_grad": "wants the words of the reentrant engine when no output requires grad",
    "test_checkpoint_non_tensor_inputs_outputs": (
        "wants an error at the second backward through an output that is an input; here it is the input itself"
    ),
    "test_checkpoint_warns_if_use_reentrant_not_passed_explcitly": _DEFAULT,
    "test_checkpoint_sequential_warns_if_use_reentrant_not_passed_explcitly": _DEFAULT,
    "test_get_device_states_recursive": _HELPER,
    "test_infer_device_state_recursive_meta": _HELPER,
    "test_infer_device_state_recursive_multi_cuda": _HELPER,
    "test_infer_device_state_recursive_multi_gpu": _HELPER,
    "test_checkpointing_without_reentrant_custom_function_works": (
        "wants an error when a custom Function reads ctx.saved_tensors twice; here the second read works"
    ),
    "test_checkpoint_graph_execution_group": (
        "wants an error when two backward calls of a GraphExecGroup overlap; here both work"
    ),
    "test_checkpoint_trigger": (
        "counts replays in an attribute of a module; here a replay leaves attributes as it found them"
    ),
    "test_nested_checkpoint_set_early_stop_no_recompution_needed": (
        "wants a second run of a function that saves only its input; here nothing is rebuilt, so it does not run"
    ),
}


def install() -> None:
    """Put this library's functions in the place of `torch.utils.checkpoint`'s."""
    import torch.utils.checkpoint as theirs

    import torch_recompute as ours

    theirs.checkpoint = ours.checkpoint
    theirs.checkpoint_sequential = ours.checkpoint_sequential


@dataclass
class Outcome:
    """A pytest plugin that selects the tests and keeps what became of them."""

    excepted: dict[str, str] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests of `SELECTED` that are not in `EXCEPTIONS`."""
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            classes = SELECTED.get(item.path.name, {})
            owner = item.nodeid.split("::")[1]
            wanted = owner in classes and re.search(classes[owner], item.name) is not None
            if wanted and item.name in EXCEPTIONS:
                self.excepted[item.name] = EXCEPTIONS[item.name]
                wanted = False
            (kept if wanted else dropped).append(item)
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported counts as a failure."""
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Sort the test; its set-up, its clean-up or one of its subtests may fail, too."""
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def summary(self, title: str) -> str:
        """What happened, a line for each failed or excepted test."""
        ran = self.passed - self.failed - self.skipped
        lines = [f"\n{title}: {len(ran)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"]
        lines[0] += f", {len(self.excepted)} excepted"
        lines += [f"  excepted  {name}: {reason}" for name, reason in sorted(self.excepted.items())]
        lines += [f"  FAILED    {name}" for name in sorted(self.failed)]
        return "\n".join(lines) + "\n"


def find_files(checkout: Path) -> list[Path]:
    """The test files of `checkout` that exist; those that do not are reported."""
    found: list[Path] = []
    for name in SELECTED:
        places = [checkout / "test" / name, checkout / name]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            sys.stderr.write(f"no {name} in {checkout / 'test'} or {checkout}: left out\n")
        else:
            found.append(path.resolve())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and say how they went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--pytorch", type=Path, required=True, metavar="PATH", help="a checkout of PyTorch's sources")
    parser.add_argument("-k", metavar="EXPR", default="", help="only tests that match, as with pytest -k")
    parser.add_argument("--slow", action="store_true", help="also the tests that PyTorch marks as slow")
    parser.add_argument("--stock", action="store_true", help="run on torch's own checkpoint, for comparison")
    options = parser.parse_args(arguments)

    files = find_files(options.pytorch)
    if not files:
        return 2
    sys.argv = sys.argv[:1]  # torch's test helpers read the command line when they are imported
    if options.slow:
        os.environ["PYTORCH_TEST_WITH_SLOW"] = "1"
    if options.stock:
        EXCEPTIONS.clear()
    else:
        install()

    outcome = Outcome()
    # Neither the checkout's nor this project's settings: no configuration file, no conftest.py, no cache.
    command = ["-q", "-c", os.devnull, f"--rootdir={files[0].parent}", "--noconftest", "-p", "no:cacheprovider"]
    command += ["--tb=short", "-k", options.k, *map(str, files)]
    pytest.main(command, plugins=[outcome])
    sys.stdout.write(outcome.summary("torch.utils.checkpoint" if options.stock else "torch_recompute"))
    if outcome.failed:
        return 1
    return 0 if outcome.passed or outcome.skipped else 2


if __name__ == "__main__":
    sys.exit(main())
