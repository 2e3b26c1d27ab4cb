"""Does all of a release but the upload, into the folder `release/`, and prints a table of what passed.

    make release-check                          # this program, in an environment with its tools
    make release-check ARGS="--tag v0.1.0"      # as the release does it: nothing may be left out

A row is *passed*, *failed*, or *in part*, where this machine lacks something: a Python, a channel, a build of torch for
the CPU. What torch pip can get decides: where both its first choice and the version in constraints.txt bring CUDA's
packages, gigabytes that are of no use without a device, the wheel is installed without torch; `--any-torch` installs it
with its first choice. `release/` has what is published:

    dist/           the source archive and the wheel, for the index
    conda/noarch/   the conda package, built from the source archive
    manual/         the manual as its branch is served, one folder per version
    *.cdx.json      the software bill of materials (CycloneDX) of `torch-recompute[all]`
    notes.md, SHA256SUMS, report.md
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import _measure

ROOT = Path(__file__).resolve().parents[1]
NAME = "torch-recompute"
TOOLS = Path(sysconfig.get_path("scripts"))
CHANNEL = "https://conda.anaconda.org/conda-forge"
LINK = re.compile(r"\]\((https?://[^)\s]+)\)")
CUDA = re.compile(r"(nvidia|cuda)-")
HIDDEN = ("PYTHON", "PYTEST", "VIRTUAL_ENV")
# A region's gradients are those of the plain call; the package alone, without an extra, can do that.
A_STEP = """
import torch, torch_recompute
layer, x = torch.nn.Linear(8, 8), torch.randn(2, 8, requires_grad=True)
grads = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (layer, torch_recompute.recompute(layer))]
assert torch.equal(*grads), grads
print(torch.__version__)
"""


class FailedError(Exception):
    """A check's complaint."""


class InPartError(Exception):
    """What a check did, and what this machine has no means for."""


class Release:
    """One release in the making: the folder, its archives, and the first environment that has all extras."""

    def __init__(self, folder: Path, scratch: Path, *, tag: str | None, any_torch: bool) -> None:
        self.folder, self.scratch, self.tag, self.any_torch = folder, scratch, tag, any_torch
        self.dist = folder / "dist"
        self.full: Path | None = None
        self.metadata: Message = Message()

    @property
    def wheel(self) -> Path:
        """The wheel, once it is built."""
        return next(self.dist.glob("*.whl"))

    @property
    def sdist(self) -> Path:
        """The source archive, once it is built."""
        return next(self.dist.glob("*.tar.gz"))

    @property
    def version(self) -> str:
        """What the wheel says."""
        return str(self.metadata["Version"])


