"""Random programs of regions and saved calls, and their comparison with plain PyTorch.

A program is plain data: lines of Python, the tensors it starts from, and a recipe for
its backward. It is Python source rather than a tree of operations of our own, so that functions are real functions
with real closures, and so that a failing program is printed as a script that somebody can run.

`programs()` is the Hypothesis strategy. Every value has a static `Kind`, so nearly every program is valid; the few
that PyTorch refuses (an in-place change of something autograd saved) are wanted too. `execute` runs a program once
under a `Mode`, which says what `recompute`, `no_recompute` and the rest mean: `Plain` is PyTorch without us, and
writes down which tensors a replay may need (inputs and closures of regions, outputs of their saved calls, carried
values), so that `compare` can tell a `ChangedError` that is promised from one that is not. Changes are read from
version counters after the run, not guessed from the source.

Rejected: comparing with a tolerance. Both runs do the same operations in the same order, so every bit is compared,
except where plain PyTorch has no answer: there the reference is a run whose saved tensors were copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.utils import _pytree
from torch.utils.checkpoint import GraphExecGroup

import torch_recompute as tr
from torch_recompute.state.tape import thread

FLOATS = ("float32", "float64")
MOST_NUMBERS = 24  # in one tensor
REGIONS_DEEP = 3
CALLS_DEEP = 4


@dataclass(frozen=True)
class Input:
    """A tensor the program starts from: "leaf" requires grad, "param" is a Parameter, "const" does not require grad."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Recipe:
    """How backward is run; the integers choose outputs and leaves."""

    way: str
    order: int = 0
    subset: int = 0
    drop: int = 0
    poke: str = ""
    own_thread: bool = False


@dataclass(frozen=True)
class Program:
    """A program: see the module's note."""

    dtype: str
    inputs: tuple[Input, ...]
    body: tuple[str, ...]
    outputs: tuple[str, ...]
    recipe: Recipe
    seed: int
    features: frozenset[str] = frozenset()

    def source(self) -> str:
        """The program as Python."""
        head = f"def program({', '.join([i.name for i in self.inputs] + ['lin', 'norm', 'g'])}):"
        return "\n".join(indented(head, [*self.body, f"return [{', '.join(self.outputs)}]"]))

    def __repr__(self) -> str:
        inputs = "\n".join(f"# {i.name}: {i.role} {i.dtype}{list(i.shape)}" for i in self.inputs)
        return f"\n# dtype of modules: {self.dtype}; seed {self.seed}\n{inputs}\n{self.source()}\n# {self.recipe}\n"


def indented(head: str, lines: Sequence[str]) -> list[str]:
    """A line that ends with a colon, and what is under it."""
    return [head, *("    " + line for line in lines)]


