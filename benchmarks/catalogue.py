"""Every operation and layer in PyTorch's own catalogue, each in a small model: planned, simulated, measured, compared.

    python benchmarks/catalogue.py --save catalogue
    python benchmarks/catalogue.py --only linalg.cholesky nn.LSTM "nn.BatchNorm1d of a view"
    python benchmarks/catalogue.py --write src/torch_recompute/memory/takes_nothing.txt
    python benchmarks/catalogue.py --on cuda --jobs 14 --write src/torch_recompute/memory/takes_nothing_on_cuda.txt

The catalogue is that of PyTorch's tests (`op_db`, `module_db`): of each operation that has a gradient, in each way to
call it, the largest of its sample inputs, of each module the first. The model is a linear layer that changes nothing
(so that a matrix stays positive definite), the operation, and a linear layer. Each is there once as it is, and, where
it can be, "of a view" (what the operation gets is transposed), "in channels_last" (of four or five dimensions) and "in
bfloat16". What is compared are bytes by the allocator's own events, which share nothing with this library: those that
the forward keeps, and the most during forward and during backward, all beside the simulation's; and the peak under a
plan, beside its promise. The verdicts:

    exact    all of them are the same but for 64 bytes (numbers that become tensors for one operation do not count), and
             the gradients are bitwise those of the plain step
    bound    one is predicted too high, by at most 5 % of the step, or too low, by at most 0.5 %
    said     one is too low, and the plan's first line names the operation of which it is not known what it takes
    refused  an error of ours says in words why not
    plain    the operation fails by itself here, without this library, or its gradient is not the same twice
    none     no sample has an input of floats that a layer can make
    wrong    anything else
    killed   the process ended

`--write` writes the list of operations that take nothing while they run, by which `measure` and `simulate` know what
they need not ask: of all that these cases run, more samples of each, the steps of optimizers, attention by each of its
kernels and training steps of small models besides, each operation is run under the allocator's events, on its own
arguments and on larger ones. With `--on cuda` all is made there and CUDA's allocator counts, and the list says as well
which operations were seen and never took nothing. Printed is what takes something.

Batches run in processes of their own, `--jobs` at a time, so one that ends, or says nothing for long, is named and the
rest goes on. PyTorch's lists import `expecttest`, of which only the base class of a test is used; without it, that of
`unittest` stands in.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import types
import unittest
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from _measure import Goal, arguments, finish
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from torch_recompute import apply, errors, make_plan, simulate
from torch_recompute._torch.storages import cpu_allocations, cpu_bytes_between
from torch_recompute.memory.workspaces import circumstances

BATCH = 40
LONGEST = 100  # seconds in which a process says nothing, before it is ended
HIGH, LOW = 0.05, -0.005
COUNTED = "exact", "plain", "none"
"""Verdicts of which a result has the number alone."""
NOTHING = 64  # bytes: the numbers among an operation's arguments become tensors
GENERATOR_STATE = 5056  # bytes, host memory on any device
KINDS = ("", " of a view", " in channels_last", " in bfloat16")


class Around(nn.Module):
    """A linear layer that changes nothing, an operation, a linear layer; the result is all that has a gradient."""

    def __init__(self, call: Callable[..., Any], like: torch.Tensor, outputs: list[torch.Tensor], kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(like.shape[-1], like.shape[-1]).to(like.dtype)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(like.shape[-1]))
            self.first.bias.zero_()
        self.call = call
        last = next((i for i, x in enumerate(outputs) if x.dim() and x.numel() and not x.is_complex()), None)
        self.place = last
        self.last = nn.Linear(outputs[last].shape[-1], 4).to(outputs[last].dtype) if last is not None else None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        found = floats(self.call(laid(self.first(x), self.kind), *args, **kwargs))
        if self.last is not None and self.place is not None:
            found[self.place] = self.last(found[self.place])
        return found


def laid(x: torch.Tensor, kind: str) -> torch.Tensor:
    """A tensor in the layout of a kind of case."""
    if kind == " of a view":
        return x.mT.contiguous().mT
    if kind == " in channels_last":
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    return x


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
    for kind in KINDS:
        for name, op in named(op_db):
            if op.supports_autograd and torch.float32 in op.dtypes:
                found[name + kind] = partial(of_operation, op, kind)
        for info in module_db:
            found.setdefault(info.name + kind, partial(of_module, info, kind))
    return found


def named(operations: list[Any]) -> Iterator[tuple[str, Any]]:
    """Each operation with its name; of several ways to call one, the further ones with the way."""
    names: set[str] = set()
    for op in operations:
        yield f"{op.name} {op.variant_test_name}" if op.name in names else op.name, op
        names.add(op.name)


def type_of(kind: str) -> torch.dtype:
    return torch.bfloat16 if kind == " in bfloat16" else torch.float32


def of_operation(op: Any, kind: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """An operation on the largest of its inputs."""
    torch.manual_seed(0)
    dtype = type_of(kind)
    samples = op.sample_inputs("cpu", dtype, requires_grad=True) if dtype in op.dtypes else ()
    samples = [s for s in samples if fits(s.input, kind)]
    if not samples:
        raise LookupError("no input of floats")
    sample = max(samples, key=lambda s: first_of(s.input).numel())
    if isinstance(sample.input, (list, tuple)):  # of tensors, the first comes from the layer before
        rest = [detached(x) for x in sample.input[1:]]
        call, x = lambda x, *a, **k: op.op(type(sample.input)([x, *rest]), *a, **k), sample.input[0]
    else:
        call, x = op.op, sample.input
    return around(call, x, sample.args, sample.kwargs, kind)


def of_module(info: Any, kind: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A module on the first of its inputs that it takes floats from."""
    torch.manual_seed(0)
    dtype = type_of(kind)
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)
    for one in inputs:
        made, given = one.constructor_input, one.forward_input
        module = info.module_cls(*made.args, **made.kwargs).train().to(dtype)
        if given is None or not given.args:
            continue
        if fits(given.args[0], kind):
            if kind == " in channels_last" and given.args[0].dim() == 4:
                module = module.to(memory_format=torch.channels_last)
            return around(module, given.args[0], given.args[1:], given.kwargs, kind)
        if not kind and isinstance(given.args[0], torch.Tensor) and not given.args[0].is_floating_point():  # of indices
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


