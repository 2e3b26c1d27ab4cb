"""The pytest plugin: `assert_same_gradients`, `peak_memory`, `@pytest.mark.peak_below("200MiB")`.

Problem. pytest imports every installed plugin when it starts, in every project of the environment, and torch takes
seconds to import. A plugin inside the package would import the package, and with it torch.

Idea. This module is beside the package, knows nothing but pytest, and is all that is imported at the start. What it
offers lives in `torch_recompute.testing`, which is imported when a test uses it.

Invariants. A run in which no test uses the plugin never imports torch because of it. A marker that cannot be understood
is an error of the test that carries it, and of no other. A test that fails by itself is not judged by its peak.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch_recompute import Measurement

MARK = "peak_below"
_MEASUREMENT: pytest.StashKey[Measurement] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARK}(limit): fails if the test has more bytes of tensors alive at a time than limit, such as '200MiB'; "
        "what a fixture made counts once it is named, peak_memory.track(model)",
    )


@pytest.fixture
def assert_same_gradients() -> Callable[..., Any]:
    """Fails, and says which, if a gradient is another with regions: `torch_recompute.testing.assert_same_gradients`."""
    from torch_recompute.testing import assert_same_gradients

    return assert_same_gradients


@pytest.fixture
def peak_memory(request: pytest.FixtureRequest) -> Iterator[Measurement]:
    """The measurement of this test: `.peak_bytes`, `.by_category`, `.track(model, optimizer)`."""
    from torch_recompute import measure

    with measure() as memory:
        request.node.stash[_MEASUREMENT] = memory
        yield memory


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fails a test that was above its limit."""
    marker = item.get_closest_marker(MARK)
    if marker is None:
        return (yield)
    from torch_recompute import measure
    from torch_recompute.testing import check_peak, read_limit

    limit = read_limit(*marker.args, **marker.kwargs)
    memory = item.stash.get(_MEASUREMENT, None)
    if memory is not None:
        result = yield
    else:
        with measure() as memory:
            result = yield
    above = ""
    try:
        check_peak(memory, limit)
    except AssertionError as error:
        above = str(error)
    if above:
        pytest.fail(above, pytrace=False)
    return result
