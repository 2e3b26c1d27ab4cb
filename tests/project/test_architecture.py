"""The rooms of the package, as a property of its source.

`ROOMS` is the one table, bottom room first: a file imports only rooms listed before its own. All the rest is reading
the syntax trees of the installed package. Each rule is a function from a module to its complaints; it is tried twice,
once on the package, where it must find nothing, and once on small bad sources, where it must find something.

Not seen, because a syntax tree does not know types: a private attribute of a torch *object* (`tensor._base`,
`node._saved_self`), and an import whose name is computed.
"""

import ast
import builtins
import importlib.util
import keyword
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

PACKAGE = "torch_recompute"
TESTS = Path(__file__).parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# Bottom first; CONTRIBUTING.md says what is in each. Rooms of one row do not import each other. `__init__` is the
# public face: what is above it uses the library the way a user does, what is below it must not reach up to it.
ROOMS = (
    ("errors",),
    ("_torch",),
    ("state",),
    ("stores",),
    ("engine",),
    ("region",),
    ("compat", "memory"),
    ("plan",),
    ("simulation",),
    ("planner",),
    ("compiling",),
    ("planning", "distributed"),
    ("doctor", "integrations"),
    ("testing",),
    ("__init__",),
    ("commands",),
    ("report", "__main__"),
)
HEIGHT = {room: height for height, row in enumerate(ROOMS) for room in row}

# These import torch and the standard library, and inside functions what LATE allows; nothing else, ever.
LEAN = {room for row in ROOMS for room in row} - {"distributed", "integrations", "commands", "report", "__main__"}
# Third-party package -> the rooms that may import it inside a function.
LATE = {"numpy": LEAN, "yaml": {"plan"}, "psutil": {"memory"}}

# All that `import torch_recompute.region` loads, in the order in which docs/trust.md leads through it. These run in
# every process that trains, so a reviewer reads them first; every other file is loaded when it is first used.
CORE = (
    *("errors/__init__", "state/observer"),
    *("_torch/__init__", "_torch/tensors", "_torch/devices", "_torch/modes", "_torch/tracing"),
    *("state/__init__", "state/tape", "state/values", "stores/__init__", "stores/store"),
    *("engine/__init__", "engine/exchange", "engine/taken", "engine/modules", "engine/guards"),
    *("engine/slots", "engine/region_call"),
    *("engine/views", "engine/saved_call"),
    *("region", "__init__"),
)
# The files of `plan` that look at a model. The others plan on plain data, without torch.
PLAN_FILES_WITH_TORCH = {
    *("units", "apply", "calls", "traced", "observe", "wrappers", "libraries", "sizes", "exhausted", "config"),
    "first_steps",
}

# The files of `planner` that plan on plain data, without torch, as a profile that was read from a file is.
PLANNER_FILES_WITHOUT_TORCH = {"cost", "solve", "bound", "profile"}


# Names in docstrings that are others': of libraries that are not imported where they are named, of kernels, of models.
OTHERS_NAMES = {
    *("AddmmBackward0", "GeluBackward0", "FnBackward", "BatchEncoding", "CUDA_VISIBLE_DEVICES", "DataParallel"),
    *("TransformerEncoderLayer", "_dump_snapshot", "_snapshot", "_saved_", "activation_checkpoint", "add_note"),
    *("compute_loss", "configure_model", "flop_counter", "fp32_precision", "initialize", "is_fused_kernel_acceptable"),
    *("mha_bwd", "no_sync", "python", "rms_norm_symint", "rrelu", "set_float32_matmul_precision", "training_step"),
    *("unfold", "weight_norm", "cleanup_recompute_tags", "set_checkpoint_debug_enabled", "set_checkpoint_early_stop"),
    *("fleet", "torch_recompute_pytest", "tests", "S", "G", "cu", "Cell"),
    *("attn", "fc1", "gate_proj", "linear_kv_up_proj", "q_proj", "toQ", "up_proj", "wkv_a"),
}

# Third-party packages that torch itself imports when it likes.
TORCH_BRINGS = {
    "filelock",
    "fsspec",
    "jinja2",
    "markupsafe",
    "mpmath",
    "networkx",
    "numpy",
    "sympy",
    "typing_extensions",
}


