"""torchtitan: a class of activation checkpointing, beside its Full, Selective and MemoryBudget.

    config.activation_checkpoint = RecomputeAC.Config(policy="full")       # in a function of a config registry
    config.activation_checkpoint = RecomputeAC.Config(policy="plan.json")  # a plan for a budget, made before

torchtitan calls it where it calls its own: after tensor parallelism, before `torch.compile` and `fully_shard`. Without
torchtitan `RecomputeAC` is a class that no Trainer knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from .policies import Applied, apply


class _Base:
    """The part of torchtitan's base class that is used here."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """torchtitan's settings, common to its classes."""

    def __init__(self, config: Any, dump_folder: str = "") -> None:
        self.config = config


if TYPE_CHECKING:
    ActivationCheckpointing = _Base
else:
    try:
        from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
    except ImportError:
        ActivationCheckpointing = _Base

__all__ = ["RecomputeAC"]


class RecomputeAC(ActivationCheckpointing):
    """Applies a plan to a model of torchtitan.

    Attributes:
        handle: The plan in the model, once `apply` was called.

    Args:
        config: Its `policy` is what `torch_recompute.integrations.policies.apply` takes as a string: "full",
            "full:2", "block:3", labels such as "core_attn,mlp", or the path of a plan in JSON.
            torchtitan's own settings (`preserve_rng_state` and such) say how torch's checkpoint does it; they may be
            set and change nothing: random numbers are always those of the forward.
        dump_folder: torchtitan's, where nothing is written.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """The setting for `Trainer.Config.activation_checkpoint`."""

        policy: str = "full"

    def __init__(self, config: Config, dump_folder: str = "") -> None:
        super().__init__(config, dump_folder)
        self.handle: Applied | None = None
        self._policy = config.policy

    def apply(self, model: nn.Module) -> None:
        """Makes the regions of the plan in a model.

        Args:
            model: The model, or the part of it that is a stage of a pipeline.
        """
        self.handle = apply(model, self._policy)
