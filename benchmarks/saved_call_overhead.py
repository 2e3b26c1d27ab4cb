"""Claim: a saved call costs at most 0.25 x what selective activation checkpointing adds.

A transformer block is recomputed except for its attention call, by `no_recompute` around that call, and by torch's
`create_selective_checkpoint_contexts` with the attention operation in its list (a dispatch mode, which sees every
operation of the block). What each adds is its step less the step of the same engine recomputing the whole block, plus
the attention that the latter repeats and the former does not. The tensors are small, so that nearly all is engine.

    python benchmarks/saved_call_overhead.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from _measure import Goal, arguments, finish, medians
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torch_recompute import no_recompute, recompute

LIMIT = 0.25
WIDTH, HEADS, BLOCKS = 32, 2, 6
ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(torch.nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.attend: Attention = attention
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input and output: [batch, sequence, WIDTH]."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def main() -> None:
    """Measures and prints the table."""
    options = arguments("What a saved call adds to a recomputed transformer block.")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = [Block() for _ in range(BLOCKS)]
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    saved = no_recompute(attention)
    contexts = partial(create_selective_checkpoint_contexts, ATTENTION)

    def step(run: Callable[[Block, torch.Tensor], torch.Tensor], attend: Attention) -> Callable[[], None]:
        def once() -> None:
            y = x
            for block in blocks:
                block.attend = attend
                y = run(block, y)
            y.sum().backward()

        return once

    def attend_once() -> None:
        q = torch.ones(2, HEADS, 8, WIDTH // HEADS)
        for _ in range(BLOCKS):
            attention(q, q, q)

    times = medians(
        {
            "attention": attend_once,
            "ours, whole": step(lambda block, y: recompute(block)(y), attention),
            "ours, saved call": step(lambda block, y: recompute(block)(y), saved),
            "torch, whole": step(lambda block, y: checkpoint(block, y, use_reentrant=False), attention),
            "torch, selective": step(
                lambda block, y: checkpoint(block, y, use_reentrant=False, context_fn=contexts), attention
            ),
        },
        options.rounds,
    )
    ours = (times["ours, saved call"] - times["ours, whole"] + times["attention"]) / BLOCKS * 1e6
    torchs = (times["torch, selective"] - times["torch, whole"] + times["attention"]) / BLOCKS * 1e6
    for name, seconds in times.items():
        print(f"{name:>18} {seconds / BLOCKS * 1e6:>10.1f} us per block")
    print(f"added by a saved call {ours:.1f} us, by selective checkpointing {torchs:.1f} us: {ours / torchs:.2f} x")
    figures = [{"name": name, "us_per_block": round(seconds / BLOCKS * 1e6, 1)} for name, seconds in times.items()] + [
        {"name": "added", "ours_us": round(ours, 1), "torch_us": round(torchs, 1), "ratio": round(ours / torchs, 3)}
    ]
    figure = f"{ours:.0f} us, {ours / torchs:.2f} x torch's selective checkpointing"
    finish(options, figures, [Goal("keeping one call", figure, f"{LIMIT} x", ours <= LIMIT * torchs)])


if __name__ == "__main__":
    main()
