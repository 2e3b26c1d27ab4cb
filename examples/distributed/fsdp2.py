"""Fully sharded training with and without regions.

    torchrun --standalone --nproc-per-node 2 examples/distributed/fsdp2.py fsdp2.svg

A small transformer whose parameters are spread over the ranks is trained once as it is and once with every block
recomputed: first the plan, then `fully_shard`. Prints the loss of each step, which is the same to the last digit, and
the peak of memory; if it is given a path, draws the bytes of the last step there. Runs on CPU (gloo) and, where there
are as many GPUs as ranks, on GPUs (NCCL).
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_recompute import Choice, Plan, apply, measure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from picture import Run, svg

WIDTH, HEADS, DEPTH, TOKENS, BATCH, STEPS = 128, 4, 4, 64, 4, 6


class Model(nn.Module):
    """A causal transformer that guesses the next of 256 bytes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x.flatten(0, 1))


def train(recomputed, device):
    torch.manual_seed(0)  # the same weights everywhere
    model = Model().to(device)
    if recomputed:
        apply(model, Plan(tuple(Choice((f"blocks.{i}",)) for i in range(DEPTH))))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # other data and dropout on each rank
    losses = []
    with measure(model, optimizer) as memory:
        for _ in range(STEPS):
            first = len(memory.timeline)
            start = torch.randint(256, (BATCH, 1), device=device)
            tokens = (start + torch.arange(TOKENS + 1, device=device)) % 256  # bytes that count upwards
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            losses.append(mean.item())
    return Run(losses, memory.peak_bytes, [sample.live_bytes for sample in memory.timeline[first:]])


def main():
    local = int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")
    runs = {name: train(recomputed, device) for name, recomputed in (("plain", False), ("regions", True))}
    if dist.get_rank() == 0:
        for name, run in runs.items():
            losses = " ".join(f"{loss:.4f}" for loss in run.losses)
            print(f"{name:8} loss {losses}   peak {run.peak / 2**20:.1f} MiB per rank")
        if sys.argv[1:]:
            title = "FSDP2, one of two ranks: every block recomputed"
            curves = {"without recomputation": runs["plain"], "with recomputation": runs["regions"]}
            Path(sys.argv[1]).write_text(svg(title, curves), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
