"""Activation recomputation for PyTorch: trade compute for device memory, precisely and safely.

    from torch_recompute import no_recompute, recompute

    y = recompute(block)(x)            # what block saves is dropped, and rebuilt once in backward
    attend = no_recompute(attention)   # inside a region: not run again

The public names are the ones listed in `__all__`; `torch_recompute.state` holds the random-number and user states
that `recompute(state=...)` takes. What plans, measures or checks is imported when it is first used.
"""

from typing import TYPE_CHECKING

from . import state as state
from ._lazy import lazily
from .compat import OutputDiscardCheckpoint, checkpoint, checkpoint_sequential
from .errors import (
    ArgumentError,
    BudgetError,
    ChangedError,
    MismatchError,
    NotRecomputingError,
    RecomputeError,
    SaveError,
    StoreError,
)
from .region import no_recompute, recompute
from .stores import OnDevice, OnHost, Store
from .values import doing_recompute, get_recompute_data, is_recomputing, replay, save_for_recompute

if TYPE_CHECKING:
    from .checking.audit import Audit, audit
    from .checking.verify import Verification, verify
    from .memory import Measurement, SavedActivations, measure, saved_activations
    from .plan import Applied, Choice, Plan, SizeClass, apply, simulate
    from .plan.config import RecomputeConfig
    from .plan.plan import Prediction
    from .plan.profile import Profile
    from .plan.solve import solve
    from .plan.stages import StagePlan, StagePlans, Stages
    from .planner import make_plan, profile
    from .simulation import Simulation
else:  # imported when they are first asked for
    __getattr__, __dir__ = lazily(
        globals(),
        {
            "checking.audit": ("Audit", "audit"),
            "memory": ("Measurement", "SavedActivations", "measure", "saved_activations"),
            "plan": ("Applied", "Choice", "Plan", "SizeClass", "apply", "simulate"),
            "plan.config": ("RecomputeConfig",),
            "plan.plan": ("Prediction",),
            "plan.profile": ("Profile",),
            "plan.solve": ("solve",),
            "plan.stages": ("StagePlan", "StagePlans", "Stages"),
            "planner": ("make_plan", "profile"),
            "simulation": ("Simulation",),
            "checking.verify": ("Verification", "verify"),
        },
    )

__version__ = "0.1.0"

__all__ = [
    "Profile",
    "Prediction",
    "solve",
    "profile",
    "make_plan",
    "Applied",
    "ArgumentError",
    "BudgetError",
    "Audit",
    "ChangedError",
    "Choice",
    "Measurement",
    "MismatchError",
    "NotRecomputingError",
    "OnDevice",
    "OnHost",
    "OutputDiscardCheckpoint",
    "Plan",
    "RecomputeConfig",
    "RecomputeError",
    "SaveError",
    "SavedActivations",
    "Simulation",
    "SizeClass",
    "StagePlan",
    "StagePlans",
    "Stages",
    "Store",
    "StoreError",
    "Verification",
    "apply",
    "audit",
    "checkpoint",
    "checkpoint_sequential",
    "doing_recompute",
    "get_recompute_data",
    "is_recomputing",
    "measure",
    "no_recompute",
    "recompute",
    "replay",
    "save_for_recompute",
    "saved_activations",
    "simulate",
    "state",
    "verify",
]
