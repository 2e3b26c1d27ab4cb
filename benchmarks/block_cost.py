"""Claim: around a transformer block a region costs at most 0.70 x what torch.utils.checkpoint costs, beyond the work.

The work of a recomputed block is forward + forward + backward. What a step takes beyond that is the engine's: ours,
under an applied plan, and with the products and the attention kept; torch's two engines, and its selective
checkpointing with the same policy. The block has width 32 and a batch of 2 x 8, so that nearly all is engine. CPU time,
one thread, interleaved, medians.

Then what a region costs where it has more to look after: running statistics, a module that counts its calls, a closure
and a bound method over a model of 60 blocks, of which it runs one. Without a clock, the operations that a region adds
to three convolutions with BatchNorm, whose running statistics are updated once by ours and twice by torch's. Last,
where a GPU would wait for launches: 24 layers of width 256, and the microseconds that each engine adds to a layer.

    python benchmarks/block_cost.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from _measure import Goal, arguments, finish
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torch_recompute import Choice, Plan, apply, recompute

BARS = {"recompute(block)": 0.70, "apply of a plan": 0.71, "plan that keeps": 0.52}
CLAIMS = {
    "recompute(block)": "a region around a transformer block of width 32",
    "apply of a plan": "the same region, of a plan",
    "plan that keeps": "a plan that keeps matmuls and attention",
}
PEERS = {"torch": "`torch.utils.checkpoint`", "torch, selective": "torch's selective checkpointing"}
KEPT = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default} | {
    getattr(torch.ops.aten, name).default
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
}
Way = Callable[[], torch.Tensor]


class Block(nn.Module):
    """A pre-norm transformer block; input and output: [batch, sequence, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Convolutions(nn.Module):
    """Three convolutions, each with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
        self.layers = nn.Sequential(*(part for layer in layers for part in layer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input and output: [batch, 8, height, width]."""
        return self.layers(x)


class Count(TorchDispatchMode):
    """Counts operations."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one."""
        self.operations += 1
        return func(*args, **(kwargs or {}))


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Torch's form of: keep the products and the attention."""
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def planned(block: Block, *keep: str) -> nn.Module:
    """The same block, under a plan with one region."""
    model = nn.Sequential(Block(block.norm1.normalized_shape[0], block.heads))
    model[0].load_state_dict(block.state_dict())
    apply(model, Plan((Choice(("0",), keep=keep),)))
    return model


def cpu_seconds(ways: Mapping[str, Way], rounds: int, steps: int) -> dict[str, float]:
    """Median CPU seconds of a step of each, interleaved."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            way().sum().backward()
            start = time.process_time()
            for _ in range(steps):
                way().sum().backward()
            taken[name].append((time.process_time() - start) / steps)
    return {name: statistics.median(times) for name, times in taken.items()}


def operations(way: Way) -> int:
    """How many operations a step of it runs."""
    way().sum().backward()
    with Count() as count:
        way().sum().backward()
    return count.operations


def block_rows(rounds: int) -> list[dict[str, Any]]:
    """What each engine adds to one small block."""
    block, x = Block(32, 4), torch.randn(2, 8, 32, requires_grad=True)
    region, plain_plan, kept_plan = recompute(block), planned(block), planned(block, "@product", "@attention")
    selective = partial(create_selective_checkpoint_contexts, policy)
    times = cpu_seconds(
        {
            "forward twice": lambda: (block(x), block(x))[1],
            "recompute(block)": lambda: region(x),
            "apply of a plan": lambda: plain_plan(x),
            "plan that keeps": lambda: kept_plan(x),
            "torch": lambda: checkpoint(block, x, use_reentrant=False),
            "torch, reentrant": lambda: checkpoint(block, x, use_reentrant=True),
            "torch, selective": lambda: checkpoint(block, x, use_reentrant=False, context_fn=selective),
        },
        rounds,
        10,
    )
    rows = []
    for name in times:
        beyond = (times[name] - times["forward twice"]) * 1e6
        peer = "torch, selective" if name in ("plan that keeps", "torch, selective") else "torch"
        ratio = beyond / (times[peer] - times["forward twice"]) / 1e6
        rows.append({"what": name, "us": round(times[name] * 1e6, 1), "adds_us": round(beyond, 1), "of": peer})
        rows[-1]["ratio"] = round(ratio, 3)
        print(f"{name:>18} {times[name] * 1e6:>9.0f} us a step, adds {beyond:>7.0f} us, {ratio:>5.2f} x {peer}")
    return rows


class Counts(nn.Module):
    """A block that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.calls = Block(32, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input and output: [batch, sequence, 32]."""
        self.calls += 1
        return self.block(x)


class Deep(nn.Module):
    """Sixty blocks, one of which is run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 4) for _ in range(60))

    def run(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """One block; input and output: [batch, sequence, 32]."""
        return self.blocks[i](x)


WATCHED = {
    "two convolutions with BatchNorm": 1.0,
    "a block that counts its calls": 1.0,
    "a closure over a model of 60 blocks": 1.3,
    "a bound method of a model of 60 blocks": 1.3,
}


def watched_rows(rounds: int) -> list[dict[str, Any]]:
    """What a region costs, of torch's, where there is more to look after."""
    norms = nn.Sequential(*(part for _ in range(2) for part in (nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())))
    image, x = torch.randn(2, 4, 4, 4, requires_grad=True), torch.randn(2, 8, 32, requires_grad=True)
    counts, model = Counts(), Deep()
    functions: dict[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...]]] = {
        "two convolutions with BatchNorm": (norms, (image,)),
        "a block that counts its calls": (counts, (x,)),
        "a closure over a model of 60 blocks": (lambda x: model.run(1, x), (x,)),
        "a bound method of a model of 60 blocks": (model.run, (1, x)),
    }
    rows = []
    for name, (fn, args) in functions.items():
        times = cpu_seconds(
            {
                "twice": lambda fn=fn, args=args: (fn(*args), fn(*args))[1],
                "ours": lambda fn=fn, args=args: recompute(fn)(*args),
                "torch": lambda fn=fn, args=args: checkpoint(fn, *args, use_reentrant=False),
            },
            rounds,
            10,
        )
        adds = {way: (times[way] - times["twice"]) * 1e6 for way in ("ours", "torch")}
        ratio = adds["ours"] / adds["torch"]
        rows.append({"what": name, "adds_us": round(adds["ours"], 1), "of": "torch", "ratio": round(ratio, 3)})
        print(f"{name}: adds {adds['ours']:.0f} us, {ratio:.2f} x torch")
    return rows


