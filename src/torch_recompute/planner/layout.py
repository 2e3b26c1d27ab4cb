"""A step that is spread over ranks by tensor, pipeline and data parallelism, in Megatron's words, and its plans.

A step has `batch` sequences; each of `dp` replicas takes its share in microbatches of `mbs`. A replica is a pipeline
of `pp` ranks, each of which holds `vpp` chunks of layers, and each place in it is a group of `tp` ranks that hold a
part of every layer. The ranks of such a group and the replicas do the same, so there is one plan per rank of the
pipeline. The pipeline planner (`pipeline.py`) makes it: the model is a rank's slice of the whole
(`tensor_parallel.py`), its stages are run by Megatron's runtime, and the optimizer is Megatron's as far as memory goes.

Seconds are those of operations on one rank: a microbatch's forward and backward with the collectives within its layers,
and the optimizer's step. From them follows a step of 1F1B, where a rank waits for the others while the pipeline fills
and drains: (microbatches + (ranks - 1) / chunks) times the slowest rank's microbatch. What is sent between stages is
waited for, except in interleaved 1F1B, and so is what replicas send before and after the optimizer's step (`sent.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from .. import errors
from .._torch.fakes import host_of
from ..errors.text import counted, table
from ..memory.budget import Limit
from ..memory.ledger import Block, Place
from ..memory.loop import NOT_COUNTED, Loop
from ..memory.measurement import weights_of
from ..plan.apply import apply
from ..plan.plan import Plan
from ..plan.ranks import Ranks
from ..simulation.devices import Device, Host, typical
from ..simulation.step import simulate_step, where_it_runs
from ..simulation.training_step import OPTIMIZERS, TrainingStep, any_loss
from .configurations import (
    NO_WAITS,
    PEAK_WORDS,
    largest_at_peak,
    largest_parts,
    made_of,
    name_of_op,
    parts_as_data,
    tensor_as_data,
    tensor_in_words,
)
from .hosts import NO_OPTIONS, PlanOptions
from .pipeline import Budget, PipelinePlanner, PipelineRank, PipelineStages, RankPlanner, paths_of_layers
from .planner import Planner
from .prices import prices_for
from .schedules import Pipeline, one_f_one_b, orders_named
from .sent import Price, Sent, between, parts_of, sent, together
from .stage_runs import ActionPeak, StageRun
from .states import OptimizerSpec, new_states, trained, update
from .tensor_parallel import check_divides, rank_model
from .tiling import tiled

USUALLY, MEGATRONS = OptimizerSpec(), "fp32-master"
NUMBERS = (1e-3, 0.9, 0.999, 1e-8, 0.01, 1)  # of AdamW's step, on which no memory depends
STATES = {"weight": "parameters", "gradient": "gradients", "optimizer": "optimizer"}
STAGES, GRADIENTS, WEIGHTS = "between stages", "gradients of replicas", "weights of replicas"


@dataclass(frozen=True)
class Layout:
    """A step that is spread over ranks: how they share it, and in which portions they take its batch."""

    ranks: Ranks
    mbs: int = 1  # sequences in a microbatch
    batch: int | None = None  # sequences in a step, over all replicas; None for the default of `microbatches`

    def __post_init__(self) -> None:
        if self.mbs < 1:
            raise errors.ArgumentError(errors.not_a_size("--mbs", self.mbs))
        ranks, share = self.ranks, self.ranks.batches * self.mbs
        if self.batch is not None and (self.batch < share or self.batch % share):
            raise errors.ArgumentError(
                f"--batch is {self.batch}, which {counted(ranks.batches, 'replica')} (--dp x --fsdp) cannot take in "
                f"microbatches of {self.mbs} (--mbs). Write a multiple of {share}."
            )
        if ranks.vpp > 1 and self.microbatches % ranks.pp:
            raise errors.ArgumentError(
                f"--vpp: interleaved 1F1B takes the microbatches in turns of the pipeline's {ranks.pp} ranks, and "
                f"{self.microbatches} are no multiple of it. Write a --batch that is a multiple of {ranks.pp * share}."
            )

    @property
    def microbatches(self) -> int:
        """Of one replica in a step; by default one without a pipeline, and two per rank with one."""
        if self.batch is None:
            return 2 * self.ranks.pp if self.ranks.pp > 1 else 1
        return self.batch // (self.ranks.batches * self.mbs)

    def pipeline(self, layers: int) -> Pipeline:
        """The pipeline over the layers of a model: 1F1B, or interleaved 1F1B.

        Where they do not divide evenly, the first chunk and the last, which also hold the embedding and the head, are
        the last to get one more.
        """
        pp, vpp = self.ranks.pp, self.ranks.vpp
        count = pp * vpp
        if layers < count:
            given = f"--pp {pp} --vpp {vpp}" if vpp > 1 else f"--pp {pp}"
            raise errors.ArgumentError(f"{given} are {count} parts, and the model has {layers} layers. Write fewer.")
        sizes = [layers // count] * count
        for place in [*range(1, count - 1), 0, count - 1][: layers % count]:
            sizes[place] += 1
        orders = one_f_one_b(pp, self.microbatches)
        if vpp > 1:
            orders = orders_named("Interleaved1F1B", pp, self.microbatches, vpp)
        bounds = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        return Pipeline("1F1B" if vpp == 1 else "Interleaved1F1B", orders, self.microbatches, tuple(bounds))

    def as_data(self) -> dict[str, Any]:
        """The layout as plain data."""
        return {**self.ranks.as_data(), "mbs": self.mbs, "microbatches": self.microbatches}

    def __str__(self) -> str:
        word = "microbatch" if self.microbatches == 1 else "microbatches"
        return f"{self.ranks}; {self.microbatches} {word} of {self.mbs}"


@dataclass(frozen=True)
class RankPlan:
    """The plan of one rank of a pipeline, with its figures."""

    rank: int  # its place in the pipeline
    layers: tuple[tuple[int, ...], ...]  # the numbers of its layers, by chunk
    parameters: int
    weight_bytes: int
    gradient_bytes: int  # of the buffers that microbatches add to
    optimizer_bytes: int  # of the optimizer's state, its share among the replicas
    held: tuple[int, ...]  # the microbatches of each chunk in flight at the peak, the running one counted
    activation_bytes: int  # all else that is alive at the peak
    plain_peak_bytes: int  # the peak without recomputation
    microbatch_seconds: float  # of one microbatch without recomputation, forward and backward
    replay_seconds: float  # what the plan adds to it
    optimizer_seconds: float  # of the optimizer's step
    link_bytes: int  # sent to its tensor-parallel group in one microbatch without recomputation
    link_seconds: float  # what that takes; counted in `microbatch_seconds`
    sent: tuple[Sent, ...]  # in a step without recomputation
    plan: Plan  # in the paths of the whole model
    made_of: Mapping[str, int] = field(default_factory=dict[str, int])  # the bytes of the peak by what they are for
    where: str = ""  # the peak is, in words
    at: Place = field(default_factory=Place)  # the operation of the peak
    largest: tuple[Block, ...] = ()  # activations of the running microbatch at the peak
    once_seconds: float = 0.0  # of what ranks that share weights send once in a step

    @property
    def buffer_bytes(self) -> int:
        """Of gathered weights and of reductions, at the peak."""
        return self.made_of.get("buffers of ranks", 0)

    def waited(self, *words: str) -> float:
        """Seconds of a step in which it waits for what it sends for some purposes."""
        return sum(one.seconds - one.hidden for one in self.sent if one.what in words)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at any time."""
        states = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes
        return states + self.activation_bytes + self.buffer_bytes

    @property
    def held_words(self) -> str:
        """The parts of the peak in words, the largest first, without those below a hundredth; and where it is."""
        return f"{largest_parts(self.made_of, self.peak_bytes)}, on rank {self.rank} {self.where}"

    def as_data(self) -> dict[str, Any]:
        """The figures as plain data."""
        data = {**vars(self), "peak_bytes": self.peak_bytes, "sent": [one.as_data() for one in self.sent]}
        del data["plan"], data["at"]
        data["peak"] = {"phase": self.at.phase, "module": self.at.module, "op": self.at.op}
        data["largest"] = [*map(tensor_as_data, self.largest)]
        data["buffer_bytes"], data["made_of"] = self.buffer_bytes, parts_as_data(self.made_of)
        return data


