"""The command `torch-recompute`: answers help, the version and wrong command lines without importing torch.

Beside the package, because importing the package imports torch, which takes seconds; an answer about the command line
takes none. The options are described where the commands are. `torch_recompute/commands/options.json` repeats these
descriptions as data, of which the same parsers are made here; `tools/options.py` writes it. A command line that they
accept is one of `python -m torch_recompute`.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import json
import re
import runpy
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

COMMANDS = {
    "demo": "train a small GPT five ways side by side and compare memory, time, FLOPs and bits",
    "bench": "measure what recomputation saves and costs",
    "show": "the parts of a model, and the labels that match each",
    "plan": "a plan for a budget of memory: what to keep, what to recompute, what the step takes",
    "calibrate": "measure the host of a device, by whose launches plans predict seconds",
    "verify": "run a step with a plan and without it, and compare gradients, random states, buffers and routing",
    "doctor": "why a model is still out of memory, slow or wrong: findings, how each was confirmed, and what to write",
    "report": "a plan to look at: memory over the step, what other budgets would cost, the placements",
}

SHELLS = ("bash", "zsh", "fish")
EXAMPLE = "Write for example --budget 24GiB"
NUMBERS: Mapping[Any, tuple[str, str]] = {int: ("an integer", "8"), float: ("a number", "1.5")}


class Completion(argparse.Action):
    """Prints what completes the command line in a shell, made by shtab from the parsers themselves."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        """Ends the process. `args`: the namespace, and the shell."""
        try:
            import shtab
        except ImportError:
            parser.error(
                "--completion is made by the package shtab, which is not installed. Write: pip install "
                "torch-recompute[cli]"
            )
        _complete_files(parser, shtab.FILE)
        sys.stdout.write(shtab.complete(parser, shell=str(args[1])) + "\n")
        parser.exit()


def _complete_files(parser: argparse.ArgumentParser, files: Any) -> None:
    """Has files completed for arguments that are paths, of all commands."""
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        if action.type is Path or action.metavar == "MODEL":
            action.complete = files  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            for inner in dict.fromkeys(action.choices.values()):  # pyright: ignore[reportUnknownArgumentType]
                _complete_files(inner, files)


class Parser(argparse.ArgumentParser):
    """A parser whose errors say the cause first, name what is close to a wrong word, and end with the usage.

    Attributes:
        any_of: Names of options of which a command line has at least one.
    """

    any_of: Sequence[str] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # so that -1GB is a value, which its option refuses

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.format_usage()}")

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Refuses an option that there is not, before any that is missing."""
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                break
            if re.match(r"-[^\d.\s]\S*$", word) and not self._knows(word.partition("=")[0]):
                self._refuse(word.partition("=")[0])
        found, others = super().parse_known_args(words, namespace)
        if others:
            self.error(f"{self.prog} does not expect {' '.join(others)}")
        if self.any_of and not any(getattr(found, name) for name in self.any_of):
            self.error(f"one of the arguments --{' --'.join(self.any_of)} is required. {EXAMPLE}")
        return found, others

    def _knows(self, option: str) -> bool:
        long = option.startswith("--")
        return any((o.startswith(option) if long else option.startswith(o)) for o in self._option_string_actions)

    def _refuse(self, option: str) -> None:
        near = close_to(option, self._option_string_actions)
        self.error(f"{option} is no option of {self.prog}{near or f'; {self.prog} --help lists them'}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        read: Any = getattr(super(), "_get_value")  # noqa: B009
        try:
            return read(action, arg_string)
        except argparse.ArgumentError as error:
            if action.type not in NUMBERS:
                raise
            kind, example = NUMBERS[action.type]
            write = f"{action.option_strings[0]} {example}" if action.option_strings else example
            raise argparse.ArgumentError(action, f"{arg_string!r} is not {kind}. Write for example {write}") from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [*map(str, action.choices)]
            near = close_to(str(value), known)
            raise argparse.ArgumentError(action, f"{value!r} is not known{near}. Known are {', '.join(known)}.")


def close_to(word: str, known: Iterable[str]) -> str:
    """Returns what ends a sentence about a wrong word: the known one that is closest to it, if one is close."""
    return "".join(f"; close to it: {one}" for one in difflib.get_close_matches(word, list(known), n=1))


def new_parser(version: str = "") -> tuple[argparse.ArgumentParser, Any]:
    """The command line without its commands, and that to which they are added."""
    parser = Parser(
        prog="torch-recompute",
        description="Activation recomputation for PyTorch.",
        epilog="exit codes: 0 done, 1 a check failed, 2 a wrong command line, 3 it does not fit into memory",
    )
    parser.add_argument("--version", action="version", version=f"torch-recompute {version}")
    parser.add_argument("--completion", action=Completion, choices=SHELLS, help="print the completion for a shell")
    return parser, parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


TYPES: Mapping[str, Any] = {"int": int, "float": float, "Path": Path, "lower": str.lower}
"""How the words of an option are read; others are read by its command."""


def fill(parser: argparse.ArgumentParser, described: Mapping[str, Any]) -> None:
    """Gives a parser the arguments and the commands of its description in `options.json`."""
    vars(parser)["any_of"] = described["any_of"]
    groups: list[Any] = [parser.add_argument_group(*texts) for texts in described["groups"]]
    for needed, group in described["one_of"]:
        groups.append((parser if group is None else groups[group]).add_mutually_exclusive_group(required=needed))
    for words in described["arguments"]:
        words = {key: argparse.SUPPRESS if value == argparse.SUPPRESS else value for key, value in words.items()}
        flags, group, reads = words.pop("flags"), words.pop("group", None), words.pop("type", None)
        options = words if reads is None else {**words, "type": TYPES.get(reads, str)}
        (parser if group is None else groups[group]).add_argument(*flags, **options)
    if described["commands"]:
        commands = parser.add_subparsers(**described["title"])
        for name, inner in described["commands"].items():
            fill(commands.add_parser(name, help=inner["about"], description=inner["about"]), inner)


def light_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands, made from their description."""
    package = find_spec("torch_recompute")
    assert package is not None
    folder = Path(next(iter(package.submodule_search_locations or ())))
    described = json.loads((folder / "commands" / "options.json").read_text("utf-8"))
    parser, commands = new_parser(described["version"])
    for name, inner in described["commands"].items():
        fill(commands.add_parser(name, help=inner["about"], description=inner["about"]), inner)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of the process, and returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    light_parser().parse_args(words)  # prints and ends the process if it is a question or wrong
    sys.argv = ["torch-recompute", *words]
    gc.disable()  # for the imports, of which hardly anything is garbage; `torch_recompute.__main__` enables it
    runpy.run_module("torch_recompute", run_name="__main__")  # which ends the process
    return 0
