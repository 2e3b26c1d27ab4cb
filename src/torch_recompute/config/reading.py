"""Settings out of files and nested keys.

A training configuration is one file with everything in it, and the fields of recomputation are at its top, or in a
section (`model:`, `recompute:`), or two sections deep. They are looked for everywhere, because a place that is not
looked at is a setting that is silently ignored; for the same reason a key that can only be meant for us and is no field
is an error, and so are two values for one field.

Rejected: to want a section of a certain name. Each system has another one.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from .. import errors
from .rules import SELECTIVE

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

# A key with one of these in its name is about recomputation, whoever wrote it.
OURS = ("recompute", "activations_checkpoint", "checkpoint_activations")
# What they are called elsewhere, where names are not alike.
ELSEWHERE = dict.fromkeys(("recompute", "recompute_activations", "checkpoint_activations"), "recompute_granularity")
# Nobody else's key is so near to one of ours.
CLOSE = 0.9


def _not_a_mapping(what: str, value: object) -> str:
    """Text for a configuration that is not made of keys and values."""
    return (
        f"{what} is {errors.say(value)}, where keys and values are expected.\n"
        '  Write {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, with any '
        "other keys beside, or inside of a section."
    )


def _bad_file(path: str, why: str) -> str:
    """Text for a file that cannot be read as a configuration."""
    return (
        f"{path} is not a configuration: {why}.\n"
        "  from_file reads JSON from *.json and YAML from *.yaml and *.yml; pass what you read from another file to "
        "RecomputeConfig.from_dict(data)."
    )


def content_of(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """What a JSON or YAML file holds."""
    file, name = Path(path), os.fspath(path)
    suffix = file.suffix.lower()
    if suffix not in (".json", ".yaml", ".yml"):
        ending = f"its name ends in {suffix!r}" if suffix else "its name has no ending"
        raise errors.ArgumentError(_bad_file(name, ending))
    load = _json if suffix == ".json" else _yaml(name)
    try:
        content = load(file.read_text(encoding="utf-8"))
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise errors.ArgumentError(_bad_file(name, f"no {'JSON' if load is _json else 'YAML'} ({reason})")) from None
    if not isinstance(content, Mapping):
        raise errors.ArgumentError(_not_a_mapping(f"the content of {name}", content))
    return cast("Mapping[str, Any]", content)


def _json(text: str) -> object:
    return json.loads(text)


def _yaml(name: str) -> Callable[[str], object]:
    """What reads YAML, and says as `json` does, with a ValueError, that it cannot."""
    try:
        import yaml
    except ImportError:
        raise errors.ArgumentError(
            f"reading {name} needs the package PyYAML, which is not installed.\n"
            "  Write: pip install torch-recompute[config], or save the file as JSON."
        ) from None

    def load(text: str) -> object:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from None

    return load


def _said_twice(field: str, places: Sequence[str]) -> str:
    """Text for a field with two values in one file."""
    first, second = (place or "the top level" for place in places)
    return (
        f"{field} has one value in {first} and another in {second}; which of the two is meant cannot be told.\n"
        "  Pass one section: RecomputeConfig.from_dict(data['model'])."
    )


def fields_of(data: object, names: Sequence[str]) -> dict[str, Any]:
    """The fields of ours among keys and values, wherever they lie; those at None are left out.

    Raises:
        ArgumentError: A key can only be meant for us and is no field, or a field has two values.
    """
    if not isinstance(data, Mapping):
        raise errors.ArgumentError(_not_a_mapping("the configuration", data))
    found: dict[str, tuple[Any, str]] = {}
    for where, key, value in _leaves(cast("Mapping[object, object]", data), "", names):
        if key not in names:
            _check_foreign(where, key, value, names)
        elif value is not None:
            if key in found and found[key][0] != value:
                raise errors.ArgumentError(_said_twice(key, (found[key][1], where)))
            found.setdefault(key, (value, where))
    fields = {name: value for name, (value, _) in found.items()}
    # Megatron writes this default into its configuration whatever the granularity is.
    selective = fields.get("recompute_granularity") == SELECTIVE or fields.get("moe_layer_recompute")
    if not selective and fields.get("recompute_modules") == ["core_attn"]:
        del fields["recompute_modules"]
    return fields


def _leaves(data: Mapping[object, object], where: str, names: Sequence[str]) -> Iterator[tuple[str, str, object]]:
    """Section, key and value of everything that is not itself a section."""
    for raw, value in data.items():
        key = str(raw)
        below = f"{where}.{key}" if where else key
        if isinstance(value, Mapping) and key not in names:
            yield from _leaves(cast("Mapping[object, object]", value), below, names)
            continue
        if isinstance(value, (list, tuple)) and key not in names:
            for i, item in enumerate(cast("Sequence[object]", value)):
                if isinstance(item, Mapping):
                    yield from _leaves(cast("Mapping[object, object]", item), f"{below}[{i}]", names)
        yield where, key, value


def _check_foreign(where: str, key: str, value: object, names: Sequence[str]) -> None:
    """Complain of a key that is no field and can only be meant for us."""
    if key in INSIDE:
        default, why = INSIDE[key]
        if value is not None and value != default:
            raise errors.ArgumentError(f"{key}={value!r} cannot be applied from outside of a layer: {why}.")
    elif where.rpartition(".")[2] == "recompute" or looks_like_ours(key, names):
        raise errors.ArgumentError(errors.unknown_field(key, nearest(key, names), where))


def looks_like_ours(key: str, names: Sequence[str]) -> bool:
    """Whether a key that is no field can only be a field spelled wrong."""
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
