"""`peers discard`: peaks and FLOPs of its blocks and forms at the published size, equal gradients, and the command.

Peaks are computed on tensors without data, so the full size takes seconds and no memory.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import comparisons
import pytest
import torch
from discard import BLOCKS, FORMS, Config, Result, compare, measuring, parity, plot, run
from discard.blocks import DTYPES, Stack
from discard.forms import TILES, Form
from discard.measuring import clock, compute, computed_peak, rounds
from discard.published import BY_ARITHMETIC, SIZE, TABLE
from discard.result import MIB, ticks

from torch_recompute.commands import cli
from torch_recompute.errors import ArgumentError

pytestmark = pytest.mark.nightly

META = torch.device("meta")
CPU = torch.device("cpu")
TINY = Config(n_layers=(1, 2), d_model=8, d_ff=32, batch=2, seq=20, iters=2, scale=1, device="cpu")
SMALL = replace(TINY, d_model=16, d_ff=64, scale=None, n_layers=(2,))
COMMAND = ["discard", "--d-model", "8", "--d-ff", "32", "--seq", "20", "--iters", "1", "--device", "cpu"]

Peaks = dict[tuple[str, str, int], int]


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where times are not looked at, nothing is run to warm up."""
    monkeypatch.setattr(measuring, "WARM_UP", 0)


@pytest.fixture(scope="module")
def computed() -> Peaks:
    """Peaks of every block and form at the published size in fp32, by block, form and number of layers."""
    found: Peaks = {}
    for n_layers in (1, 8):
        for block in BLOCKS:
            stack = Stack(block, n_layers, SIZE, torch.float32, META)
            fitting = [form for form in FORMS if form.fits(stack.first)]
            found |= {(block, form.name, n_layers): computed_peak(stack, form.run) for form in fitting}
    return found


@pytest.mark.parametrize("form", ["baseline", "torch"])
@pytest.mark.parametrize("block", [name for name in TABLE if name != "rms_norm"])
def test_published_peaks_are_reproduced(computed: Peaks, block: str, form: str) -> None:
    """What is computed on tensors without data is what was measured on a GPU, to the third of a MiB."""
    theirs = TABLE[block][form].peak_mib
    assert theirs - 0.35 < computed[block, form, 8] / MIB <= theirs


@pytest.mark.parametrize(
    ("block", "form", "n_layers", "most"),
    [
        ("up_proj", "saved_call", 8, 2336),
        ("silu_up", "saved_call", 8, 2464),
        ("silu_up", "no_extra_gemm", 8, 2690),
        ("swiglu", "saved_call", 8, 3776),
        ("swiglu", "no_extra_gemm", 8, 4450),
        ("rms_norm", "saved_call", 8, 593),  # a norm of several operations, as on the CPU; with one it would be 544
        ("fp32_softmax", "saved_call", 8, 545),
        ("fp32_cast", "saved_call", 8, 544.1),
        ("up_proj", "one_tile", 8, 2272),
        ("silu_up", "one_tile", 8, 2432),
        ("swiglu", "one_tile", 8, 3776),
        ("rms_norm", "tiled", 8, 544.2),
        ("up_proj", "one_tile", 1, 480),
        ("silu_up", "one_tile", 1, 640),
        ("up_proj", "tiled", 8, 2200),
        ("silu_up", "tiled", 8, 2240),
        ("swiglu", "tiled", 8, 3280),
        ("up_proj", "saved_call", 1, 544),
        ("silu_up", "saved_call", 1, 672),
        ("swiglu", "saved_call", 1, 1088),
    ],
)
def test_peaks(computed: Peaks, block: str, form: str, n_layers: int, most: float) -> None:
    """Each form reaches its peak, in MiB, weights and gradients included."""
    loss = 3 * 4  # and its gradient: the sums behind these figures leave them out
    assert computed[block, form, n_layers] <= most * MIB + loss


