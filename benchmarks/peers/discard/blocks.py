"""The six blocks of the published table, and a stack of them.

Problem. The published benchmark of output-discarding checkpointing (`published.py` names it) measures blocks of the
form `outer(inner(x), x)`: `inner` makes a tensor that is cheap to make again, `outer` ends in the linear layer that
keeps it. To compare with its table, blocks and loss have to be those; to try other placements, the matrix products
inside must be within reach.

Idea. A block says only what it computes. Both halves ask `call` how to make each matrix product; by default plainly.
What a block is like, and so which forms make sense for it, is in its class: `fat` where what is between is
larger than `x`, `gemm_before_pointwise` where `inner` is a matrix product followed by something cheap.

Where there is data, the last weight of each block is scaled so that its output is about as large as its input. With
PyTorch's own initialisation eight of these blocks make nothing but zeros and subnormal numbers: times on a CPU are then
those of subnormal arithmetic, and gradients that are all zero agree whatever was computed.

Invariants. No linear layer has a bias. Weights and input come from the one seed. The loss is `y.square().mean()`, and
`y` is alive during backward, because the caller of a training step usually has it in a variable too; both decide the
peak of the small blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Call = Callable[..., Tensor]
Wrap = Callable[[Call], Call]


def plainly(fn: Call) -> Call:
    """Make the call as it is."""
    return fn


class Block(nn.Module):
    """`outer(inner(x), x)`, of the same shape as `x`."""

    fat: ClassVar[bool] = False
    gemm_before_pointwise: ClassVar[bool] = False
    consumer: nn.Linear

    def inner(self, x: Tensor, call: Wrap = plainly) -> Tensor:
        """What can be made again: the tensor that the published method discards."""
        raise NotImplementedError

    def outer(self, h: Tensor, x: Tensor, call: Wrap = plainly) -> Tensor:
        """What `consumer` makes of `inner`'s result."""
        raise NotImplementedError

    def forward(self, x: Tensor, inner: Wrap = plainly, outer: Wrap = plainly) -> Tensor:
        """The block; `inner` and `outer` are how the matrix products of its two halves are made."""
        return self.outer(self.inner(x, inner), x, outer)


