"""Settings out of a command line.

Two callers: a program with an argument parser of its own, to which `add_to` adds the flags, and one that passes its
words as they are, where flags of others must be left alone and a misspelled one of ours must not.

Values are not converted where a wrong one could be meant: what is not a number goes to the rules as it is, so that the
complaint is the same as for a file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from .. import errors
from .reading import looks_like_ours, nearest
from .rules import BLOCK, FULL, SELECTIVE, SWITCHES

GRANULARITY_FLAG, BLOCK_FLAG = "recompute_activations", "rl"
LISTS = ("recompute_modules", "offload_modules")
# What `add_to` adds.
ADDED = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "distribute_saved_activations",
    "repeat_collectives",
    "moe_layer_recompute",
)


def _bad_flags(why: str) -> str:
    """Text for a command line that cannot be."""
    return (
        f"these flags cannot be used: {why}.\n"
        "  For example: --recompute_granularity selective --recompute_modules core_attn layernorm\n"
        "           or: --recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
    )


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are ours."""

    def error(self, message: str) -> NoReturn:
        raise errors.ArgumentError(_bad_flags(message))


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the flags of recomputation."""
    group = parser.add_argument_group("recomputation", "Megatron-LM's settings: what to recompute in backward.")
    _add(group, "recompute_granularity", metavar="full|selective", help="whole layers, or parts of them")
    _add(group, "recompute_method", metavar="uniform|block", help="full: every layer, or the first ones")
    _add(
        group,
        "recompute_num_layers",
        metavar="N",
        type=_number,
        help="full: uniform: layers per region; block: how many",
    )
    _add(
        group,
        "recompute_modules",
        metavar="LABEL",
        nargs="*",
        help="selective: core_attn, mlp, layernorm, moe, moe_act, shared_experts, mla_up_proj, or module paths; "
        "separated by spaces or commas; none for a run that recomputes nothing",
    )
    _add(group, GRANULARITY_FLAG, action="store_true", help="the same as --recompute_granularity selective")
    group.add_argument(
        "-rl",
        dest=BLOCK_FLAG,
        metavar="N",
        type=_number,
        help="the same as --recompute_granularity full --recompute_method block --recompute_num_layers N",
    )
    _add(
        group,
        "distribute_saved_activations",
        action="store_true",
        help="full: regions keep their inputs in parts on the tensor parallel ranks",
    )
    _add(
        group,
        "repeat_collectives",
        action="store_true",
        help="replays repeat the reductions of tensor parallel layers, whose results are kept without it",
    )
    _add(group, "moe_layer_recompute", action="store_true", help="deprecated: moe among --recompute_modules")


def add_others_to(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add a flag, not shown in the help, for each field that has none yet."""
    for name in names:
        if name in ADDED:
            continue
        options: dict[str, Any] = {"dest": name, "help": argparse.SUPPRESS}
        if name in SWITCHES:
            parser.add_argument(*_spellings(name), action="store_true", **options)
        else:
            parser.add_argument(*_spellings(name), nargs="*" if name in LISTS else "?", type=_number, **options)


def _add(group: Any, name: str, **options: Any) -> None:
    group.add_argument(*_spellings(name), dest=name, **options)


def _spellings(name: str) -> tuple[str, str]:
    return f"--{name}", f"--{name.replace('_', '-')}"


def _number(word: str) -> int | str:
    try:
        return int(word)
    except ValueError:
        return word


def fields_of(args: Sequence[str] | argparse.Namespace | None, names: Sequence[str]) -> dict[str, Any]:
    """The fields that a command line sets, with the short ways of saying them spelled out."""
    if isinstance(args, argparse.Namespace):
        # Another's flag that was not given is None or False, and nothing to complain of.
        set_flags = {name: value for name, value in vars(args).items() if name in names or _given(value)}
    else:
        set_flags = _parsed(sys.argv[1:] if args is None else args, names)
    return _spelled_out(set_flags)


def _given(value: object) -> bool:
    return value is not None and value is not False


def _parsed(words: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    if isinstance(words, str):
        why = f"they are one string, {words!r}; pass a list of words, as shlex.split makes it"
        raise errors.ArgumentError(_bad_flags(why))
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    add_to(parser)
    add_others_to(parser, names)
    known, others = parser.parse_known_args(list(words))
    for word in others:
        flag = word.partition("=")[0]
        if flag.startswith("-") and looks_like_ours(flag.lstrip("-"), names):
            raise errors.ArgumentError(errors.unknown_field(flag, f"--{nearest(flag.lstrip('-'), names)}", ""))
    return vars(known)


def _spelled_out(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags as fields."""
    fields = dict(flags)
    for name in LISTS:
        if isinstance(fields.get(name), (list, tuple, str)):
            fields[name] = _split(fields[name])
    if fields.pop(GRANULARITY_FLAG, False):
        _imply(fields, "--recompute-activations", {"recompute_granularity": SELECTIVE})
    layers = fields.pop(BLOCK_FLAG, None)
    if layers is not None:
        implied = {"recompute_granularity": FULL, "recompute_method": BLOCK, "recompute_num_layers": layers}
        _imply(fields, f"-rl {layers}", implied)
    return fields


def _imply(fields: dict[str, Any], flag: str, implied: Mapping[str, object]) -> None:
    for field, value in implied.items():
        other = fields.get(field)
        if other is not None and other != value:
            why = f"{flag} means {field}={value!r}, but {field} is given as {other!r}"
            raise errors.ArgumentError(_bad_flags(why))
        fields[field] = value


def _split(value: Sequence[str] | str) -> list[str]:
    words = [value] if isinstance(value, str) else value
    return [label for word in words for label in str(word).replace(",", " ").split()]