@dataclass(frozen=True)
class Import:
    """One imported name: `target` is the dotted module, `name` what `from` takes of it, if it is a `from`."""

    target: str
    name: str | None
    bound: str
    line: int
    in_function: bool
    typing_only: bool


@dataclass(frozen=True)
class Module:
    """One source file, its place in the package (`plan.apply`; `__init__` for the package's own face) and its tree."""

    path: str
    source: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The path as names, without the suffix."""
        return Path(self.path).with_suffix("").parts

    @property
    def room(self) -> str:
        """The first name: the room the file is in."""
        return self.parts[0]

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.source, self.path)

    def imports(self) -> list[Import]:
        """All imports of the file, wherever they stand, relative ones resolved."""
        return list(_imports(self, self.tree, in_function=False, typing_only=False))


def _package_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None, f"{PACKAGE} is not installed"
    assert spec.origin is not None, f"{PACKAGE} has no __init__.py"
    return Path(spec.origin).parent


@cache
def package_modules() -> list[Module]:
    """The modules of the package that `import torch_recompute` finds, without importing it."""
    folder = _package_folder()
    paths = sorted(path for path in folder.rglob("*.py"))
    return [Module(path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _imports(module: Module, node: ast.AST, *, in_function: bool, typing_only: bool) -> Iterator[Import]:
    where = {"in_function": in_function, "typing_only": typing_only}
    if isinstance(node, ast.Import):
        for alias in node.names:
            bound = alias.asname or alias.name.split(".")[0]
            yield Import(alias.name, None, bound, node.lineno, **where)
    elif isinstance(node, ast.ImportFrom):
        target = _resolve(module, node.level, node.module)
        for alias in node.names:
            yield Import(target, alias.name, alias.asname or alias.name, node.lineno, **where)
    elif isinstance(node, ast.Call) and _called_name(node) in {"import_module", "__import__"}:
        text = _constant_text(node.args[0]) if node.args else ""
        level = len(text) - len(text.lstrip("."))
        yield Import(_resolve(module, level, text[level:]), None, "", node.lineno, **where)
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        for child in node.body:
            yield from _imports(module, child, in_function=in_function, typing_only=True)
        for child in node.orelse:
            yield from _imports(module, child, **where)
        return
    inside = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from _imports(module, child, in_function=inside, typing_only=typing_only)


def _called_name(call: ast.Call) -> str | None:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def _constant_text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _resolve(module: Module, level: int, target: str | None) -> str:
    if level == 0:
        return target or ""
    # One dot is the folder of the file, whether the file is an `__init__` or not.
    folder = (PACKAGE, *module.parts[:-1])
    base = folder[: len(folder) - (level - 1)]
    return ".".join([*base, *([target] if target else [])])


def _room_of(imported: Import) -> str | None:
    """The room an import reaches, `__init__` for the package's own face, None for what is not ours."""
    names = imported.target.split(".")
    if names[0] != PACKAGE:
        return None
    if len(names) > 1:
        return names[1]
    return imported.name if imported.name in HEIGHT else "__init__"


def order_complaints(module: Module) -> list[str]:
    """Imports that do not go down, and files in no room."""
    if module.room not in HEIGHT:
        return [f"{module.path}: no room of that name; write it into ROOMS, at its height"]
    complaints: list[str] = []
    for imported in module.imports():
        room = _room_of(imported)
        if room is None or room == module.room or imported.typing_only:
            continue
        if room not in HEIGHT:
            complaints.append(f"{module.path}:{imported.line}: imports {room!r}, which is no room")
        elif HEIGHT[room] >= HEIGHT[module.room]:
            complaints.append(f"{module.path}:{imported.line}: {module.room!r} imports {room!r}, which is not below it")
    return complaints


def lean_complaints(module: Module) -> list[str]:
    """Third-party imports of the rooms that a plain `import torch_recompute` always loads."""
    if module.room not in LEAN:
        return []
    complaints: list[str] = []
    for imported in module.imports():
        top = imported.target.split(".")[0]
        if imported.typing_only or top in {"", PACKAGE, "torch"} or top in sys.stdlib_module_names:
            continue
        if imported.in_function and module.room in LATE.get(top, ()):
            continue
        place = "inside a function" if imported.in_function else "at module level"
        complaints.append(f"{module.path}:{imported.line}: imports {top} {place}; torch and the standard library only")
    return complaints


