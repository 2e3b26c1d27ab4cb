"""The public names and their signatures, as a file: nobody changes one without seeing it.

    python tests/project/test_public_api.py          # writes tests/project/public_api.txt again

The names are those of `__all__`, and of a class the attributes that do not begin with an underscore.
"""

import difflib
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).parent / "public_api.txt"
MODULES = (
    "torch_recompute",
    "torch_recompute.compat",
    "torch_recompute.compat.deepspeed",
    "torch_recompute.compat.megatron",
    "torch_recompute.compat.paddle",
    "torch_recompute.compiling",
    "torch_recompute.distributed",
    "torch_recompute.integrations.huggingface",
    "torch_recompute.integrations.lightning",
    "torch_recompute.memory",
    "torch_recompute.plan.units",
    "torch_recompute.state",
    "torch_recompute.stores",
    "torch_recompute.testing",
)
# A callback of a trainer has the trainer's class as its base where that is installed.
OWNERS = ("torch_recompute", "torch", "builtins")
STATE = ("Ambient", "CpuRng", "DeviceRng", "GeneratorRng", "NumpyRng", "PythonRng", "TensorState")


def public_api() -> str:
    """All public names, one a line, those of a class below it."""
    lines: list[str] = []
    for name in MODULES:
        module = importlib.import_module(name)
        words = STATE if name == "torch_recompute.state" else sorted(module.__all__)
        lines += [name, *(f"    {line}" for word in words for line in _entry(word, getattr(module, word)))]
    return "\n".join(lines) + "\n"


def _entry(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        yield f"{name}: module"
    elif isinstance(value, type):
        ours = [base for base in value.__bases__ if base.__module__.split(".")[0] in OWNERS and base is not object]
        bases = ", ".join(base.__name__ for base in ours)
        yield f"class {name}({bases})" if bases else f"class {name}"
        yield from (f"    {line}" for line in _members(value))
    elif callable(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _members(cls: type) -> Iterator[str]:
    if "__init__" in vars(cls):
        yield f"__init__{_signature(cls.__init__)}"  # type: ignore[misc]
    fields = {name: hint for name, hint in vars(cls).get("__annotations__", {}).items() if not name.startswith("_")}
    yield from (f"{name}: {getattr(hint, '__forward_arg__', hint)}" for name, hint in fields.items())
    for name, value in vars(cls).items():
        if name.startswith("_") or name in fields:
            continue
        if isinstance(value, property):
            yield f"{name}: property"
        elif isinstance(value, (staticmethod, classmethod)):
            yield f"{name}{_signature(value.__func__)}"
        elif callable(value):
            yield f"{name}{_signature(value)}"


def _signature(value: Any) -> str:
    text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are text until they are needed


def changes(then: str, now: str) -> str:
    """What has changed, and what to do about it; empty if nothing has."""
    lines = list(difflib.unified_diff(then.splitlines(), now.splitlines(), "as it was", "as it is", lineterm="", n=1))
    if not lines:
        return ""
    last = "If that is meant, write it down: python tests/project/test_public_api.py, and a line in CHANGELOG.md"
    return "\n".join(["The public names or their signatures have changed.", *lines, last])


def test_the_public_names_are_as_written_down() -> None:
    """Each public name has the signature that the file says, and there is no other."""
    found = changes(SNAPSHOT.read_text(encoding="utf-8"), public_api())
    assert not found, found


def test_a_change_is_shown() -> None:
    """The failure shows the line as it was and as it is, and the command that writes it down."""
    found = changes("class A\n    run(self, x)\n", "class A\n    run(self, x, y=1)\n")
    assert "-    run(self, x)" in found
    assert "+    run(self, x, y=1)" in found
    assert "python tests/project/test_public_api.py" in found


if __name__ == "__main__":
    SNAPSHOT.write_text(public_api(), encoding="utf-8")
    print(f"written: {SNAPSHOT}")
