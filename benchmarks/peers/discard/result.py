"""The comparison itself, and its result: one row per block, number of layers, dtype and column of the table.

Invariants. A row carries what was published beside what was obtained here, never in its place: the columns of the
published method have no figures of ours, and nothing of ours comes from `published.py`. Savings and time deltas are
against the baseline of the same stack; on CUDA the peak that counts is the measured one, elsewhere the computed one.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torch_recompute import __version__
from torch_recompute.commands.output import document

from .blocks import DTYPES, Stack, layers
from .config import Config
from .forms import FORMS
from .measuring import Computed, Times, clock, compute, rounds
from .published import ODC_TITLES, SOURCE, Published, published

SCHEMA_VERSION = 2
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One column of the published table, for one block.

    Attributes:
        block: The block's name.
        n_layers: How many of it.
        dtype: Of its weights and input.
        form: The column's name.
        title: The column's title.
        computed_peak_bytes: Of a step at the full size, on tensors without data.
        measured_peak_bytes: Of a step, by CUDA's allocator.
        saved_bytes: The baseline's peak less this one.
        saved_percent: The same in percent of the baseline's.
        flops: Of a step's matrix products, at the full size.
        extra_flops_percent: Those of these that the baseline does not do, in percent of the baseline's.
        forward_seconds: Median time of a forward with the loss.
        backward_seconds: Median time of a backward.
        total_seconds: Median time of both.
        time_delta_percent: `total_seconds` against the baseline's.
        published: What was published of it, at this very configuration.
    """

    block: str
    n_layers: int
    dtype: str
    form: str
    title: str
    computed_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    saved_bytes: int | None = None
    saved_percent: float | None = None
    flops: int | None = None
    extra_flops_percent: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    total_seconds: float | None = None
    time_delta_percent: float | None = None
    published: Published | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The measured peak, else the computed one."""
        return self.computed_peak_bytes if self.measured_peak_bytes is None else self.measured_peak_bytes


@dataclass(frozen=True)
class Result:
    """What the comparison showed."""

    config: Config
    rows: list[Row]

    @property
    def how(self) -> dict[str, str]:
        """How each kind of figure was obtained."""
        config = self.config
        size = "d_model {}, d_ff {}, batch {}, sequence {}"
        full, timed = size.format(*config.size), size.format(*config.timed_size)
        on_meta = f"computed on fake tensors (device meta, no data) at {full}"
        cuda = config.on.type == "cuda"
        median = f"median of {config.iters} steps, all forms taking turns"
        where = torch.cuda.get_device_name(config.on) if cuda else f"the CPU (threads: {torch.get_num_threads()})"
        return {
            "peak": f"measured by the CUDA allocator on {where} at {full}" if cuda else on_meta,
            "flops": on_meta,
            "times": f"measured on {where} at {timed}" + ("" if cuda else ", a scaled-down copy") + f"; {median}",
            "published": f"published: {SOURCE}, on other hardware",
            "by_arithmetic": "not published: the sum of the tensors that the published method holds at its peak",
        }

    def to_json(self) -> str:
        """One JSON document; bytes and FLOPs are integers."""
        config = self.config
        data: dict[str, Any] = {
            "torch_recompute": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": str(config.on),
            "config": asdict(config),
            "timed_size": dict(zip(("d_model", "d_ff", "batch", "seq"), config.timed_size, strict=True)),
            "how": self.how,
            "rows": [asdict(row) for row in self.rows],
        }
        return document("peers discard", SCHEMA_VERSION, data)


def run(config: Config, progress: Callable[[str], None] | None = None) -> Result:
    """Compare all forms on all the blocks asked for.

    Args:
        config: What is asked for.
        progress: Called after each of the `ticks(config)` pieces of work, with a word on it.

    Returns:
        What was seen.
    """
    config.check()
    rows: list[Row] = []
    for dtype in config.dtypes:
        for n_layers in config.n_layers:
            for block in config.blocks:
                rows += _rows(config, block, n_layers, dtype, progress or _quiet)
    return Result(config, rows)


def ticks(config: Config) -> int:
    """How often `run` reports progress."""
    return len(config.dtypes) * len(config.n_layers) * len(config.blocks) * (1 + rounds(config.iters))


def _rows(config: Config, block: str, n_layers: int, dtype: str, tick: Callable[[str], None]) -> list[Row]:
    where = f"{block}, {layers(n_layers)}, {dtype}"
    known = published(block, n_layers, dtype, config.size)
    imagined = Stack(block, n_layers, config.size, DTYPES[dtype], torch.device("meta"))
    forms = [form for form in FORMS if form.fits(imagined.first)]
    computed = {form.name: compute(imagined, form.run) for form in forms}
    tick(f"{where}: computing")
    real = Stack(block, n_layers, config.timed_size, DTYPES[dtype], config.on)
    times = clock(real, forms, config.iters, lambda word: tick(f"{where}: {word}"))
    baseline = forms[0].name
    rows: list[Row] = []
    for form in forms:
        figures = _figures(computed[form.name], times[form.name], computed[baseline], times[baseline])
        rows.append(
            Row(block, n_layers, dtype, form.name, form.title, **figures, published=known.get(form.name)),
        )
        if form.name == "torch":
            rows += [
                Row(block, n_layers, dtype, column, title, published=known[column])
                for column, title in ODC_TITLES.items()
                if column in known
            ]
    return rows


def _figures(computed: Computed, times: Times, plain: Computed, plain_times: Times) -> dict[str, Any]:
    measured = times.peak_bytes
    peak = computed.peak_bytes if measured is None else measured
    plain_peak = plain.peak_bytes if plain_times.peak_bytes is None else plain_times.peak_bytes
    return {
        "computed_peak_bytes": computed.peak_bytes,
        "measured_peak_bytes": measured,
        "saved_bytes": plain_peak - peak,
        "saved_percent": 100 * (plain_peak - peak) / plain_peak,
        "flops": computed.flops,
        "extra_flops_percent": 100 * (computed.flops - plain.flops) / plain.flops,
        "forward_seconds": times.forward,
        "backward_seconds": times.backward,
        "total_seconds": times.total,
        "time_delta_percent": 100 * (times.total - plain_times.total) / plain_times.total,
    }


def _quiet(_: str) -> None:
    pass
