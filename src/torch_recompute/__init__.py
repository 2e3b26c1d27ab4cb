"""Activation recomputation for PyTorch: trade compute for device memory, precisely and safely.

    from torch_recompute import no_recompute, recompute

    y = recompute(block)(x)            # what block saves is dropped, and rebuilt once in backward
    attend = no_recompute(attention)   # inside a region: not run again

The public names are the ones listed in `__all__`; `torch_recompute.state` holds the random-number and user states
that `recompute(state=...)` takes.

`import torch_recompute` runs in every process that trains, also in those that never plan. What a region needs is a
sixth of the package, which a reviewer can read in an afternoon (docs/trust.md). Everything else is imported when it is
first asked for (PEP 562), and repeated under `if TYPE_CHECKING` for type checkers and editors;
`tests/core/test_imports.py` compares the two.
"""

from typing import TYPE_CHECKING

from . import state as state
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
from .state.values import doing_recompute, get_recompute_data, is_recomputing, replay, save_for_recompute
from .stores import OnDevice, Store

if TYPE_CHECKING:
    from .compat.olmo import OutputDiscardCheckpoint
    from .compat.torch_utils import checkpoint, checkpoint_sequential
    from .doctor.audit import Audit, audit
    from .doctor.verify import Verification, verify
    from .memory import Measurement, SavedActivations, measure, saved_activations
    from .memory.elastic import Elastic
    from .plan import Applied, Choice, Plan, SizeClass, apply
    from .plan.config import RecomputeConfig
    from .plan.plan import Prediction
    from .plan.ranks import Ranks
    from .plan.stages import StagePlan, StagePlans, Stages
    from .plan.units import register
    from .planner.configurations import ConfiguredStep, ConfiguredSteps
    from .planner.profile import Profile
    from .planner.solve import solve
    from .planning import auto, make_plan, peaks, profile
    from .simulation import Simulation, simulate
    from .stores.disk import OnDisk
    from .stores.host import OnHost
else:  # imported when they are first asked for
    from importlib import import_module

    _later = {
        "compat": (),
        "compat.olmo": ("OutputDiscardCheckpoint",),
        "compat.torch_utils": ("checkpoint", "checkpoint_sequential"),
        "doctor.audit": ("Audit", "audit"),
        "memory": ("Measurement", "SavedActivations", "measure", "saved_activations"),
        "memory.elastic": ("Elastic",),
        "plan": ("Applied", "Choice", "Plan", "SizeClass", "apply"),
        "plan.config": ("RecomputeConfig",),
        "plan.plan": ("Prediction",),
        "plan.ranks": ("Ranks",),
        "planner.configurations": ("ConfiguredStep", "ConfiguredSteps"),
        "planner.profile": ("Profile",),
        "planner.solve": ("solve",),
        "plan.stages": ("StagePlan", "StagePlans", "Stages"),
        "plan.units": ("register",),
        "planning": ("auto", "make_plan", "peaks", "profile"),
        "simulation": ("Simulation", "simulate"),
        "stores.disk": ("OnDisk",),
        "stores.host": ("OnHost",),
        "doctor.verify": ("Verification", "verify"),
        "doctor": (),
        "testing": (),
    }
    _module_of = {name: module for module, names in _later.items() for name in names}

    def __getattr__(name):
        if name in _module_of:
            found = getattr(import_module(f"{__name__}.{_module_of[name]}"), name)
        elif name in _later:
            found = import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found  # from now on like any other name
        return found

    def __dir__():
        return sorted({*globals(), *_module_of, *(module for module in _later if "." not in module)})


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
    "ConfiguredStep",
    "ConfiguredSteps",
    "Elastic",
    "Measurement",
    "MismatchError",
    "NotRecomputingError",
    "OnDevice",
    "OnDisk",
    "OnHost",
    "OutputDiscardCheckpoint",
    "Plan",
    "Ranks",
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
    "auto",
    "checkpoint",
    "checkpoint_sequential",
    "doing_recompute",
    "get_recompute_data",
    "is_recomputing",
    "measure",
    "no_recompute",
    "peaks",
    "recompute",
    "register",
    "replay",
    "save_for_recompute",
    "saved_activations",
    "simulate",
    "state",
    "verify",
]
