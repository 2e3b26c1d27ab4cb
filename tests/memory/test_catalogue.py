"""A sample of PyTorch's own catalogue of operations and layers, by `benchmarks/catalogue.py`: predicted and measured.

The whole catalogue takes a quarter of an hour and is run by hand; the sample has what once was wrong, and of each
family something.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

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
}


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("catalogue")


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
        "for name in sys.argv[2:]:\n"
        "    print(json.dumps({'begins': name}), flush=True)\n"
        "    if name == 'bad':\n"
        "        os.kill(os.getpid(), 11)\n"
        "    print(json.dumps({'name': name, 'verdict': 'exact'}), flush=True)\n"
    )
    monkeypatch.setattr(catalogue, "__file__", str(program))
    found = list(catalogue.run_apart(["one", "bad", "two"]))
    assert [(one["name"], one["verdict"]) for one in found] == [("one", "exact"), ("bad", "killed"), ("two", "exact")]
    assert found[1]["why"] == "the process ended with -11"
