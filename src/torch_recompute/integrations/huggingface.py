"""Hugging Face: applies a plan that stays through Trainer, TRL and PEFT, and reports on it by a callback.

    handle = apply(model, "full")                                   # before the Trainer
    Trainer(model, args, callbacks=[RecomputeCallback(handle)])     # its figures in the log
    Trainer(model, args, callbacks=[RecomputeCallback("full")])     # or: the callback applies
    Trainer(model, args, callbacks=[RecomputeCallback(budget="24GiB")])    # or: plans, when the first batch is there
    make_plan(..., **training_loop(args))                           # a plan for the loop of the Trainer

Applied before the Trainer, the plan also makes the model say that it is checkpointing, so the Trainer sets up DDP for
it. The policy can be among the training arguments: `activation_checkpointing_kwargs={"policy": "full:2"}`
and `RecomputeCallback()`. Without transformers `RecomputeCallback` is a class that no Trainer knows.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from .. import errors, memory
from ..memory.loop import Loop
from ..planning import plan_first_call
from ..simulation.training_step import loss_of
from .policies import Applied, Policy, StepFigures, apply, check_loop, held_for, one_of, plan_of

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerCallback
else:
    try:
        from transformers.trainer_callback import TrainerCallback
    except ImportError:
        TrainerCallback = object

__all__ = ["Applied", "RecomputeCallback", "apply", "plan_of", "training_loop"]

logger = logging.getLogger(__name__)


class RecomputeCallback(TrainerCallback):
    """Applies a plan when training begins, and reports what it drops and costs whenever the Trainer logs.

    Figures are taken of two steps that are watched, the first two and with `every` two more now and then. The log after
    such steps gains `recompute_saved_bytes` (dropped by the regions in one forward) and `recompute_replay_share`
    (replays, as a part of the time of the second of them). Where tokens are routed in a region, two more are added:
    `recompute_routing_flips` (decisions that the replay of one call made otherwise) and `recompute_regions_carrying`
    (how many regions carry theirs). `recompute_peak_bytes` is in every log on CUDA, the allocator's; on the CPU once,
    what the third step was measured to need, with the states of the optimizer.

    Attributes:
        handle: The plan in the model, once training has begun.
        figures: The newest figures.

    Args:
        policy: A policy as for `apply`; or a handle that it returned, to report on; None for the policy in the training
            arguments, `activation_checkpointing_kwargs`.
        budget: Instead of a policy, the most bytes that a step may take, as for `auto`: the plan is then made in the
            Trainer, for its first batch, its optimizer, its accumulation and its autocast, and compared with the first
            steps, as `auto` does.
        remove: Whether to take the plan out when training ends.
        peak: Whether to measure a step on the CPU, which makes that step slow.
        every: The number of steps from one watching of two to the next; None for the first two only.

    Raises:
        ArgumentError: `every` is not a number of at least 3; or there are a policy and a budget.
    """

    def __init__(
        self,
        policy: Policy | Applied | None = None,
        *,
        budget: int | float | str | None = None,
        remove: bool = False,
        peak: bool = True,
        every: int | None = None,
    ) -> None:
        self.handle: Applied | None = policy if isinstance(policy, Applied) else None
        self.figures: dict[str, float] = {}
        self._given = self.handle
        self._policy = None if isinstance(policy, Applied) else policy
        self._budget = one_of("RecomputeCallback", policy, budget)
        self._remove = remove
        self._peak = peak
        self._measured: memory.Measurement | None = None
        self._open = ExitStack()
        self._every = every
        self._taking = StepFigures(every)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Applies the plan."""
        self._close()
        self._measured, self._taking, self.figures = None, StepFigures(self._every), {}
        self._peak = self._peak and not getattr(args, "torch_compile", False)
        # A search for parameters trains one model after another.
        self.handle = self._given or held_for(model, self.handle)
        if self.handle is None and self._budget is not None:
            if getattr(args, "torch_compile", False):
                setting, why = "torch_compile=True", "torch.compile traces the first call, where nothing can be planned"
                raise errors.ArgumentError(_no_budget(self._budget, setting, why))
            loop, loss = Loop(**training_loop(args)), _LossInOutput(self._budget)
            self.handle = plan_first_call(model, self._budget, loss=loss, optimizer=_optimizer(kwargs), loop=loop)
            return
        if self.handle is None:
            policy = self._policy if self._policy is not None else _policy_of(args)
            if policy is None:
                raise errors.ArgumentError(
                    "RecomputeCallback() was given no plan, and the training arguments have none either.\n"
                    '  Write RecomputeCallback("full"), or put activation_checkpointing_kwargs={"policy": "full"} '
                    "into the "
                    "TrainingArguments; to report on a plan that is applied already, pass its handle: "
                    "RecomputeCallback(handle)"
                )
            self.handle = apply(model, policy)
        check_loop(self.handle.plan, training_loop(args))
        logger.info("%s", self.handle.plan)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begins to watch or to measure the step."""
        if self.handle is None:
            return
        self._taking.begin(self.handle)
        if self._peak and self._measured is None and not self._taking.watching and isinstance(model, nn.Module):
            if torch.cuda.is_available():
                return
            self._measured = self._open.enter_context(memory.measure(model, _optimizer(kwargs)))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the watching or the measurement of the step."""
        self._taking.end()
        self._open.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds the figures to the log."""
        figures = self._taking.taken()
        if torch.cuda.is_available():
            figures["recompute_peak_bytes"] = torch.cuda.max_memory_allocated()
        elif self._measured is not None and "recompute_peak_bytes" not in self.figures:
            figures["recompute_peak_bytes"] = self._measured.peak_bytes
        if not figures:
            return
        self.figures.update(figures)
        logger.info("step %s: %s", state.global_step, figures)
        if logs is not None:
            logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Removes the plan, if `remove` is set."""
        self._close()
        if self._remove and self.handle is not None:
            self.handle.remove()
            self.handle = None

    def _close(self) -> None:
        self._taking.close()
        self._open.close()


