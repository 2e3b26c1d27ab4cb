"""What the command of every benchmark does with its configuration: check, run with progress, draw, show.

A benchmark has a module that draws (`check(path)`, `draw(seen, path)`) and one that shows (`show(seen)`). The latter is
imported before the run, so that a missing package is told at once, and only if something is to be shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from .._progress import progress_shown


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
    if args.plot is not None:
        plot.check(args.plot)
    shown = None if args.json else view()
    with nullcontext() if args.quiet else progress_shown(ticks(config)) as progress:
        seen = run(config, progress)
    if args.plot is not None:
        plot.draw(seen, args.plot)
    if shown is None:
        sys.stdout.write(seen.to_json() + "\n")
    else:
        shown.show(seen)
    return seen
