"""The result of `simulate`: the figures of a step as plain data, and a table a person can read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import size
from ..errors.text import grouped, shown, starred_path, table
from ..memory.ledger import Block, Place
from ..memory.loop import Loop
from ..memory.reserved import Reserved, in_words, reserved
from ..memory.snapshot import write_snapshot


class Moment(NamedTuple):
    """One point of a simulated timeline: the bytes alive right after an operation that changed them.

    An operation with a workspace has two points: one with it, and one after it was given back.

    Attributes:
        event: The number of the operation in the step.
        op: The operation, as `aten.gelu.default`; "" where a workspace was given back.
        live_bytes: Alive after it, its workspace included.
        phase: "forward", "loss", "backward", "replay" or "optimizer".
        module: Path of the module that ran it, or whose backward it belongs to; "" for the model itself and for none.
        calls: The path and the number of the call, of that module and those around it.
    """

    event: int
    op: str
    live_bytes: int
    phase: str
    module: str
    calls: tuple[tuple[str, int], ...] = ()


@shown
class Simulation(NamedTuple):
    """The figures of a simulated step, all in bytes except for the FLOPs; made by `simulate`. `print` shows a table.

    Attributes:
        device: The device that the figures are of.
        peak_bytes: The most bytes alive at any one operation, workspaces included, or when the step began.
        live_bytes: The bytes alive after the step.
        by_category: `peak_bytes`, split as `measure` splits it; every category is there, and they sum to it. "other" is
            the batch, and in forward the output that the step before has left.
        activations_by_use: The activations among `by_category`, split: "saved" by a forward for its backward, of the
            "loss", which are made by it or as wide as the logits, and "transient", which is all else: gradients of
            activations, what a replay makes, workspaces; on a rank that shards the model also "fully_shard": gathered
            weights, and buffers of reductions.
        live_by_category: `live_bytes`, split as `by_category`.
        timeline: The bytes alive when the step began, and after each operation that changed them; with accumulation,
            of the last forward and backward.
        blocks: What lay in memory: each storage with its category, its bytes, who made it, and from which event to
            which it was alive; those alive after an event sum to the timeline there.
        operations: Every operation of the step in order, also those that changed nothing in memory.
        peak: The moment of the peak: its phase, module and operation.
        peak_by_module: The activations alive at the peak, by path of the module that made them.
        saved_bytes: The activations alive when the (last) backward begins.
        saved_by_module: `saved_bytes`, by path of the module that made them.
        flops: FLOPs of products by phase, by PyTorch's own count, of all that is accumulated; those of "replay" are
            what recomputation costs.
        rounding: What each storage's size was rounded up to a multiple of.
        assumed: What the simulation could not know and has assumed, in words.
        uncounted: Which operations take something that is not known and could raise the peak by over 0.5 %, in words;
            "" for none.
        logits_bytes: The activations alive at the peak that the loss made of the logits and that are as large: the
            logits are the result of the last product, where that is wider than its input.
        advice: What else would help, in words; "" where nothing is to be said.
        loop: The training loop that the figures are of, with what was seen of it.
        host_bytes: The most that the optimizer had in host memory, beside a device by its data sheet.
        on_cuda: Whether the step runs on a CUDA device, at hand or by its data sheet.
    """

    device: torch.device
    peak_bytes: int
    live_bytes: int
    by_category: dict[str, int]
    activations_by_use: dict[str, int]
    live_by_category: dict[str, int]
    timeline: tuple[Moment, ...]
    blocks: tuple[Block, ...]
    operations: tuple[Place, ...]
    peak: Moment
    peak_by_module: dict[str, int]
    saved_bytes: int
    saved_by_module: dict[str, int]
    flops: dict[str, int]
    rounding: int
    assumed: tuple[str, ...]
    uncounted: str
    logits_bytes: int
    advice: str
    loop: Loop
    host_bytes: int = 0
    on_cuda: bool = False

    def reserved(self, expandable: bool = False, limit: int | None = None) -> Reserved:
        """Returns what PyTorch's CUDA allocator reserves for such steps: the peak, and what is free in its segments.

            simulate(model, (batch,), optimizer="adamw", device="h100").reserved().reserved_bytes

        Out of memory is a device on which that is more than there is. Sizes that vary from step to step, and memory
        from before the model, leave holes that are not counted.

        Args:
            expandable: Whether `PYTORCH_ALLOC_CONF=expandable_segments:True` is set.
            limit: The most bytes that it may reserve: what the device has for this process, without its context.
        """
        return reserved(self.blocks, expandable, limit)

    def reserved_figures(self) -> dict[str, int]:
        """The bytes that are reserved without and with expandable segments, as plans have them; none but on CUDA."""
        ways = {"reserved_bytes": False, "expandable_bytes": True} if self.on_cuda else {}
        return {name: self.reserved(expandable).reserved_bytes for name, expandable in ways.items()}

    def to_snapshot(self, path: Path | str) -> None:
        """Writes the step for the viewer of allocations at https://pytorch.org/memory_viz.

            simulate(model, (batch,)).to_snapshot("step.pickle")

        Bytes are coloured by category, and show which module made them, in which phase. The segments are made up: one
        for each tensor's memory, as if by an allocator that keeps nothing.

        Args:
            path: The file, a pickle in the form of `torch.cuda.memory._snapshot()`.

        Raises:
            OSError: It cannot be written.
        """
        write_snapshot(Path(path), self.blocks, self.device.index or 0)

    def __str__(self) -> str:
        where = f" of {self.peak.module}" if self.peak.module else ""
        lines = [
            f"peak {size(self.peak_bytes)} on {self.device}, in {self.peak.phase}{where} ({self.peak.op})"
            + (f"; {self.uncounted}" if self.uncounted else ""),
            *_sums([*self.by_category.items(), *((f"  {use}", n) for use, n in self.activations_by_use.items())]),
            f"counted: {self.loop}",
            f"not counted: {self.loop.not_counted}",
            *([f"reserved: {in_words(*self.reserved_figures().values())}"] if self.on_cuda else []),
            f"kept for backward {size(self.saved_bytes)}",
            *_sums(_grouped(self.saved_by_module)[:_LINES]),
            "FLOPs of products: " + ", ".join(f"{name} {count:.4g}" for name, count in self.flops.items() if count),
            *(f"assumed: {words}" for words in self.assumed[:_LINES]),
        ]
        return "\n".join([*lines, *filter(None, [self.advice])])


_LINES = 12


def _grouped(sums: dict[str, int]) -> list[tuple[str, int]]:
    """Sums by path, with those that differ only in numbers as one."""
    groups = grouped(sums, lambda path: starred_path(path) or "(the model itself, the loss)")
    named = [
        (f"{pattern}  ({len(paths)} modules)" if len(paths) > 1 else pattern, sum(sums[path] for path in paths))
        for pattern, paths in groups.items()
    ]
    return sorted(named, key=lambda item: -item[1])


def _sums(sums: Iterable[tuple[str, int]]) -> list[str]:
    return [f"  {line}" for line in table([(size(nbytes), name) for name, nbytes in sums if nbytes], right=1)]
