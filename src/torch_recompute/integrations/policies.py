"""Makes a plan from a setting of a configuration file: a string, or a mapping of Megatron's fields.

    "none"                   nothing
    "full", "full:2"         every layer; two layers as one region
    "block:3"                the first three layers
    "core_attn,mlp"          labels, module paths or patterns of paths
    "plan.json"              a file: a plan that was saved, or Megatron's fields in JSON or YAML
    "--recompute_granularity full ..."    Megatron's flags

All but the saved plan are a `RecomputeConfig`, and its checks are the only checks. `apply` makes the regions of such a
policy; `StepFigures` measures what they drop and cost, for the log of a training.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from .. import errors, plan
from ..memory.budget import read_budget
from ..memory.elastic import Elastic
from ..memory.loop import Loop
from ..plan import Applied, Plan
from ..plan.apply import not_applicable
from ..plan.config import RecomputeConfig
from ..plan.observe import Stamp, between, stamp
from ..stores import Store

__all__ = ["Applied", "Policy", "StepFigures", "apply", "check_loop", "one_of", "plan_of"]

WATCHED = 2  # steps at a time: bytes, FLOPs and decisions are those of the first, seconds those of the second

Policy = Plan | RecomputeConfig | str | Mapping[str, Any]


def _refuse(policy: object) -> NoReturn:
    raise errors.ArgumentError(
        f"{errors.say(policy)} does not say what to recompute.\n"
        '  Write "full" (every layer), "full:2" (two layers as one region), "block:3" (the first three layers), labels '
        'such as "core_attn,mlp", the path of a .json or .yaml file, Megatron\'s flags, or "none"; or pass a Plan or a '
        "RecomputeConfig."
    )


def plan_of(policy: Policy, model: nn.Module) -> Plan:
    """Makes the plan that a policy means in a model.

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


def apply(
    model: nn.Module, policy: Policy, *, stores: Mapping[str, Store] | None = None, elastic: Elastic | None = None
) -> Applied:
    """Makes the regions of a plan in a model.

        handle = apply(model, "full")

    Args:
        model: The model, before a trainer, `torch.compile` or a wrapper for several devices takes it.
        policy: A `Plan`, a `RecomputeConfig`, its fields as a mapping, or a string as above.
        stores: The store for each word that a plan's choices name.
        elastic: The `Elastic` that the regions share, as for `torch_recompute.apply`.

    Returns:
        A handle; its `remove()` undoes it all.

    Raises:
        ArgumentError: The policy cannot be met by this model, or the model is recomputed already.
    """
    if not isinstance(model, nn.Module):
        raise errors.ArgumentError(not_applicable(model, policy))
    return plan.apply(model, plan_of(policy, model), stores=stores, elastic=elastic)


Budget = int | float | str


def one_of(what: str, policy: object, budget: Budget | None, *, must: bool = False) -> Budget | None:
    """Returns the budget of a callback, which takes a policy or a budget.

    Args:
        what: The callback.
        policy: Its policy, or None.
        budget: Its budget, or None.
        must: Whether there has to be one of them.

    Raises:
        ArgumentError: There are both, or neither, or the budget is none.
    """
    if (budget is None) == (policy is None) and (must or budget is not None):
        raise errors.ArgumentError(
            f"{what} takes a policy, which says what to recompute, or a budget, for which it plans; but got "
            f"{'neither' if budget is None else f'{errors.say(policy)} and budget={budget!r}'}.\n"
            f'  Write {what}("full"), or {what}(budget="24GiB").'
        )
    if budget is not None:
        read_budget(budget)
    return budget


class StepFigures:
    """Figures of a plan for a log, from two steps that are watched now and then; all other steps are left alone.

    Args:
        every: The number of steps from one watching to the next; None to watch the first two steps only.

    Raises:
        ArgumentError: `every` is not a number of at least 3.
    """

    def __init__(self, every: int | None) -> None:
        if every is not None and (type(every) is not int or every <= WATCHED):
            raise errors.ArgumentError(
                "every= is the number of steps from one taking of figures to the next, at least 3, but got "
                f"{errors.say(every)}. Two steps are watched each time.\n"
                "  Write every=100, or leave it out: then the first two steps are watched, and no other."
            )
        self._every = every
        self._steps = self._at = 0
        self._watch = ExitStack()
        self._start: Stamp | None = None
        self._handle: Applied | None = None
        self._times: tuple[Stamp, Stamp] | None = None

    @property
    def watching(self) -> bool:
        """Returns whether the present step is watched."""
        return self._start is not None

    def begin(self, handle: Applied) -> None:
        """Begins to watch a step that is to be watched; call it before each step."""
        self._at = self._steps if self._every is None else self._steps % self._every
        self._steps += 1
        if self._at == 0:
            self._handle = handle
            self._watch.enter_context(handle.watch())
        if self._at < WATCHED:
            self._start = stamp()

    def end(self) -> None:
        """Ends the watching after two steps; call it after each step."""
        if self._start is not None and self._at == WATCHED - 1:
            self._times = self._start, stamp()
            self._watch.close()
        self._start = None

    def close(self) -> None:
        """Ends the watching at once."""
        self._start = None
        self._watch.close()

    def taken(self) -> dict[str, float]:
        """Returns the figures of steps that were watched since the last call, if any."""
        if self._handle is None or self._times is None:
            return {}
        report, times, self._times = self._handle.report(), self._times, None
        figures: dict[str, float] = {}
        if any(row.saved_bytes is not None for row in report.rows):
            figures["recompute_saved_bytes"] = report.saved_bytes
        replays = sum((row.seconds or 0.0) * row.replays for row in report.rows) / WATCHED
        if replays:
            figures["recompute_replay_share"] = round(replays / between(*times), 4)
        carrying = sum(row.choice.carry for row in report.rows)
        if carrying or report.decisions:
            figures["recompute_routing_flips"] = report.flips
            figures["recompute_regions_carrying"] = carrying
        return figures


def check_loop(planned: Plan, words: Mapping[str, Any]) -> None:
    """Warns if a plan promises the peak of a loop that holds less than the trainer's.

    Args:
        planned: The plan.
        words: The trainer's loop, as `make_plan` takes it.
    """
    known, own = None if planned.prediction is None else planned.prediction.loop, Loop(**words)
    if known is not None and own.keeps_gradients and not known.keeps_gradients:
        options = ", ".join(f"{name}={value}" for name, value in own.words.items())
        warnings.warn(
            "The plan promises the peak of a loop in which gradients are gone when forward begins. In this trainer "
            "they are alive then, so the peak is higher by up to their bytes. Make the plan for its loop: "
            f"make_plan(..., {options}), which `training_loop` of this integration gives.",
            RuntimeWarning,
            stacklevel=4,
        )
