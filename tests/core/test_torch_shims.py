"""Each private PyTorch name behind `_torch/` does what its shim says, and so does what stands in where it is gone.

A table: a row is a shim, a call of it, what the call returns, and the names of torch that another release or build may
lack, with what the call returns without each. All other names that the shims use are in torch 2.11 as well as in 2.13.
Two laws run the table, with the names there and with each of them gone; two tests keep the table complete.
"""

import ast
import contextlib
import fnmatch
import functools
import importlib
import logging
import operator
import pkgutil
import subprocess
import sys
import threading
import types
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import GraphExecGroup, set_checkpoint_debug_enabled, set_checkpoint_early_stop

import torch_recompute
from laws.watch import vector
from support.acted import copies_as_on_cuda
from torch_recompute import _torch

MODULES = ("checkpoints", "compiler", "cuda", "devices", "fakes", "graphs", "modes", "storages")
ACCELERATOR = "torch_recompute._torch.devices.ACCELERATOR"
SAVED = "torch._C._autograd.SavedTensor"
Call = Callable[[Any], Any]
Place = Callable[[Callable[[], Any]], Any]
Pair = namedtuple("Pair", "left right")
aten = torch.ops.aten


class Row(NamedTuple):
    """One shim, or several that belong together."""

    shims: str
    gives: Any
    call: Call
    gone: Any = ()  # by each name of torch that may be missing: what the call returns without it
    acts: Any = ()  # what stands for a machine that is not here, by name
    gpu: bool = False


ROWS: list[Row] = []


def row(shims: str, gives: Any, call: Call | None = None, **more: Any) -> Any:
    """Adds a row of the table; a decorator where the call is a function."""
    if call is None:
        return functools.partial(row, shims, gives, **more)
    ROWS.append(Row(shims, gives, call, **more))
    return call


def each(shim: str, gives: list[Any], *values: Any, view: Call = lambda answer: answer, **more: Any) -> None:
    """Adds a row: the shim of each of these values."""
    row(shim, gives, lambda t: [view(operator.attrgetter(shim)(t)(value)) for value in values], **more)


def ask(
    shim: str, gives: list[Any], *places: "Place", args: Any = (), view: Call = lambda answer: answer, **more: Any
) -> None:
    """Adds a row: a question that the shim answers outside, and inside of each place."""
    row(shim, gives, lambda t: asked(lambda: view(operator.attrgetter(shim)(t)(*args)), *places), **more)


# --- where a question is asked ----------------------------------------------------------------------------------------


def asked(question: Callable[[], Any], *places: Place) -> list[Any]:
    """The answer outside, which must be the same after each place, and the answers inside of each."""
    found = [question()]
    for place in places:
        place(lambda: found.append(question()))
        assert question() == found[0]
    return found


def told(question: Callable[[], Any], place: Place) -> Any:
    """The answer inside of a place, to a question that can be asked there alone."""
    found: list[Any] = []
    place(lambda: found.append(question()))
    return found[0]


def within(*contexts: Any) -> Place:
    """The place inside of these contexts."""

    def look_inside(look: Callable[[], Any]) -> None:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            look()

    return look_inside


class Look(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, look: Any) -> torch.Tensor:
        ctx.look = look
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.look()
        return grad * 2, None


def backward(**options: Any) -> Place:
    """The place inside a backward call with these options."""
    return lambda look: Look.apply(vector(), look).sum().backward(**options)


def raised(call: Callable[[], Any]) -> str:
    """The text of the error that a call raises."""
    with pytest.raises((RuntimeError, ValueError), match=r".") as error:
        call()
    return str(error.value)


class FunctionMode(TorchFunctionMode):
    """Does nothing."""


class DispatchMode(TorchDispatchMode):
    """Counts operations, and shows each to `look`."""

    def __init__(self, look: Callable[[Any], None] = lambda func: None) -> None:
        super().__init__()
        self.look = look
        self.count = self.entered = 0

    def __enter__(self) -> Any:
        self.entered += 1
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.look(func)
        return func(*args, **(kwargs or {}))


# --- saved-tensor hooks -----------------------------------------------------------------------------------------------


@row("push_hooks pop_hooks", (["inner", "outer"], True))
def hooks_are_pushed_and_popped(t: Any) -> Any:
    """Pushed hooks see what autograd saves until they are popped, the innermost alone."""
    seen: list[str] = []
    x = vector()
    t.push_hooks(lambda _: seen.append("outer"), lambda _: torch.ones(3))
    t.push_hooks(lambda _: seen.append("inner"), lambda _: torch.full((3,), 7.0))
    y = x.sin()
    t.pop_hooks()
    z = x.cos()
    t.pop_hooks()
    x.tan()
    of_y, _ = (torch.autograd.grad(out.sum(), x)[0] for out in (y, z))
    return seen, torch.equal(of_y, torch.full((3,), 7.0).cos())


HOOKS = (lambda tensor: tensor, lambda packed: packed)


def on_another_thread(look: Callable[[], Any]) -> None:
    with saved_tensors_hooks(*HOOKS):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()


ask("ambient_hooks", [None, HOOKS, None], within(saved_tensors_hooks(*HOOKS)), on_another_thread)

# --- the running backward ---------------------------------------------------------------------------------------------

ask("in_backward", [False, True], backward())
ask("graph_is_kept", [False, True, False], backward(retain_graph=True), backward(retain_graph=False))
keeps = [True, False]
row("keeps_graph", keeps, lambda t: [told(t.keeps_graph, backward(retain_graph=kept)) for kept in keeps])
ask("current_node", [None, "LookBackward"], backward(), view=lambda node: node and node.name())
ask("exec_group", [None], gone={"torch._C._get_graph_exec_group": [None]})
ask("exec_group", [type(None), GraphExecGroup], within(GraphExecGroup()), view=type)


@row("graph_task_id", (-1, True))
def each_backward_call_has_a_number(t: Any) -> Any:
    """Each backward call has a number of its own; outside there is none."""
    outside, one, other = asked(t.graph_task_id, backward(), backward())
    return outside, len({outside, one, other}) == 3


@row("after_backward", ["node", "gradient", "after", "returned"])
def a_callback(t: Any) -> Any:
    """A callback runs once, when the running call has computed all gradients, before it returns."""
    log: list[str] = []
    x = vector()
    x.register_hook(lambda grad: log.append("gradient"))
    Look.apply(x, lambda: (log.append("node"), t.after_backward(lambda: log.append("after")))).sum().backward()
    return [*log, "returned"]


@row("sequence_number", (True, True))
def numbers_of_operations(t: Any) -> Any:
    """Equal for all tensors that one operation saves, larger for the next operation that is recorded."""
    seen: list[int] = []
    x = vector()
    with saved_tensors_hooks(lambda s: (seen.append(t.sequence_number()), s.detach())[1], lambda s: s):
        (x * (x + 1)).exp()
    return seen[0] == seen[1], seen[1] < seen[2]