def _replay_seconds(run: StageRun, price: Price) -> float:
    """Seconds that replays add to one microbatch of a stage."""
    whole, plain = (parts_of(run.log, price, plain=plain).seconds(price.host) for plain in (False, True))
    return whole - plain


def step_seconds(layout: Layout, plans: Sequence[RankPlan], *, plain: bool = False) -> float:
    """Seconds of a step of the pipeline; see the module's docstring."""
    each = [
        plan.microbatch_seconds + (0.0 if plain else plan.replay_seconds) + plan.waited(STAGES) / layout.microbatches
        for plan in plans
    ]
    waits = (layout.ranks.pp - 1) / layout.ranks.vpp
    ends = max(plan.optimizer_seconds + plan.once_seconds + plan.waited(GRADIENTS, WEIGHTS) for plan in plans)
    return (layout.microbatches + waits) * max(each) + ends


@dataclass(frozen=True)
class ConfiguredLayout:
    """A step that is spread over ranks, under one configuration that is stated.

    Attributes:
        name: The configuration, as it was written.
        layout: How the step is spread.
        ranks: Those of the pipeline.
        tiled: What is made in tiles of tokens, or why nothing is; where tiles are allowed.
        most: The tokens in a sequence, or sequences in a microbatch, where these were looked for; else 0.
    """

    name: str
    layout: Layout
    ranks: Sequence[RankPlan]
    tiled: tuple[str, ...] = ()
    most: int = 0

    @property
    def fullest(self) -> RankPlan:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The peak of the fullest rank."""
        return self.fullest.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Of the whole step."""
        return step_seconds(self.layout, self.ranks)

    @property
    def replay_seconds(self) -> float:
        """Of these, what recomputation adds."""
        return self.step_seconds - step_seconds(self.layout, self.ranks, plain=True)

    def as_data(self) -> dict[str, Any]:
        """The figures as plain data, with the plan as `Plan.from_json` reads it from its JSON."""
        fullest = self.fullest.as_data()
        return {
            "recompute": self.name,
            **({"most": self.most} if self.most else {}),
            "peak_bytes": self.peak_bytes,
            **{name: fullest[name] for name in ("rank", "made_of", "peak", "largest", "where")},
            "step_seconds": self.step_seconds,
            "replay_seconds": self.replay_seconds,
            "ranks": [rank.as_data() for rank in self.ranks],
            **({"tiled": list(self.tiled)} if self.tiled else {}),
        }


