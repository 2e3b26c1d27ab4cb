"""The pictures of the mental model, as SVG texts: what forward keeps, and what the replay in backward runs.

Each picture is two lanes of the same operations with the tensors between them: the forward above, the replay below. A
picture brings its own background and follows the reader's preference for light or dark by itself, because an `<img>` on
a page does not see the page's colours. `pages.py` writes them to `docs/pictures/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, TOP, LANE = 760, 118, 56, 104
OP_WIDTH, OP_HEIGHT, RADIUS = 92, 40, 15

STYLE = """
svg { font: 14px system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif }
.card { fill: #ffffff; stroke: #d0d7de }
.text { fill: #1f2328 } .soft { fill: #59636e; font-size: 13px }
.region { fill: #eef4fb; stroke: #7a96b8 }
.runs { fill: #ffffff; stroke: #59636e } .call { fill: #d8ebdc; stroke: #2b7a44; stroke-width: 2 }
.skipped { fill: none; stroke: #a0a8b0; stroke-dasharray: 4 4 }
.kept { fill: #2f6fbe; stroke: #2f6fbe } .kept-text { fill: #ffffff }
.dropped { fill: #ffffff; stroke: #8b949e; stroke-dasharray: 3 3 } .rebuilt { fill: #ffe3b8; stroke: #b26a00 }
.line { stroke: #59636e; fill: none } .tip { fill: #59636e } .down { stroke: #2f6fbe; fill: none; stroke-width: 2 }
.down-tip { fill: #2f6fbe } .faint { fill: #8b949e } .amber-text { fill: #5c3700 }
@media (prefers-color-scheme: dark) {
.card { fill: #161b22; stroke: #30363d }
.text { fill: #e6edf3 } .soft { fill: #9da7b1 }
.region { fill: #1c2633; stroke: #4d6a8f }
.runs { fill: #21262d; stroke: #9da7b1 } .call { fill: #173d25; stroke: #4cae6b }
.skipped { stroke: #6e7681 }
.kept { fill: #5a9ce8; stroke: #5a9ce8 } .kept-text { fill: #0d1117 }
.dropped { fill: #161b22; stroke: #7d8590 } .rebuilt { fill: #6b4510; stroke: #e0a040 }
.line { stroke: #9da7b1 } .tip { fill: #9da7b1 } .down { stroke: #5a9ce8 } .down-tip { fill: #5a9ce8 }
.faint { fill: #7d8590 } .amber-text { fill: #ffe3b8 }
}
""".strip()

LEGEND = (
    ("kept", "kept until backward"),
    ("dropped", "dropped in forward"),
    ("rebuilt", "rebuilt by the replay"),
    ("skipped", "not run again"),
)


@dataclass(frozen=True)
class Lane:
    """One run of the function.

    Attributes:
        name: What it is, in lines.
        ops: What is done with each operation: "runs", "call" or "skipped".
        tensors: What becomes of each tensor: "kept", "dropped", "rebuilt", or "" for one that does not matter.
    """

    name: Sequence[str]
    ops: Sequence[str]
    tensors: Sequence[str]


@dataclass(frozen=True)
class Picture:
    """A function in two lanes.

    Attributes:
        title: What the picture shows, in one sentence.
        ops: The names of the operations.
        tensors: The names of the tensors, one more than operations.
        forward: What the forward keeps.
        replay: What the replay runs; the tensors that are "kept" come down from the forward.
        notes: A line below each lane.
    """

    title: str
    ops: Sequence[str]
    tensors: Sequence[str]
    forward: Lane
    replay: Lane
    notes: tuple[str, str]


def _x(place: int, count: int) -> float:
    """The middle of tensor `place` of an even lane of `count` operations."""
    return LEFT + 30 + place * (WIDTH - LEFT - 44) / count


def _text(x: float, y: float, text: str, kind: str = "text", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _arrow(x1: float, x2: float, y: float) -> str:
    return f'<path class="line" d="M{x1:g} {y:g}H{x2 - 6:g}"/><path class="tip" d="M{x2:g} {y:g}l-8 -4v8z"/>'


def _lane(picture: Picture, lane: Lane, y: float, note: str) -> list[str]:
    count = len(picture.ops)
    drawn = [
        *(_text(18, y + 14 - 9 * len(lane.name) + 18 * i, line, "text", "start") for i, line in enumerate(lane.name)),
        _text(_x(0, count) + RADIUS + 6, y + 51, note, "soft", "start"),
    ]
    for place, name in enumerate(picture.ops):
        start, end = _x(place, count), _x(place + 1, count)
        middle, state = (start + end) / 2, lane.ops[place]
        drawn += [
            _arrow(start + RADIUS, middle - OP_WIDTH / 2, y) if state != "skipped" else "",
            f'<rect class="{state}" x="{middle - OP_WIDTH / 2:g}" y="{y - OP_HEIGHT / 2:g}" width="{OP_WIDTH}" '
            f'height="{OP_HEIGHT}" rx="5"/>',
            _text(middle, y + 5, name, "faint" if state == "skipped" else "text"),
            _arrow(middle + OP_WIDTH / 2, end - RADIUS, y) if lane.tensors[place + 1] and state != "skipped" else "",
        ]
    for place, (name, state) in enumerate(zip(picture.tensors, lane.tensors, strict=True)):
        if state:
            kind = {"kept": "kept-text", "rebuilt": "amber-text", "dropped": "soft"}[state]
            drawn += [
                f'<circle class="{state}" cx="{_x(place, count):g}" cy="{y:g}" r="{RADIUS}"/>',
                _text(_x(place, count), y + 5, name, kind),
            ]
    return drawn


def _legend(y: float) -> list[str]:
    drawn, x = [], 26.0
    for kind, words in LEGEND:
        shape = (
            f'<rect class="{kind}" x="{x - 8:g}" y="{y - 7:g}" width="18" height="14" rx="3"/>'
            if kind == "skipped"
            else f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="7"/>'
        )
        drawn += [shape, _text(x + 16, y + 5, words, "soft", "start")]
        x += 186
    return drawn


def svg(picture: Picture) -> str:
    """The picture as the text of an SVG file."""
    count, low = len(picture.ops), TOP + LANE + 20
    height = low + 104
    left, right = _x(0, count) + RADIUS + 6, _x(count, count) - RADIUS - 6
    drawn = [
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        *(
            f'<rect class="region" x="{left:g}" y="{y - 32}" width="{right - left:g}" height="64" rx="8"/>'
            for y in (TOP, low)
        ),
        *_lane(picture, picture.forward, TOP, picture.notes[0]),
        *_lane(picture, picture.replay, low, picture.notes[1]),
        *(
            f'<path class="down" d="M{_x(place, count):g} {TOP + RADIUS}V{low - RADIUS - 8}"/>'
            f'<path class="down-tip" d="M{_x(place, count):g} {low - RADIUS}l-5 -9h10z"/>'
            for place in range(count + 1)
            if picture.forward.tensors[place] == picture.replay.tensors[place] == "kept"
        ),
        *_legend(height - 24),
    ]
    body = "\n".join(line for line in drawn if line)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img">\n<title>{escape(picture.title)}</title>\n<style>\n{STYLE}\n</style>\n{body}\n</svg>\n'
    )


FORWARD, REPLAY = ("forward",), ("replay,", "in backward")

REGION = Picture(
    "A region keeps its input, and its replay rebuilds what backward needs",
    ("norm", "up", "gelu", "down"),
    ("x", "h", "u", "g", "y"),
    Lane(FORWARD, ["runs"] * 4, ["kept", "dropped", "dropped", "dropped", ""]),
    Lane(REPLAY, ["runs"] * 3 + ["skipped"], ["kept", "rebuilt", "rebuilt", "rebuilt", ""]),
    ("recompute(layer)(x): only the input stays", "runs once, and stops when the last tensor needed is there"),
)
SAVED_CALL = Picture(
    "A saved call in a region is not run again: what its backward needs is kept",
    ("norm", "q, k, v", "attention", "out"),
    ("x", "h", "q", "a", "y"),
    Lane(FORWARD, ["runs", "runs", "call", "runs"], ["kept", "dropped", "dropped", "kept", ""]),
    Lane(REPLAY, ["runs", "runs", "skipped", "skipped"], ["kept", "rebuilt", "rebuilt", "kept", ""]),
    ("no_recompute(attention): expensive to compute, small to keep", "the call is passed over, its result returned"),
)
DISCARD = Picture(
    "A region from a normalisation through its consumer discards what is between them",
    ("norm", "product"),
    ("x", "h", "y"),
    Lane(FORWARD, ["runs", "call"], ["kept", "dropped", ""]),
    Lane(REPLAY, ["runs", "skipped"], ["kept", "rebuilt", ""]),
    ("one region around both, the product a saved call: no one keeps h", "the norm is cheap; no product runs twice"),
)
CARRY = Picture(
    "A decision made in forward is carried to the replay",
    ("router", "topk", "experts"),
    ("x", "s", "i", "y"),
    Lane(FORWARD, ["runs", "call", "runs"], ["kept", "dropped", "kept", ""]),
    Lane(REPLAY, ["runs", "skipped", "runs"], ["kept", "rebuilt", "kept", ""]),
    ("replay(topk): the choice i is kept", "every token goes to the same experts again"),
)

# The name of a file in `docs/pictures` -> its text.
PICTURES: Mapping[str, str] = {
    f"{name}.svg": svg(picture)
    for name, picture in (("region", REGION), ("saved-call", SAVED_CALL), ("discard", DISCARD), ("carry", CARRY))
}
