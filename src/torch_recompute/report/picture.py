"""The step and the curve as one picture that stands still, for a paper or a message.

Drawn without pyplot, so no window system and no global state is touched. matplotlib is imported late.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = {
    "parameters": "#8694a6",
    "buffers": "#b9c2cd",
    "optimizer": "#b59a7a",
    "gradients": "#9575cd",
    "other": "#d7a3c1",
    "activations": "#3f88c5",
    "rebuilt": "#ee964b",
    "backward": "#4fa58a",
}
PHASES = {
    "forward": "#3f88c5",
    "loss": "#b8860b",
    "backward": "#4fa58a",
    "replay": "#ee964b",
    "optimizer": "#b59a7a",
}
MARK = "#c2185b"
HOST = "#4a148c"
_WORDS = {
    "activations": "activations of the forward",
    "rebuilt": "rebuilt by replays",
    "backward": "made in backward",
}


def draw(path: Path, data: Mapping[str, Any]) -> None:
    """Draw the step with the plan, and below it the peaks and times of all plans."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    above, strip, below = figure.subplots(3, 1, height_ratios=(10, 0.6, 6))
    word, unit = ("GiB", 2**30) if data["steps"][data["plain"]]["peak_bytes"] >= 2**30 else ("MiB", 2**20)
    _step(above, strip, data, unit)
    _curve(below, data, unit)
    above.set_ylabel(f"alive, {word}")
    below.set_xlabel(f"peak of the step, {word}")
    figure.suptitle(data["title"], fontsize=9, wrap=True)
    figure.savefig(path, dpi=120)


def _step(axes: Any, strip: Any, data: Mapping[str, Any], unit: int) -> None:
    step, plain = data["steps"][data["chosen"]], data["steps"][data["plain"]]
    ends = _milliseconds(step)
    floor = [0.0] * len(ends)
    for layer, series in step["samples"]["layers"].items():
        top = [low + nbytes / unit for low, nbytes in zip(floor, series, strict=True)]
        axes.fill_between(ends, floor, top, step="post", color=COLOURS[layer], label=_said(layer), linewidth=0)
        floor = top
    if step is not plain:
        heights = [sum(column) / unit for column in zip(*plain["samples"]["layers"].values(), strict=True)]
        axes.step(_milliseconds(plain), heights, where="post", color="#5a6675", linewidth=0.8, label="no region")
    if step["samples"]["host"]:
        heights = [nbytes / unit for nbytes in step["samples"]["host"]]
        axes.step(ends, heights, where="post", color=HOST, linestyle=":", linewidth=1.8, label="in host memory")
    if step["promised"] is not None:
        axes.axhline(step["promised"]["budget_bytes"] / unit, color=MARK, linestyle="--", linewidth=1, label="budget")
    axes.set_xlim(0, 1000 * max(step["step_seconds"], plain["step_seconds"]))
    axes.legend(fontsize=7, ncols=2, loc="upper right")
    for phase, start, end in step["phases"]:
        strip.axvspan(1000 * start, 1000 * end, color=PHASES[phase], linewidth=0)
    strip.set_xlim(axes.get_xlim())
    strip.set_yticks([])
    axes.tick_params(labelbottom=False)
    strip.set_xlabel(f"ms on {data['device']}; the strip: forward blue, replay orange, backward green", fontsize=8)


def _curve(axes: Any, data: Mapping[str, Any], unit: int) -> None:
    points = [(step["peak_bytes"] / unit, 1000 * step["step_seconds"]) for step in data["steps"]]
    curve = [point for point, step in zip(points, data["steps"], strict=True) if step["name"] != "the plan"]
    axes.plot(*zip(*curve, strict=True), "o-", color="#5a6675", markersize=4, label="what other budgets cost")
    axes.plot(*points[data["plain"]], "s", color="#5a6675", label="no region")
    axes.plot(*points[data["chosen"]], "o", color=MARK, label="the plan")
    axes.set_ylabel("step, ms")
    axes.legend(fontsize=7)


def _milliseconds(step: Mapping[str, Any]) -> list[float]:
    return [1000 * end for end in step["samples"]["ends"]]


def _said(layer: str) -> str:
    return _WORDS.get(layer, layer)
