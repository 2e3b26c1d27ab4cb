"""What the demonstration reads: real text that is on every machine, Python's own standard library.

Bytes are the vocabulary, so any file will do. The sources are taken in the order of their names and the batches are
drawn by a generator of their own, so that the same seed reads the same text.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ArgumentError
from .model import Config

CORPUS_BYTES = 4 * 2**20


def read_text(path: Path | None, seq: int) -> tuple[str, Tensor]:
    """The training text as bytes, and what to call it; by default the sources of Python's standard library."""
    if path is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        data = b""
        for source in sorted(folder.glob("*.py")):
            if len(data) >= CORPUS_BYTES:
                break
            data += source.read_bytes()
        name = "the Python standard library"
        mend = "This Python has no sources to read; pass a text: --text FILE"
    else:
        name = str(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ArgumentError(
                f"--text {path}: {reason}; expected a readable file. Any text will do, the model reads bytes; "
                "without --text it reads the Python standard library."
            ) from None
        mend = f"Pass a longer text, or write --seq {max(len(data) - 1, 1)} or less."
    if len(data) < seq + 1:
        raise ArgumentError(
            f"{name} has {len(data)} bytes; expected at least {seq + 1}, one more than a sequence (--seq {seq}). {mend}"
        )
    return name, torch.frombuffer(bytearray(data[:CORPUS_BYTES]), dtype=torch.uint8)


def batches(text: Tensor, config: Config) -> Iterator[tuple[int, Tensor]]:
    """Endless numbered batches, the same for the same seed."""
    generator = torch.Generator().manual_seed(config.seed)
    window = torch.arange(config.seq + 1)
    index = 0
    while True:
        starts = torch.randint(len(text) - config.seq, (config.batch, 1), generator=generator)
        yield index, text[starts + window].long()
        index += 1