@row("sequence_of", True)
def numbers_of_nodes(t: Any) -> Any:
    """Later nodes have larger numbers, and leaves the largest."""
    y = vector().sin()
    z = y.sin()
    leaf = y.grad_fn.next_functions[0][0]
    return t.sequence_of(y.grad_fn) < t.sequence_of(z.grad_fn) < t.sequence_of(leaf)


@row("upstream nodes_from", ([(True, False)], [], 2))
def what_backward_has_yet_to_reach(t: Any) -> Any:
    """In a backward the leaf that it leads to is upstream until it has been reached, another leaf is not."""
    leaf, other, seen = vector(), vector(), []
    middle = leaf.sin()

    def leaves() -> list[Any]:
        return [getattr(node, "variable", None) for node in t.upstream()]

    middle.register_hook(lambda _: seen.append(tuple(any(one is x for one in leaves()) for x in (leaf, other))))
    middle.exp().sum().backward()
    return seen, list(t.upstream()), len(list(t.nodes_from([None, middle.grad_fn])))


@row("graphs.roots_of_backward", [[], True])
def what_a_backward_began_with(t: Any) -> Any:
    """The nodes that running backward calls began with: of tensors and of edges; none outside of one."""
    x = vector()
    hooked = x * 2
    one, other = hooked.sum(), hooked.cos()

    def look_within(look: Callable[[], Any]) -> None:
        hooked.register_hook(lambda _: look())
        torch.autograd.backward([one, get_gradient_edge(other)], [None, torch.ones(3)])

    outside, inside = asked(t.graphs.roots_of_backward, look_within)
    return [outside, inside == [one.grad_fn, other.grad_fn]]


# --- what nodes have saved --------------------------------------------------------------------------------------------


@row("graphs.packed_of graphs.SavedTensor", (True, True, None), gone={f"{SAVED}.data": (True, False, None)})
def what_a_hook_packed(t: Any) -> Any:
    """What a pack hook returned is found again on the node; an object that cannot tell gives None."""
    token = object()
    with saved_tensors_hooks(lambda _: token, lambda _: torch.ones(3)):
        node = vector().exp().grad_fn
    saved = node._raw_saved_result
    return isinstance(saved, t.graphs.SavedTensor), t.graphs.packed_of(saved) is token, t.graphs.packed_of(object())


@row("graphs.unpack_hook_of", [HOOKS[1], None, None], gone={f"{SAVED}.unpack_hook": [None] * 3})
def the_hook_that_unpacks(t: Any) -> Any:
    """The unpack hook that a tensor was saved under is found again on the node; None where there was none."""
    with saved_tensors_hooks(torch.Tensor.detach, HOOKS[1]):
        hooked = vector().exp().grad_fn
    bare = vector().exp().grad_fn
    return [*map(t.graphs.unpack_hook_of, (hooked._raw_saved_result, bare._raw_saved_result, object()))]


@row("graphs.replace_saved", (True, True, {"three"}), gone={f"{SAVED}.data": (True, True, {"three"})})
def saved_tensors_are_replaced(t: Any) -> Any:
    """What `choose` picks is replaced and comes out of `unpack`; the rest, and what has hooks, stays as it is."""
    x, y, opened = vector(), vector() + 1, set()
    z = x * y

    def unpack(packed: Any) -> torch.Tensor:
        if not isinstance(packed, str):  # torch 2.11: looked at from within a hook, and left as it was
            return packed[0]
        opened.add(packed)
        return torch.full((3,), 3.0)

    for name in ("three", "other"):  # one pair of hooks, the first
        t.graphs.replace_saved(z.grad_fn, lambda s, name=name: name if s.data_ptr() == x.data_ptr() else None, unpack)
    of_x, of_y = torch.autograd.grad(z.sum(), [x, y])
    return torch.equal(of_x, y), torch.equal(of_y, torch.full((3,), 3.0)), opened


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * ctx.saved_tensors[0]


@row("graphs.replace_saved", [5.0] * 3, gone={f"{SAVED}.data": [5.0] * 3})
def saved_tensors_of_a_custom_function_are_replaced(t: Any) -> Any:
    """A custom Function's saved tensors are looked at too, and a node without any is no harm."""
    y = Square.apply(vector())
    for node in (y.grad_fn, (vector() + 1).grad_fn):
        t.graphs.replace_saved(node, lambda _: "five", lambda _: torch.full((3,), 5.0))
    return y.grad_fn.saved_tensors[0].tolist()


@row("graphs.in_function", [False, False, False, True])
def a_function_among_others(t: Any) -> Any:
    """Neither mode without gradients is a Function's forward."""
    found: list[bool] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            found.append(t.graphs.in_function())
            return x.clone()

    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with mode():
            found.append(t.graphs.in_function())
    Asks.apply(vector())
    return found


each("graphs.function_of", [Look, None], Look.apply(vector(), int).grad_fn, vector().sin().grad_fn)


@row("graphs.capture_stack graphs.say_stack", (True, True, False, 2))
def a_stack(t: Any) -> Any:
    """A captured stack is told as the lines of user code, innermost last, without torch's own."""

    def innermost() -> Any:
        return t.graphs.capture_stack()

    lines = t.graphs.say_stack(innermost())
    innermost_last = "return t.graphs.capture_stack()" in lines[-1] and "innermost" in lines[-2]
    return (
        innermost_last,
        "a_stack" in "".join(lines),
        "/torch/" in "".join(lines),
        len(t.graphs.say_stack(innermost(), last=2)),
    )


@row("graphs.caller graphs.ENGINE", ["user", "user", "_engine_run_backward"])
def who_calls_an_operation(t: Any) -> Any:
    """Seen from a mode: the code around it, or the engine's where a formula of PyTorch's own runs in backward."""
    seen: list[types.CodeType] = []
    here = str(Path(__file__).parent)
    look = DispatchMode(lambda func: seen.append(t.graphs.caller(here)) if func is aten.cos.default else None)
    elsewhere: dict[str, Any] = {}
    exec(compile("def user(x): return x.cos()", "/elsewhere/user.py", "exec"), elsewhere)
    x = vector()
    hooked = x * 2
    hooked.register_hook(elsewhere["user"])
    with look:
        elsewhere["user"](x.detach())
        hooked.sum().backward()
        x.sin().sum().backward()  # of which the formula has a cosine
    assert seen[2] is t.graphs.ENGINE
    return [code.co_name for code in seen]


# --- tensors ----------------------------------------------------------------------------------------------------------


@row("version_of_dict", [True] * 5, gone={"torch._C._dynamo.guards.dict_version": [True] * 5})
def dictionaries_that_change(t: Any) -> Any:
    """The version of a module's dictionary is another one after each change, however it is made."""
    module, found = nn.Linear(2, 2), []
    own: Any = module.__dict__
    changes = (
        lambda: setattr(module, "scale", 1),
        lambda: setattr(module, "scale", 2),
        lambda: module.train(False),
        lambda: own.update(scale=3),
        lambda: delattr(module, "scale"),
    )
    for change in changes:
        before = t.version_of_dict(own)
        change()
        found.append(t.version_of_dict(own) != before)
    return found


