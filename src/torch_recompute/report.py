"""The public name of `report`, which makes a page on a plan. See `commands/report.py`."""

from .commands.report import report

__all__ = ["report"]
