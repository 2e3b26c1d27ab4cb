"""Fixtures that start the ranks of `ranks.py`."""

from collections.abc import Iterator

import pytest

from distributed.ranks import Pool, Ranks


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