class FP32Cast(Block):
    """A linear layer that computes in fp32, such as a router, on whatever `x` is."""

    def __init__(self, d_model: int, d_ff: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.consumer = nn.Linear(d_model, d_model, bias=False, dtype=torch.float32, device=device)

    def inner(self, x: Tensor, call: Wrap = plainly) -> Tensor:
        """The cast; for fp32 the very same tensor."""
        return x.float()

    def outer(self, h: Tensor, x: Tensor, call: Wrap = plainly) -> Tensor:
        """The layer, and back to the dtype of `x`."""
        return call(self.consumer)(h).to(x.dtype)


class UpProj(Block):
    """Up and down, with nothing between."""

    fat = True

    def __init__(self, d_model: int, d_ff: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False, dtype=dtype, device=device)
        self.consumer = nn.Linear(d_ff, d_model, bias=False, dtype=dtype, device=device)

    def inner(self, x: Tensor, call: Wrap = plainly) -> Tensor:
        """Up."""
        return call(self.up)(x)

    def outer(self, h: Tensor, x: Tensor, call: Wrap = plainly) -> Tensor:
        """Down."""
        return call(self.consumer)(h)


class SiluUp(UpProj):
    """A plain MLP."""

    gemm_before_pointwise = True

    def inner(self, x: Tensor, call: Wrap = plainly) -> Tensor:
        """Up, and the activation."""
        return F.silu(call(self.up)(x))


class SwiGLU(Block):
    """A gated MLP."""

    fat = True
    gemm_before_pointwise = True

    def __init__(self, d_model: int, d_ff: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.w1 = nn.Linear(d_model, d_ff, bias=False, dtype=dtype, device=device)
        self.w3 = nn.Linear(d_model, d_ff, bias=False, dtype=dtype, device=device)
        self.consumer = nn.Linear(d_ff, d_model, bias=False, dtype=dtype, device=device)

    def inner(self, x: Tensor, call: Wrap = plainly) -> Tensor:
        """Two ways up, one of them the gate."""
        return F.silu(call(self.w1)(x)) * call(self.w3)(x)

    def outer(self, h: Tensor, x: Tensor, call: Wrap = plainly) -> Tensor:
        """Down."""
        return call(self.consumer)(h)


class RMSNorm(Block):
    """A norm and its consumer, with a residual connection; a norm of several operations has many intermediates."""

    fat = True

    def __init__(self, d_model: int, d_ff: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, dtype=dtype, device=device)
        self.consumer = nn.Linear(d_model, d_model, bias=False, dtype=dtype, device=device)

    def inner(self, x: Tensor, call: Wrap = plainly) -> Tensor:
        """The norm."""
        return self.norm(x)

    def outer(self, h: Tensor, x: Tensor, call: Wrap = plainly) -> Tensor:
        """The layer and the residual."""
        return call(self.consumer)(h) + x


class FP32Softmax(Block):
    """A softmax in fp32, whose backward needs its result and not its input."""

    def __init__(self, d_model: int, d_ff: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.consumer = nn.Linear(d_model, d_model, bias=False, dtype=dtype, device=device)

    def inner(self, x: Tensor, call: Wrap = plainly) -> Tensor:
        """The softmax."""
        return x.float().softmax(-1)

    def outer(self, h: Tensor, x: Tensor, call: Wrap = plainly) -> Tensor:
        """The layer, in the dtype of `x`."""
        return call(self.consumer)(h.to(x.dtype))


BLOCKS: dict[str, Callable[[int, int, torch.dtype, torch.device], Block]] = {
    "fp32_cast": FP32Cast,
    "up_proj": UpProj,
    "silu_up": SiluUp,
    "swiglu": SwiGLU,
    "rms_norm": RMSNorm,
    "fp32_softmax": FP32Softmax,
}
"""In the order of the published table."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Run = Callable[[Block, Tensor], Tensor]


class Stack(nn.Module):
    """Identical blocks, one after the other, and the input that they are given."""

    def __init__(
        self,
        name: str,
        n_layers: int,
        size: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make the weights, then the input, from seed 0.

        Args:
            name: One of `BLOCKS`.
            n_layers: How many.
            size: d_model, d_ff, batch and sequence length.
            dtype: Of weights and input.
            device: `meta` for a stack that has shapes and no data.
        """
        super().__init__()
        d_model, d_ff, batch, seq = size
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(BLOCKS[name](d_model, d_ff, dtype, device) for _ in range(n_layers))
            self.x = torch.randn(batch, seq, d_model, dtype=dtype, device=device).requires_grad_()
        if device.type != "meta":
            self.keep_in_range()

    @torch.no_grad()
    def keep_in_range(self) -> None:
        """Scale the last weight of each block so that its output is about as large as its input."""
        y = self.x
        for block in self.blocks:
            assert isinstance(block, Block)
            block.consumer.weight.div_(block(y).float().square().mean().sqrt())
            y = block(y)

    @property
    def first(self) -> Block:
        """One of the blocks."""
        block = self.blocks[0]
        assert isinstance(block, Block)
        return block

    @property
    def leaves(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that gets a gradient, with its name: the input and all weights."""
        yield "x", self.x
        yield from self.named_parameters()

    def drop_gradients(self) -> None:
        """Set all gradients to None."""
        for _, leaf in self.leaves:
            leaf.grad = None

    def forward(self, run: Run) -> Tensor:
        """The last block's output, each block run as `run` says."""
        y = self.x
        for block in self.blocks:
            assert isinstance(block, Block)
            y = run(block, y)
        return y


def loss_of(y: Tensor) -> Tensor:
    """The loss of the published benchmark."""
    return y.square().mean()


def layers(n_layers: int) -> str:
    """The number of layers in words."""
    return "1 layer" if n_layers == 1 else f"{n_layers} layers"
