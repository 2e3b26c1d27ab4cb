"""What a machine is called, so that figures of two are not compared."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def name_of(device: torch.device) -> str:
    """The device's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return name_of_cpu()


def name_of_cpu() -> str:
    """The processor's name, and how many threads there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    name = found or platform.processor() or platform.machine()
    return f"{name} (threads: {torch.get_num_threads()})"
