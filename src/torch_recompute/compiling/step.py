"""A plan for the step of a model that `torch.compile` compiles as one graph.

The step is simulated as it will run: the model's copy without data is compiled with a `Partition`, up to the code that
inductor writes, and that code is what the simulated forward and backward call. So the loss, the batch, the gradients
and the optimizer are counted as in any plan, and the graph's own allocations as inductor orders them.

What is searched is one number, the bytes for which `Partition` chooses: what the whole step takes besides is nearly the
same for every choice, so the second or third step that is simulated fits and leaves little free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import errors
from .._torch import is_operator
from .._torch.fakes import FakeTensor, FakeTensorMode
from .._torch.inductor import BackendError, on_fakes
from .._torch.tensors import each_tensor
from ..errors.text import doing
from ..memory.budget import Budget, Limit, bytes_meant, no_plan_fits
from ..memory.ledger import Place
from ..memory.operations import Operation
from ..plan.plan import Plan, Prediction
from ..planner.ops import Meta, Op, op_of
from ..planner.prices import Measured, prices_for
from ..simulation import Simulation, simulate_step, with_carried_state
from ..simulation.training_step import TrainingStep
from .choosing import Attempt, Chooser, approach
from .layers import fake_on
from .partition import Partition, Partitioned

TRIES = 3  # steps that are simulated, besides that without recomputation
PLENTY = 2**60

aten: Any = torch.ops.aten


class CompiledStep(NamedTuple):
    """A compiled step, simulated.

    Attributes:
        simulation: The step.
        graph: What was chosen for its graph.
        chooser: What chose it.
        ran: Its operations, kernels that inductor writes as copies of as many bytes, each with whether it is the
            optimizer's.
    """

    simulation: Simulation
    graph: Partitioned
    chooser: Chooser
    ran: list[tuple[Op, bool]]

    @property
    def peak_bytes(self) -> int:
        """The peak of the step."""
        return self.simulation.peak_bytes


def plan_compiled(step: TrainingStep, budget: Budget) -> Plan:
    """The plan of a compiled step; `make_plan` says the rest.

    Raises:
        ArgumentError: The model cannot be compiled as one graph here, or see `make_plan`.
        BudgetError: No choice fits.
    """
    if step.where.target:
        raise errors.ArgumentError(
            f"make_plan(compiled=True, device={step.device!r}): what inductor generates for {step.where.target} cannot "
            "be known on a machine without one.\n"
            "  Plan where the model runs, without device=; or leave compiled=True out: such plans hold in compiled "
            "models as well."
        )
    plain = _simulated(step, PLENTY)
    best, wanted = _searched(step, plain, budget)
    prediction = _promised(step, plain, best, wanted)
    plan = Plan((), f"a budget of {wanted.said}", prediction, graph_bytes=best.graph.budget_bytes)
    if best.peak_bytes > wanted:
        text = no_plan_fits(wanted.said, best.peak_bytes, plain.peak_bytes, best.simulation.advice)
        raise errors.BudgetError(text, best.peak_bytes, plan)
    return plan


def _searched(step: TrainingStep, plain: CompiledStep, budget: Budget) -> tuple[CompiledStep, Limit]:
    """The step that fits into a budget and repeats the least, of those that were tried; and the budget in bytes."""
    most, least = plain.peak_bytes, plain.graph.least_bytes
    rest = most - plain.graph.peak_bytes  # of the step, besides the graph: nearly the same for every choice
    wanted = bytes_meant(budget, lambda: min(most, rest + least), most, step.free_bytes)
    found, tried = [plain], [plain.chooser.choose(PLENTY).saved]

    def attempt(room: int) -> Attempt | None:
        saved = plain.chooser.choose(room).saved
        if saved in tried:
            return None
        tried.append(saved)
        found.append(_simulated(step, room))
        graph = found[-1].graph
        return Attempt(found[-1].peak_bytes - wanted, graph.peak_bytes, not graph.replay_flops)

    def worth(one: CompiledStep) -> tuple[int, int]:
        return (one.peak_bytes if one.peak_bytes > wanted else 0), one.graph.replay_flops

    if most > wanted:
        approach(attempt, wanted - rest, least, TRIES)
    best = min(found, key=worth)
    if best.peak_bytes > wanted:  # the least was counted in the graph, and a share begins at what it is
        smallest = best.peak_bytes
        wanted = bytes_meant(budget, lambda: smallest, most, step.free_bytes)
        best = min(found, key=worth)
    return best, wanted


def _promised(step: TrainingStep, plain: CompiledStep, best: CompiledStep, wanted: Limit) -> Prediction:
    """The prediction of a step, beside that without recomputation."""
    simulation, times = best.simulation, step.loop.accumulate
    price, reserved = prices_for(step, simulation.device), simulation.reserved_figures()
    seconds, without = (math.fsum(price(op) * (1 if once else times) for op, once in one.ran) for one in (best, plain))
    if isinstance(price, Measured):
        price.keep()
    return Prediction(
        budget_bytes=int(wanted),
        peak_bytes=best.peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
        step_seconds=seconds,
        plain_step_seconds=without,
        replay_flops=best.graph.replay_flops * times,
        bound_seconds=min(without, seconds),
        device=price.name,
        solver="minimum cuts of the compiled graph, chosen by the solver of plans",
        lines=(),
        timing="products and other calls one by one, fused kernels by the bytes that they read and write",
        loop=simulation.loop,
        advice=simulation.advice,
        reserved_bytes=reserved.get("reserved_bytes", 0),
        expandable_bytes=reserved.get("expandable_bytes", 0),
        budget=wanted.said,
        assumed=simulation.assumed,
        uncounted=simulation.uncounted,
    )


def _as_eager(ran: Operation) -> Operation:
    """An operation that a compiled graph calls as an eager step calls it: by itself, and not into a given buffer."""
    func, args, kwargs = ran.func, ran.args, ran.kwargs
    inner = next((place for place, x in enumerate(args) if is_operator(x)), None)
    if inner is not None:  # within one that keeps the state of random numbers
        func, args = args[inner], args[inner + 1 :]
    if "out" in kwargs:
        func, kwargs = getattr(func.overloadpacket, "default", func), {k: v for k, v in kwargs.items() if k != "out"}
    return ran if func is ran.func else Operation(func, args, kwargs, ran.out)


def _simulated(step: TrainingStep, allowed: int) -> CompiledStep:
    """Simulates the step with a graph that may allocate so many bytes."""
    doing("compiling the step, up to its kernels")
    partition = Partition(allowed, exact=False)
    ran: list[tuple[Op, bool]] = []

    def kernel(given: Sequence[Any]) -> None:
        """A kernel that inductor writes takes as long as a copy that moves as many bytes."""
        moved = sum({id(x): x.nbytes for x in given if isinstance(x, torch.Tensor)}.values())
        half = Meta((max(1, moved // 8),), (1,), torch.float32, next(iter(step.model.parameters())).device.type)
        ran.append((Op(aten.copy_.default, (half, half), (), (), 0), False))

    def watch(place: Place, operation: Operation) -> None:
        op = op_of(_as_eager(operation))
        if op is not None:
            ran.append((op, place.phase == "optimizer"))

    try:
        prepare = partial(_compile, options=partition.options, kernel=kernel)
        simulation = simulate_step(step, prepare=prepare, watch=watch)
    except BackendError as error:
        inner = getattr(error, "inner_exception", error)
        said = inner if isinstance(inner, errors.RecomputeError) else str(error).strip().partition("\n")[0]
        raise errors.ArgumentError(
            f"make_plan(compiled=True): {type(step.model).__name__} cannot be compiled as one graph: {said}\n"
            "  torch.compile(model, fullgraph=True) shows the line. Without compiled=True the plan's regions hold in "
            "compiled models as well, and around graph breaks."
        ) from error
    later = with_carried_state(step, simulation)
    if later is not None:
        return _simulated(later, allowed)
    assert partition.chooser is not None
    return CompiledStep(simulation, partition.graphs[-1], partition.chooser, ran)


def _compile(copy: nn.Module, options: dict[str, Any], kernel: Callable[[Sequence[Any]], None]) -> None:
    """Gives a copy without data the forward that inductor makes of its own."""
    compiled = on_fakes(copy.forward, options, kernel)
    tensors = (*copy.parameters(), *copy.buffers())
    fakes: Any = next((x.fake_mode for x in tensors if isinstance(x, FakeTensor)), FakeTensorMode())

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = each_tensor((args, kwargs), partial(fake_on, fakes))
        return compiled(*args, **kwargs)

    copy.forward = forward  # type: ignore[method-assign]
