"""The examples: each runs on two ranks, as the torchrun line in its docstring says, and prints what it promises.

One is started by that line itself. The others run in processes that have imported torch, in the environment that
torchrun makes.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch.distributed as dist

from distributed.ranks import free_port

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "distributed"
ROW = re.compile(r"^(plain|regions) +loss ([\d. ]+?) +peak ([\d.]+) MiB per rank$", re.MULTILINE)
KEPT = re.compile(r"^(tensor|sequence), (.+?) +loss ([\d. ]+?) +kept +(\d+) KiB   repeated +(\d+)$", re.MULTILINE)


def own_line(path: Path) -> list[str]:
    """The words of the line that starts an example."""
    lines = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()
    (line,) = [line for line in lines if line.strip().startswith("torchrun ")]
    return shlex.split(line)


def by_torchrun(path: Path) -> str:
    """What the example's own line prints."""
    command = [sys.executable, "-m", "torch.distributed.run", *own_line(path)[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr
    return run.stdout


def as_torchrun_would(path: str, picture: str, port: int) -> tuple[str, str]:
    """What the example prints and warns of on this rank, which may draw a picture."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(sys, "argv", [path, picture]),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        runpy.run_path(path, run_name="__main__")
    return out.getvalue(), err.getvalue()


def on_ranks(ranks: Any, path: Path, folder: Path) -> str:
    """What the example prints, on whichever rank; its picture, if it draws one, is in the folder."""
    line = ["torchrun", "--standalone", "--nproc-per-node", "2", str(path.relative_to(ROOT))]
    picture = f"{path.stem}.svg"
    assert own_line(path) in (line, [*line, picture])
    printed = ranks.run(as_torchrun_would, str(path), str(folder / picture), free_port())
    assert not any("Warning" in err for _, err in printed)
    return "".join(out for out, _ in printed)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "pipeline"])
def test_regions_train_the_same_in_less_memory(ranks: Any, name: str, tmp_path: Path) -> None:
    """The example prints the same falling losses with and without regions, a lower peak with them, and draws both."""
    path = FOLDER / f"{name}.py"
    printed = by_torchrun(path) if name == "ddp" else on_ranks(ranks, path, tmp_path)
    rows = {row: (losses.split(), float(peak)) for row, losses, peak in ROW.findall(printed)}
    (plain, plain_peak), (losses, peak) = rows["plain"], rows["regions"]
    assert losses == plain
    assert float(losses[-1]) < 0.8 * float(losses[0])
    assert peak < 0.8 * plain_peak
    if name != "ddp":
        drawn = "".join(ElementTree.parse(tmp_path / f"{name}.svg").getroot().itertext())
        assert f"without recomputation: {plain_peak} MiB" in drawn
        assert f"with recomputation: {peak} MiB" in drawn


def test_tensor_parallel(ranks: Any, tmp_path: Path) -> None:
    """The example prints equal losses for each kind of parallelism, less memory with regions, and what is repeated."""
    rows = {
        (how, what.split(", ")[-1]): (loss, int(kept), int(again))
        for how, what, loss, kept, again in KEPT.findall(on_ranks(ranks, FOLDER / "tensor_parallel.py", tmp_path))
    }
    assert len(rows) == 8
    for how in ("tensor", "sequence"):
        assert len({loss for (one, _), (loss, _, _) in rows.items() if one == how}) == 1
        kept = {what: kept for (one, what), (_, kept, _) in rows.items() if one == how}
        assert kept["regions"] < kept["collectives kept"] < kept["plain"]
        assert rows[how, "collectives kept"][2] == 0 < rows[how, "regions"][2]
    assert rows["tensor", "inputs sharded"][1] < rows["tensor", "regions"][1]
    assert 0 < rows["sequence", "reductions kept"][2] < rows["sequence", "regions"][2]
