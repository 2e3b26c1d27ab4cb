"""`torch-recompute calibrate FILE`: measures the host of the device that is here, for `host=FILE` and `--host FILE`.

A step by a data sheet takes no less than its host takes to launch it, and hosts differ: run this once on the machine
that has the device, and plan anywhere. It times steps of tiny layers, with regions and without, for some seconds. Where
there is no device it times this processor, and adds a published figure for the launch of a kernel; the file says so.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..planner.prices import measured_host
from ..simulation.devices import HOST_FIGURES, LAUNCH, Host
from ..stores.measured import name_of_cpu
from . import output as out
from .output import OK, Output
from .verify import device_here

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1


def add_command(commands: Any) -> None:
    """Adds `torch-recompute calibrate` to the command line."""
    parser = out.new_command(commands, "calibrate")
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to write, for --host FILE and host=FILE")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (cuda where there is one, else cpu)")
    out.add_options(parser, command)


def command(args: argparse.Namespace) -> int:
    """Runs `torch-recompute calibrate`; 0 when the file is written."""
    output = Output.of(args)
    out.check_folder("FILE", args.file)
    device = torch.device(device_here(args.device))
    with output.at_work(f"timing tiny layers on {device}"):
        found = _as_data(measured_host(device), device)
    out.write_text("FILE", args.file, json.dumps(found, indent=1) + "\n")
    output.give(
        lambda: out.document("calibrate", SCHEMA_VERSION, found), lambda console: _print(console, args.file, found)
    )
    return OK


def _as_data(host: Host, device: torch.device) -> dict[str, Any]:
    """Returns what the file holds."""
    here = device.type == "cpu"
    note = "no device: what this processor takes to dispatch operations, and a published figure for a launch"
    return {
        **{f"{name}_seconds": getattr(host, name) for name in HOST_FIGURES},
        "launch_seconds": LAUNCH if here else None,
        "date": date.today().isoformat(),
        "processor": name_of_cpu(),
        "device": "cpu" if here else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "note": note if here else "",
    }


def _print(console: Console, path: Path, found: dict[str, Any]) -> None:
    for name in HOST_FIGURES:
        console.print(f"{1e6 * found[f'{name}_seconds']:10,.1f} us  {_WORDS[name]}")
    if found["note"]:
        console.print(f"{found['note']} ({1e6 * LAUNCH:.0f} us, counted in the first two)", style="yellow")
    console.print(f"written to {path}: --host {path}, or host={str(path)!r}", markup=False)


_WORDS = {
    "operation": "each operation of forward and backward",
    "replayed": "each operation that a region runs again",
    "region": "each region",
    "call": "each operation of a call that a region keeps",
    "watched": "each operation among which a region looks for such calls, in forward and in its replay",
}
