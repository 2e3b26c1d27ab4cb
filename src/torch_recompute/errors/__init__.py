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
from .budgets import bad_budget, bad_costs, needs_highs, needs_numpy, over_budget, unknown_solver, unknown_unit
from .commands import (
    cannot_write,
    goes_with,
    made_by_a_function,
    needs_matplotlib,
    no_batch_known,
    no_such_sequence,
    not_a_picture,
    not_a_size,
)
from .configs import (
    a_region_anyway,
    bad_file,
    bad_flags,
    frees_nothing,
    in_two_places,
    incomplete_full,
    inside_the_layer,
    matches_nothing,
    moe_layers_twice,
    no_effect,
    no_layers,
    no_yaml,
    not_a_count,
    not_a_mapping,
    not_a_switch,
    not_labels,
    not_plannable,
    offload_without_regions,
    parts_are_not_shared,
    said_twice,
    sequence_parallel_shards_already,
    too_many_layers,
    unknown_field,
    unknown_granularity,
    unknown_method,
)
from .discards import changed_result, no_fp8, no_manager, not_a_consumer, nothing_to_discard
from .distributed import (
    bad_bucket_bytes,
    no_process_group,
    not_a_graph,
    not_in_the_group,
    not_parameters,
    other_parameters,
    sharded_over_the_group,
    sparse_gradient,
)
from .doors import cache_in_place, no_policy, not_a_policy, other_checkpointing_inside, plan_has_chosen
from .faces import (
    bad_ctx,
    bad_offload_index,
    no_deepspeed_config,
    no_sharded_inputs,
    not_a_deepspeed_config,
    not_indices,
    not_on_or_off,
    not_one_input,
    nothing_to_offload,
    unknown_deepspeed_key,
)
from .graphs import drawn_in_another_graph, host_in_graph, read_in_graph, through_the_host, values_in_graph
from .lens import (
    args_not_a_tuple,
    bad_perturbation,
    kwargs_not_a_dict,
    modules_of_a_function,
    no_module_to_audit,
    no_regions,
    not_a_model,
    not_paths,
)
from .planning import (
    bad_profile,
    no_plan_fits,
    nothing_to_fit_into,
    nothing_to_plan,
    unknown_device,
)
from .plans import (
    applied_twice,
    bad_plan,
    no_such_module,
    not_applicable,
    one_module_twice,
    other_model,
    sharded_apart,
    store_missing,
    store_unused,
    wrapped_apart,
)
from .ranks import no_plan_on_rank, no_ranks_to_ask, plans_differ
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
from .sharding import (
    no_rank,
    no_ranks,
    no_such_collectives,
    no_such_stream,
    not_a_member,
    not_in_rows,
    nothing_to_share,
    ranks_differ,
    split_already,
    store_of_a_group,
    stream_twice,
)
from .simulations import (
    bad_accumulate,
    cannot_fake,
    no_loss,
    no_such_device,
    not_a_loss,
    not_an_optimizer,
    original_reached,
    sharded_model,
    too_large_to_read,
)
from .stores import bad_host_option, changed_on_device, changed_on_its_way, not_a_device
from .tiles import (
    bad_tiles,
    cannot_cut,
    no_such_dim,
    nothing_to_tile,
    tile_dim_alone,
    tile_not_a_tensor,
    tile_of_other_length,
)
from .units import (
    bad_match,
    makes_no_module,
    needs_transformers,
    no_such_model,
    not_a_model_config,
    not_built,
    not_importable,
    not_made_of_modules,
    unknown_role,
)
from .values import choice_requires_grad, no_such_key, not_recomputing, saved_twice, value_requires_grad

