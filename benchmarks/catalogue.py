"""Every operation and layer in PyTorch's own catalogue, each in a small model: planned, simulated, measured, compared.

    python benchmarks/catalogue.py --save catalogue
    python benchmarks/catalogue.py --only linalg.cholesky nn.LSTM "nn.BatchNorm1d of a view"

The catalogue is that of PyTorch's tests (`op_db`, `module_db`): of each operation that has a gradient the largest of
its sample inputs, of each module the first. The model is a linear layer that changes nothing (so that a matrix stays
positive definite), the operation, and a linear layer; where there are two dimensions or more, it is once more "of a
view": what the operation gets is then not contiguous. The verdicts:

    exact    the peak without regions and that of the plan are what `measure` finds, to the byte, and the gradients are
             bitwise those of the plain step
    bound    a peak is predicted too high, by at most 5 %, or too low, by at most 0.5 %
    refused  an error of ours says in words why not
    plain    the operation fails by itself here, without this library, or its gradient is not the same twice
    none     no sample has an input of floats that a layer can make
    wrong    anything else
    killed   the process ended

Batches run in processes of their own, so one that ends is named and the rest goes on. PyTorch's lists import
`expecttest`, of which only the base class of a test is used; without it, that of `unittest` stands in.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from _measure import arguments, finish
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from torch_recompute import apply, errors, make_plan, measure, simulate

BATCH = 40
HIGH, LOW = 0.05, -0.005
SECONDS = 120


class Around(nn.Module):
    """A linear layer that changes nothing, an operation, a linear layer; the result is all that has a gradient."""

    def __init__(self, call: Callable[..., Any], like: torch.Tensor, outputs: list[torch.Tensor], view: bool) -> None:
        super().__init__()
        self.view = view
        self.first = nn.Linear(like.shape[-1], like.shape[-1]).to(like.dtype)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(like.shape[-1]))
            self.first.bias.zero_()
        self.call = call
        last = next((i for i, x in enumerate(outputs) if x.dim() and x.numel() and not x.is_complex()), None)
        self.place = last
        self.last = nn.Linear(outputs[last].shape[-1], 4).to(outputs[last].dtype) if last is not None else None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        made = self.first(x)
        made = made.mT.contiguous().mT if self.view else made
        found = floats(self.call(made, *args, **kwargs))
        if self.last is not None and self.place is not None:
            found[self.place] = self.last(found[self.place])
        return found


def floats(result: Any) -> list[torch.Tensor]:
    """The tensors with a gradient in a result."""
    leaves = tree_leaves(result)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]


def loss(found: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the mean squares."""
    parts = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in found]
    return torch.stack([part.float().square().mean() for part in parts]).sum()


Case = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


def catalogue() -> dict[str, Case]:
    """The cases by name."""
    try:
        import expecttest  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    found: dict[str, Case] = {}
    for op in op_db:
        if op.supports_autograd and torch.float32 in op.dtypes:
            found.setdefault(op.name, partial(of_operation, op, False))
            found.setdefault(f"{op.name} of a view", partial(of_operation, op, True))
    for info in module_db:
        found.setdefault(info.name, partial(of_module, info, False))
        found.setdefault(f"{info.name} of a view", partial(of_module, info, True))
    return found


def of_operation(op: Any, view: bool) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """An operation on the largest of its inputs."""
    torch.manual_seed(0)
    samples = [s for s in op.sample_inputs("cpu", torch.float32, requires_grad=True) if fits(s.input, view)]
    if not samples:
        raise LookupError("no input of floats")
    sample = max(samples, key=lambda s: first_of(s.input).numel())
    if isinstance(sample.input, (list, tuple)):  # of tensors, the first comes from the layer before
        rest = [detached(x) for x in sample.input[1:]]
        call, x = lambda x, *a, **k: op.op(type(sample.input)([x, *rest]), *a, **k), sample.input[0]
    else:
        call, x = op.op, sample.input
    return around(call, x, sample.args, sample.kwargs, view)


