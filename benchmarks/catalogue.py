"""Every operation and layer in PyTorch's own catalogue, each in a small model: planned, simulated, measured, compared.

    python benchmarks/catalogue.py --save catalogue
    python benchmarks/catalogue.py --only linalg.cholesky nn.LSTM "nn.BatchNorm1d of a view"
    python benchmarks/catalogue.py --write src/torch_recompute/memory/takes_nothing.txt

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
they need not ask: of all that these cases run, more samples of each and the steps of optimizers besides, each operation
is run under the allocator's events, on its own arguments and on larger ones.

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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from _measure import arguments, finish
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from torch_recompute import apply, errors, make_plan, simulate
from torch_recompute._torch.storages import cpu_allocations, cpu_bytes_between
from torch_recompute.memory.workspaces import circumstances

BATCH = 40
HIGH, LOW = 0.05, -0.005
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

    LARGE, TIMES, TRIES = 2**15, 2, 8

    def __init__(self) -> None:
        super().__init__()
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
        if self.most[where] <= NOTHING and self.times[key] < self.TIMES and self.tries[key] < self.TRIES:
            self.tries[key] += 1
            state = torch.get_rng_state()
            self.times[key] += self.larger(func, (args, kwargs))
            for values in relaid((args, kwargs)) if self.tries[key] == 1 else ():
                with suppress(Exception):  # some kernels take one layout alone
                    self.seen(func, *values)
                    self.larger(func, values)
            torch.set_rng_state(state)
        return out

    def larger(self, func: Any, values: Any) -> bool:
        """Runs an operation on larger arguments, if it can be; lists of sizes among them may have to grow as well."""
        for with_sizes in (False, True):
            with suppress(Exception):
                self.seen(func, *enlarged(values, self.LARGE, with_sizes))
                return True
        return False

    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation, and notes what it took."""
        key = str(func.overloadpacket), circumstances((args, kwargs))
        out: list[Any] = []
        taken = cpu_bytes_between(lambda: out.append(func(*args, **kwargs)))
        other = False
        if taken <= NOTHING and self.most.get(key, 0) <= NOTHING and key not in self.unlike:
            self.runs[key] += 1
            other = self.runs[key] <= self.TRIES and unlike(func, args, kwargs, out[0]) > NOTHING
        sizes = [x.numel() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        large = not sizes or max(sizes) >= self.LARGE
        if taken > self.most.get(key, -1) or other or (large and key not in self.on_large):
            self.most[key] = max(taken, self.most.get(key, 0))
            if large:
                self.on_large.add(key)
            if other:
                self.unlike.add(key)
            said = {"op": key[0], "circumstances": key[1], "taken": taken, "large": large, "unlike": other}
            print(json.dumps(said), flush=True)
        return out[0]


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
        made = torch.zeros(span, dtype=x.dtype)
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


def samples_of(op: Any) -> Iterator[tuple[Callable[..., Any], Any, Any, Any]]:
    """Calls of an operation, also in place, on some of its inputs in each type and layout."""
    for dtype in (torch.float32, torch.bfloat16):
        found = list(op.sample_inputs("cpu", dtype, requires_grad=False)) if dtype in op.dtypes else []
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


def steps(kind: type[torch.optim.Optimizer]) -> None:
    """Steps of an optimizer, over lists and one by one."""
    choices: tuple[dict[str, Any], ...] = {"foreach": True}, {"foreach": False}, {"fused": True}, {}
    for ways in choices:
        with suppress(Exception):  # not every optimizer has each of them
            layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            optimizer: Any = kind(layers.parameters(), **ways)
            for _ in range(2):
                layers(torch.ones(8, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)


def see(made: Any, mode: Taking) -> None:
    """Prints what the operations take that some source runs."""
    if isinstance(made, type):
        with mode:
            steps(made)
        return
    for call, x, args, kwargs in samples_of(made) if hasattr(made, "sample_inputs") else modules_of(made):
        with suppress(Exception):  # whatever it raises by itself in this layout
            torch.manual_seed(0)
            wanted = tree_map(lambda v: v.detach().clone().requires_grad_() if is_float(v) else v, x)
            with mode:
                found = floats(call(tree_map(lambda v: v * 1 if is_float(v) else v, wanted), *args, **kwargs))
                if found:
                    torch.stack([p.abs().float().sum() for p in found]).sum().backward(retain_graph=True)
                    loss(found).backward()


def modules_of(info: Any) -> Iterator[tuple[Callable[..., Any], Any, Any, Any]]:
    """Calls of a module on some of its inputs in each type and layout."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)
        for one, _ in zip(inputs, range(2), strict=False):
            made, given = one.constructor_input, one.forward_input
            if given is not None and given.args:
                module = info.module_cls(*made.args, **made.kwargs).train().to(dtype)
                yield from ((module, x, given.args[1:], given.kwargs) for x in layouts(given.args[0]))


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided


def sources() -> dict[str, Any]:
    """What is run to see what operations take: operations, modules and optimizers, by name."""
    catalogue()
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    optimizers = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    known = {**{info.name: info for info in module_db}, **dict(named(op_db))}
    return {**known, **{f"optim.{kind.__name__}": kind for kind in optimizers}}


def write(path: Path) -> None:
    """Writes the list of operations that take nothing, and in which circumstances.

    Of those that never had a large argument, only what took not a byte is in it: some bytes may be a share of a few.
    """
    most: defaultdict[str, dict[str, int]] = defaultdict(dict)
    on_large: set[tuple[str, str]] = set()
    others: set[tuple[str, str]] = set()
    for one in run_apart(sorted(sources()), "--see"):
        if "op" in one:
            known, where = most[one["op"]], one["circumstances"]
            known[where] = max(known.get(where, 0), one["taken"])
            if one["unlike"]:
                others.add((one["op"], where))
            if one["large"]:
                on_large.add((one["op"], where))
        elif one["verdict"] != "seen":
            print(f"{one['name']:45} {one['verdict']} {one['why']}")
    lines = [f"# What takes nothing: at most {NOTHING} bytes while it runs, on the CPU. Written, with torch 2.13, by"]
    lines += ["# python benchmarks/catalogue.py --write src/torch_recompute/memory/takes_nothing.txt"]
    lines += ["# With a star: its results are laid out in another way, or in larger memory, than PyTorch's fake ones."]
    for op, known in sorted(most.items()):
        most_of = {where: NOTHING if (op, where) in on_large else 0 for where in known}
        nothing = sorted(f"{w}{'*' * ((op, w) in others)}" for w, taken in known.items() if taken <= most_of[w])
        lines += [f"{op}: {', '.join(nothing)}"] if nothing else []
    path.write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{len(most)} operations, of which {len(lines) - 3} take nothing in some circumstances")


def run_here(names: list[str], seeing: bool) -> None:
    """Prints the name of each case, then its verdict, as a line of JSON."""
    warnings.simplefilter("ignore")
    cases: dict[str, Any] = sources() if seeing else catalogue()
    mode = Taking()
    for name in names:
        print(json.dumps({"begins": name}), flush=True)
        found = see(cases[name], mode) if seeing else examined(cases[name])
        print(json.dumps({"name": name, **(found or {"verdict": "seen"})}), flush=True)


def run_apart(names: list[str], how: str = "--here") -> Iterator[dict[str, Any]]:
    """What cases say that run in another process, and their verdicts; a case that ends it is one, too."""
    left = list(names)
    while left:
        batch = left[:BATCH]
        begun, done = "", 0
        command = [sys.executable, __file__, how, *batch]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                said = json.loads(line) if line.startswith("{") else {}
                begun = said.get("begins", begun)
                done += "verdict" in said
                if "verdict" in said or "op" in said:
                    yield said
        if done < len(batch) and begun == batch[done]:
            yield {"name": begun, "verdict": "killed", "why": f"the process ended with {child.returncode}"}
            done += 1
        elif done < len(batch):
            raise RuntimeError(f"the process could not begin: exit status {child.returncode}")
        left = left[done:]


def main() -> None:
    """Prints one line per case that is not exact, and how many there are of each verdict."""
    says = {"here": "these alone, in this process, as lines of JSON", "see": "what these take, as lines of JSON"}
    options = arguments(__doc__ or "", only="these alone", write="the list of what takes nothing, to this file", **says)
    if options.here or options.see:
        run_here(options.here or options.see, bool(options.see))
        return
    if options.write:
        write(Path(options.write[0]))
        return
    figures: list[dict[str, Any]] = []
    for one in run_apart(options.only or sorted(catalogue())):
        figures.append(one)
        if one["verdict"] != "exact":
            print(f"{one['name']:45} {one['verdict']:8} {one.get('off', '')} {one.get('why', '')}"[:230], flush=True)
    counts = Counter(one["verdict"] for one in figures)
    print(f"of {len(figures)}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    finish(options, figures, not (counts["wrong"] or counts["killed"]))


if __name__ == "__main__":
    main()
