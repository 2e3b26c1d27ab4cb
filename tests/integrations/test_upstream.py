"""The patches for other projects: each applies to the installed version, and its own tests pass on the patched copy.

Those tests train two steps with the option and without: equal weights to the last bit, a peak as promised. They run in
one process of their own, because the packages that they replace are imported here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import torch_recompute
from support.files import module_at

FOLDER = Path(__file__).resolve().parents[2] / "integrations" / "upstream"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that applies the patches."""
    return module_at(FOLDER / "try_patches.py")


@pytest.mark.nightly
def test_patched_copies_pass_their_tests(script: ModuleType) -> None:
    """The patches apply to what is installed, the tests that they bring pass, and the environment is as it was."""
    names = [name for name in script.PROJECTS if script.installed(name)]
    if not names:
        pytest.skip(f"none of {', '.join(script.PROJECTS)} is installed")
    sources = [file for name in names for file in changed(script, name)]
    before = [file.read_bytes() for file in sources]
    package = str(Path(torch_recompute.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, str(FOLDER / "try_patches.py"), *names],
        env=os.environ | {"PYTHONPATH": package}, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(re.findall(r"(\d+) passed", run.stdout)[0]) >= 3 * len(names)
    assert "skipped" not in run.stdout
    assert [file.read_bytes() for file in sources] == before


def changed(script: ModuleType, name: str) -> list[Path]:
    """The installed files for which a patch has others."""
    paths = re.findall(r"^\+\+\+ b/(.+)$", (FOLDER / f"{name}.patch").read_text(encoding="utf-8"), re.MULTILINE)
    root = script.installed(name).parent
    return [root / Path(path).relative_to(script.PROJECTS[name].root) for path in paths if "tests/" not in path]


def test_each_patch_is_small_lazy_and_described(script: ModuleType) -> None:
    """A patch adds at most 70 lines to a project, imports the library only in functions, and has a text and tests."""
    assert {path.stem for path in FOLDER.glob("*.patch")} == script.PROJECTS.keys()
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, project in script.PROJECTS.items():
        files = (FOLDER / f"{name}.patch").read_text(encoding="utf-8").split("diff --git ")[1:]
        tests = [text for text in files if text.startswith("a/tests/")]
        added = [line for text in files if text not in tests for line in re.findall(r"^\+(?!\+\+)(.*)$", text, re.M)]
        assert len(added) <= 70
        imports = [line for line in added if re.match(r"\s*(from|import) torch_recompute", line)]
        assert imports
        assert all(line.startswith("    ") for line in imports)
        assert re.search(r"pip install torch-recompute", "\n".join(added))
        (tested,) = re.findall(r"^a/(\S+)", tests[0], re.MULTILINE)[:1]
        text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
        assert tested in text
        assert all(f"## {part}\n" in text for part in ("What", "Why", "How", "Tested"))
        assert f"| {project.version} |" in readme
        if script.installed(name) and name != "torchtitan":
            assert version(name) == project.version
