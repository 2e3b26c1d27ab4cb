"""From the word MODEL of a command line to a module.

`pkg.module:name` is imported, with the current folder on the path as for `python -m`, and called unless it is a module
already. Anything else is the path of a Hugging Face configuration: the class that it names is built on the meta device.
Nothing is downloaded and no code that comes with a configuration is run.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import errors


def load(model: str) -> nn.Module:
    """The model that a command line names.

    Args:
        model: `pkg.module:name`, or the path of a `config.json` or of its folder.

    Raises:
        ArgumentError: There is no such thing, or it does not make a module.
    """
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return _from_config(path)
    where, colon, name = model.partition(":")
    if not (where and colon and name):
        raise errors.ArgumentError(errors.no_such_model(model))
    return _from_python(model, where, name)


def _from_python(model: str, where: str, name: str) -> nn.Module:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        made: Any = reduce(getattr, name.split("."), importlib.import_module(where))
    except (ImportError, AttributeError, ValueError) as error:
        raise errors.ArgumentError(errors.not_importable(model, error)) from error
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise errors.ArgumentError(errors.makes_no_module(model, made))
        try:
            made = made()
        except Exception as error:
            raise errors.ArgumentError(errors.not_built(model, error)) from error
    if not isinstance(made, nn.Module):
        raise errors.ArgumentError(errors.makes_no_module(model, made))
    return made


def _from_config(path: Path) -> nn.Module:
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"))
        kind = fields.pop("model_type")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.ArgumentError(errors.not_a_model_config(str(path), error)) from error
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise errors.ArgumentError(errors.needs_transformers(str(path))) from error
    try:
        config = transformers.AutoConfig.for_model(kind, **fields)
        named = getattr(transformers, (fields.get("architectures") or [""])[0] or "AutoModel", None)
        build = getattr(named, "_from_config", None) or transformers.AutoModel.from_config
        with torch.device("meta"):
            return build(config)
    except Exception as error:
        raise errors.ArgumentError(errors.not_built(str(path), error)) from error
