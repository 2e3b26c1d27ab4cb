"""A pipeline with and without regions: two ranks, two chunks of layers on each, backward in two halves.

    torchrun --standalone --nproc-per-node 2 examples/distributed/pipeline.py pipeline.svg

The chunks are trained once as they are and once with every layer recomputed; the rank of the last stage prints the loss
of each step and its own peak of memory, and if it is given a path, draws the bytes of the last step there. The losses
are the same to the last digit. Runs on CPU (gloo).
"""

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

from torch_recompute import RecomputeConfig, apply, measure
from torch_recompute.distributed import agree_on

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from picture import Run, svg

WIDTH, LAYERS, CHUNKS, MICROBATCHES, ROWS, STEPS = 64, 8, 2, 4, 512, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Chunk(nn.Module):
    """The layers of one stage."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(out, target):
    return nn.functional.mse_loss(out, target)


def train(config, alone):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = CHUNKS * ranks
    numbers = [rank + ranks * chunk for chunk in range(CHUNKS)]
    chunks, stages = nn.ModuleList(), []
    for number in numbers:
        torch.manual_seed(number)
        chunk = Chunk(LAYERS // count)
        # Each chunk has layers and a plan of its own. Ranks with the same layers agree on it.
        apply(chunk, agree_on(config.plan(chunk), alone))
        chunks.append(chunk)
        stages.append(PipelineStage(chunk, number, count, torch.device("cpu")))
    pipeline = ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.SGD(chunks.parameters(), lr=0.5)
    torch.manual_seed(100)
    x = torch.randn(MICROBATCHES * ROWS, WIDTH)
    target = x.roll(1, 1)
    curve = []
    with measure(chunks, optimizer) as memory:
        for _ in range(STEPS):
            losses, begun = [], len(memory.timeline)
            first, last = 0 in numbers, count - 1 in numbers
            pipeline.step(*([x] if first else []), **({"target": target, "losses": losses} if last else {}))
            optimizer.step()
            optimizer.zero_grad()
            curve.append(sum(loss.item() for loss in losses) / MICROBATCHES)
    return last, Run(curve, memory.peak_bytes, [sample.live_bytes for sample in memory.timeline[begun:]])


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    # The ranks that hold the same layers: without data parallelism, each by itself.
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    every = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    runs = {}
    for name, config in (("plain", RecomputeConfig()), ("regions", every)):
        last, runs[name] = train(config, alone)
    if last:
        for name, run in runs.items():
            losses = " ".join(f"{loss:.4f}" for loss in run.losses)
            print(f"{name:8} loss {losses}   peak {run.peak / 2**20:.1f} MiB per rank")
        if sys.argv[1:]:
            title = f"A pipeline, the rank of the last stage: {MICROBATCHES} microbatches, every layer recomputed"
            curves = {"without recomputation": runs["plain"], "with recomputation": runs["regions"]}
            Path(sys.argv[1]).write_text(svg(title, curves), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
