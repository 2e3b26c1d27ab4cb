"""The comparison as a picture: for each number of layers and dtype one panel of bars, the peak of each block and form.

Solid bars were obtained here, hatched ones are published. The figure is drawn without pyplot, so no window system and
no global state is touched. matplotlib is imported late.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from .blocks import layers
from .forms import FORMS
from .published import ODC_TITLES
from .result import MIB, Result, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

COLOURS = {
    "baseline": "#9a9a9a",
    "torch": "#d98c3f",
    "odc_cpp": "#e8c9a0",
    "odc_python": "#f3e4cf",
    "saved_call": "#2b6cb0",
    "no_extra_gemm": "#63a4dd",
    "one_tile": "#7cc4a4",
    "tiled": "#1f8a70",
}
ORDER = ("baseline", "torch", *ODC_TITLES, *(form.name for form in FORMS[2:]))


def draw(result: Result, path: Path) -> None:
    """Draw all panels into one file."""
    from matplotlib.figure import Figure

    panels = [
        (dtype, n_layers, list(group))
        for (dtype, n_layers), group in groupby(result.rows, key=lambda row: (row.dtype, row.n_layers))
    ]
    blocks = max(len({row.block for row in rows}) for _, _, rows in panels)
    figure = Figure(figsize=(3.5 + 1.75 * blocks, 1.4 + 3.6 * len(panels)), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(panels), 1, squeeze=False)[:, 0])
    shown = {row.form for row in result.rows}
    for axis, (dtype, n_layers, rows) in zip(axes, panels, strict=True):
        _panel(axis, rows)
        axis.set_title(f"{layers(n_layers)}, {dtype}", loc="left", fontsize=11, fontweight="bold")
    handles = [_for_legend(form, result.rows) for form in ORDER if form in shown]
    columns = min(len(handles), 4 if blocks > 3 else 2)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    d_model, d_ff, batch, seq = result.config.size
    measured = result.config.on.type == "cuda"
    figure.suptitle(
        f"Peak memory of a training step: d_model {d_model}, d_ff {d_ff}, batch {batch}, sequence {seq}\n"
        + ("measured by the CUDA allocator" if measured else "computed on tensors without data")
        + ", weights and gradients included",
        fontsize=12,
    )
    figure.savefig(path, dpi=150)


def _panel(axis: Axes, rows: Sequence[Row]) -> None:
    names: list[str] = []
    highest = max(_height(row) for row in rows)
    for place, (block, group) in enumerate(groupby(rows, key=lambda row: row.block)):
        names.append(block)
        of_block = sorted(group, key=lambda row: ORDER.index(row.form))
        width = 0.86 / max(5, len(of_block))
        for index, row in enumerate(of_block):
            x = place + (index - (len(of_block) - 1) / 2) * width
            height = _height(row)
            axis.add_patch(_bar(row, x - 0.46 * width, 0.92 * width, height))
            axis.text(x, height + 0.012 * highest, f"{height:,.0f}", ha="center", va="bottom", rotation=90, fontsize=7)
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.5, len(names) - 0.5)
    axis.set_ylim(0, 1.16 * highest)
    axis.set_ylabel("peak, MiB")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.grid(visible=True, color="#e4e4e4")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="x", length=0)


def _height(row: Row) -> float:
    """The peak in MiB: that obtained here, else the published one."""
    if row.peak_bytes is not None:
        return row.peak_bytes / MIB
    assert row.published is not None
    return row.published.peak_mib


def _bar(row: Row, x: float, width: float, height: float, label: str = "") -> Rectangle:
    from matplotlib.patches import Rectangle

    ours = row.peak_bytes is not None
    return Rectangle(
        (x, 0),
        width,
        height,
        facecolor=COLOURS[row.form],
        edgecolor=COLOURS[row.form] if ours else "#b08a55",
        hatch=None if ours else "///",
        linewidth=0.0 if ours else 0.5,
        label=label,
    )


def _for_legend(form: str, rows: Sequence[Row]) -> Rectangle:
    of_form = [row for row in rows if row.form == form]
    how = {
        "published" if not row.published.by_arithmetic else "1 layer by arithmetic"
        for row in of_form
        if row.peak_bytes is None and row.published is not None
    }
    title = of_form[0].title + (f" ({', '.join(sorted(how, reverse=True))})" if how else "")
    return _bar(of_form[0], 0, 1, 1, title)