def plan_complaints(module: Module) -> list[str]:
    """Imports of torch by the files of `plan` and `planner` that are plain data and arithmetic."""
    of_planner = module.room == "planner" and module.parts[-1] in PLANNER_FILES_WITHOUT_TORCH
    if not of_planner and (module.room != "plan" or module.parts[-1] in PLAN_FILES_WITH_TORCH):
        return []
    return [
        f"{module.path}:{imported.line}: imports torch; of `plan`, only {sorted(PLAN_FILES_WITH_TORCH)} may, of "
        f"`planner`, {sorted(PLANNER_FILES_WITHOUT_TORCH)} may not"
        for imported in module.imports()
        if imported.target.split(".")[0] == "torch" and not imported.typing_only
    ]


def _is_private(dotted: str) -> bool:
    names = dotted.split(".")
    return names[0] == "torch" and any(
        name.startswith("_") and not (name.startswith("__") and name.endswith("__")) for name in names[1:]
    )


def private_torch_complaints(module: Module) -> list[str]:
    """Uses of private torch names outside `_torch`, by import, by attribute (through any alias) or by `getattr`."""
    if module.room == "_torch":
        return []
    found: set[tuple[int, str]] = set()
    aliases: dict[str, str] = {}
    for imported in module.imports():
        if imported.target.split(".")[0] != "torch":
            continue
        full = imported.target if imported.name is None else f"{imported.target}.{imported.name}"
        if _is_private(full):
            found.add((imported.line, full))
        # `import torch.nn` binds `torch`; `import torch.nn as nn` and `from torch import nn` bind `nn` to torch.nn.
        aliases[imported.bound] = "torch" if imported.name is None and imported.bound == "torch" else full
    for node in ast.walk(module.tree):
        dotted = _dotted(node, aliases)
        if dotted is not None and _is_private(dotted):
            found.add((node.lineno, dotted))  # type: ignore[attr-defined]
    return [f"{module.path}:{line}: private {name}; shims live in _torch" for line, name in sorted(found)]


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, aliases)
        return None if base is None else f"{base}.{node.attr}"
    if isinstance(node, ast.Call) and _called_name(node) in {"getattr", "hasattr"} and len(node.args) >= 2:
        base = _dotted(node.args[0], aliases)
        return None if base is None else f"{base}.{_constant_text(node.args[1])}"
    return None


def docstring_complaints(module: Module) -> list[str]:
    """Modules without a docstring."""
    return [] if ast.get_docstring(module.tree) else [f"{module.path}: no module docstring"]


