"""Claim: elastic regions keep a limit that plain steps break, for 2 % in steps that fit and 9 % in those that do not.

Three runs, each under an allocator that raises `torch.OutOfMemoryError` beyond a limit (tests/support/limited.py, which
is compiled by g++), the gradients of each step compared with plain's as bits:

    lengths   a transformer of 8 layers with dropout, one sequence of 64 to 1024 tokens a step, log-normal around 256.
              Plain, torch's checkpoint around each layer, a plan for the longest, a plan with 11 sizes, elastic, and
              elastic over the plan with 11 sizes, whose regions are then recomputed only where memory is short.
    routed    layers that work on as many tokens as their input says: 60 steps, of sizes that no one knows beforehand.
    1F1B      12 microbatches through 8 layers, 4 in flight, backward of the oldest first: replays, of 96 forwards. In
              the first step 8 are of the layers' first calls; the goal is for the second.

A limit is a share of the way from the peak with every layer recomputed to plain's, both of the longest step. Plain's
times are taken without the limit; a step does not fit where its peak was above. CPU time, one thread, interleaved,
medians over rounds; each round begins with a new pool, and with a step that is not timed: an elastic region is
recomputed in its first call, whatever memory there is. Slack is 0 with lengths, 2 % in 1F1B, and 5 % (the default)
where sizes are not known.

    python benchmarks/elastic.py --rounds 3
    python benchmarks/elastic.py --rounds 3 --on cuda

On CUDA the lengths alone: width 4096 in bf16, 1024 to 16384 tokens, times by the clock. There the limit is the
allocator's own, which counts what it holds and no tensor uses, so plans and elastic regions have 5 % of slack.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import hashlib
import math
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _measure import Goal, arguments, finish
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_recompute import Elastic, apply, make_plan, recompute
from torch_recompute.commands.small_models import VOCABULARY, Decoder, TransformerBlock, mlp, seeded
from torch_recompute.memory.allocator import AllocatorMeter

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
# Before CUDA begins: without holes that sizes leave, and products whose bits repeat.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from support.limited import Limited, limited

LAYERS, SHORTEST, MEDIAN, LONGEST = 8, 64, 256, 1024
STEPS = {512: 14, 256: 24}
CUDA_STEPS, LONGER = {4096: 14}, 16
"""On CUDA: steps by width, and the lengths, in those above."""
SHARES = 0.5, 0.2
SIZES = [round(SHORTEST * (LONGEST / SHORTEST) ** (i / 10)) for i in range(11)]
FITS, OVER = 0.02, 0.09
"""What elastic may add to plain, in steps that fit and in those that do not, at width 512, and 4096 on CUDA."""
OVER_SIZES = "elastic over 11 sizes"
REPLAYS = {0.9: 11, 0.8: 22, 0.6: 39, 0.4: 58}
"""1F1B: the most replays at each limit."""
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Routed(nn.Module):
    """A layer that works on the tokens whose score is above 0: [tokens, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.score, self.mlp = nn.LayerNorm(width), nn.Linear(width, 1), mlp(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what the chosen tokens become."""
        chosen = (self.score(x) > 0).flatten().nonzero().flatten()
        return x.index_add(0, chosen, self.dropout(self.mlp(self.norm(x[chosen]))))


class Stack(nn.Module):
    """Layers one after the other, then the mean of the squares."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def wrapped(model: nn.Module, wrap: Wrap) -> Any:
    """A copy of a model that has the same weights, the forward of each of its layers wrapped."""
    copied: Any = copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})
    for layer in copied.layers:
        layer.forward = wrap(layer.forward)
    return copied


def elastic(model: nn.Module, memory: Elastic) -> Any:
    """A copy whose layers are elastic regions."""
    return wrapped(model, lambda forward: recompute(forward, elastic=memory))


def replays(memory: Elastic) -> int:
    """Replays of all regions so far."""
    return sum(row.replayed for row in memory.report().rows)


def digest(model: nn.Module) -> str:
    """The bits of all gradients; on CUDA sums of them by 16, each times its place."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.is_cuda:
            bits = gradient.view(torch.int16).flatten().long()
            gradient = bits.mul_(torch.arange(1, bits.numel() + 1, device=bits.device)).sum().cpu()
        if gradient is not None:
            found.update(gradient.numpy().data)
    return found.hexdigest()


class OnCuda(AllocatorMeter):
    """CUDA's allocator, which has a limit of its own."""

    def __init__(self) -> None:
        super().__init__(torch.cuda.current_device())
        self._total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    @property
    def limit(self) -> int | None:
        """The most bytes that it may hold."""
        return round(torch.cuda.get_per_process_memory_fraction() * self._total)

    @limit.setter
    def limit(self, limit: int | None) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit / self._total)
        if limit is not None and torch.cuda.memory_reserved() > limit:
            torch.cuda.empty_cache()


