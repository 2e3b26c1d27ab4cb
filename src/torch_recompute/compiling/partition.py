"""A partitioner for `torch.compile` that keeps each graph within a budget in bytes.

Inductor hands the joint graph of forward and backward to `options={"custom_partitioner_fn": ...}`. `Chooser` decides
what to save; the answer is written onto the nodes as tags, and torch's own partitioner splits the graph by them. What
that finds besides (something smaller to save, a saved value that nothing reads) only makes less of it.

`Chooser` counts in the graph, which says what is computed. Inductor decides in which order, which operations share a
kernel and a buffer, and when a buffer is freed. So its code for the two halves is run on tensors without data, with
allocation tracking on (`peak_of`), and where that is more than the budget, or much less, another choice is made. No
kernel is compiled for it: that is most of a compiler's time.

A graph that comes from AOTAutograd's cache is not partitioned again: the key has the budget, so it is the same answer,
but there are no figures of it here.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .. import errors
from .._torch.fakes import FakeTensorMode
from .._torch.inductor import generated, in_order, no_modes
from .._torch.partitioning import CustomPartitionerFn, hint, outputs_of, read_copies_of_written, split, tag
from ..errors.text import counted, table
from ..memory.budget import Budget, Limit, bytes_meant, read_budget
from ..plan.apply import apply
from ..plan.plan import Plan
from ..simulation.fake_mode import FakeMode
from ..simulation.recording import SimulatedMeasurement
from .choosing import Attempt, Chooser, GraphChoice, approach
from .joint import Joint

VERSION = 4  # of the choice, in the key of the cache
TRIES = 3  # choices whose code is generated


class _SplitGraph:
    """A joint graph that inductor gives to be split; the arguments are those of a partitioner."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[object], more: dict[str, Any]) -> None:
        self._gm, self._inputs, self._more = gm, inputs, more
        read_copies_of_written(gm.graph)
        self.joint = Joint(gm.graph, more["num_fwd_outputs"])

    def _marked(self, chosen: GraphChoice) -> fx.GraphModule:
        joint = self.joint
        kept = {key for key, number in joint.index.items() if number in chosen.saved}
        tag(self._gm.graph, joint.backward, kept, {joint.operations[number].node for number in chosen.lives.again})
        return self._gm

    def split(self, chosen: GraphChoice) -> Any:
        """The forward and the backward with a choice."""
        return split(self._marked(chosen), self._inputs, **self._more)

    def peak_with(self, chosen: GraphChoice) -> int:
        """The peak of the code that inductor writes for a choice, with the graphs of all layers."""
        halves = split(copy.deepcopy(self._marked(chosen)), self._inputs, **self._more)
        return peak_of(*halves, self._more["num_fwd_outputs"]) + chosen.peak - chosen.lives.peak


class Partitioned(NamedTuple):
    """The choice for one graph. Bytes are those that its forward and backward allocate, in all layers like it.

    Attributes:
        budget_bytes: The most bytes that were allowed.
        peak_bytes: The most bytes alive at any time, as predicted.
        plain_peak_bytes: The same where nothing is run again but what other kernels take in, counted in the graph.
        least_bytes: The same of the choice that needs the least.
        saved_bytes: What backward keeps from the forward, in one layer.
        replay_flops: FLOPs of what backward runs again.
        counted: Where `peak_bytes` was counted: in "the code" that inductor writes, or in "the graph", which is less
            exact.
    """

    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    least_bytes: int
    saved_bytes: int
    replay_flops: int
    counted: str


