"""Writes the options of all commands as data, of which help is printed without torch.

    PYTHONPATH=src python tools/options.py      # after a change of any option

`torch_recompute_cli.fill` makes the same parsers of `src/torch_recompute/commands/options.json` again, and
`tests/commands/test_cli.py` fails where that file is not what this writes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torch_recompute import __version__
from torch_recompute.commands import cli

FILE = Path(__file__).resolve().parents[1] / "src" / "torch_recompute" / "commands" / "options.json"
CALLS = {
    "_StoreAction": "store",
    "_StoreTrueAction": "store_true",
    "_StoreFalseAction": "store_false",
    "_AppendAction": "append",
}
"""The actions of arguments that are written, by their classes; help and version are made again."""


def described(parser: argparse.ArgumentParser, about: str = "") -> dict[str, Any]:
    """Returns the arguments and commands of a parser as data, which `torch_recompute_cli.fill` makes a parser of."""
    commands = next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
    groups: list[Any] = [group for group in parser._action_groups[2:] if commands not in group._group_actions]
    groups += parser._mutually_exclusive_groups
    arguments: list[dict[str, Any]] = []
    for action in parser._actions:
        if type(action).__name__ in CALLS:
            given: dict[str, Any] = {"nargs": action.nargs, "const": action.const, "metavar": action.metavar}
            given["help"] = action.help
            given["type"] = None if action.type is None else getattr(action.type, "__name__", None)
            given["choices"] = None if action.choices is None else [*action.choices]
            given["required"] = (action.required and action.option_strings != []) or None
            given["group"] = next((n for n, g in reversed([*enumerate(groups)]) if action in g._group_actions), None)
            call = CALLS[type(action).__name__]
            kept = {key: value for key, value in given.items() if value is not None}
            if call.startswith("store_"):
                kept = {key: kept[key] for key in ("help", "group") if key in kept}
            arguments.append({"flags": [*action.option_strings] or [action.dest], "action": call, **kept})
    exclusive = parser._mutually_exclusive_groups
    found: dict[str, Any] = {"about": about, "any_of": [*getattr(parser, "any_of", ())]}
    found["groups"] = [[group.title, group.description] for group in groups if group not in exclusive]
    found["one_of"] = [
        [group.required, groups.index(group._container) if group._container in groups else None] for group in exclusive
    ]
    found |= {"arguments": arguments, "commands": {}}
    if commands is not None:
        abouts = {choice.dest: choice.help or "" for choice in commands._choices_actions}
        found["title"] = {"title": next(g.title for g in parser._action_groups if commands in g._group_actions)}
        found["title"] |= {"metavar": commands.metavar, "required": commands.required}
        found["commands"] = {name: described(inner, abouts[name]) for name, inner in commands.choices.items()}
    return found


def options() -> str:
    """Returns what the file has to hold."""
    return json.dumps({"version": __version__, **described(cli.build_parser())}, indent=1) + "\n"


def main() -> None:
    """Writes the file."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    FILE.write_text(options(), "utf-8")


if __name__ == "__main__":
    main()
