"""Budgets are read from bytes, text and fractions."""

import pytest

from torch_recompute.errors import ArgumentError
from torch_recompute.memory.budget import Budget, Limit, as_budget, read_budget

WRITTEN = [
    (25769803776, Budget(bytes=24 * 2**30)),
    ("25769803776", Budget(bytes=24 * 2**30)),
    ("24GiB", Budget(bytes=24 * 2**30)),
    ("24 gib", Budget(bytes=24 * 2**30)),
    (" 24GB ", Budget(bytes=24 * 10**9)),
    ("1.5 GiB", Budget(bytes=3 * 2**29)),
    ("0.1KB", Budget(bytes=100)),
    ("0.35KB", Budget(bytes=350)),
    ("800MiB", Budget(bytes=800 * 2**20)),
    ("2TiB", Budget(bytes=2 * 2**40)),
    ("17 bytes", Budget(bytes=17)),
    (0.4, Budget(share=0.4)),
    ("0.4", Budget(share=0.4)),
    ("40%", Budget(share=0.4)),
    (0, Budget(share=0)),
    ("0%", Budget(share=0)),
    ("fit", Budget()),
    (Budget(share=0.5), Budget(share=0.5)),
]
NO_UNIT = {40: '"40%" or "40GiB"?', "40": '"40%" or "40GiB"?', "800": '"800MiB" or "800GiB"?', 1: '"1%" or "1GiB"?'}
WRONG = ["", "much", "24G", "24 GiBs", "-3GiB", "0GiB", "1.5", "100%", -1, True, 1.0, 24e9, None, [1]]


@pytest.mark.parametrize(("written", "meant"), WRITTEN)
def test_a_budget_is_read_as_it_is_written(written: object, meant: Budget) -> None:
    """Bytes, texts with units, shares and "fit" are read exactly."""
    assert read_budget(written) == meant


@pytest.mark.parametrize("text", ["1.00MiB", "24.00GiB", "1.50KiB", "10.25MiB", "1023B", "1536.00KiB"])
def test_a_budget_is_written_in_the_unit_that_people_use(text: str) -> None:
    """Whole units are written in that unit; a few of it and a part in the smaller one, which loses less."""
    assert as_budget(read_budget(text).bytes or 0) == text


def test_a_budget_may_be_an_integer_of_numpy() -> None:
    """What counts as an index counts as bytes."""
    numpy = pytest.importorskip("numpy", reason="an integer of another library")
    assert read_budget(numpy.int64(7000)) == Budget(bytes=7000)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("24GiB", "24GiB"),
        (" 800 MB ", "800 MB"),
        (2**20, "1,048,576 bytes (1.00 MiB)"),
        ("1023", "1,023 bytes"),
        ("1024", "1,024 bytes (1.00 KiB)"),
        ("40%", "40%"),
        (0.4, "0.4"),
        ("fit", "fit"),
        (Limit(5, "as before"), "as before"),
    ],
)
def test_a_budget_knows_how_it_was_written(written: object, said: str) -> None:
    """The words are those that were written; bare numbers are said with their unit."""
    assert read_budget(written).said == said


@pytest.mark.parametrize("written", WRONG)
def test_what_is_no_budget_is_refused(written: object) -> None:
    """Anything else is an error that shows it."""
    with pytest.raises(ArgumentError, match="budget"):
        read_budget(written)


@pytest.mark.parametrize("written", NO_UNIT)
def test_a_number_that_can_be_no_bytes_is_asked_for_its_unit(written: object) -> None:
    """A number below 1 KiB is no size of a step: which unit was meant is asked, with what to write."""
    with pytest.raises(ArgumentError) as caught:
        read_budget(written)
    assert NO_UNIT[written] in str(caught.value)
