"""The examples of transformers of diffusion: of the published size, and recomputed layers lower their peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.files import module_at
from torch_recompute import peaks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.nightly
FILE = Path(__file__).parents[2] / "examples" / "diffusion.py"
FEW: dict[str, dict[str, Any]] = {
    "flux": {"size": 256, "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2},
    "wan": {"frames": 5, "height": 64, "width": 64, "num_layers": 3, "num_attention_heads": 2, "ffn_dim": 512},
}
PARAMETERS = {"flux": 11_901_408_320, "wan": 14_288_491_584}


@pytest.fixture(scope="module")
def examples() -> Any:
    return module_at(FILE)


@pytest.mark.parametrize("name", FEW)
def test_an_example(name: str, examples: Any) -> None:
    """A model has the parameters of its release; a small one keeps less with its layers recomputed."""
    model, _, _ = getattr(examples, name)()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    model, batch, loss = getattr(examples, name)(**FEW[name])
    plain, full = peaks(model, batch, recompute="none,full", loss=loss, device="h100")
    assert full.simulation.saved_bytes < plain.simulation.saved_bytes / 2
    assert len(full.plan) >= 3
