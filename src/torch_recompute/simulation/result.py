"""What `simulate` returns: the figures of a step as plain data, and a table a person can read."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Moment(NamedTuple):
    """One point of a simulated timeline: the bytes alive right after an operation that changed them.

    Attributes:
        event: The number of the operation in the step.
        op: The operation, as `aten.gelu.default`.
        live_bytes: The bytes alive after it.
        phase: "forward", "loss", "backward", "replay" or "optimizer".
        module: Path of the module that ran it, or whose backward it belongs to; "" for none and for the model itself.
    """

    event: int
    op: str
    live_bytes: int
    phase: str
    module: str


class Simulation(NamedTuple):
    """The figures of a simulated step, all in bytes but for the FLOPs; made by `simulate`. `print` shows a table.

    Attributes:
        device: The device that the figures are of.
        peak_bytes: The most bytes alive after any one operation, or when the step began.
        live_bytes: The bytes alive after the step.
        by_category: `peak_bytes`, split as `measure` splits it; every category is there, and they sum to it.
        live_by_category: `live_bytes`, split in the same way.
        timeline: The bytes alive when the step began, and after each operation that changed them.
        peak: The moment of the peak: its phase, module and operation.
        peak_by_module: The activations alive at the peak, by path of the module that made them.
        saved_bytes: The activations alive when the (last) backward begins.
        saved_by_module: `saved_bytes`, by path of the module that made them.
        flops: FLOPs of products by phase, by PyTorch's own count; those of "replay" are what recomputation costs.
        rounding: What each storage's size was rounded up to a multiple of.
        assumed: What the simulation could not know and has assumed, in words.
        advice: What else would help, in words; "" where nothing is to be said.
    """

    device: torch.device
    peak_bytes: int
    live_bytes: int
    by_category: dict[str, int]
    live_by_category: dict[str, int]
    timeline: tuple[Moment, ...]
    peak: Moment
    peak_by_module: dict[str, int]
    saved_bytes: int
    saved_by_module: dict[str, int]
    flops: dict[str, int]
    rounding: int
    assumed: tuple[str, ...]
    advice: str
