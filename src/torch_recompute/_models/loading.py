"""From the word MODEL of a command line to a module, and to the batch that comes with it, if one does.

`pkg.module:name` is imported, with the current folder on the path as for `python -m`, and called unless it is a module
already. A name of `PRESETS`, and anything else that is the path of a Hugging Face configuration, is built on the meta
device, or, to be run, with random weights on another. Nothing is downloaded and no code that comes with a configuration
is run.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from .. import errors
from .presets import DTYPE, PRESETS

_MODEL = "Write pkg.module:name, or the path of a Hugging Face config.json or of its folder."


class Loaded(NamedTuple):
    """A model, and the call that it is to be trained with, where the user has said one.

    Attributes:
        model: The model.
        batch: A tuple of positional or a dictionary of keyword arguments; None where only a model was given.
        loss: From the model's output to a scalar; None where it was not said.
    """

    model: nn.Module
    batch: tuple[Any, ...] | dict[str, Any] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None


def load(model: str, dtype: torch.dtype | None = None, device: torch.device | str = "meta") -> Loaded:
    """The model that a command line names.

    Args:
        model: `pkg.module:name`, the path of a `config.json` or of its folder, or a name of `PRESETS`.
        dtype: Of the weights of a model that is built here; by default what its configuration says, and bfloat16 for
            one of `PRESETS`.
        device: Where a model that is built here lies; its weights are random, or none on meta.

    Raises:
        ArgumentError: There is no such thing, or it does not make a module, or what makes it decides its dtype.
    """
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return Loaded(_from_config(path, dtype, device))
    if model in PRESETS:
        preset = PRESETS[model]
        return Loaded(_built(model, preset.kind, preset.cls, dict(preset.fields), dtype or DTYPE, device))
    where, colon, name = model.partition(":")
    if not (where and colon and name):
        raise errors.ArgumentError(
            f"MODEL is {model!r}, which is no file, no folder and not of the form pkg.module:name. {_MODEL} Known by "
            f"name are {', '.join(list(PRESETS))}."
        )
    if dtype is not None:
        raise errors.ArgumentError(errors.made_by_a_function("--dtype", model))
    return _from_python(model, where, name)


def _makes_no_module(model: str, made: object) -> str:
    """Text for a name that stands for something else than a model."""
    return (
        f"MODEL is {model!r}, which gives {errors.say(made)}; expected a torch.nn.Module, or a function that returns "
        "one, or one and its batch (a tuple of arguments, or a dict of keyword arguments), and a function for its "
        "loss."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [errors.kind(error)])[0].rstrip(".")


def _not_built(model: str, why: Exception) -> str:
    """Text for a model whose construction fails."""
    return f"MODEL is {model!r}, and building it raises {errors.kind(why)}: {_first_line(why)}"


def _from_python(model: str, where: str, name: str) -> Loaded:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        made: Any = reduce(getattr, name.split("."), importlib.import_module(where))
    except (ImportError, AttributeError, ValueError) as error:
        raise errors.ArgumentError(f"MODEL is {model!r}: {_first_line(error)}. {_MODEL}") from error
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise errors.ArgumentError(_makes_no_module(model, made))
        try:
            made = made()
        except Exception as error:
            raise errors.ArgumentError(_not_built(model, error)) from error
    if isinstance(made, nn.Module):
        return Loaded(made)
    parts: list[Any] = [*cast("tuple[Any, ...]", made)] if isinstance(made, tuple) else []
    right = len(parts) in (2, 3) and isinstance(parts[0], nn.Module) and isinstance(parts[1], (tuple, dict))
    if not right or not all(map(callable, parts[2:])):
        raise errors.ArgumentError(_makes_no_module(model, made))
    return Loaded(*parts)


def _not_a_model_config(path: str, why: Exception) -> str:
    """Text for a file that is no configuration of a model."""
    what = "it has no field model_type" if isinstance(why, KeyError) else f"{errors.kind(why)}: {_first_line(why)}"
    return f"{path} is not the configuration of a Hugging Face model: {what}. {_MODEL}"


def _from_config(path: Path, dtype: torch.dtype | None, device: torch.device | str) -> nn.Module:
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"))
        kind = fields.pop("model_type")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.ArgumentError(_not_a_model_config(str(path), error)) from error
    return _built(str(path), kind, (fields.get("architectures") or [""])[0], fields, dtype, device)


def _built(
    model: str, kind: str, cls: str, fields: Mapping[str, Any], dtype: torch.dtype | None, device: torch.device | str
) -> nn.Module:
    """A model of transformers, with random weights."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise errors.ArgumentError(
            f"{model} is built with the package transformers, which is not installed. Write: pip install transformers"
        ) from error
    try:
        config = transformers.AutoConfig.for_model(kind, **fields)
        if dtype is not None:
            setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)  # the latter before 4.56
        named = getattr(transformers, cls or "AutoModel", None)
        build = getattr(named, "_from_config", None) or transformers.AutoModel.from_config
        with torch.device(device):
            return build(config)
    except Exception as error:
        raise errors.ArgumentError(_not_built(model, error)) from error
