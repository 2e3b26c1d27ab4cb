"""What has been published of output-discarding checkpointing, as data.

The source is OLMo-core (github.com/allenai/OLMo-core), `src/scripts/benchmark_odc.py`, run as
`python benchmark_odc.py --n-layers 8 --dtype fp32` at d_model 2048, d_ff 8192, batch 2, sequence 2048, and the table
that was published with it. Its two columns of output-discarding checkpointing (ODC) differ in how the storage of a
discarded output is filled again: by a C++ extension, or by the copy that takes its place where there is no compiler.

For one layer nothing was published. `BY_ARITHMETIC` adds up, for that case, the tensors that the published method
holds at its peak; the same sums for eight layers give the published figures.

Invariants. Nothing here is measured by this library, and nothing here enters a figure that it reports as its own.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "OLMo-core, src/scripts/benchmark_odc.py"
SIZE = (2048, 8192, 2, 2048)
"""d_model, d_ff, batch, sequence length."""
DTYPE = "fp32"
N_LAYERS = 8


@dataclass(frozen=True)
class Published:
    """One cell of the published table: peak in MiB, and time as a difference from the baseline in percent."""

    peak_mib: float
    time_delta_percent: float | None = None
    total_ms: float | None = None
    by_arithmetic: bool = False


TABLE: dict[str, dict[str, Published]] = {
    "fp32_cast": {
        "baseline": Published(544.3, 0.0, 16.65),
        "torch": Published(544.3),
        "odc_cpp": Published(544.3),
        "odc_python": Published(544.3),
    },
    "up_proj": {
        "baseline": Published(2560.3, 0.0, 128.90),
        "torch": Published(2560.3, 0.3),
        "odc_cpp": Published(2400.3, 17.1),
        "odc_python": Published(2464.3, 17.4),
    },
    "silu_up": {
        "baseline": Published(3584.3, 0.0, 130.44),
        "torch": Published(2656.3, 17.1),
        "odc_cpp": Published(2560.3, 17.3),
        "odc_python": Published(2592.3, 18.0),
    },
    "swiglu": {
        "baseline": Published(6240.3, 0.0, 197.63),
        "torch": Published(3776.3, 22.7),
        "odc_cpp": Published(3904.3, 23.0),
        "odc_python": Published(3904.3, 23.4),
    },
    "rms_norm": {
        "baseline": Published(800.4, 0.0, 17.96),
        "torch": Published(800.3, 2.1),
        "odc_cpp": Published(560.3, 1.3),
        "odc_python": Published(560.3, 2.3),
    },
    "fp32_softmax": {
        "baseline": Published(576.3, 0.0, 17.30),
        "torch": Published(800.3, 2.8),
        "odc_cpp": Published(560.3, 1.8),
        "odc_python": Published(560.3, 2.8),
    },
}

BY_ARITHMETIC = {
    "up_proj": {"odc_cpp": Published(608.0, by_arithmetic=True)},
    "silu_up": {"odc_cpp": Published(768.0, by_arithmetic=True)},
    "swiglu": {"odc_cpp": Published(1216.0, by_arithmetic=True)},
}

ODC_TITLES = {"odc_cpp": "ODC, C++", "odc_python": "ODC, Python"}


def published(block: str, n_layers: int, dtype: str, size: tuple[int, int, int, int]) -> dict[str, Published]:
    """What is known of a block at exactly this configuration, by column; nothing at any other."""
    if dtype != DTYPE or size != SIZE:
        return {}
    if n_layers == N_LAYERS:
        return TABLE[block]
    return BY_ARITHMETIC.get(block, {}) if n_layers == 1 else {}
