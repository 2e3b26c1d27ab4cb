"""What the command of every benchmark does with its configuration: check, run with progress, draw, show.

A benchmark has a module that draws (`draw(seen, path)`) and one that shows (`show(seen)`), which is imported late.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torch_recompute.commands.output import Output


def carried_out(
    args: argparse.Namespace,
    config: Any,
    *,
    plot: Any,
    view: Callable[[], Any],
    ticks: Callable[[Any], int],
    run: Callable[[Any, Callable[[str], None] | None], Any],
) -> Any:
    """Runs a benchmark and shows what came of it, as the options `plot`, `json` and `quiet` say.

    Args:
        args: The command line.
        config: The benchmark's configuration.
        plot: What draws.
        view: Imports what shows.
        ticks: How many steps of progress there will be.
        run: Runs it.

    Returns:
        The result.
    """
    config.check()
    output = Output.of(args)
    with output.progress(ticks(config)) as progress:
        seen = run(config, progress)
    if output.plot is not None:
        plot.draw(seen, output.plot)
    output.give(seen.to_json, lambda _: view().show(seen))
    return seen
