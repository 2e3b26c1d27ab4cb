"""Adapters of PEFT over a frozen model, whose linear layers may be of 4 bits: `--lora` and `--base`.

The model is the one that PEFT makes, on the meta device as any. What bitsandbytes makes of a linear layer needs its
package and a GPU; `NF4Linear` is the same in memory and in what it computes: codes of 4 bits in blocks of 64 that share
a scale in 32 bits; the product makes the whole weight from these and frees it, in forward and in backward. Norms, the
embedding and the head are as `prepare_model_for_kbit_training` leaves them, in 32 bits.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F

from .. import errors
from ..errors.text import close_to

BASES = ("bf16", "nf4")
ALL = "all-linear"
BLOCK = 64
LEVELS = (  # quantiles of the normal distribution, as QLoRA has them (Dettmers et al., 2023, appendix E)
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class Lora(NamedTuple):
    """The words of `--lora`: the rank, and the modules that get adapters; none for those that PEFT chooses."""

    rank: int
    modules: tuple[str, ...] = ()

    @staticmethod
    def of(words: str) -> Lora:
        """Reads the words.

        Raises:
            ArgumentError: They say no rank of at least 1, or a module without a name.
        """
        rank, colon, names = words.partition(":")
        modules = tuple(name.strip() for name in names.split(",")) if colon else ()
        if not rank.isdigit() or int(rank) < 1 or not all(modules):
            raise errors.ArgumentError(
                f"--lora is {words!r}; expected the rank of the adapters, an integer from 1, and perhaps the modules "
                f"that get them. Write --lora 16, --lora 16:q_proj,v_proj or --lora 16:{ALL}."
            )
        return Lora(int(rank), modules)


def adapted(model: nn.Module, word: str, lora: Lora, base: str, storage: torch.dtype = torch.uint8) -> nn.Module:
    """Freezes a model of transformers, gives it adapters by PEFT, and makes its linear layers of 4 bits where asked to.

    Args:
        model: The model, on meta; it is changed.
        word: Its name on the command line.
        lora: The rank and the modules.
        base: One of `BASES`.
        storage: The type in which codes of 4 bits are stored.

    Raises:
        ArgumentError: PEFT is not installed, or the model has no such modules.
    """
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as error:
        raise errors.ArgumentError(
            "--lora makes adapters with the package peft, which is not installed. Write: pip install peft"
        ) from error
    _check_modules(model, word, lora)
    if base == "nf4":
        dtypes = {path: part.weight.dtype for path, part in model.named_modules() if type(part) is nn.Linear}
        cast("Any", model).is_loaded_in_4bit = True
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        if len(dtypes) < 2:
            raise errors.ArgumentError(
                f"--base nf4 makes layers of torch.nn.Linear of 4 bits, and those of {word} are of another class. "
                "Leave it out."
            )
        head = cast("Any", model).get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        for path, dtype in dtypes.items():
            linear = model.get_submodule(path)
            if linear is not head:
                model.set_submodule(path, NF4Linear(cast("nn.Linear", linear), dtype, storage))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _with_adapters(peft, model, word, lora)


def _with_adapters(peft: Any, model: nn.Module, word: str, lora: Lora) -> nn.Module:
    causal = "CausalLM" in type(model).__name__
    asked: dict[str, Any] = {"r": lora.rank, "task_type": "CAUSAL_LM" if causal else None}
    modules: Any = ALL if lora.modules == (ALL,) else [*lora.modules] or None
    try:
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=modules, **asked))
    except ValueError as error:
        if modules is not None:
            what = f"--lora names {errors.listed(lora.modules)} of {word}, of a kind that PEFT has no adapters for."
            raise errors.ArgumentError(f"{what} {_write_linear(model)}") from error
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=ALL, **asked))  # no modules of its kind are known


def _check_modules(model: nn.Module, word: str, lora: Lora) -> None:
    """Refuses modules that the model does not have."""
    paths = [path for path, _ in model.named_modules()]
    for name in () if lora.modules == (ALL,) else lora.modules:
        if not any(path == name or path.endswith(f".{name}") for path in paths):
            raise errors.ArgumentError(
                f"--lora names the module {name!r}, and {word} has none of that name."
                f"{close_to(name, _linear(model))} {_write_linear(model)}"
            )


def _linear(model: nn.Module) -> list[str]:
    """The names of a model's linear layers."""
    kinds = ("Linear", "Conv1D", "NF4Linear")  # the second is transformers' for GPT-2
    found = (path.rpartition(".")[2] for path, part in model.named_modules() if type(part).__name__ in kinds)
    return [*dict.fromkeys(found)]


def _write_linear(model: nn.Module) -> str:
    return f"Its linear layers are {errors.listed(_linear(model))}; write some of them, or {ALL}."


class NF4Linear(nn.Linear):
    """A linear layer whose frozen weight is stored in 4 bits.

    Args:
        of: The layer.
        dtype: In which it computes.
        storage: The type in which the codes lie, one or more of them in an element.
    """

    def __init__(self, of: nn.Linear, dtype: torch.dtype, storage: torch.dtype = torch.uint8) -> None:
        super().__init__(of.in_features, of.out_features, of.bias is not None, device="meta")
        self.bias, self.dtype = of.bias, dtype
        codes, scales = quantized(of.weight)
        self.weight = nn.Parameter(codes.view(-1).view(storage).view(-1, 1), requires_grad=False)
        cast("Any", self.weight).packed = of.weight.numel()
        self.register_buffer("scales", scales)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiplies in the type that it computes in; the result has that of its input."""
        shape = [self.out_features, self.in_features]
        made = _NF4Product.apply(input.to(self.dtype), self.weight, self.scales, shape)
        return (made if self.bias is None else made + self.bias).to(input.dtype)


class _NF4Product(torch.autograd.Function):
    """A product with a weight that is made when it is needed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, shape: list[int]) -> Any:
        ctx.save_for_backward(codes, scales)
        ctx.shape = shape
        return F.linear(x, weight_of(codes, scales, shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] @ weight_of(*ctx.saved_tensors, ctx.shape, grads[0].dtype), None, None, None


@torch.library.custom_op("torch_recompute::nf4", mutates_args=())
def weight_of(codes: torch.Tensor, scales: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The weight that codes of 4 bits and their scales mean."""
    levels = torch.tensor(LEVELS, device=codes.device)
    pairs = codes.reshape(-1).view(torch.uint8)
    halves = torch.stack([pairs >> 4, pairs & 15], 1).flatten().long()
    count = shape[0] * shape[1]
    return (levels[halves].view(-1, BLOCK) * scales[:, None]).view(-1)[:count].view(shape).to(dtype)


@weight_of.register_fake
def _(codes: torch.Tensor, scales: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return codes.new_empty(shape, dtype=dtype)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of a weight, two in a byte, and the scale of each block."""
    blocks = F.pad(weight.detach().float().flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    if weight.is_meta:  # whose elements are not compared with all levels
        return blocks.new_empty(blocks.numel() // 2, 1, dtype=torch.uint8), blocks.new_empty(len(blocks))
    scales = blocks.abs().amax(1)
    shares = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).flatten()
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(LEVELS)])
    nearest = torch.bucketize(shares, middles).to(torch.uint8).view(-1, 2)
    return (nearest[:, :1] << 4) | nearest[:, 1:], scales