class Sub(torch.Tensor):
    """A tensor subclass."""


class Shown(torch.Tensor):
    """A tensor without memory that answers for itself."""

    __torch_function__ = _torch.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        """Answers with nothing."""
        return torch.empty(0)


def fake(*shape: int) -> Any:
    with FakeTensorMode():
        return torch.ones(*shape)


def d_tensor(module: str) -> torch.Tensor:
    """A tensor of a class named `DTensor`, of torch's or of somebody's own."""
    return torch.ones(2).as_subclass(type("DTensor", (torch.Tensor,), {"__module__": module}))


SUB, WEIGHT, MEMORY = torch.ones(3).as_subclass(Sub), nn.Parameter(torch.ones(3, 4)), torch.ones(2, 3)
STATE = torch.default_generator.get_state()
OTHER = torch.cat([STATE[:-1], STATE[-1:] ^ 1])
# Fake tensors are plain; a wrapper of another tensor is not, nor is anything else.
each("is_plain", [True, True, True, False, False], vector(), WEIGHT, fake(3), SUB, 3.0)
each("is_plain_kind", [True, False], torch.Tensor, Sub)
# A parameter is one also if its data is of a subclass; a plain tensor, with grad or not, is none.
each("is_parameter", [True] * 3, WEIGHT, nn.Parameter(SUB), nn.Parameter(torch.ones(3), requires_grad=False))
each("is_parameter", [False] * 4, torch.ones(3), vector(), SUB, WEIGHT.detach())
# A parameter and its views lead to the parameter; results, plain tensors and views of those do not.
each("parameter_of", [True] * 3, WEIGHT, WEIGHT.mT, WEIGHT[1:], view=lambda parameter: parameter is WEIGHT)
each("parameter_of", [None] * 4, torch.ones(3), vector(), WEIGHT * 2, vector()[1:])
# Views and detached tensors share the identity of their memory, copies do not; sparse ones have none.
each(
    "storage_id", [True] * 3, MEMORY, MEMORY[1], MEMORY.mT.detach(), view=lambda i: i == _torch.storage_id(MEMORY) != 0
)
each("storage_id", [False], MEMORY.clone(), view=lambda i: i == _torch.storage_id(MEMORY))
each("storage_id", [0], torch.eye(2).to_sparse())
EMPTIED = torch.ones(3)
EMPTIED.untyped_storage().resize_(0)
each("is_emptied", [False, True, False], torch.ones(3), EMPTIED, torch.eye(2).to_sparse())
row("same_bytes", [True, False, False], lambda t: [t.same_bytes(STATE, x) for x in (STATE.clone(), OTHER, STATE[:-1])])
row("same_bytes", True, lambda t: t._differ(STATE.data_ptr(), OTHER.data_ptr(), 5056))  # Windows has memcmp elsewhere
row("bytes_of write_bytes", True, lambda t: torch.equal(t.write_bytes(OTHER.clone(), t.bytes_of(STATE)), STATE))
row("holds_bytes", [True, False, False], lambda t: [t.holds_bytes(x, bytes(STATE)) for x in (STATE, OTHER, STATE[:-1])])
# Containers are what pytrees take apart, and nothing else.
each("is_container", [True] * 5, (1,), [], {}, OrderedDict(), Pair(1, 2))
each("node_of", [None] * 3, torch.ones(1), "text", {1})
each("is_container", [False] * 5, torch.ones(1), "text", None, {1}, object())
each("is_operator", [True, False], aten.mm.default, len)
each("fakes.is_sharded", [False, True], d_tensor("mine"), d_tensor("torch.distributed.tensor"))
each("fakes.is_wrapper", [False], torch.ones(2))
CLONES = [[[1, 1], [2, 2, 2]]]
ONES_AND_TWOS = [torch.ones(2), torch.full((3,), 2.0)]
each(
    "clone_each",
    CLONES,
    ONES_AND_TWOS,
    view=lambda made: [t.tolist() for t in made],
    gone={"torch._foreach_clone": CLONES},
)


@row("copy_each", ([[1, 1], [2, 2, 2]], [0, 0]))
def copies(t: Any) -> Any:
    """Each tensor of one list takes the values of that of the other, and keeps its version where that is asked for."""
    targets = [torch.zeros(2), torch.zeros(3)]
    with copies_as_on_cuda(), t.versions_kept():
        t.copy_each(targets, [torch.ones(2), torch.full((3,), 2.0)])
    return [target.tolist() for target in targets], [target._version for target in targets]


@row("set_grad_enabled", [False, True])
def grad_mode(t: Any) -> Any:
    """Grad mode is switched on this thread."""
    return [(t.set_grad_enabled(on), torch.is_grad_enabled())[1] for on in (False, True)]


@row("version_of", [0, 1, 1])
def versions(t: Any) -> Any:
    """The number of changes in place that a tensor and its views have seen."""
    tensor = torch.zeros(3)
    return [t.version_of(tensor), t.version_of(tensor[0].add_(1)), t.version_of(tensor[1:])]


@row("versions_kept", ([0, 0], [[1, 1], [1, 1]], False, 1))
def versions_do_not_rise(t: Any) -> Any:
    """What is written within keeps its version, and is not recorded for backward."""
    tensor, other, weight = torch.zeros(2), torch.zeros(2), torch.ones(2, requires_grad=True)
    with t.versions_kept():
        tensor[:1].add_(weight[:1])
        torch._foreach_copy_([tensor, other], [weight, weight])
        kept = [tensor._version, other._version]
    return kept, [tensor.tolist(), other.tolist()], tensor.requires_grad, tensor.add_(1)._version


@row("tensors.versions_of tensors.set_versions", ([0], 0))
def versions_are_put_back(t: Any) -> Any:
    """A tensor whose contents were put back is of the version that it had, so what a graph saved of it is valid."""
    weight, buffer = vector(), torch.ones(3)
    with torch.inference_mode():
        uncounted = torch.ones(3)
    loss = (weight * buffer).sum()
    found = t.tensors.versions_of([buffer, uncounted])
    buffer.add_(1).sub_(1)
    t.tensors.set_versions(found)
    loss.backward()
    return [version for _, version in found], buffer._version


@row("assert_on_device", "out of step")
def what_is_false_raises(t: Any) -> Any:
    """Nothing is said of a tensor that is true; one that is false raises, on the CPU at once, with the text."""
    t.assert_on_device(torch.tensor(True), "never")
    return raised(lambda: t.assert_on_device(torch.tensor(False), "out of step")).splitlines()[0]


@row("written_by", [True, True, True, 0, 0])
def what_an_operation_writes_to(t: Any) -> Any:
    """The arguments that the schema marks as written, by position and by name; none of what has no schema."""
    x, y = torch.zeros(2), torch.ones(2)
    return [
        [s is x for s in t.written_by(aten.add_.Tensor, (x, y), {})] == [True],
        [s is y for s in t.written_by(aten.add.out, (x, x), {"out": y})] == [True],
        t.written_by(aten._foreach_add_.List, ([x], [y]), {})[0][0] is x,
        len(t.written_by(aten.add.Tensor, (x, y), {})),
        len(t.written_by(len, (x,), {})),
    ]


