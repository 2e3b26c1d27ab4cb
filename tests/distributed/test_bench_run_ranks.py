"""`torch-recompute bench run` on two ranks, as torchrun starts it: a row per rank, and no rank waits for a dead one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.ranks import free_port

pytestmark = pytest.mark.nightly

MODEL = """
import os, signal, torch
from torch import nn
from torch_recompute import doing_recompute

class Layer(nn.Module):
    def __init__(self, deadly=False):
        super().__init__()
        self.deadly, self.up, self.down = deadly, nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        if self.deadly and doing_recompute() and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return x + self.down(torch.relu(self.up(x)))

def pair():
    return nn.Sequential(Layer(), Layer(), Layer(deadly=True)), (torch.randn(32, 16) + int(os.environ["RANK"]),)
"""
SELECTIVE = {"recompute_granularity": "selective"}
SWEEP = {
    "model": "ranked:pair",
    "steps": 2,
    "warmup": 1,
    "rounds": 1,
    "device": "cpu",
    "experiments": [
        {"name": "deadly", **SELECTIVE, "recompute_modules": ["2"]},
        {"name": "first", **SELECTIVE, "recompute_modules": ["0"]},
    ],
}
COMMAND = "import sys; from torch_recompute.commands import cli; sys.exit(cli.main(sys.argv[1:]))"


def test_two_ranks(tmp_path: Path) -> None:
    """Each rank has a row with losses of its own, gradients are averaged, and where one dies the other is given up."""
    (tmp_path / "ranked.py").write_text(MODEL)
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP))
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")} | here
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    argv = [sys.executable, "-c", COMMAND, "bench", "run", "--sweep", "sweep.json", "--json", "--quiet"]
    ranks = [
        subprocess.Popen(
            argv,
            cwd=tmp_path,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (out, err), (other, other_err) = [rank.communicate(timeout=300) for rank in ranks]
    assert (err, other_err, other) == ("", "", "")
    document = json.loads(out)
    assert [rank.returncode for rank in ranks] == [document["exit_code"]] * 2 == [1, 1]
    control, deadly, first = document["rows"]
    assert [row["result"] for row in document["rows"]] == ["OK", "OOM", "OK"]
    assert deadly["detail"] == "killed by SIGKILL, as the system does where memory runs out"
    survivor, dead = [rank["status"] for rank in deadly["ranks"]]
    assert (survivor in ("stopped", "FAILED"), dead) == (True, "OOM")  # it may notice before it is given up
    assert [rank["rank"] for rank in first["ranks"]] == [0, 1]
    assert all(rank["allocated_bytes"] > 0 and rank["tflops"] > 0 for rank in first["ranks"])
    assert first["replay_flops"] == 2 * 32 * 16 * 64
    assert control["per_second"] == 64 / control["step_seconds"]

    lines = [json.loads(line) for line in (tmp_path / "sweep.results.jsonl").read_text().splitlines()]
    losses = {line["name"]: [rank["losses"] for rank in line["ranks"]] for line in lines}
    assert losses["first"] == losses["control"]
    assert losses["control"][0] != losses["control"][1]