def configured(steps: Sequence[ConfiguredLayout]) -> Iterator[str]:
    """Returns lines of text: a table of configurations, each with its fullest rank, and where its peak is."""
    unit, name = errors.unit_of(max(one.fullest.peak_bytes for one in steps))
    known = [part for part in PEAK_WORDS if part in {name for one in steps for name in one.fullest.made_of}]
    parts = [part for part in known if any(round(one.fullest.made_of.get(part, 0) / unit, 2) for one in steps)]
    most = ["most"] if any(one.most for one in steps) else []
    rows: list[tuple[str, ...]] = [("", *most, "rank", f"peak {name}", *parts, "step ms", "replays ms")]
    for one in steps:
        rank = one.fullest
        sizes = (nbytes / unit for nbytes in (rank.peak_bytes, *(rank.made_of.get(part, 0) for part in parts)))
        seconds = (f"{1000 * each:,.1f}" for each in (one.step_seconds, one.replay_seconds))
        found = [f"{one.most:,}"] if most else []
        rows.append((one.name, *found, str(rank.rank), *(f"{size:,.2f}" for size in sizes), *seconds))
    wide = max(len(row[0]) for row in rows)
    yield from table([(row[0].ljust(wide), *row[1:]) for row in rows])
    for one in steps:
        yield f"{one.name}: {_peak_in_words(one)}"
        if one.fullest.largest:
            yield f"  its largest activations: {'; '.join(map(tensor_in_words, one.fullest.largest))}"
        others = (f"rank {rank.rank} {errors.size(rank.peak_bytes)}" for rank in one.ranks if rank is not one.fullest)
        if len(one.ranks) > 1:
            yield f"  the others: {', '.join(others)}"
        yield from (f"in tiles, with {one.name}: {words}" for words in one.tiled)
    yield from dict.fromkeys(f"counted: {counted_in(one.layout)}" for one in steps)
    yield f"not counted: {NOT_COUNTED}"
    if any(choice.store == "host" for one in steps for rank in one.ranks for choice in rank.plan):
        yield ": ".join(NO_WAITS)