@row("without_memory no_torch_function", (Shown, (2, 3), (1, 2), torch.float16, "cpu", False, 0, (0,)))
def a_tensor_without_memory(t: Any) -> Any:
    """It has the layout that is asked for and no address, and functions reach its own dispatch."""
    made = t.without_memory(Shown, (2, 3), (1, 2), torch.float16, torch.device("cpu"))
    layout = (type(made), made.shape, made.stride(), made.dtype, made.device.type, made.requires_grad)
    return *layout, torch.Tensor.data_ptr(made), made.sin().shape


# --- ambient modes, autocast and settings -----------------------------------------------------------------------------

BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}
ORDER = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]


def changes() -> Iterator[Any]:
    """What chooses a kernel, each in another way."""
    yield torch.autocast(**BF16)
    yield torch.autocast("cpu", torch.float16)
    yield torch.autocast(**BF16, cache_enabled=False)
    yield sdpa_kernel(SDPBackend.MATH)
    yield sdpa_kernel(ORDER)
    yield sdpa_kernel(ORDER[::-1], set_priority=True)
    yield torch.backends.cudnn.flags(enabled=False)
    yield FunctionMode()
    yield DispatchMode()


@row("settings", [0, 9])
def settings_differ(t: Any) -> Any:
    """Inside each context the settings differ from those outside, and are the same again afterwards."""
    outside, *inside = asked(t.settings, *map(within, changes()))
    return [inside.count(outside), len(inside)]


# A setting that torch lacks is left out: the others are read and written. The precision of float32 is nine of them.
SETTINGS = (
    "flash_sdp_enabled",
    "cudnn_sdp_enabled",
    "overrideable_sdp_enabled",
    "sdp_priority_order",
    "mkldnn_enabled",
)
row(
    "settings set_flags modes.call",
    0,
    lambda t: (t.set_flags(t.settings()), len(_torch.settings()) - len(t.settings()))[1],
    gone={
        **{f"torch._C._get_{name}": 1 for name in SETTINGS},
        "torch._C._set_cudnn_enabled": 1,
        "torch._C._get_fp32_precision_getter": 9,
        "operator.call": 0,
    },
)


