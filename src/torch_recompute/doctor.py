"""The doctor's public names: `examine` a model and a batch, `watch` a training. See `checking/doctor.py`."""

from __future__ import annotations

from .checking.checks import CHECKS, KINDS, Check, Evidence, Finding, Report
from .checking.doctor import Watching, examine, watch

__all__ = [
    "CHECKS",
    "KINDS",
    "Check",
    "Evidence",
    "Finding",
    "Report",
    "Watching",
    "examine",
    "watch",
]