Memory = Limited | OnCuda


def clock(memory: Memory) -> float:
    """Seconds: the CPU's, or those until the device is done."""
    if isinstance(memory, Limited):
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Runner:
    """Runs steps under a limit; each leaves its seconds, its peak and the bits of its gradients."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.seconds, self.peak, self.bits = 0.0, 0, ""

    def step(self, model: nn.Module, batch: torch.Tensor, seed: int, limit: int | None = None) -> bool:
        """Runs forward and backward; returns whether memory sufficed."""
        gc.collect()  # the copies of before
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        self.memory.reset_lap()
        self.memory.limit = limit
        start = clock(self.memory)
        try:
            model(batch).backward()
            self.seconds = clock(self.memory) - start
        except torch.OutOfMemoryError:
            return False
        finally:
            self.memory.limit = None
        self.peak = self.memory.lap()
        self.bits = digest(model)
        return True

    def peak_of(self, model: nn.Module, batch: torch.Tensor) -> int:
        """The peak of a second step."""
        for seed in range(2):
            self.step(model, batch, seed)
        return self.peak

    def limits(self, model: nn.Module, batch: torch.Tensor, shares: tuple[float, ...]) -> dict[float, int]:
        """The limits at shares of the way from every layer recomputed to none."""
        plain, least = self.peak_of(model, batch), self.peak_of(wrapped(model, recompute), batch)
        return {share: round(least + share * (plain - least)) for share in shares}


def text(length: int, seed: int, on: str = "cpu") -> torch.Tensor:
    """One sequence of tokens, and the one after its last."""
    return torch.randint(VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(seed)).to(on)


def lengths(steps: int) -> list[int]:
    """Lengths of the steps: even quantiles of the distribution, shuffled."""
    spread = statistics.NormalDist(math.log(MEDIAN), 0.7)
    found = [round(math.exp(spread.inv_cdf((step + 0.5) / steps))) for step in range(steps)]
    random.Random(0).shuffle(found)
    return [max(SHORTEST, min(LONGEST, length)) for length in found]


def in_turn(ways: list[str], steps: int, by_way: bool) -> Iterator[tuple[int, str]]:
    """Which way runs which step next: the first way first, the others by turns in each step, or each by itself.

    By itself a way finds in its steps what an allocator that caches holds of its own steps before.
    """
    first, *others = ways
    if by_way:
        yield from ((number, way) for way in ways for number in range(steps))
        return
    for number in range(steps):
        turn = number % len(others)
        yield from ((number, way) for way in (first, *others[turn:], *others[:turn]))


def length_rows(memory: Memory, width: int, steps: int, shares: tuple[float, ...], rounds: int) -> Iterator[Any]:
    """Lengths of text: what each way adds to plain."""
    on, times, slack = ("cpu", 1, 0.0) if isinstance(memory, Limited) else ("cuda", LONGER, 0.05)
    run, lengths_of_steps = Runner(memory), [times * length for length in lengths(steps)]
    block = functools.partial(TransformerBlock.gpt, head=64)
    with torch.device(on):
        model = seeded(lambda: Decoder(LAYERS, width, times * LONGEST, block))
    model.to(torch.float32 if on == "cpu" else torch.bfloat16)
    longest = text(times * LONGEST, 0, on)
    for share, limit in run.limits(model, longest, shares).items():
        # Without tensors that a step on a device would not have there, such as generators' states.
        budget = round(limit * (1 - slack)) - 2**20
        plans = {
            "a plan for the longest": make_plan(model, (longest,), budget=budget, hold_output=False),
            "a plan with 11 sizes": make_plan(
                model, (longest,), budget=budget, hold_output=False, sizes=[times * size + 1 for size in SIZES]
            ),
        }
        print(f"  plans for {100 * share:.0f} % made, {time.process_time():.0f} CPU seconds from the start", flush=True)
        taken: dict[str, list[list[float]]] = {}
        failed: dict[str, int] = {}
        over: list[bool] = []
        for _ in range(rounds):
            ways: dict[str, Any] = {
                "plain": wrapped(model, lambda forward: forward),
                "torch's checkpoint": wrapped(
                    model, lambda forward: functools.partial(checkpoint, forward, use_reentrant=False)
                ),
                **{name: wrapped(model, lambda forward: forward) for name in plans},
                "elastic": elastic(model, Elastic(limit, slack=slack, meter=memory)),
                OVER_SIZES: wrapped(model, lambda forward: forward),
            }
            handles = [apply(ways[name], plan) for name, plan in plans.items()]
            floor = plans["a plan with 11 sizes"]
            handles.append(apply(ways[OVER_SIZES], floor, elastic=Elastic(limit, slack=slack, meter=memory)))
            over, bits = [False] * (steps + 1), [""] * (steps + 1)
            for number, name in in_turn([*ways], steps + 1, by_way=on == "cuda"):
                batch = text([times * MEDIAN, *lengths_of_steps][number], number, on)
                fitted = run.step(ways[name], batch, number, None if name == "plain" else limit)
                if name == "plain":
                    assert fitted
                    over[number], bits[number] = run.peak > limit, run.bits
                assert not fitted or run.bits == bits[number], f"{name}, step {number}: other gradients than plain"
                taken.setdefault(name, [[] for _ in over])[number].append(run.seconds if fitted else math.nan)
            for handle in handles:
                handle.remove()
        medians = {name: [*map(statistics.median, each)][1:] for name, each in taken.items()}
        over = over[1:]
        failed = {name: sum(map(math.isnan, medians[name])) for name in medians} | {"plain": sum(over)}
        for name in medians:
            row: dict[str, Any] = {"run": "lengths", "width": width, "share": share, "limit_bytes": limit}
            row |= {"steps": steps, "long_steps": sum(over), "way": name, "out_of_memory": failed[name]}
            for what, which in (("all", (True, False)), ("short", (False,)), ("long", (True,))):
                pairs = [
                    (mine, plain)
                    for mine, plain, long in zip(medians[name], medians["plain"], over, strict=True)
                    if long in which and not math.isnan(mine)
                ]
                row[what] = sum(mine for mine, _ in pairs) / sum(plain for _, plain in pairs) - 1 if pairs else None
            yield row


def routed_rows(memory: Memory, width: int, shares: tuple[float, ...], steps: int) -> Iterator[Any]:
    """Sizes that no one knows beforehand: how many steps fail."""
    run = Runner(memory)
    torch.manual_seed(0)
    model = Stack(*(Routed(width) for _ in range(LAYERS)))
    drawn = torch.Generator().manual_seed(0)
    # A common part of all tokens moves the scores of a step to one side or the other, in each layer by another amount.
    batches = [torch.randn(512, width, generator=drawn) + 2 * torch.randn(width, generator=drawn) for _ in range(steps)]
    wants = []
    for number, batch in enumerate(batches):
        run.step(model, batch, number)
        wants.append((run.peak, run.bits))
    largest = max(range(steps), key=lambda number: wants[number][0])
    for share, limit in run.limits(model, batches[largest], shares).items():
        pool = Elastic(limit, meter=memory)
        layers, failed = elastic(model, pool), 0
        for number, batch in enumerate(batches):
            fitted = run.step(layers, batch, number, limit)
            failed += not fitted
            assert not fitted or run.bits == wants[number][1], f"step {number}: other gradients than plain"
        rows = pool.report().rows
        yield {
            "run": "routed",
            "share": share,
            "limit_bytes": limit,
            "steps": steps,
            "plain_over": sum(peak > limit for peak, _ in wants),
            "out_of_memory": failed,
            "run_again": sum(row.run_again for row in rows),
            "replays": replays(pool),
        }


class OldestFirst(Elastic):
    """Memory that does not see that microbatches overlap."""

    @property
    def overlapping(self) -> bool:
        """Never."""
        return False

    @overlapping.setter
    def overlapping(self, found: bool) -> None:
        pass


def pipeline(run: Runner, model: nn.Module, limit: int | None, batches: list[torch.Tensor], in_flight: int) -> None:
    """One step of a stage in 1F1B."""
    gc.collect()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    run.memory.reset_lap()
    run.memory.limit = limit
    waiting: deque[torch.Tensor] = deque()
    try:
        for batch in batches:
            waiting.append(model(batch))
            if len(waiting) == in_flight:
                waiting.popleft().backward()
        while waiting:
            waiting.popleft().backward()
    finally:
        run.memory.limit = None
    run.peak, run.bits = run.memory.lap(), digest(model)


def pipeline_rows(memory: Memory, width: int, microbatches: int, in_flight: int) -> Iterator[Any]:
    """Overlapping microbatches: how many regions are replayed."""
    run = Runner(memory)
    model = seeded(lambda: Decoder(LAYERS, width, LONGEST, functools.partial(TransformerBlock.gpt, head=64)))
    batches = [text(256, number) for number in range(microbatches)]
    pipeline(run, model, None, batches, in_flight)
    plain, bits = run.peak, run.bits
    pipeline(run, wrapped(model, recompute), None, batches, in_flight)
    least = run.peak
    for share, bar in REPLAYS.items():
        limit, counts = round(least + share * (plain - least)), []
        for kind in (Elastic, OldestFirst):
            pool = kind(limit, slack=0.02, meter=memory)
            layers = elastic(model, pool)
            for _ in range(2):
                before = replays(pool)
                pipeline(run, layers, limit, batches, in_flight)
                assert run.bits == bits, "other gradients than plain"
                counts.append(replays(pool) - before)
        first, second, first_oldest, second_oldest = counts
        yield {
            "run": "1F1B",
            "share": share,
            "limit_bytes": limit,
            "forwards": LAYERS * microbatches,
            "replays": {"first step": first, "second step": second},
            "oldest_first": {"first step": first_oldest, "second step": second_oldest},
            "bar": bar,
        }


def goals(rows: list[dict[str, Any]], widest: int) -> list[Goal]:
    """What was claimed of the rows; shares of time only of the widest model."""
    found: list[Goal] = []
    by = {(row["width"], row["share"], row["way"]): row for row in rows if row["run"] == "lengths"}
    for (width, share, way), row in by.items():
        if way not in ("elastic", OVER_SIZES):
            continue
        name = f"{way}, width {width}, limit at {100 * share:.0f} %"
        failed, longest = row["out_of_memory"], by[width, share, "a plan for the longest"]["all"]
        found.append(Goal(f"{name}: steps out of memory", f"{failed}", "0", not failed))
        bar = f"less than a plan for the longest, {_percent(longest)}"
        found.append(Goal(f"{name}: all steps", _percent(row["all"]), bar, row["all"] < longest))
        for what, words, most in (("short", "that fit", FITS), ("long", "that do not", OVER)):
            if width == widest:
                found.append(Goal(f"{name}: steps {words}", _percent(row[what]), _percent(most), row[what] <= most))
    for row in rows:
        name = f"{row['run']}, limit at {100 * row['share']:.0f} %"
        if row["run"] == "routed":
            failed = row["out_of_memory"]
            found.append(Goal(f"{name}: steps out of memory", f"{failed}", "0", not failed))
        elif row["run"] == "1F1B":
            replayed, bar = row["replays"]["second step"], row["bar"]
            found.append(
                Goal(f"{name}: replays of {row['forwards']} forwards", f"{replayed}", f"{bar}", replayed <= bar)
            )
    return found


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+.1f} %"


def main() -> None:
    """Measures and prints the tables."""
    options = arguments(
        __doc__ or "",
        only="lengths, routed or 1F1B alone",
        widths="with lengths, 512 or 256 alone",
        shares="with lengths, these limits alone",
        on="cpu (default) or cuda",
    )
    on_cuda = options.on == ["cuda"]
    if on_cuda and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no CUDA device here.")
    if on_cuda:  # gradients are compared as bits
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    gc.freeze()  # each step looks for cyclic garbage
    torch.set_num_threads(1)
    rounds, steps = min(options.rounds, 3), CUDA_STEPS if on_cuda else STEPS
    only = options.only or (["lengths"] if on_cuda else ["lengths", "routed", "1F1B"])
    widths = [*map(int, options.widths or steps)]
    shares = tuple(map(float, options.shares or SHARES))
    rows: list[dict[str, Any]] = []
    with contextlib.nullcontext(OnCuda()) if on_cuda else limited() as memory:
        for width in widths if "lengths" in only else ():
            print(f"width {width}: over plain, in all steps, in those that fit, in those that do not; out of memory")
            for row in length_rows(memory, width, steps[width], shares, rounds):
                rows.append(row)
                added = "".join(f"{_percent(row[what]):>10}" for what in ("all", "short", "long"))
                where = f"{100 * row['share']:.0f} %, {row['limit_bytes'] / 1e6:.1f} MB"
                print(f"  {where:16} {row['way']:22} {added} {row['out_of_memory']:>5} of {row['steps']}", flush=True)
        if "routed" in only:
            print("routed: steps out of memory, plain beside; forwards and replays run again, replays")
            for row in routed_rows(memory, 128, (0.6, 0.35, 0.15), 60):
                rows.append(row)
                counts = f"{row['out_of_memory']:>3} {row['plain_over']:>3} {row['run_again']:>3} {row['replays']:>4}"
                print(f"  {100 * row['share']:.0f} % {counts}", flush=True)
        if "1F1B" in only:
            print("1F1B: replays of 96 in the first step and the second; with the oldest evicted first; the goal")
            for row in pipeline_rows(memory, 256, 12, 4):
                rows.append(row)
                counts = " ".join(
                    f"{count:>3}" for order in ("replays", "oldest_first") for count in row[order].values()
                )
                print(f"  {100 * row['share']:.0f} % {counts} {row['bar']:>3}", flush=True)
    gpu = torch.cuda.get_device_name() if on_cuda else ""
    finish(options, rows, goals(rows, max(steps)), gpu, rounds=rounds)


if __name__ == "__main__":
    main()
