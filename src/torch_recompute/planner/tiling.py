"""Tiles of tokens in plans, where they are allowed: of the head with its loss, and of MLPs.

How many tiles is counted in bytes. What a part makes with all tokens at once is followed through the simulated steps
without recomputation and with the plan that keeps the least; so many tiles are made of it, in powers of two, that with
one of them in its place it raises neither peak above what all else has at its own highest moment, but for a small part
(`WORTH`). More would lower no peak, and each reads the weights again and rounds their gradient once more. Whether tiles
are used at all is decided by seconds, as everything else.

A head is tiled with its loss where the loss is made by `cross_entropy` alone, which a simulated step shows: what else
reads the logits is named. An MLP is tiled where each of its operations acts on one token, which its operations show.

Results are those without tiles up to the order of sums. By how much is measured, in a small run of the same dtype.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .. import errors
from ..errors.text import counted, doing
from ..memory import Block
from ..memory.ledger import Place
from ..memory.operations import Operation
from ..plan.apply import Applied, apply
from ..plan.choice import Choice, joined
from ..plan.plan import Plan
from ..plan.roles import inside
from ..plan.units import find_units
from ..plan.wrappers import HeadWithLoss, wrappers_on
from ..simulation import Simulation, simulate_step
from ..simulation.fused import KERNEL
from ..simulation.training_step import TrainingStep
from .hosts import stores_for
from .ops import Op, op_of

WORTH = 32  # the part of a peak that is not worth more tiles


@dataclass(frozen=True)
class InTiles:
    """The parts of a step's model that may be in tiles.

    Attributes:
        head: The head with its loss; None where tiles would change nothing, or cannot be.
        words: What is said of it.
        mlps: The paths of MLPs.
        tiles: How many tiles of each of them are enough; 1 where tiles would change nothing.
        refused: MLPs that cannot be in tiles, each with the reason.
    """

    head: Choice | None
    words: str
    mlps: tuple[str, ...]
    tiles: int
    refused: tuple[str, ...] = ()


def in_tiles(step: TrainingStep, plan: Plan, simulations: Sequence[Simulation], mlps: Sequence[str]) -> InTiles:
    """Returns what may be in tiles in a step, and in how many; or why nothing is.

    Args:
        step: The step.
        plan: A plan without tiles.
        simulations: The step with it, and with other plans of which the number of tiles is to be enough.
        mlps: The MLPs that may be.
    """
    heads = [unit.path for unit in find_units(step.model).by_role("head")]
    weights = {path: getattr(step.model.get_submodule(path), "weight", None) for path in heads}
    path = next((path for path in reversed(heads) if getattr(weights[path], "ndim", 0) == 2), "")
    classes = getattr(weights.get(path), "shape", (0,))[0]
    tokens, (count, inside) = _counts(simulations, classes, mlps)
    mlps, head, said = mlps if inside > 1 else (), None, ""
    if not path:
        said = "no head with its loss: the model has no linear layer behind its last layer"
    elif count < 2:
        said = f"not {path} with its loss: all else takes as much at another moment"
    else:
        head = Choice((path,), tiles=count, with_loss=True)
    why, mixing = _seen(step, plan, head, mlps)
    if why:
        said, head = f"not {path} with its loss: {why}", None
    elif head is not None:
        dtype = _computed_in(simulations[0], step.model.get_submodule(path))
        said = (
            f"{path} with its loss in {count} tiles of {-(-tokens // count):,} tokens; {_noise_of_a_head(dtype, count)}"
        )
    refused: dict[str, list[str]] = {}
    for mlp, op in mixing.items():
        refused.setdefault(op, []).append(mlp)
    others = {op: f" and {len(paths) - 1} more" if len(paths) > 1 else "" for op, paths in refused.items()}
    words = [
        f"not {paths[0]}{others[op]}: {op} is not known to act on each token alone" for op, paths in refused.items()
    ]
    return InTiles(head, said, tuple(mlp for mlp in mlps if mlp not in mixing), inside, tuple(words))


def _counts(simulations: Sequence[Simulation], classes: int, mlps: Sequence[str]) -> tuple[int, list[int]]:
    """The tokens of a head with so many classes, and the tiles that make it with its loss, and MLPs, matter no more."""
    blocks = [block for simulation in simulations for block in simulation.blocks]
    where = {path: any(inside(path, mlp) for mlp in mlps) for path in {block.made.module for block in blocks}}
    shapes = [block.made.shape for block in blocks if classes and block.made.shape[-1:] == (classes,)]
    tokens = max((math.prod(shape[:-1]) for shape in shapes), default=1)
    levels = [_levels(simulation.blocks, classes, where) for simulation in simulations]
    highest = [max(level[0] for level in each) for each in levels]
    worth = min(highest) // WORTH
    counts: list[int] = []
    for number in (1, 2):
        most = max(
            level[number] / (high + worth - level[0])
            for each, high in zip(levels, highest, strict=True)
            for level in each
        )
        count = 1
        while count < most and 2 * count <= tokens:
            count *= 2
        counts.append(count)
    return tokens, counts


_REST, _LOSS, _MLP, _HELD = range(4)


def _levels(blocks: Sequence[Block], classes: int, mlps: Mapping[str, bool]) -> list[tuple[int, int, int]]:
    """The bytes of all else, of the head and the loss, and of what passes in MLPs, whenever they change.

    Logits that an output holds are gone in tiles, but in the loss they are there, one tile at a time.
    """
    turn = min((block.born for block in blocks if block.made.phase not in ("", "forward")), default=0)

    def part(block: Block) -> int:
        made, died = block.made, block.died or math.inf
        if classes and block.category == "other" and not made.op and made.phase == "forward":
            return _HELD  # by the output of the step before
        if block.category != "activations":
            return _REST
        if classes and (made.phase == "loss" or made.shape[-1:] == (classes,)):
            return _HELD if made.phase == "forward" else _LOSS
        return _MLP if mlps[made.module] and (made.phase != "forward" or died <= turn) else _REST

    changes: list[tuple[int, int, int]] = []
    for block in blocks:
        it = part(block)
        changes += [(block.born, block.nbytes, it)]
        changes += [(block.died, -block.nbytes, it)] if block.died is not None else []
    level, found = [0, 0, 0, 0], list[tuple[int, int, int]]()
    for _, together in itertools.groupby(sorted(changes, key=lambda change: change[0]), key=lambda change: change[0]):
        for _, nbytes, it in together:
            level[it] += nbytes
        found.append((level[_REST], level[_LOSS] + level[_HELD] if level[_LOSS] else 0, level[_MLP]))
    return found


def _seen(step: TrainingStep, plan: Plan, head: Choice | None, mlps: Sequence[str]) -> tuple[str, Mapping[str, str]]:
    """Simulates a step with a head in tiles, and sees what runs in its MLPs.

    Returns:
        Why the head's loss is not made in tiles, "" if it is; and of MLPs that may mix tokens an operation that is not
        known to act on each token alone.
    """
    if head is None and not mlps:
        return "", {}
    handles: list[Applied] = []
    running, mixing = list[str](), dict[str, str]()

    def prepare(copy: nn.Module) -> None:
        copy.register_forward_pre_hook(lambda *_: running.clear())  # a replay may end within an MLP
        for mlp in mlps:
            module = copy.get_submodule(mlp)
            module.register_forward_pre_hook(lambda *_, mlp=mlp: running.append(mlp))
            module.register_forward_hook(lambda *_: running.clear())
        handles.append(apply(copy, tiled, stores=stores_for(tiled, step)))

    def see(place: Place, operation: Operation) -> None:
        op = op_of(operation) if running and place.phase == "forward" else None
        if op is not None and not acts_on_tokens(op):
            mixing.setdefault(running[0], str(op.func))

    tiled = plan if head is None else replace(plan, choices=(*plan.choices, head))
    doing("simulating the step with the loss in tiles" if head else "simulating the step, looking at its MLPs")
    try:
        simulate_step(step, prepare=prepare, watch=see)
    except errors.RecomputeError as error:
        if head is None:
            raise
        return str(error).partition("\n")[0], _seen(step, plan, None, mlps)[1]
    if head is None:
        return "", mixing
    on_head = wrappers_on(handles[0].model.get_submodule(head.paths[0]))
    read = {one.asked for one in on_head if isinstance(one, HeadWithLoss)} - {""}
    if read == {None}:
        return "its result is read by nothing, or it is called inside another region", mixing
    return f"{' and '.join(map(str, read))} reads the logits of all tokens" if read else "", mixing


def tiled(step: TrainingStep, plan: Plan, simulation: Simulation) -> tuple[Plan, tuple[str, ...]]:
    """Returns a plan with its head and loss in tiles, and the MLPs that it recomputes; and what is said of it.

    Args:
        step: The step.
        plan: A plan without tiles.
        simulation: The step with it.
    """
    kept = [
        joined(path, keep.module) for choice in plan for path in choice.modules for keep in choice.kept if keep.module
    ]
    regions = [path for choice in plan if not choice.offload for path in choice.modules]
    within = [mlp for mlp in mlps_of(step) if any(inside(mlp, path) for path in regions)]
    mlps = [mlp for mlp in within if not any(inside(path, mlp) for path in (*kept, *regions))]
    found = in_tiles(step, plan, [simulation], mlps)
    choices = [*([found.head] if found.head else []), *(Choice((path,), tiles=found.tiles) for path in found.mlps)]
    words = [found.words, *found.refused]
    if found.mlps:
        words.append(mlps_in_words(step, found.mlps, found.tiles, simulation))
    return replace(plan, choices=(*plan.choices, *choices)), tuple(words)


# --- MLPs ---


def mlps_of(step: TrainingStep) -> list[str]:
    """Returns the paths of the MLPs of a model's layers that are modules."""
    return [unit.path for unit in find_units(step.model).by_role("mlp") if not unit.parts]


