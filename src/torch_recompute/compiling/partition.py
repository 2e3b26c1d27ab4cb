"""A partitioner for `torch.compile` that keeps each graph within a budget in bytes.

Inductor hands the joint graph of forward and backward to `options={"custom_partitioner_fn": ...}`. `Chooser` decides
what to save; the answer is written onto the nodes as tags, and torch's own partitioner splits the graph by them. What
that finds besides (something smaller to save, a saved value that nothing reads) only makes less of it.

A graph that comes from AOTAutograd's cache is not partitioned again: the key has the budget, so it is the same answer,
but there are no figures of it here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import errors
from .._text import table
from .._torch.partitioning import CustomPartitionerFn, split, tag
from ..plan.budget import Budget, read_budget
from ..plan.solve import bytes_meant
from .choosing import Chooser
from .joint import Joint

VERSION = 1  # of the choice, in the key of the cache


class Partitioned(NamedTuple):
    """What was chosen for one graph. Bytes are those that its forward and backward allocate.

    Attributes:
        budget_bytes: The most bytes that were allowed.
        peak_bytes: The most bytes alive at any time, as predicted.
        plain_peak_bytes: The same where nothing is run again but what other kernels take in.
        least_bytes: The same of the choice that needs the least.
        saved_bytes: What backward keeps from the forward.
        replay_flops: FLOPs of what backward runs again.
    """

    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    least_bytes: int
    saved_bytes: int
    replay_flops: int


class Partition(CustomPartitionerFn):
    """Keeps what `torch.compile` compiles within a budget, with the least FLOPs run again.

        partition = Partition(budget="2GiB")
        model = torch.compile(model, options=partition.options)
        train_step()
        print(partition)

    In the place of `torch._functorch.config.activation_memory_budget`, which knows shares only. Here a smaller budget
    never has a higher predicted peak, and dropout masks are those of the forward.

    Counted is what a compiled forward and backward allocate: what is saved, what operations make, the gradients that
    are returned. Parameters, the batch and the optimizer are not. Each graph has the whole budget: compile the whole
    model for a budget in bytes; for layers that are compiled one by one, or after graph breaks, use a share.

    Args:
        budget: Bytes, "2GiB", or a share between 0 and 1 of the way from the least that any choice needs to what the
            graph takes when nothing is run again.

    Attributes:
        graphs: What was chosen for each graph that this process has compiled, in order.

    Raises:
        ArgumentError: The budget is none of these.
    """

    def __init__(self, budget: int | float | str) -> None:
        self._budget = read_budget(budget)
        self.graphs: list[Partitioned] = []
        if self._budget == Budget():
            raise errors.ArgumentError(
                'budget="fit" means what the device has free when a step begins, and a graph is compiled within one.\n'
                '  Write the bytes that the step may allocate, budget="24GiB", or a share, budget=0.4.'
            )

    @property
    def options(self) -> dict[str, Any]:
        """For `torch.compile(options=...)`, alone or with others.

        Kernels that only read the same are not joined: inductor would join what it runs again of several layers, which
        would then be alive together (at 0.01 of a Llama's budget the peak was 1.3 times as high).
        """
        return {"custom_partitioner_fn": self, "score_fusion_memory_threshold": 2**31}

    def uuid(self) -> str:
        """The part of the caches' keys that is about this."""
        return f"torch_recompute.Partition {VERSION} {self._budget}"

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
            joint = Joint(gm.graph, more["num_fwd_outputs"])
            chooser = Chooser(joint)
            least = chooser.least
        except Exception as error:
            raise errors.RecomputeError(
                f"Partition cannot read a graph of {count} operations: {type(error).__name__}: {error}.\n"
                "  Compile without options=partition.options, or leave what is unusual out of what is compiled."
            ) from error
        plain = max(chooser.plain.peak, least)
        allowed = bytes_meant(self._budget, lambda: least, plain, None)
        if allowed < least:
            raise errors.BudgetError(
                f"a graph of {count} operations needs at least {errors.size(least)}, but budget={allowed.said} "
                f"allows less. Without a budget it takes {errors.size(plain)}.\n"
                f"  Pass budget={least} or more, or a smaller batch. Parameters and optimizer are not counted.",
                least,
                None,
            )
        chosen = chooser.choose(allowed)
        kept = {key for key, number in joint.index.items() if number in chosen.saved}
        tag(gm.graph, joint.backward, kept, {joint.operations[number].node for number in chosen.lives.again})
        figures = (chosen.lives.peak, plain, least, chosen.lives.saved, chosen.flops)
        self.graphs.append(Partitioned(allowed, *figures))
        return split(gm, joint_inputs, **more)

    def __repr__(self) -> str:
        if not self.graphs:
            return "<partition: no graph was compiled yet, or all came from the cache of compiled graphs>"
        rows = [["graph", "budget", "predicted peak", "saved", "run again", "without a budget", "the least"]]
        for number, one in enumerate(self.graphs):
            peaks = map(errors.size, (one.budget_bytes, one.peak_bytes, one.saved_bytes))
            ends = map(errors.size, (one.plain_peak_bytes, one.least_bytes))
            rows.append([str(number), *peaks, f"{one.replay_flops / 1e9:.3f} GFLOP", *ends])
        return "\n".join(table(rows))
