"""The classes of errors.

One base class, `RecomputeError`, so that a caller can catch all of ours; each also derives from the built-in or PyTorch
class that existing code catches in the same place.
"""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError


class RecomputeError(RuntimeError):
    """Base of every error that torch-recompute raises."""


class ArgumentError(RecomputeError, TypeError, ValueError):
    """A function was called with something that it cannot use."""


class BudgetError(ArgumentError):
    """No choice fits into the memory budget.

    Attributes:
        smallest: The least budget, in bytes, for which some choice fits.
        solution: What reaches it.
    """

    def __init__(self, text: str, smallest: int, solution: object) -> None:
        super().__init__(text)
        self.smallest = smallest
        self.solution = solution


class MismatchError(RecomputeError, CheckpointError):
    """The replay of a region did not do what its forward did. Also a `torch.utils.checkpoint.CheckpointError`."""


class ChangedError(RecomputeError):
    """Something that a replay needs has been changed in place since the forward.

    What is watched: the region's arguments, its closure, defaults and partials, globals that the function itself names,
    lists, tuples and dicts among these, parameters, buffers and direct tensor attributes of modules, direct attributes
    of other objects that the function is bound to, carried values, and outputs of saved calls. Not watched: tensors
    behind further attributes (`module.cache.keys`) and globals of functions that the function calls. If they are
    changed in place between forward and backward, the replay computes with the new values and no error is raised; pass
    them to the region as arguments. `audit` finds what the rest of the model's forward changes of them, and
    `check="values"` the rest.
    """


class SaveError(RecomputeError, AssertionError):
    """A value cannot be carried from forward to replay."""


class NotRecomputingError(RecomputeError, AssertionError):
    """`get_recompute_data` was called outside of a replay."""


class StoreError(RecomputeError):
    """A store did not give back what it was given."""
