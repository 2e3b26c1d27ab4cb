"""`torch-recompute plan MODEL --budget 24GiB`: makes a plan for a model that need not fit on this machine.

MODEL and a few options describe the whole step: the model, the size of the batch, the optimizer, the device. The model
is on meta, the device is a data sheet, and the plan is that of `make_plan`. `--out` writes it for `Plan.from_json`,
beside the options of the step, so that `torch-recompute report` can simulate the step again. `--frontier` shows the
whole curve of budget against seconds from one profile instead, and `--recompute none,full` the peak of configurations
that are stated, with no search (`planner/configurations.py`). With `--tp`, `--pp` and the like the step is spread over
ranks, and there is a plan for each rank of the pipeline: the ranks of a tensor-parallel group, and the replicas, have
the same one. `--budget` is then that of every rank; a share is of each rank's own activation memory. `--out plan.json`
writes `plan-rank0.json` and so on, each for `Plan.from_json` on that rank.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .. import errors
from ..errors.text import counted, explained, listed, table
from ..memory.budget import enough, read_budget, too_small
from ..plan.plan import Plan, SizeClass, shape_in_words
from ..plan.ranks import KINDS_OF_CP, Ranks
from ..planner.alternatives import (
    Alternative,
    alternatives,
    held_by,
    in_words,
    on_more_ranks,
    with_another_optimizer,
    with_other_states,
)
from ..planner.configurations import PEAK_WORDS, ConfiguredStep, ConfiguredSteps, configurations, peaks_of, stated
from ..planner.layout import (
    ConfiguredLayout,
    Layout,
    LayoutPlanner,
    LayoutRanks,
    RankPlan,
    configured,
    counted_in,
    no_pipeline,
    plan_of_shard,
    step_seconds,
)
from ..planner.longest import Longest, LongestOnRanks, Search
from ..planner.planner import Planner
from ..planner.profile import Profile
from ..planner.sent import Sent, unknown_network
from ..planner.states import OptimizerSpec
from ..simulation.devices import read_host
from ..simulation.experts import expert_paths, shared_experts
from ..simulation.training_step import OPTIMIZERS, USUAL, elements, states_of
from . import models
from . import output as out
from .models import DTYPES, AskedStep, goes_without
from .output import OK, Output

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

Ranked = TypeVar("Ranked", bound=LayoutRanks)

SCHEMA_VERSION = 1
CURVE_WORDS = {
    "budget": "the most that the peak of the step may be",
    "step ms": "the predicted time of a step with the plan for this budget",
    "slower": "what recomputation adds to the time of the step",
    "replayed GFLOP": "work of matrix products and convolutions that is done again",
    "regions": "how many modules, or groups of them, are recomputed",
    "gap to optimal": "no choice of what to keep and recompute within the budget makes the step faster by more",
}
"""The columns of the curve, and what they mean."""
RANK_OPTIMIZERS = ("adamw", "sgd", "none")
MOST_RANKS = 1024  # that are suggested
FLAT = 0.02  # a curve whose peaks differ by less offers nothing
TITLES = (
    *("rank", "in flight", "weights", "grads", "optimizer", "activations", "buffers", "peak", "plain peak"),
    *("microbatch ms", "replays ms", "gap", "links ms"),
)


def add_command(commands: Any) -> None:
    """Adds `torch-recompute plan` to the command line."""
    parser = out.new_command(commands, "plan")
    models.add_model_options(parser, weights="without weights")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--budget",
        metavar="BYTES",
        help="the most memory that the tensors of a step may take: bytes, as 24GiB; fit, for what the device has room "
        'for; or a share of the activation memory, as 0.4 or "40%%"',
    )
    asked.add_argument("--frontier", action="store_true", help="what ten budgets cost, instead of a plan for one")
    parser.any_of = "budget", "frontier", "recompute"
    parser.add_argument(
        "--recompute",
        action="append",
        metavar="WORDS",
        help="the peak of a configuration, and what it is made of: none, full (each layer), full:2 (two layers as one "
        "region), block:3 (the first three), selective (core_attn), labels as core_attn,mlp, or the .json or .yaml "
        "file of a plan or of settings; several as none,full, or by saying it again",
    )
    most = parser.add_mutually_exclusive_group()
    most.add_argument(
        "--longest",
        action="store_true",
        help="the longest sequence that the budget holds, and its plan; with --recompute that of each configuration",
    )
    most.add_argument("--largest-batch", action="store_true", help="the largest batch that the budget holds, likewise")
    models.add_step_options(parser)
    models.add_host_option(parser)
    parser.add_argument("--layers", metavar="HOW", help=models.LAYER_WORDS)
    models.add_state_options(parser)
    models.add_loop_options(parser)
    _add_leave_options(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="write the plan, for Plan.from_json and torch-recompute report"
    )
    out.add_explain(parser)
    _add_rank_options(parser)
    out.add_options(parser, command, plot="the curve of --frontier")


def _add_leave_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for what a plan may use besides recomputation."""
    parser.add_argument(
        "--offload",
        nargs="?",
        const=True,
        default=False,
        metavar="BYTES",
        help="allow inputs of regions to be kept in host memory: as much as there is, or at most so much, as 64GiB; "
        "with ranks, of each; with --recompute the inputs of all regions are",
    )
    parser.add_argument(
        "--host-bandwidth",
        metavar="IN,OUT",
        help="bytes per second from host memory into the device and back, as 55GB,50GB or one for both (by --device)",
    )
    parser.add_argument(
        "--tiles",
        action="store_true",
        help="allow tiles of tokens for the head with its loss and for MLPs: results differ by the order of sums",
    )