class Partition(CustomPartitionerFn):
    """Keeps what `torch.compile` compiles within a budget, with the least FLOPs run again.

        partition = Partition(budget="2GiB")
        model = torch.compile(model, options=partition.options)
        train_step()
        print(partition)

    In the place of `torch._functorch.config.activation_memory_budget`, which knows shares only. Here the predicted peak
    is at most the bytes that were allowed, and dropout masks are those of the forward.

    Counted is what a compiled forward and backward allocate: what is saved, what operations make, the gradients that
    are returned. Parameters, the batch and the optimizer are not. Each graph has the whole budget: compile the whole
    model for a budget in bytes, or say how many `layers` are compiled one by one; after graph breaks use a share.

    Args:
        budget: Bytes, "2GiB", or a share between 0 and 1 of the way from the least that any choice needs to what the
            graph takes when nothing is run again. Or a plan of `make_plan(compiled=True)`.
        exact: Whether each choice is counted in the code that inductor writes for it, which takes as long as a compile
            without its kernels. Without, the predicted peak is that of the graph, and may be a tenth too low.
        layers: How many graphs like each there are, where layers are compiled one by one (`layer.compile()`): what one
            saves is then alive as many times. The budget is for all of them; what they pass on is not counted.

    Attributes:
        graphs: What was chosen for each graph that this process has compiled, in order.
        chooser: What chose for the last of them.

    Raises:
        ArgumentError: The budget is none of these, the plan is not for a compiled graph, or `layers` is no number of
            layers.
    """

    def __init__(self, budget: Plan | int | float | str, *, exact: bool = True, layers: int = 1) -> None:
        if not isinstance(layers, int) or layers < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise errors.ArgumentError(
                f"Partition(layers={layers!r}): how many layers are compiled one by one is a number from 1 up.\n"
                "  Write layers=len(model.layers), or leave it out where the whole model is compiled."
            )
        if isinstance(budget, Plan):
            if budget.graph_bytes is None:
                raise errors.ArgumentError(
                    f"Partition was given a plan of {counted(len(budget), 'region')}, which speaks of modules and not "
                    "of a compiled graph.\n"
                    "  Write apply(model, plan) and then torch.compile(model), or make_plan(..., compiled=True)."
                )
            budget, exact = budget.graph_bytes, False  # its step was simulated with the choice for these bytes
        self._budget, self._exact, self._layers = read_budget(budget), exact, layers
        self.graphs: list[Partitioned] = []
        self.chooser: Chooser | None = None
        if self._budget == Budget():
            raise errors.ArgumentError(
                'budget="fit" means what the device has free when a step begins, and a graph is compiled within one.\n'
                '  Write the bytes that the step may allocate, budget="24GiB", or a share, budget=0.4.'
            )

    @property
    def options(self) -> dict[str, Any]:
        """For `torch.compile(options=...)`, alone or with others.

        Kernels that only read the same are not joined: inductor would join what it runs again of several layers, which
        would then be alive together (at 0.01 of a Llama's budget the peak was 1.3 times as high). And kernels stay in
        the order of the graph, see `InOrder`.
        """
        return {"custom_partitioner_fn": self, "score_fusion_memory_threshold": 2**31, **in_order()}

    def uuid(self) -> str:
        """The part of the caches' keys that is about this."""
        return f"torch_recompute.Partition {VERSION} {self._budget} {self._exact} {self._layers}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Partition:
        return self  # inductor copies its options

    def __reduce__(self) -> Any:
        return str, (self.uuid(),)  # ... and pickles them, for a key

    def __call__(self, gm: Any, joint_inputs: Sequence[object], **more: Any) -> Any:
        """Splits a joint graph; called by inductor.

        Raises:
            BudgetError: No choice for this graph fits.
            RecomputeError: The graph cannot be read.
        """
        count = len(gm.graph.nodes)
        try:
            graph = _SplitGraph(gm, joint_inputs, more)
            chooser = self.chooser = Chooser(graph.joint, self._layers)
            least = chooser.least
        except Exception as error:
            raise errors.RecomputeError(
                f"Partition cannot read a graph of {count} operations: {type(error).__name__}: {error}.\n"
                "  Compile without options=partition.options, or leave what is unusual out of what is compiled."
            ) from error
        plain = max(chooser.plain.peak, least)
        allowed = bytes_meant(self._budget, lambda: least, plain, None)
        found = self._tried(graph, chooser, allowed) if self._exact else []
        words = "the code" if found else "the graph"
        if not found:
            chosen = chooser.choose(max(allowed, least))
            found.append((chosen.peak, chosen))
        fitting = [one for one in found if one[0] <= allowed or self._budget.bytes is None]
        if not fitting:
            least = min(peak for peak, _ in found)
            beside = "" if self._layers == 1 else f", {self._layers} times,"
            raise errors.BudgetError(
                f"a graph of {count} operations{beside} needs at least {errors.size(least)}, but "
                f"budget={allowed.said} allows less. Without a budget it takes {errors.size(plain)}.\n"
                f'  Pass budget="{least}B" or more, or a smaller batch. Parameters and optimizer are not counted.',
                least,
                None,
            )
        peak, chosen = min(fitting, key=lambda one: (one[1].flops, one[0]))
        self.graphs.append(Partitioned(allowed, peak, plain, least, chosen.lives.saved, chosen.flops, words))
        return graph.split(chosen)

    def _tried(self, graph: _SplitGraph, chooser: Chooser, allowed: Limit) -> list[tuple[int, GraphChoice]]:
        """Choices, with the peaks of the code that inductor writes for them; none where that cannot be counted."""
        found: list[tuple[int, GraphChoice]] = []

        def attempt(room: int) -> Attempt | None:
            chosen = chooser.choose(room)
            if any(chosen.saved == before.saved for _, before in found):
                return None
            try:
                found.append((graph.peak_with(chosen), chosen))
            except Exception as error:
                warnings.warn(
                    "the peak of a Partition is counted in the graph, since what inductor writes for it cannot be: "
                    f"{type(error).__name__}: {error}. It may be a tenth too low.",
                    stacklevel=2,
                )
                return None
            return Attempt(found[-1][0] - allowed, chosen.peak, not chosen.flops)

        approach(attempt, allowed, chooser.least, TRIES if self._budget.bytes is not None else 1)
        return found

    def __repr__(self) -> str:
        if not self.graphs:
            return "<partition: no graph was compiled yet, or all came from the cache of compiled graphs>"
        rows = [
            ["graph", "budget", "predicted peak", "saved", "run again", "without a budget", "the least", "counted in"]
        ]
        for number, one in enumerate(self.graphs):
            peaks = map(errors.size, (one.budget_bytes, one.peak_bytes, one.saved_bytes))
            ends = map(errors.size, (one.plain_peak_bytes, one.least_bytes))
            rows.append([str(number), *peaks, f"{one.replay_flops / 1e9:.3f} GFLOP", *ends, one.counted])
        return "\n".join(table(rows))


