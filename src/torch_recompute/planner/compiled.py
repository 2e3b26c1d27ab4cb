"""A plan for the step of a model that `torch.compile` compiles as one graph.

The step is simulated as it will run: the model's copy without data is compiled with a `Partition`, up to the code that
inductor writes, and that code is what the simulated forward and backward call. So the loss, the batch, the gradients
and the optimizer are counted as in any plan, and the graph's own allocations as inductor orders them.

What is searched is one number, the bytes for which `Partition` chooses: what the whole step takes besides is nearly the
same for every choice, so the second or third step that is simulated fits and leaves little free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import errors
from .._text import doing
from .._torch import is_operator
from .._torch.fakes import FakeTensor, FakeTensorMode
from .._torch.inductor import BackendError, on_fakes
from .._torch.tensors import mapped
from ..compiling.choosing import Attempt, Chooser, approach
from ..compiling.partition import Partition, Partitioned
from ..memory.free import free_bytes
from ..memory.loop import Loop
from ..memory.operations import Operation
from ..plan.budget import no_plan_fits
from ..plan.plan import Plan, Prediction
from ..plan.solve import bytes_meant
from ..simulation import Simulation, simulate_step
from .ops import Meta, Op, op_of
from .prices import Measured, prices_for, where

TRIES = 3  # steps that are simulated, besides that without recomputation
PLENTY = 2**60

aten: Any = torch.ops.aten


class Step(NamedTuple):
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


def plan_compiled(
    model: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    budget: int | float | str,
    *,
    loss: Any,
    optimizer: Any,
    device: Any,
    loop: Loop,
) -> Plan:
    """The plan of a compiled step; `make_plan` says the rest.

    Raises:
        ArgumentError: The model cannot be compiled as one graph here, or see `make_plan`.
        BudgetError: No choice fits.
    """
    place = where(device, model)
    if place.composed:
        raise errors.ArgumentError(
            f"make_plan(compiled=True, device={device!r}): what inductor generates for {place.composed} cannot be "
            "known on a machine without one.\n"
            "  Plan where the model runs, without device=; or leave compiled=True out: such plans hold in compiled "
            "models as well."
        )
    how: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "loop": loop, **place.step}

    plain = _step(model, call, how, PLENTY)
    most = plain.simulation.peak_bytes
    rest = most - plain.graph.peak_bytes  # of the step, besides the graph: nearly the same for every choice
    free = partial(free_bytes, model, plain.simulation.device, optimizer, call)
    wanted = bytes_meant(budget, lambda: min(most, rest + plain.graph.least_bytes), most, free)
    found, tried = [plain], [plain.chooser.choose(PLENTY).saved]

    def attempt(room: int) -> Attempt | None:
        saved = plain.chooser.choose(room).saved
        if saved in tried:
            return None
        tried.append(saved)
        found.append(_step(model, call, how, room))
        graph = found[-1].graph
        return Attempt(found[-1].simulation.peak_bytes - wanted, graph.peak_bytes, not graph.replay_flops)

    if most > wanted:
        approach(attempt, wanted - rest, plain.graph.least_bytes, TRIES)

    def worth(one: Step) -> tuple[int, int]:
        peak = one.simulation.peak_bytes
        return (peak if peak > wanted else 0), one.graph.replay_flops

    best = min(found, key=worth)
    smallest = best.simulation.peak_bytes
    if smallest > wanted:  # the least was counted in the graph, and a share begins at what it is
        wanted = bytes_meant(budget, lambda: smallest, most, free)
        best = min(found, key=worth)
    peak = best.simulation.peak_bytes
    price = place.roofline or prices_for(model, best.simulation.device)
    seconds, without = (
        math.fsum(price(op) * (1 if once else loop.accumulate) for op, once in one.ran) for one in (best, plain)
    )
    if isinstance(price, Measured):
        price.keep()
    prediction = Prediction(
        budget_bytes=int(wanted),
        peak_bytes=peak,
        plain_peak_bytes=most,
        step_seconds=seconds,
        plain_step_seconds=without,
        replay_flops=best.graph.replay_flops * loop.accumulate,
        bound_seconds=min(without, seconds),
        device=price.name,
        solver="minimum cuts of the compiled graph, chosen by plan/solve.py",
        lines=(),
        timing="products and other calls one by one, fused kernels by the bytes that they read and write",
        loop=best.simulation.loop,
        advice=best.simulation.advice,
        budget=wanted.said,
        assumed=best.simulation.assumed,
        uncounted=best.simulation.uncounted,
    )
    plan = Plan((), f"a budget of {wanted.said}", prediction, graph_bytes=best.graph.budget_bytes)
    if peak > wanted:
        raise errors.BudgetError(no_plan_fits(wanted.said, peak, most, best.simulation.advice), peak, plan)
    return plan


def _as_eager(ran: Operation) -> Operation:
    """An operation that a compiled graph calls as an eager step calls it: by itself, and not into a given buffer."""
    func, args, kwargs = ran.func, ran.args, ran.kwargs
    inner = next((place for place, x in enumerate(args) if is_operator(x)), None)
    if inner is not None:  # within one that keeps the state of random numbers
        func, args = args[inner], args[inner + 1 :]
    if "out" in kwargs:
        func, kwargs = getattr(func.overloadpacket, "default", func), {k: v for k, v in kwargs.items() if k != "out"}
    return ran if func is ran.func else Operation(func, args, kwargs, ran.out)


def _step(model: nn.Module, call: Any, how: dict[str, Any], allowed: int) -> Step:
    """Simulates the step with a graph that may allocate so many bytes."""
    doing("compiling the step, up to its kernels")
    partition = Partition(allowed, exact=False)
    ran: list[tuple[Op, bool]] = []

    def kernel(given: Sequence[Any]) -> None:
        """A kernel that inductor writes takes as long as a copy that moves as many bytes."""
        moved = sum({id(x): x.nbytes for x in given if isinstance(x, torch.Tensor)}.values())
        half = Meta((max(1, moved // 8),), (1,), torch.float32, next(iter(model.parameters())).device.type)
        ran.append((Op(aten.copy_.default, (half, half), (), (), 0), False))

    def watch(phase: str, operation: Operation) -> None:
        op = op_of(_as_eager(operation))
        if op is not None:
            ran.append((op, phase == "optimizer"))

    def prepare(copy: nn.Module) -> None:
        compiled = on_fakes(copy.forward, partition.options, kernel)
        tensors = (*copy.parameters(), *copy.buffers())
        fakes: Any = next((x.fake_mode for x in tensors if isinstance(x, FakeTensor)), FakeTensorMode())

        def forward(*args: Any, **kwargs: Any) -> Any:
            def fake(x: Any) -> Any:
                return x if isinstance(x, FakeTensor) else fakes.from_tensor(x)

            args, kwargs = mapped((args, kwargs), fake)
            return compiled(*args, **kwargs)

        copy.forward = forward  # type: ignore[method-assign]

    try:
        simulation = simulate_step(model, *call, prepare=prepare, watch=watch, **how)
    except BackendError as error:
        inner = getattr(error, "inner_exception", error)
        said = inner if isinstance(inner, errors.RecomputeError) else str(error).strip().partition("\n")[0]
        raise errors.ArgumentError(
            f"make_plan(compiled=True): {type(model).__name__} cannot be compiled as one graph: {said}\n"
            "  torch.compile(model, fullgraph=True) shows the line. Without compiled=True the plan's regions hold in "
            "compiled models as well, and around graph breaks."
        ) from error
    assert partition.chooser is not None
    return Step(simulation, partition.graphs[-1], partition.chooser, ran)
