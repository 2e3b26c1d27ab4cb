"""For the tests of a user: the gradients are the same, and the peak is below a limit.

The pytest plugin (`torch_recompute_pytest`) makes fixtures and a marker of these; they raise `AssertionError`, know
nothing of pytest, and serve in any framework. A failure says what to look at: which gradient, how much, which region;
which categories of memory, and at which operation.
"""

from .gradients import assert_same_gradients
from .peaks import check_peak, read_limit

__all__ = ["assert_same_gradients", "check_peak", "read_limit"]