__all__ = [
    "no_plan_fits",
    "nothing_to_plan",
    "unknown_device",
    "bad_profile",
    "nothing_to_fit_into",
    "no_rank",
    "no_such_collectives",
    "no_such_stream",
    "stream_twice",
    "no_ranks",
    "not_a_member",
    "not_in_rows",
    "nothing_to_share",
    "ranks_differ",
    "split_already",
    "store_of_a_group",
    "ArgumentError",
    "BudgetError",
    "ChangedError",
    "MismatchError",
    "NotRecomputingError",
    "RecomputeError",
    "SaveError",
    "StoreError",
    "a_region_anyway",
    "applied_twice",
    "args_not_a_tuple",
    "bad_budget",
    "bad_costs",
    "bad_bucket_bytes",
    "bad_accumulate",
    "bad_ctx",
    "bad_file",
    "bad_flags",
    "bad_host_option",
    "bad_match",
    "bad_offload_index",
    "bad_perturbation",
    "bad_plan",
    "bad_segments",
    "bad_tiles",
    "cache_in_place",
    "cannot_cut",
    "cannot_fake",
    "changed_input",
    "changed_on_device",
    "changed_on_its_way",
    "changed_output",
    "changed_result",
    "changed_saved",
    "changed_state",
    "changed_value",
    "choice_requires_grad",
    "debug_with_contexts",
    "drawn_in_another_graph",
    "fewer",
    "frees_nothing",
    "host_in_graph",
    "incomplete_full",
    "inside_the_layer",
    "iterator_argument",
    "kwargs_not_a_dict",
    "makes_no_module",
    "matches_nothing",
    "missed_call",
    "modules_of_a_function",
    "moe_layers_twice",
    "more",
    "needs_highs",
    "needs_numpy",
    "needs_transformers",
    "no_deepspeed_config",
    "no_effect",
    "no_fp8",
    "no_layers",
    "no_loss",
    "no_manager",
    "no_module_to_audit",
    "no_policy",
    "no_process_group",
    "no_plan_on_rank",
    "no_ranks_to_ask",
    "no_regions",
    "no_sharded_inputs",
    "in_two_places",
    "parts_are_not_shared",
    "no_such_device",
    "no_such_dim",
    "no_such_key",
    "no_such_model",
    "no_such_module",
    "no_yaml",
    "not_a_consumer",
    "not_a_count",
    "not_a_deepspeed_config",
    "not_a_device",
    "not_a_flag",
    "not_a_graph",
    "not_a_loss",
    "not_a_mapping",
    "not_a_model",
    "not_a_model_config",
    "not_a_policy",
    "not_a_store",
    "not_a_switch",
    "not_an_ambient",
    "not_an_optimizer",
    "not_applicable",
    "not_built",
    "not_callable",
    "not_importable",
    "not_in_the_group",
    "not_indices",
    "not_labels",
    "not_made_of_modules",
    "not_on_or_off",
    "not_one_input",
    "not_parameters",
    "not_paths",
    "not_plannable",
    "offload_without_regions",
    "not_recomputing",
    "nothing_to_discard",
    "nothing_to_offload",
    "nothing_to_tile",
    "one_module_twice",
    "other_model",
    "original_reached",
    "other_calls",
    "other_checkpointing_inside",
    "other_inputs",
    "other_parameters",
    "other_results",
    "other_tensor",
    "other_values",
    "over_budget",
    "plan_has_chosen",
    "read_in_graph",
    "plans_differ",
    "reentrant",
    "said_twice",
    "saved_twice",
    "sequence_parallel_shards_already",
    "sharded_apart",
    "store_missing",
    "sharded_over_the_group",
    "sparse_gradient",
    "sharded_model",
    "store_returned",
    "store_unused",
    "suppressed",
    "through_the_host",
    "tile_dim_alone",
    "tile_not_a_tensor",
    "tile_of_other_length",
    "too_large_to_read",
    "too_many_layers",
    "unknown_check",
    "unknown_deepspeed_key",
    "unknown_determinism_check",
    "unknown_field",
    "unknown_granularity",
    "unknown_method",
    "unknown_role",
    "unknown_solver",
    "unknown_unit",
    "value_requires_grad",
    "values_in_graph",
    "wrapped_apart",
    "needs_matplotlib",
    "not_a_picture",
    "cannot_write",
    "goes_with",
    "made_by_a_function",
    "no_batch_known",
    "no_such_sequence",
    "not_a_size",
]


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
    """Something that a replay needs has been changed in place since the forward."""


class SaveError(RecomputeError, AssertionError):
    """A value cannot be carried from forward to replay."""


class NotRecomputingError(RecomputeError, AssertionError):
    """`get_recompute_data` was called outside of a replay."""


class StoreError(RecomputeError):
    """A store did not give back what it was given."""
