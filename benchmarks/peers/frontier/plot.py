"""The comparison as a picture: measured peak against what is replayed, a colour per family, our points joined.

A setting whose gradients are other than the plain step's is hollow. The figure is drawn without pyplot, so no window
system and no global state is touched. matplotlib is imported late.
"""

from __future__ import annotations

from pathlib import Path

from .result import Result

MIB = 2**20
COLOURS = {
    "plain": "#444444",
    "torch checkpoint": "#d98c3f",
    "uniform": "#9a9a9a",
    "block": "#63a4dd",
    "selective": "#1f8a70",
    "torch selective": "#b8453b",
    "torch_remat": "#c2a83e",
    "sac_ilp": "#6b4a2b",
    "torch.compile": "#8a5fb0",
    "torch.compile whole": "#c48ae0",
}
OURS = "#2b6cb0"


def draw(result: Result, path: Path) -> None:
    """Draw all points into one file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.5), layout="constrained")
    axis = figure.subplots()
    own = sorted(result.own, key=lambda point: point.peak_bytes)
    axis.plot(
        [point.peak_bytes / MIB for point in own],
        [point.replay_percent for point in own],
        color=OURS,
        marker=".",
        linewidth=1.5,
        label="our plans",
    )
    for family in dict.fromkeys(point.family for point in result.peers):
        colour, of_family = COLOURS[family], [point for point in result.peers if point.family == family]
        for honest in (True, False):
            points = [point for point in of_family if (not point.gradient_difference) is honest]
            if points:
                axis.plot(
                    [point.peak_bytes / MIB for point in points],
                    [point.replay_percent for point in points],
                    linestyle="none",
                    marker="o",
                    markersize=6,
                    color=colour,
                    markerfacecolor=colour if honest else "none",
                    label=family if honest else f"{family}, other gradients",
                )
    config = result.config
    axis.set_title(
        f"{config.model}: {config.layers} layers, width {config.width}, {config.batch} x {config.tokens} tokens",
        loc="left",
        fontsize=11,
    )
    axis.set_xlabel("measured peak of a step, MiB")
    axis.set_ylabel("FLOPs replayed, % of the step's")
    axis.grid(visible=True, color="#e4e4e4")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
