"""`torch-recompute bench run MODEL`: what settings of recomputation cost and save in training, beside an empty control.

Problem. The published comparisons of recompute settings had no control, one figure to reach, and one run each; an
out-of-memory error ended them. What their ranking says is not known. Figures that can be acted on need the run with
nothing recomputed beside them, turns, fresh processes, and the losses.

Idea. A workload and a list of settings are data (`settings.py`), read from options or from a file (`sweep.py`). Each
trial of a setting is a process of its own (`launching.py`, `trial.py`), whose memory can be limited so that a CPU plays
a device of some capacity (`capacity.py`), and whose end, whatever it is, is a record. Rounds of them (`run.py`), kept
in a file of JSON lines so that they can go on another time (`journal.py`), become rows with a verdict each
(`result.py`), against golden figures if there are any (`golden.py`). torchrun may start it once per rank (`ranks.py`).

The result goes to stdout, progress to stderr. Exit codes: 0 all OK; 1 a regression, a mismatch, a trial that ran out of
memory or failed; 2 what cannot be asked, or a setting that this model does not take; 3 a budget that no plan fits.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from ... import RecomputeConfig, errors
from ..._face import Face, add_options, check_folder, document
from ..._models import DTYPES, OPTIMIZERS, PRESETS
from ...plan.settings import BLOCK_FLAG, GRANULARITY_FLAG, add_others_to
from . import capacity, golden, ranks, run, sweep
from .journal import Journal
from .models import SMALL
from .result import Result, Row
from .settings import CONTROL, DEVICES, Config, Setting, Workload, capacity_of

__all__ = ["Config", "Result", "Row", "Setting", "Workload", "add_command", "command"]

SCHEMA_VERSION = 1
ASKED = "setting"
"""The name of what the command line asks for."""

COUNTS = (
    ("batch", "sequences or pictures in a step, on each rank (1; of the tiny models 4)"),
    ("sequence", "tokens in a sequence (the model's, at most 4096)"),
    ("steps", f"timed steps of each process ({Config.steps})"),
    ("warmup", f"steps before these ({Config.warmup})"),
    ("rounds", f"processes of each setting, all settings taking turns ({Config.rounds})"),
)


def add_command(benchmarks: Any) -> None:
    """Describe `torch-recompute bench run` to the command line."""
    about = "train a model with settings of recomputation, beside a control: TFLOP/s, memory, losses, golden figures"
    parser = cast("argparse.ArgumentParser", benchmarks.add_parser("run", help=about, description=about))
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"{' or '.join(SMALL)}; or what torch-recompute plan takes: one of {', '.join(PRESETS)}, a config.json, "
        "or pkg.module:name of a function that returns (model, batch)",
    )
    parser.add_argument("--sweep", type=Path, metavar="FILE.yaml", help="a list of experiments, see docs/bench-run.md")
    parser.add_argument("--budget", metavar="BYTES", help='plan for a peak, as 24GiB; or for a share, as "40%%"')
    parser.add_argument("--plan", type=Path, metavar="FILE.json", help="apply this plan, of torch-recompute plan")
    for name, text in COUNTS:
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (the model's own)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help=f"({Workload.optimizer})")
    parser.add_argument("--device", choices=DEVICES, help="(cuda where there is one)")
    parser.add_argument(
        "--capacity", metavar="BYTES", help="what a process may take for the step, as 2GiB: a device of that size"
    )
    parser.add_argument("--golden", type=Path, metavar="FILE.json", help="compare with these figures")
    parser.add_argument("--save-golden", type=Path, metavar="FILE.json", help="write figures to compare with later")
    parser.add_argument(
        "--threshold", type=float, metavar="PERCENT", help=f"below the golden figure allowed ({Config.threshold:g})"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE.jsonl",
        help="where trials are kept, and not run again",
    )
    parser.add_argument("--fresh", action="store_true", help="begin the file of results anew")
    RecomputeConfig.add_arguments(parser)
    add_others_to(parser, RecomputeConfig.names())
    add_options(parser, command)


def command(args: argparse.Namespace) -> int:
    """Run `torch-recompute bench run`; the exit code says whether all is well."""
    config, results = _asked(args)
    config.check()
    capacity.check(config.capacity, config.workload.device)
    if config.workload.device == "cuda" and not torch.cuda.is_available():
        raise errors.ArgumentError(
            f"--device is cuda, but torch {torch.__version__} sees no such device here. Write --device cpu"
        )
    if args.save_golden is not None:
        check_folder("--save-golden", args.save_golden)
    face = Face.of(args)
    together = ranks.of_environment()
    figures = _golden(args, config, together.count)
    first = together.rank == 0
    journal = Journal(results if first else None, fresh=args.fresh)
    with replace(face, quiet=face.quiet or not first).progress(run.ticks(config)) as progress:
        seen = run.run(config, journal=journal, ranks=together, golden=figures, progress=progress)
    together.leave()
    if first:
        path: Path | None = args.save_golden
        saved = seen.to_golden()
        if path is not None and saved.figures:
            saved.write(path)
        face.give(
            lambda: document("bench run", SCHEMA_VERSION, seen.as_data()), lambda: _view().show(seen, saved, path)
        )
    return seen.exit_code


def _view() -> Any:
    from . import view

    return view


def _asked(args: argparse.Namespace) -> tuple[Config, Path | None]:
    """The comparison that a command line asks for, and where its trials are kept."""
    names = (*RecomputeConfig.names(), GRANULARITY_FLAG, BLOCK_FLAG)
    words = argparse.Namespace(**{name: getattr(args, name) for name in names})
    fields = RecomputeConfig.from_args(words).to_dict()
    results, options = args.results, dict[str, Any]()
    settings: list[Setting] = [CONTROL]
    if args.sweep is not None:
        given = [option for option, value in (("--budget", args.budget), ("--plan", args.plan)) if value is not None]
        given += [f"--{name}" for name in fields]
        if given:
            raise errors.ArgumentError(
                f"{given[0]} says what is recomputed, and so does the file of --sweep. Make it an experiment in the "
                "file, or leave --sweep out."
            )
        found = sweep.read(args.sweep)
        options.update(found.options)
        settings += found.settings
        results = results or args.sweep.with_suffix(".results.jsonl")
    elif fields or args.budget is not None or args.plan is not None:
        settings.append(sweep.setting_of(ASKED, fields, args.budget, args.plan))
    if args.fresh and results is None:
        raise errors.ArgumentError(errors.goes_with("--fresh", "--results"))
    if args.threshold is not None and args.golden is None:
        raise errors.ArgumentError(errors.goes_with("--threshold", "--golden"))
    options.update({name: getattr(args, name) for name in sweep.OPTIONS if getattr(args, name) is not None})
    return _config(options, tuple(settings)), results


def _config(options: dict[str, Any], settings: tuple[Setting, ...]) -> Config:
    if options.get("model") is None:
        raise errors.ArgumentError(
            "bench run needs a MODEL: on the command line, or as model: in the file of --sweep. Write for example "
            "torch-recompute bench run gpt-tiny"
        )
    options.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    if options.get("capacity") is not None:
        options["capacity"] = capacity_of(options["capacity"])
    of_workload = {name: options.pop(name) for name in Workload.__dataclass_fields__ if name in options}
    return Config(Workload(**of_workload), settings, **options)


def _golden(args: argparse.Namespace, config: Config, count: int) -> golden.Golden | None:
    """The figures to compare with, if they are of this workload and of every setting."""
    if args.golden is None:
        return None
    figures = golden.read(args.golden)
    figures.check_workload(config.workload, count)
    for setting in config.settings:
        figures.of(setting)
    return figures
