"""The command `python benchmarks/peers discard`: stdout and stderr, exit codes, the plot, and what is refused."""

import json
import re

import comparisons
import pytest
from discard import FORMS, Config, Result, parity, plot, run
from discard.forms import Form

from torch_recompute.commands import cli

BENCH = ["discard"]
TINY = [*BENCH, *["--d-model", "8", "--d-ff", "32", "--seq", "20", "--iters", "1", "--device", "cpu"]]


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests run in, the output is 80 columns wide and without colour."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def cells(line: str) -> list[str]:
    """The cells of a line of a table."""
    return re.split("  +| (?=[-+~–0-9])", line.strip())


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has a line per form under each block, fits into 80 columns, and progress goes to stderr."""
    options = ["--d-model", "16", "--only", "swiglu", "rms_norm", "--n-layers", "2", "1", "--scale", "1"]
    assert comparisons.main([*TINY, *options]) == cli.OK
    output = capsys.readouterr()
    assert output.err.splitlines()[-1] == "100%  rms_norm, 1 layer, fp32: timing"
    assert "\x1b" not in output.out + output.err
    assert "…" not in output.out
    lines = output.out.splitlines()
    assert [line for line in lines if line.startswith("Discarding")] == [
        "Discarding outputs: 2 layers, fp32",
        "Discarding outputs: 1 layer, fp32",
    ]
    titles = [form.title for form in FORMS]
    forms = [title for line in lines for title in titles if re.match(f"   {title}  ", line)]
    assert forms == [*titles, *(title for title in titles if title != "ours, no extra GEMM")] * 2
    baseline = next(cells(line) for line in lines if line.strip().startswith("baseline"))
    assert (baseline[3:5], baseline[8]) == (["0.0", "0.0"], "+0.0")
    assert "computed on fake tensors (device meta, no data) at d_model 16" in " ".join(lines)


def test_check_finds_a_difference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A form that computes something else ends with 1 and is named, in the table and in JSON."""

    def wrong(block, x):
        return block(x) * 1.001

    monkeypatch.setattr(parity, "FORMS", (FORMS[0], Form("wrong", "wrong form", wrong, lambda block: True)))
    argv = [*TINY, "--check", "--n-layers", "1", "--only", "up_proj", "--quiet"]
    assert comparisons.main(argv) == cli.FAILED
    out = " ".join(capsys.readouterr().out.split())
    assert "DIFFERENT: up_proj, 1 layer, fp32, wrong form: " in out
    assert "1 comparisons, 1 with a difference" in out
    assert comparisons.main([*argv, "--json"]) == cli.FAILED
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["passed"]) == ("peers discard --check", False)
    assert [entry["passed"] for entry in document["comparisons"]] == [False]


@pytest.fixture(scope="module")
def published_size() -> Result:
    """One block at the published size, once for all pictures."""
    return run(Config(n_layers=(1, 8), blocks=("up_proj",), iters=1, scale=256, device="cpu"))


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_plot(published_size: Result, suffix: str, start: bytes, tmp_path) -> None:
    """The picture has a bar for every row, also for those of the published method."""
    path = tmp_path / f"peaks{suffix}"
    plot.draw(published_size, path)
    data = path.read_bytes()
    assert data.startswith(start)
    if suffix == ".svg":
        # Text is drawn as outlines, and each is preceded by a comment with its words: here the heights of the bars.
        for height in ("2,560", "2,400", "2,464", "2,336", "2,188", "608", "544"):
            assert f"<!-- {height} -->".encode() in data


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n-layers", "1", "0"], "--n-layers is 0; expected a whole number of at least 1"),
        (["--seq", "0"], "--seq is 0; expected a whole number of at least 1"),
        (["--only", "gelu"], "--only names the block 'gelu', which is not known; expected one or more of fp32_cast"),
        (["--dtype", "fp8"], "--dtype names the dtype 'fp8', which is not known"),
        (["--device", "tpu"], "--device is tpu; expected cpu, cuda or cuda:N"),
        (["--plot", "peaks.txt"], "--plot is peaks.txt; expected a file name that ends in .png, .svg, .pdf. Write "),
        (["--plot", "no/such/peaks.png"], "--plot is no/such/peaks.png: there is no folder no/such"),
        (["--check", "--plot", "a.png"], "--plot is a.png, but --check neither times nor draws"),
        (["--check", "--scale", "4"], "--scale is 4, but --check neither times nor draws"),
        (["--check", "--iters", "0"], "--iters is 0; expected a whole number of at least 1"),
    ],
)
def test_what_a_user_can_mend(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong value ends with 2 and one message on stderr, before anything is computed."""
    assert comparisons.main([*TINY, *options]) == cli.USAGE
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"torch-recompute: error: {message}")
    assert "Traceback" not in output.err
