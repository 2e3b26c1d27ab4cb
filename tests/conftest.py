"""Settings and fixtures of all tests: few threads, repeatable examples, and a check that the wheel is what is tested.

`make test` sets `TORCH_RECOMPUTE_TEST_INSTALLED=1`; then a run which would import the package from anywhere but
site-packages ends before its first test, because it would prove nothing about the wheel. Without the variable the
tests take whatever `import torch_recompute` finds, so `PYTHONPATH=src pytest` works while writing code.

`hypothesis` may be missing (a bare machine with a GPU, say): the tests that need it say so with `importorskip`.
"""

import contextlib
import gc
import importlib.util
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

try:
    import hypothesis
except ImportError:
    hypothesis = None

INSTALLED_ONLY = os.environ.get("TORCH_RECOMPUTE_TEST_INSTALLED") == "1"

gc.disable()  # until all tests are collected: nothing of theirs is garbage, and to look at it took a fifth of the time

# Prices that tests measure are not for anybody's later plans, nor are those of earlier runs for tests.
os.environ["TORCH_RECOMPUTE_CACHE"] = tempfile.mkdtemp(prefix="torch-recompute-prices-")

# Bitwise laws hold for any number of threads; two would mostly wait for each other, as steps are many and small.
torch.set_num_threads(1)

# torch 2.15 counts the FLOPs of the CPU's fused attention; the tests' sums are of products, as on any torch before.
for kind in ("", "_backward"):
    flop_registry.pop(getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{kind}"), None)

if hypothesis is not None:
    # No deadline: the first example pays for imports and compilation, and no two machines are equally fast.
    hypothesis.settings.register_profile("dev", deadline=None)
    # The same examples every time, so that a red check is about the change under test.
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("ci" if INSTALLED_ONLY or os.environ.get("CI") else "dev")


@contextlib.contextmanager
def launching_free() -> Iterator[None]:
    """Operations are launched in no time, so that steps of small models take what a device by its data sheet takes."""
    from torch_recompute.simulation import devices

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(devices.HOSTS, "typical", devices.Host("free", apart=True))
        yield


@pytest.fixture(scope="module")
def free_launches() -> Iterator[None]:
    """Launches take no time, from the first test of a module that asks for it to the module's last."""
    with launching_free():
        yield


@pytest.fixture(scope="module")
def few_choices() -> Iterator[None]:
    """A planner tries six choices of each kind that takes trials, as offloading, from the first test of a module on."""
    from torch_recompute.planner import options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "TRIED", 6)
        yield


@pytest.fixture
def free_launches_here() -> Iterator[None]:
    """Launches take no time in a test."""
    with launching_free():
        yield


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No price is known, neither in this process nor in a file."""
    from torch_recompute.planner import prices

    monkeypatch.setenv("TORCH_RECOMPUTE_CACHE", str(tmp_path / "prices"))
    monkeypatch.setattr(prices.Measured, "_known", {})
    prices.processor.cache_clear()


def installed_in(origin: str | None, site_packages: list[str]) -> bool:
    """Whether a package whose `__init__.py` is `origin` lies in one of the `site_packages` folders."""
    return origin is not None and any(
        Path(folder).resolve() in Path(origin).resolve().parents for folder in site_packages
    )


def asks_for_a_device(expression: str) -> bool:
    """Whether tests marked `gpu` are among those that `-m expression` selects on purpose."""
    return re.search(r"(?<!not )\bgpu\b", expression) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Hide this machine's devices unless `-m gpu` asks for them; end a run on a package that is not the installed one.

    Tests count bytes of a CPU, where a model on meta would else be taken for one on the device. The package may be any
    unless `make test` asked for the installed one.
    """
    if not asks_for_a_device(config.getoption("markexpr", "") or ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not INSTALLED_ONLY:
        return
    spec = importlib.util.find_spec("torch_recompute")
    origin = None if spec is None else spec.origin
    site_packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if not installed_in(origin, site_packages):
        raise pytest.UsageError(
            f"these tests are to run against the installed wheel, but `import torch_recompute` finds {origin}, "
            f"which is not under {site_packages[0]}. Unset PYTHONPATH, undo `pip install -e`, "
            "and run `make clean test`."
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup`, give each worker whole files and whole rows of the zoo, whose tests share what is made.

    xdist's own scheduler finds the groups in names of tests, where pytest 9.2 does not let it write them:
    https://github.com/pytest-dev/pytest-xdist/issues/1386
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    from support.zoo import ZOO

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            row = test.partition("[")[2].removesuffix("]")
            return row if row in ZOO else file

    config.option.loadscopereorder = False  # by the number of tests
    return Groups(config, log)


def pytest_collection_finish() -> None:
    """From here on there is garbage, which is looked for seldom: at every 700 new objects it took a twentieth."""
    gc.enable()
    gc.set_threshold(10_000, 20, 20)


# Folders whose tests start processes or train. Workers begin with them, and end with files that take a few seconds.
SLOW_FIRST = ("distributed", "project", "commands", "integrations", "compiling", "doctor", "planner", "plans", "memory")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where torch sees no CUDA device; workers get slow folders first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {folder: number for number, folder in enumerate(SLOW_FIRST)}
        items.sort(key=lambda item: places.get(item.path.parent.name, len(places)))
    if torch.cuda.is_available():
        return
    reason = f"needs a CUDA device; torch {torch.__version__} sees none on this machine"
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_looked_at() -> None:
    """What was there before a file's tests is no longer looked at by the garbage collector, nor by `gc.get_objects`.

    After the collection of all tests these are millions of objects, and the doctor's search for who holds a tensor
    looks at all of them: a minute for some faults that are found in a third of a second without.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def the_environment_as_it_was() -> Iterator[None]:
    """Takes back what packages write into the environment: by Lightning's rank Accelerate starts a group later."""
    before = dict(os.environ)
    yield
    for name in {*os.environ} - {*before}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled yet, and nothing stays compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def row(request: pytest.FixtureRequest) -> Any:
    """A row of the zoo: what its tests find in several files is found once."""
    from support.zoo_rows import Row

    return Row(request.param)


@pytest.fixture
def limited() -> Any:
    """The context in which the CPU's allocator counts, has a limit, and fails on demand: `support/limited.py`."""
    from support import limited

    if why := limited.missing():
        pytest.skip(why)
    return limited.limited


@pytest.fixture
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests run in, output is 100 columns wide and without colour, and there is one rank."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def this_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the test can be imported as `this_test`, as a command line names a model."""
    monkeypatch.setitem(sys.modules, "this_test", request.module)
