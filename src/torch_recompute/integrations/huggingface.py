"""Hugging Face: a plan that stays through Trainer, TRL and PEFT, and a callback that applies and reports on one.

    handle = apply(model, "full")                                   # before the Trainer
    Trainer(model, args, callbacks=[RecomputeCallback(handle)])     # its figures in the log
    Trainer(model, args, callbacks=[RecomputeCallback("full")])     # or: the callback applies

Applied before the Trainer, the plan also answers when the Trainer asks the model whether it is checkpointing, and DDP
is set up for it; applied by the callback, it comes after that. The policy can be a string, so it can stand among the
training arguments, which are written to JSON: `activation_checkpointing_kwargs={"policy": "full:2"}` and
`RecomputeCallback()`.

transformers is needed by the callback only; without it `RecomputeCallback` is a class that no Trainer knows.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import errors, memory
from .door import Applied, apply
from .policies import Policy, plan_of

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerCallback
else:
    try:
        from transformers.trainer_callback import TrainerCallback
    except ImportError:
        TrainerCallback = object

__all__ = ["Applied", "RecomputeCallback", "apply", "plan_of"]

logger = logging.getLogger(__name__)


class RecomputeCallback(TrainerCallback):
    """Applies a plan when training begins, and reports what it frees and costs whenever the Trainer logs.

    The figures are added to the Trainer's log: `recompute_saved_bytes` (freed by the regions in one forward),
    `recompute_replay_share` (replays, as a part of the time of the steps; left out where a step was measured) and
    `recompute_peak_bytes` (the CUDA allocator's; on the CPU, what the second step was measured to need, without what
    the optimizer keeps from earlier ones). Where tokens are routed in a region, `recompute_routing_flips` (decisions
    that the replay of one call made otherwise than its forward; those that are carried cannot flip) and
    `recompute_regions_carrying` (how many regions carry theirs) are added.

    Attributes:
        handle: The plan in the model, once training has begun.
        figures: The figures last logged.

    Args:
        policy: What `apply` takes; or a handle that it returned, to report on; None for the policy that the training
            arguments carry in `activation_checkpointing_kwargs`.
        remove: Whether to take the plan out when training ends.
        peak: Whether to measure a step on the CPU, which makes that step slow.
    """

    def __init__(self, policy: Policy | Applied | None = None, *, remove: bool = False, peak: bool = True) -> None:
        self.handle: Applied | None = policy if isinstance(policy, Applied) else None
        self.figures: dict[str, float] = {}
        self._policy = None if isinstance(policy, Applied) else policy
        self._remove = remove
        self._peak = peak
        self._measured: memory.Measurement | None = None
        self._measuring = False
        self._slowed = False
        self._since: float | None = None
        self._busy = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Applies the plan."""
        self._close()
        self._measured, self._busy = None, 0.0
        if self.handle is None:
            policy = self._policy if self._policy is not None else _policy_of(args)
            if policy is None:
                raise errors.ArgumentError(errors.no_policy())
            self.handle = apply(model, policy)
        logger.info("%s", self.handle.plan)
        self._peak = self._peak and not getattr(args, "torch_compile", False)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begins to measure, in the second step."""
        self._since = time.perf_counter()
        if self._peak and self._measured is None and state.global_step >= 1 and isinstance(model, nn.Module):
            if torch.cuda.is_available():
                return
            self._measured = memory.measure(model)
            self._measured.__enter__()
            self._measuring = self._slowed = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends what the step began."""
        self._close()
        if self._since is not None:
            self._busy += time.perf_counter() - self._since

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds the figures to the log."""
        if self.handle is None or self._busy == 0.0:
            return
        report = self.handle.report()
        figures: dict[str, float] = {}
        if any(row.saved_bytes is not None for row in report.rows):
            figures["recompute_saved_bytes"] = report.saved_bytes
        if report.seconds and not self._slowed:
            replays = sum((row.seconds or 0.0) * row.replays for row in report.rows)
            figures["recompute_replay_share"] = round(replays / self._busy, 4)
        if torch.cuda.is_available():
            figures["recompute_peak_bytes"] = torch.cuda.max_memory_allocated()
        elif self._measured is not None:
            figures["recompute_peak_bytes"] = self._measured.peak_bytes
        carrying = sum(row.choice.carry for row in report.rows)
        if carrying or report.decisions:
            figures["recompute_routing_flips"] = report.flips
            figures["recompute_regions_carrying"] = carrying
        self.figures, self._busy, self._slowed = figures, 0.0, False
        logger.info("step %s: %s", state.global_step, figures)
        if logs is not None:
            logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the plan out, if asked to."""
        self._close()
        if self._remove and self.handle is not None:
            self.handle.remove()
            self.handle = None

    def _close(self) -> None:
        if self._measured is not None and self._measuring:
            self._measured.__exit__(None, None, None)
        self._measuring = False


def _policy_of(args: Any) -> Any:
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        settings = getattr(args, name, None)
        if isinstance(settings, dict) and "policy" in settings:
            return settings["policy"]
    return None
