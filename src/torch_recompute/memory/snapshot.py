"""Blocks in the form of `torch.cuda.memory._snapshot()`, which https://pytorch.org/memory_viz reads.

A step that was simulated, or measured on a CPU, has no allocator that keeps a history. This is the same plain data: a
trace of allocations and frees, and the segments that are there at the end. A frame of a stack, which the viewer shows
for the bytes under the pointer, says the operation, then the module in place of the file and the number of the
operation in place of the line; of a measured step, a real file and line. The frame below it says the category, which
the viewer colours by, the phase, and of a measured step the region.

Each block is a segment of its own and no address is used twice: a fragmentation as by CUDA's allocator would be a
guess. What an operation frees comes before what it allocates, so the most that the viewer shows is the counted peak.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from .ledger import Block

_ALIGNED = 512  # bytes, as of CUDA's allocator
_BASE = 1 << 40  # of no meaning, but that 0 is no address


def snapshot_of(blocks: Sequence[Block], device: int = 0) -> dict[str, Any]:
    """Makes a snapshot of the blocks of one device.

    Args:
        blocks: What was in memory.
        device: The number of the device.
    """
    sizes = (-(-block.nbytes // _ALIGNED) * _ALIGNED for block in blocks)
    addresses = list(accumulate(sizes, initial=_BASE))
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
    size, about = block.nbytes, {"address": address, "requested_size": block.nbytes, "frames": _frames(block)}
    return {
        **about,
        **dict.fromkeys(("total_size", "allocated_size", "active_size"), size),
        "device": device,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": [{**about, "size": size, "state": "active_allocated", "category": block.category}],
    }