def test_one_layer_is_never_above_the_baseline(computed: Peaks) -> None:
    """A single block, where the published method costs memory, costs none here."""
    ours = [key for key in computed if key[2] == 1 and key[1] not in ("baseline", "torch")]
    assert len(ours) == len(BLOCKS) + 2 + 4 + 4
    for block, form, n_layers in ours:
        assert computed[block, form, n_layers] <= computed[block, "baseline", n_layers]


def test_never_above_the_published_method(computed: Peaks) -> None:
    """Ours needs no more than output-discarding checkpointing was published with, nor than its sums for one layer."""
    for n_layers, table in ((8, TABLE), (1, BY_ARITHMETIC)):
        for block, columns in table.items():
            # A norm is one operation on CUDA and several here, which tiles make up for.
            forms = ["tiled"] if block == "rms_norm" else ["saved_call", "one_tile", "tiled"]
            for form in forms if (block, "tiled", n_layers) in computed else ["saved_call"]:
                peak = computed[block, form, n_layers] / MIB
                assert peak <= min(columns[name].peak_mib for name in columns if name.startswith("odc"))


@pytest.mark.parametrize(
    ("block", "repeated", "products"),
    [
        ("fp32_cast", 0, 1),
        ("up_proj", 1, 2),
        ("silu_up", 1, 2),
        ("swiglu", 2, 3),
        ("rms_norm", 0, 1),
        ("fp32_softmax", 0, 1),
    ],
)
def test_flops(block: str, repeated: int, products: int) -> None:
    """A step makes each matrix product three times; a form repeats those of `inner` once more, or none."""
    d_model, d_ff, batch, seq = SIZE
    product = 2 * batch * seq * d_model * (d_ff if products > 1 else d_model) * 2
    stack = Stack(block, 2, SIZE, torch.float32, META)
    for form in FORMS:
        if form.fits(stack.first):
            none = form.name in ("baseline", "no_extra_gemm") or (form.name, block) == ("torch", "up_proj")
            again = 0 if none else repeated
            assert compute(stack, form.run).flops == (3 * products + again) * product, form.name


def test_a_cast_before_the_consumer_is_not_kept() -> None:
    """In bf16 the softmax's fp32 result and its bf16 copy are both rebuilt, not only the former."""
    stack = Stack("fp32_softmax", 8, SIZE, torch.bfloat16, META)
    peaks = {form.name: compute(stack, form.run).peak_bytes for form in FORMS if form.fits(stack.first)}
    one = 2 * 2048 * 2048 * 2
    # Eight copies of the fp32 and of the bf16 result are the baseline's; the peak at the loss is the same for all.
    assert peaks["saved_call"] <= peaks["torch"] - 7 * one
    assert peaks["saved_call"] <= peaks["baseline"] - 14 * one


@pytest.mark.parametrize("dtype", DTYPES)
def test_parity(dtype: str) -> None:
    """Every form has the plain stack's outputs and gradients, tiles up to the order of sums."""
    assert SMALL.seq % TILES  # tiles of uneven length are compared, too
    compared = compare(replace(SMALL, dtypes=(dtype,)))
    assert len(compared) == 2 * len(BLOCKS) + 2 + 4 + 4
    for entry in compared:
        assert entry.passed, entry
        assert entry.tensors == 2 * (
            2 + len(list(Stack(entry.block, entry.n_layers, (2, 2, 1, 1), torch.float32, META).parameters()))
        )
        if "tile" not in entry.form:
            assert (entry.difference, entry.allowed, entry.dtype) == (0, "0", dtype)
        else:
            assert (entry.allowed, entry.dtype) == ("1e-10", "fp64")
            assert entry.difference < 1e-13


def _forgets_a_gradient(block, x):
    return block(x.detach()) + 0 * x


def _nearly(block, x):
    return block(x) * (1 + 1e-5)


def _not_a_number(block, x):
    return block(x) * math.nan