_TOKENWISE = {"aten::mm", "aten::addmm", "aten::linear", "aten::_softmax", "aten::native_dropout", "aten::clone"}


def acts_on_tokens(op: Op) -> bool:
    """Returns whether an operation on [batch, tokens, width] is known to act on each token alone."""
    name = op.func.name().partition(".")[0]
    if name == "aten::_softmax" and op.args[1] not in (-1, len(op.args[0].shape) - 1):
        return False
    if torch.Tag.pointwise in getattr(op.func, "tags", ()) or name in _TOKENWISE:
        return True
    given = (*op.read, *op.results)  # a fused kernel has a row for each token in all that it reads and makes
    return op.func is KERNEL and len({meta.shape[:-1] for meta in given}) == 1


def mlps_in_words(step: TrainingStep, paths: Sequence[str], count: int, simulation: Simulation) -> str:
    """Describes MLPs in tiles: how many there are, and by how much results differ."""
    module = step.model.get_submodule(paths[0])
    dtype = _computed_in(simulation, module)
    drops = any(isinstance(part, nn.Dropout) and part.p and part.training for part in module.modules())
    drawn = "; dropout in them draws other numbers" if drops else ""
    return f"{counted(len(paths), 'MLP')} in {count} tiles; {_noise_of_an_mlp(dtype, count)}{drawn}"


