"""The options of `python benchmarks/peers discard`, and which of them cannot be had here.

The published size is the default. Without CUDA nothing of that size is run: peaks are computed on tensors without
data, and times are taken on a copy in which d_model, d_ff and the sequence are divided by `scale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_recompute.errors import ArgumentError

from .blocks import BLOCKS, DTYPES

SCALE = 8
ITERS = 10


@dataclass(frozen=True)
class Config:
    """The size of the comparison; the defaults are the published one's."""

    n_layers: Sequence[int] = (1, 8)
    dtypes: Sequence[str] = ("fp32",)
    blocks: Sequence[str] = tuple(BLOCKS)
    iters: int = ITERS
    d_model: int = 2048
    d_ff: int = 8192
    batch: int = 2
    seq: int = 2048
    device: str | None = None
    scale: int | None = None

    @property
    def size(self) -> tuple[int, int, int, int]:
        """d_model, d_ff, batch, sequence length."""
        return self.d_model, self.d_ff, self.batch, self.seq

    @property
    def on(self) -> torch.device:
        """The device that is measured: by default CUDA where there is one."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def divisor(self) -> int:
        """What d_model, d_ff and the sequence of the timed copy are divided by: 1 on CUDA."""
        return 1 if self.on.type == "cuda" else self.scale or SCALE

    @property
    def timed_size(self) -> tuple[int, int, int, int]:
        """The size of what is timed."""
        d_model, d_ff, seq = (max(1, length // self.divisor) for length in (self.d_model, self.d_ff, self.seq))
        return d_model, d_ff, self.batch, seq

    def check(self) -> None:
        """Refuse what cannot run, and say what would."""
        for option, values in (
            ("--n-layers", self.n_layers),
            ("--iters", (self.iters,)),
            ("--d-model", (self.d_model,)),
            ("--d-ff", (self.d_ff,)),
            ("--batch", (self.batch,)),
            ("--seq", (self.seq,)),
            ("--scale", (1 if self.scale is None else self.scale,)),
        ):
            for value in values:
                if value < 1:
                    raise ArgumentError(
                        f"{option} is {value}; expected a whole number of at least 1. Write for example {option} 8"
                    )
        _known("--only", "block", self.blocks, tuple(BLOCKS))
        _known("--dtype", "dtype", self.dtypes, tuple(DTYPES))
        self._check_device()

    def _check_device(self) -> None:
        if self.device is not None:
            try:
                kind = torch.device(self.device).type
            except RuntimeError:
                kind = ""
            if kind not in ("cpu", "cuda"):
                raise ArgumentError(
                    f"--device is {self.device}; expected cpu, cuda or cuda:N. Leave it out to measure on CUDA where "
                    "there is one and compute where there is none."
                )
            if kind == "cuda" and not torch.cuda.is_available():
                raise ArgumentError(
                    f"--device is {self.device}, but torch {torch.__version__} sees no CUDA device here. Write "
                    "--device cpu: peaks are then computed at the full size, and a scaled-down copy is timed."
                )
            index = torch.device(self.device).index
            if kind == "cuda" and index is not None and index >= torch.cuda.device_count():
                raise ArgumentError(
                    f"--device is {self.device}, but there are {torch.cuda.device_count()} CUDA devices, counted from "
                    "0. Write --device cuda"
                )
        if self.scale is not None and self.on.type == "cuda":
            raise ArgumentError(
                f"--scale is {self.scale}, but on CUDA the full size is timed, so it would have no effect. Leave it "
                "out, or write --device cpu"
            )


def _known(option: str, what: str, asked: Sequence[str], known: Sequence[str]) -> None:
    for name in asked:
        if name not in known:
            raise ArgumentError(
                f"{option} names the {what} {name!r}, which is not known; expected one or more of {', '.join(known)}. "
                f"Write for example {option} {known[0]}"
            )
