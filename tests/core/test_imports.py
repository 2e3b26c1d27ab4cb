"""`import torch_recompute` loads torch and the core alone; other packages are imported at their first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torch_recompute

MODULES = 70
CPU_SECONDS = 0.15


def run(script: str) -> list[str]:
    """The words that a script prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_what_is_loaded_at_once() -> None:
    """Seventy of our modules at most, and none of what plans, measures or checks."""
    loaded = run("import sys, torch_recompute; print(*(m for m in sys.modules if m.startswith('torch_recompute.')))")
    assert len(loaded) <= MODULES
    rooms = {name.split(".")[1] for name in loaded}
    assert not rooms & {"plan", "planning", "simulation", "memory", "doctor", "report"}


def test_the_first_import_is_light() -> None:
    """Beyond `import torch` it takes 0.15 s of CPU, in one of five processes; the first is usually enough."""
    script = "import time, torch; t = time.process_time(); import torch_recompute; print(time.process_time() - t)"
    assert any(float(run(script)[0]) < CPU_SECONDS for _ in range(5))


def test_type_checkers_see_what_is_imported_later() -> None:
    """What is under `if TYPE_CHECKING` is what is found at run time, from the same modules."""
    tree = ast.parse(Path(str(torch_recompute.__file__)).read_text("utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {f"{node.module or ''}:{alias.name}" for node in imports for alias in node.names}
    found = torch_recompute._later  # pyright: ignore[reportAttributeAccessIssue]
    assert typed == {f"{module}:{one}" for module, names in found.items() for one in names}
    assert set(torch_recompute.__all__) <= set(dir(torch_recompute))
    for one in torch_recompute.__all__:
        assert getattr(torch_recompute, one) is torch_recompute.__dict__[one]
    for module in found:
        assert "." in module or getattr(torch_recompute, module).__name__ == f"torch_recompute.{module}"


def test_a_name_that_is_not_there() -> None:
    """Another name is an AttributeError, as in any module."""
    with pytest.raises(AttributeError, match="module 'torch_recompute' has no attribute 'recompte'"):
        _ = torch_recompute.recompte  # type: ignore[attr-defined]
