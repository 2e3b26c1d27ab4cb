"""Names of a package that are imported when they are first asked for (PEP 562).

`import torch_recompute` runs in every process that trains, also in those that never plan; what a region needs is a
third of the package. So a package's `__init__.py` imports what is needed at once, says where the rest is in a dict, and
repeats it under `if TYPE_CHECKING`, for type checkers and editors; `tests/test_imports.py` compares the two.

    if not TYPE_CHECKING:
        __getattr__, __dir__ = lazily(globals(), {"planner": ("make_plan", "profile")})

Rejected: `lazy_loader`, a dependency for thirty lines; a proxy module, which shows where it should not.

Invariant: a name that has been asked for stands in the package like any other, so it is looked up once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(
    package: dict[str, Any], names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the `__getattr__` and `__dir__` of a package.

    Args:
        package: The package's `globals()`.
        names: By module, relative to the package: the names that it has. The package's own modules are names, too.
    """
    here: str = package["__name__"]
    module_of = {name: f"{here}.{module}" for module, given in names.items() for name in given}
    modules = {module: f"{here}.{module}" for module in names if "." not in module}

    def find(name: str) -> Any:
        if name in module_of:
            found = getattr(importlib.import_module(module_of[name]), name)
        elif name in modules:
            found = importlib.import_module(modules[name])
        else:
            raise AttributeError(f"module {here!r} has no attribute {name!r}")
        package[name] = found
        return found

    def listed() -> list[str]:
        return sorted({*package, *module_of, *modules})

    return find, listed
