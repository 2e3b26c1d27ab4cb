"""The picture of the README, as the text of an SVG: the bytes alive over one step, without a plan and with one.

Drawn from what `benchmarks/memory_over_step.py` has saved; `pages.py` writes it to `docs/pictures/`. Like the pictures
of the mental model it brings its own background, and its own colours for light and dark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

RESULT = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "memory_over_step-cpu.json"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 344, 66, 736, 74, 292
MIB = 2**20

STYLE = """
svg { font: 14px system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif }
.card { fill: #ffffff; stroke: #d0d7de } .text { fill: #1f2328 } .soft { fill: #59636e; font-size: 13px }
.grid { stroke: #d8dee4 } .limit { stroke: #1f2328; stroke-dasharray: 5 4; fill: none }
.plain { fill: #ffe3b8; stroke: #c27a10 } .plan { fill: #2f6fbe; stroke: #1d4f91 }
.plain-text { fill: #8a5200; font-weight: 600 } .plan-text { fill: #1d5aa8; font-weight: 600 }
@media (prefers-color-scheme: dark) {
.card { fill: #161b22; stroke: #30363d } .text { fill: #e6edf3 } .soft { fill: #9da7b1 }
.grid { stroke: #2b323b } .limit { stroke: #e6edf3 }
.plain { fill: #5a3c10; stroke: #e0a040 } .plan { fill: #4a8edb; stroke: #8abcf5 }
.plain-text { fill: #f0b860 } .plan-text { fill: #7db5f5 }
}
""".strip()


def _text(x: float, y: float, text: str, kind: str = "soft", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{text}</text>'


def _area(heights: Sequence[float], across: float, kind: str) -> str:
    """A curve of steps, filled down to the axis; equal heights are one line."""
    path, x = [f"M{LEFT} {BOTTOM}"], float(LEFT)
    for y, same in groupby(round(height) for height in heights):
        x += across * len(list(same))
        path.append(f"V{y}H{x:.0f}")
    return f'<path class="{kind}" d="{"".join(path)}V{BOTTOM}z"/>'


def svg(result: dict[str, Any]) -> str:
    """The picture of a result."""
    plain, planned = result["figures"]
    top, longest = plain["peak_bytes"] * 1.04, max(len(plain["live_bytes"]), len(planned["live_bytes"]))
    across = (RIGHT - LEFT) / longest

    def y(count: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * count / top

    less, more = 1 - planned["peak_bytes"] / plain["peak_bytes"], planned["seconds"] / plain["seconds"] - 1
    seconds = max(plain["seconds"], planned["seconds"])
    each = next(each for each in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if seconds / each < 8)
    budget = result["config"]["budget"]
    limit = int(budget.removesuffix("MiB")) * MIB
    title = f"Memory over one training step: a plan lowers the peak by {less:.0%}"
    drawn = [
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        _text(18, 28, title, "text"),
        '<circle class="plain" cx="24" cy="48" r="6"/>',
        _text(38, 53, f"without a plan: {plain['peak_bytes'] / MIB:.0f} MiB", "plain-text"),
        '<circle class="plan" cx="250" cy="48" r="6"/>',
        _text(264, 53, f"with a plan: {planned['peak_bytes'] / MIB:.0f} MiB, step {more:+.0%}", "plan-text"),
        *(
            f'<path class="grid" d="M{LEFT} {y(count * MIB):.1f}H{RIGHT}"/>'
            + _text(LEFT - 8, round(y(count * MIB) + 4), f"{count}", anchor="end")
            for count in range(0, int(top / MIB), 100)
        ),
        _area([y(count) for count in plain["live_bytes"]], across, "plain"),
        _area([y(count) for count in planned["live_bytes"]], across, "plan"),
        f'<path class="limit" d="M{LEFT} {y(limit):.1f}H{RIGHT}"/>',
        _text(RIGHT - 6, round(y(limit) - 7), f'budget="{budget}"', "text", "end"),
        *(
            _text(
                round(LEFT + (RIGHT - LEFT) * each * tick / seconds), BOTTOM + 17, f"{each * tick:g}", anchor="middle"
            )
            for tick in range(int(seconds / each) + 1)
        ),
        _text(18, BOTTOM + 36, "MiB alive, by PyTorch's allocator"),
        _text(RIGHT, BOTTOM + 36, "seconds of the step: forward, backward, optimizer", anchor="end"),
    ]
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img">\n<title>{title}</title>\n<style>\n{STYLE}\n</style>\n{body}\n</svg>\n'
    )


def memory_over_step() -> str:
    """The picture of the saved run."""
    return svg(json.loads(RESULT.read_text(encoding="utf-8")))
