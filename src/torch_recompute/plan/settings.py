"""Megatron's settings out of files, nested keys and command lines, as fields of `RecomputeConfig`.

A training configuration is one file with everything in it. The fields of recomputation are looked for at any depth,
because a place that is not looked at is a setting that is silently ignored; for the same reason a key that can only be
meant for us and is no field is an error, and so are two values for one field. Command lines follow the same rule: flags
of others are left alone, a misspelled one of ours is not. Values are not converted where a wrong one could be meant:
the rules of `fields.py` refuse it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from .. import errors
from .fields import BLOCK, FULL, LISTS, SELECTIVE, SWITCHES

# Fields of Megatron's configuration that recompute inside of its own layers: their default, and what to do instead.
INSIDE: dict[str, tuple[object, str]] = {
    "mhc_recompute_layer_num": (
        None,
        "it groups the hyper-connections of Megatron-LM's own block; name modules of yours in recompute_modules",
    ),
    "gdp_num_chunk_states_to_recompute": (
        2,
        "it is an option of Megatron-LM's own kernel, which recomputes within itself; pass it to the kernel",
    ),
    "mlp_chunks_for_training": (1, "it changes how an MLP computes; write recompute(mlp, tiles=N) where it is called"),
    "moe_paged_stash": (
        False,
        "it changes where Megatron-LM's experts keep their inputs; name moe in recompute_modules",
    ),
}

# A key with one of these in its name is about recomputation, in any system.
OURS = ("recompute", "activations_checkpoint", "checkpoint_activations")
# Other systems' names that are not alike.
ELSEWHERE = dict.fromkeys(("recompute", "recompute_activations", "checkpoint_activations"), "recompute_granularity")
CLOSE = 0.9  # keys of other systems are less similar to ours than this


def _checked_mapping(what: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise errors.ArgumentError(
            f"{what} is {errors.say(value)}, where keys and values are expected.\n"
            '  Write {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, with '
            "any other keys beside, or inside of a section."
        )
    return cast("Mapping[Any, Any]", value)


def content_of(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The content of a JSON or YAML file."""
    file, name = Path(path), os.fspath(path)
    suffix = file.suffix.lower()

    def refuse(why: str) -> NoReturn:
        raise errors.ArgumentError(
            f"{name} is not a configuration: {why}.\n"
            "  from_file reads JSON from *.json and YAML from *.yaml and *.yml; pass what you read from another file "
            "to RecomputeConfig.from_dict(data)."
        ) from None

    if suffix not in (".json", ".yaml", ".yml"):
        refuse(f"its name ends in {suffix!r}" if suffix else "its name has no ending")
    load: Callable[[str], Any]
    kind, load, wrong = ("JSON", json.loads, ValueError) if suffix == ".json" else ("YAML", *_yaml(name))
    try:
        content = load(file.read_text(encoding="utf-8"))
    except (ValueError, wrong) as error:
        refuse(f"no {kind} ({' '.join(str(error).split())})")
    return _checked_mapping(f"the content of {name}", content)


def _yaml(name: str) -> tuple[Any, Any]:
    """The function that reads YAML, and its class of errors."""
    try:
        import yaml
    except ImportError:
        raise errors.ArgumentError(
            f"reading {name} needs the package PyYAML, which is not installed.\n"
            "  Write: pip install torch-recompute[config], or save the file as JSON."
        ) from None
    return yaml.safe_load, yaml.YAMLError


def fields_in(data: object, names: Sequence[str]) -> dict[str, Any]:
    """The fields among keys and values, at any depth; those at None are left out.

    Raises:
        ArgumentError: A key can only be meant for us and is no field, or a field has two values.
    """
    found: dict[str, tuple[Any, str]] = {}
    for where, key, value in _leaves(_checked_mapping("the configuration", data), "", names):
        if key not in names:
            _check_foreign(where, key, value, names)
        elif value is not None:
            if key in found and found[key][0] != value:
                first, second = (place or "the top level" for place in (found[key][1], where))
                raise errors.ArgumentError(
                    f"{key} has one value in {first} and another in {second}; which of the two is meant cannot be "
                    "told.\n"
                    "  Pass one section: RecomputeConfig.from_dict(data['model'])."
                )
            found.setdefault(key, (value, where))
    fields = {name: value for name, (value, _) in found.items()}
    # Megatron writes this default into its configuration whatever the granularity is.
    selective = fields.get("recompute_granularity") == SELECTIVE or fields.get("moe_layer_recompute")
    if not selective and fields.get("recompute_modules") == ["core_attn"]:
        del fields["recompute_modules"]
    return fields


