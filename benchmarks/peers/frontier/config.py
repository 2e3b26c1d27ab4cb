"""The options of `python benchmarks/peers frontier`, and which of them cannot be had here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_recompute.errors import ArgumentError
from torch_recompute.planner.ops import Op
from torch_recompute.simulation.devices import Roofline

from .models import HEAD, MODELS
from .models.convnext import FINEST

WIDTHS = 2 * HEAD
"""The width is a multiple of it: of two heads, which a Llama's keys share one of."""


class Counted(Roofline):
    """FLOPs as PyTorch counts them, which is how every way of the comparison is counted."""

    def __call__(self, op: Op) -> float:
        """A second for 1e12 of them; bytes decide between what has as many."""
        return max(op.flops / 1e12, op.bytes / self.bytes_per_second) + self.launch


PRICES = {"measured": None, "flops": Counted("counting FLOPs", {1: 1e12}, 1e18, 1e-12)}
"""What our planner counts as cost: what the operations take here, or FLOPs, bytes only where FLOPs are equal."""


@dataclass(frozen=True)
class Config:
    """The size of the comparison, and what our planner is to spare."""

    model: str = "gpt"
    layers: int = 8
    width: int = 128
    tokens: int = 256
    batch: int = 4
    dropout: float = 0.1
    rounds: int = 5
    price: str = "measured"

    def check(self) -> None:
        """Refuse what cannot run, and say what would."""
        for name in ("layers", "width", "tokens", "batch", "rounds"):
            if getattr(self, name) < 1:
                raise ArgumentError(
                    f"--{name} is {getattr(self, name)}; expected a whole number of at least 1. Write for example "
                    f"--{name} {getattr(Config, name)}"
                )
        if not 0 <= self.dropout < 1:
            raise ArgumentError(
                f"--dropout is {self.dropout:g}; expected a probability from 0 to below 1. Write for example --dropout "
                f"{Config.dropout}"
            )
        for name, known in (("model", MODELS), ("price", PRICES)):
            if getattr(self, name) not in known:
                raise ArgumentError(
                    f"--{name} is {getattr(self, name)}; expected one of {', '.join(known)}. Write for example "
                    f"--{name} {getattr(Config, name)}"
                )
        side = math.isqrt(self.tokens)
        if self.model == "convnext" and (side**2 != self.tokens or side % FINEST):
            near = max(1, round(side / FINEST)) * FINEST
            raise ArgumentError(
                f"--tokens is {self.tokens}; expected the square of a multiple of {FINEST} for convnext, because they "
                f"are the patches of a square picture, halved {FINEST.bit_length() - 1} times. Write --tokens {near**2}"
            )
        if self.width % WIDTHS:
            above = self.width + WIDTHS - self.width % WIDTHS
            raise ArgumentError(
                f"--width is {self.width}; expected a multiple of {WIDTHS}, because an attention head has {HEAD} and "
                f"a Llama's heads share keys by two. Write --width {above}"
            )