@pytest.mark.parametrize("wrong", [_forgets_a_gradient, _nearly, _not_a_number])
@pytest.mark.parametrize("same_bits", [True, False])
def test_parity_notices(wrong, same_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that computes something else has not passed, and the tensor is named."""
    form = Form("wrong", "wrong", wrong, lambda block: True, same_bits)
    monkeypatch.setattr(parity, "FORMS", (FORMS[0], form))
    (entry,) = compare(replace(SMALL, blocks=("silu_up",)))
    assert not entry.passed
    assert entry.difference > 1e-6
    assert "in iteration" in entry.worst


def test_parity_notices_a_missing_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight without a gradient is an infinite difference."""

    def frozen(block, x):
        return block.outer(torch.nn.functional.silu(x @ block.up.weight.detach().T), x)

    monkeypatch.setattr(parity, "FORMS", (FORMS[0], Form("frozen", "frozen", frozen, lambda block: True)))
    (entry,) = compare(replace(SMALL, n_layers=(1,), blocks=("silu_up",)))
    assert not entry.passed
    assert (entry.difference, entry.worst) == (math.inf, "the gradient of blocks.0.up.weight in iteration 1")


def test_parity_of_nothing_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plain stack has only zeros to show, the comparison has failed."""

    def nothing(block, x):
        return 0 * block(x)

    zero = Form("baseline", "baseline", nothing, lambda block: True)
    monkeypatch.setattr(parity, "FORMS", (zero, replace(zero, name="same")))
    (entry,) = compare(replace(SMALL, n_layers=(1,), blocks=("up_proj",)))
    assert not entry.passed
    assert "zero or not finite without regions" in entry.worst


def test_clock() -> None:
    """Every form is timed, forward and backward add up, and no gradient is left."""
    stack = Stack("silu_up", 2, (8, 16, 2, 40), torch.float32, CPU)
    words: list[str] = []
    times = clock(stack, FORMS, 3, words.append)
    assert len(words) == rounds(3)
    assert list(times) == [form.name for form in FORMS]
    for of_form in times.values():
        assert 0 < max(of_form.forward, of_form.backward) < of_form.total
        assert of_form.peak_bytes is None
    assert all(leaf.grad is None for _, leaf in stack.leaves)


@pytest.mark.usefixtures("cold")
def test_rows() -> None:
    """Each block, form and number of layers has a row, compared with its own baseline, and progress is as promised."""
    words: list[str] = []
    config = replace(TINY, blocks=("silu_up", "rms_norm"), iters=1)
    result = run(config, words.append)
    assert len(words) == ticks(config)
    assert len(result.rows) == 2 * (6 + 5)
    for row in result.rows:
        assert row.published is None  # nothing was published at this size
        assert row.peak_bytes == row.computed_peak_bytes
        assert row.peak_bytes is not None
        if row.form == "baseline":
            baseline = row.peak_bytes
            assert (row.saved_bytes, row.extra_flops_percent, row.time_delta_percent) == (0, 0, 0)
        assert row.saved_bytes == baseline - row.peak_bytes


@pytest.fixture(scope="module")
def published_size() -> Result:
    """One block at the published size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "WARM_UP", 0)
        return run(Config(n_layers=(1, 8), blocks=("up_proj",), iters=1, scale=128, device="cpu"))


