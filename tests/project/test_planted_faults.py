"""The rows of `tools/faults.py` fit the source as it is, so that `make faults` can plant each of them."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = runpy.run_path(str(ROOT / "tools" / "faults.py"))["FAULTS"]


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
def test_a_fault_can_be_planted(fault: Any) -> None:
    """Its text is at one place, what replaces it is another one and compiles, and its tests exist."""
    source = (ROOT / "src" / "torch_recompute" / fault.file).read_text("utf-8")
    assert source.count(fault.old) == 1
    assert fault.new != fault.old
    compile(source.replace(fault.old, fault.new), fault.file, "exec")
    assert [where for where in fault.tests.split() if not (ROOT / "tests" / where).exists()] == []
    assert fault.tests
    assert [other.name for other in FAULTS].count(fault.name) == 1
