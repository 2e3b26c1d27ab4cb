"""Signs of where a replay differs from its forward: the reader of a slot, bits of saved tensors, operations.

`Fingerprints` are strides and bits of saved tensors, for `check="values"`. Some operations save a buffer that their
kernel fills only afterwards (RReLU's noise), so a tensor that requires no grad is read when the next operation saves
something, or when the run ends. One that has been changed by then (running statistics) is skipped, and so is what
kernels save without writing to it, where it requires no grad: bytes are workspaces (cuDNN and oneDNN RNNs), of which
parts are never written; uint64 and single int64 are seed and offset of fused attention on CUDA, which are written only
if there is dropout. So a single integer that a region decides by (`x[i]`) is not compared itself; what it selects is.

`OpTrace` is for `checkpoint(..., debug=True)`: a dispatch mode writes down each operation with the shapes of its
tensors and the place in the user's code. PyTorch's own debug mode adds two log filters per call and never removes them,
so that each call costs more than the one before; here nothing is shared between calls. Stacks are captured without
symbols and only turned into text if there is an error.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch, errors
from .._torch import graphs, upstream, version_of
from .._torch.devices import capturing
from .._torch.tensors import layout

_UNWRITTEN = frozenset({torch.uint8, torch.uint64})


def reader_of(slot: Any) -> str:
    """The node whose saved tensor is `slot`, as `AddmmBackward0 (mat1)`; "" where it cannot be found."""
    if slot is None:
        return ""
    for node in upstream():
        for attribute in dir(node):
            if attribute.startswith("_raw_saved") and _holds(getattr(node, attribute), slot):
                field = attribute.removeprefix("_raw_saved_")
                return f"{node.name()} ({field})" if field != "_raw_saved_tensors" else node.name()
    return ""


def _holds(saved: Any, slot: Any) -> bool:
    entries = saved if isinstance(saved, (list, tuple)) else (saved,)
    return any(graphs.packed_of(entry) is slot for entry in entries)  # pyright: ignore[reportUnknownVariableType]


class Fingerprints:
    """The fingerprints of one run, by position."""

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
        sequence = _torch.sequence_number()
        if sequence != self._sequence:
            self.flush()
            self._sequence = sequence
        if tensor.requires_grad:
            self._taken[index] = (layout(tensor), digest(tensor))
        elif tensor.dtype not in _UNWRITTEN and not (tensor.dtype is torch.int64 and tensor.dim() == 0):
            self._pending.append((index, tensor, version_of(tensor)))

    def flush(self) -> None:
        """Reads the tensors that had to wait."""
        for index, tensor, version in self._pending:
            if version_of(tensor) == version:
                self._taken[index] = (layout(tensor), digest(tensor))
        self._pending = []

    def difference(self, other: Fingerprints) -> tuple[int, str, str] | None:
        """The first position at which `other`, a later run, is not the same: position, and both sides in words."""
        for index, (stride, bits) in sorted(other._taken.items()):
            then = self._taken.get(index)
            if then is None:
                continue
            if then[0] != stride:
                return index, f"stride {then[0]}", f"stride {stride}"
            if not torch.equal(then[1], bits):
                return index, f"bits {_say_bits(then[1])}", f"bits {_say_bits(bits)}"
        return None


def _say_bits(digest: torch.Tensor) -> str:
    return "-".join(f"{value & 0xFFFFFFFF:08x}" for value in digest.tolist())


class _Entry:
    __slots__ = ("stack", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.stack = graphs.capture_stack()


class OpTrace(_torch.TorchDispatchMode):
    """Writes down the operations that run under it."""

    supports_higher_order_operators = True

    def __init__(self, forward: OpTrace | None = None) -> None:
        super().__init__()
        self.entries: list[_Entry] = []
        self._forward = forward

    def __enter__(self) -> OpTrace:
        """Starts again: a region may be replayed more than once."""
        self.entries = []
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes `func` and runs it."""
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.detach.default:
            inputs = ", ".join(map(_say, _torch.tree_leaves((args, kwargs))))
            outputs = ", ".join(map(_say, _torch.tree_leaves(result)))
            self.entries.append(_Entry(f"{func}({inputs}) -> {outputs}"))
        return result

    def explain(self) -> str:
        """The first operation in which the replay differs from the forward, with the code that ran it."""
        then = self._forward.entries if self._forward is not None else []
        now = self.entries
        same = 0
        while same < min(len(then), len(now)) and then[same].text == now[same].text:
            same += 1
        lines = [
            "You are seeing this error because you passed `debug=True` to checkpoint.",
            f"Forward and replay first differ at operation {same} (counted from 0):",
        ]
        for title, entries in (("forward", then), ("replay", now)):
            lines.append(f"  {title} ({len(entries)} operations so far):")
            lines += [f"      {i}: {entries[i].text}" for i in range(max(0, same - 2), min(len(entries), same + 3))]
            if same < len(entries):
                lines.append(f"    operation {same} was run by:")
                lines += ["      " + line for line in graphs.say_stack(entries[same].stack)]
        return "\n".join(lines)


def _say(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)[:40]


def traces() -> tuple[OpTrace, OpTrace]:
    """The contexts of one call of a region: for its forward, and for its replays."""
    forward = OpTrace()
    return forward, OpTrace(forward)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A fingerprint of a tensor's bits (two int64, on its device; no host sync), for `check="values"`.

    Rows and columns of the bits are summed with weights in wrapping integer arithmetic, so a changed bit, a moved
    element and a NaN that is not the same NaN all show.
    """
    with torch.no_grad():
        data = tensor.detach()
        if data.layout is not torch.strided:
            data = data.to_dense() if not data.is_nested else data.values()
        flat = data.resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.stride(0) != 1:  # one element, whose stride says nothing to anybody but `view`
            flat = flat.as_strided((flat.numel(),), (1,))
        bits = flat.view(torch.uint8)
        pad = -bits.numel() % 1024
        rows = torch.nn.functional.pad(bits, (0, pad)).view(-1, 1024)
        across, down = rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64)
        return torch.stack([_weighted(across), _weighted(down)])


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, sums.numel() + 1, device=sums.device, dtype=torch.int64)
    return (sums * (weights * 2 - 1) * 0x9E3779B1).sum()


def of_torchscript(module: torch.nn.Module) -> errors.ArgumentError:
    """The error for a region that reaches a module of TorchScript: no replay of it could be compared, or end in it."""
    return errors.ArgumentError(
        f"a region reaches {errors.kind(module)}, a module that torch.jit.script or torch.jit.trace has made. Its "
        "attributes are not Python's, so they cannot be put back for a replay, and its calls cannot be ended early.\n"
        "  Make the region of the module that it was made from, and compile that one with torch.compile if you like; "
        "or leave this module out of the region."
    )