def around(call: Callable[..., Any], x: torch.Tensor, args: Any, kwargs: Any, kind: str) -> Any:
    """The model around a call on `x`, and its arguments, of which `x` is the one that a gradient goes to."""
    args, kwargs = tree_map(detached, (tuple(args), dict(kwargs)))
    torch.manual_seed(1)
    with torch.enable_grad():
        outputs = floats(call(laid(x.detach().clone().requires_grad_() * 1, kind), *args, **kwargs))
    return Around(call, x, outputs, kind), (detached(x), *args), kwargs


def detached(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def first_of(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and value else value


def fits(value: Any, kind: str) -> bool:
    """Whether a layer can make the first input: floats, in as many dimensions as the layout needs."""
    x = first_of(value)
    return (
        isinstance(x, torch.Tensor)
        and x.layout is torch.strided
        and x.dtype is type_of(kind)
        and (x.dim() in (4, 5) if kind == " in channels_last" else x.dim() > (kind == " of a view"))
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


def allocated(model: nn.Module, args: Any, kwargs: Any) -> tuple[int, int, int]:
    """What a step allocates, by the allocator's events: what is left after the forward, and the most in either half."""
    torch.manual_seed(1)
    held: list[torch.Tensor] = []
    forward, backward = (
        list(accumulate((size for size in cpu_allocations(half) if abs(size) != GENERATOR_STATE), initial=0))
        for half in (lambda: held.append(loss(model(*args, **kwargs))), lambda: held[0].backward())
    )
    model.zero_grad()
    return forward[-1], max(forward), forward[-1] + max(backward)


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
        start, *levels = (moment.live_bytes for moment in simulation.timeline)
        phases = [moment.phase for moment in simulation.timeline[1:]]
        forward = [level for level, phase in zip(levels, phases, strict=True) if phase in ("forward", "loss")]
        kept, in_forward, in_backward = allocated(model, args, kwargs)
        figures["kept"] = start + simulation.saved_bytes, start + kept
        figures["forward"] = max(forward), start + in_forward
        figures["backward"] = max(levels[len(forward) :], default=start), start + in_backward
        handle = apply(model, plan)
        equal = same(wanted, gradients(model, args, kwargs))
        _, *both = allocated(model, args, kwargs)
        figures["planned"] = plan.predicted_peak_bytes or 0, start + max(both)
        handle.remove()
    except errors.RecomputeError as error:
        ours = not isinstance(error, errors.MismatchError)
        return {"verdict": "refused" if ours else "wrong", "why": f"{type(error).__name__}: {error}"[:300]}
    except Exception as error:  # a raw error of torch, which is a fault of ours
        return {"verdict": "wrong", "why": f"{type(error).__name__}: {error}"[:300]}
    compared = [figures[name] for name in ("kept", "forward", "backward", "planned")]
    off = [0.0 if abs(a - b) <= NOTHING else a / b - 1 for a, b in compared]
    figures["off"] = [round(share, 5) for share in off]
    if not equal:
        return {"verdict": "wrong", "why": "other gradients", **figures}
    if not any(off):
        return {"verdict": "exact", **figures}
    if max(off) > HIGH or (min(off) < LOW and not simulation.uncounted):
        return {"verdict": "wrong", **figures}
    return {"verdict": "bound" if min(off) >= LOW else "said", **figures}


# --- what takes nothing ---


class Taking(TorchDispatchMode):
    """Runs each operation under the allocator's events, and says the most that it took, in which circumstances.

    The first operations of each kind are run on larger arguments and in other layouts too: kernels have other ways for
    these.
    """

    TIMES, TRIES = 2, 8

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.enough = 2**15 if device == "cpu" else 2**20  # elements of a large argument
        self.bytes_between = cpu_bytes_between if device == "cpu" else cuda_bytes_between
        self.most: dict[tuple[str, str], int] = {}
        self.unlike: set[tuple[str, str]] = set()
        self.on_large: set[tuple[str, str]] = set()
        self.times: Counter[tuple[str, str, str]] = Counter()
        self.runs: Counter[tuple[str, str]] = Counter()
        self.tries: Counter[tuple[str, str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func.is_view or func.namespace != "aten":
            return func(*args, **kwargs)
        out = self.seen(func, args, kwargs)
        where = str(func.overloadpacket), circumstances((args, kwargs))
        key = *where, words((args, kwargs))
        nothing = self.most.get(where, NOTHING + 1) <= NOTHING
        if nothing and self.times[key] < self.TIMES and self.tries[key] < self.TRIES:
            self.tries[key] += 1
            with torch.random.fork_rng([] if self.device == "cpu" else [0]):
                self.times[key] += self.larger(func, (args, kwargs))
                for values in relaid((args, kwargs)) if self.tries[key] == 1 else ():
                    with suppress(Exception):  # some kernels take one layout alone
                        self.seen(func, *values)
                        self.larger(func, values)
        return out

    def larger(self, func: Any, values: Any) -> bool:
        """Runs an operation on larger arguments, if it can be; lists of sizes among them may have to grow as well."""
        for with_sizes in (False, True):
            with suppress(Exception):
                self.seen(func, *enlarged(values, self.enough, with_sizes))
                return True
        return False

    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation, and notes what it took; not of one that copies between devices."""
        key = str(func.overloadpacket), circumstances((args, kwargs))
        out: list[Any] = []
        taken = self.bytes_between(lambda: out.append(func(*args, **kwargs)))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if any(x.device.type != self.device for x in tensors if x.dim()):
            return out[0]
        other = False
        if taken <= NOTHING and self.most.get(key, 0) <= NOTHING and key not in self.unlike:
            self.runs[key] += 1
            other = self.runs[key] <= self.TRIES and unlike(func, args, kwargs, out[0]) > NOTHING
        sizes = [x.numel() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        large = not sizes or max(sizes) >= self.enough
        if taken > self.most.get(key, -1) or other or (large and key not in self.on_large):
            self.most[key] = max(taken, self.most.get(key, 0))
            if large:
                self.on_large.add(key)
            if other:
                self.unlike.add(key)
            said = {"op": key[0], "circumstances": key[1], "taken": taken, "large": large, "unlike": other}
            print(json.dumps({**said, "of": sum(x.numel() * x.itemsize for x in tensors)}), flush=True)
        return out[0]


def cuda_bytes_between(call: Callable[[], object]) -> int:
    """The bytes by which a call's tensors on CUDA rise, while it runs, above what is left of them at its end.

    They are those that were asked for, which the allocator rounds up.
    """
    gc.disable()  # what is collected in the call would count
    try:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats_as_nested_dict()["requested_bytes"]["all"]["current"]
        call()
        found = torch.cuda.memory_stats_as_nested_dict()["requested_bytes"]["all"]
    finally:
        gc.enable()
    return found["peak"] - max(before, found["current"])


def warm_up() -> None:
    """Lets libraries take on CUDA what they keep for good, on the threads of forward and backward."""
    torch.cuda.set_per_process_memory_fraction(0.05)  # others run beside this one
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(1, 1, 64, 64, device="cuda", dtype=dtype, requires_grad=True)
        F.conv2d(F.linear(x @ x, x[0, 0], x[0, 0, 0]), x[..., :3, :3]).sum().backward()


def unlike(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """How many bytes of results are not as fake ones say: memory larger than they need, or all in another layout."""
    written = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
    real = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in written]
    if not real or not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.isdisjoint(func.tags):
        return 0
    with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = func(*tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, args), **kwargs)
        fakes = [x for x in tree_leaves(fake) if isinstance(x, torch.Tensor)]
        if len(fakes) == len(real):
            return max(map(apart, real, fakes))
    return 0


def apart(real: torch.Tensor, fake: torch.Tensor) -> int:
    """How many bytes of a result are not as a fake one says."""
    sizes = real.untyped_storage().nbytes(), fake.untyped_storage().nbytes()
    steps = zip(real.shape, real.stride(), fake.stride(), strict=True)
    return max(sizes) if any(size > 1 and a != b for size, a, b in steps) else abs(sizes[0] - sizes[1])


def enlarged(values: Any, least: int, with_sizes: bool = False) -> Any:
    """Arguments with tensors of ones in the layouts of some others, each dimension as many times larger; or None.

    With sizes, lists of the last sizes of a tensor are those of the larger one, such as the shape that a norm covers.
    """
    tensors = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.dim()]
    most = max((x.numel() for x in tensors), default=0)
    if not most or any(x.layout is not torch.strided for x in tensors):
        return None
    times = 2
    while max(x.numel() * times ** sum(size > 1 for size in x.shape) for x in tensors) < least and times < least:
        times *= 2

    def larger(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.dim():
            return x
        shape = [size if size == 1 else size * times for size in x.shape]
        stride, span = [0] * x.dim(), 1
        for place in sorted(range(x.dim()), key=lambda i: (x.stride(i), x.shape[i])):
            if x.stride(place):
                stride[place] = span = max(span, x.stride(place) if span == 1 else span)
                span *= shape[place]
        made = torch.zeros(span, dtype=x.dtype, device=x.device)
        if x.dtype.is_floating_point or x.dtype is torch.bool:  # numbers that index are 0, masks let half through
            made[:: 2 - x.dtype.is_floating_point] = 1
        return made.as_strided(shape, stride)

    def size(x: Any) -> Any:
        shapes = [t.shape for t in tensors]
        if isinstance(x, list) and x and any(list(shape[-len(x) :]) == x for shape in shapes):
            return [number if number == 1 else number * times for number in x]
        return x

    if with_sizes:
        values = ([size(x) for x in values[0]], {name: size(x) for name, x in values[1].items()})
    return tree_map(larger, values)


def words(values: Any) -> str:
    """What arguments say in words, such as a way to approximate: kernels have other ways for each."""
    return ", ".join(repr(x) for x in tree_leaves(values) if isinstance(x, (str, bool)) or x is None)


def relaid(values: Any) -> Iterator[Any]:
    """Arguments of which one tensor, or each, has another layout."""
    found, spec = tree_flatten(values)
    places = [i for i, x in enumerate(found) if isinstance(x, torch.Tensor) and x.dim()]
    for which in [*([place] for place in places), *([places] if len(places) > 1 else [])]:
        for change in range(3):
            made = [[*layouts(x.detach())][1:][change : change + 1] if i in which else [x] for i, x in enumerate(found)]
            if all(made):
                yield tree_unflatten([x for (x,) in made], spec)


def samples_of(op: Any, device: str) -> Iterator[tuple[Callable[..., Any], Any, Any, Any]]:
    """Calls of an operation, also in place, on some of its inputs in each type and layout."""
    for dtype in (torch.float32, torch.bfloat16):
        known = dtype in op.supported_dtypes(device)
        found = list(op.sample_inputs(device, dtype, requires_grad=False)) if known else []
        found.sort(key=lambda s: -getattr(first_of(s.input), "numel", int)())
        for sample, call in product(found[:2], (op.op, op.inplace_variant)):
            if call is not None:
                yield from ((call, x, sample.args, sample.kwargs) for x in layouts(sample.input))


def layouts(x: Any) -> Iterator[Any]:
    """A tensor in each layout; what is none as it is."""
    yield x
    if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.dim():
        yield torch.stack([x.detach(), x.detach()], -1)[..., 0]  # with gaps
        yield from (laid(x.detach(), " of a view") for _ in range(x.dim() > 1))
        yield from (laid(x.detach(), " in channels_last") for _ in range(x.dim() in (4, 5)))


def steps(kind: type[torch.optim.Optimizer], device: str) -> None:
    """Steps of an optimizer, over lists and one by one."""
    choices: tuple[dict[str, Any], ...] = {"foreach": True}, {"foreach": False}, {"fused": True}, {}
    for ways, dtype in product(choices, (torch.float32, torch.bfloat16)):
        with suppress(Exception):  # not every optimizer has each of them
            layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device, dtype)
            optimizer: Any = kind(layers.parameters(), **ways)
            for _ in range(2):
                layers(torch.ones(8, 8, device=device, dtype=dtype)).sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)


def attending(backend: SDPBackend, device: str) -> None:
    """Attention of one kind in 16 bits, forward and backward, causal or not."""
    for width, causal in product((64, 128), (False, True)):
        x = torch.ones(2, 512, 4, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        q, k, v = ((x * 1).transpose(1, 2) for _ in range(3))
        with suppress(RuntimeError), sdpa_kernel(backend):  # not every device has each of them
            loss([F.scaled_dot_product_attention(q, k, v, is_causal=causal)]).backward()


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("CausalLM", {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "gpt2": ("CausalLM", {"n_layer": 2, "n_head": 4}),
    "vit": ("ImageClassification", {"num_hidden_layers": 2, "num_attention_heads": 4}),
}


def trained(name: str, device: str) -> None:
    """Training steps of a small model of transformers, in 16 bits and in 32."""
    import transformers

    kind, sizes = MODELS[name]
    sizes = {**sizes, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "use_cache": False}
    for dtype in (torch.bfloat16, torch.float32):
        config = transformers.AutoConfig.for_model(name, **sizes)
        model = getattr(transformers, f"AutoModelFor{kind}").from_config(config).to(device, dtype).train()
        words = torch.zeros(4, 512, dtype=torch.int64, device=device)
        inputs = {"input_ids": words, "labels": words}
        if name == "vit":
            images = torch.ones(8, 3, 224, 224, dtype=dtype, device=device)
            inputs = {"pixel_values": images, "labels": torch.zeros(8, dtype=torch.int64, device=device)}
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(**inputs).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def see(made: Any, mode: Taking) -> None:
    """Prints what the operations take that some source runs."""
    if isinstance(made, partial):
        with mode:
            made(mode.device)
        return
    calls = samples_of if hasattr(made, "sample_inputs") else modules_of
    for call, x, args, kwargs in calls(made, mode.device):
        with suppress(Exception):  # whatever it raises by itself in this layout
            torch.manual_seed(0)
            wanted = tree_map(lambda v: v.detach().clone().requires_grad_() if is_float(v) else v, x)
            with mode:
                found = floats(call(tree_map(lambda v: v * 1 if is_float(v) else v, wanted), *args, **kwargs))
                if found:
                    torch.stack([p.abs().float().sum() for p in found]).sum().backward(retain_graph=True)
                    loss(found).backward()


def modules_of(info: Any, device: str) -> Iterator[tuple[Callable[..., Any], Any, Any, Any]]:
    """Calls of a module on some of its inputs in each type and layout."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=True, training=True)
        for one, _ in zip(inputs, range(2), strict=False):
            made, given = one.constructor_input, one.forward_input
            if given is not None and given.args:
                module = info.module_cls(*made.args, **made.kwargs).train().to(device, dtype)
                yield from ((module, x, given.args[1:], given.kwargs) for x in layouts(given.args[0]))


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided


def sources() -> dict[str, Any]:
    """What is run to see what operations take, by name: operations, modules, and what takes the device alone."""
    catalogue()
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    optimizers = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    kernels = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)
    models = MODELS if importlib.util.find_spec("transformers") else ()
    return {
        **{info.name: info for info in module_db},
        **dict(named(op_db)),
        **{f"optim.{kind.__name__}": partial(steps, kind) for kind in optimizers},
        **{f"attention {kernel.name}": partial(attending, kernel) for kernel in kernels},
        **{f"a step of {name}": partial(trained, name) for name in models},
    }


def write(path: Path, names: list[str], device: str, jobs: int) -> None:
    """Writes the list of operations that take nothing, and in which circumstances; prints what the others take.

    Of those that never had a large argument, only what took not a byte is in it: some bytes may be a share of a few.
    """
    most: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    on_large: set[tuple[str, str]] = set()
    others: set[tuple[str, str]] = set()
    mixed = random.Random(0).sample(names, len(names))  # so that no batch has all that takes long
    done = 0
    for one in run_apart(mixed, "--see", device, jobs):
        if "op" in one:
            known, where = most[one["op"]], one["circumstances"]
            known[where] = max(known.get(where, (0, 0)), (one["taken"], one["of"]))
            if one["unlike"]:
                others.add((one["op"], where))
            if one["large"]:
                on_large.add((one["op"], where))
            continue
        done += 1
        if one["verdict"] != "seen":
            print(f"{one['name']:45} {one['verdict']} {one['why']}", flush=True)
        if not done % 100:
            print(f"{done} of {len(names)}", flush=True)
    there = "the CPU" if device == "cpu" else f"CUDA {'.'.join(map(str, torch.cuda.get_device_capability()))}"
    on = "" if device == "cpu" else f"--on {device} "
    version = ".".join(torch.__version__.split(".")[:2])
    lines = [f"# What takes nothing: at most {NOTHING} bytes while it runs, on {there}. "]
    lines[0] += f"Written, with torch {version}, by"
    lines += [f"# python benchmarks/catalogue.py {on}--write src/torch_recompute/memory/{path.name}"]
    lines += ["# With a star: its results are laid out in another way, or in larger memory, than PyTorch's fake ones."]
    if device != "cpu":
        lines += ["# With nothing after the colon: it was seen, and took something in all circumstances."]
    clear = 0
    for op, known in sorted(most.items()):
        most_of = {where: NOTHING if (op, where) in on_large else 0 for where in known}
        taking = sorted(where for where, (taken, _) in known.items() if taken > most_of[where])
        nothing = sorted(f"{where}{'*' * ((op, where) in others)}" for where in known.keys() - taking)
        clear += bool(nothing)
        if nothing or device != "cpu":
            lines += [f"{op}: {', '.join(nothing)}" if nothing else f"{op}:"]
        for where in taking:
            print(f"{op}: {where} takes {known[where][0]:,} beside {known[where][1]:,} bytes")
    path.write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{len(most)} operations, of which {clear} take nothing in some circumstances")


def run_here(names: list[str], seeing: bool, device: str) -> None:
    """Prints the name of each case, then its verdict, as a line of JSON."""
    warnings.simplefilter("ignore")
    cases: dict[str, Any] = sources() if seeing else catalogue()
    mode = Taking(device)
    if device == "cuda":
        warm_up()
    for name in names:
        print(json.dumps({"begins": name}), flush=True)
        found = seen_here(cases[name], mode) if seeing else examined(cases[name])
        print(json.dumps({"name": name, **found}), flush=True)


def seen_here(made: Any, mode: Taking) -> dict[str, Any]:
    """The verdict on a source; it ends the process where its kernels have left the device of no use."""
    found = {"verdict": "seen"}
    try:
        see(made, mode)
    except Exception as error:  # whatever it raises by itself
        found = {"verdict": "plain", "why": f"{type(error).__name__}: {error}"[:200]}
    if mode.device == "cuda":
        torch.cuda.synchronize()
    return found


def run_apart(names: list[str], how: str = "--here", device: str = "cpu", jobs: int = 1) -> Iterator[dict[str, Any]]:
    """What cases say that run in other processes, and their verdicts; a case that ends its process is one, too."""
    size = min(BATCH, -(-len(names) // jobs))
    batches = [names[start : start + size] for start in range(0, len(names), size)]
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda batch: list(run_batch(batch, how, device)), batches):
            yield from found


def run_batch(left: list[str], how: str, device: str) -> Iterator[dict[str, Any]]:
    """What the cases of a batch say, in one process after another until none is left."""
    while left:
        begun, done = "", 0
        command = [sys.executable, __file__, "--on", device, how, *left]
        with (
            tempfile.TemporaryFile("w+", errors="replace") as errors_of,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors_of, text=True) as child,
        ):
            assert child.stdout is not None
            watch = threading.Timer(LONGEST, child.kill)  # from its first word on
            for line in child.stdout:
                watch.cancel()
                watch = later(child.kill)
                said = json.loads(line) if line.startswith("{") else {}
                begun = said.get("begins", begun)
                done += "verdict" in said
                if "verdict" in said or "op" in said:
                    yield said
            watch.cancel()
            status = child.wait()
            errors_of.seek(0)
            raised = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", errors_of.read(), re.MULTILINE)
        why = ": ".join([str(status), *raised[-1:]])
        if done < len(left) and begun == left[done]:
            yield {"name": begun, "verdict": "killed", "why": f"the process ended with {why}"}
            done += 1
        elif done < len(left):
            raise RuntimeError(f"the process could not begin: exit status {why}")
        left = left[done:]


def later(call: Callable[[], object]) -> threading.Timer:
    """Calls a function after `LONGEST`, unless that is canceled."""
    timer = threading.Timer(LONGEST, call)
    timer.daemon = True
    timer.start()
    return timer


def main() -> None:
    """Prints one line per case that is not exact, and how many there are of each verdict."""
    says = {
        "here": "these alone, in this process, as lines of JSON",
        "see": "what these take, as lines of JSON",
        "on": "the device that --write is for: cpu (default) or cuda",
        "jobs": "how many processes run at a time (default 1)",
    }
    options = arguments(__doc__ or "", only="these alone", write="the list of what takes nothing, to this file", **says)
    device, jobs = (options.on or ["cpu"])[0], int((options.jobs or ["1"])[0])
    if options.here or options.see:
        run_here(options.here or options.see, bool(options.see), device)
        return
    if options.write:
        write(Path(options.write[0]), options.only or sorted(sources()), device, jobs)
        return
    figures: list[dict[str, Any]] = []
    for one in run_apart(options.only or sorted(catalogue()), jobs=jobs):
        figures.append(one)
        if one["verdict"] != "exact":
            print(f"{one['name']:45} {one['verdict']:8} {one.get('off', '')} {one.get('why', '')}"[:230], flush=True)
    counts = Counter(one["verdict"] for one in figures)
    print(f"of {len(figures)}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    wrong = counts["wrong"] + counts["killed"]
    goals = [Goal("operations and layers of PyTorch's lists that are simulated wrong", f"{wrong}", "0", not wrong)]
    others = [one for one in figures if one["verdict"] not in COUNTED]
    finish(options, others, goals, counts=dict(counts.most_common()))


if __name__ == "__main__":
    main()
