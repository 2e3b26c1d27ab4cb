"""A tensor-parallel rank's slice of a model of transformers, and its collectives as operations of a simulated step.

A slice of a layer has fewer heads, a narrower MLP and a part of the vocabulary, and is otherwise the same layer: the
model's own class, built from a smaller configuration. It is compared with the whole model weight by weight (`divided`),
so a class that takes its sizes from elsewhere is refused and not planned wrongly.

What goes into a part of a layer that holds slices enters, what comes out of it is a partial sum. The embedding gives a
partial sum too (each rank knows some words), the head takes all tokens and gives each rank its share of the vocabulary.
The collectives are torch's functional ones, which return without a group what they return with one, in autograd
functions as Megatron has them: at the entry an identity whose backward is an all-reduce, at the exit an all-reduce
whose backward is an identity; with sequence parallelism an all-gather of tokens and a reduce-scatter. A group is called
by its size, `tensor-4`, which is where prices find it (`prices.py`).

Megatron's column-parallel product keeps its share of the tokens and gathers them again in backward. So with sequence
parallelism the gather is deferred: what enters is a tensor of the shape of all tokens over the memory of this rank's
own. A product that takes it (`gathered_linear`) gathers, multiplies, keeps the share, and gathers again in backward; no
other operation may read it. Queries, keys and values, or gate and up, share one gather: the `first` pays for it, the
others allocate the same bytes. A mixture of experts reads its tokens to route them, so it gathers at once.

A module with collectives has its own forward in its instance dictionary; a plan's region goes around that, so a replay
repeats the collectives, as Megatron's does. Rejected: DTensor and `parallelize_module` on a fake process group, whose
layouts know no experts, and which keep what was gathered where Megatron keeps the share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from .. import errors
from .._torch.graphs import gradient_hooks
from .._torch.ranks import functional
from ..plan.calls import declare_product
from ..plan.ranks import Ranks, those_that_fit
from ..plan.units import find_units
from ..simulation.fused import in_8_bits, keeps_8_bits, out_of_8_bits
from ..simulation.step import OF_WHOLE_WEIGHTS

WIDTHS = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_collectives = functional()
_Moves = Callable[[torch.Tensor, int], torch.Tensor]  # from a tensor and the size of the group


def rank_model(
    model: nn.Module, word: str, size: int, sequence: bool, experts: int | None = None
) -> tuple[nn.Module, list[str]]:
    """The model of a rank of a tensor-parallel group, with its collectives, and the paths of its layers.

    Args:
        model: The whole model, of transformers and on meta.
        word: Its name, as the user wrote it.
        size: The number of ranks in the group.
        sequence: Whether norms and residuals hold a share of the tokens.
        experts: The number of ranks that share each expert; None for those of the group.

    Raises:
        ArgumentError: The model is of no kind that can be sliced, or its sizes cannot be divided so.
    """
    if size == 1:
        return model, [unit.path for unit in find_units(model).layers]
    whole: Any = getattr(model, "config", None)
    build: Any = getattr(type(model), "_from_config", None)
    heads = getattr(whole, "num_attention_heads", None)
    if build is None or not heads or not hasattr(whole, "head_dim"):
        raise errors.ArgumentError(
            f"--tp: {word} is {type(model).__name__}, whose configuration does not say how wide a head is, so a rank's "
            "slice of it cannot be built. Use it without --tp, or a model of transformers with head_dim, such as "
            "those of Llama's kind."
        )
    part, etp, taken = _slice(build, model, size, word), experts or size, dict[str, nn.Module]()
    if etp != size:
        wide = _slice(build, model, etp, word)
        taken = {unit.path: wide.get_submodule(unit.path) for unit in find_units(wide).by_role("experts")}
        for path, module in taken.items():
            parent, _, name = path.rpartition(".")
            setattr(part.get_submodule(parent), name, module)
    layers = [unit.path for unit in find_units(part).layers]
    slices = divided(model, part, size, word, without=[*taken])
    add_collectives(part, layers, slices, size, sequence, taken, etp)
    return part, layers


def _slice(build: Callable[[Any], nn.Module], model: nn.Module, size: int, word: str) -> nn.Module:
    """A rank's slice of a model, built from a smaller configuration."""
    whole: Any = model.config
    config = copy.deepcopy(whole)
    config.head_dim = whole.head_dim or whole.hidden_size // whole.num_attention_heads
    for name in WIDTHS:
        if (width := getattr(whole, name, None)) is not None:
            check_divides(word, name, width, size)
            setattr(config, name, width // size)
    config.vocab_size = -(-whole.vocab_size // size)
    with torch.device("meta"):
        part = build(config)
    for module, alike in zip(part.modules(), model.modules(), strict=True):
        module.__class__ = type(alike)  # which may have another forward (`simulation/fused.py`)
    return part


def of_one_rank(model: nn.Module, ranks: Ranks) -> nn.Module:
    """The model that one rank computes, of a whole one of a user's own.

    Raises:
        ArgumentError: The ranks share what a model of this class cannot share, or are not planned so.
    """
    if ranks.pp > 1:
        raise errors.ArgumentError(
            f"make_plan was given Ranks(pp={ranks.pp}); the stages of a pipeline have a plan each.\n"
            f'  Pass the pipeline instead: stages=Stages("1F1B", pipeline={ranks.pp}, microbatches={2 * ranks.pp}).'
        )
    if ranks.state_shards > 1 and not ranks.fully_sharded:
        raise errors.ArgumentError(
            f"make_plan was given Ranks of which {ranks.state_shards} share the optimizer's states alone (ZeRO-1), as "
            "with Megatron's optimizer, which is not the one of the call.\n"
            "  Write Ranks(..., zero=0) for ranks that share nothing, or zero=3 for those of FSDP2. With Megatron's "
            "optimizer it is torch-recompute plan --dp."
        )
    if ranks.tp > 1 and any(map(gradient_hooks, model.parameters())):
        raise errors.ArgumentError(OF_WHOLE_WEIGHTS)
    if ranks.tp == 1:
        return model
    return rank_model(model, type(model).__name__, ranks.tp, ranks.sequence_parallel, ranks.expert_tp)[0]


def check_divides(model: str, name: str, value: int, ranks: int) -> None:
    """Refuses a size that the ranks of a group cannot share."""
    if value % ranks:
        raise errors.ArgumentError(
            f"--tp is {ranks}, and {name} of {model} is {value}, which {ranks} ranks cannot share. Write --tp "
            f"{those_that_fit(range(1, value + 1), value)}."
        )


def divided(whole: nn.Module, part: nn.Module, size: int, word: str, without: Sequence[str] = ()) -> set[str]:
    """The names of the parameters of which a rank holds a slice, given the whole model and that of one rank.

    What is `without` is not looked at: modules that other ranks share.

    Raises:
        ArgumentError: A weight is divided in a way that no layout has, or none is.
    """
    before = {name: parameter.shape for name, parameter in whole.named_parameters()}
    found: set[str] = set()
    wrong = ""
    for name, parameter in part.named_parameters():
        if any(name.startswith(f"{path}.") for path in without):
            continue
        shorter = [(a, b) for a, b in zip(before[name], parameter.shape, strict=True) if a != b]
        if len(shorter) > 1 or any(-(-a // size) != b for a, b in shorter):
            wrong = wrong or name
        elif shorter:
            found.add(name)
    if wrong or not found:
        what = f"{wrong} is no slice of the model's" if wrong else "no weight is a slice of the model's"
        raise errors.ArgumentError(
            f"--tp {size}: {word} is {type(whole).__name__}, and built from a configuration for one rank {what}. Use "
            "it without --tp."
        )
    return found


def add_collectives(
    model: nn.Module,
    layers: list[str],
    slices: set[str],
    size: int,
    sequence: bool,
    experts: Collection[str] = (),
    etp: int = 1,
) -> None:
    """Puts the collectives into a rank's model, which holds a slice of the parameters that `slices` names.

    The modules of `experts`, if there are any, are shared by `etp` ranks of the group.
    """
    leave = _scatter if sequence else _leave
    for path in layers:
        for child, module in model.get_submodule(path).named_children():
            below = f"{path}.{child}"
            if any(expert.startswith(f"{below}.") for expert in experts):
                dense = [name for name, _ in module.named_children() if _held(model, f"{below}.{name}", slices)]
                if etp > 1 and dense:
                    raise errors.ArgumentError(
                        f"--etp is {etp}, and {below} has parts that all {size} ranks of --tp share ({dense[0]}) "
                        f"beside its experts, which would take other tokens. Write --etp 1, or --etp {size}."
                    )
                if etp > 1:
                    _put(module, _part, etp, _gather, _scatter)
                for name in dense:
                    _split(model, f"{below}.{name}", slices, size, sequence)
            elif _held(model, below, slices):
                _split(model, below, slices, size, sequence)
    for name in sorted(slices):
        if not any(name.startswith(path + ".") for path in layers):
            module = model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, nn.Embedding):
                _put(module, _part, size, None, leave)
            elif isinstance(module, nn.Linear):
                _put(module, _head, size, sequence)


def _held(model: nn.Module, path: str, slices: Collection[str]) -> list[nn.Module]:
    """The modules at and below a path that hold slices."""
    return [model.get_submodule(name.rpartition(".")[0]) for name in slices if name.startswith(f"{path}.")]


def _split(model: nn.Module, path: str, slices: Collection[str], size: int, sequence: bool) -> None:
    """Puts the collectives of a part of a layer, of which each rank holds slices."""
    module = model.get_submodule(path)
    deferred = sequence and all(isinstance(owner, nn.Linear) for owner in _held(model, path, slices))
    if deferred:
        linears = [linear for linear in module.modules() if isinstance(linear, nn.Linear)]
        for number, linear in enumerate(linears):
            _put(linear, _column, size, number == 0)
    enter = (_defer if deferred else _gather) if sequence else _enter
    _put(module, _part, size, enter, _scatter if sequence else _leave)


def _put(module: nn.Module, forward: Callable[..., Any], *how: Any) -> None:
    module.__dict__["forward"] = partial(forward, module, *how)


def _part(module: nn.Module, size: int, enter: _Moves | None, leave: _Moves, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention, an MLP, an embedding: its first tensor enters, its result leaves."""
    if enter is not None and args:
        args = (enter(args[0], size), *args[1:])
    elif enter is not None:
        kwargs = {**kwargs, "hidden_states": enter(kwargs["hidden_states"], size)}
    result = type(module).forward(module, *args, **kwargs)
    if isinstance(result, tuple):
        return (leave(result[0], size), *result[1:])
    return leave(result, size)


def _column(module: Any, size: int, first: bool, /, x: torch.Tensor) -> torch.Tensor:
    """The forward of a product that may be given a deferred gather; the `first` pays for it."""
    if x.dim() == 3 and x.shape[1] > 1 and x.stride(1) == 0:
        kept = _deferred(in_8_bits(x, partial(_own, size=size)), size) if keeps_8_bits(module) else x
        return gathered_linear(x, kept, module.weight, module.bias, size, first)
    return type(module).forward(module, x)


def _head(module: Any, size: int, sequence: bool, /, x: torch.Tensor) -> torch.Tensor:
    """The forward of the product that makes the logits, of which each rank has its share of the vocabulary."""
    if sequence:
        deferred = _defer(x, size)
        return gathered_linear(deferred, deferred, module.weight, module.bias, size, True)
    return F.linear(_enter(x, size), module.weight, module.bias)


def _gathered(shard: torch.Tensor, size: int) -> torch.Tensor:
    batch, tokens, width = shard.shape
    return _collectives.all_gather_into_tensor(shard, size, f"tensor-{size}").view(batch, tokens * size, width)


def _scattered(full: torch.Tensor, size: int) -> torch.Tensor:
    batch, tokens, width = full.shape
    flat = full.reshape(batch * tokens, width)
    return _collectives.reduce_scatter_tensor(flat, "sum", size, f"tensor-{size}").view(batch, tokens // size, width)


def _deferred(shard: torch.Tensor, size: int) -> torch.Tensor:
    """This rank's share of the tokens, in the shape of all of them; a product gathers them."""
    batch, tokens, width = shard.shape
    return shard[:, :1].expand(batch, tokens * size, width)


class _Collective(torch.autograd.Function):
    """A collective in forward, another one in backward; both are given a tensor and the size of the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, there: _Moves, back: _Moves) -> torch.Tensor:
        ctx.size, ctx.back = size, back
        return there(x, size)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.back(grads[0], ctx.size), None, None, None


def _through(there: _Moves, back: _Moves) -> _Moves:
    return lambda x, size: cast("torch.Tensor", _Collective.apply(x, size, there, back))


# All tokens go into a module that every rank has a slice of: its gradients are summed over the ranks.
_enter = _through(
    lambda x, size: x.view_as(x),
    lambda grad, size: _collectives.all_reduce_(grad.contiguous(), "sum", f"tensor-{size}"),
)
# The partial sums of the ranks come out of a module and are added up.
_leave = _through(lambda x, size: _collectives.all_reduce(x, "sum", f"tensor-{size}"), lambda grad, size: grad)
# The ranks' shares of the tokens become all tokens, and are kept so, or are gathered by the products that take them.
_gather, _defer = _through(_gathered, _scattered), _through(_deferred, _scattered)
# The partial sums of the ranks are added up, and each rank gets its share of the tokens.
_scatter = _through(_scattered, lambda grad, size: _gathered(grad.contiguous(), size))


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, kept: Any, weight: torch.Tensor, bias: torch.Tensor | None, size: int, first: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(kept, weight)
        ctx.size, ctx.first, ctx.bias = size, first, bias is not None
        return F.linear(_all_tokens(x, size, first), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, weight = ctx.saved_tensors
        grad = grads[0]
        full = out_of_8_bits(_all_tokens(kept, ctx.size, ctx.first), grad.dtype).flatten(0, 1)
        flat = grad.flatten(0, 1)
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        of_weight = flat.t() @ full if ctx.needs_input_grad[2] else None
        return of_x, None, of_weight, flat.sum(0) if ctx.bias else None, None, None


def _all_tokens(x: torch.Tensor, size: int, first: bool) -> torch.Tensor:
    """The tokens of all ranks."""
    batch, tokens, width = x.shape
    if not first:
        return x.new_empty(batch, tokens, width)
    return _gathered(_own(x, size), size)


def _own(x: torch.Tensor, size: int) -> torch.Tensor:
    """This rank's share of the tokens."""
    batch, tokens, width = x.shape
    own = tokens // size
    return x.as_strided((batch, own, width), (own * width, width, 1))


def gathered_linear(
    x: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, size: int, first: bool
) -> torch.Tensor:
    """A product of a deferred gather (batch, tokens, width) with a slice of a weight (outputs, width).

    A plan may keep its result as that of any product. The `first` of several products pays for the gather. Backward
    gathers what is `kept`, which is `x`, or a copy of it in 8 bits.
    """
    if has_torch_function((x, weight)):
        return handle_torch_function(gathered_linear, (x, weight), x, kept, weight, bias, size, first)
    return _GatheredLinear.apply(x, kept, weight, bias, size, first)  # pyright: ignore[reportReturnType]


declare_product(gathered_linear)
