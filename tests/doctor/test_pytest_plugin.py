"""The pytest plugin, in test runs inside a test: passes, failures, messages and imports."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # pytester forgets what a run inside has imported, and torch cannot be imported twice

from torch_recompute import ArgumentError, measure
from torch_recompute.testing import assert_same_gradients, check_peak, read_limit

pytest_plugins = ("pytester",)

PLUGIN = ("-p", "torch_recompute_pytest", "-p", "no:cacheprovider")
MODEL = """
import torch
from torch import nn
from torch_recompute import Choice, Plan, recompute

class Restless(nn.Module):
    def __init__(self):
        super().__init__()
        self.runs, self.scale = [[0]], nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.runs[0][0] += 1
        return torch.tanh(x * self.scale * self.runs[0][0])

def model():
    return nn.Sequential(nn.Linear(4, 4), Restless(), nn.Linear(4, 4))
"""


def run(pytester: pytest.Pytester, text: str, *argv: str) -> pytest.RunResult:
    """Runs tests with the plugin, whether or not it is installed."""
    pytester.makepyfile(MODEL + text)
    return pytester.runpytest_inprocess(*PLUGIN, "--strict-markers", *argv)


def test_same_gradients(pytester: pytest.Pytester) -> None:
    """A plan that changes nothing passes; for one that does, the test fails with the gradient and the region."""
    result = run(
        pytester,
        """
def test_good(assert_same_gradients):
    found = assert_same_gradients(model(), (torch.ones(2, 4),), plan=Plan((Choice(("0",)),)))
    assert found.counts["gradients"] == 5

def test_bad(assert_same_gradients):
    assert_same_gradients(model(), (torch.ones(2, 4),), plan=Plan((Choice(("1",)),)))

def test_code(assert_same_gradients):
    layer = nn.Linear(4, 4)
    assert_same_gradients(recompute(layer), (torch.ones(2, 4),), plain=layer)
""",
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["*AssertionError: 4 of 8 differ*Sequential*", "*the gradient of 1.scale differs by up to *", "*Likely: 1*"]
    )
    result.stdout.no_fnmatch_line("*compare_calls*")


def test_peaks(pytester: pytest.Pytester) -> None:
    """A test above its limit fails with the categories and what to write, one below it passes; both forms measure."""
    result = run(
        pytester,
        """
import pytest

@pytest.mark.peak_below("1MiB")
def test_above():
    torch.zeros(2**20) + 1

@pytest.mark.peak_below("9MiB")
def test_below():
    torch.zeros(2**20) + 1

@pytest.fixture
def net():
    return nn.Linear(512, 512, bias=False)

@pytest.mark.peak_below("1MiB")
def test_what_is_not_named_does_not_count(net):
    pass

@pytest.mark.peak_below("1000KiB")
def test_what_is_named_counts(net, peak_memory):
    peak_memory.track(net)
    assert peak_memory.by_category["parameters"] == 2**20

def test_fixture_alone(peak_memory):
    torch.zeros(2**20)
    assert peak_memory.peak_bytes == 2**22

@pytest.mark.peak_below("1KiB")
def test_fails_by_itself():
    torch.zeros(2**20)
    assert False, "its own"
""",
    )
    result.assert_outcomes(passed=3, failed=3)
    result.stdout.fnmatch_lines(
        [
            "peak memory is 8.00 MiB on cpu, and 1.00 MiB are allowed: 7.00 MiB too many, at add.Tensor.",
            "  activations *8.00 MiB",
            "  Most are activations: *",
            "*  parameters *1.00 MiB",
            "  Most are no activations*",
            "*its own*",
        ],
        consecutive=False,
    )
    result.stdout.no_fnmatch_line("*During handling*")


@pytest.mark.parametrize("mark", ['"24G"', '"40%"', "", '"1MiB", "2MiB"', 'limit="1MiB"'])
def test_a_marker_that_says_nothing(mark: str, pytester: pytest.Pytester) -> None:
    """A limit that is no number of bytes fails the test that has it, and says what to write."""
    text = (
        f"\nimport pytest\n\n@pytest.mark.peak_below({mark})\ndef test_one():\n    pass\n\ndef test_two():\n    pass\n"
    )
    result = run(pytester, text)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*ArgumentError: *"])


def test_the_marker_is_known(pytester: pytest.Pytester) -> None:
    """`--markers` and `--fixtures` tell of the plugin."""
    run(pytester, "", "--markers").stdout.fnmatch_lines(["@pytest.mark.peak_below(limit): *"])
    shown = run(pytester, "", "--fixtures").stdout
    shown.fnmatch_lines(["assert_same_gradients -- *torch_recompute_pytest.py*", "peak_memory -- *"])


def test_starting_imports_nothing(tmp_path: Path) -> None:
    """A run of pytest with the plugin, in which no test uses it, imports neither torch nor the package."""
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_it():\n    assert 'torch_recompute_pytest' in sys.modules\n"
        "    assert not {'torch', 'numpy', 'torch_recompute'} & set(sys.modules)\n"
    )
    argv = [sys.executable, "-m", "pytest", *PLUGIN, "-q", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_without_pytest() -> None:
    """The functions are assertions of their own: they raise, and say nothing where all is well."""
    layer = torch.nn.Linear(2, 2)
    assert assert_same_gradients(layer, (torch.ones(1, 2),), plain=layer).ok
    with pytest.raises(AssertionError, match="differs by up to"):
        assert_same_gradients(lambda x: layer(x) * 2, (torch.ones(1, 2),), plain=layer)
    with pytest.raises(ArgumentError, match="neither plan= nor plain="):
        assert_same_gradients(layer, (torch.ones(1, 2),))
    with measure() as memory:
        torch.zeros(10)
    check_peak(memory, 40)
    with pytest.raises(AssertionError, match="1 bytes too many"):
        check_peak(memory, 39)
    assert read_limit("1KiB") == read_limit(1024) == 1024