def layer_rows(rounds: int) -> list[dict[str, Any]]:
    """What each engine adds per layer of 24 of width 256."""
    layers, x = [Block(256, 4) for _ in range(24)], torch.randn(1, 16, 256, requires_grad=True)
    regions = [recompute(layer) for layer in layers]

    def chain(call: Callable[[int, torch.Tensor], torch.Tensor]) -> Way:
        def run() -> torch.Tensor:
            y = x
            for i in range(24):
                y = call(i, y)
            return y

        return run

    times = cpu_seconds(
        {
            "forward twice": chain(lambda i, y: (layers[i](y), layers[i](y))[1]),
            "recompute(block)": chain(lambda i, y: regions[i](y)),
            "torch": chain(lambda i, y: checkpoint(layers[i], y, use_reentrant=False)),
        },
        max(1, rounds // 10),
        1,
    )
    rows = []
    for name in ("recompute(block)", "torch"):
        adds = (times[name] - times["forward twice"]) / 24 * 1e6
        rows.append({"what": f"24 layers of width 256: {name}", "adds_us": round(adds, 1)})
        print(f"24 layers of width 256: {name:>18} adds {adds:>7.0f} us to a layer")
    return rows


def convolution_row() -> dict[str, Any]:
    """The operations that each engine adds to three convolutions with BatchNorm."""
    block, x = Convolutions(), torch.randn(2, 8, 8, 8, requires_grad=True)
    plain = operations(lambda: block(x))
    ours = operations(lambda: recompute(block)(x)) - plain
    torchs = operations(lambda: checkpoint(block, x, use_reentrant=False)) - plain
    print(f"three convolutions with BatchNorm: {ours} operations beyond plain, torch {torchs}")
    return {"what": "BatchNorm", "operations": ours, "torch": torchs}


def main() -> None:
    """Measures and prints the table."""
    options = arguments("What a region costs around a transformer block, beyond the work itself.")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = block_rows(options.rounds)
    watched = watched_rows(options.rounds)
    counted = convolution_row()
    goals = [
        Goal(
            CLAIMS[what], f"{row['ratio']:.2f} x {PEERS[row['of']]}", f"{BARS[what]:.2f} x", row["ratio"] <= BARS[what]
        )
        for row in rows
        if (what := row["what"]) in BARS
    ]
    for row in watched:
        most = WATCHED[row["what"]]
        goals.append(
            Goal(
                f"a region around {row['what']}",
                f"{row['ratio']:.2f} x {PEERS['torch']}",
                f"{most} x",
                row["ratio"] <= most,
            )
        )
    ours, torchs = counted["operations"], counted["torch"]
    claim = "operations that a region adds to three convolutions with BatchNorm"
    goals.append(Goal(claim, f"{ours} (torch {torchs})", "no more than torch's", ours <= torchs))
    finish(options, [*rows, *watched, counted, *layer_rows(options.rounds)], goals)


if __name__ == "__main__":
    main()
