"""Claim: with inputs of regions in host memory a step takes at most 1.05 x what it takes without, and less memory.

A stack of transformer MLPs, each recomputed, with its input on the device and in host memory, in turns; then with
what a saved call keeps in host memory as well, for comparison. Bytes are counted when forward is done: what the device
holds beyond parameters, and what the host holds. On a machine without a CUDA device nothing runs beside the copies, so
times say nothing there, and only bytes are counted.

    python benchmarks/offload.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from _measure import arguments, finish, medians

from torch_recompute import OnHost, measure, no_recompute, recompute
from torch_recompute.stores import bandwidth

LIMIT = 1.05
LAYERS = 12


class Block(torch.nn.Module):
    """A pre-norm MLP with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.act: Callable[[torch.Tensor], torch.Tensor] = self.up.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input and output: [tokens, width]."""
        return x + self.down(torch.nn.functional.gelu(self.act(self.norm(x))))


def main() -> None:
    """Measures and prints the table."""
    options = arguments("Step time and memory with inputs of regions in host memory.")
    on_device = torch.cuda.is_available()
    device, width, tokens = ("cuda", 4096, 8192) if on_device else ("cpu", 64, 128)
    warnings.filterwarnings("ignore", "OnHost: torch sees no CUDA device")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_device else torch.float32
    blocks = [Block(width).to(device, dtype) for _ in range(LAYERS)]
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    store = OnHost()

    def forward(inputs: OnHost | None, products: OnHost | None) -> torch.Tensor:
        y = x
        for block in blocks:
            block.act = block.up.forward if products is None else no_recompute(block.up.forward, store=products)
            y = recompute(block, inputs=inputs)(y)
        return y.square().mean()

    def step(inputs: OnHost | None, products: OnHost | None) -> Callable[[], None]:
        def once() -> None:
            forward(inputs, products).backward()
            if on_device:
                torch.cuda.synchronize()

        return once

    variants = {"on the device": (None, None), "inputs on the host": (store, None), "products too": (store, store)}
    figures: list[dict[str, object]] = []
    held: dict[str, int] = {}
    for name, places in variants.items():
        before = torch.cuda.memory_allocated() if on_device else 0
        with measure() as memory:
            loss = forward(*places)
            host = store.host_bytes
            device_bytes = torch.cuda.memory_allocated() - before if on_device else memory.live_bytes - host
        del loss
        held[name] = device_bytes
        figures.append({"variant": name, "device_bytes": device_bytes, "host_bytes": host})
    if on_device:
        times = medians({name: step(*places) for name, places in variants.items()}, min(options.rounds, 30))
        for figure in figures:
            figure["ms"] = times[str(figure["variant"])] * 1e3
        speed = bandwidth()
        print(f"{torch.cuda.get_device_name()}: {speed.to_host / 1e9:.1f} GB/s out, {speed.to_device / 1e9:.1f} back")
    for figure in figures:
        device_mib, host_mib = (int(str(figure[key])) / 2**20 for key in ("device_bytes", "host_bytes"))
        time = f"{figure['ms']:9.1f} ms" if "ms" in figure else ""
        print(f"{figure['variant']!s:>20}: {device_mib:9.2f} MiB on the device, {host_mib:9.2f} on the host {time}")
    passed = held["inputs on the host"] < held["on the device"]
    if on_device:
        ratio = times["inputs on the host"] / times["on the device"]
        print(f"a step with inputs on the host takes {ratio:.3f} x, the goal is {LIMIT}")
        passed = passed and ratio <= LIMIT
    else:
        print("no CUDA device: bytes are counted, times are not taken (each copy here is waited for)")
    finish(options, figures, passed)


if __name__ == "__main__":
    main()