@row("settings set_flags", (True, True), gone={"torch._C._get_fp32_precision_getter": (True, True)})
def precision_is_read_and_written(t: Any) -> Any:
    """Also where torch has one interface to the precision of float32, that one is read and written."""
    default, before = t.settings(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        seen = t.settings() != default
        t.set_flags(default)
        return seen, torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(before)


@row("settings set_flags split_settings", (True, True, True, True))
def settings_are_put_back(t: Any) -> Any:
    """Flags read in one place are put in force in another, and split from the modes that were read with them."""
    outside = t.settings()
    with torch.autocast(**BF16), FunctionMode() as function, DispatchMode() as dispatch:
        flags, *modes = t.split_settings(t.settings())
    t.set_flags(flags)
    try:
        in_force = torch.is_autocast_enabled("cpu") and t.settings() == list(flags)
    finally:
        t.set_flags(outside)
    alone = t.split_settings(outside) == (outside, (), ())
    return modes == [(function,), (dispatch,)], alone, in_force, t.settings() == outside


@row("KERNEL_ORDERS", True)
def preferred_kernels_are_read_again(t: Any) -> Any:
    """What the process prefers now is taken into settings that were read before; what else has changed is not."""
    taken = t.settings()
    with sdpa_kernel(ORDER, set_priority=True), torch.autocast(**BF16):
        wanted = torch._C._get_sdp_priority_order()
        for place, get in t.KERNEL_ORDERS:
            taken[place] = get()
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(wanted)
    try:
        return taken == t.settings()
    finally:
        torch._C._set_sdp_priority_order(before)


@row("function_modes set_function_modes", [[], "ab", "b", "", "ab", []])
def function_modes(t: Any) -> Any:
    """Lists the modes, outermost first, and makes others the active ones without entering or leaving any."""
    found: list[Any] = [[*t.function_modes()]]
    with FunctionMode() as a, FunctionMode() as b:
        name = {a: "a", b: "b"}
        found.append("".join(map(name.__getitem__, t.function_modes())))
        for modes in ((b,), (), (a, b)):
            t.set_function_modes(modes)
            found.append("".join(map(name.__getitem__, t.function_modes())))
    return [*found, [*t.function_modes()]]


@row("push_dispatch_mode pop_dispatch_mode modes.without_modes", (2, 0))
def dispatch_modes(t: Any) -> Any:
    """A mode pushed sees operations until it is popped, and is neither entered nor left."""
    mode = DispatchMode()
    torch.ones(3).sin()
    t.push_dispatch_mode(mode)
    torch.ones(3).sin()
    with t.modes.without_modes():
        assert torch.ones(2).sum().item() == 2
    t.pop_dispatch_mode()
    torch.ones(3).sin()
    return mode.count, mode.entered


ask("autocast_on", [False, True], within(torch.autocast(**BF16)), args=["cpu"])
ask("autocast_on", [False, False], within(torch.autocast(**BF16)), args=["meta"])  # which has no autocast
ask("autocast_dtype", ["", "bfloat16"], within(torch.autocast(**BF16)), args=["", "meta", "cpu"])
VMAP, DUAL = lambda look: torch.func.vmap(lambda x: (x, look())[0])(torch.ones(2)), within(forward_ad.dual_level())
ask("modes.transforming", [False, True, True], VMAP, DUAL)
ask("modes.transform_level", [None, 1], VMAP)
ask("modes.dual_level", [-1, 0], DUAL)
ask("modes.overriding", [True, False], within(torch._C.DisableTorchFunctionSubclass()))


@row("modes.without_functions", (2, 1))
def function_modes_are_not_asked(t: Any) -> Any:
    """In the context a function mode sees no call, and sees them again afterwards."""
    seen: list[int] = []

    class Counting(FunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(1)
            return func(*args, **(kwargs or {}))

    with Counting():
        torch.ones(2)
        with t.modes.without_functions():
            total = torch.ones(2).sum().item()
        torch.ones(2)
    return total, len(seen) - 1


# --- compiled and traced code -----------------------------------------------------------------------------------------


@row("modes.unseen modes.compiler_at_work", (None, 1, [False, False, False]))
def what_the_compiler_does_not_see(t: Any) -> Any:
    """`unseen` calls a function outside of what is compiled, and as it is where nothing is."""
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_dynamo_compiling())
        return x + len(seen)

    at_work, first = t.modes.compiler_at_work(), t.modes.unseen(look, torch.zeros(()))
    compiled = torch.compile(lambda x: t.modes.unseen(look, x.sin()).cos(), backend="eager")
    for _ in range(2):
        compiled(torch.zeros(()))
    return at_work, first, seen


def while_compiling(look: Callable[[], Any]) -> None:
    torch.compile(lambda x: x + 1, backend=lambda graph, inputs: (graph, look())[0])(torch.ones(2))


def while_a_graph_is_made(look: Callable[[], Any]) -> None:
    make_fx(lambda x: (look(), x + 1)[1])(torch.ones(2))


ask("being_traced", [False, True], while_compiling)
ask("fakes.traced", [False, True, True], while_a_graph_is_made, within(FakeTensorMode()))

CONFIG = "torch._functorch.config"


@row("compiler.activation_memory_budget", [1.0, 0.25], gone={CONFIG: None, f"{CONFIG}.activation_memory_budget": None})
def the_budget_of_compiled_code(t: Any) -> Any:
    """Inside the context the setting has the value, afterwards its own again; where there is none, None says so."""
    context = t.compiler.activation_memory_budget(0.25)
    if context is None:
        return None
    config: Any = importlib.import_module(CONFIG)
    return asked(lambda: config.activation_memory_budget, within(context))


# --- devices ----------------------------------------------------------------------------------------------------------


def yes() -> bool:
    return True


def no() -> bool:
    return False


def npu(**module: Any) -> dict[str, Any]:
    """An accelerator that torch does not know, with this module."""
    return {ACCELERATOR: "npu", "torch.npu": types.SimpleNamespace(**module)}


STARTED, GENERATORS = "torch.cuda.is_initialized", (torch.Generator(),)
BUILT_FOR = getattr(torch.accelerator.current_accelerator(), "type", None)  # known without asking
ask("device_generators", [()], view=tuple, acts={STARTED: no}, gone={"torch.xpu": [()]})
ask("device_generators", [GENERATORS], acts={STARTED: yes, "torch.cuda.default_generators": GENERATORS})
row("ACCELERATOR", BUILT_FOR, lambda t: t.ACCELERATOR)
ask("accelerator", ["cuda"], acts={ACCELERATOR: "cuda", "torch.accelerator.is_available": yes})
ask("accelerator", [None], acts={ACCELERATOR: "cuda", "torch.accelerator.is_available": no})
# An accelerator is in use once its module says so, or has nothing to say; without one nothing is.
ask("in_use", [False], acts={ACCELERATOR: None})
ask("in_use", [False], acts=npu(is_initialized=no))
ask("in_use", [True], acts=npu())
ask("device_states", [[]])
STATES = {0: torch.zeros(2), 1: torch.ones(2)}


@row(
    "device_states set_device_state",
    [[[0, 0], [1, 1]], [[0, 0], [7, 7]]],
    acts=npu(device_count=lambda: 2, get_rng_state=STATES.get, set_rng_state=lambda s, i: STATES.update({i: s})),
)
def states_of_devices(t: Any) -> Any:
    """One state per device of an accelerator without generators, each put back alone; none for CUDA and XPU."""
    STATES.update({0: torch.zeros(2), 1: torch.ones(2)})
    before = [state.tolist() for state in t.device_states()]
    t.set_device_state(1, torch.full((2,), 7.0))
    return [before, [state.tolist() for state in t.device_states()]]


class Stream:
    """A stream of an acted machine."""

    def __init__(self, device_index: int, name: str, waits: list[Any]) -> None:
        self.device_index, self.name, self.waits = device_index, name, waits

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(self.name + other.name)


@row("streams_of stream_for on_streams wait_for", (["ca", "db", "ac", "bd"], ["bd"], ["b"], ()))
def streams(t: Any) -> Any:
    """Work is put on streams of several devices, waits both ways where they are others, and all is as before."""
    waits: list[str] = []
    recorded: list[str] = []
    a, b, c, d = (Stream(i, name, waits) for i, name in ((0, "a"), (1, "b"), (0, "c"), (1, "d")))
    present, here = {0: a, 1: b}, [0]
    far = types.SimpleNamespace(device=torch.device("meta", 1), record_stream=lambda s: recorded.append(s.name))
    tensors: Any = [torch.ones(2), torch.ones(2, device="meta"), far]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(t.devices, "ACCELERATOR", "meta")
        patch.setattr(t.devices, "_module", lambda: types.SimpleNamespace(current_stream=None))
        patch.setattr(t.devices, "_present_device", lambda: here[0])
        patch.setattr(t.devices, "_present_stream", lambda index: present[index or 0])
        patch.setattr(torch.accelerator, "device_count", lambda: 2)
        patch.setattr(torch.accelerator, "set_stream", lambda s: present.update({s.device_index: s}))
        patch.setattr(torch.accelerator, "set_device_index", lambda index: here.__setitem__(0, index))
        assert (t.streams_of(tensors), t.stream_for(tensors[0]), t.stream_for(far)) == ((b, a), None, b)
        with t.on_streams((b, a)):
            assert not waits
        with pytest.raises(KeyError), t.on_streams((c, d)):
            assert (present, here) == ({0: c, 1: d}, [1])
            raise KeyError
        assert (present, here) == ({0: a, 1: b}, [0])
        t.wait_for(b, far)
        switched = [*waits]
        t.wait_for(d, far)
        patch.setattr(t.devices, "_module", types.SimpleNamespace)
        return switched, waits[4:], recorded, t.streams_of(tensors)


@row("modes.ends_silently", [True, True, True, False])
def modes_that_may_be_entered_again(t: Any) -> Any:
    """A mode may be, whose class is torch's or leaves it to torch what is done at its end."""

    class Plain(TorchDispatchMode):
        pass

    class Writes(TorchDispatchMode):
        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)

    plain, device = Plain(), torch.device("cpu")
    with device:
        entered = t.modes.function_modes()
    return [*map(t.modes.ends_silently, (plain, TorchFunctionMode(), entered[-1], Writes()))]


@row("modes.LightDispatchMode", "False")
def a_mode_that_loads_no_compiler(t: Any) -> Any:
    """The first use of such a mode in a process does not import the compiler."""
    lines = (
        "import sys, torch",
        "from torch_recompute._torch.modes import LightDispatchMode",
        "class Mode(LightDispatchMode):",
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None): return func(*args, **(kwargs or {}))",
        "with Mode(): torch.ones(2) + 1",
        "print('torch._dynamo' in sys.modules)",
    )
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True).stdout.strip()


@row("modes.watch_calls modes.unwatch_calls", [["Linear"], ["Linear"]])
def calls_of_modules(t: Any) -> Any:
    """A watcher sees each module that is called, before its forward, until it is taken away."""
    seen: list[str] = []
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    t.modes.watch_calls("test", lambda module, args: seen.append(type(module).__name__))
    layer(x)
    first = [*seen]
    t.modes.unwatch_calls("test")
    layer(x)
    return [first, seen]


@row("devices.generator_id", [True, True, False])
def generators_have_an_identity(t: Any) -> Any:
    """One generator has one identity, also as an operation gives it to a dispatch mode; two have two."""
    mine, other, seen = torch.Generator(), torch.Generator(), []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((kwargs or {}).get("generator"))
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.rand(2, generator=mine)
    same = t.devices.generator_id
    return [same(mine) == same(mine), same(mine) == same(seen[-1]), same(mine) == same(other)]


