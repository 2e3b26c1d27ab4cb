"""The wheel and the source archive: what is in them, what is not, and what they say of themselves."""

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "torch_recompute"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both archives lie, built as `make wheel` builds them, less its own environment."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling, which builds the archives, is not installed")
    if not PACKAGE.is_dir():
        pytest.skip("the sources are not here")
    out = tmp_path_factory.mktemp("dist")
    argv = [sys.executable, "-m", "hatchling", "build", "--directory", str(out)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Iterator[zipfile.ZipFile]:
    """The wheel, opened."""
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def sdist(folder: Path) -> set[str]:
    """The names in the source archive, from its own folder."""
    (path,) = folder.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_has_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """Every source file is in the wheel, with `py.typed` and the plugin; tests, tools and documentation are not."""
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    kinds = ("*.py", "*.html", "*.css", "*.js", "*.json", "*.txt")
    here = {f"torch_recompute/{p.relative_to(PACKAGE).as_posix()}" for kind in kinds for p in PACKAGE.rglob(kind)}
    besides = "torch_recompute/py.typed", "torch_recompute_cli.py", "torch_recompute_pytest.py"
    assert found == {*here, *besides}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_the_source_archive_can_be_built_and_tested(sdist: set[str]) -> None:
    """All that `make test` needs is in the source archive, and nothing that git ignores."""
    wanted = {
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
    }
    wanted |= {
        "src/torch_recompute/py.typed",
        "src/torch_recompute_pytest.py",
        "tests/project/public_api.txt",
        "tests/project/messages.txt",
    }
    wanted |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    wanted |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert wanted <= sdist
    assert not [name for name in sdist if "__pycache__" in name or name.startswith((".venv", "dist"))]


def test_what_the_wheel_says_of_itself(wheel: zipfile.ZipFile) -> None:
    """An index can show it: a readme in Markdown, a licence, versions, extras, and commands that are there."""
    said = metadata(wheel)
    assert (said["Name"], said["License-Expression"]) == ("torch-recompute", "Apache-2.0")
    assert said["Requires-Python"] == ">=3.10"
    assert said["Description-Content-Type"] == "text/markdown"
    readme = str(said.get_payload())
    assert readme.startswith("# torch-recompute")
    required = said.get_all("Requires-Dist") or []
    assert [one for one in required if "extra ==" not in one] == ["torch>=2.11"]
    extras = set(said.get_all("Provides-Extra") or [])
    assert {"cli", "plot", "plan", "config", "hf", "dev"} <= extras
    of = {extra: {one.partition(";")[0] for one in required if one.endswith(f"'{extra}'")} for extra in extras}
    assert of["all"] == set().union(*(of[extra] for extra in extras - {"all", "dev", "docs"})) > of["hf"]
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entries = wheel.read(name).decode()
    assert "torch-recompute = torch_recompute_cli:main" in entries
    assert "[pytest11]\ntorch_recompute_pytest = torch_recompute_pytest" in entries


def test_an_index_takes_the_archives(folder: Path, wheel: zipfile.ZipFile) -> None:
    """`twine check` finds nothing to complain of; the readme's links lead to this version alone."""
    readme, tag = str(metadata(wheel).get_payload()), f"v{metadata(wheel)['Version']}"
    assert not re.findall(r"\]\((?!https://)", readme)
    assert readme.count(f"/raw/{tag}/docs/pictures/step.svg)") == 1
    assert f"/blob/{tag}/docs/quick-start.md)" in readme
    assert not re.search(r"/(blob|raw)/main/|checkout; |\"\.\[", readme)
    assert 'pip install "torch-recompute[' in readme
    pytest.importorskip("twine", reason="twine is not installed (its pins need Python 3.11)")
    argv = [sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(folder.iterdir()))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_what_is_said_of_the_project_agrees(wheel: zipfile.ZipFile) -> None:
    """Version, Pythons, needs and addresses are the same in wheel, workflow, recipe, citation and badges."""
    yaml = pytest.importorskip("yaml")
    said = metadata(wheel)
    pythons = [c.rpartition(" ")[2] for c in said.get_all("Classifier") or [] if re.search(r":: 3\.\d+$", c)]
    urls = dict(url.split(", ") for url in said.get_all("Project-URL") or [])
    home = urls["Homepage"]
    recipe, citation = (
        yaml.safe_load((ROOT / name).read_text(encoding="utf-8")) for name in ("conda/recipe.yaml", "CITATION.cff")
    )
    assert said["Version"] == citation["version"] == recipe["context"]["version"]
    assert recipe["context"]["python_min"] == pythons[0] == said["Requires-Python"].removeprefix(">=")
    required = [Requirement(one) for one in said.get_all("Requires-Dist") or []]
    wanted = [r for r in required if not r.marker or re.fullmatch(r"extra == .(cli|plan).", str(r.marker))]
    needed = {(r.name, str(r.specifier)) for r in wanted}
    python, *others = recipe["requirements"]["run"]
    assert python == "python >=${{ python_min }}"
    assert {(r.name.removeprefix("py"), str(r.specifier)) for r in map(Requirement, others)} == needed
    assert home == citation["repository-code"] == recipe["about"]["repository"]
    assert urls["Documentation"] == recipe["about"]["documentation"]
    assert f"site_url: {urls['Documentation'].removesuffix('latest/')}\n" in (ROOT / "mkdocs.yml").read_text("utf-8")
    badges = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n\n")[2].partition("\n\n")[0]
    assert f"{home}/actions/workflows/ci.yml" in badges
    assert f"python-{pythons[0]}_to_{pythons[-1]}-" in badges
    assert "torch-2.11_or_newer-" in badges
    assert said["License-Expression"].replace("-", "--") in badges


def test_workflows_are_commands_of_the_makefile(wheel: zipfile.ZipFile) -> None:
    """Workflows run targets that are there, on the Pythons of the metadata; publishing is last, without a token."""
    yaml = pytest.importorskip("yaml")
    texts = [
        (ROOT / ".github/workflows" / name).read_text("utf-8") for name in ("ci.yml", "release.yml", "nightly.yml")
    ]
    pythons = [c.rpartition(" ")[2] for c in metadata(wheel).get_all("Classifier") or [] if re.search(r":: 3\.\d+$", c)]
    ci, release, nightly = (yaml.safe_load(text)["jobs"] for text in texts)
    assert [*nightly] == ["test-all"]
    assert ci["test"]["strategy"]["matrix"]["python"] == pythons
    for job in (ci["release-check"], release["build"]):
        (installed,) = (s["with"]["python-version"] for s in job["steps"] if "python-version" in s.get("with", {}))
        assert installed.split()[:2] == [pythons[0], pythons[-1]]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for text in texts:
        targets = re.findall(r"run: make ([\w-]+)", text)
        assert targets == [target for target in targets if f"\n{target}:" in makefile] != []
        assert "secrets." not in text
    writes = {name for name, job in release.items() if "write" in job.get("permissions", {}).values()}
    assert writes == {"index", "page", "manual"}
    assert "github.ref_type == 'tag'" in release["index"]["if"]
    assert release["index"]["needs"] == ["test", "build"]
    assert release["page"]["needs"] == release["manual"]["needs"] == ["index"]


USERS_TESTS = """
import pytest
import torch
import torch_recompute_pytest


def test_it_is_the_installed_one():
    assert torch_recompute_pytest.__file__.startswith({place!r})


def test_gradients(assert_same_gradients):
    layer = torch.nn.Linear(2, 2)
    assert_same_gradients(layer, (torch.ones(1, 2),), plain=layer)


@pytest.mark.peak_below("1KiB")
def test_peak(peak_memory):
    torch.zeros(1000)
"""


def test_the_installed_plugin_is_found(folder: Path, tmp_path: Path) -> None:
    """Once the wheel is installed, pytest finds the plugin by itself, in tests of a user who has set nothing up."""
    home = tmp_path / "home"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    (place,) = home.glob("lib/python*/site-packages")
    (path,) = folder.glob("*.whl")
    installing = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(path)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    done = subprocess.run(installing, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Where torch and pytest are comes after: nothing is fetched, and the wheel is what is found first.
    (place / "others.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    (tmp_path / "test_it.py").write_text(USERS_TESTS.format(place=str(place)), encoding="utf-8")
    testing = [str(python), "-m", "pytest", "--strict-markers", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(testing, env=clean, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert "1 failed" in done.stdout
    assert "FAILED test_it.py::test_peak" in done.stdout
    assert "torch-recompute-" in next(line for line in done.stdout.splitlines() if line.startswith("plugins: "))


def test_another_torch_has_a_venv_of_its_own() -> None:
    """`make test TORCH=...` makes and uses one virtual environment, in which torch alone has another pin."""
    if shutil.which("make") is None or not (ROOT / "Makefile").is_file():
        pytest.skip("make and the Makefile are needed")
    asked = ["make", "--dry-run", "--always-make", "-C", str(ROOT), "test"]
    plain, other = (
        subprocess.run([*asked, f"TORCH={torch}"], capture_output=True, text=True, check=True).stdout
        for torch in ("", "2.14.1")
    )
    pins = "sed 's/^torch==.*/torch==2.14.1/; /^setuptools==/d' constraints.txt > .venv-2.14.1/constraints.txt\n"
    assert pins in other
    assert ".venv/" in plain
    assert other.replace(pins, "").replace(".venv-2.14.1/constraints", "constraints").replace("-2.14.1", "") == plain


def test_the_tools_are_pinned_once() -> None:
    """Hooks before a commit call the tools that `make` has installed and runs, each of which has one pin."""
    yaml = pytest.importorskip("yaml")
    if not (ROOT / ".pre-commit-config.yaml").is_file():
        pytest.skip("the settings of the hooks are not here")
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repository in settings["repos"] for hook in repository["hooks"]]
    makefile, project, pins = ((ROOT / name).read_text() for name in ("Makefile", "pyproject.toml", "constraints.txt"))
    tools = {f".venv/bin/{tool}" for tool in ("ruff", "codespell", "pyright")}
    assert {hook["entry"].split()[0] for hook in hooks} == tools
    for hook in hooks:
        assert hook["language"] == "system"
        tool = hook["entry"].split()[0].rpartition("/")[2]
        assert f"$(BIN)/{tool}" in makefile
        (pin,) = (line for line in pins.splitlines() if line.startswith(f"{tool}=="))
        assert pin.partition("==")[2] in project.partition("dev = [")[2]
        assert f'"{pin}"' in project or f'"{tool}[nodejs]=={pin.partition("==")[2]}"' in project
    lines = [line for line in (ROOT / "tools" / "release-tools.txt").read_text("utf-8").splitlines() if line[0] != "#"]
    pinned = {line.partition("==")[0] for line in pins.splitlines() if "==" in line}
    assert {line.lower() for line in lines if "==" not in line} <= {name.lower() for name in pinned}
    assert set(re.findall(r'"([\w-]+)==', project.partition("\ndocs = [")[2].partition("\n]")[0])) <= set(lines)