# --- by how much results differ ---

_TOKENS, _WIDTH, _WIDE = 256, 64, 512


def _computed_in(simulation: Simulation, module: nn.Module) -> torch.dtype:
    """The dtype in which a step computes products of a module."""
    cast: torch.dtype | None = getattr(torch, simulation.loop.autocast or "-", None)
    return cast or next((p.dtype for p in module.parameters() if p.dtype.is_floating_point), torch.float32)


@functools.cache
def _noise_of_a_head(dtype: torch.dtype, count: int) -> str:
    labels = torch.arange(_TOKENS) * 7 % _WIDE
    net = nn.Sequential(nn.Linear(_WIDTH, _WIDE, bias=False))
    choice = Choice(("0",), tiles=min(count, _TOKENS), with_loss=True)
    return _noise(net, choice, lambda out: F.cross_entropy(out.float().flatten(0, 1), labels), dtype)


@functools.cache
def _noise_of_an_mlp(dtype: torch.dtype, count: int) -> str:
    net = nn.Sequential(nn.Sequential(nn.Linear(_WIDTH, _WIDE), nn.SiLU(), nn.Linear(_WIDE, _WIDTH)))
    return _noise(net, Choice(("0",), tiles=min(count, _TOKENS)), lambda out: out.float().square().mean(), dtype)


def _noise(net: nn.Module, choice: Choice, loss: Callable[[Any], torch.Tensor], dtype: torch.dtype) -> str:
    """Runs a small part with and without tiles; returns in words by how much the results differ."""
    dtype = dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.float32
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw) / 8)
    x = torch.randn(1, _TOKENS, _WIDTH, generator=draw)

    def run(plan: Plan, dtype: torch.dtype) -> list[torch.Tensor]:
        handle = apply(net.to(dtype), plan)
        given = x.detach().to(dtype, copy=True).requires_grad_()
        value = loss(net(given))
        value.backward()
        handle.remove()
        found = [value.detach(), given.grad, *(weight.grad for weight in net.parameters())]
        net.zero_grad()
        return [one.double() for one in found if one is not None]

    state = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        tiled, whole = run(Plan((choice,)), dtype), run(Plan(), dtype)
        net.float().load_state_dict(state)
        exact = run(Plan(), torch.float64)
    apart = [_apart(a, b) for a, b in zip(tiled, whole, strict=True)]
    usual = max(_apart(a, b) for a, b in zip(whole[2:], exact[2:], strict=True))
    return (
        f"results differ by the order of sums: in a small run in {str(dtype).removeprefix('torch.')} on the CPU "
        f"({_TOKENS} tokens) the loss by {apart[0]:.1e} of itself, the gradient of the input by {apart[1]:.1e}, that "
        f"of weights by {max(apart[2:]):.1e} (without tiles that is {usual:.1e} from float64)"
    )


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())
