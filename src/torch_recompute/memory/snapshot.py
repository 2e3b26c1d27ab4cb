"""Blocks in the form of `torch.cuda.memory._snapshot()`, which https://pytorch.org/memory_viz reads.

Problem. People who hunt for memory know one picture, that of the allocator's history, and a step that was simulated, or
measured on a CPU, has no allocator that keeps one.

Idea. The same plain data: a trace of allocations and frees, and the segments that are there at the end. A frame of a
stack, which the viewer shows for the bytes under the pointer, says the operation, then the module in place of the file
and the number of the operation in place of the line; of a measured step, a real file and line. The frame below it says
the category, the phase, and of a measured step the region. The category goes along under the key that PyTorch's own
export of a profile uses, so the viewer colours by it.

Each block is a segment of its own and no address is used twice: there is no caching, so nothing is fragmented, and
"reserved" is what is allocated. What an operation frees comes before what it allocates, so the most that the viewer
shows is the peak that was counted.

Rejected: packing blocks into segments as CUDA's caching allocator would. It would show a fragmentation that is a guess.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .ledger import Block

_ALIGNED = 512  # bytes, as of CUDA's allocator
_BASE = 1 << 40  # of no meaning, but that 0 is no address


def snapshot_of(blocks: Sequence[Block], device: int = 0) -> dict[str, Any]:
    """The blocks of one device as a snapshot.

    Args:
        blocks: What lay in memory.
        device: The number of the device.
    """
    addresses = _addresses(blocks)
    moments = [(block.born, 1, number) for number, block in enumerate(blocks)]
    moments += [(block.died, 0, number) for number, block in enumerate(blocks) if block.died is not None]
    trace: list[dict[str, Any]] = []
    for _, begins, number in sorted(moments):
        block = blocks[number]
        where = {"addr": addresses[number], "size": block.nbytes, "stream": 0}
        what = {**where, "frames": _frames(block), "category": block.category}
        actions = ("segment_alloc", "alloc") if begins else ("free_requested", "free_completed", "segment_free")
        trace += [{"action": action, **what} for action in actions]
    # The viewer stops at a trace that has categories without "unknown" among them; an entry of this kind is not drawn.
    trace.append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": "unknown"})
    left = [number for number, block in enumerate(blocks) if block.died is None]
    return {
        "segments": [_segment(blocks[number], addresses[number], device) for number in left],
        "device_traces": [*([] for _ in range(device)), trace],
        "allocator_settings": {},
    }


def write_snapshot(path: Path, blocks: Sequence[Block], device: int = 0) -> None:
    """Writes a snapshot as `torch.cuda.memory._dump_snapshot` does."""
    with path.open("wb") as file:
        pickle.dump(snapshot_of(blocks, device), file)


def _addresses(blocks: Iterable[Block]) -> list[int]:
    addresses: list[int] = []
    after = _BASE
    for block in blocks:
        addresses.append(after)
        after += -(-block.nbytes // _ALIGNED) * _ALIGNED
    return addresses


def _frames(block: Block) -> list[dict[str, Any]]:
    made = block.made
    if not made.op:
        name = "made by no operation" if block.born else "there when the step began"
        return [{"name": name, "filename": block.category, "line": 0}]
    if made.line:
        file, _, line = made.line.rpartition(":")
        where = f"{made.phase}, in {made.module}" if made.module else made.phase
        return [
            {"name": made.op, "filename": file, "line": int(line)},
            {"name": where, "filename": block.category, "line": 0},
        ]
    return [
        {"name": made.op, "filename": made.module or "(the model itself, or none)", "line": made.event},
        {"name": made.phase, "filename": block.category, "line": 0},
    ]


def _segment(block: Block, address: int, device: int) -> dict[str, Any]:
    inside = {
        "address": address,
        "size": block.nbytes,
        "requested_size": block.nbytes,
        "state": "active_allocated",
        "frames": _frames(block),
        "category": block.category,
    }
    return {
        "device": device,
        "address": address,
        "total_size": block.nbytes,
        "allocated_size": block.nbytes,
        "active_size": block.nbytes,
        "requested_size": block.nbytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": _frames(block),
        "blocks": [inside],
    }