@out.collecting_rarely()
def command(args: argparse.Namespace) -> int:
    """Runs `torch-recompute plan`; 0 when there is a plan."""
    output = Output.of(args)
    pairs = ("out", "budget"), ("plot", "frontier"), ("longest", "budget"), ("largest_batch", "budget")
    for option, other in pairs:
        if getattr(args, option) not in (None, False) and not getattr(args, other):
            raise errors.ArgumentError(errors.goes_with(f"--{option.replace('_', '-')}", f"--{other}"))
    _check_asked(args)
    if args.out is not None:
        out.check_folder("--out", args.out)
    if args.budget is not None:
        read_budget(args.budget)
    models.loop_of(args)
    models.plan_options_of(args)
    layout = _layout_of(args)
    if layout is not None:
        return _plan_ranks(args, layout, output)
    if args.recompute is not None:
        return _show_peaks(args, output)
    if args.longest or args.largest_batch:
        return _find_longest(args, output)
    with output.at_work(f"building {args.model}"):
        step = AskedStep.asked(args)
    if args.budget is not None:
        _check_states(step, args.budget)
    with models.autocasting(step.model, args.autocast):
        with output.at_work(f"profiling {step}"):
            planner = Planner(step, plan_options=step.plan_options)
        profile = planner.profile
        with output.at_work("planning"):
            plans = models.curve(profile) if args.frontier else [_planned(planner, args)]
            flat = _nothing_to_gain(planner, plans) if args.frontier else []
    if args.out is not None:
        out.write_plan(args.out, plans[0], models.words_of(args))
    if output.plot is not None:
        _draw(output.plot, profile, plans, str(step))
    output.give(
        lambda: _to_json(step, profile, plans, flat, frontier=args.frontier),
        lambda console: _print_step(console, args, planner, plans, flat),
    )
    return OK


def _check_asked(args: argparse.Namespace) -> None:
    """Refuses a command line that asks for a plan and for configurations at once."""
    if args.recompute is None:
        return
    if args.frontier:
        raise errors.ArgumentError(goes_without("--recompute", "--frontier", "it states what is recomputed"))
    if args.out is not None:
        raise errors.ArgumentError(goes_without("--out", "--recompute", "there is no plan to write"))
    if args.budget is not None and not (args.longest or args.largest_batch):
        raise errors.ArgumentError(
            "--recompute states what is recomputed, so no plan is made for --budget. Leave one of them out, or add "
            "--longest or --largest-batch for the most that the budget holds."
        )


