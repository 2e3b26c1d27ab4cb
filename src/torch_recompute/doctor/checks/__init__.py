"""The checks, in the order in which findings are shown: what gives wrong results first, then memory, then time."""

from __future__ import annotations

from ..check import Check
from .audited import HostSyncs, NotDeterministic
from .double_recompute import DoubleRecompute
from .fallbacks import Fallbacks
from .fragmentation import Fragmentation
from .frozen_input import FrozenInput
from .made_worse import MadeWorse
from .next_wall import LossHead, OptimizerState, OutputHeld
from .output_pins import OutputPins
from .over_budget import OverBudget
from .reentrant import ReentrantUnderDDP
from .replay_share import ReplayShare
from .saves_nothing import SavesNothing
from .updated_twice import UpdatedTwice

__all__ = ["CHECKS", "KINDS"]

CHECKS: tuple[Check, ...] = (
    FrozenInput(),
    NotDeterministic(),
    UpdatedTwice(),
    ReentrantUnderDDP(),
    OverBudget(),
    Fragmentation(),
    LossHead(),
    OutputHeld(),
    OptimizerState(),
    SavesNothing(),
    OutputPins(),
    MadeWorse(),
    DoubleRecompute(),
    ReplayShare(),
    HostSyncs(),
    Fallbacks(),
)
KINDS = tuple(check.kind for check in CHECKS)