def counted_in(layout: Layout) -> str:
    """Returns the loop that the peaks of ranks belong to, in words."""
    if layout.ranks.fully_sharded:
        return (
            "as FSDP2 does in torch's pipeline: weights, gradients and states are shared; gradients of microbatches "
            "are added up whole and reduced once"
        )
    gradients = layout.ranks.reduce_dtype or "the type of weights"
    shared = "; replicas share the optimizer's states" if layout.ranks.state_shards > 1 else ""
    return (
        f"as in Megatron-Core: no output in backward, the loss alone; gradients in buffers of {gradients}, which are "
        f"there throughout the step{shared}"
    )


def _peak_in_words(one: ConfiguredLayout) -> str:
    rank, by = one.fullest, f", by {name_of_op(one.fullest.at.op)}" if one.fullest.at.op else ""
    if one.layout.ranks.pp == 1:
        return f"the peak is {rank.where.removesuffix(' of stage 0')}{by}"
    return f"rank {rank.rank} needs the most, {rank.where}{by}, with {sum(rank.held)} in flight"


def one_rank(
    model: nn.Module, word: str, ranks: Ranks, mbs: int, tokens: int
) -> tuple[nn.Module, list[str], dict[str, Any]]:
    """The model that one rank computes, the paths of its layers, and the keyword arguments of a call.

    Args:
        model: The whole model, of transformers and on meta.
        word: Its name, as the user wrote it.
        ranks: The ranks.
        mbs: Sequences in a call.
        tokens: In a sequence.

    Raises:
        ArgumentError: The model cannot be shared so.
    """
    if ranks.sequence_parallel:
        check_divides(word, "--sequence", tokens, ranks.tp)
    if tokens % (2 * ranks.cp) and ranks.cp > 1:
        raise errors.ArgumentError(
            f"--cp is {ranks.cp}, and --sequence of {word} is {tokens}, whose tokens {ranks.cp} ranks cannot share in "
            f"two equal parts each. Write a --sequence that is a multiple of {2 * ranks.cp}."
        )
    tokens //= ranks.cp
    part, layers = rank_model(model, word, ranks.tp, ranks.sequence_parallel, ranks.expert_tp)
    if all(weight.dtype == torch.float32 for weight in model.parameters()):
        part.float()
    if not layers or not hasattr(model, "get_input_embeddings"):
        raise errors.ArgumentError(no_pipeline(word, type(model).__name__))
    ids = torch.ones(mbs, tokens, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(tokens)[None], "use_cache": False}
    return part, layers, batch


def plan_of_shard(planner: Planner, plan: Plan) -> RankPlan:
    """A plan that a planner has made for a rank that shares weights by FSDP2, with what is alive at its peak."""
    found, promise = planner.simulated(plan), plan.prediction
    assert promise is not None
    parts = made_of(found)
    states = {f"{name}_bytes": found.by_category[word] for name, word in STATES.items()}
    return RankPlan(
        rank=0,
        layers=(tuple(range(len(planner.paths))),),
        parameters=sum(weight.numel() for weight in planner.step.model.parameters()),
        **states,
        held=(1,),
        activation_bytes=found.peak_bytes - sum(states.values()) - parts["buffers of ranks"],
        plain_peak_bytes=promise.plain_peak_bytes,
        microbatch_seconds=(promise.plain_step_seconds - planner.optimizer_seconds) / planner.step.loop.accumulate,
        replay_seconds=(promise.step_seconds - promise.plain_step_seconds) / planner.step.loop.accumulate,
        optimizer_seconds=planner.optimizer_seconds,
        link_bytes=sum(one.bytes for one in planner.sent) // planner.step.loop.accumulate,
        link_seconds=sum(one.seconds - one.hidden for one in planner.sent) / planner.step.loop.accumulate,
        sent=planner.sent,
        plan=plan,
        made_of=parts,
        where=f"in {found.peak.phase}",
        at=Place(found.peak.event, found.peak.phase, found.peak.module, found.peak.op),
        largest=largest_at_peak(found),
    )


