"""Claim: with inputs of regions in host memory a step takes at most 1.05 x what it takes without, and less memory.

A stack of transformer MLPs, each recomputed, with its input on the device and in host memory, in turns; then with
what a saved call keeps in host memory as well, and with inputs in a file, for comparison. Bytes are counted when
forward is done: what the device holds beyond parameters, and what the store holds. On a machine without a CUDA device
nothing runs beside the copies, so times of steps say nothing there, and only bytes are counted. The way to the file and
back, and its checksums, are timed by themselves on any machine; the system may keep what is written in memory of its
own for a while, so these are speeds of a file, not of the disk alone.

    python benchmarks/offload.py --folder /scratch
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
from _measure import Goal, arguments, finish, medians

from torch_recompute import OnDisk, OnHost, measure, no_recompute, recompute
from torch_recompute.stores import bandwidth

LIMIT = 1.05
LAYERS = 12
Place = OnHost | OnDisk | None


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


def speeds(folder: str, size: int = 2**28) -> dict[str, float]:
    """Bytes per second to a file and back by four threads, to host memory, and through a checksum on one thread."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    store = OnDisk(folder, ahead=0)
    taken: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        taken.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def put() -> object:
        handle = store.put(source)
        store._queue(source).settle()  # what a region two calls later waits for
        return handle

    for _ in range(5):
        handle = timed("out", put)
        back = timed("back", lambda handle=handle: store.get(handle))
        assert back.data_ptr() != source.data_ptr(), "it has not left"
        assert torch.equal(back, source)
        del handle, back
        timed("host", source.clone)
        timed("checksum", lambda: zlib.crc32(source.numpy().data))
    return {name: size / statistics.median(times) for name, times in taken.items()}


def main() -> None:
    """Measures and prints the table."""
    options = arguments("Step time and memory with inputs of regions elsewhere.", folder="where OnDisk is")
    folder = options.folder[0] if options.folder else tempfile.gettempdir()
    on_device = torch.cuda.is_available()
    device, width, tokens = ("cuda", 4096, 8192) if on_device else ("cpu", 64, 128)
    warnings.filterwarnings("ignore", "OnHost: torch sees no CUDA device")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_device else torch.float32
    blocks = [Block(width).to(device, dtype) for _ in range(LAYERS)]
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    store, on_disk = OnHost(), OnDisk(folder)

    def forward(inputs: Place, products: Place) -> torch.Tensor:
        y = x
        for block in blocks:
            block.act = block.up.forward if products is None else no_recompute(block.up.forward, store=products)
            y = recompute(block, inputs=inputs)(y)
        return y.square().mean()

    def step(inputs: Place, products: Place) -> Callable[[], None]:
        def once() -> None:
            forward(inputs, products).backward()
            if on_device:
                torch.cuda.synchronize()

        return once

    variants: dict[str, tuple[Place, Place]] = {
        "on the device": (None, None),
        "inputs on the host": (store, None),
        "products too": (store, store),
        "inputs on the disk": (on_disk, None),
    }
    figures: list[dict[str, object]] = []
    held: dict[str, int] = {}
    for name, places in variants.items():
        before = torch.cuda.memory_allocated() if on_device else 0
        with measure() as memory:
            loss = forward(*places)
            host, disk = store.host_bytes, on_disk.disk_bytes
            device_bytes = torch.cuda.memory_allocated() - before if on_device else memory.live_bytes - host
        del loss
        held[name] = device_bytes
        figures.append({"variant": name, "device_bytes": device_bytes, "host_bytes": host, "disk_bytes": disk})
    if on_device:
        times = medians({name: step(*places) for name, places in variants.items()}, min(options.rounds, 30))
        for figure in figures:
            figure["ms"] = times[str(figure["variant"])] * 1e3
        speed = bandwidth()
        print(f"{torch.cuda.get_device_name()}: {speed.to_host / 1e9:.1f} GB/s out, {speed.to_device / 1e9:.1f} back")
    for figure in figures:
        kinds = ("device_bytes", "host_bytes", "disk_bytes")
        device_mib, host_mib, disk_mib = (int(str(figure[key])) / 2**20 for key in kinds)
        took = f"{figure['ms']:9.1f} ms" if "ms" in figure else ""
        places = f"{device_mib:9.2f} MiB on the device, {host_mib:9.2f} on the host, {disk_mib:9.2f} on the disk"
        print(f"{figure['variant']!s:>20}: {places} {took}")
    rates = speeds(folder)
    words = ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in rates.items())
    print(f"GB/s of OnDisk with 4 threads (out, back), of a copy in host memory, of zlib.crc32: {words}")
    shares = [held[name] / held["on the device"] for name in ("inputs on the host", "inputs on the disk")]
    figure = " and ".join(f"{share:.0%}" for share in shares)
    claim = "bytes kept on the device with regions' inputs in host memory, and in a file"
    goals = [Goal(claim, f"{figure} of those without", "less", max(shares) < 1)]
    gpu = torch.cuda.get_device_name() if on_device else ""
    if on_device:
        ratio = times["inputs on the host"] / times["on the device"]
        goals.append(Goal("a step with inputs in host memory", f"{ratio:.3f} x", f"{LIMIT} x", ratio <= LIMIT))
    else:
        print("no CUDA device: bytes are counted, times are not taken (each copy here is waited for)")
    finish(options, figures, goals, gpu, bytes_per_second=rates)


if __name__ == "__main__":
    main()