def peak_of(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> int:
    """The most bytes alive at any time of a forward and its backward, besides what they are given.

    Args:
        forward: The graph of the forward.
        backward: That of the backward.
        outputs: How many of the forward's outputs its caller sees, and holds until backward has ended.

    Raises:
        Exception: Inductor cannot generate code for this device on this machine, or code of another kind.
    """
    compiled = generated(forward, backward=False), generated(backward, backward=True)
    fakes = FakeTensorMode()
    with no_modes():
        given = {node.name: _like(node, fakes) for node in forward.graph.find_nodes(op="placeholder")}
        device = next(
            (x.device for x in given.values() if isinstance(x, torch.Tensor) and x.device.type != "cpu"), None
        )
        pretend = FakeMode(fakes, str)
        memory = SimulatedMeasurement(device or torch.device("cpu"), pretend)
        with pretend, memory:
            made = [*compiled[0]([*given.values()])]
            names = [node.name if isinstance(node, fx.Node) else "" for node in outputs_of(forward.graph)]
            given.update(zip(names[outputs:], made[outputs:], strict=True))
            del made[outputs:]
            wanted = backward.graph.find_nodes(op="placeholder")
            there = [given[node.name] if node.name in given else _like(node, fakes) for node in wanted]
            given.clear()
            compiled[1](there)
        return memory.peak_bytes


def _like(node: fx.Node, fakes: FakeTensorMode) -> Any:
    """An argument of a graph, as a tensor without data."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return hint(value) if isinstance(value, torch.SymInt) else value
    with fakes:
        size, stride = (tuple(map(hint, counts)) for counts in (value.shape, value.stride()))
        return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)


def compile(model: nn.Module, plan: Plan, *, options: dict[str, Any] | None = None, **how: Any) -> Any:
    """Compiles a model with a plan.

    A plan that speaks of modules is applied, and the model compiled. One of `make_plan(compiled=True)` is given to
    inductor; the model stays as it is. Neither changes what `torch.compile` is: this is two lines in one.

    Args:
        model: The model.
        plan: The plan.
        options: As for `torch.compile`.
        **how: As for `torch.compile`.

    Returns:
        What `torch.compile` returns.

    Raises:
        ArgumentError: See `apply`.
    """
    if plan.graph_bytes is None:
        apply(model, plan)
        return torch.compile(model, options=options, **how)
    return torch.compile(model, options={**Partition(plan).options, **(options or {})}, **how)