@row("devices.captured_state devices.set_captured_state", [(-5, 8), (-5, 20)])
def a_generator_in_a_capture(t: Any) -> Any:
    """Seed and offset are read from a state of sixteen bytes, and written back as one."""

    class Generator:
        state = torch.tensor([-5, 8], dtype=torch.int64).view(torch.uint8)

        def get_state(self) -> torch.Tensor:
            return self.state

        def set_state(self, state: torch.Tensor) -> None:
            assert (state.dtype, state.device.type, state.numel()) == (torch.uint8, "cpu", 16)
            self.state = state

    generator: Any = Generator()
    before = t.devices.captured_state(generator)
    with torch.device("meta"):
        t.devices.set_captured_state(generator, (-5, 20))
    return [before, t.devices.captured_state(generator)]


@row("devices.capturing devices.captured_state", [(False, 0), (True, 0), (True, True)], gpu=True)
def capturing(t: Any) -> Any:
    """Inside a capture, and only there, work is captured; the offset in it begins at 0."""
    torch.rand(4, device="cuda")
    found: list[Any] = [(t.devices.capturing(), 0)]
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        found.append((t.devices.capturing(), t.devices.captured_state(generator)[1]))
        torch.rand(4, device="cuda")
        found.append((t.devices.capturing(), t.devices.captured_state(generator)[1] > 0))
    assert not t.devices.capturing()
    return found


# By default a convolution may be computed in TF32 and a product not, also as torch says it without precisions.
PRECISIONS = {"torch._C._get_fp32_precision_getter": [True, False]}
each("cuda.tf32", [True, False], "aten.convolution.default", "aten.mm.default", gone=PRECISIONS)
# The order of attention's kernels: the user's counts, else torch's, with cuDNN first where torch puts it there.
BY_ORDER, ON_AMPERE = ["math", "flash"], ["flash", "efficient", "math", "cudnn"]
ask("cuda.enabled_backends", [ON_AMPERE], args=[(8, 0)])
ask("cuda.enabled_backends", [["cudnn", *ON_AMPERE[:3]], BY_ORDER], within(sdpa_kernel(ORDER, True)), args=[(9, 0)])


# --- memory held weakly -----------------------------------------------------------------------------------------------


@row(
    "storages.Memory",
    (True, True, None, "cpu"),
    gone={"torch.UntypedStorage._new_with_weak_ptr": (False, False, None, "cpu")},  # so it is copied once more
)
def memory_is_found_again_while_it_is_alive(t: Any) -> Any:
    """Weakly held memory is the same memory as long as a tensor has it, and nothing afterwards."""
    tensor = torch.arange(6.0)
    memory = t.storages.Memory(tensor[2:])
    again = memory.flat(6, torch.float32)
    same = again is not None and again.data_ptr() == tensor.data_ptr() and torch.equal(again, tensor)
    del tensor
    held = memory.flat(6, torch.float32) is not None
    del again
    gone = memory.flat(6, torch.float32)
    with FakeTensorMode():
        fake = torch.empty(6)
    again = t.storages.Memory(fake).flat(6, torch.float32)
    return same, held, gone, (fake if again is None else again).device.type


row("storages.profiling", [False, True], lambda t: asked(t.storages.profiling, t.storages.cpu_allocations))


@row("storages.note_allocations storages.noted_allocations", (None, [64, -64], None, True))
def allocations_are_noted_until_they_are_asked_for(t: Any) -> Any:
    """What is allocated in between, once; profilers see operations again afterwards, and theirs is never ended."""
    before = t.storages.noted_allocations()
    t.storages.note_allocations()
    torch.empty(16)
    between = t.storages.noted_allocations()
    with profile(acc_events=True) as found:
        after = t.storages.noted_allocations()
        torch.empty(16)
    return before, between, after, "aten::empty" in [event.key for event in found.key_averages()]


each("storages.rise", [(0, 0), (12, 8), (8, 8)], [], [8, 4, -4], [-16, 8, -16])


@row("fakes.lay", ([[1.0, 3.0], [2.0, 4.0]], (2, 2), 0))
def a_layout_over_memory(t: Any) -> Any:
    """A tensor is laid over memory as it is told, and memory that was discarded stays so."""
    memory = torch.arange(6.0).untyped_storage()
    laid = t.fakes.lay(memory, 1, ((2, 2), (1, 2)), torch.float32, "cpu").tolist()
    memory.resize_(0)
    return laid, t.fakes.lay(memory, 1, ((2, 2), (1, 2)), torch.float32, "cpu").shape, memory.nbytes()


each("fakes.host_of", ["cpu"], torch.ones(1), view=str)


