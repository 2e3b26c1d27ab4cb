"""Strides and bits of saved tensors, for `check="values"`.

Some operations save a buffer that their kernel fills only afterwards (RReLU's noise), so a tensor that requires no
grad is read when the next operation saves something, or when the run ends. One that has been changed by then (running
statistics) is skipped, and so is what kernels save without writing to it, where it requires no grad: bytes are
workspaces (cuDNN and oneDNN RNNs), of which parts are never written; uint64 and single int64 are seed and offset of
fused attention on CUDA, which are written only if there is dropout. So a single integer that a region decides by
(`x[i]`) is not compared itself; what it selects is.
"""

from __future__ import annotations

import torch

from . import _compat, _tree, errors
from ._compat import version_of
from ._compat.capture import capturing


class Fingerprints:
    """Those of one run, by position."""

    def __init__(self) -> None:
        if capturing():
            raise errors.ArgumentError(
                'check="values" was asked for while a CUDA graph is captured; it reads the values that it compares, '
                "and "
                "nothing can be read from the device then.\n"
                '  Check the model once without a graph, and capture it with check="metadata", the default.'
            )
        self._taken: dict[int, tuple[object, torch.Tensor]] = {}
        self._pending: list[tuple[int, torch.Tensor, int]] = []
        self._sequence = -1

    def add(self, index: int, tensor: torch.Tensor) -> None:
        """Takes note of the tensor saved at position `index`."""
        sequence = _compat.sequence_number()
        if sequence != self._sequence:
            self.flush()
            self._sequence = sequence
        if tensor.requires_grad:
            self._taken[index] = (_tree.layout(tensor), _tree.digest(tensor))
        elif tensor.dtype not in _UNWRITTEN and not (tensor.dtype is torch.int64 and tensor.dim() == 0):
            self._pending.append((index, tensor, version_of(tensor)))

    def flush(self) -> None:
        """Reads the tensors that had to wait."""
        for index, tensor, version in self._pending:
            if version_of(tensor) == version:
                self._taken[index] = (_tree.layout(tensor), _tree.digest(tensor))
        self._pending = []

    def difference(self, other: Fingerprints) -> tuple[int, str, str] | None:
        """The first position at which `other`, a later run, is not the same: position, and both sides in words."""
        for index, (layout, digest) in sorted(other._taken.items()):
            then = self._taken.get(index)
            if then is None:
                continue
            if then[0] != layout:
                return index, f"stride {then[0]}", f"stride {layout}"
            if not torch.equal(then[1], digest):
                return index, f"bits {_say(then[1])}", f"bits {_say(digest)}"
        return None


_UNWRITTEN = frozenset({torch.uint8, torch.uint64})


def _say(digest: torch.Tensor) -> str:
    return "-".join(f"{value & 0xFFFFFFFF:08x}" for value in digest.tolist())
