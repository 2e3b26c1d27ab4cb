"""The examples: the torchrun line that each has in its docstring runs, and prints what it promises."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "distributed"
ROW = re.compile(r"^(plain|regions) +loss ([\d. ]+?) +peak ([\d.]+) MiB per rank$", re.MULTILINE)


def output_of(path: Path) -> str:
    """What the example's own line prints."""
    lines = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()
    (line,) = [line for line in lines if line.strip().startswith("torchrun ")]
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr
    return run.stdout


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "pipeline"])
def test_regions_train_the_same_in_less_memory(name: str) -> None:
    """The example prints the same falling losses with and without regions, and a lower peak with them."""
    rows = {row: (losses.split(), float(peak)) for row, losses, peak in ROW.findall(output_of(FOLDER / f"{name}.py"))}
    (plain, plain_peak), (losses, peak) = rows["plain"], rows["regions"]
    assert losses == plain
    assert float(losses[-1]) < 0.8 * float(losses[0])
    assert peak < 0.8 * plain_peak
