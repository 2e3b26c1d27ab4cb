"""Torch's own planner as a peer of `peers frontier`: `torch.distributed._tools.sac_ilp`, at budgets of its own.

Problem. Torch has a planner: from statistics of every module an integer program chooses the modules to checkpoint and
what share of their activations to discard, within a budget for the step's peak; a second one, per chosen module, says
of every operation whether its result is saved. What carries that out was proposed and not taken in (pytorch#140410).

Idea. The planner is called as torch's tests call it, on fake tensors, and its budgets are shares of the peak that it
reckons without recomputing. A policy for torch's selective checkpointing counts the operations of the module as they
come and answers by their number, as the per-module program numbers them. That the count is right is looked at: a policy
that meets another operation than the one it was made for raises.

Three things are done to it. Its estimators price operations for a CUDA device; here they have the prices that our
planner has, so both spare the same. It numbers modules by their calls, and stops at a module that is called twice, as
dropout is; a module keeps its first number. And what a policy caches may be changed in place, because the program
saves an operation in place together with the one that made its tensor, which is how a CPU draws a dropout mask.

Rejected: the per-module program alone, at one share for every layer, which would not need pwlf. It is half of the
planner, and leaves the choice of the share to its user.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torch_recompute._torch.fakes import FakeTensorMode
from torch_recompute.memory.operations import Operation
from torch_recompute.planner.ops import Op, op_of
from torch_recompute.planner.prices import prices_for
from torch_recompute.simulation.devices import Roofline
from torch_recompute.simulation.training_step import TrainingStep

from .sac_tools import SacTools, ends_of_backward, priced, sac_tools

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Settings: budgets, as shares of the peak that it reckons without recomputing."""
CPU = torch.device("cpu")
SEED = 0


class NoPolicyError(RuntimeError):
    """The planner has nothing for a budget."""


@dataclass(frozen=True)
class Policy:
    """What the planner says of one module.

    Attributes:
        path: The module; "" is the model.
        names: Of its operations, in their order.
        saved: Whether the result of each is saved.
    """

    path: str
    names: list[str]
    saved: list[bool]


class Statistics:
    """What the planner knows of a model, gathered once, on a copy without values.

    Args:
        made: Makes the model and its batch.
        price: Seconds of an operation; None to time them on this machine.
    """

    def __init__(self, made: Callable[[], tuple[nn.Module, Tensor]], price: Roofline | None) -> None:
        self._made, self._price = made, price

    def policies(self, share: float) -> list[Policy]:
        """What the planner has for a share of the peak without recomputing.

        Raises:
            ImportError: This torch has no such planner, or a package that it needs is missing.
            NoPolicyError: It finds nothing that fits.
        """
        tools, (graph, of_modules, root) = sac_tools(), self._seen
        with _quiet(tools):
            peak, _ = tools.graph.get_peak_memory_runtime_baseline(graph)
            discarded, _, reckoned = tools.ilp.sac_milp(graph, memory_budget=share * peak / 2**30)
        if reckoned < 0:
            raise NoPolicyError("sac_milp finds no policy for so small a budget")
        found: list[Policy] = []
        for name, less in discarded.items():
            stats = of_modules[name]
            with _quiet(tools):
                saved = tools.ilp.get_optimal_checkpointing_policy_per_module(stats, 1 - less)
            if not saved:
                raise NoPolicyError(f"get_optimal_checkpointing_policy_per_module finds none for {name}")
            found.append(Policy(name.removeprefix(root).lstrip("."), stats.func_names, list(map(bool, saved))))
        return found

    @cached_property
    def _seen(self) -> tuple[Any, dict[str, Any], str]:
        """The graph of modules, the operations of each, and the name of the model among them."""
        tools = sac_tools()
        with _quiet(tools), FakeTensorMode():
            model, batch = self._made()
            estimate = partial(_estimated, self._price or prices_for(TrainingStep(model), CPU))
            memory = _tracked(tools, model, batch)
            runtime = priced(tools.runtime.RuntimeEstimator(), estimate)
            with runtime:
                model(batch).backward()
            model.zero_grad()
            sac = priced(tools.sac.SACEstimator(), estimate)
            with sac:
                loss = model(batch)
            loss.backward()
            found = tools.graph.aggregate_stats(model, memory, runtime, sac, CPU)
        order = found["mod_order"]
        for name in ("fw_pre_order", "fw_post_order"):
            order[name] = list(dict.fromkeys(order[name]))
        return tools.graph.parse_module_info(found), sac.sac_mod_stats, type(model).__name__


def _estimated(price: Callable[[Op], float], func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """What an operation makes, and its milliseconds."""
    out = func(*args, **(kwargs or {}))
    op = op_of(Operation(func, args, kwargs or {}, out))
    return out, 0.0 if op is None else 1000 * price(op)


def _tracked(tools: SacTools, model: nn.Module, batch: Tensor) -> Any:
    """The memory of one step, by module."""
    tracker = tools.memory.MemTracker()
    tracker.track_external(model)
    with tracker:
        model(batch).backward()
        end = tracker.get_tracker_snapshot("current")
    ends_of_backward(tools.memory, tracker, end)
    model.zero_grad()
    return tracker


@contextlib.contextmanager
def _quiet(tools: SacTools) -> Generator[None]:
    """Without what the planner prints, logs and warns of, and with a seed, because it fits its curves by chance."""
    import numpy as np

    log: logging.Logger = tools.ilp.logger
    before, state = log.disabled, np.random.get_state()
    log.disabled = True
    np.random.seed(SEED)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch calls pulp by names that it is to give up
            yield
    finally:
        log.disabled = before
        np.random.set_state(state)


def prepare(model: nn.Module, statistics: Statistics, share: float) -> None:
    """Checkpoints the modules that the planner chooses, and saves of each what it says."""
    skipped = sac_tools().sac.OPS_TO_ALWAYS_SKIP
    for policy in statistics.policies(share):
        module: Any = model.get_submodule(policy.path)
        contexts = partial(_contexts, policy, skipped)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, context_fn=contexts)


def _contexts(policy: Policy, skipped: set[Any]) -> Any:
    seen: Counter[bool] = Counter()

    def answer(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in skipped:
            return CheckpointPolicy.PREFER_RECOMPUTE
        number, name = seen[context.is_recompute], func.overloadpacket.__name__
        seen[context.is_recompute] += 1
        if number >= len(policy.names) or policy.names[number] != name:
            planned = policy.names[number] if number < len(policy.names) else "nothing"
            raise RuntimeError(f"operation {number} of {policy.path} is {name}, and the policy was made for {planned}")
        return CheckpointPolicy.MUST_SAVE if policy.saved[number] else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(answer, allow_cache_entry_mutation=True)
