"""A plan from what fits into a configuration file: a string, or a mapping of Megatron's fields.

Trainers write their arguments to JSON and read them from a command line, so what they carry must be words:

    "none"                   nothing
    "full", "full:2"         every layer; two layers as one region
    "block:3"                the first three layers
    "core_attn,mlp"          labels, module paths or patterns of paths
    "plan.json"              a file: a plan that was saved, or Megatron's fields in JSON or YAML
    "--recompute_granularity full ..."    Megatron's flags

All but the saved plan are a `RecomputeConfig`, and its checks are the only checks. Rejected: words of our own for what
Megatron has a word for.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from .. import errors
from ..plan import Plan
from ..plan.config import RecomputeConfig

Policy = Plan | RecomputeConfig | str | Mapping[str, Any]
SUFFIXES = (".json", ".yaml", ".yml")


def _not_a_policy(policy: object) -> str:
    """Text for something that no plan can be made of."""
    return (
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
        raise errors.ArgumentError(_not_a_policy(policy))
    word, _, number = policy.strip().partition(":")
    if word.startswith("--"):
        return RecomputeConfig.from_args(shlex.split(policy)).plan(model)
    if policy.strip().endswith(SUFFIXES):
        return _from_file(policy.strip(), model)
    if word == "none" and not number:
        return Plan(source="none")
    if word in ("full", "block"):
        if (number and not number.isdecimal()) or (word == "block" and not number):
            raise errors.ArgumentError(_not_a_policy(policy))
        method = "uniform" if word == "full" else "block"
        settings = RecomputeConfig(
            recompute_granularity="full", recompute_method=method, recompute_num_layers=int(number or 1)
        )
        return settings.plan(model)
    labels = [label.strip() for label in policy.split(",")]
    if not all(labels):
        raise errors.ArgumentError(_not_a_policy(policy))
    if labels == ["selective"]:
        return RecomputeConfig(recompute_granularity="selective").plan(model)
    return RecomputeConfig(recompute_granularity="selective", recompute_modules=labels).plan(model)


def _from_file(path: str, model: nn.Module) -> Plan:
    text = Path(path).read_text(encoding="utf-8") if Path(path).is_file() else ""
    if path.endswith(".json") and '"choices"' in text:
        return Plan.from_json(text)
    return RecomputeConfig.from_file(path).plan(model)
