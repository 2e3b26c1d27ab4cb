"""What the settings need, as a picture: for each the peak of a step, stacked by category.

Drawn without pyplot, so no window system and no global state is touched. matplotlib is imported late.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

from .training import Result

MIB = 2**20
COLOURS = {
    "parameters": "#9a9a9a",
    "gradients": "#d98c3f",
    "optimizer": "#e8c9a0",
    "activations": "#2b6cb0",
    "buffers": "#5c6b73",
    "other": "#7cc4a4",
}
WIDTH = 16


def draw(result: Result, path: Path) -> None:
    """Draw a bar for each setting into one file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    titles = ["\n".join(wrap(outcome.title, WIDTH)) for outcome in result.outcomes]
    below = [0.0] * len(titles)
    for category, colour in COLOURS.items():
        heights = [outcome.by_category.get(category, 0) / MIB for outcome in result.outcomes]
        if any(heights):
            axes.bar(titles, heights, bottom=below, color=colour, label=category, width=0.6)
        below = [low + high for low, high in zip(below, heights, strict=True)]
    for place, (height, outcome) in enumerate(zip(below, result.outcomes, strict=True)):
        axes.text(place, height, f"{outcome.peak_bytes / MIB:.1f}", ha="center", va="bottom")
    axes.set_ylabel("peak of a step, MiB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    config = result.config
    axes.set_title(f"GPT of {config.layers} layers, d_model {config.d_model}", loc="left", fontsize=11)
    figure.savefig(path, dpi=150)