def of_module(info: Any, view: bool) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A module on the first of its inputs that it takes floats from."""
    torch.manual_seed(0)
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    for one in inputs:
        made, given = one.constructor_input, one.forward_input
        module = info.module_cls(*made.args, **made.kwargs).train()
        if given is None or not given.args:
            continue
        if fits(given.args[0], view):
            return around(module, given.args[0], given.args[1:], given.kwargs, view)
        if not view and isinstance(given.args[0], torch.Tensor) and not given.args[0].is_floating_point():  # of indices
            args = tuple(detached(x) for x in given.args)
            return Whole(module), args, dict(given.kwargs)
    raise LookupError("no input of floats")


class Whole(nn.Module):
    """A module that takes no floats, and a linear layer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.call, self.last = module, nn.LazyLinear(4)

    def forward(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return [self.last(self.call(*args, **kwargs))]


def around(call: Callable[..., Any], x: torch.Tensor, args: Any, kwargs: Any, view: bool) -> Any:
    """The model around a call on `x`, and its arguments, of which `x` is the one that a gradient goes to."""
    args, kwargs = tree_map(detached, (tuple(args), dict(kwargs)))
    torch.manual_seed(1)
    with torch.enable_grad():
        outputs = floats(call(x.detach().clone().requires_grad_() * 1, *args, **kwargs))
    return Around(call, x, outputs, view), (detached(x), *args), kwargs


def detached(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def first_of(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and value else value


def fits(value: Any, view: bool) -> bool:
    """Whether a layer can make the first input: floats, in one dimension or more, for a view in two."""
    x = first_of(value)
    return (
        isinstance(x, torch.Tensor)
        and x.layout is torch.strided
        and x.dtype is torch.float32
        and x.dim() > view
        and x.numel() > 0
    )


def gradients(model: nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor | None]:
    """Those of one step."""
    torch.manual_seed(1)
    loss(model(*args, **kwargs)).backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether gradients are bitwise equal; what is no number equals what is none."""
    return all(
        (a is None) == (b is None) and (a is None or torch.equal(a.nan_to_num(), b.nan_to_num()))
        for a, b in zip(one, other, strict=True)
    )


def peak(model: nn.Module, args: Any, kwargs: Any) -> int:
    """The measured peak of a step."""
    torch.manual_seed(1)
    batch = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    with measure(model).track(*batch) as m:
        loss(model(*args, **kwargs)).backward()
    model.zero_grad()
    return m.peak_bytes


def examined(case: Case) -> dict[str, Any]:
    """The verdict on one case, and its figures."""
    try:
        model, args, kwargs = case()
        wanted = gradients(model, args, kwargs)
        again = gradients(model, args, kwargs)
    except LookupError as error:
        return {"verdict": "none", "why": str(error)}
    except Exception as error:  # whatever an operation raises by itself
        return {"verdict": "plain", "why": f"{type(error).__name__}: {error}"[:200]}
    if not same(wanted, again):
        return {"verdict": "plain", "why": "its gradient is not the same twice"}
    try:
        simulation = simulate(model, args, kwargs, loss=loss, hold_output=False)
        plan = make_plan(model, args, kwargs, loss=loss, budget=0.3, hold_output=False)
        figures: dict[str, Any] = {"assumed": list(simulation.assumed), "regions": len(plan.choices)}
        figures["plain"] = simulation.peak_bytes, peak(model, args, kwargs)
        handle = apply(model, plan)
        equal = same(wanted, gradients(model, args, kwargs))
        figures["planned"] = plan.predicted_peak_bytes or 0, peak(model, args, kwargs)
        handle.remove()
    except errors.RecomputeError as error:
        ours = not isinstance(error, errors.MismatchError)
        return {"verdict": "refused" if ours else "wrong", "why": f"{type(error).__name__}: {error}"[:300]}
    except Exception as error:  # a raw error of torch, which is a fault of ours
        return {"verdict": "wrong", "why": f"{type(error).__name__}: {error}"[:300]}
    off = [predicted / measured - 1 for predicted, measured in (figures["plain"], figures["planned"])]
    figures["off"] = [round(share, 5) for share in off]
    if not equal:
        return {"verdict": "wrong", "why": "other gradients", **figures}
    if not any(off):
        return {"verdict": "exact", **figures}
    return {"verdict": "bound" if max(off) <= HIGH and min(off) >= LOW else "wrong", **figures}


def run_here(names: list[str]) -> None:
    """Prints the name of each case, then its verdict, as a line of JSON."""
    warnings.simplefilter("ignore")
    cases = catalogue()
    for name in names:
        print(json.dumps({"begins": name}), flush=True)
        print(json.dumps({"name": name, **examined(cases[name])}), flush=True)


def run_apart(names: list[str]) -> Iterator[dict[str, Any]]:
    """The verdicts of cases that run in another process; a case that ends it is one, too."""
    left = list(names)
    while left:
        command = [sys.executable, __file__, "--here", *left]
        begun, done = "", 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                said = json.loads(line) if line.startswith("{") else {}
                begun = said.get("begins", begun)
                if "verdict" in said:
                    done += 1
                    yield said
        if done < len(left) and begun == left[done]:
            yield {"name": begun, "verdict": "killed", "why": f"the process ended with {child.returncode}"}
            done += 1
        elif done < len(left):
            raise RuntimeError(f"the process could not begin: exit status {child.returncode}")
        left = left[done:]


def main() -> None:
    """Prints one line per case that is not exact, and how many there are of each verdict."""
    options = arguments(__doc__ or "", only="these alone", here="these alone, in this process, as lines of JSON")
    if options.here:
        run_here(options.here)
        return
    names = options.only or sorted(catalogue())
    figures: list[dict[str, Any]] = []
    for start in range(0, len(names), BATCH):
        for one in run_apart(names[start : start + BATCH]):
            figures.append(one)
            if one["verdict"] != "exact":
                print(
                    f"{one['name']:45} {one['verdict']:8} {one.get('off', '')} {one.get('why', '')}"[:230], flush=True
                )
    counts = Counter(one["verdict"] for one in figures)
    print(f"of {len(figures)}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    finish(options, figures, not (counts["wrong"] or counts["killed"]))


if __name__ == "__main__":
    main()
