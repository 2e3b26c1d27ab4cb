"""What the command of every benchmark does with its configuration: run with progress, draw, save, show.

A benchmark has a module that draws (`draw(seen, path)`) and one that shows (`show(seen)`), which is imported late.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_recompute.commands.output import Output, add_options

sys.path.append(str(Path(__file__).resolve().parents[1]))

from _measure import save

OF_THE_DOCUMENT = "schema_version", "command", "torch_recompute", "torch", "python", "machine"
"""Keys of a command's document that a result has in words of its own, or not at all."""


def add_common_options(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], *, plot: str) -> None:
    """Gives a comparison the options of all commands, and `--save`."""
    parser.add_argument("--save", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    add_options(parser, run, plot=plot)


def carried_out(
    args: argparse.Namespace,
    config: Any,
    *,
    plot: Any,
    view: Callable[[], Any],
    ticks: Callable[[Any], int],
    run: Callable[[Any, Callable[[str], None] | None], Any],
    gpu: str = "",
) -> Any:
    """Runs a benchmark and shows what came of it, as the options `plot`, `save`, `json` and `quiet` say.

    Args:
        args: The command line.
        config: The benchmark's configuration, checked.
        plot: What draws.
        view: Imports what shows.
        ticks: How many steps of progress there will be.
        run: Runs it.
        gpu: The name of the GPU that it runs on; "" for the processor.

    Returns:
        The result.
    """
    output = Output.of(args)
    with output.progress(ticks(config)) as progress:
        seen = run(config, progress)
    if output.plot is not None:
        plot.draw(seen, output.plot)
    if args.save is not None:
        data = json.loads(seen.to_json())
        save(args.save, {name: data[name] for name in data if name not in OF_THE_DOCUMENT}, gpu=gpu)
    output.give(seen.to_json, lambda _: view().show(seen))
    return seen