def has_field(data: object, names: Sequence[str]) -> bool:
    """Whether keys and values have one of the fields, at any depth, be it None."""
    return any(key in names for _, key, _ in _leaves(_checked_mapping("the configuration", data), "", names))


def _leaves(data: Mapping[Any, Any], where: str, names: Sequence[str]) -> Iterator[tuple[str, str, object]]:
    """Section, key and value of everything that is not itself a section."""
    for raw, value in data.items():
        key = str(raw)
        below = f"{where}.{key}" if where else key
        if isinstance(value, Mapping) and key not in names:
            yield from _leaves(cast("Mapping[Any, Any]", value), below, names)
            continue
        if isinstance(value, (list, tuple)) and key not in names:
            for i, item in enumerate(cast("Sequence[Any]", value)):
                yield from _leaves(item if isinstance(item, Mapping) else {}, f"{below}[{i}]", names)
        yield where, key, value


def _unknown_field(name: str, nearest: str, where: str) -> str:
    place = f" in {where}" if where else ""
    return (
        f"{name!r}{place} is not a field of RecomputeConfig, so it would have no effect; the nearest is {nearest!r}.\n"
        "  The fields are Megatron-LM's, written out: recompute_granularity, recompute_method, recompute_num_layers, "
        "recompute_modules."
    )


def _check_foreign(where: str, key: str, value: object, names: Sequence[str]) -> None:
    """Raises for a key that is no field and can only be meant for us."""
    if key in INSIDE:
        default, why = INSIDE[key]
        if value is not None and value != default:
            raise errors.ArgumentError(f"{key}={value!r} cannot be applied from outside of a layer: {why}.")
    elif where.rpartition(".")[2] == "recompute" or looks_like_ours(key, names):
        raise errors.ArgumentError(_unknown_field(key, nearest(key, names), where))


def looks_like_ours(key: str, names: Sequence[str]) -> bool:
    """Returns whether a key that is no field can only be a field spelled wrong."""
    plain = key.lower().replace("-", "_")
    # Others have many words for splitting sequences.
    close = difflib.get_close_matches(plain, [name for name in names if name != "sequence_parallel"], 1, CLOSE)
    return bool(close) or any(word in plain for word in OURS)


def nearest(key: str, names: Sequence[str]) -> str:
    """The field whose name is the most like this key."""
    plain = key.lower().replace("-", "_")
    if plain in ELSEWHERE:
        return ELSEWHERE[plain]
    # The one that ends like it, if any: `granularity`, `activations_checkpoint_method`.
    ending = [name for name in names if name.rpartition("_")[2] == plain.rpartition("_")[2]]
    return difflib.get_close_matches(plain, ending or names, 1, 0.0)[0]


# --- command lines ---

GRANULARITY_FLAG, BLOCK_FLAG = "recompute_activations", "rl"


def _number(word: str) -> int | str:
    try:
        return int(word)
    except ValueError:
        return word


