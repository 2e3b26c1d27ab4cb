"""Applies each patch to a copy of the installed package, and runs its tests against the copy.

    python integrations/upstream/try_patches.py                        # all that are installed
    python integrations/upstream/try_patches.py trl --checkout ~/trl   # and the tests that TRL has of this feature

The copy is a temporary folder of links to the installed files, and of the patched ones, in front of `PYTHONPATH`; the
environment stays as it is. A wheel has no tests, so those of a project come from a checkout of its repository, best at
the version that is installed. Exits with pytest's code; 3 if a patch does not apply.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Project:
    """A project that a patch is for.

    Attributes:
        version: The version on the package index that the patch was made against.
        root: The folder of its repository in which the package is.
        tests: What pytest is told to run of its own tests of the feature.
    """

    version: str
    root: str
    tests: tuple[str, ...]


PROJECTS = {
    "transformers": Project("5.23.0", "src", ("tests/trainer", "-k", "checkpointing")),
    "accelerate": Project("1.15.0", "src", ("tests/fsdp/test_fsdp.py", "-k", "PluginIntegration")),
    "trl": Project("1.16.0", "", ("tests/test_sft_trainer.py", "-k", "gradient_checkpointing")),
    "torchtitan": Project("0.3.0", "", ("tests/unit_tests/test_activation_checkpoint.py",)),
}


def installed(name: str) -> Path | None:
    """The folder of an installed package."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def patched(name: str, folder: Path) -> list[str]:
    """Makes a patched copy of an installed package in the folder, and returns the paths of the patch's own tests."""
    patch, package = HERE / f"{name}.patch", installed(name)
    assert package is not None
    root = folder / PROJECTS[name].root
    changed = re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    written = {package / Path(path).relative_to(PROJECTS[name].root, name) for path in changed if "tests/" not in path}

    def place(source: str, target: str) -> None:
        (shutil.copy2 if Path(source) in written else os.symlink)(source, target)

    shutil.copytree(package, root / name, copy_function=place, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
    return [path for path in changed if path.startswith("tests/")]


def run(names: list[str], checkout: Path | None, temporary: Path) -> int:
    """Tests the patched copies in one process, and the project's own tests in another."""
    paths, tests = [], []
    for name in names:
        folder = temporary / name
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "of an unknown version"
        print(f"{name}: the patch is for {PROJECTS[name].version}, installed is {found}", flush=True)
        try:
            tests += [str(folder / path) for path in patched(name, folder)]
        except subprocess.CalledProcessError:
            print(f"{name}.patch does not apply to {name} {found}. Install {name}=={PROJECTS[name].version}.")
            return 3
        paths.append(str(folder / PROJECTS[name].root))
    search = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": search, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

    def pytest(where: Path, *more: str) -> int:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            "--durations=6",
            *more,
        ]
        return subprocess.run(command, cwd=where, env=environment, check=False).returncode

    code = pytest(temporary, *tests)
    if code or checkout is None:
        return code
    (name,) = names
    shutil.copytree(checkout / "tests", temporary / name / "tests", dirs_exist_ok=True)
    return pytest(temporary / name, *PROJECTS[name].tests)


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROJECTS)}; all if none is given")
    parser.add_argument("--checkout", type=Path, help="a checkout of the one project that is named, with its tests")
    options = parser.parse_args(arguments)
    names = options.names or [name for name in PROJECTS if installed(name)]
    for name in names:
        if name not in PROJECTS:
            parser.error(f"there is no patch for {name!r}; there is one for each of {', '.join(PROJECTS)}")
        if not installed(name):
            parser.error(f"{name} is not installed. Write: pip install {name}=={PROJECTS[name].version}")
    if options.checkout is not None and len(names) != 1:
        parser.error("--checkout has the tests of one project: name it")
    for name in [name for name in PROJECTS if name not in names]:
        print(f"{name}: not tried")
    with tempfile.TemporaryDirectory(prefix="patched-") as temporary:
        return run(names, options.checkout, Path(temporary).resolve())


if __name__ == "__main__":
    sys.exit(main())
