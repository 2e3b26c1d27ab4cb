"""A plan from what fits into a configuration file: a string, or a mapping of Megatron's fields.

    "none"                   nothing
    "full", "full:2"         every layer; two layers as one region
    "block:3"                the first three layers
    "core_attn,mlp"          labels, module paths or patterns of paths
    "plan.json"              a file: a plan that was saved, or Megatron's fields in JSON or YAML
    "--recompute_granularity full ..."    Megatron's flags

All but the saved plan are a `RecomputeConfig`, and its checks are the only checks.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from .. import errors
from ..plan import Plan
from ..plan.config import RecomputeConfig

Policy = Plan | RecomputeConfig | str | Mapping[str, Any]


def _refuse(policy: object) -> NoReturn:
    raise errors.ArgumentError(
        f"{errors.say(policy)} does not say what to recompute.\n"
        '  Write "full" (every layer), "full:2" (two layers as one region), "block:3" (the first three layers), labels '
        'such as "core_attn,mlp", the path of a .json or .yaml file, Megatron\'s flags, or "none"; or pass a Plan or a '
        "RecomputeConfig."
    )


def plan_of(policy: Policy, model: nn.Module) -> Plan:
    """The plan that a policy means in a model.

    Args:
        policy: A plan, settings, a string as above, or a mapping of settings.
        model: The model that it is for.

    Raises:
        ArgumentError: It is none of these, or cannot be met by this model.
    """
    if isinstance(policy, Plan):
        return policy
    if isinstance(policy, RecomputeConfig):
        return policy.plan(model)
    if isinstance(policy, Mapping):
        return RecomputeConfig.from_dict(policy).plan(model)
    if not isinstance(policy, str):
        _refuse(policy)
    policy = policy.strip()
    word, _, number = policy.partition(":")
    if word.startswith("--"):
        return RecomputeConfig.from_args(shlex.split(policy)).plan(model)
    if policy.endswith((".json", ".yaml", ".yml")):
        text = Path(policy).read_text(encoding="utf-8") if Path(policy).is_file() else ""
        if policy.endswith(".json") and '"choices"' in text:
            return Plan.from_json(text)
        return RecomputeConfig.from_file(policy).plan(model)
    if policy == "none":
        return Plan(source="none")
    fields: dict[str, Any] = {"recompute_granularity": "selective"}
    if word in ("full", "block"):
        if (number and not number.isdecimal()) or (word == "block" and not number):
            _refuse(policy)
        method = "uniform" if word == "full" else "block"
        fields = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": int(number or 1)}
    elif policy != "selective":
        fields["recompute_modules"] = [label.strip() for label in policy.split(",")]
        if not all(fields["recompute_modules"]):
            _refuse(policy)
    return RecomputeConfig(**fields).plan(model)