@row("fakes.fakes_quiet", (False, True, False))
def failures_of_fakes_are_not_logged(t: Any) -> Any:
    """Inside, what fails on fake tensors is not logged and their address is no warning; before and after it is."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(1)
    with t.fakes.fakes_quiet():
        torch._C.TensorBase.data_ptr(fake)
        inside = log.disabled
    return False, inside, log.disabled


@row("graphs.gradient_hooks", (0, 1))
def hooks_of_a_gradient(t: Any) -> Any:
    """The hooks that run after a gradient was accumulated."""
    weight = vector()
    before = len(t.graphs.gradient_hooks(weight))
    weight.register_post_accumulate_grad_hook(lambda _: None)
    return before, len(t.graphs.gradient_hooks(weight))


@row("fakes.resizes", (3, 1, 32, True))
def resizes_of_storages_are_told(t: Any) -> Any:
    """Each block hears of a storage's own resize, one inside another too, and torch's method is back afterwards."""
    outer, inner, storage = list[int](), list[int](), torch.ones(2).untyped_storage()
    before = vars(torch.UntypedStorage).get("resize_")  # a library may have put its own there
    with t.fakes.resizes(lambda: outer.append(1)):
        storage.resize_(0)
        with t.fakes.resizes(lambda: inner.append(1)):
            storage.resize_(16)
            torch.ones(3).resize_(5)  # an operation, which modes are shown
        torch.ones(2).untyped_storage().resize_(4)
    storage.resize_(32)
    return len(outer), len(inner), storage.nbytes(), vars(torch.UntypedStorage).get("resize_") is before


# --- fake tensors -----------------------------------------------------------------------------------------------------

META = torch.ones(2, device="meta")
each("storages.is_zero_tensor", [True, False], torch._efficientzerotensor((2,)), MEMORY)
each("storages.is_fake", [True, True, False, False], fake(2), FakeTensorMode().from_tensor(MEMORY), MEMORY, META)
each("fakes.writes", [True, False, False], aten.add_.Tensor, aten.add.Tensor, len)
each("fakes.taken_by", [["self", "mat1", "mat2"]], aten.addmm.default, view=lambda names: names[:3])
each("fakes.returned", [["values", "indices"], [""]], aten.sort.default, aten.mm.default)
each("fakes.schema_of", ["aten::mm"], aten.mm.default, view=lambda schema: schema.name)
each("fakes.device_of", ["cpu", "meta"], fake(2), META, view=str)


@row("fakes.parameter", [(True, True, True, "FakeTensor"), (True, False, True, "Parameter")])
def a_tensor_becomes_a_parameter(t: Any) -> Any:
    """A fake is a parameter itself afterwards; of a real tensor one is made over its memory."""
    found: list[Any] = []
    for tensor, trained in ((fake(2), True), (torch.ones(2), False)):
        made = t.fakes.parameter(tensor, trained)
        leaf = isinstance(made, torch.nn.Parameter) and made.is_leaf
        found.append((leaf, made.requires_grad, t.storage_id(made) == t.storage_id(tensor), type(made).__name__))
    return found


row("fakes.fake_like", FakeTensor, lambda t: type(t.fakes.fake_like(FakeTensorMode(), torch.ones(2))))


@row("fakes.remade_of", (True, [2.0, 2.0, 2.0]))
def a_tensor_is_put_together_of_others(t: Any) -> Any:
    """A jagged tensor over doubled values has the lengths of the one that it was made of."""
    jagged = torch.nested.nested_tensor_from_jagged(torch.ones(3), torch.tensor([0, 1, 3]))
    made = t.fakes.remade_of(jagged, lambda part: part * 2 if part.is_floating_point() else part)
    return made.shape == jagged.shape, made.values().tolist()


@row("fakes.on_fakes", [0, 1])
def results_of_fakes_are_kept_where_they_are_asked_for_again(t: Any) -> Any:
    """What the mode keeps has one result more after an operation that may run again, none after another one."""
    mode, found = FakeTensorMode(), list[int]()
    with mode:
        x = torch.empty(3, 1009)  # of which no other test has the sine
    for again in (False, True):
        before = len(FakeTensorMode.cache)
        t.fakes.on_fakes(mode, aten.sin.default, (x,), {}, again=again)
        found.append(len(FakeTensorMode.cache) - before)
    return found


@row("fakes.on_fakes fakes.over", (FakeTensor, (4, 4), 0))
def operations_on_fakes_need_no_active_mode(t: Any) -> Any:
    """`on_fakes` answers without values, and a tensor laid over a storage leaves its size alone."""
    mode = t.fakes.FakeTensorMode()
    x = mode.from_tensor(torch.ones(4, 4))
    y = t.fakes.on_fakes(mode, aten.mm.default, (x, x), {})
    y.untyped_storage().resize_(0)
    with mode:
        view = t.fakes.over(y.untyped_storage(), 0, y, "cpu")
    return type(y), y.shape, view.untyped_storage().nbytes()


@row("fakes.converted", (True, True, torch.float64, "weight"))
def fake_parameters_are_converted_to_what_they_are(t: Any) -> Any:
    """A module keeps its parameters and the kind of its buffers; another type is refused; real modules are torch's."""
    real, method = nn.Linear(2, 2), nn.Module._apply
    with t.fakes.FakeTensorMode():
        faked = nn.BatchNorm1d(2)
    with t.fakes.converted(lambda name, *_: ValueError(name)):
        weight = faked.weight
        kept = faked.float().weight is weight
        dtype, refused = real.double().weight.dtype, raised(faked.double)
    assert nn.Module._apply is method
    return kept, faked.running_mean is not None, dtype, refused