class LayoutRanks:
    """A model whose step is spread over ranks, under plans that are stated.

    Args:
        model: The whole model, of transformers and on meta.
        word: Its name, as the user wrote it.
        layout: How the step is spread.
        tokens: In a sequence.
        optimizer: "adamw", "sgd" or "none".
        device: See `profile`.
        kept: The states of "adamw", and whether they are in host memory.
        plan_options: What plans may use besides recomputation; of host memory that of each rank.
        host: What launches the operations of each rank.

    Raises:
        ArgumentError: The model cannot be spread so.
    """

    def __init__(
        self,
        model: nn.Module,
        word: str,
        layout: Layout,
        tokens: int,
        optimizer: str,
        device: Device,
        kept: OptimizerSpec = USUALLY,
        plan_options: PlanOptions = NO_OPTIONS,
        host: Host | None = None,
    ) -> None:
        self.layout, self.tokens, self._optimizer, self._of = layout, tokens, (optimizer, kept), (model, word, device)
        self.plan_options, self.host = plan_options, host or typical()
        part, self.paths, batch = one_rank(model, word, layout.ranks, layout.mbs, tokens)
        self.cut = layout.pipeline(len(self.paths))
        loop = Loop(hold_output=False)
        self.step = TrainingStep(
            part, (), batch, any_loss, device=device, loop=loop, ranks=layout.ranks, host=self.host
        )
        self._sharded = layout.ranks.fully_sharded  # which torch's runtime runs
        make = OPTIMIZERS[optimizer] if not kept.states else OptimizerSpec(states=kept.states)
        self.make = make if self._sharded else partial(Sharded, ranks=layout.ranks, word=optimizer, kept=kept)

    @cached_property
    def pipeline(self) -> PipelineStages:
        """The stages."""
        price = prices_for(self.step, where_it_runs(self.step)[0])
        return PipelineStages(self.step, self.paths, self.cut, self.make, not self._sharded, price)

    def spread(self, layout: Layout) -> LayoutRanks:
        """The same step, spread in another way."""
        model, word, device = self._of
        optimizer, kept = self._optimizer
        return LayoutRanks(model, word, layout, self.tokens, optimizer, device, kept, self.plan_options, self.host)

    def configured(self, name: str, plan: Plan) -> ConfiguredLayout:
        """The ranks under a configuration that is stated, in as many tiles as a rank with all layers would have."""
        words: tuple[str, ...] = ()
        if self.plan_options.tiles:
            ranks = dataclasses.replace(self.layout.ranks, zero=self.layout.ranks.zero or None)  # whose buckets are
            loop = Loop(hold_output=False, set_to_none=False)  # the gradients, which are there throughout
            step = dataclasses.replace(self.step, loop=loop, ranks=ranks)
            plan, words = tiled(step, plan, simulate_step(step, prepare=partial(apply, plan=plan)))
        return ConfiguredLayout(name, self.layout, self.under(plan), words)

    def under(self, plan: Plan) -> list[RankPlan]:
        """Each rank under a plan that is stated, without a prediction."""
        ranks = [PipelineRank(self.pipeline, number) for number in sorted(self.cut.orders)]
        stated = self.pipeline.stated
        return [self.seen(one, {stage: stated(stage, plan, one.kinds) for stage in one.stages}, plan) for one in ranks]

    def seen(self, rank: PipelineRank, runs: Mapping[int, StageRun], plan: Plan) -> RankPlan:
        """Returns what runs of the stages of a rank under a plan have shown."""
        runner, price, peak = self.pipeline.runner, self.pipeline.price, rank.peak(runs)
        weights, parts = [runner.model.get_parameter(name) for name in rank.parameters], rank.made_of(runs)
        weight_bytes, gradient_bytes = runner.bytes_of(weights), sum(one.bytes.gradient_bytes for one in runs.values())
        if self._sharded:  # which are not there all the time
            gradient_bytes = parts["gradients"]
        states = weight_bytes + gradient_bytes + rank.state_bytes
        microbatch, update = rank.ran
        links = [(sent, price(op) * n, n) for op, n in microbatch.items() if (sent := op.sent_bytes) is not None]
        step, when = peak.step, ActionPeak(Place(), ())
        if step is not None:
            when = runs[step.action.stage].peaks.get(step.action.kind, when)
        return RankPlan(
            rank=rank.number,
            layers=tuple(tuple(range(*self.cut.bounds[stage])) for stage in rank.stages),
            parameters=sum(weight.numel() for weight in weights),
            weight_bytes=weight_bytes,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=rank.state_bytes,
            held=tuple(0 if step is None else step.live(stage) for stage in rank.stages),
            activation_bytes=peak.bytes - states - parts.get("buffers of ranks", 0),
            plain_peak_bytes=rank.peak(rank.runs).bytes,
            microbatch_seconds=rank.seconds,
            replay_seconds=sum(_replay_seconds(run, price) for run in runs.values()),
            optimizer_seconds=sum(price(op) * count for op, count in update.items()),
            link_bytes=sum(sent * count for sent, _, count in links),
            link_seconds=sum(seconds for _, seconds, _ in links),
            sent=self._sent(rank),
            plan=plan,
            made_of=parts,
            where=peak.where,
            at=when.place,
            largest=when.largest,
            once_seconds=sum(price(op) * count for op, count in rank.once.items()),
        )

    def _sent(self, rank: PipelineRank) -> tuple[Sent, ...]:
        """Counts what a rank sends in a step: by its operations, between stages, for the states that replicas share."""
        layout, runner, price = self.layout, self.pipeline.runner, self.pipeline.price
        ranks, bounds, count = layout.ranks, self.pipeline.pipeline.bounds, layout.microbatches
        found = together([*sent(rank.ran[0], price, rank.hidden, count), *sent(rank.once, price, {})])
        found = [*found, *sent(rank.ran[1], price, {})]
        starts = [bounds[stage][0] for stage in rank.stages] + [bounds[stage][1] for stage in rank.stages]
        crossed = [runner.bytes_of(runner.layers[start].inputs) for start in starts if 0 < start < len(runner.layers)]
        if crossed:  # by an output, or by the gradient of an input
            overlaps = ranks.vpp > 1
            found.append(between(count * sum(crossed), ranks.world // ranks.pp + 1, price, STAGES, overlaps=overlaps))
        weights = [] if self._sharded else [runner.model.get_parameter(name) for name in rank.parameters]
        own: dict[str, int] = dict.fromkeys((GRADIENTS, WEIGHTS), 0)
        for weight in trained(weights):
            replicas = ranks.copies_of(weight)
            size = weight.numel() * (replicas - 1) // replicas
            own[GRADIENTS] += size * max(weight.itemsize, 4 if ranks.reduce_dtype == "float32" else 0)
            own[WEIGHTS] += size * weight.itemsize
        if ranks.zero == 0:  # gradients are all-reduced, and every rank updates all weights
            own = {GRADIENTS: 2 * own[GRADIENTS]}
        span = ranks.tp * ranks.cp * ranks.batches
        found += [between(nbytes, span, price, word) for word, nbytes in own.items() if nbytes]
        return tuple(found)


class LayoutPlanner(LayoutRanks):
    """A model whose step is spread over ranks, and plans for each; the arguments are those of `LayoutRanks`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.planner = Planner(self.step, plan_options=self.plan_options)
        assert paths_of_layers(self.planner) == self.paths

    @cached_property
    def pipeline(self) -> PipelinePlanner:
        """The stages, and plans for the ranks."""
        return PipelinePlanner(self.planner, self.cut, self.make, megatron=not self._sharded)

    @cached_property
    def least_bytes(self) -> int:
        """The least budget for which every rank has a plan."""
        return max(rank.least.peak.bytes for rank in self.pipeline.ranks)

    @property
    def plain_bytes(self) -> int:
        """The peak of the fullest rank without recomputation."""
        return max(rank.plain.peak.bytes for rank in self.pipeline.ranks)

    @property
    def least_plan(self) -> Plan:
        """The plan with which each rank needs the least."""
        ranks = self.pipeline.ranks
        plans = (rank.planned([rank.stages], rank.least, Limit(rank.least.peak.bytes), 1)[0] for rank in ranks)
        return Plan(tuple(choice for plan in plans for choice in plan))

    def plans(self, budget: Budget) -> list[RankPlan]:
        """A plan for each rank; the budget is that of each.

        Raises:
            BudgetError: A rank does not fit; it carries the least budget of the rank that needs the most.
        """
        found = [self._plan(rank, budget) for rank in self.pipeline.ranks]
        worst = max(found, key=lambda plan: plan.peak_bytes)
        allowed = worst.plan.prediction
        assert allowed is not None
        if worst.peak_bytes > allowed.budget_bytes:
            least, up = errors.size(worst.peak_bytes, up=True), worst.peak_bytes - worst.activation_bytes
            said = allowed.budget or errors.size(allowed.budget_bytes)
            raise errors.BudgetError(
                f"budget={said} is too small for rank {worst.rank} of the pipeline, which "
                f"needs the most: the plan with the smallest peak needs {least} ({worst.peak_bytes} bytes); "
                f"without recomputation the peak is {errors.size(worst.plain_peak_bytes)}; {errors.size(up)} of either "
                "are weights, gradients and optimizer state.\n"
                f"  Write --budget {least.replace(' ', '')} or more, or spread the step over more ranks.",
                worst.peak_bytes,
                worst.plan,
            )
        return found

    def _plan(self, rank: RankPlanner, budget: Budget) -> RankPlan:
        tried, wanted = rank.fitted(budget)
        (plan,) = rank.planned([rank.stages], tried, wanted, 1)
        updating = sum(self.planner.price(op) * count for op, count in rank.ran[1].items())
        promise = plan.prediction
        assert promise is not None
        seconds = ("step_seconds", "plain_step_seconds", "bound_seconds")
        promise = dataclasses.replace(promise, **{name: getattr(promise, name) + updating for name in seconds})
        words = f"rank {rank.number} of the pipeline on {self.layout.ranks}, {wanted.said}"
        plan = dataclasses.replace(plan, prediction=promise, source=words)
        return dataclasses.replace(self.seen(rank, tried.runs, plan), replay_seconds=tried.seconds)


class Sharded(torch.optim.Optimizer):
    """Megatron's optimizer as far as memory goes: gradients that are always there, a state that the replicas share.

    Gradients are in buffers from the first step to the last, because several microbatches add to them. The state is
    sharded over the replicas (ZeRO-1, `--use-distributed-optimizer`): a rank keeps and updates its share of each
    weight. Of weights of 16 bits the state holds a copy in 32 bits, beside the two moments in 32 bits: 12 bytes per
    parameter, divided by the replicas; or other ones, as asked. In host memory the step is there, too, as with
    `--optimizer-cpu-offload`. "sgd" has no state, "none" has gradients and no step.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], ranks: Ranks, word: str, kept: OptimizerSpec = USUALLY
    ) -> None:
        super().__init__(parameters, {})
        self._ranks, self._word, self._kept = ranks, word, kept
        for parameter in self._parameters():
            parameter.grad = torch.zeros_like(parameter)

    def _parameters(self) -> list[torch.Tensor]:
        return trained(weights_of(self))

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Keeps the buffers."""
        super().zero_grad(set_to_none=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates this replica's share of each parameter."""
        if self._word == "none":
            return
        for parameter in self._parameters():
            grad = parameter.grad
            assert grad is not None
            share = -(-parameter.numel() // (1 if self._ranks.zero == 0 else self._ranks.copies_of(parameter)))
            own, gradient = parameter.view(-1)[:share], grad.view(-1)[:share]
            if self._word == "sgd":
                own.add_(gradient, alpha=-1e-3)
                continue
            state: dict[str, Any] = self.state[parameter]
            if not state:
                copied = own.to(host_of(parameter)) if self._kept.on_host else None
                state.update(
                    copy=copied,
                    held=new_states(own if copied is None else copied, self._kept.states or MEGATRONS),
                )
            copied = state["copy"]
            if copied is None:
                update(own, gradient, state["held"], *NUMBERS)
            else:
                update(copied, gradient.to(copied.device), state["held"], *NUMBERS)
                own.copy_(copied)


def no_pipeline(model: str, cls: str) -> str:
    """Text for a model whose layers are not known."""
    return (
        f"--tp, --pp, --dp and --mbs are for language models of transformers; {model} is {cls}. Leave them out, or "
        "plan with make_plan what each rank runs."
    )
