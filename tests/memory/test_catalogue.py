"""A sample of PyTorch's own catalogue of operations and layers, by `benchmarks/catalogue.py`: predicted and measured.

The whole catalogue takes a quarter of an hour and is run by hand; the sample has what once was wrong, and of each
family something.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if not (BENCHMARKS / "catalogue.py").exists():
    pytest.skip("the benchmarks are not part of this archive", allow_module_level=True)

EXACT = (
    # once wrong: status of a factorization, layout of a result, memory of a loss, values that are read
    *("linalg.cholesky", "linalg.inv", "linalg.solve", "linalg.eig", "masked_select", "nn.CTCLoss"),
    *("nn.BatchNorm1d of a view", "nn.BatchNorm2d of a view", "nn.BCELoss", "nn.MSELoss", "nn.SmoothL1Loss"),
    *("copysign of a view", "xlogy of a view", "index_reduce", "native_dropout_backward of a view"),
    *("nn.ReflectionPad3d in channels_last", "nn.functional.channel_shuffle in channels_last"),
    *("div floor_rounding of a view", "nn.functional.max_unpool2d grad in channels_last", "nn.BCEWithLogitsLoss"),
    # one of a family
    *("addmm", "cat", "einsum", "fft.rfft", "gather", "index_put", "logsumexp", "nn.Bilinear", "nn.Conv2d"),
    *("nn.Embedding", "nn.LSTM", "nn.GroupNorm of a view", "nn.TransformerEncoderLayer", "scatter_add", "svd"),
    *("nn.functional.dropout", "nn.functional.grid_sample", "nn.functional.interpolate", "nn.FractionalMaxPool2d"),
)
OTHERS = {
    "linalg.lstsq": "refused",
    "sparse.mm": "none",
    "cumprod": "wrong",  # too high: its backward has another formula while a mode is on
    **({"nn.LSTM": "bound"} if torch.__version__.startswith("2.11") else {}),  # its fake has less of a shape there
}


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("catalogue")


@pytest.mark.nightly
def test_the_sample_is_as_it_was(catalogue: Any) -> None:
    """Each peak is that of the step, to the byte or within the bound, or it is said in words why there is none."""
    wanted = {**dict.fromkeys(EXACT, "exact"), **OTHERS}
    found = {one["name"]: one for one in catalogue.run_apart(list(wanted))}
    others = {name: one for name, one in found.items() if one["verdict"] != wanted[name]}
    assert others == {}
    assert found.keys() == wanted.keys()


def test_a_process_that_ends_is_named(catalogue: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that kills its process gets that verdict, and those after it are run in another one."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys\n"
        "for name in sys.argv[4:]:\n"
        "    print(json.dumps({'begins': name}), flush=True)\n"
        "    if name == 'bad':\n"
        "        os.kill(os.getpid(), 11)\n"
        "    print(json.dumps({'name': name, 'verdict': 'exact'}), flush=True)\n"
    )
    monkeypatch.setattr(catalogue, "__file__", str(program))
    found = list(catalogue.run_apart(["one", "bad", "two"]))
    assert [(one["name"], one["verdict"]) for one in found] == [("one", "exact"), ("bad", "killed"), ("two", "exact")]
    assert found[1]["why"] == "the process ended with -11"


@pytest.mark.nightly
def test_the_list_is_written(catalogue: Any, tmp_path: Path) -> None:
    """What operations take is seen in processes side by side; the list has those that take nothing, and by whom."""
    path = tmp_path / "takes_nothing.txt"
    catalogue.write(path, ["add", "cat", "nn.Linear", "optim.SGD", "softmax"], "cpu", 2)
    header, lines = path.read_text().splitlines()[:3], path.read_text().splitlines()[3:]
    assert header[0].startswith(
        "# What takes nothing: at most 64 bytes while it runs, on the CPU. Written, with torch "
    )
    assert header[1].endswith("benchmarks/catalogue.py --write src/torch_recompute/memory/takes_nothing.txt")
    known = dict(line.split(": ") for line in lines)
    assert {"aten.add", "aten.cat", "aten.mm", "aten._foreach_add_", "aten._fused_sgd_"} <= known.keys()
    assert {"bfloat16 contiguous", "float32 contiguous", "float32 gaps"} <= {*known["aten.add"].split(", ")}
    assert "dense" not in known["aten._softmax"]


SEEN = (
    ("aten.add", "float32 contiguous", 0, False),
    ("aten.add", "float32 dense", 64, True),
    ("aten.add", "float32 gaps", 64, False),
    ("aten.sort", "float32 contiguous", 0, True),
    ("aten.sort", "float32 contiguous", 9000, True),
)


def test_the_list_of_cuda_names_what_takes_something(
    catalogue: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operation that was seen and took something is in the list of CUDA, with nothing after its name."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    said = [
        {"op": op, "circumstances": where, "taken": taken, "large": large, "unlike": False, "of": 36_000}
        for op, where, taken, large in SEEN
    ]
    monkeypatch.setattr(catalogue, "run_apart", lambda names, *how: said)
    catalogue.write(tmp_path / "takes_nothing_on_cuda.txt", [], "cuda", 14)
    lines = (tmp_path / "takes_nothing_on_cuda.txt").read_text().splitlines()
    assert " on CUDA 9.0. Written, with torch " in lines[0]
    assert "catalogue.py --on cuda --write " in lines[1]
    assert lines[4:] == ["aten.add: float32 contiguous, float32 dense", "aten.sort:"]
    assert "aten.sort: float32 contiguous takes 9,000 beside 36,000 bytes" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("current", "peak", "taken"), [(150, 180, 30), (150, 150, 0), (40, 100, 0), (40, 120, 20)])
def test_bytes_on_cuda_are_those_above_the_end(
    catalogue: Any, monkeypatch: pytest.MonkeyPatch, current: int, peak: int, taken: int
) -> None:
    """From a level of 100 bytes: what is left of the call is none of them, nor is older memory that the call frees."""
    levels = iter(({"current": 100, "peak": 100}, {"current": current, "peak": peak}))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: {"requested_bytes": {"all": next(levels)}})
    assert catalogue.cuda_bytes_between(list) == taken


def test_a_process_that_hangs_is_ended(catalogue: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that says nothing for too long is named as one that ends its process is, with what that one raised."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys, time\n"
        "for name in sys.argv[4:]:\n"
        "    print(json.dumps({'begins': name}), flush=True)\n"
        "    if name == 'bad':\n"
        "        time.sleep(600)\n"
        "    if name == 'worse':\n"
        "        raise RuntimeError('CUDA error: device-side assert triggered')\n"
        "    print(json.dumps({'name': name, 'verdict': 'exact'}), flush=True)\n"
    )
    monkeypatch.setattr(catalogue, "__file__", str(program))
    monkeypatch.setattr(catalogue, "LONGEST", 3)
    found = list(catalogue.run_apart(["one", "bad", "worse", "two"], jobs=2))
    assert [one["verdict"] for one in found] == ["exact", "killed", "killed", "exact"]
    assert found[1]["why"] == "the process ended with -9"
    assert found[2]["why"] == "the process ended with 1: RuntimeError: CUDA error: device-side assert triggered"