def run(*argv: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Runs a program without what leads Python elsewhere, and returns what it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)} | env
    done = subprocess.run([*map(str, argv)], cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise FailedError(f"{Path(argv[0]).name} {' '.join(map(str, argv[1:4]))}: {said}")
    return done.stdout


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def archives(release: Release) -> str:
    """Builds both archives twice, the wheel from the source archive, and has twine look at them."""
    again = release.scratch / "again"
    for folder in (release.dist, again):
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    files = sorted(release.dist.iterdir())
    differ = [path.name for path in files if digest(path) != digest(again / path.name)]
    if differ:
        raise FailedError(f"a second build has other bytes: {', '.join(differ)}")
    run(TOOLS / "twine", "check", "--strict", *files)
    with zipfile.ZipFile(release.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        release.metadata = email.message_from_bytes(wheel.read(name))
    return f"{', '.join(path.name for path in files)}: two builds have the same bytes, twine passes"


def project(release: Release) -> str:
    """The metadata, the classifiers and the citation are valid; the tag is the version, and the changelog has it."""
    run(TOOLS / "validate-pyproject", "pyproject.toml")
    run(TOOLS / "check-jsonschema", "--builtin-schema", "vendor.citation-file-format", "CITATION.cff")
    if release.tag not in (None, f"v{release.version}"):
        raise FailedError(f"the tag is {release.tag}, the version {release.version}")
    sections = re.split(r"^## \[([^\]]+)\].*$", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    found = release.version if release.version in texts else "Unreleased"
    (release.folder / "notes.md").write_text(texts[found].strip() + "\n", encoding="utf-8")
    if found != release.version:
        raise InPartError(f"metadata and citation are valid; CHANGELOG.md has no section {release.version} yet")
    return f"metadata and citation are valid, notes.md is the section {found} of CHANGELOG.md"


def description(release: Release) -> str:
    """Each link of the description that leads to the repository names a file of the source archive, at the tag."""
    text = str(release.metadata.get_payload())
    urls = dict(one.split(", ") for one in release.metadata.get_all("Project-URL") or [])
    home = urls["Homepage"]
    links = [*LINK.findall(text), *urls.values()]
    with tarfile.open(release.sdist) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    tagged = re.compile(rf"{re.escape(home)}/(?:blob|raw)/(?:v{re.escape(release.version)}|main)/([^#]+)")
    inside = [match[1] for match in map(tagged.fullmatch, (link.partition("#")[0] for link in links)) if match]
    broken = sorted({path for path in inside if path.rstrip("/") not in there and not (ROOT / path).is_dir()})
    relative = re.findall(r"\]\((?!https?://|#)([^)]+)\)", text)
    if broken or relative or not inside:
        raise FailedError(
            f"links that lead nowhere: {', '.join([*broken, *relative]) or 'none leads to the repository'}"
        )
    return f"{len(inside)} links lead to files of the source archive; {len(links) - len(inside)} elsewhere, not fetched"


def results(release: Release) -> str:
    """No result of `benchmarks/results` is many commits behind the code that it measures; those of GPUs are named."""
    if not _measure.has_history():
        raise InPartError("no git history here, so how old results are is not known")
    ages = [*_measure.ages()]
    old = [f"{age.name} {age}" for age in ages if age.stale]
    if old:
        raise FailedError(f"{len(old)} results are over {_measure.MOST_BEHIND} commits behind:\n" + "\n".join(old))
    elsewhere = [age for age in ages if _measure.ELSEWHERE in age.command]
    since = ", ".join(f"{age.name} not run since {age.commit}" for age in elsewhere)
    return f"{len(ages) - len(elsewhere)} are at most {_measure.MOST_BEHIND} commits behind what they measure; {since}"


def workflows(release: Release) -> str:
    """The workflows follow GitHub's schema, each job has a limit of time, and zizmor finds no weakness."""
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    schemas = {"vendor.github-workflows": files}
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    schemas["vendor.github-issue-forms"] = [path for path in forms if path.stem != "config"]
    schemas["vendor.github-issue-config"] = [path for path in forms if path.stem == "config"]
    for schema, paths in schemas.items():
        run(TOOLS / "check-jsonschema", "--builtin-schema", schema, *paths)
    run(TOOLS / "zizmor", "--offline", "--no-progress", ROOT / ".github" / "workflows")
    return f"{', '.join(path.name for path in files)} and {len(forms)} forms: schemas hold, zizmor finds nothing"


def find_python(version: str) -> Path | None:
    """An interpreter of that version, by its name on the path; pyenv is told which one is meant."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return Path(sys.executable)
    found = shutil.which(f"python{version}")
    asking = [str(found), "-c", "import sys; print(sys.executable)"]
    env = os.environ | {"PYENV_VERSION": version}
    done = subprocess.run(asking, env=env, capture_output=True, text=True, check=False) if found else None
    return Path(done.stdout.strip()) if done and done.returncode == 0 else None


def install(release: Release, python: Path, *what: str) -> None:
    """Installs into an environment that has nothing, pip neither, from the index and the archives built here."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "--quiet", "install"]
    run(*pip, "--find-links", release.dist, *what)


def would_install(release: Release, python: Path, *what: str) -> list[dict[str, Any]]:
    """The metadata of the packages that pip would install."""
    report = release.scratch / "pip.json"
    install(release, python, "--dry-run", "--ignore-installed", "--report", str(report), *what)
    return [one["metadata"] for one in json.loads(report.read_text("utf-8"))["install"]]


def usable_torch(release: Release, python: Path) -> str | None:
    """What to ask pip for: its first choice of torch, else the one that tests pin; None where both are for CUDA."""
    (needed,) = (one for one in release.metadata.get_all("Requires-Dist") or [] if re.fullmatch(r"torch\W[^;]+", one))
    pinned = re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    for asked in (needed, *pinned):
        (found,) = would_install(release, python, "--no-deps", asked)
        for_cuda = [one for one in found.get("requires_dist", []) if CUDA.match(one)]
        if release.any_torch or not for_cuda or sys.platform != "linux":
            return asked
    return None


def says_its_version(release: Release, home: Path) -> None:
    """The installed command runs, without torch too, and is the one that was built."""
    said = run(home / "bin" / NAME, "--version", cwd=home).split()
    if release.version not in said:
        raise FailedError(f"{NAME} --version says {' '.join(said)}")


def in_empty_environment(release: Release, version: str) -> str:
    """Installs the wheel, then all extras, and trains: with the package alone, and as the description says."""
    found = find_python(version)
    if found is None:
        raise InPartError(f"python{version} is not on the path: nothing was installed")
    home = release.scratch / version
    run(found, "-m", "venv", "--without-pip", home)
    python, exact = home / "bin" / "python", f"=={release.version}"
    torch = usable_torch(release, python)
    if torch is None:
        wanted = would_install(release, python, f"{NAME}[all]{exact}")
        install(release, python, "--no-deps", f"{NAME}{exact}")
        run(python, "-W", "error", "-m", "compileall", "-q", home / "lib", cwd=home)
        says_its_version(release, home)
        raise InPartError(
            f"installed, torch not available: its builds are for CUDA. Every file compiles, the command says its "
            f"version, and [all] resolves to {len(wanted)} packages"
        )
    install(release, python, torch, f"{NAME}{exact}")
    trained = run(python, "-c", A_STEP, cwd=home).strip()
    install(release, python, torch, f"{NAME}[all]{exact}")
    (code,) = re.findall(r"^```python\n(.*?)^```$", str(release.metadata.get_payload()), re.MULTILINE | re.DOTALL)
    run(python, "-c", code, cwd=home)
    says_its_version(release, home)
    run(sys.executable, "-m", "pip", "--python", python, "check")
    release.full = release.full or home
    return f"installed, imported, a step trained on torch {trained}; with [all] the description's code runs"


def bill(release: Release) -> str:
    """Writes what `torch-recompute[all]` installs: each package with its version, licence and what it needs."""
    if release.full is None:
        raise InPartError("no environment has torch-recompute[all]: --any-torch installs it with CUDA's packages")
    out = release.folder / f"torch_recompute-{release.version}.cdx.json"
    kind = ["--mc-type", "library", "--pyproject", ROOT / "pyproject.toml", "--output-reproducible", "--validate"]
    run(TOOLS / "cyclonedx-py", "environment", *kind, "--of", "JSON", "-o", out, release.full / "bin" / "python")
    written = json.loads(out.read_text("utf-8"))
    named = {one["name"] for one in written["components"]}
    if written["metadata"]["component"]["name"] != NAME or not {"torch", "transformers"} <= named:
        raise FailedError(f"{out.name} is not of {NAME} or lacks torch: {sorted(named)}")
    here = [text for text in (str(ROOT), str(release.scratch), "file://") if text in out.read_text("utf-8")]
    if here:
        raise FailedError(f"{out.name} names places of this machine: {here}")
    return f"{out.name}: {len(named)} packages, valid CycloneDX {written['specVersion']}"


def channel_answers() -> bool:
    """Whether conda-forge can be reached."""
    try:
        with urllib.request.urlopen(f"{CHANNEL}/noarch/repodata_shards.msgpack.zst", timeout=20):
            return True
    except (urllib.error.URLError, OSError):
        return False


def conda(release: Release) -> str:
    """Builds the recipe from the source archive, and compares the package with the recipe and the wheel."""
    import yaml  # pyright: ignore[reportMissingModuleSource]
    from rattler_build import Package, Stage0Recipe, ToolConfiguration  # pyright: ignore[reportMissingImports]

    recipe: dict[str, Any] = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text("utf-8"))
    recipe["source"] = {"path": str(release.sdist)}
    online = channel_answers()
    if not online:
        # What the recipe's host asks for is in this environment: pip and the build backend.
        recipe["requirements"]["host"] = []
        recipe["build"]["script"] = recipe["build"]["script"].replace("${{ PYTHON }}", sys.executable)
        recipe["build"]["script"] += " --no-compile --prefix $PREFIX"
    work = release.scratch / "conda"
    (variant,) = Stage0Recipe.from_dict(recipe).render()
    tests = ToolConfiguration(test_strategy="native" if online else "skip")
    variant.run_build(tool_config=tests, output_dir=str(work), channels=["conda-forge"] if online else [])
    (built,) = (work / "noarch").glob("*.conda")
    package = Package.from_file(built)
    with zipfile.ZipFile(release.wheel) as wheel:
        wanted = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = {name.removeprefix("site-packages/") for name in package.files}
    if lacks := wanted - files:
        raise FailedError(f"{built.name} lacks {', '.join(sorted(lacks))}")
    if besides := {name for name in files - wanted if ".dist-info/" not in name or name.endswith("direct_url.json")}:
        raise FailedError(f"{built.name} has also {', '.join(sorted(besides))}")
    if len(package.depends) != len(recipe["requirements"]["run"]) or str(package.noarch) != "python":
        raise FailedError(f"{built.name} depends on {package.depends}")
    shutil.copytree(work / "noarch", release.folder / "conda" / "noarch")
    done = f"{built.name}: {len(wanted)} files, those of the wheel"
    if not online:
        raise InPartError(f"{done}; built without conda-forge, which does not answer: the recipe's tests have not run")
    return f"{done}; built and tested on conda-forge"


def manual(release: Release) -> str:
    """Builds the manual of this version with mike, in a repository of its own, and lays out its branch."""
    site, version = release.scratch / "manual", release.version
    run("git", "init", "--quiet", site)
    who = {f"GIT_{role}_{key}": "release-check" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    env = who | {"PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}", "NO_MKDOCS_2_WARNING": "1"}  # mike starts mkdocs
    run("git", "commit", "--quiet", "--allow-empty", "--message", "Nothing", cwd=site, **who)
    mike = [TOOLS / "mike", "deploy", "-F", ROOT / "mkdocs.yml", "--branch", "pages", "--update-aliases"]
    run(*mike, version, "latest", cwd=site, **env)
    run(TOOLS / "mike", "set-default", "-F", ROOT / "mkdocs.yml", "--branch", "pages", "latest", cwd=site, **env)
    run("git", "checkout", "--quiet", "pages", cwd=site)
    (listed,) = json.loads((site / "versions.json").read_text("utf-8"))
    pages = len([*(site / version).rglob("*.html")])
    if (listed["version"], listed["aliases"]) != (version, ["latest"]) or not (
        site / "latest" / "index.html"
    ).is_file():
        raise FailedError(f"versions.json lists {listed}")
    shutil.copytree(site, release.folder / "manual", symlinks=True, ignore=shutil.ignore_patterns(".git"))
    return f"{pages} pages of {version}, which `latest` and the root lead to"


def checksums(release: Release) -> str:
    """Writes the SHA-256 of each file that is published."""
    files = [*release.dist.iterdir(), *release.folder.glob("conda/noarch/*.conda"), *release.folder.glob("*.cdx.json")]
    lines = [f"{digest(path)}  {path.relative_to(release.folder).as_posix()}" for path in sorted(files)]
    (release.folder / "SHA256SUMS").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"SHA256SUMS of {len(lines)} files"


def checks(release: Release) -> Iterator[tuple[str, Callable[[Release], str]]]:
    """Each row's name and its check; the Pythons are the oldest, this one, and the newest of the classifiers."""
    yield "archives", archives
    yield "metadata", project
    yield "description", description
    yield "workflows", workflows
    yield "results", results
    said = [str(one).rpartition(" ")[2] for one in release.metadata.get_all("Classifier") or []]
    known = [one for one in said if re.fullmatch(r"3\.\d+", one)]
    for version in dict.fromkeys((known[0], "{}.{}".format(*sys.version_info), known[-1])):
        yield f"Python {version}", lambda release, version=version: in_empty_environment(release, version)
    yield "SBOM", bill
    yield "conda", conda
    yield "manual", manual
    yield "checksums", checksums


def check(release: Release) -> Iterator[tuple[str, str, str]]:
    """The rows; without archives there is nothing else to look at."""
    for name, one in checks(release):
        try:
            row = (name, "passed", one(release))
        except InPartError as part:
            row = (name, "in part", str(part))
        except Exception as error:  # each row says its own fault, and the others are looked at as well
            row = (name, "failed", str(error) or repr(error))
        yield row
        if row[:2] == ("archives", "failed"):
            return


def main() -> None:
    """Ends with 1 where a row failed, and, with a tag, where one is in part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", help="the tag of the release: it must be v and the version, and every row must pass")
    parser.add_argument("--any-torch", action="store_true", help="install torch even where it brings CUDA's packages")
    parser.add_argument("--out", type=Path, default=ROOT / "release", help="the folder (default: release)")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        release = Release(args.out.resolve(), Path(scratch).resolve(), tag=args.tag, any_torch=args.any_torch)
        for row in check(release):
            rows.append(row)
            sys.stdout.write(f"{row[0]:<12} {row[1]:<8} {row[2]}\n")
            sys.stdout.flush()
    table = ["| what | result | |", "|---|---|---|", *(f"| {a} | {b} | {c.splitlines()[0]} |" for a, b, c in rows)]
    (args.out / "report.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    bad = {"failed"} | ({"in part"} if args.tag else set())
    failed = [name for name, state, _ in rows if state in bad]
    sys.exit(f"Not ready: {', '.join(failed)}." if failed else 0)


if __name__ == "__main__":
    main()