@row("fakes.FakeMaker", [True] * 6)
def fakes_are_made_as_torch_makes_them(t: Any) -> Any:
    """Each of a mode and a device has the attributes and the memory that `FakeTensor` gives, and no address."""
    mode, device = t.fakes.FakeTensorMode(), torch.device("cpu")
    mode._allow_unsafe_data_ptr_access = False
    make = t.fakes.FakeMaker(mode)
    found: list[bool] = []
    for meta in (torch.empty(2, 3, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")):
        wanted, made = FakeTensor(mode, meta, device), make(meta, device)
        found.append((type(made), vars(made)) == (FakeTensor, vars(wanted)))
        found.append((made.shape, made.dtype, made.device) == (wanted.shape, wanted.dtype, (made + 1).device))
        found.append(made.untyped_storage() is meta.untyped_storage() and made.device == device)
        for one in (wanted, made):
            assert "Cannot access data pointer" in raised(one.data_ptr)
    return found


@row("fakes.answer_for", ([2.0] * 3, 7, 0, [1.0]))
def fakes_of_one_mode_can_be_answered_for(t: Any) -> Any:
    """What needs the memory of a fake goes to who answers for its mode; those of other modes refuse as before."""

    class Twos:
        def values_of(self, fake: torch.Tensor, what: str) -> torch.Tensor:
            return torch.full(fake.shape, 2.0)

        def address_of(self, fake: torch.Tensor) -> int:
            return 7

    answers, mode, other = Twos(), t.fakes.FakeTensorMode(), fake(3)
    t.fakes.answer_for(mode, answers)
    with mode:
        answered = torch.empty(3)
    assert raised(other.numpy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once in a process PyTorch says that it will be an error
        address = other.data_ptr()
    return answered.numpy().tolist(), answered.data_ptr(), address, torch.ones(1).numpy().tolist()


@row("fakes.flex_uncompiled", ([True, True], True))
def flex_attention_does_not_compile_itself(t: Any) -> Any:
    """Inside it calls its operator as it is, and afterwards what it did before; it may not have been imported."""
    setting = lambda: flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG  # noqa: E731
    outside, inside = asked(setting, within(t.fakes.flex_uncompiled()))
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, flex_attention.__name__)
        untouched = asked(setting, within(t.fakes.flex_uncompiled())) == [outside] * 2
    return [not outside, inside], untouched


# --- checkpoints ------------------------------------------------------------------------------------------------------

# PyTorch's two context managers are read; outside of them, and for None, they say nothing.
EARLY, DEBUG = "checkpoints.early_stop_override", "checkpoints.debug_override"
ask(EARLY, [None, True, False], *(within(set_checkpoint_early_stop(value)) for value in (True, False)))
ask(DEBUG, [None, True, False, None], *(within(set_checkpoint_debug_enabled(value)) for value in (True, False, None)))


@row("checkpoints.in_checkpoint", [False, True, False, False])
def a_checkpoint_around_is_known(t: Any) -> Any:
    """Only by hooks of its own: one that is reentrant has none, nor have other hooks to do with it."""
    seen: list[bool] = [t.checkpoints.in_checkpoint()]

    def ask(x: torch.Tensor) -> torch.Tensor:
        seen.append(t.checkpoints.in_checkpoint())
        return x

    for reentrant in (False, True):
        torch.utils.checkpoint.checkpoint(ask, vector(), use_reentrant=reentrant)
    with torch.autograd.graph.save_on_cpu():
        ask(vector())
    return seen


@row(
    "checkpoints.checkpoints_run_by",
    [{"use_reentrant": False}] * 2,
    gone={"torch.utils.checkpoint.checkpoint.__wrapped__": []},
)
def checkpoints_are_run_by_another(t: Any) -> Any:
    """Torch's checkpoint is what runs in its place, by whatever name it is called, and itself again after an error."""
    seen: list[Any] = []

    def run(original: Any, function: Any, *args: Any, **options: Any) -> Any:
        seen.append(options)
        return original(function, *args, **options)

    here = torch.utils.checkpoint.checkpoint
    for _ in range(2):
        with contextlib.suppress(KeyError), t.checkpoints.checkpoints_run_by(run):
            x = vector()
            here(torch.sin, x, use_reentrant=False).sum().backward()
            assert torch.equal(x.grad, x.cos())
            raise KeyError
    here(torch.sin, vector(), use_reentrant=False)
    return seen


@row("checkpoints.functions_run_by", ([Square], [1.0, 4.0, 9.0], True))
def functions_are_run_by_another(t: Any) -> Any:
    """`apply` of a Function is what runs in its place, with the class, and torch's own again afterwards."""
    before, seen = vars(torch.autograd.Function)["apply"], []
    with t.checkpoints.functions_run_by(lambda original, kind, *args: (seen.append(kind), original(*args))[1]):
        result = Square.apply(vector())
    return seen, result.tolist(), vars(torch.autograd.Function)["apply"] is before


class Closed(torch.autograd.Function):
    """Runs its body without a graph, as a checkpoint of somebody's own does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.sin()
        with torch.no_grad():
            assert not y.cos().requires_grad
        return y


row("checkpoints.forward_with_grad", True, lambda t: t.checkpoints.forward_with_grad(Closed, vector()).requires_grad)


# --- the laws ---------------------------------------------------------------------------------------------------------

IDS = [f"{row.shims} {number}" for number, row in enumerate(ROWS)]
GPU = [(pytest.mark.gpu,) if row.gpu else () for row in ROWS]
THERE = [pytest.param(row, id=name, marks=marks) for row, name, marks in zip(ROWS, IDS, GPU, strict=True)]
GONE = [pytest.param(row, gone, id=f"{name}-{gone}") for row, name in zip(ROWS, IDS, strict=True) for gone in row.gone]


def shims() -> Any:
    """Returns `_torch` with the files in it, imported on torch as it is now where they are not yet."""
    for name in MODULES:
        importlib.import_module(f"torch_recompute._torch.{name}")
    return sys.modules["torch_recompute._torch"]


def act(row: Row, patch: pytest.MonkeyPatch) -> None:
    for name, value in dict(row.acts).items():
        patch.setattr(name, value, raising=False)


def take_away(name: str, patch: pytest.MonkeyPatch) -> None:
    """Acts a torch that lacks a module, or an attribute of one or of a class."""
    owner, _, attribute = name.rpartition(".")
    if name in sys.modules:
        patch.setitem(sys.modules, name, None)
    elif isinstance(kind := pkgutil.resolve_name(owner), type) and attribute not in vars(kind):
        patch.setattr(kind, attribute, None)  # inherited from a class that cannot be changed
    else:
        patch.delattr(name, raising=False)


@pytest.mark.parametrize("row", THERE)
def test_a_shim_with_its_names_there(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the installed torch each shim does what its row says."""
    act(row, monkeypatch)
    assert row.call(shims()) == row.gives


@pytest.mark.parametrize(("row", "gone"), GONE)
def test_a_shim_with_a_name_gone(row: Row, gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch lacks a name, `_torch/` is imported, and what stands in for the name does what the row says."""
    for name in [name for name in sys.modules if name.startswith(_torch.__name__)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch_recompute, "_torch", None)
    take_away(gone, monkeypatch)
    lesser = shims()
    act(row, monkeypatch)
    assert lesser is not _torch
    assert row.call(lesser) == row.gone[gone]


# Shims that are tried where they are used: in a file of tests, by what is called there.
ELSEWHERE = {
    "tree_flatten tree_unflatten tree_leaves tensors_in": ("planner/test_arguments.py", "Call("),
    "see_through SEE_THROUGH checkpoints.respect_hooks": ("compat/test_checkpoint.py", "respect_saved_tensors_hooks="),
    "storages.cpu_allocations": ("memory/test_measure.py", "cpu_allocations("),
    "storages.uses": ("memory/test_measure.py", "uses("),
    "storages.cpu_bytes_between": ("memory/test_workspaces.py", "cpu_bytes_between("),
    "modes.ComputedWeights": ("laws/test_law_05_world.py", "cached()"),
    "graphs.attention_in_parts": ("plans/test_kept_calls.py", "MultiheadAttention("),
    "fakes.below_autograd": ("memory/test_cuda_decompositions.py", "AsOnCuda("),
    "fakes.NOT_FAKED": ("memory/test_simulate.py", "simulate("),
}
FOLDER = Path(_torch.__file__).parent


def test_every_shim_has_a_row() -> None:
    """A public name of the shims of the engine and of fake tensors has a row, or a file of tests that uses it."""
    named = {name for text in (*ELSEWHERE, *(row.shims for row in ROWS)) for name in text.split()}
    made: set[str] = set()
    for module in ("__init__", "devices", "modes", "graphs", "storages", "fakes", "checkpoints"):
        for node in ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8")).body:
            target = getattr(node, "target", None) or getattr(node, "targets", [node])[0]
            name = getattr(target, "name", getattr(target, "id", "_"))
            if isinstance(node, ast.Assign) and name[0].isupper():  # a constant, or the name of a type
                continue
            own = module != "__init__" and not hasattr(_torch, name)
            made |= set() if name.startswith("_") else {f"{module}.{name}" if own else name}
    assert made - named == {"fakes.Answers"}  # the protocol of answer_for
    tests = Path(__file__).parents[1]
    assert all(call in (tests / file).read_text(encoding="utf-8") for file, call in ELSEWHERE.values())


OWNERS = {
    "saved": SAVED,
    **{name: name for name in ("torch", "torch.UntypedStorage", "operator")},
    "_C": "torch._C",
    "_C._dynamo.guards": "torch._C._dynamo.guards",
    "config": CONFIG,
    "_checkpoint.checkpoint": "torch.utils.checkpoint.checkpoint",
}


def test_every_stand_in_has_a_row() -> None:
    """For each name of torch that a shim can do without, a row takes that name away."""
    found: set[str] = set()
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Try) and any("ImportError" in ast.unparse(h.type or node) for h in node.handlers):
                found |= {n.value for n in ast.walk(node.body[0]) if isinstance(n, ast.Constant)}
            call = node if isinstance(node, ast.Call) else ast.Call(ast.Name(""), [], [])
            name, args = getattr(call.func, "id", ""), call.args
            if (name, len(args)) in (("hasattr", 2), ("getattr", 3)) and (owner := OWNERS.get(ast.unparse(args[0]))):
                parts = getattr(args[1], "values", args[1:2])  # of a formatted string
                found.add(
                    f"{owner}."
                    + "".join(
                        str(getattr(part, "value", "")) if isinstance(part, ast.Constant) else "*" for part in parts
                    )
                )
    gone = {name for row in ROWS for name in row.gone}
    assert not [pattern for pattern in found if not fnmatch.filter(gone, pattern)]
    assert gone == {name for pattern in found for name in fnmatch.filter(gone, pattern)}
