"""Python files that are no part of a package: tools, examples, scripts, and the files that ranks find scenarios in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_at(path: Path, name: str = "") -> ModuleType:
    """Runs the file as a module that dataclasses and pickle find by a name; without one, it is that of the file."""
    specification = importlib.util.spec_from_file_location(name or path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = sys.modules[specification.name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
