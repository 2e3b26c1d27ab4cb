"""Free memory of a host: of the system, and of a process in control groups."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_recompute.memory import free
from torch_recompute.memory.free import free_bytes, host_memory

GIB = 2**30
OWN2, OWN1 = {"proc/self/cgroup": "0::/pod/job\n"}, {"proc/self/cgroup": "4:cpu,memory:/pod/job\n0::/\n"}


def group(where: str, limit: object, used: int, spare: int = 0) -> dict[str, str]:
    """The files of one control group, of version 1 or 2."""
    first = where.startswith("sys/fs/cgroup/memory")
    names = (
        ("limit_in_bytes", "usage_in_bytes", "total_inactive_file") if first else ("max", "current", "inactive_file")
    )
    stat = f"total_cache 1\ncache 2\n{names[2]} {spare}\n"
    return {
        f"{where}/memory.{names[0]}": f"{limit}\n",
        f"{where}/memory.{names[1]}": f"{used}\n",
        f"{where}/memory.stat": stat,
    }


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
HOSTS = {
    "no group": ({}, (48 * GIB, 64 * GIB)),
    "no limit": (OWN2 | group(f"{V2}/pod/job", "max", 9 * GIB), (48 * GIB, 64 * GIB)),
    "no limit, version 1": (OWN1 | group(f"{V1}/pod/job", 2**63 - 4096, 9 * GIB), (48 * GIB, 64 * GIB)),
    "a limit": (OWN2 | group(f"{V2}/pod/job", 8 * GIB, 3 * GIB), (5 * GIB, 8 * GIB)),
    "a limit, version 1": (OWN1 | group(f"{V1}/pod/job", 8 * GIB, 3 * GIB), (5 * GIB, 8 * GIB)),
    "files that can be given up": (OWN2 | group(f"{V2}/pod/job", 8 * GIB, 3 * GIB, GIB), (6 * GIB, 8 * GIB)),
    "the limit of an outer group": (
        OWN2 | group(f"{V2}/pod", 16 * GIB, 15 * GIB) | group(f"{V2}/pod/job", "max", GIB),
        (GIB, 16 * GIB),
    ),
    "a container, which sees its own group as the root": (OWN1 | group(V1, 8 * GIB, 3 * GIB), (5 * GIB, 8 * GIB)),
    "a limit above what the system has left": (OWN2 | group(f"{V2}/pod/job", 60 * GIB, GIB), (48 * GIB, 60 * GIB)),
    "beyond its limit": (OWN2 | group(f"{V2}/pod/job", 8 * GIB, 9 * GIB), (0, 8 * GIB)),
}


@pytest.mark.parametrize("name", HOSTS)
def test_the_tightest_limit_counts(name: str, tmp_path: Path) -> None:
    """What is available is the least of what the system has and what each group leaves; and so is the whole."""
    files, wanted = HOSTS[name]
    meminfo = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\nHugePages_Total: 0\n"
    for path, text in {"proc/meminfo": meminfo, **files}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert host_memory(tmp_path) == wanted


def test_it_is_what_another_library_says() -> None:
    """On this machine, outside of any limit, it is psutil's figure, within what other programs take meanwhile."""
    psutil = pytest.importorskip("psutil", reason="another library that reads the same")
    there, total = host_memory()
    assert total <= psutil.virtual_memory().total
    assert there <= psutil.virtual_memory().available + GIB


def test_elsewhere_another_library_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no such files psutil says it; what the model holds is there for its step, too."""
    memory = types.SimpleNamespace(available=10 * GIB, total=20 * GIB)
    monkeypatch.setattr(free, "sys", types.SimpleNamespace(platform="darwin"))
    monkeypatch.setitem(sys.modules, "psutil", types.SimpleNamespace(virtual_memory=lambda: memory))
    assert free_bytes(nn.Linear(7, 4, bias=False), torch.device("cpu")) == 10 * GIB + 4 * 28 - GIB


def test_in_the_middle_of_training_what_the_step_holds_is_given_back() -> None:
    """Gradients and the state of the step's own optimizer are there for it, and the peak counts them."""
    model = nn.Linear(256, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_recompute.memory.free.host_memory", lambda: (10 * GIB, 20 * GIB))
        fresh = free_bytes(model, torch.device("cpu"), optimizer)
        model(torch.ones(1, 256)).sum().backward()
        with_gradients = free_bytes(model, torch.device("cpu"), optimizer)
        optimizer.step()
        trained = free_bytes(model, torch.device("cpu"), optimizer)
    weights = 4 * 256 * 1024
    assert with_gradients - fresh == weights
    assert trained - with_gradients == 2 * weights + 4  # and the number of steps
    assert free_bytes(model, torch.device("cpu"), torch.optim.AdamW) > 0


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_an_accelerator_says_what_it_has_free(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free on an XPU or on MPS is asked there, not of the host."""
    says = {
        "xpu": {
            "mem_get_info": lambda device: (8 * GIB, 20 * GIB),
            "memory_reserved": lambda device: 3 * GIB,
            "memory_allocated": lambda device: GIB,
        },
        "mps": {"recommended_max_memory": lambda: 20 * GIB, "current_allocated_memory": lambda: 10 * GIB},
    }
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(**says[device.type]))
    assert free_bytes(nn.Linear(2, 2), torch.device(kind)) == 10 * GIB - GIB
