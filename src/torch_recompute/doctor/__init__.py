"""Diagnosis: whether a plan changes results, whether regions replay alike, what is wrong with a training step.

- `verify.py`: a step with a plan is compared with a step without it, and the regions that cause a difference are found.
- `audit.py`: each region runs twice under a recorder of operations (`recorder.py`); the first operation that differs,
  waits for the device and side effects are reported.
- `examine.py`: every kind of finding in `checks.py`, from simulated steps (`simulated.py`), real steps watched by hooks
  (`step_watcher.py`) and an audit. Its names are the public ones of this package.

All of them run a model and leave it as it was. `compare.py` runs steps that can be repeated, and compares them. No
check relies on names or versions: every figure was counted, compared or run.
"""

from .checks import CHECKS, KINDS, Check, Evidence, Finding, Report
from .examine import Watching, examine, watch

__all__ = ["CHECKS", "KINDS", "Check", "Evidence", "Finding", "Report", "Watching", "examine", "watch"]
