"""What people use beside our plans, on a Llama of Hugging Face and a GPT in plain torch: peaks, times, gradients.

    OMP_NUM_THREADS=1 python benchmarks/side_by_side.py --rounds 10

Each way is written as its users write it (`peers/frontier/ways.py`): torch's checkpoint around every layer and around
every second one, which are torchtitan's modes `full` and `selective`; torch's selective checkpointing with torchtitan's
list, its mode `op`; Hugging Face's switch; and `torch.compile` (inductor) without a budget and with two. The peak of
each, and a thousandth, is then the budget of a plan that spares FLOPs, which makes it the same plan on any machine. A
step is forward and backward; its peak is the sum of the CPU allocator's events, weights and gradients included. Times
are medians over interleaved rounds, as a ratio to the plain step of the same round.

The verdict is for the ways that run eagerly: each plan's peak is within that budget, its gradients are the plain
step's to the last bit, it replays no more FLOPs, and its steps take no longer, within noise. A compiled step fuses
operations, so its time says little about recomputation; how `Partition` does beside torch's budget is measured by
`compiled.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _measure import Goal, arguments, finish
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from frontier import ways
from frontier.comparing import compare
from frontier.config import Config
from frontier.models import MODELS
from frontier.result import Match, Point, Result
from frontier.ways import Way

LAYERS, WIDTH, TOKENS, BATCH = 8, 256, 512, 4
VOCABULARY = 1024
SHARES = (1.0, 0.5, 0.1)
"""Budgets of `torch.compile`; 1 is its default."""
SLACK = 0.001
COMPILED = "torch.compile"
MIB = 2**20


class Llama(nn.Module):
    """A Llama of transformers with random weights, from tokens to the loss."""

    def __init__(self, layers: int, width: int) -> None:
        import transformers

        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=8 * width // 3 // 32 * 32,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            vocab_size=VOCABULARY,
            use_cache=False,
        )
        self.inner: Any = transformers.LlamaForCausalLM(config)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of predicting each token from those before it."""
        return self.inner(input_ids=text, labels=text).loss

    def stacks(self) -> list[list[nn.Module]]:
        """The layers."""
        return [list(self.inner.model.layers)]


def llama(layers: int, width: int, tokens: int, batch: int) -> tuple[nn.Module, Tensor]:
    """The Llama and a batch for it, the same every time."""
    torch.manual_seed(0)
    return Llama(layers, width), torch.randint(VOCABULARY, (batch, tokens))


def gradient_checkpointing_enable(model: nn.Module) -> None:
    """Hugging Face's own switch."""
    found: Any = model
    found.inner.gradient_checkpointing_enable()


BUILT: dict[str, Callable[..., tuple[nn.Module, Tensor]]] = {
    "Llama of transformers": llama,
    "GPT in plain torch, dropout 0.1": MODELS["gpt"].build,
}


def others(model: nn.Module) -> Iterator[Way]:
    """The ways to run a step of a model, the plain one first."""
    yield Way(ways.PLAIN)
    yield Way("checkpoint", "every layer (torchtitan: full)", ways.checkpointed)
    yield Way("checkpoint", "every 2nd layer (torchtitan: selective)", partial(ways.checkpointed, every=2))
    yield Way("selective checkpointing", "(torchtitan: op)", ways.selective)
    if isinstance(model, Llama):
        yield Way("gradient_checkpointing_enable", prepare=gradient_checkpointing_enable)
    for share in SHARES:
        setting = "" if share == 1 else f"activation_memory_budget={share:g}"
        compiled = partial(ways.compiled_whole, backend="inductor")
        yield Way(COMPILED, setting, compiled, partial(ways.activation_memory_budget, share))


def figures(name: str, result: Result) -> Iterator[dict[str, Any]]:
    """A row for each way, with the plan at its peak."""
    plans = {match.peer.title: match for match in result.matches}
    for point in result.peers:
        row: dict[str, Any] = {"model": name, "way": point.title, **numbers(point), "plan": None, "noise": result.noise}
        plan = plans.get(point.title)
        if plan is not None and plan.ours is not None:
            row["plan"] = {**numbers(plan.ours), "time_to_way": plan.time_ratio}
        yield row


def numbers(point: Point) -> dict[str, Any]:
    """What the table has of a point."""
    names = "peak_bytes", "time_ratio", "replay_percent", "gradient_difference"
    return {name: getattr(point, name) for name in names}


def holds(match: Match, noise: float) -> bool:
    """Whether a plan keeps within a way's peak, replays no more, has the plain gradients, and takes no longer."""
    if match.ours is None or match.time_ratio is None:
        return False
    return match.no_more_flops and not match.ours.gradient_difference and match.time_ratio <= 1 + 2 * noise


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """Prints the table of one model."""

    def cells(row: dict[str, Any]) -> str:
        off = row["gradient_difference"]
        same = f"{off:.0e}" if off else "same"
        return f"{row['peak_bytes'] / MIB:8.1f} {row['replay_percent']:7.1f} {row['time_ratio']:7.2f} {same:>6}"

    head = f"{'MiB':>8} {'again %':>7} {'time x':>7} {'grads':>6}"
    print(f"\n{name:54} {head} |{head}  a plan")
    for row in rows:
        print(f"{row['way']:54} {cells(row)} |{cells(row['plan']) if row['plan'] else ''}")


def tell(what: str) -> None:
    """Says on stderr what was done."""
    print(what, file=sys.stderr)


def main() -> None:
    """Prints a table for each model, then what held."""
    options = arguments(__doc__ or "", models="which of the models, by their first words")
    load = os.getloadavg()[0]
    size = {"layers": LAYERS, "width": WIDTH, "tokens": TOKENS, "batch": BATCH}
    config = Config("gpt", *size.values(), rounds=options.rounds, price="flops")
    rows: list[dict[str, Any]] = []
    held: list[bool] = []
    for name, build in BUILT.items():
        if options.models and not name.startswith(tuple(options.models)):
            continue
        model, batch = build(*size.values())
        result = compare(config, model, batch, [*others(model)], (), tell, SLACK)
        found = [*figures(name, result)]
        show(name, found)
        for failure in result.failures:
            print(f"left out: {failure.title}: {failure.error}")
        print(f"two plain steps differ by {result.noise:.1%}; twice that is allowed")
        eager = [match for match in result.matches if match.peer.family != COMPILED]
        held += [holds(match, result.noise) for match in eager]
        rows += found
    print()
    claim = "plans at the peak of what runs eagerly that replay no more and take no longer, with equal gradients"
    how = {"rounds": options.rounds, "threads": torch.get_num_threads(), "load": load}
    finish(options, rows, [Goal(claim, f"{sum(held)} of {len(held)}", "all", all(held))], **size, **how)


if __name__ == "__main__":
    main()
