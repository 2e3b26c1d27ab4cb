"""The error family, and every text.

One base class, `RecomputeError`, so that a caller can catch all of ours; each class also derives from the built-in or
PyTorch class that existing code catches in the same place. Texts are functions that take plain data, say what was
passed, what was expected, why, and what to write, and are pinned word for word by `tests/test_messages.py`. The
engine raises; nothing here knows it.
"""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError

from .arguments import (
    bad_segments,
    debug_with_contexts,
    iterator_argument,
    not_a_flag,
    not_a_store,
    not_an_ambient,
    not_callable,
    reentrant,
    suppressed,
    unknown_check,
    unknown_determinism_check,
)
from .discards import changed_result, no_fp8, no_manager, not_a_consumer, nothing_to_discard
from .lens import args_not_a_tuple, kwargs_not_a_dict, not_a_model
from .replays import (
    changed_input,
    changed_output,
    changed_saved,
    changed_state,
    changed_value,
    fewer,
    missed_call,
    more,
    other_calls,
    other_inputs,
    other_results,
    other_tensor,
    other_values,
    store_returned,
)
from .tiles import (
    bad_tiles,
    cannot_cut,
    no_such_dim,
    nothing_to_tile,
    tile_dim_alone,
    tile_not_a_tensor,
    tile_of_other_length,
)
from .values import choice_requires_grad, no_such_key, not_recomputing, saved_twice, value_requires_grad

__all__ = [
    "ArgumentError",
    "ChangedError",
    "MismatchError",
    "NotRecomputingError",
    "RecomputeError",
    "SaveError",
    "StoreError",
    "args_not_a_tuple",
    "bad_segments",
    "bad_tiles",
    "cannot_cut",
    "changed_input",
    "changed_output",
    "changed_result",
    "changed_saved",
    "changed_state",
    "changed_value",
    "choice_requires_grad",
    "debug_with_contexts",
    "fewer",
    "iterator_argument",
    "kwargs_not_a_dict",
    "missed_call",
    "more",
    "no_fp8",
    "no_manager",
    "no_such_dim",
    "no_such_key",
    "not_a_consumer",
    "not_a_flag",
    "not_a_model",
    "not_a_store",
    "not_an_ambient",
    "not_callable",
    "not_recomputing",
    "nothing_to_discard",
    "nothing_to_tile",
    "other_calls",
    "other_inputs",
    "other_results",
    "other_tensor",
    "other_values",
    "reentrant",
    "saved_twice",
    "store_returned",
    "suppressed",
    "tile_dim_alone",
    "tile_not_a_tensor",
    "tile_of_other_length",
    "unknown_check",
    "unknown_determinism_check",
    "value_requires_grad",
]


class RecomputeError(RuntimeError):
    """Base of every error that torch-recompute raises."""


class ArgumentError(RecomputeError, TypeError, ValueError):
    """A function was called with something that it cannot use."""


class MismatchError(RecomputeError, CheckpointError):
    """The replay of a region did not do what its forward did. Also a `torch.utils.checkpoint.CheckpointError`."""


class ChangedError(RecomputeError):
    """Something that a replay needs has been changed in place since the forward."""


class SaveError(RecomputeError, AssertionError):
    """A value cannot be carried from forward to replay."""


class NotRecomputingError(RecomputeError, AssertionError):
    """`get_recompute_data` was called outside of a replay."""


class StoreError(RecomputeError):
    """A store did not give back what it was given."""
