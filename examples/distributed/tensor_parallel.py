"""Tensor and sequence parallel training with regions, with kept collectives, and with sharded inputs.

    torchrun --standalone --nproc-per-node 2 examples/distributed/tensor_parallel.py

Trains a small transformer that `parallelize_module` has split over all ranks, on CPU (gloo): each line is the loss of
each step, the bytes that a forward keeps for backward on one rank, and the collectives that replays repeat in a step.
The losses of the lines with one kind of parallelism are the same to the last digit.
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torch_recompute import Choice, Plan, RecomputeConfig, apply, doing_recompute, measure
from torch_recompute.distributed import RngStreams, ShardedOver

WIDTH, HEAD, DEPTH, TOKENS, BATCH, STEPS = 64, 16, 3, 32, 4, 3


class Block(nn.Module):
    """A layer whose attention draws its dropout from the model-parallel stream: each rank has heads of its own."""

    def __init__(self, streams):
        super().__init__()
        self.streams = streams
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        with self.streams.fork("model-parallel"):
            a = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        x = x + self.proj(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Repeated(TorchDispatchMode):
    """Counts the collectives that replays repeat."""

    count = 0

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented
        self.count += doing_recompute() and func.namespace == "_c10d_functional" and "wait" not in func.name()
        self.count -= doing_recompute() and "_wrap" in func.name()
        return func(*args, **(kwargs or {}))


def styles(sequence):
    if not sequence:
        colwise, rowwise = ColwiseParallel(), RowwiseParallel()
        norms = {}
    else:
        colwise = ColwiseParallel(input_layouts=Shard(1))
        rowwise = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        norms = {name: SequenceParallel(use_local_output=False) for name in ("norm1", "norm2")}
    return {**dict.fromkeys(("q", "k", "v", "up"), colwise), **dict.fromkeys(("proj", "down"), rowwise), **norms}


def train(mesh, sequence, plan, store=None):
    streams = RngStreams(1234, tensor=mesh.get_group())  # seeds PyTorch's generators alike on all ranks
    model = nn.Sequential(*[Block(streams) for _ in range(DEPTH)])
    for block in model:
        parallelize_module(block, mesh, styles(sequence))
    apply(model, plan(model), stores=store)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, TOKENS, WIDTH)
        with measure() as memory, Repeated() as repeated:
            y = model(distribute_tensor(x, mesh, [Shard(1)]) if sequence else x)
            loss = y.square().mean()
            loss = loss.full_tensor() if sequence else loss
            kept = memory.live_bytes
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, kept, repeated.count


def regions(*keep):
    return lambda model: Plan(tuple(Choice((str(i),), keep=keep) for i in range(len(model))))


def main():
    warnings.filterwarnings("ignore", "DTensor random operators")  # on CPU, of dropout on DTensors: there is none here
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    sharded = RecomputeConfig(
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        distribute_saved_activations=True,
    )
    runs = [
        ("tensor, plain", False, lambda model: Plan(), None),
        ("tensor, regions", False, regions(), None),
        ("tensor, regions, collectives kept", False, regions("@collective"), None),
        ("tensor, regions, inputs sharded", False, sharded.plan, {"sharded": ShardedOver(mesh.get_group())}),
        ("sequence, plain", True, lambda model: Plan(), None),
        ("sequence, regions", True, regions(), None),
        ("sequence, regions, reductions kept", True, regions("@reduction"), None),
        ("sequence, regions, collectives kept", True, regions("@collective"), None),
    ]
    for name, sequence, plan, store in runs:
        losses, kept, repeated = train(mesh, sequence, plan, store)
        if dist.get_rank() == 0:
            said = " ".join(f"{loss:.6f}" for loss in losses)
            print(f"{name:35} loss {said}   kept {kept / 1024:6.0f} KiB   repeated {repeated:2}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