def training_loop(args: Any) -> dict[str, Any]:
    """Returns the options of `make_plan` for the training loop of the Trainer.

        plan = make_plan(model, (), batch, budget="24GiB", **training_loop(args))

    `Trainer.compute_loss` returns the loss alone, so the output is gone when backward begins, and `model.zero_grad()`
    sets gradients to None. A `compute_loss` of your own that keeps the outputs (`self.outputs = outputs`) holds them.

    Args:
        args: The `TrainingArguments`.
    """
    return Loop(hold_output=False, accumulate=getattr(args, "gradient_accumulation_steps", 1)).words


def _optimizer(given: dict[str, Any]) -> Any:
    """Returns the optimizer that a callback is given, without accelerate's wrapper."""
    return getattr(given.get("optimizer"), "optimizer", given.get("optimizer"))


@dataclass(frozen=True)
class _LossInOutput:
    """The loss in the output of the model that the Trainer calls."""

    budget: object
    words: ClassVar[str] = "the output's .loss"

    def __call__(self, output: Any) -> torch.Tensor:
        try:
            return loss_of(output)
        except errors.ArgumentError as error:
            setting = "label_smoothing_factor, compute_loss_func or a compute_loss of your own"
            why = "the Trainer computes the loss then, and the output of the model has none"
            raise errors.ArgumentError(_no_budget(self.budget, setting, why)) from error


def _no_budget(budget: object, setting: str, why: str) -> str:
    """Text for a setting of the Trainer with which the callback cannot plan."""
    return (
        f"RecomputeCallback(budget={budget!r}) plans in the Trainer, when the first batch is there, and cannot do so "
        f"with {setting}: {why}.\n"
        '  Write RecomputeCallback("full"); or plan before the Trainer is made:  '
        f"auto(model, batch, budget={budget!r}, loss=..., **training_loop(args))"
    )


def _policy_of(args: Any) -> Any:
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        settings = getattr(args, name, None)
        if isinstance(settings, dict) and "policy" in settings:
            return settings["policy"]
    return None