def _docstrings(module: Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def riddle_complaints(module: Module) -> list[str]:
    """First lines of docstrings that describe a thing by a question in the place of its name."""
    return [
        f"{module.path}:{line}: {text.splitlines()[0]!r} is a riddle; say what the thing does or is"
        for line, text in _docstrings(module)
        if re.match(r"(What|Who|How|Whatever|Whoever|That)\b", text)
    ]


def untold_tests(module: Module) -> list[str]:
    """Tests without a docstring."""
    return [
        f"{module.path}:{node.lineno}: {node.name} has no docstring; one sentence, the property that it shows"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]


def test_the_package_is_read() -> None:
    """The modules that the rules read are really there."""
    assert "__init__.py" in [module.path for module in package_modules()]


@pytest.mark.parametrize(
    "rule",
    [
        *(order_complaints, lean_complaints, plan_complaints, private_torch_complaints, docstring_complaints),
        riddle_complaints,
    ],
)
def test_the_package_keeps_the_rule(rule) -> None:
    """Imports go down, lean rooms need torch alone, plans are plain data, private names are in `_torch`, and so on."""
    # One `from` with many names complains once.
    assert list(dict.fromkeys(complaint for module in package_modules() for complaint in rule(module))) == []


def circles(modules: list[Module]) -> set[str]:
    """The files that import each other, by whatever way round, when they are loaded or for a type."""
    names = {".".join(part for part in module.parts if part != "__init__"): module for module in modules}
    imports: dict[str, set[str]] = {}
    for name, module in names.items():
        targets: set[str] = set()
        for one in module.imports():
            inner = f"{one.target}.{one.name}".removeprefix(f"{PACKAGE}.")
            if not one.in_function:
                targets.add(inner if inner in names else one.target.removeprefix(f"{PACKAGE}."))
        imports[name] = targets & names.keys() - {"", name}
    while free := [name for name, wanted in imports.items() if not wanted & imports.keys()]:
        for name in free:
            del imports[name]
    while unused := [name for name in imports if not any(name in wanted for wanted in imports.values())]:
        for name in unused:
            del imports[name]
    return set(imports)


def test_no_file_imports_itself_by_way_of_others() -> None:
    """There is no circle of imports between files, within a room neither, those for types included."""
    assert circles(package_modules()) == set()
    one = Module("plan/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import B")
    other = Module("plan/b.py", "from . import a")
    assert circles([one, other, Module("plan/c.py", "from . import a")]) == {"plan.a", "plan.b"}


def test_contributing_describes_each_room() -> None:
    """The table of rooms in CONTRIBUTING.md has a line for each row of `ROOMS`, in their order."""
    text = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    assert [tuple(re.findall(r"`([^`]+?)(?:/|\.py)?`", row)) for row in rows] == list(ROOMS)


def _identifiers(module: Module) -> Iterator[str]:
    """Yields every name that the code of a file has, those in its strings included."""
    tree = module.tree
    documented = (node for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and ast.get_docstring(node))
    docstrings = {node.body[0].value for node in documented}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            yield from [*node.name.split("."), node.asname or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield from re.findall(r"\w+", node.value)
        else:
            values = (getattr(node, field, None) for field in ("id", "attr", "arg", "name"))
            yield from (value for value in values if isinstance(value, str))


def unknown_names(modules: list[Module]) -> list[str]:
    """Names between backticks in docstrings that neither the package nor Python has, and files that are not there."""
    names = {name for module in modules for name in _identifiers(module)} | set(dir(builtins)) | set(keyword.kwlist)
    names |= {part for module in modules for part in module.parts} | OTHERS_NAMES
    files = {module.path for module in modules}
    folders = TESTS.parent, _package_folder()
    complaints: list[str] = []
    for module in modules:
        for line, text in _docstrings(module):
            for quoted in re.findall(r"`([^`\n]+)`", text):
                if re.fullmatch(r"[\w/.]+\.(py|txt|md)", quoted):
                    near = (Path(module.path).parent / quoted).as_posix()
                    found = {quoted, near} & files or any((folder / near).exists() for folder in folders)
                    if not found and not any((folder / quoted).exists() for folder in folders):
                        complaints.append(f"{module.path}:{line}: there is no file {quoted}")
                    continue
                last = [dotted.split(".")[-1] for dotted in re.findall(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", quoted)]
                complaints += [
                    f"{module.path}:{line}: there is no {name} ({quoted})" for name in last if name not in names
                ]
    return complaints


def test_docstrings_name_what_exists() -> None:
    """Each name and each file that a docstring puts between backticks exists."""
    assert unknown_names(package_modules()) == []
    text = 'def here():\n    """See `here`, `there.gone` and `away.py`, not `b.py` or `len`."""'
    assert unknown_names([Module("plan/a.py", text), Module("plan/b.py", "")]) == [
        "plan/a.py:2: there is no gone (there.gone)",
        "plan/a.py:2: there is no file away.py",
    ]


def test_every_test_says_what_it_shows() -> None:
    """Every test carries a docstring."""
    paths = sorted(TESTS.rglob("test_*.py"))
    files = [Module(path.relative_to(TESTS).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    assert "project/test_architecture.py" in [file.path for file in files]
    assert [complaint for file in files for complaint in untold_tests(file)] == []


def test_the_core_is_these_files() -> None:
    """Importing a region loads exactly the files of `CORE`."""
    script = (
        "import sys, torch_recompute.region;"
        f"print(*(m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == {PACKAGE!r}), sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = {module.path.removesuffix(".py"): module for module in package_modules()}
    loaded = {name for name in modules if any(line.endswith(f"{PACKAGE}/{name}.py") for line in run.stdout.split("\n"))}
    assert loaded == set(CORE)
    assert len(loaded) == len(run.stdout.split())


# All that the core imports of the standard library: nothing that reaches files, sockets, processes or the environment.
CORE_IMPORTS = {
    *("__future__", "_thread", "collections", "contextlib", "contextvars", "ctypes", "dis", "enum", "functools"),
    *(
        "gc",
        "importlib",
        "itertools",
        "math",
        "operator",
        "random",
        "threading",
        "types",
        "typing",
        "warnings",
        "weakref",
    ),
}
CALLED_BY_NONE = {"open", "exec", "eval", "compile", "__import__", "input", "threading.Thread"}


def reaching_complaints(module: Module) -> list[str]:
    """Imports and calls by which a file could reach files, sockets, other processes or the environment."""
    complaints: list[str] = []
    for imported in module.imports():
        top = imported.target.split(".")[0]
        late = imported.in_function and top in LATE
        if not (late or imported.typing_only) and top not in {"", PACKAGE, "torch", *CORE_IMPORTS}:
            complaints.append(f"{module.path}:{imported.line}: imports {top}")
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    called = [(node.lineno, ast.unparse(node.func)) for node in calls]
    return complaints + [f"{module.path}:{line}: calls {name}" for line, name in called if name in CALLED_BY_NONE]


def test_the_core_reaches_nothing_outside() -> None:
    """The core imports only these modules of Python, and neither opens a file, nor runs text, nor starts a thread."""
    modules = {module.path.removesuffix(".py"): module for module in package_modules()}
    assert [complaint for name in CORE for complaint in reaching_complaints(modules[name])] == []
    for bad in ("import os", "import socket", "def f():\n    import subprocess", "open('x')", "import numpy"):
        assert reaching_complaints(Module("region.py", bad))
    assert reaching_complaints(Module("region.py", "import threading\nthreading.Thread(target=print).start()"))


def test_the_page_on_trust_names_the_core() -> None:
    """docs/trust.md has a row for each file of the core, in reading order, and names tests that are there."""
    root = TESTS.parent
    text = (root / "docs/trust.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)\.py` \|.*\| ([^|]+) \|$", text, re.MULTILINE)
    assert tuple(name for name, _ in rows) == CORE
    assert f"the\n{len(CORE)} files below" in text
    proofs = {name for _, proof in rows for name in re.findall(r"`([^`]+)`", proof)} | set(
        re.findall(r"tests/[\w/]+\.py", text)
    )
    assert [name for name in sorted(proofs) if not (root / name).exists()] == []
    assert [name for name in re.findall(r"\(`(test_\w+)`\)", text) if name not in globals()] == []
    assert "twenty modules of the standard library" in text
    assert len(CORE_IMPORTS) == 20


def test_import_brings_torch_only() -> None:
    """`import torch_recompute` loads no third-party package that torch does not bring, whatever is installed."""
    script = (
        "import sys, torch; before = set(sys.modules); import torch_recompute;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) - {PACKAGE, "torch"} - TORCH_BRINGS - sys.stdlib_module_names == set()


DOC = '"""Something."""\n'

BAD = {
    order_complaints: [
        ("region.py", "from torch_recompute.plan import Plan"),
        ("region.py", "from .memory import measure"),
        ("region.py", "from . import plan"),
        ("region.py", "from . import recompute"),
        ("region.py", "import torch_recompute"),
        ("region.py", "import torch_recompute.commands as c"),
        ("region.py", "def f():\n    from .plan.solve import solve"),
        ("region.py", "import importlib\nimportlib.import_module('torch_recompute.plan')"),
        ("region.py", "import importlib\nimportlib.import_module('.plan', __package__)"),
        ("region.py", "from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    from . import plan"),
        ("region.py", "if TYPE_CHECKING:\n    pass\nelse:\n    from . import plan"),
        ("planner/solve.py", "from ..planning import make_plan"),
        ("plan/__init__.py", "from ..planning import make_plan"),
        ("plan/plan.py", "from .. import commands"),
        ("doctor/__init__.py", "from .._ranks import main"),
        ("__init__.py", "from .commands.cli import main"),
        ("errors.py", "from . import _torch"),
        ("state.py", "from .engine import x"),
        ("utils.py", ""),
    ],
    lean_complaints: [
        ("region.py", "import numpy"),
        ("state.py", "try:\n    import numpy as np\nexcept ImportError:\n    np = None"),
        ("__init__.py", "from rich import print"),
        ("plan.py", "def f():\n    import psutil"),
        ("compat/paddle.py", "class A:\n    import numpy.random"),
        ("plan/settings.py", "import yaml"),
        ("region.py", "def f():\n    import yaml"),
    ],
    plan_complaints: [("planner/solve.py", "import torch"), ("plan/plan.py", "def f():\n    from torch import nn")],
    private_torch_complaints: [
        ("region.py", "import torch._C"),
        ("region.py", "from torch._functorch import config"),
        ("region.py", "from torch import _dynamo"),
        ("region.py", "from torch.utils._pytree import tree_map"),
        ("region.py", "import torch\ntorch._C._get_autograd()"),
        ("region.py", "import torch.nn\ntorch.utils._pytree"),
        ("region.py", "import torch.distributed as dist\ndist._functional_collectives"),
        ("region.py", "from torch import nn as n\nn.Module._call_impl"),
        ("region.py", "import torch\ngetattr(torch, '_C')"),
        ("plan/units.py", "import torch\ndef f():\n    return torch.autograd._unsafe()"),
    ],
    docstring_complaints: [("region.py", "import torch")],
    riddle_complaints: [
        ("region.py", '"""What runs."""'),
        ("region.py", 'class A:\n    """How often it runs.\n\n    More."""'),
    ],
    untold_tests: [("laws/test_law.py", "class TestA:\n    def test_b(self):\n        pass")],
}

GOOD = {
    order_complaints: [
        ("region.py", "from .stores import OnDevice\nfrom . import errors, _torch\nimport torch"),
        ("region.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .plan import Plan"),
        ("region.py", "import typing as t\nif t.TYPE_CHECKING:\n    from .plan import Plan"),
        ("planner/solve.py", "from .cost import cost\nfrom ..errors import PlanError\nfrom . import dp"),
        ("plan/__init__.py", "from .solve import solve\nfrom ..region import recompute"),
        ("commands/cli.py", "from .. import __version__\nfrom torch_recompute import make_plan"),
        ("__init__.py", "from .plan.config import RecomputeConfig\nfrom . import errors"),
    ],
    lean_complaints: [
        ("state.py", "import random, contextlib, torch.cuda\ndef f():\n    import numpy"),
        ("state.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy"),
        ("plan/settings.py", "def f():\n    import yaml"),
        ("commands/report.py", "import plotly"),
    ],
    plan_complaints: [("plan/units.py", "import torch"), ("planner/solve.py", "import heapq\nfrom .cost import cost")],
    private_torch_complaints: [
        ("_torch.py", "from torch._C import _x\nimport torch\ntorch._dynamo"),
        ("region.py", "import torch\ntorch.__version__\nself._x = torch.nn.functional.gelu(y._z)"),
    ],
    docstring_complaints: [("region.py", DOC)],
    riddle_complaints: [("region.py", '"""Whether it runs."""'), ("region.py", "def f():\n    pass")],
    untold_tests: [("test_a.py", f"def test_b():\n    {DOC}\ndef helper():\n    pass")],
}


def each(table):
    cases = [pytest.param(rule, *case, id=rule.__name__) for rule, cases in table.items() for case in cases]
    return pytest.mark.parametrize(("rule", "path", "source"), cases)


@each(BAD)
def test_rules_complain(rule, path, source) -> None:
    """Each rule finds what it forbids, and says in which file."""
    (complaint, *_) = rule(Module(path, source))
    assert complaint.startswith(path)


@each(GOOD)
def test_rules_allow(rule, path, source) -> None:
    """Each rule is silent where nothing is wrong."""
    assert rule(Module(path, source)) == []
