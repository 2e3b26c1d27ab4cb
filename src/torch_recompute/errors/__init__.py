"""The error family, and every text.

One base class, `RecomputeError`, so that a caller can catch all of ours; each class also derives from the built-in or
PyTorch class that existing code catches in the same place. Texts are functions that take plain data, say what was
passed, what was expected, why, and what to write, and are pinned word for word by `tests/test_messages.py`. The
engine raises; nothing here knows it.

Each name is listed once, by its import. `__all__` is what others catch; the texts are for this package alone, which
finds them here: `errors.bad_budget(...)`.
"""

# pyright: reportUnusedImport=false

from __future__ import annotations

from .arguments import (
    bad_segments,
    debug_with_contexts,
    hooks_not_respected,
    iterator_argument,
    keywords_without_function,
    not_a_flag,
    not_a_store,
    not_an_ambient,
    not_callable,
    reentrant,
    suppressed,
    unknown_check,
    unknown_determinism_check,
)
from .benching import (
    bad_capacity,
    bad_experiment,
    bad_golden,
    bad_sweep,
    cannot_read,
    golden_of_another,
    in_the_sweep,
    no_capacity_here,
    no_device_here,
    no_golden_figure,
    no_model_to_run,
    not_a_journal,
    not_a_percentage,
    not_one_of,
    two_settings,
    unknown_key,
)
from .budgets import bad_budget, bad_costs, needs_highs, needs_numpy, over_budget, unknown_solver, unknown_unit
from .commands import (
    cannot_write,
    does_not_run,
    goes_with,
    made_by_a_function,
    needs_matplotlib,
    needs_rich,
    no_batch_known,
    no_device_to_run,
    no_plan_file,
    no_such_sequence,
    not_a_picture,
    not_a_size,
    nothing_to_run,
    too_large_to_run,
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
from .doctors import bad_closely, not_watchable, nothing_to_examine, nothing_watched
from .doors import bad_every, cache_in_place, no_policy, not_a_policy, other_checkpointing_inside, plan_has_chosen
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
from .family import (
    ArgumentError,
    BudgetError,
    ChangedError,
    MismatchError,
    NotRecomputingError,
    RecomputeError,
    SaveError,
    StoreError,
)
from .graphs import (
    drawn_in_another_graph,
    fork_in_graph,
    host_in_graph,
    read_in_graph,
    through_the_host,
    values_in_graph,
)
from .layouts import (
    batch_not_shared,
    cannot_divide,
    goes_without,
    no_cut,
    no_pipeline,
    no_slices,
    not_divided,
    not_interleaved,
    spread_does_not_fit,
    too_few_layers,
)
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
from .pipelines import (
    action_too_early,
    action_twice,
    bad_action,
    bad_pipeline,
    bad_split,
    bad_stages,
    budgets_per_rank,
    called_again_in_stages,
    fit_of_ranks,
    not_a_schedule,
    optimizer_of_a_whole,
    rank_does_not_fit,
    schedule_refuses,
    stages_and_loop,
    stages_and_offload,
    stages_and_sizes,
    unknown_schedule,
)
from .planning import (
    args_and_sizes,
    bad_example,
    bad_length,
    bad_merge,
    bad_offload,
    bad_profile,
    bad_sizes,
    device_memory_unknown,
    host_memory_unknown,
    no_link,
    no_plan_fits,
    no_plan_to_write,
    no_sequence,
    nothing_to_fit_into,
    nothing_to_plan,
    nowhere_to_offload,
    size_does_not_fit,
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
    watched_after_removal,
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
    read_outside,
    store_returned,
    unread_kind,
)
from .reports import bad_step_in_plan, no_step_in_plan, too_few_points
from .sharding import (
    no_rank,
    no_ranks,
    no_such_collectives,
    no_such_stream,
    not_a_member,
    not_in_rows,
    nothing_to_share,
    ranks_differ,
    shards_out_of_step,
    split_already,
    store_of_a_group,
    stream_twice,
)
from .simulations import (
    bad_accumulate,
    cannot_fake,
    cannot_simulate,
    no_address,
    no_loss,
    no_such_device,
    not_a_loss,
    not_a_word_of_the_loop,
    not_an_optimizer,
    original_reached,
    sharded_model,
    too_large_to_read,
)
from .stores import bad_host_option, changed_on_device, changed_on_its_way, not_a_device
from .testing import not_one_limit, same_as_what
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
    "ArgumentError",
    "BudgetError",
    "ChangedError",
    "MismatchError",
    "NotRecomputingError",
    "RecomputeError",
    "SaveError",
    "StoreError",
]