# Of each flag the placeholder of its value (none for a switch), and its help.
_FLAGS = {
    "recompute_granularity": ("full|selective", "whole layers, or parts of them"),
    "recompute_method": ("uniform|block", "full: every layer, or the first ones"),
    "recompute_num_layers": ("N", "full: uniform: layers per region; block: how many"),
    "recompute_modules": (
        "LABEL",
        "selective: core_attn, attention_output, mlp, layernorm, moe, moe_act, shared_experts, mla_up_proj, or module "
        "paths; "
        "separated by spaces or commas; none for a run that recomputes nothing",
    ),
    GRANULARITY_FLAG: ("", "the same as --recompute_granularity selective"),
    BLOCK_FLAG: ("N", "the same as --recompute_granularity full --recompute_method block --recompute_num_layers N"),
    "distribute_saved_activations": ("", "regions keep their inputs in parts on the tensor parallel ranks"),
    "repeat_collectives": (
        "",
        "replays repeat the reductions of tensor parallel layers, whose results are kept without it",
    ),
    "moe_layer_recompute": ("", "deprecated: moe among --recompute_modules"),
}


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are ours."""

    def error(self, message: str) -> NoReturn:
        raise errors.ArgumentError(
            f"these flags cannot be used: {message}.\n"
            "  For example: --recompute_granularity selective --recompute_modules core_attn layernorm\n"
            "           or: --recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
        )


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of recomputation."""
    group = parser.add_argument_group("recomputation", "Megatron-LM's settings: what to recompute in backward.")
    for name, (placeholder, said) in _FLAGS.items():
        nargs, read = "*" if name in LISTS else None, _number if placeholder == "N" else str
        kind: dict[str, Any] = {"metavar": placeholder, "nargs": nargs, "type": read}
        kind = kind if placeholder else {"action": "store_true"}
        group.add_argument(*(["-rl"] if name == BLOCK_FLAG else _spellings(name)), dest=name, help=said, **kind)


def add_others_to(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Adds a flag, not shown in the help, for each field that has none yet."""
    for name in (name for name in names if name not in _FLAGS):
        kind: dict[str, Any] = {"nargs": "*" if name in LISTS else "?", "type": _number}
        kind = {"action": "store_true"} if name in SWITCHES else kind
        parser.add_argument(*_spellings(name), dest=name, help=argparse.SUPPRESS, **kind)


def _spellings(name: str) -> tuple[str, str]:
    return f"--{name}", f"--{name.replace('_', '-')}"


def fields_in_args(args: Sequence[str] | argparse.Namespace | None, names: Sequence[str]) -> dict[str, Any]:
    """The fields that a command line sets, with the short ways of saying them spelled out."""
    if isinstance(args, argparse.Namespace):
        # Another program's flag that was not given is None or False: no setting.
        every = vars(args).items()
        given = {name: value for name, value in every if name in names or (value is not None and value is not False)}
    else:
        given = _parsed(sys.argv[1:] if args is None else args, names)
    fields = dict(given)
    for name in LISTS:
        value = fields.get(name)
        if isinstance(value, (list, tuple, str)):
            words = [value] if isinstance(value, str) else cast("Sequence[object]", value)
            fields[name] = [label for word in words for label in str(word).replace(",", " ").split()]
    if fields.pop(GRANULARITY_FLAG, False):
        _imply(fields, "--recompute-activations", {"recompute_granularity": SELECTIVE})
    layers = fields.pop(BLOCK_FLAG, None)
    if layers is not None:
        implied = {"recompute_granularity": FULL, "recompute_method": BLOCK, "recompute_num_layers": layers}
        _imply(fields, f"-rl {layers}", implied)
    return fields


def _parsed(words: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    if isinstance(words, str):
        parser.error(f"they are one string, {words!r}; pass a list of words, as shlex.split makes it")
    add_to(parser)
    add_others_to(parser, names)
    known, others = parser.parse_known_args(list(words))
    for word in others:
        flag = word.partition("=")[0]
        if flag.startswith("-") and looks_like_ours(flag.lstrip("-"), names):
            raise errors.ArgumentError(_unknown_field(flag, f"--{nearest(flag[2:], (*names, GRANULARITY_FLAG))}", ""))
    return vars(known)


def _imply(fields: dict[str, Any], flag: str, implied: Mapping[str, object]) -> None:
    for field, value in implied.items():
        other = fields.get(field)
        if other is not None and other != value:
            _Parser().error(f"{flag} means {field}={value!r}, but {field} is given as {other!r}")
        fields[field] = value
