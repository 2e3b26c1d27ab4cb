"""Torch's planner for selective checkpointing (`torch.distributed._tools`): private, and without a way to carry it out.

Its linear program needs pulp, the curve of a module that it chooses by needs pwlf, which needs scipy. Torch has none of
them among its dependencies, and says which one is missing. Its estimators price operations for a CUDA device only, so a
price is put in their place.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class SacTools:
    """The modules of the planner.

    Attributes:
        ilp: The linear programs.
        graph: From statistics to a graph of modules.
        memory: The tracker of memory.
        runtime: The estimator of the modules' times.
        sac: The estimator of what each operation of a module holds and takes.
    """

    ilp: Any
    graph: Any
    memory: Any
    runtime: Any
    sac: Any


def sac_tools() -> SacTools:
    """The planner.

    Raises:
        ImportError: This build of torch has none, or pulp is not installed.
    """
    return SacTools(
        import_module("torch.distributed._tools.sac_ilp"),
        import_module("torch.distributed._tools.ilp_utils"),
        import_module("torch.distributed._tools.mem_tracker"),
        import_module("torch.distributed._tools.runtime_estimator"),
        import_module("torch.distributed._tools.sac_estimator"),
    )


def priced(estimator: Any, estimate: Callable[[Any, Any, Any], tuple[Any, float]]) -> Any:
    """One of the estimators, with a function in place of its own that runs an operation and says its milliseconds."""
    estimator("operator-level-cost-model")
    name = "_estimate_runtime" if hasattr(estimator, "_estimate_runtime") else "_estimate"
    setattr(estimator, name, estimate)
    return estimator


def ends_of_backward(memory: Any, tracker: Any, snapshot: Any) -> None:
    """Gives modules without an end of backward the end of the step's: those whose input needs no gradient."""
    for stats in tracker.memory_tracking.values():
        stats.snapshots.setdefault(memory._ModState.POST_BW, [snapshot])