def test_published_rows(published_size: Result) -> None:
    """At the published configuration the published method has rows, without any figure of ours."""
    seen = {(row.form, row.n_layers): row for row in published_size.rows}
    for column, n_layers, peak in (("odc_cpp", 1, 608.0), ("odc_cpp", 8, 2400.3), ("odc_python", 8, 2464.3)):
        row = seen[column, n_layers]
        assert row.published is not None
        assert (row.published.peak_mib, row.peak_bytes, row.flops, row.total_seconds) == (peak, None, None, None)
    assert ("odc_python", 1) not in seen
    assert seen["baseline", 8].published == TABLE["up_proj"]["baseline"]
    assert seen["saved_call", 8].published is None
    assert published_size.config.timed_size == (16, 64, 2, 16)


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_plot(published_size: Result, suffix: str, start: bytes, tmp_path: Path) -> None:
    """The picture has a bar for every row, also for those of the published method."""
    path = tmp_path / f"peaks{suffix}"
    plot.draw(published_size, path)
    data = path.read_bytes()
    assert data.startswith(start)
    if suffix == ".svg":
        # Text is drawn as outlines, and each is preceded by a comment with its words: here the heights of the bars.
        for height in ("2,560", "2,400", "2,464", "2,336", "2,190", "608", "544"):
            assert f"<!-- {height} -->".encode() in data


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for CUDA where there is none says what happens without it; asking for a device too many says how many."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match=r"--device is cuda, but .* sees no CUDA device.*--device cpu"):
        replace(TINY, device="cuda", scale=None).check()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ArgumentError, match=r"--device is cuda:1, but there are 1 CUDA devices"):
        replace(TINY, device="cuda:1", scale=None).check()
    with pytest.raises(ArgumentError, match=r"--scale is 4, but on CUDA .* no effect"):
        replace(TINY, device=None, scale=4).check()


# --- the command ------------------------------------------------------------------------------------------------------


def cells(line: str) -> list[str]:
    """The cells of a line of a table."""
    return re.split("  +| (?=[-+~–0-9])", line.strip())


@pytest.mark.usefixtures("plain_terminal", "cold")
def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has a line per form under each block, fits into 80 columns, and progress goes to stderr."""
    monkeypatch.setenv("COLUMNS", "80")
    options = ["--d-model", "16", "--only", "swiglu", "rms_norm", "--n-layers", "2", "1", "--scale", "1"]
    assert comparisons.main([*COMMAND, *options]) == cli.OK
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


@pytest.mark.usefixtures("plain_terminal")
def test_check_finds_a_difference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A form that computes something else ends with 1 and is named, in the table and in JSON."""

    def wrong(block, x):
        return block(x) * 1.001

    monkeypatch.setattr(parity, "FORMS", (FORMS[0], Form("wrong", "wrong form", wrong, lambda block: True)))
    argv = [*COMMAND, "--check", "--n-layers", "1", "--only", "up_proj", "--quiet"]
    assert comparisons.main(argv) == cli.FAILED
    out = " ".join(capsys.readouterr().out.split())
    assert "DIFFERENT: up_proj, 1 layer, fp32, wrong form: " in out
    assert "1 comparisons, 1 with a difference" in out
    assert comparisons.main([*argv, "--json"]) == cli.FAILED
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["passed"]) == ("peers discard --check", False)
    assert [entry["passed"] for entry in document["comparisons"]] == [False]


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
@pytest.mark.usefixtures("plain_terminal")
def test_what_a_user_can_mend(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong value ends with 2 and one message on stderr, before anything is computed."""
    assert comparisons.main([*COMMAND, *options]) == cli.USAGE
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"torch-recompute: error: {message}")
    assert "Traceback" not in output.err


@pytest.mark.gpu
def test_on_cuda() -> None:
    """On CUDA the allocator's peak is shown, at the full size, and no form's is above the baseline's."""
    config = Config(n_layers=(4,), blocks=("silu_up", "swiglu"), d_model=512, d_ff=2048, seq=1024, iters=2)
    result = run(config)
    peaks = {(row.block, row.form): row.measured_peak_bytes for row in result.rows}
    for block in config.blocks:
        baseline = peaks[block, "baseline"]
        assert baseline is not None
        assert all(peak is not None and peak <= baseline for (of, _), peak in peaks.items() if of == block)
    assert config.timed_size == config.size
    assert all(entry.passed for entry in compare(replace(SMALL, device="cuda")))
