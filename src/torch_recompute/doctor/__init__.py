"""Does a plan change anything, does a region do the same twice, what is wrong with this training step?

- `verify.py`: a step with a plan beside a step without it. What differs is named, and the region to blame is tried.
- `audit.py`: each region runs twice (`recorder.py` writes down its operations), and the first operation that differs,
  waits for the device and side effects are named.
- `examine.py`: every kind of finding in `checks.py`, over simulated steps (`simulated.py`), observed real steps
  (`observed.py`) and an audit. Its names are the public ones of this package.

All of them run a model and leave it as it was; how, and how two runs are compared, is in `evidence.py`. None of them
trusts names or versions: what they say was counted, compared or run.
"""

from .checks import CHECKS, KINDS, Check, Evidence, Finding, Report
from .examine import Watching, examine, watch

__all__ = ["CHECKS", "KINDS", "Check", "Evidence", "Finding", "Report", "Watching", "examine", "watch"]
