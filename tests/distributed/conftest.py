"""Fixtures that start the ranks of `ranks.py`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.ranks import Pool, Ranks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Has one worker run all tests on ranks: another would start processes of its own, for seconds each."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.path.parent == Path(__file__).parent and "ranks" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The processes of all files."""
    one = Pool()
    yield one
    one.close()


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, pool: Pool) -> Ranks:
    """As many of them as the file's `RANKS` says, else two."""
    return Ranks(pool, getattr(request.module, "RANKS", 2))
