"""`--check`: every form computes what the plain stack computes, output and gradients, at a small size.

Problem. A benchmark of memory is worth nothing if a form is fast or small because it is wrong, and methods of this
kind have been wrong without an error.

Idea. One stack, several iterations, each with other weights and another input. The plain stack runs first; then each
form runs on the same weights, and its output and the gradients of the input and of all weights are compared.
Differences are relative to the largest element of the plain tensor.

What is demanded. A form whose sums are in the plain order: equal elements, where the plain stack repeats its own (CPU);
elsewhere no more than the plain stack differs from itself, a little widened because noise is drawn again each time.
A tiled form sums a weight's gradient tile by tile: in float64 it must be equal up to rounding, whatever dtype was asked
for, because a wrong order of sums and a wrong gradient look alike in bf16. What the plain stack computes must be finite
and not all zero, or the comparison proves nothing and has failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import DTYPES, Stack, layers, loss_of
from .config import Config
from .forms import FORMS, Form

ITERS = 3
SIZE = (64, 256, 2, 40)
"""d_model, d_ff, batch, sequence length; the sequence is no multiple of the number of tiles."""
ROUNDING = 1e-10
NOISE = 4.0


@dataclass(frozen=True)
class Comparison:
    """One form on one stack against the plain stack.

    Attributes:
        block: The block's name.
        n_layers: How many of it.
        dtype: What was compared.
        form: The form's name.
        title: The form's title.
        allowed: The largest difference that is allowed, in words.
        tensors: How many tensors were compared.
        difference: The largest difference, relative to the largest element of the plain tensor.
        worst: Where that was.
        passed: Whether it is allowed.
    """

    block: str
    n_layers: int
    dtype: str
    form: str
    title: str
    allowed: str
    tensors: int
    difference: float
    worst: str
    passed: bool


def compare(config: Config, progress: Callable[[str], None] | None = None) -> list[Comparison]:
    """Compare all forms but the first with it, on all the stacks asked for.

    Args:
        config: What is asked for; its size is that of the comparison.
        progress: Called after each of the `ticks(config)` stacks, with a word on it.
    """
    config.check()
    found: list[Comparison] = []
    for dtype in config.dtypes:
        for n_layers in config.n_layers:
            for block in config.blocks:
                found += _compare(config, block, n_layers, dtype)
                if progress is not None:
                    progress(f"{block}, {layers(n_layers)}, {dtype}")
    return found


def ticks(config: Config) -> int:
    """How often `compare` reports progress."""
    return len(config.dtypes) * len(config.n_layers) * len(config.blocks)


def _compare(config: Config, block: str, n_layers: int, dtype: str) -> list[Comparison]:
    exact = Stack(block, n_layers, config.size, DTYPES[dtype], config.on)
    forms = [form for form in FORMS[1:] if form.fits(exact.first)]
    found = _on_stack(exact, block, dtype, [form for form in forms if form.same_bits], config.iters)
    reordered = [form for form in forms if not form.same_bits]
    if reordered:
        wide = Stack(block, n_layers, config.size, torch.float64, config.on)
        found += _on_stack(wide, block, "fp64", reordered, config.iters)
    return found


def _on_stack(stack: Stack, block: str, dtype: str, forms: Sequence[Form], iters: int) -> list[Comparison]:
    generator = torch.Generator(stack.x.device).manual_seed(1)
    worst = {form.name: (0.0, "nothing") for form in forms}
    passed = {form.name: True for form in forms}
    noisy = False
    tensors = 0
    for iteration in range(iters):
        with torch.no_grad():
            stack.x.normal_(generator=generator)
        stack.keep_in_range()
        plain = _outcome(stack, FORMS[0])
        again = _outcome(stack, FORMS[0])
        tensors += len(plain)
        noise = {name: _difference(plain[name], again.get(name)) for name in plain}
        meaningless = [name for name, tensor in plain.items() if not (tensor.isfinite().all() and tensor.any())]
        noisy = noisy or any(noise.values())
        for form in forms:
            seen = _outcome(stack, form)
            for name, tensor in plain.items():
                difference = _difference(tensor, seen.get(name))
                allowed = noise[name] * NOISE if form.same_bits else max(ROUNDING, noise[name] * NOISE)
                passed[form.name] &= difference <= allowed
                if difference > worst[form.name][0]:
                    worst[form.name] = difference, f"{name} in iteration {iteration + 1}"
            for name in meaningless:
                passed[form.name], worst[form.name] = False, (math.inf, f"{name}, zero or not finite without regions,")
        with torch.no_grad():
            for name, leaf in stack.named_parameters():
                leaf.sub_(plain[f"the gradient of {name}"], alpha=0.1)
    same = "noise" if noisy else "0"
    return [
        Comparison(
            block=block,
            n_layers=len(stack.blocks),
            dtype=dtype,
            form=form.name,
            title=form.title,
            allowed=same if form.same_bits else f"{ROUNDING:g}",
            tensors=tensors,
            difference=worst[form.name][0],
            worst=worst[form.name][1],
            passed=passed[form.name],
        )
        for form in forms
    ]


def _outcome(stack: Stack, form: Form) -> dict[str, Tensor]:
    """The output and all gradients of one step."""
    stack.drop_gradients()
    y = stack(form.run)
    loss_of(y).backward()
    gradients = {f"the gradient of {name}": leaf.grad for name, leaf in stack.leaves if leaf.grad is not None}
    stack.drop_gradients()
    return {"the output": y.detach(), **gradients}


def _difference(plain: Tensor, other: Tensor | None) -> float:
    """The largest difference relative to the largest element; infinite for what is missing or not finite."""
    if other is None:
        return math.inf
    if torch.equal(plain, other):
        return 0.0
    difference = (plain.double() - other.double()).abs().max() / plain.double().abs().max()
    return difference.item() if torch.isfinite(difference) else math.inf