def _check_states(step: AskedStep, budget: str) -> None:
    """Refuses a budget that weights, gradients and states alone exceed, before anything is simulated."""
    asked, shards = read_budget(budget), step.ranks.shards
    config: Any = getattr(step.model, "config", None)
    whole = step.built_here and config.get_text_config() is config  # else parts of it may not be trained by this batch
    held = states_of(step.model.parameters(), step.optimizer)
    holds = Counter({name: nbytes // shards for name, nbytes in held.items() if whole or name == "weights"})
    if asked.bytes is None or asked.bytes >= holds.total() or step.ranks.on_host:
        return
    made = listed([f"{errors.size(nbytes, up=True)} of {name}" for name, nbytes in holds.items()])
    raise errors.BudgetError(
        f"budget={asked.said} is too small for what {step.word} holds whatever is recomputed, "
        f"{errors.size(holds.total(), up=True)} ({holds.total()} bytes): {made}. No plan lowers these.\n"
        f"  Write a budget above them{_lighter(step, asked.bytes) or ', or spread the model over ranks'}.",
        holds.total(),
        None,
    )


def _lighter(step: AskedStep, budget: int) -> str:
    """Returns what leaves room within a budget beside weights, gradients and states: other states, more ranks."""
    shards, sharded = step.ranks.shards, step.ranks.fully_sharded
    stated = () if getattr(step.optimizer, "in_backward", False) else with_other_states(step)
    others = [*with_another_optimizer(step), *stated, *models.with_usual_adapters(step)]
    tensors = ((option, [*one.model.parameters(), *one.model.buffers()], one.optimizer) for option, _, one in others)
    held = {option: states_of(some, optimizer).total() // shards for option, some, optimizer in tensors}
    found = {f"{option} ({errors.size(nbytes, up=True)})": nbytes for option, nbytes in held.items() if nbytes < budget}
    if step.built_here:
        total = states_of(step.model.parameters(), step.optimizer, None if sharded else torch.float32).total()
        count = 2 * (step.ranks.fsdp if sharded else 1)
        while total // count >= budget and count < MOST_RANKS:
            count *= 2
        if total // count < budget:
            found[f"--fsdp {count} ({errors.size(total // count, up=True)} on a rank)"] = total // count
    words = sorted(found, key=found.__getitem__)
    return f"; less is held with any of {', '.join(words)}; activations are not counted" if words else ""


def _nothing_to_gain(planner: Planner, plans: Sequence[Plan]) -> list[str]:
    """Returns what holds the peak and what lowers it, where no plan does; nothing where one does."""
    least = plans[0].predicted_peak_bytes or 0
    if planner.plain.peak_bytes - least > FLAT * planner.plain.peak_bytes:
        return []
    return [
        f"No plan lowers the peak by more than {FLAT:.0%}: the smallest is {errors.size(least)}: "
        f"{held_by(planner.least[1])}.",
        *in_words(_others(planner), None, option=True),
    ]


def _others(planner: Planner, budget: int | None = None) -> list[Alternative]:
    """Returns what else lowers the peak; the batch of a user's function is no option of the command line."""
    found = alternatives(planner, budget)
    if isinstance(planner.step, AskedStep) and planner.step.built_here:
        return found
    return [one._replace(option=one.keyword) if one.option.startswith("--batch") else one for one in found]


def _planned(planner: Planner, args: argparse.Namespace) -> Plan:
    """Makes the plan for a budget; where there is none, the error says what to write on the command line."""
    try:
        return planner.plan(args.budget)
    except errors.BudgetError as error:
        least: Any = error.solution
        smallest, promise = error.smallest, least.prediction
        unwritten = f" {args.out} has not been written; with --budget {smallest} it is that plan." if args.out else ""
        others = in_words(_others(planner, promise.budget_bytes), promise.budget_bytes, option=True)
        text = "\n  ".join(
            filter(
                None,
                [
                    too_small(promise.budget, smallest, promise.plain_peak_bytes),
                    f"That peak holds {held_by(planner.least[1])}.",
                    f"Write --budget {enough(smallest)} or more, or a smaller batch.{unwritten}",
                    *others,
                    promise.advice,
                ],
            )
        )
        raise errors.BudgetError(text, smallest, least) from None


def _to_json(step: AskedStep, profile: Profile, plans: Sequence[Plan], flat: Sequence[str], *, frontier: bool) -> str:
    """Returns the plan, or the plans along the curve, as a JSON document; `Plan.from_json` reads each."""
    data = [json.loads(plan.to_json()) for plan in plans]
    prediction = plans[0].prediction
    plain = profile.costs.step_seconds if prediction is None else prediction.plain_step_seconds  # without tiles
    found = {
        **step.as_data(),
        "device": profile.device,
        "plain": {"peak_bytes": profile.plain_peak_bytes, "step_seconds": plain},
        "advice": profile.advice if frontier or plans[0].prediction is None else plans[0].prediction.advice,
        **({"frontier": data, "flat": flat} if frontier else {"plan": data[0]}),
    }
    return out.document("plan", SCHEMA_VERSION, found)


def _print_step(console: Console, args: argparse.Namespace, planner: Planner, plans: Sequence[Plan], flat: Any) -> None:
    """Prints the plan or the curve of a step; of one that ranks share, also what this rank holds and sends."""
    step: Any = planner.step
    _print(console, step, planner.profile, plans, flat, frontier=args.frontier, explain=args.explain)
    if step.ranks != Ranks() and not args.frontier:
        _print_rows(console, [plan_of_shard(planner, plans[0])])
    _print_sent(console, planner.sent, planner.price.name)


def _print_head(console: Console, head: str, notes: Sequence[str]) -> None:
    console.print(head, style="bold")
    for note in notes:
        console.print(note, style="yellow", markup=False)


def _print(
    console: Console,
    step: AskedStep,
    profile: Profile,
    plans: Sequence[Plan],
    flat: Sequence[str],
    *,
    frontier: bool,
    explain: bool,
) -> None:
    _print_head(console, str(step), step.notes)
    if frontier:
        _print_curve(console, profile, plans)
    else:
        console.print(str(plans[0]), markup=False)
    if explain:
        words = explained(CURVE_WORDS) if frontier else plans[0].explain()
        console.print(words, style="dim", markup=False)
    for path, why in profile.left_out:
        console.print(f"not planned: {path} {why}", style="dim", markup=False)
    for line in flat:
        console.print(line, style="yellow", markup=False)
    if frontier and profile.advice:
        console.print(f"without recomputation: {profile.advice}", style="yellow", markup=False)


def _print_curve(console: Console, profile: Profile, plans: Sequence[Plan]) -> None:
    plain = profile.costs.step_seconds
    unit, name = errors.unit_of(profile.plain_peak_bytes)
    console.print(
        f"without recomputation: peak {errors.size(profile.plain_peak_bytes)}, step {1000 * plain:,.1f} ms on "
        f"{profile.device}{profile.without_a_plan}"
    )
    if profile.loop is not None:
        console.print(f"counted: {profile.loop}")
    rows = out.new_table(f"budget {name}", *[*CURVE_WORDS][1:])
    for plan in plans:
        promise = plan.prediction
        assert promise is not None
        rows.add_row(
            f"{promise.budget_bytes / unit:,.2f}",
            f"{1000 * promise.step_seconds:,.1f}",
            f"{promise.step_seconds / plain - 1:+.1%}",
            f"{promise.replay_flops / 1e9:,.1f}",
            str(len(plan)),
            f"{promise.gap:.1%}",
        )
    console.print(rows)
    console.print("Rows are estimated from one profile; --budget also simulates the plan that it prints.")


def _draw(path: Path, profile: Profile, plans: Sequence[Plan], title: str) -> None:
    """Draws the curve, the bound below it, and the step without recomputation."""
    promises = [plan.prediction for plan in plans if plan.prediction is not None]
    unit, name = errors.unit_of(profile.plain_peak_bytes)
    budgets = [promise.budget_bytes / unit for promise in promises]
    with out.drawing(path, (7, 4.5)) as figure:
        axes = figure.add_subplot()
        axes.plot(budgets, [1000 * promise.step_seconds for promise in promises], "o-", label="plans")
        bound = [1000 * promise.bound_seconds for promise in promises]
        axes.plot(budgets, bound, ":", color="#9a9a9a", label="lower bound")
        axes.plot(
            [profile.plain_peak_bytes / unit], [1000 * profile.costs.step_seconds], "s", label="without recomputation"
        )
        axes.set_xlabel(f"peak of the step, {name}")
        axes.set_ylabel(f"step, ms on {profile.device}")
        axes.set_title(title, fontsize=8, wrap=True)
        axes.legend()


# --- configurations that are stated -----------------------------------------------------------------------------------


def _show_peaks(args: argparse.Namespace, output: Output) -> int:
    """Shows the peak of the configurations of `--recompute`, or of each the most that a budget holds."""
    with output.at_work(f"building {args.model}"):
        step = AskedStep.asked(args)
    plans = configurations("--recompute", args.recompute, step)
    models.check_regions(step.layers, plans)
    search = _search_of(args, step) if args.budget else None
    found: Sequence[ConfiguredStep] = ()
    with models.autocasting(step.model, args.autocast), _interruptible(search), output.at_work(f"simulating {step}"):
        found = peaks_of(step, plans, step.plan_options, "--") if search is None else search.stated(plans)
    found = ConfiguredSteps(search.steps if search else found)
    notes = _notes_on_most(args, step, *(one.most for one in found))

    def print_found(console: Console) -> None:
        _print_head(console, str(step), notes)
        if found:
            console.print(str(found), markup=False)
        if args.explain:
            console.print(explained(PEAK_WORDS), style="dim", markup=False)
        if search is not None and len(found) < len(plans):
            console.print(_interrupted(search, [*plans][len(found)]))

    data = {**step.as_data(), "notes": notes, **({"device": found[0].device} if found else {})}
    data["configurations"] = [one.as_data() for one in found]
    output.give(lambda: out.document("plan", SCHEMA_VERSION, data), print_found)
    return OK if len(found) == len(plans) else out.INTERRUPTED


# --- the most that a budget holds -------------------------------------------------------------------------------------


def _find_longest(args: argparse.Namespace, output: Output) -> int:
    """Finds the longest sequence or the largest batch; where it is interrupted, the most that is known to fit."""
    with output.at_work(f"building {args.model}"):
        step = AskedStep.asked(args)
    search, plan = _search_of(args, step), None
    with (
        models.autocasting(step.model, args.autocast),
        _interruptible(search),
        output.at_work(f"looking for the most of {step}"),
    ):
        plan = search.plan()
    notes = _notes_on_most(args, step, search.found)
    if plan is not None and args.out is not None:
        out.write_plan(args.out, plan, models.words_of(args))
    found = {
        "found": "batch" if args.largest_batch else "sequence",
        "most": search.found,
        "points": [] if plan is None else [_point(size, search.shared) for size in plan.sizes],
        "plan": None if plan is None else json.loads(plan.to_json()),
    }

    def print_found(console: Console) -> None:
        _print_head(console, str(step), notes)
        _print_most(console, search, plan)

    output.give(lambda: out.document("plan", SCHEMA_VERSION, {**step.as_data(), "notes": notes, **found}), print_found)
    return OK if plan is not None else out.INTERRUPTED


@contextmanager
def _interruptible(search: Search | None) -> Generator[None]:
    """Ends a search where it is interrupted, once something is known to fit.

    The search is told of the interruption, which Python may drop where it comes.
    """
    if search is None:
        yield
        return

    def interrupted(*_: object) -> None:
        search.interrupted = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    except KeyboardInterrupt:
        if not search.best:
            raise
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(search: Search, name: str = "") -> str:
    peak = f"with a peak of {errors.size(search.best_peak_bytes)}{name and f' under {name}'}"
    return f"interrupted: {search.found:,} {search.what} fit, {peak}; whether more do is not known"


def _search_of(args: argparse.Namespace, step: AskedStep) -> Longest:
    """Returns the search that a command line asks for; refuses that of tokens where there are none, or no room."""
    if args.longest and step.built_here and "input_ids" not in step.kwargs:
        raise errors.ArgumentError(
            f"--longest is a number of tokens, and {args.model} takes {next(iter(step.kwargs))}. Write --largest-batch."
        )
    _check_states(step, args.budget)
    most = models.most_tokens(step.model) if args.longest and step.built_here else None
    return Longest(step, args.budget, step.plan_options, args.largest_batch, most, dashes="--")


def _notes_on_most(args: argparse.Namespace, step: AskedStep, *found: int) -> list[str]:
    """Returns the notes on a step, and on sequences that were found."""
    return [*dict.fromkeys((*step.notes, *(_beyond(args, step.model, *found) if step.built_here else ())))]


def _beyond(args: argparse.Namespace, model: nn.Module, *found: int) -> list[str]:
    """Returns what is to be said of sequences that were found, where they exceed a model's positions."""
    if not args.longest or not found:
        return []
    said = models.beyond(model, args.model, max(found))
    if max(found) == models.most_tokens(model):
        said = (
            f"{max(found):,} tokens are all the positions that {args.model} has, in a table: no longer ones were tried."
        )
    return [said] if said else []


def _print_most(console: Console, search: Longest, plan: Plan | None) -> None:
    if plan is None:
        console.print(_interrupted(search))
        return
    what = search.what + (f", {search.best:,} on each of {search.shared} ranks" if search.shared > 1 else "")
    promise = plan.sizes[-1].prediction
    assert promise is not None
    peak = f"peak {errors.size(promise.peak_bytes)}"
    within = "" if promise.limited_bytes else f" within {promise.budget}"  # with "fit" the allocator decides
    reserves = promise.reserves and f"; {promise.reserves}"
    console.print(f"at most {search.found:,} {what}: {peak}{within} on {promise.device}{reserves}", markup=False)
    _print_points(console, [_point(size, search.shared) for size in plan.sizes], promise.peak_bytes)
    console.print(f"the largest: {promise.summary(plan.sizes[-1].choices)}")
    console.print(str(promise), markup=False)


def _point(size: SizeClass, shared: int) -> dict[str, Any]:
    """Returns the figures of one length, of a sequence that so many ranks share."""
    promise = size.prediction
    assert promise is not None
    shape = [size.shape[0], size.shape[1] * shared, *size.shape[2:]] if shared > 1 else list(size.shape)
    tokens = math.prod(shape[:2]) if len(shape) < 4 else shape[0]
    return {
        "shape": shape,
        "peak_bytes": promise.peak_bytes,
        **({"limited_bytes": promise.limited_bytes} if promise.limited_bytes else {}),
        "step_seconds": promise.step_seconds,
        "plain_step_seconds": promise.plain_step_seconds,
        "items_per_second": tokens / promise.step_seconds if promise.step_seconds else 0.0,
        "regions": len(size.choices),
    }


def _print_points(console: Console, points: Sequence[dict[str, Any]], peak: int) -> None:
    unit, name = errors.unit_of(peak)
    of, dims = ("pictures", 1) if len(points[-1]["shape"]) == 4 else ("tokens", 2)
    sizes = [size for size in ("peak", "limited") if f"{size}_bytes" in points[-1]]
    titles = (f"{size.replace('limited', 'reserved')} {name}" for size in sizes)
    rows = out.new_table("size", *titles, "step ms", "slower", f"{of}/s", "regions")
    for point in points:
        rows.add_row(
            shape_in_words(point["shape"][:dims]),
            *(f"{point[f'{size}_bytes'] / unit:,.2f}" for size in sizes),
            f"{1000 * point['step_seconds']:,.1f}",
            f"{point['step_seconds'] / point['plain_step_seconds'] - 1:+.1%}",
            f"{point['items_per_second']:,.0f}",
            str(point["regions"]),
        )
    console.print(rows)


# --- a step that is spread over ranks ---------------------------------------------------------------------------------


def _add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a step that is spread over ranks."""
    group = parser.add_argument_group(
        "a step that is spread over ranks",
        "One plan for each rank of the pipeline. --budget is that of each rank. For language models by name or "
        "configuration.",
    )
    for name, what in models.RANK_WORDS.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=what)
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        default=None,
        help="norms and residuals hold a share of the tokens (with --tp)",
    )
    group.add_argument("--cp-kind", choices=KINDS_OF_CP, help="how attention sees the others' tokens (all-gather)")
    group.add_argument(
        "--imbalance",
        type=float,
        metavar="X",
        help="tokens of the rank whose experts get the most, over the mean (1.0)",
    )
    group.add_argument(
        "--reshard-after-forward",
        choices=("yes", "no"),
        help="whether ranks of --fsdp free a layer's weights between its forward and its backward (yes; no with --pp)",
    )
    group.add_argument(
        "--weights-on-host",
        action="store_true",
        default=None,
        dest="on_host",
        help="shards of weights, gradients and states are in host memory, as with FSDP2's CPUOffloadPolicy",
    )
    group.add_argument(
        "--network",
        metavar="IN-NODE,BETWEEN",
        help="GB/s that one device sends within a node and between nodes, as 450,50 (the device's data sheet)",
    )
    group.add_argument("--node", type=int, metavar="N", help="devices of a node (8; 72 for gb200 and gb300)")
    group.add_argument(
        "--reduce-dtype", metavar="DTYPE", help="in which --fsdp reduces gradients (float32), and --pp adds them up"
    )


def _layout_of(args: argparse.Namespace) -> Layout | None:
    """Returns the layout over ranks that a command line describes; None for one rank."""
    given = {name: value for name in models.RANK_WORDS if (value := getattr(args, name)) is not None}
    ranks = models.ranks_of(args)
    if (not given and ranks == Ranks()) or (ranks.fully_sharded and ranks.pp == 1):
        return None
    option = next((f"--{name}" for name in given), "--sequence-parallel")
    if args.plot is not None:
        raise errors.ArgumentError(goes_without("--plot", option, "its picture is of one device's curve"))
    if args.tiles:
        _check_tiles(args, ranks, option)
    loop = {"--no-hold-output": args.hold_output, "--accumulate": args.accumulate == 1}
    loop |= {"--no-set-to-none": args.set_to_none, "--autocast": args.autocast is None}
    changed = next((word for word, is_default in loop.items() if not is_default), None)
    if changed is not None:
        why = "the schedule of a pipeline says what a rank holds"
        raise errors.ArgumentError(goes_without(changed, option, why))
    models.check_sizes(args)
    usual = USUAL if ranks.fully_sharded else RANK_OPTIMIZERS[0]
    models.optimizer_asked(args, ranks, usual)
    models.lora_of(args)
    args.optimizer = (args.optimizer or usual).lower()
    if args.optimizer_on_host and args.optimizer == "sgd":
        raise errors.ArgumentError(goes_without("--optimizer-on-host", "--optimizer sgd", "it has no states"))
    if args.optimizer_on_host and ranks.fully_sharded:
        why = "of a pipeline whose ranks share weights, states are planned on the device"
        raise errors.ArgumentError(goes_without("--optimizer-on-host", "--fsdp", why))
    if args.optimizer not in RANK_OPTIMIZERS and not ranks.fully_sharded:
        why = f"of ranks, whose optimizer is Megatron's, are planned {', '.join(RANK_OPTIMIZERS)}"
        raise errors.ArgumentError(goes_without(f"--optimizer {args.optimizer}", option, why))
    return Layout(ranks, args.mbs or 1, args.batch)


def _check_tiles(args: argparse.Namespace, ranks: Ranks, option: str) -> None:
    """Refuses tiles of tokens on ranks that cannot have them, or whose tiles would have to be searched for."""
    if ranks.tp > 1:
        why = "ranks that share a product make their collectives for all tokens at once"
        raise errors.ArgumentError(goes_without("--tiles", "--tp", why))
    if ranks.fully_sharded:
        why = "torch's pipeline makes the loss outside of its last stage, which then returns all logits"
        raise errors.ArgumentError(goes_without("--tiles", "--fsdp with --pp", why))
    if args.recompute is None:
        raise errors.ArgumentError(
            f"--tiles with {option}: what is in tiles is not searched for on each rank. State it: --recompute full "
            "--tiles, or leave --tiles out."
        )


class _OnRanks:
    """The step of a command line that is spread over ranks."""

    def __init__(self, args: argparse.Namespace, layout: Layout, output: Output) -> None:
        self.args, self.layout, self.output = args, layout, output
        with output.at_work(f"building {args.model}"):
            self.model, own, _ = models.load(args.model, None if args.dtype is None else DTYPES[args.dtype])
            batch = {} if own is not None else models.batch_for(self.model, args.model, layout.mbs, args.sequence)
            if "input_ids" not in batch:
                raise errors.ArgumentError(no_pipeline(args.model, type(self.model).__name__))
            models.check_head(self.model, args.model, batch)
            if layout.ranks.shares_experts:
                shared_experts(self.model, layout.ranks)
        if layout.ranks.fully_sharded:
            self.layout = replace(layout, ranks=models.mixed_precision(self.model, args, layout.ranks))
        self.tokens = int(batch["input_ids"].shape[1])
        self.layers = models.run_as(self.model, args.layers, layout.ranks)
        self.notes = *models.notes_on(self.model, args.model, batch), *(self.layers.notes if self.layers else ())
        self.model = models.with_adapters(self.model, args, sharded=layout.ranks.fully_sharded)
        self.kept = OptimizerSpec(None, args.states or "", on_host=bool(args.optimizer_on_host))

    def ranks(self, kind: type[Ranked], *, tokens: int | None = None, mbs: int | None = None) -> Ranked:
        """Returns the ranks, with tokens in a sequence and sequences in a microbatch as asked, or others."""
        args, layout = self.args, self.layout
        if mbs is not None:
            layout = replace(layout, mbs=mbs, batch=layout.microbatches * layout.ranks.batches * mbs)
        device = models.device_of(args, "h100")
        words = args.optimizer, device, self.kept, models.plan_options_of(args), read_host(args.host or "typical")
        return kind(self.model, args.model, layout, tokens or self.tokens, *words)

    @property
    def start(self) -> int:
        """The length, or the size of a microbatch, that a search begins with."""
        return self.layout.mbs if self.args.largest_batch else self.tokens

    def search(self) -> LongestOnRanks:
        """Returns the search that a command line asks for."""
        args = self.args
        most = models.most_tokens(self.model) if args.longest else None
        size = "mbs" if args.largest_batch else "tokens"
        return LongestOnRanks(
            lambda kind, length: self.ranks(kind, **{size: length}), args.budget, args.largest_batch, most
        )

    def give(self, found: dict[str, Any], show: Callable[[Console], None], *more: str) -> int:
        """Prints what was found, below what the step is and `more` notes, or as a JSON document beside it."""
        args, parameters = self.args, sum(map(elements, self.model.parameters()))
        layers = f"layers {self.layers or models.LAYERS[0]}"
        head = f"{args.model}: {parameters:,} parameters, {self.tokens} tokens, {layers}, "
        head += f"optimizer {args.optimizer}{self.kept}"
        step = {"model": args.model, "sequence": self.tokens, "layers": models.layers_as_data(self.layers)}
        step |= {"optimizer": args.optimizer, **models.states_words(args)}
        notes = [*dict.fromkeys(filter(None, (*self.notes, *more)))]
        step |= {"device": args.device or "h100", "layout": self.layout.as_data(), "notes": notes}

        def print_found(console: Console) -> None:
            _print_head(console, head, notes)
            console.print(str(self.layout))
            show(console)

        self.output.give(lambda: out.document("plan", SCHEMA_VERSION, {**step, **found}), print_found)
        return OK


def _plan_ranks(args: argparse.Namespace, layout: Layout, output: Output) -> int:
    """Plans a step that is spread over ranks, or answers what else is asked of it; 0 when there is an answer."""
    asked = _OnRanks(args, layout, output)
    layout = asked.layout
    _check_rank_states(asked)
    if args.recompute is not None:
        return _show_rank_peaks(asked)
    if args.longest or args.largest_batch:
        return _find_longest_on_ranks(asked)
    with output.at_work(f"profiling {args.model} on {layout}"):
        planner = asked.ranks(LayoutPlanner)
    if args.frontier:
        return _show_rank_curve(asked, planner)
    try:
        with output.at_work("planning"):
            plans = planner.plans(args.budget)
    except errors.BudgetError as error:
        wanted = read_budget(args.budget).bytes
        more = in_words(on_more_ranks(planner), wanted, option=True) if wanted is not None else []
        raise errors.BudgetError("\n  ".join([str(error), *more]), error.smallest, error.solution) from None
    if args.out is not None:
        for plan in plans:
            out.write_plan(args.out.with_name(f"{args.out.stem}-rank{plan.rank}{args.out.suffix}"), plan.plan)
    return asked.give(_ranks_as_data(layout, plans), lambda console: _print_ranks(console, layout, plans))


def _check_rank_states(asked: _OnRanks) -> None:
    """Refuses a budget that is below what a rank of a pipeline holds of weights, gradients and states on average."""
    args, ranks = asked.args, asked.layout.ranks
    wanted = read_budget(args.budget or "fit")
    if wanted.bytes is None:
        return
    paths = expert_paths(asked.model) if ranks.shares_experts else ()
    experts = {weight for path in paths for weight in asked.model.get_submodule(path).parameters()}
    others = [weight for weight in asked.model.parameters() if weight not in experts]
    least = _states_on_rank(args, ranks, others, ranks.tp * ranks.shards, ranks.state_shards) // ranks.pp
    sharing = ranks.expert_ranks // ranks.ep if ranks.state_shards > 1 else 1
    parts = ranks.expert_tp * ranks.ep * ranks.expert_shards
    least += _states_on_rank(args, ranks, experts, parts, sharing) // ranks.pp
    if wanted.bytes < least:
        raise errors.BudgetError(
            f"budget={wanted.said} is too small for what a rank of {ranks} holds of {args.model} whatever is "
            f"recomputed: weights, gradients and states are {errors.size(least, up=True)} ({least} bytes) on average. "
            "No plan lowers these.\n"
            "  Write a budget above them, or more ranks of --tp, --pp, or those that share states (--dp, --fsdp).",
            least,
            None,
        )


def _states_on_rank(
    args: argparse.Namespace, ranks: Ranks, weights: Collection[torch.Tensor], parts: int, sharing: int
) -> int:
    """Returns the bytes of some weights, their gradients and states on each of the ranks that have parts of them."""
    held = states_of(weights, OPTIMIZERS[args.optimizer] if ranks.fully_sharded else None)
    if args.optimizer == "adamw" and not ranks.fully_sharded:  # Megatron's: two moments, a copy of weights of 16 bits
        each = (weight for weight in weights if weight.requires_grad)
        held["states"] = sum(weight.numel() * (8 + 4 * (weight.itemsize < 4)) for weight in each) // sharing
    return held.total() // parts


def _ranks_as_data(layout: Layout, plans: Sequence[RankPlan]) -> dict[str, Any]:
    """Returns the figures and plans of ranks as plain data; `Plan.from_json` reads each plan from its JSON."""
    return {
        "step_seconds": step_seconds(layout, plans),
        "plain_step_seconds": step_seconds(layout, plans, plain=True),
        "ranks": [{**plan.as_data(), "plan": json.loads(plan.plan.to_json())} for plan in plans],
    }


def _show_rank_peaks(asked: _OnRanks) -> int:
    """Shows the peaks of the configurations of `--recompute` on the rank that needs the most."""
    ranks, args = asked.ranks(LayoutRanks), asked.args
    plans = configurations("--recompute", args.recompute, ranks.step)
    models.check_regions(asked.layers, plans)
    plans = stated(plans, models.plan_options_of(args), "--")
    search = asked.search() if args.budget else None
    found: Sequence[ConfiguredLayout] = ()
    with _interruptible(search), asked.output.at_work(f"simulating {args.model} on {asked.layout}"):
        if search is None:
            found = [ranks.configured(name, plan) for name, plan in plans.items()]
        else:
            search.stated(plans, asked.start)
    found = search.steps if search else found

    def show(console: Console) -> None:
        for line in configured(found) if found else ():
            console.print(line, markup=False)
        for one in found[:1]:
            _print_sent(console, one.fullest.sent, plain=True)
        if args.explain:
            console.print(explained(PEAK_WORDS), style="dim", markup=False)
        if search is not None and len(found) < len(plans):
            console.print(_interrupted(search, [*plans][len(found)]))

    said = _beyond(args, asked.model, *(one.most for one in found))
    asked.give({"configurations": [one.as_data() for one in found]}, show, *said)
    return OK if len(found) == len(plans) else out.INTERRUPTED


def _show_rank_curve(asked: _OnRanks, planner: LayoutPlanner) -> int:
    """Shows what ten budgets cost on the ranks: from the least that each can do with to none recomputed."""
    layout = asked.layout
    with asked.output.at_work("planning"):
        least, most = planner.least_bytes, planner.plain_bytes
        budgets = sorted({least + (most - least) * place // (models.POINTS - 1) for place in range(models.POINTS)})
        points = [(budget, planner.plans(budget)) for budget in budgets]

    def show(console: Console) -> None:
        unit, name = errors.unit_of(most)
        rows = out.new_table(f"budget {name}", f"peak {name}", "rank", "step ms", "slower", "regions")
        for budget, plans in points:
            fullest = max(plans, key=lambda plan: plan.peak_bytes)
            step, plain = step_seconds(layout, plans), step_seconds(layout, plans, plain=True)
            sizes = (f"{nbytes / unit:,.2f}" for nbytes in (budget, fullest.peak_bytes))
            regions = sum(len(plan.plan) for plan in plans)
            rows.add_row(*sizes, str(fullest.rank), f"{1000 * step:,.1f}", f"{step / plain - 1:+.1%}", str(regions))
        console.print(rows)
        console.print("Of each budget, which is that of every rank: the rank that needs the most, and all regions.")

    curve = [{"budget_bytes": budget, **_ranks_as_data(layout, plans)} for budget, plans in points]
    return asked.give({"frontier": curve}, show)


def _find_longest_on_ranks(asked: _OnRanks) -> int:
    """Finds the longest sequence, or the largest microbatch, that every rank's budget holds."""
    args, layout, search = asked.args, asked.layout, asked.search()
    points: list[tuple[int, Sequence[RankPlan]]] = []
    with _interruptible(search), asked.output.at_work(f"looking for the most of {args.model} on {layout}"):
        points = search.plans(asked.start)
    rows = [_rank_point(asked, length, plans) for length, plans in points]

    def show(console: Console) -> None:
        if not rows:
            console.print(_interrupted(search))
            return
        console.print(f"at most {search.best:,} {search.what} within {args.budget} on each rank")
        unit, name = errors.unit_of(rows[-1]["peak_bytes"])
        shown = out.new_table(search.what, f"peak {name}", "step ms", "slower", "tokens/s")
        for row in rows:
            slower = row["step_seconds"] / row["plain_step_seconds"] - 1
            figures = f"{row['peak_bytes'] / unit:,.2f}", f"{1000 * row['step_seconds']:,.1f}", f"{slower:+.1%}"
            shown.add_row(f"{row['size']:,}", *figures, f"{row['tokens_per_second']:,.0f}")
        console.print(shown)
        _print_ranks(console, layout, points[-1][1])

    found = {"found": "mbs" if search.batch else "tokens", "most": search.best, "points": rows}
    said = _beyond(args, asked.model, search.best)
    code = asked.give({**found, **(_ranks_as_data(layout, points[-1][1]) if points else {})}, show, *said)
    return code if points else out.INTERRUPTED


def _rank_point(asked: _OnRanks, size: int, plans: Sequence[RankPlan]) -> dict[str, Any]:
    """Returns the figures of one length, or of one size of microbatches."""
    layout, step = asked.layout, step_seconds(asked.layout, plans)
    each = size * asked.tokens if asked.args.largest_batch else size * layout.mbs
    return {
        "size": size,
        "peak_bytes": max(plan.peak_bytes for plan in plans),
        "step_seconds": step,
        "plain_step_seconds": step_seconds(layout, plans, plain=True),
        "tokens_per_second": each * layout.microbatches * layout.ranks.batches / step,
    }


def _print_ranks(console: Console, layout: Layout, plans: Sequence[RankPlan]) -> None:
    """Prints the ranks, their plans, and the step."""
    name = _print_rows(console, plans)
    for plan in plans:
        hosted = 0 if plan.plan.prediction is None else plan.plan.prediction.host_bytes
        away = f"; at most {errors.size(hosted)} in host memory" if hosted else ""
        console.print(f"rank {plan.rank}: layers {_ranges(plan.layers)}{away}", style="bold")
        for line in plan.plan.prediction.lines if plan.plan.prediction is not None else ():
            console.print(
                f"  {line.count} x keeps {errors.size(line.saved_bytes)}, frees {errors.size(line.freed_bytes)}, "
                f"costs {1000 * line.seconds:,.3f} ms  {line.where}: {line.what}",
            )
        _print_sent(console, plan.sent, plain=True)
    step, plain = step_seconds(layout, plans), step_seconds(layout, plans, plain=True)
    waits = (layout.ranks.pp - 1) / layout.ranks.vpp
    slowest = f" of the slowest rank and {waits:g} to fill and drain the pipeline" if waits else ""
    console.print(
        f"step {1000 * step:,.1f} ms, {step / plain - 1:+.1%} for replays: "
        f"{counted(layout.microbatches, 'microbatch')}{slowest}, then "
        f"{1000 * max(plan.optimizer_seconds for plan in plans):,.1f} ms of the optimizer"
    )
    promises = (plan.plan.prediction for plan in plans)
    for words in dict.fromkeys(words for promise in promises if promise is not None for words in promise.of_host):
        console.print(f"host: {words}", markup=False)
    console.print(
        f"Sizes in {name}. In flight: microbatches of a chunk at the peak, over all chunks. Gap: no choice of "
        "what to keep and recompute saves more of the rank's time. Links: collectives inside a layer, counted in a "
        f"microbatch. Counted {counted_in(layout)}.",
        style="dim",
    )


def _print_rows(console: Console, plans: Sequence[RankPlan]) -> str:
    """Prints a row for each rank; returns the unit of its sizes."""
    unit, name = errors.unit_of(max(plan.plain_peak_bytes for plan in plans))
    for line in table([TITLES, *(_rank_row(plan, unit) for plan in plans)]):
        console.print(line)
    return name


def _print_sent(console: Console, sent: Sequence[Sent], device: str = "such devices", *, plain: bool = False) -> None:
    """Prints what a rank sends in a step, or in one without recomputation, for which purpose and over which link."""
    if sent:
        step = "step without recomputation" if plain else "step"
        console.print(f"  sent in a {step}: {'; '.join(map(str, sent))}")
    said = unknown_network(sent, device)
    if said:
        console.print(said, style="yellow")


def _rank_row(plan: RankPlan, unit: int) -> tuple[str, ...]:
    sizes = (plan.weight_bytes, plan.gradient_bytes, plan.optimizer_bytes, plan.activation_bytes, plan.buffer_bytes)
    seconds = (plan.microbatch_seconds, plan.replay_seconds)
    return (
        str(plan.rank),
        str(sum(plan.held)),
        *(f"{size / unit:,.2f}" for size in (*sizes, plan.peak_bytes, plan.plain_peak_bytes)),
        *(f"{1000 * each:,.2f}" for each in seconds),
        "" if plan.plan.prediction is None else f"{plan.plan.prediction.gap:.1%}",
        f"{1000 * plan.link_seconds:,.2f}",
    )


def _ranges(chunks: Sequence[Sequence[int]]) -> str:
    """Returns the numbers of layers, those in a row as a range."""
    return ", ".join(f"{chunk[0]}-{chunk[-1]}" if len(chunk) > 1 else str(chunk[0]) for chunk in chunks)