# --- drawing programs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What is known of a value.

    `locked`: PyTorch forbids to change it in place. `index_of`: the shape it indexes. `constant`: it is an input that
    does not require grad.
    """

    shape: tuple[int, ...]
    dtype: str
    locked: bool = False
    index_of: tuple[int, ...] | None = None
    constant: bool = False

    @property
    def floating(self) -> bool:
        return self.dtype in FLOATS


@dataclass(frozen=True)
class Function:
    """A region or saved call that is defined, so that it can be called a second time."""

    wrapped: str
    style: str
    params: tuple[Kind, ...]
    returned: str
    returns: tuple[Kind, ...]


@dataclass
class Scope:
    """The names that a line at some place of the program can use."""

    values: dict[str, Kind]
    functions: list[Function] = field(default_factory=list)
    own: set[str] = field(default_factory=set)
    regions: int = 0
    calls: int = 0
    grad: bool = True

    def inner(self, closure: bool) -> Scope:
        """The scope of a function defined here."""
        seen = {n: k for n, k in self.values.items() if closure or n in ("w", "b")}
        return Scope(seen, list(self.functions), set(), self.regions, self.calls + 1, self.grad)


@functools.cache
def _below(n: int) -> st.SearchStrategy[int]:
    return st.integers(0, n - 1)


def _size(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


# Each takes {a}: any floating value; the shape stays.
UNARY = (
    ("{a}.sin()", "", 4),
    ("{a} * 0.5", "", 2),
    ("torch.tanh({a})", "", 2),
    ("torch.tanh({a}).exp()", "", 2),
    ("torch.relu({a})", "", 2),
    ("torch.sigmoid({a})", "", 2),
    ("{a}.square()", "", 2),
    ("{a}.softmax(-1)", "", 2),
    ("F.gelu({a})", "", 1),
    ("F.silu({a})", "", 1),
    ("{a}.cumsum(-1)", "", 1),
    ("F.layer_norm({a}, {a}.shape[-1:])", "", 2),
    ("torch.where({a} > 0, {a}, {a} * 0.1)", "", 1),
    ("{a}.clone()", "copy", 2),
    ("{a}.contiguous()", "copy", 1),
    ("Gate.apply({a})", "custom function", 3),
    ("F.dropout({a}, 0.4)", "random", 4),
    ("{a} * torch.rand_like({a})", "random", 2),
    ("F.rrelu({a}, training=True)", "random", 1),
    ("{a} * torch.bernoulli(torch.full_like({a}, 0.5), generator=g)", "explicit generator", 3),
    ("{a} + torch.rand({a}.shape, dtype={a}.dtype, generator=g)", "explicit generator", 2),
    ("{a}.detach()", "stop gradient", 2),
    ("{a} - {a}.detach().sin()", "stop gradient", 1),
)
# Each takes {a} and {b} of one dtype that broadcast together.
BINARY = (
    "{a} * {b}",
    "{a} + {b}",
    "{a} - {b}",
    "{a} / (2 + {b}.square())",
    "torch.where({a} > {b}, {a}, {b})",
    "torch.minimum({a}, {b})",
    "torch.addcmul({a}, {a}, {b})",
    "{a} * {b}.detach()",
)
# Each changes {a}; {b} has its shape and dtype.
IN_PLACE = (
    "{a}.mul_(0.9)",
    "{a}.add_({b})",
    "{a}.relu_()",
    "{a}.sin_()",
    "F.relu({a}, inplace=True)",
    "{a}[..., :1] = {b}[..., :1]",
    "{a}[..., 0].mul_(2)",
    "{a}.copy_({b})",
    "{a}.mul_({b}.detach())",
    "{a}.mul_(torch.rand_like({a}))",
    "F.dropout({a}, 0.3, inplace=True)",
    "{a}.detach().mul_(0.5)",
    "{a}.zero_()",
)
CONSTANT = "({a}.detach() if {a}.requires_grad else {a})"
# Each is {a}, or the global {g}, by another way.
SAME = (
    "{a}",
    "replay(lambda t: t.detach() if t.requires_grad else t)({a})",
    "replay(lambda t: (t.detach() if t.requires_grad else t).contiguous())({a})",
    "save",
    "save",
    "no_recompute(lambda t: t)({a})",
    "no_recompute(lambda: {a})()",
    "recompute(lambda t: t)({a})",
    "recompute(lambda: {a})()",
    "{g}",
    "{g}",
    "no_recompute(lambda: {g})()",
    "recompute(lambda: {g} * 1)()",
)
CONTEXTS = (
    ("torch.no_grad()", "no_grad", 4),
    ('torch.autocast("cpu", dtype=torch.bfloat16)', "autocast", 2),
    ("copies()", "hooks around", 4),
)
# The last of each is a store.
REGION_OPTIONS = ("", "", "", "", "", "", 'check="values"', 'check="none"', "early_stop=False", "inputs=OnHost()")
SAVED_OPTIONS = ("", "", "", "", "", "store=OnHost()")
STYLES = ("flat", "flat", "flat", "keywords", "tuple", "dict", "list")
RETURNS = ("tuple", "tuple", "dict", "nested")
WAYS = ("sum", "each", "twice", "split", "second", "inputs", "tensors", "forgotten", "none")


class Writer:
    """Draws a program, line by line."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.names = 0
        self.budget = 34
        self.globals: dict[str, Kind] = {}
        self.features: set[str] = set()
        # A store copies what a kernel may fill after it was saved (RReLU's noise), in plain PyTorch as well.
        self.stores = self.chance(30)
        self.makers: list[Callable[[Scope], list[str] | None]] = []
        for maker, weight in (
            (self.unary, 9),
            (self.binary, 7),
            (self.call, 13),
            (self.view, 6),
            (self.linear, 4),
            (self.in_place, 4),
            (self.several, 3),
            (self.choice, 5),
            (self.use, 4),
            (self.module, 2),
            (self.context, 4),
            (self.again, 2),
            (self.same, 6),
            (self.rebind, 1),
            (self.reduce, 1),
        ):
            self.makers.extend([maker] * weight)

    # --- drawing ---

    def below(self, n: int) -> int:
        return self.draw(_below(n)) if n > 1 else 0

    def chance(self, percent: int) -> bool:
        return self.below(100) >= 100 - percent

    def of(self, options: Sequence[Any]) -> Any:
        return options[self.below(len(options))]

    def weighted(self, options: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        at = self.below(sum(option[-1] for option in options))
        for option in options:
            at -= option[-1]
            if at < 0:
                return option
        raise AssertionError

    def name(self, letter: str = "v") -> str:
        self.names += 1
        return f"{letter}{self.names}"

    def value(self, scope: Scope, wanted: Callable[[Kind], bool], weights: bool = False) -> str | None:
        """The name of a value of the wanted kind; the latest are the likeliest."""
        names = [n for n, k in scope.values.items() if wanted(k) and (weights or n not in ("w", "b"))]
        if not names:
            return None
        names.reverse()
        return names[min(self.below(len(names)), self.below(len(names)))]

    def floating(self, scope: Scope) -> str:
        name = self.value(scope, lambda k: k.floating)
        assert name is not None
        return name

    def noted(self, feature: str, *lines: str) -> list[str]:
        """Lines, counted as a feature of the program."""
        self.features |= {feature} - {""}
        return list(lines)

    def new(self, scope: Scope, kind: Kind) -> str:
        name = self.name()
        scope.values[name] = kind
        scope.own.add(name)
        return name

    # --- lines: each returns None where the scope has nothing to make it of ---

    def body(self, scope: Scope, most: int) -> list[str]:
        """Up to `most` statements."""
        lines: list[str] = []
        for _ in range(1 + self.below(most)):
            if self.budget <= 0:
                break
            self.budget -= 1
            lines.extend(self.of(self.makers)(scope) or self.unary(scope))
        return lines

    def unary(self, scope: Scope) -> list[str]:
        a = self.floating(scope)
        kind = scope.values[a]
        text, feature, _ = self.weighted(UNARY)
        if ("-1" in text and not kind.shape) or ("rrelu" in text and self.stores):
            text, feature = "{a}.sin()", ""
        locked = kind.locked if ".contiguous" in text else text == "{a}.detach()" and not scope.grad
        return self.noted(feature, f"{self.new(scope, Kind(kind.shape, kind.dtype, locked))} = {text.format(a=a)}")

    def reduce(self, scope: Scope) -> list[str] | None:
        a = self.value(scope, lambda k: k.floating and len(k.shape) > 0)
        if a is None:
            return None
        shape = scope.values[a].shape
        text = self.of(("sum(0)", "mean(-1)", "logsumexp(-1)", "amax(-1)", "sum()"))
        left = () if text == "sum()" else shape[1:] if text == "sum(0)" else shape[:-1]
        return [f"{self.new(scope, Kind(left, scope.values[a].dtype))} = {a}.{text}"]

    def binary(self, scope: Scope) -> list[str] | None:
        a = self.floating(scope)
        kind = scope.values[a]
        if self.chance(25) and len(kind.shape) == 2:
            b = self.value(scope, lambda k: k.dtype == kind.dtype and len(k.shape) == 2 and k.shape[0] == kind.shape[1])
            if b is not None:
                shape = (kind.shape[0], scope.values[b].shape[1])
                return [f"{self.new(scope, Kind(shape, kind.dtype))} = ({a} @ {b}).to({a}.dtype)"]
            n = kind.shape[0]
            return [f"{self.new(scope, Kind((n, n), kind.dtype))} = ({a} @ {a}.mT).to({a}.dtype)"]
        if self.chance(12) and kind.shape and 2 * _size(kind.shape) <= MOST_NUMBERS:
            b = self.value(scope, lambda k: k.dtype == kind.dtype and k.shape == kind.shape)
            shape = (2 * kind.shape[0], *kind.shape[1:])
            return [f"{self.new(scope, Kind(shape, kind.dtype))} = torch.cat([{a}, {b}])"]

        def broadcasts(k: Kind) -> bool:
            short, long = sorted((k.shape, kind.shape), key=len)
            tail = long[len(long) - len(short) :]
            return k.dtype == kind.dtype and all(m == n for m, n in zip(short, tail, strict=True))

        b = self.value(scope, broadcasts)
        if b is None:
            return None
        shape = max(kind.shape, scope.values[b].shape, key=len)
        return [f"{self.new(scope, Kind(shape, kind.dtype))} = {self.of(BINARY).format(a=a, b=b)}"]

    def linear(self, scope: Scope) -> list[str] | None:
        weight = scope.values["w"]
        a = self.value(scope, lambda k: k.dtype == weight.dtype and k.shape[-1:] == (3,))
        if a is None:
            return None
        text = self.of(("F.linear({a}, w, b)", "F.linear({a}, w)", "({a} @ w.T + b)", "({a} * b)"))
        kind = scope.values[a]
        line = f"{self.new(scope, Kind(kind.shape, kind.dtype))} = {text.format(a=a)}.to({a}.dtype)"
        return self.noted("shared parameter", line)

    def module(self, scope: Scope) -> list[str] | None:
        weight = scope.values["w"]
        normed = self.chance(50)
        wanted = (lambda n: n == 2) if normed else (lambda n: n > 0)
        a = self.value(scope, lambda k: k.dtype == weight.dtype and k.shape[-1:] == (3,) and wanted(len(k.shape)))
        if a is None or (normed and scope.values[a].shape[0] < 2):
            return None
        fn = "norm" if normed else "lin"
        wrap = self.of(("{fn}", "recompute({fn})", "no_recompute({fn})"))
        if wrap.startswith("recompute") and scope.regions >= REGIONS_DEEP:
            wrap = "{fn}"
        kind = Kind(scope.values[a].shape, weight.dtype)
        line = f"{self.new(scope, kind)} = {wrap.format(fn=fn)}({a}).to({a}.dtype)"
        return self.noted("module with buffers" if normed else "module", line)

    def view(self, scope: Scope) -> list[str] | None:
        a = self.value(scope, lambda k: k.floating and len(k.shape) > 0)
        if a is None:
            return None
        kind, locked = scope.values[a], scope.values[a].locked or not scope.grad
        shape, n = kind.shape, len(kind.shape)
        text, new = "{a}[:]", shape
        way = self.below(8)
        if way == 0 and n > 1:
            text, new = "{a}.transpose(-1, -2)", (*shape[:-2], shape[-1], shape[-2])
        elif way == 1:
            text, new = "{a}.reshape(-1)", (_size(shape),)
        elif way == 2 and shape[0] > 1:
            text, new = self.of((("{a}[1:]", (shape[0] - 1, *shape[1:])), ("{a}[0]", shape[1:])))
        elif way == 3 and n < 3 and 2 * _size(shape) <= MOST_NUMBERS:
            text, new, locked = "{a}.expand(2, " + ", ".join(map(str, shape)) + ")", (2, *shape), True
        elif way == 4 and n < 3:
            text, new = "{a}.unsqueeze(0)", (1, *shape)
        elif way == 5 and shape[-1] > 1:
            text, new = "{a}[..., ::2]", (*shape[:-1], (shape[-1] + 1) // 2)
        elif way == 6 and n == 2:
            text, new = "{a}.mT.contiguous().view(-1)", (_size(shape),)
        elif way == 7 and n == 1:
            text, new = "{a}.diag()", (shape[0], shape[0])
            if _size(new) > MOST_NUMBERS:
                text, new = "{a}.flip(0)", shape
        return self.noted("view", f"{self.new(scope, Kind(new, kind.dtype, locked))} = {text.format(a=a)}")

    def several(self, scope: Scope) -> list[str] | None:
        a = self.value(scope, lambda k: k.floating and len(k.shape) > 0 and k.shape[-1] > 1)
        if a is None:
            return None
        kind = scope.values[a]
        shape, last = kind.shape, kind.shape[-1]
        way = self.below(6)
        if way == 0:
            values = Kind((*shape[:-1], 2), kind.dtype)
            names = self.new(scope, values), self.new(scope, Kind(values.shape, "int64", index_of=shape))
            text = f"{a}.topk(2)"
        elif way == 1:
            names = self.new(scope, Kind(shape, kind.dtype)), self.new(scope, Kind(shape, "int64", index_of=shape))
            text = f"{a}.sort(-1)"
        elif way == 2:
            names = tuple(self.new(scope, Kind(shape[:-1], kind.dtype)) for _ in range(2))
            text = f"torch.var_mean({a}, -1)"
        elif way == 3:
            reduced = (*shape[:-1], 1)
            names = self.new(scope, Kind(reduced, kind.dtype)), self.new(scope, Kind(reduced, "int64", index_of=shape))
            text = f"{a}.max(-1, keepdim=True)"
        elif way == 4 or shape[0] != 2:
            first = (last + 1) // 2
            names = tuple(
                self.new(scope, Kind((*shape[:-1], n), kind.dtype, locked=True)) for n in (first, last - first)
            )
            text = f"{a}.chunk(2, -1)"
        else:
            names = tuple(self.new(scope, Kind(shape[1:], kind.dtype, locked=True)) for _ in range(2))
            text = f"{a}.unbind(0)"
        return self.noted("several outputs", f"{', '.join(names)} = {text}")

    def in_place(self, scope: Scope) -> list[str] | None:
        careful = not self.chance(3)
        a = self.value(scope, lambda k: k.floating and not (careful and k.locked))
        if a is None:
            return None
        kind = scope.values[a]
        text = self.of(IN_PLACE)
        b = self.value(scope, lambda k: (k.shape, k.dtype) == (kind.shape, kind.dtype))
        if "..." in text and not kind.shape:
            text = IN_PLACE[0]
        if b == a and "{b}" in text:
            text = text.replace("{b}", "{b}.cos()")
        if scope.calls:
            self.features.add("in-place in a call")
        return self.noted("in-place", text.format(a=a, b=b))

    def choice(self, scope: Scope) -> list[str] | None:
        a = self.value(scope, lambda k: k.floating and len(k.shape) > 0 and k.shape[-1] > 1)
        if a is None:
            return None
        kind = scope.values[a]
        top = Kind((*kind.shape[:-1], 1), "int64", index_of=kind.shape)
        mask = Kind(kind.shape, "bool")
        way = self.below(7)
        if way == 0:
            return self.noted("replay", f"{self.new(scope, top)} = replay(lambda t: t.argmax(-1, keepdim=True))({a})")
        if way == 1:
            two = Kind((*kind.shape[:-1], 2), "int64", index_of=kind.shape)
            return self.noted("replay", f"{self.new(scope, two)} = replay(lambda t: t.topk(2).indices)({a})")
        if way == 2:
            text = self.of(("t > 0", "torch.rand_like(t) > 0.5"))
            return self.noted("replay", f"{self.new(scope, mask)} = replay(lambda t: {text})({a})")
        if way == 3:
            text = self.of(("t.detach().sign()", "t.detach()"))
            return self.noted("replay", f"{self.new(scope, kind)} = replay(lambda t: {text})({a})")
        if way == 4:
            c = self.new(scope, Kind(kind.shape, kind.dtype))
            then = indented(f"if replay(lambda t: bool(t.sum() > 0))({a}):", [f"{c} = {a}.sin()"])
            return self.noted("replay", *then, *indented("else:", [f"{c} = {a}.square()", f"{c} = {c} + 1"]))
        c, made = self.of(((top, "argmax(-1, keepdim=True)"), (mask, "sign() > 0"), (kind, "sign()")))
        name = self.new(scope, c)
        return self.noted("save_for_recompute", *self.carried(name, f"{a}.detach().{made}"))

    def carried(self, name: str, value: str) -> list[str]:
        """A value that the forward saves and the replay reads."""
        key = f'key="{self.name("k")}"'
        read = indented("if doing_recompute():", [f"({name},) = get_recompute_data({key})"])
        return [*read, *indented("else:", [f"{name} = {value}", f"save_for_recompute({name}, {key})"])]

    def same(self, scope: Scope) -> list[str] | None:
        """Another name for a tensor that there is."""
        text = self.of(SAME)
        if text.startswith("recompute") and scope.regions >= REGIONS_DEEP:
            text = "{a}"
        if "{g}" in text:
            a = self.of(list(self.globals))
            kind = self.globals[a]
        else:
            constant = self.value(scope, lambda k: k.constant) if self.chance(50) else None
            a = constant or self.floating(scope)
            kind = scope.values[a]
        name, used = self.new(scope, kind), self.new(scope, Kind(kind.shape, kind.dtype))
        use = f"{used} = ({name} * b.sum().to({name}.dtype)).sin()"  # autograd saves it, and then another
        if text != "save":
            return self.noted("same tensor", f"{name} = {text.format(a=a, g=a)}", use)
        return self.noted("same tensor", *self.carried(name, CONSTANT.format(a=a)), use)

    def use(self, scope: Scope) -> list[str] | None:
        """Uses an index or a mask."""
        i = self.value(scope, lambda k: not k.floating)
        if i is None:
            return None
        kind = scope.values[i]
        wanted = kind.index_of or kind.shape
        a = self.value(scope, lambda k: k.floating and k.shape == wanted)
        if a is None:
            return None
        text = f"{a}.gather(-1, {i})" if kind.index_of else f"{a}.masked_fill({i}, 0.25)"
        return self.noted("decided value used", f"{self.new(scope, Kind(kind.shape, scope.values[a].dtype))} = {text}")

    def rebind(self, scope: Scope) -> list[str] | None:
        names = sorted(scope.own & set(scope.values))
        if sum(scope.values[n].floating for n in names) < 3:
            return None
        name = self.of(names)
        del scope.values[name]
        scope.functions = []  # one of them may have used it
        return self.noted("name deleted", self.of((f"del {name}", f"{name} = None")))

    def context(self, scope: Scope) -> list[str] | None:
        if not scope.grad:
            text, feature = "torch.enable_grad()", "enable_grad"
        else:
            text, feature, _ = self.weighted(CONTEXTS if self.stores else CONTEXTS[:-1])
        before, known = scope.grad, set(scope.values)
        scope.grad = feature != "no_grad" if feature.endswith("_grad") else scope.grad
        body = self.body(scope, 3)
        if scope.grad != before and not before:
            for name in set(scope.values) - known:  # made with grad inside no_grad: may be a view across the border
                scope.values[name] = Kind(**{**scope.values[name].__dict__, "locked": True})
        scope.grad = before
        return self.noted(feature, *indented(f"with {text}:", body or ["pass"]))

    def call(self, scope: Scope) -> list[str] | None:
        saved = self.below(10) >= 6
        if scope.calls >= CALLS_DEEP or (not saved and scope.regions >= REGIONS_DEEP):
            return None
        closure = self.chance(60)
        inner = scope.inner(closure)
        inner.regions += not saved
        fn = self.name("f")
        args = [self.floating(scope) for _ in range(self.below(3) + (not closure))]
        other = self.value(scope, lambda k: not k.floating) if self.chance(25) else None
        if other is not None:
            args.append(other)
        style = self.of(STYLES) if args else "flat"
        params = [self.name("p") for _ in args]
        for param, arg in zip(params, args, strict=True):
            inner.values[param] = scope.values[arg]
        lines = [f'tick("{fn}")']
        if style == "flat" or style == "keywords":
            head = f"def {fn}({', '.join(params)}):"
        else:
            head = f"def {fn}(box):"
            keys = [f"'{i}'" if style == "dict" else str(i) for i in range(len(args))]
            lines.extend(f"{param} = box[{key}]" for param, key in zip(params, keys, strict=True))
        lines.extend(self.body(inner, 5))
        own = [n for n in inner.values if n in inner.own]
        results: list[str] = []
        for _ in range(1 + self.below(3)):
            name = self.of(own[::-1]) if own and not self.chance(20) else self.value(inner, lambda k: True)
            if name is not None and name not in results:
                results.append(name)
        if not any(inner.values[n].floating for n in results):
            results.append(self.floating(inner))
        returned = "one" if len(results) == 1 else self.of(RETURNS)
        lines.append(_returning(returned, results))
        if saved:
            option = self.of(SAVED_OPTIONS if self.stores else SAVED_OPTIONS[:-1])
            wrapped = f"no_recompute({fn}{', ' * bool(option)}{option})"
        else:
            option = self.of(REGION_OPTIONS if self.stores else REGION_OPTIONS[:-1])
            wrapped = f"recompute({fn}{', ' * bool(option)}{option})"
        function = Function(
            wrapped,
            style if style not in ("flat", "keywords") else style + ":" + ",".join(params),
            tuple(scope.values[a] for a in args),
            returned,
            tuple(inner.values[r] for r in results),
        )
        called = self.make_call(scope, function, args)
        scope.functions.append(function)
        if saved:
            self.features |= {"saved call", "saved call in a region"} if scope.regions else {"saved call"}
        else:
            self.features |= {"region", f"regions {inner.regions} deep"}
            if scope.calls > scope.regions:
                self.features.add("region in a saved call")
        if not args:
            self.features.add("closure only")
        if option:
            self.features.add("option")
        return [*indented(head, lines), *called]

    def again(self, scope: Scope) -> list[str] | None:
        if not scope.functions:
            return None
        function = self.of(scope.functions[::-1])
        args: list[str] = []
        for wanted in function.params:
            arg = self.value(
                scope,
                lambda k, wanted=wanted: (
                    (k.shape, k.dtype, k.index_of) == (wanted.shape, wanted.dtype, wanted.index_of)
                    and (wanted.locked or not k.locked)
                ),
            )
            if arg is None:
                return None
            args.append(arg)
        return self.noted("called again", *self.make_call(scope, function, args))

    def make_call(self, scope: Scope, function: Function, args: Sequence[str]) -> list[str]:
        style, _, params = function.style.partition(":")
        lines: list[str] = []
        after: list[str] = []
        given = ", ".join(args)
        if style == "keywords":
            given = ", ".join(f"{p}={a}" for p, a in zip(params.split(","), args, strict=True))
        elif style == "tuple":
            given = f"({given},)"
        elif style == "dict":
            given = "{" + ", ".join(f"'{i}': {a}" for i, a in enumerate(args)) + "}"
        elif style == "list":
            box = self.name("c")
            lines.append(f"{box} = [{given}]")
            after.append(f"{box}.clear()")
            given = box
        names = [self.new(scope, kind) for kind in function.returns]
        text = f"{function.wrapped}({given})"
        if function.returned == "one":
            lines.append(f"{names[0]} = {text}")
        else:
            result = self.name("r")
            lines.append(f"{result} = {text}")
            picks = {"tuple": "[{}]", "dict": "['{}']", "nested": "[1][{}]"}[function.returned]
            lines.extend(f"{name} = {result}{picks.format(i)}" for i, name in enumerate(names))
            after.append(f"del {result}")
        return [*lines, *after]


def _returning(how: str, names: Sequence[str]) -> str:
    if how == "one":
        return f"return {names[0]}"
    if how == "dict":
        return "return {" + ", ".join(f"'{i}': {n}" for i, n in enumerate(names)) + "}"
    return f"return (None, [{', '.join(names)}], 3)" if how == "nested" else f"return {', '.join(names)}"


GLOBAL = "the_{}"


def _scale(inputs: Sequence[Input]) -> Input:
    """The input that is a buffer, too: a constant, if there is one."""
    return next((i for i in inputs if i.role == "const"), inputs[-1])


SHAPES = ((2, 3), (3,), (3, 3), (2, 2, 3), (3, 2), (1, 3), ())


@st.composite
def programs(draw: Any) -> Program:
    """A program."""
    writer = Writer(draw)
    dtype = writer.of(("float64", "float32"))
    inputs = [Input("w", "param", (3, 3), dtype), Input("b", "param", (3,), dtype)]
    for i in range(1 + writer.below(3)):
        other = writer.of(FLOATS) if writer.chance(15) else dtype
        shape = writer.of(SHAPES[: 2 if writer.chance(50) else None])
        role = "leaf" if i == 0 else writer.of(("leaf", "const"))
        inputs.append(Input(f"x{i}", role, shape, other))
    # The recipe comes before the body: what is drawn last varies least.
    way = draw(st.sampled_from(WAYS))
    poke = writer.of([i.name for i in inputs]) if writer.chance(4) else ""
    drop = writer.below(8) if writer.chance(20) else 0
    # Nodes are numbered by thread, and the order in which gradients are added follows the numbers; a second derivative
    # taken on another thread mixes two counts, and replays advance one of them: equal, but not to the last bit.
    own_thread = writer.chance(12) and way != "second"
    recipe = Recipe(way, writer.below(5), writer.below(32), drop, poke, own_thread)
    seed = writer.below(100)
    scope = Scope({i.name: Kind(i.shape, i.dtype, i.role != "const", constant=i.role == "const") for i in inputs})
    writer.globals = {GLOBAL.format(i.name): scope.values[i.name] for i in inputs}
    writer.globals["lin.scale"] = scope.values[_scale(inputs).name]
    body: list[str] = []
    if writer.chance(50):
        # A stretch of ordinary code first, so that regions have temporaries to take.
        body.extend(writer.unary(scope))
    if writer.chance(70):
        body.extend(writer.call(scope) or ())
    body.extend(writer.body(scope, 6))
    for _ in range(2):
        if not any(function.wrapped.startswith("recompute") for function in scope.functions):
            body.extend(writer.call(scope) or ())
    names = [n for n in scope.values if n in scope.own][::-1]
    outputs: list[str] = []
    for _ in range(1 + writer.below(4)):
        name = writer.of(names[:4]) if writer.chance(60) else writer.of(names)
        if name not in outputs:
            outputs.append(name)
    if not any(scope.values[n].floating for n in outputs):
        outputs.append(writer.floating(scope))
    features = writer.features | {f"backward:{way}"}
    features |= {name for name, there in (("backward:thread", own_thread), ("poke", poke)) if there}
    return Program(dtype, tuple(inputs), tuple(body), tuple(outputs), recipe, seed, frozenset(features))


# --- running them --------------------------------------------------------------------------------------------------


class Gate(torch.autograd.Function):
    """x * sigmoid(x), keeping its input, something in between, and its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        s = torch.sigmoid(x)
        y = x * s
        ctx.save_for_backward(x, s, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _, s, _ = first = ctx.saved_tensors
        _, _, y = ctx.saved_tensors  # again, as some do; `first` keeps the tensors alive meanwhile
        del first
        return gradient * (s + y * (1 - s))


def copies() -> Any:
    """Saved-tensor hooks that keep copies; those of `save_on_cpu` keep the very tensor on a CPU, and leak."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)


class Mode:
    """What the names of the library mean in a run, and how often each function ran.

    Attributes:
        saved_calls_last: Whether a saved call never runs again; not where an elastic region may be emptied of it.
    """

    saved_calls_last = True

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()

    def names(self) -> dict[str, Any]:
        """The names that a program uses."""

        def tick(fn: str) -> None:
            self.runs[fn] += 1

        return {"torch": torch, "F": F, "Gate": Gate, "OnHost": tr.OnHost, "copies": copies, "tick": tick}

    def finish(self) -> None:
        """Called when the step is done; lets go of every tensor."""


class Ours(Mode):
    """The library."""

    def names(self) -> dict[str, Any]:
        return super().names() | {
            "recompute": tr.recompute,
            "no_recompute": tr.no_recompute,
            "replay": tr.replay,
            "save_for_recompute": tr.save_for_recompute,
            "get_recompute_data": tr.get_recompute_data,
            "doing_recompute": tr.doing_recompute,
        }


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _cells(fn: Any) -> list[Any]:
    """The tensors that a function closes over, those of functions in its closure included, and the globals it names.

    Of a module, the parameters.
    """
    if isinstance(fn, torch.nn.Module):
        return list(fn.parameters())
    found: list[Any] = [fn.__globals__[name] for name in _names(fn.__code__) if name.startswith(GLOBAL.format(""))]
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # deleted
            if isinstance(cell.cell_contents, types.FunctionType):
                found.extend(_cells(cell.cell_contents))
            elif isinstance(cell.cell_contents, torch.Tensor):
                found.append(cell.cell_contents)
    return found


def _names(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))


class Plain(Mode):
    """PyTorch alone; notes what a replay would need, and how often it may run each function.

    Attributes:
        depth: How many regions with replays of their own the program is in.
        changed: Which kinds of things that a replay needs were changed in place after they were handed over.
        replays: For each function, the number of replays that one backward may make of all its calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self._hooked = 0  # how many regions there are around the innermost hooks that the program has entered
        self.replays: Counter[str] = Counter()
        self.changed: set[str] = set()
        self._watched: list[tuple[str, torch.Tensor, int]] = []

    def finish(self) -> None:
        self.changed = {why for why, tensor, version in self._watched if tensor._version != version}
        self._watched.clear()

    def _watch(self, why: str, tree: Any) -> None:
        self._watched.extend((why, leaf.detach(), leaf._version) for leaf in _tensors_in(tree))

    def recompute(self, fn: Any, **_: Any) -> Any:
        """The plain call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            watched = torch.is_grad_enabled()
            if watched:
                self._watch("input", (args, kwargs))
                self._watch("closure", _cells(fn))
            self.depth += watched
            self._may_replay(fn)
            try:
                return fn(*args, **kwargs)
            finally:
                self.depth -= watched

        return call

    def no_recompute(self, fn: Any, **_: Any) -> Any:
        """The plain call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.depth and self._hooked == self.depth:
                # Directly in hooks that a region's function enters, the library keeps nothing.
                self._may_replay(fn)
                return fn(*args, **kwargs)
            (depth, self.depth), (hooked, self._hooked) = (self.depth, 0), (self._hooked, 0)
            handed = [(t, t._version) for t in _tensors_in((args, kwargs, _cells(fn)))] if depth else []
            try:
                result = fn(*args, **kwargs)
            finally:
                self.depth, self._hooked = depth, hooked
            if depth:
                self._watch("output of a saved call", result)
                # What it changed in place is an output too.
                self._watch("output of a saved call", [t for t, version in handed if t._version != version])
            return result

        return call

    @contextlib.contextmanager
    def _copies(self) -> Iterator[None]:
        before, self._hooked = self._hooked, self.depth
        try:
            with copies():
                yield
        finally:
            self._hooked = before

    def _may_replay(self, fn: Any) -> None:
        self.replays[getattr(fn, "__name__", "")] += self.depth

    def names(self) -> dict[str, Any]:
        def replay(fn: Any) -> Any:
            def call(*args: Any) -> Any:
                result = fn(*args)
                if self.depth:
                    self._watch("carried value", result)
                return result

            return call

        def save_for_recompute(*data: Any, key: Any = None) -> None:
            if self.depth:
                self._watch("carried value", data)

        return super().names() | {
            "recompute": self.recompute,
            "no_recompute": self.no_recompute,
            "copies": self._copies,
            "replay": replay,
            "save_for_recompute": save_for_recompute,
            "get_recompute_data": None,
            "doing_recompute": lambda: False,
        }


@dataclass
class Result:
    """What can be seen of a run."""

    error: str = ""
    raised: type | None = None
    in_forward: bool = False
    outputs: list[Any] = field(default_factory=list)
    outputs_after: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    state: list[Any] = field(default_factory=list)
    forward_runs: Counter[str] = field(default_factory=Counter)
    backwards: int = 0
    stray: list[str] = field(default_factory=list)
    leaked: int = 0


def bits(tensor: torch.Tensor | None) -> Any:
    """A tensor as plain data: shape, dtype, whether it requires grad, and every bit."""
    if tensor is None:
        return None
    flat = tensor.detach().clone(memory_format=torch.contiguous_format)
    data = ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, data


def _content(shape: Sequence[int], seed: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(_size(shape), dtype=torch.float64) * 1.7 + seed).sin().to(dtype).reshape(tuple(shape))


def _start(program: Program) -> tuple[list[torch.Tensor], torch.nn.Module, torch.nn.Module, torch.Generator]:
    tensors: list[torch.Tensor] = []
    for i, spec in enumerate(program.inputs):
        tensor = _content(spec.shape, i + 1, getattr(torch, spec.dtype))
        if spec.role == "param":
            tensor = torch.nn.Parameter(tensor * 0.7)
        tensors.append(tensor.requires_grad_(spec.role != "const"))
    dtype = getattr(torch, program.dtype)
    torch.manual_seed(program.seed)
    lin, norm = torch.nn.Linear(3, 3, dtype=dtype), torch.nn.BatchNorm1d(3, dtype=dtype)
    scale = tensors[program.inputs.index(_scale(program.inputs))]
    if isinstance(scale, torch.nn.Parameter):
        lin.scale = scale
    else:
        lin.register_buffer("scale", scale)
    return tensors, lin, norm, torch.Generator().manual_seed(program.seed + 1)


def _losses(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [(o * _content(o.shape, 20 + i, o.dtype)).sum().double() for i, o in enumerate(outputs)]


def _backward(
    recipe: Recipe, outputs: list[torch.Tensor], leaves: list[torch.Tensor], result: Result
) -> list[torch.Tensor | None]:
    """Runs backward; returns what else than `.grad` it computed. Empties `outputs`."""
    losses = _losses(outputs)
    gradients = [torch.ones_like(loss) for loss in losses]
    if recipe.way == "tensors":
        gradients = [_content(o.shape, 30 + i, o.dtype) for i, o in enumerate(outputs)]
        losses = list(outputs)
    outputs.clear()
    if not losses:
        return []
    turn = recipe.order % len(losses)
    losses, gradients = losses[turn:] + losses[:turn], gradients[turn:] + gradients[:turn]
    first = [leaf for i, leaf in enumerate(leaves) if recipe.subset >> (i % 5) & 1] or leaves[:1]
    rest = [leaf for leaf in leaves if not any(leaf is other for other in first)]
    found: list[torch.Tensor | None] = []
    if recipe.way in ("sum", "tensors"):
        result.backwards = 1
        torch.autograd.backward(losses, gradients)
    elif recipe.way in ("each", "forgotten"):
        result.backwards = len(losses)
        while losses:
            losses.pop(0).backward(retain_graph=recipe.way == "each" and len(losses) > 0)
    elif recipe.way == "twice":
        result.backwards = 2
        for _ in range(2):
            torch.autograd.backward(losses, gradients, retain_graph=True)
    elif recipe.way == "split":
        result.backwards = 2
        with GraphExecGroup():
            found.extend(torch.autograd.grad(losses, first, gradients, retain_graph=True, allow_unused=True))
            if rest:
                found.extend(torch.autograd.grad(losses, rest, gradients, allow_unused=True))
    elif recipe.way == "inputs":
        result.backwards = 1
        torch.autograd.backward(losses, gradients, inputs=first)
    elif recipe.way == "second":
        result.backwards = 2
        firsts = torch.autograd.grad(losses, leaves, gradients, create_graph=True, allow_unused=True)
        found.extend(None if g is None else g.detach() for g in firsts)
        smooth = [g.double().square().sum() for g in firsts if g is not None and g.requires_grad]
        del firsts
        if smooth:
            found.extend(torch.autograd.grad(smooth, leaves, allow_unused=True))
    return found


def _stray(result: Result) -> None:
    if thread.run is not None:
        result.stray.append("the thread is still in a region")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        result.stray.append("saved-tensor hooks are still active")
    if not torch.is_grad_enabled():
        result.stray.append("grad is off")
    if torch.is_autocast_enabled("cpu"):
        result.stray.append("autocast is on")


def _step(program: Program, code: types.CodeType, mode: Mode) -> Result:
    result = Result()
    tensors, lin, norm, generator = _start(program)
    namespace = mode.names()
    namespace.update((GLOBAL.format(i.name), tensor) for i, tensor in zip(program.inputs, tensors, strict=True))
    exec(code, namespace)
    torch.manual_seed(program.seed)
    leaves = [t for t in tensors if t.requires_grad] + [lin.weight, lin.bias, *norm.parameters()]

    def attempt(act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:
            result.error = f"{type(error).__name__}: {error}"
            result.raised = type(error)
            return None

    returned = attempt(lambda: namespace["program"](*tensors, lin, norm, generator))
    result.forward_runs = mode.runs.copy()
    _stray(result)
    watched: list[torch.Tensor] = []
    if returned is None:
        result.in_forward = True
    else:
        result.outputs = [bits(t) for t in returned]
        watched = [t.detach() for t in returned]
        outputs = [t for i, t in enumerate(returned) if t.requires_grad and not program.recipe.drop >> i & 1]
        returned.clear()
        for spec, tensor in zip(program.inputs, tensors, strict=True):
            if spec.name == program.recipe.poke:
                with torch.no_grad():
                    tensor.mul_(1.25)
        found: list[torch.Tensor | None] = []
        recipe = program.recipe

        def backward() -> None:
            found.extend(attempt(lambda: _backward(recipe, outputs, leaves, result)) or [])
            _stray(result)

        if recipe.own_thread:
            _in_a_thread(backward)
            _stray(result)
        else:
            backward()
        if result.raised is None:
            result.gradients = [bits(t) for t in (*(leaf.grad for leaf in leaves), *found)]
    result.outputs_after = [None if t is None else bits(t)[3] for t in watched]
    buffers = [bits(t) for t in norm.buffers()]
    result.state = [torch.default_generator.get_state().tolist(), generator.get_state().tolist(), buffers]
    if result.raised is None or not result.in_forward:
        result.state.append([bits(t)[3] for t in tensors])
    namespace.clear()  # the functions in it hold it
    return result


def _tensors_alive() -> int:
    return sum(issubclass(type(o), (torch.Tensor, torch.UntypedStorage)) for o in gc.get_objects())


def execute(program: Program, mode: Mode, *, undisturbed: bool = False) -> Result:
    """Runs a program once, and counts the tensors that are still alive when all is dropped.

    Args:
        program: What to run.
        mode: What `recompute` and the rest mean.
        undisturbed: Whether autograd keeps copies of what it saves, so that no in-place change can disturb it.
    """
    code = compile(program.source(), "<program>", "exec")
    before = _tensors_alive()
    results: list[Result] = []

    def step() -> None:
        with contextlib.ExitStack() as stack:
            if undisturbed:
                stack.enter_context(copies())
            results.append(_step(program, code, mode))

    # When backward raises, autograd's queue of the thread still holds what it had not got to; it dies with the thread.
    _in_a_thread(step)
    mode.finish()
    (result,) = results
    held = _tensors_alive() - before
    if held and gc.collect():  # nothing may be in a cycle of Python objects
        result.leaked = held
        return result
    for _ in range(20):  # what the collector asks to let go is gone: lists whose tensors have come by a history since
        result.leaked = _tensors_alive() - before
        if not result.leaked:
            break
        time.sleep(0.001)  # where the system does not tell that the thread has ended
    return result


def _in_a_thread(fn: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            fn()
        except BaseException as error:
            failed.append(error)

    other = threading.Thread(target=run)
    other.start()
    other.join()
    # It ends a little after it can be joined, on a busy machine by more than a fixed time; what it held goes then.
    ended = time.monotonic() + 5
    while os.path.exists(f"/proc/self/task/{other.native_id}") and time.monotonic() < ended:
        time.sleep(0.0002)
    if failed:
        raise failed[0]


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Without the garbage collector, and with everything that exists out of the count, from now on."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class Verdict:
    """What became of a program; `wrong` is empty where it did what plain PyTorch does.

    Attributes:
        wrong: What differs.
        plain_raised: Whether plain PyTorch refused it.
        plain_leaked: Whether plain PyTorch never frees some of it (a tensor saved and then changed by its own result).
        exempt: What a replay needs and the program changed in place; only then may ours raise `ChangedError`.
        used: Whether it raised one although plain PyTorch ran.
    """

    wrong: list[str] = field(default_factory=list)
    plain_raised: bool = False
    plain_leaked: bool = False
    exempt: set[str] = field(default_factory=set)
    used: bool = False


def compare(program: Program, ours: Mode | None = None) -> Verdict:
    """Runs a program plainly and with the library, and says what differs."""
    verdict = Verdict()
    wrong = verdict.wrong
    with counted():
        reference = Plain()
        plain = execute(program, reference)
        verdict.plain_raised = plain.raised is not None
        verdict.exempt = reference.changed
        verdict.plain_leaked = plain.leaked > 0
        replays = reference.replays
        mode = ours or Ours()
        got = execute(program, mode)
        if got.leaked and not plain.leaked:
            wrong.append(f"{got.leaked} tensors are still alive when everything is dropped")
        wrong.extend(got.stray)
        if got.forward_runs != plain.forward_runs and not plain.in_forward:
            wrong.append(f"runs in forward: {dict(got.forward_runs)}, plainly {dict(plain.forward_runs)}")
        # With a retained graph, a Function that reads its tensors twice has them rebuilt twice.
        bounded = "Gate" not in program.source() or program.recipe.way not in ("each", "twice", "split", "second")
        bounded = bounded and mode.saved_calls_last
        for fn, runs in mode.runs.items() if bounded else ():
            most = plain.forward_runs[fn] + replays[fn] * got.backwards
            if runs > most:
                wrong.append(f"{fn} ran {runs} times; {most} are enough")
        if got.outputs != plain.outputs:
            wrong.append(_differing("output", got.outputs, plain.outputs))
        if got.outputs_after != plain.outputs_after:
            wrong.append("backward " + _differing("changed output", got.outputs_after, plain.outputs_after))
        if got.state != plain.state and not (plain.raised and got.raised is None):
            names = ("the default generator", "the explicit generator", "the buffers", "the inputs' values")
            differ = [n for n, a, b in zip(names, got.state, plain.state, strict=False) if a != b]
            wrong.append(f"after the step differ: {', '.join(differ)}")
        if plain.raised is not None:
            _compare_refused(program, plain, got, verdict)
        elif got.raised is not None:
            verdict.used = got.raised is tr.ChangedError and bool(verdict.exempt)
            if not verdict.used:
                wrong.append(f"raised, but plainly it runs: {got.error}")
        elif got.gradients != plain.gradients:
            wrong.append(_differing("gradient", got.gradients, plain.gradients))
    return verdict


def _compare_refused(program: Program, plain: Result, got: Result, verdict: Verdict) -> None:
    """Plain PyTorch raised: ours raises as well, or is right."""
    if got.raised is not None:
        if got.in_forward != plain.in_forward:
            verdict.wrong.append(f"raised elsewhere: {got.error}\nplainly: {plain.error}")
        elif got.raised is not plain.raised and got.raised is not tr.ChangedError:
            verdict.wrong.append(f"raised {got.error}\nplainly: {plain.error}")
        return
    if plain.in_forward:
        verdict.wrong.append(f"ran, but plainly forward raises {plain.error}")
        return
    if "rrelu" in program.source():  # its kernel fills a saved buffer after it was saved: a copy would be empty
        return
    right = execute(program, Plain(), undisturbed=True)
    if right.raised is None and not _close(got.gradients, right.gradients):
        verdict.wrong.append(
            "ran where plain PyTorch raises, and " + _differing("gradient", got.gradients, right.gradients)
        )


def _values(data: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(data[3]), dtype=data[1]) if data[3] else torch.empty(0)


def _close(got: Sequence[Any], right: Sequence[Any]) -> bool:
    if len(got) != len(right):
        return False
    for a, b in zip(got, right, strict=True):
        if (a is None) != (b is None):
            return False
        if a is not None and not torch.allclose(_values(a), _values(b), rtol=1e-3, atol=1e-5, equal_nan=True):
            return False
    return True


def _differing(what: str, got: Sequence[Any], expected: Sequence[Any]) -> str:
    if len(got) != len(expected):
        return f"{what}s: {len(got)}, plainly {len(expected)}"
    said: list[str] = []
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a != b:
            said.append(f"{what} {i} differs: {_say(a)}, plainly {_say(b)}")
    return "\n".join(said)


def _say(data: Any) -> str:
    if not isinstance(data, tuple):
        return str(data)
    return f"{list(data[0])} requires_grad={data[2]} {_values(data)[:6].tolist()}"
