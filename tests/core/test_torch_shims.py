"""Each private PyTorch name behind `_torch/` does what its shim says, and so does what stands in where it is gone.

All names that the shims use are in torch 2.11 as well as in 2.13; those with a stand-in are the ones that another
build or a later release may lack.
"""

import ast
import contextlib
import importlib
import inspect
import sys
import threading
import types
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import GraphExecGroup, set_checkpoint_debug_enabled, set_checkpoint_early_stop

from laws.watch import vector
from torch_recompute import _torch
from torch_recompute._torch import checkpoints, compiler, cuda, devices, fakes, graphs, modes, storages

Pair = namedtuple("Pair", "left right")


class FunctionMode(TorchFunctionMode):
    """Does nothing."""


class DispatchMode(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.entered = 0

    def __enter__(self) -> Any:
        self.entered += 1
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


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


def in_backward(look: Any, **options: Any) -> None:
    """Calls `look()` inside a backward call with these options."""
    Look.apply(vector(), look).sum().backward(**options)


# --- saved-tensor hooks -----------------------------------------------------------------------------------------------


def test_hooks_are_pushed_and_popped() -> None:
    """Pushed hooks see what autograd saves until they are popped, the innermost alone."""
    outer: list[Any] = []
    inner: list[Any] = []
    _torch.push_hooks(lambda t: outer.append(t), lambda h: torch.ones(3))
    _torch.push_hooks(lambda t: inner.append(t), lambda h: torch.full((3,), 7.0))
    x = vector()
    y = x.sin()
    _torch.pop_hooks()
    z = x.cos()
    _torch.pop_hooks()
    x.tan()
    assert len(inner) == len(outer) == 1
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.full((3,), 7.0).cos())
    torch.autograd.grad(z.sum(), x)


def test_any_global_hook() -> None:
    """A hook for all modules is seen for as long as it is there."""
    assert not _torch.any_global_hook()
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    assert _torch.any_global_hook()
    handle.remove()
    assert not _torch.any_global_hook()


def test_ambient_hooks() -> None:
    """The innermost hooks of this thread, or None; hooks of other threads are not seen."""
    assert _torch.ambient_hooks() is None

    def pack(t: torch.Tensor) -> torch.Tensor:
        return t

    def unpack(t: torch.Tensor) -> torch.Tensor:
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert _torch.ambient_hooks() == (pack, unpack)
        other: list[Any] = []
        thread = threading.Thread(target=lambda: other.append(_torch.ambient_hooks()))
        thread.start()
        thread.join()
        assert other == [None]
    assert _torch.ambient_hooks() is None


# --- the running backward ---------------------------------------------------------------------------------------------


def test_in_backward() -> None:
    """Each backward call has a number of its own, the same for all that runs in it; outside there is none."""
    seen: list[Any] = []
    for _ in range(2):
        in_backward(lambda: seen.append((_torch.in_backward(), _torch.graph_task_id())))
    assert [inside for inside, _ in seen] == [True, True]
    assert seen[0][1] != seen[1][1]
    assert not _torch.in_backward()
    assert _torch.graph_task_id() == -1


@pytest.mark.parametrize("retain", [True, False])
def test_graph_is_kept(retain: bool) -> None:
    """Says what `retain_graph` was of the running call; False outside of one."""
    seen: list[bool] = []
    in_backward(lambda: seen.extend((_torch.graph_is_kept(), _torch.keeps_graph())), retain_graph=retain)
    assert seen == [retain, retain]
    assert not _torch.graph_is_kept()


def test_will_run() -> None:
    """Says of a node whether the running call runs it, also of a leaf that `autograd.grad` was asked for."""
    a, b = vector(), vector()
    seen: list[tuple[bool, ...]] = []

    def look() -> None:
        edges = (torch.autograd.graph.get_gradient_edge(x) for x in (a, b))
        seen.append(tuple(_torch.will_run(edge.node) for edge in edges))

    loss = Look.apply(a * b, look).sum()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, [b], retain_graph=True)
    loss.backward(inputs=[b])
    assert seen == [(True, True), (False, True), (False, True)]


def test_current_node() -> None:
    """The node whose backward runs, with its name; None outside."""
    seen: list[Any] = []
    in_backward(lambda: seen.append(_torch.current_node().name()))
    assert seen == ["LookBackward"]
    assert _torch.current_node() is None


def test_after_backward() -> None:
    """A callback runs once, when the running call has computed all gradients, before it returns."""
    log: list[str] = []
    x = vector()
    x.register_hook(lambda grad: log.append("gradient"))

    def look() -> None:
        log.append("node")
        _torch.after_backward(lambda: log.append("after"))

    Look.apply(x, look).sum().backward()
    log.append("returned")
    assert log == ["node", "gradient", "after", "returned"]


def test_exec_group() -> None:
    """The group that backward calls were put in, while there is one."""
    assert _torch.exec_group() is None
    with GraphExecGroup() as group:
        assert _torch.exec_group() is not None
        assert group is None or _torch.exec_group() is group
    assert _torch.exec_group() is None


def test_sequence_number() -> None:
    """Equal for all tensors that one operation saves, larger for the next operation that is recorded."""
    seen: list[int] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.sequence_number())
        return t.detach()

    x = vector()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        (x * (x + 1)).exp()
    assert seen[0] == seen[1] < seen[2]


def test_packed_of() -> None:
    """What a pack hook returned is found again on the node; an object that cannot tell gives None."""
    token = object()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: token, lambda t: torch.ones(3)):
        y = vector().exp()
    assert isinstance(y.grad_fn._raw_saved_result, graphs.SavedTensor)
    assert graphs.packed_of(y.grad_fn._raw_saved_result) is token
    assert graphs.packed_of(object()) is None


def test_unpack_hook_of() -> None:
    """The unpack hook that a tensor was saved under is found again on the node; None where there was none."""

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        return packed

    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, unpack):
        y = vector().exp()
    assert graphs.unpack_hook_of(y.grad_fn._raw_saved_result) is unpack
    assert graphs.unpack_hook_of(vector().exp().grad_fn._raw_saved_result) is None
    assert graphs.unpack_hook_of(object()) is None


class Older:
    """A saved tensor as torch 2.11 shows it: hooks can be put on it, but not what lies there."""

    def __init__(self, saved: Any) -> None:
        self.register_hooks = saved.register_hooks


class OlderNode:
    """A node with such saved tensors."""

    def __init__(self, node: Any) -> None:
        self._raw_saved_self = Older(node._raw_saved_self)
        self._raw_saved_other = Older(node._raw_saved_other)


@pytest.mark.parametrize("view", [lambda node: node, OlderNode], ids=["2.13", "2.11"])
def test_replace_saved(view: Callable[[Any], Any]) -> None:
    """What `choose` picks is replaced and comes out of `unpack`; the rest, and what has hooks, stays as it is."""
    x, y = vector(), vector() + 1
    z = x * y
    opened: list[Any] = []

    def choosing(packed: str) -> Callable[[torch.Tensor], Any]:
        return lambda tensor: packed if tensor.data_ptr() == x.data_ptr() else None

    def unpack(packed: Any) -> torch.Tensor:
        opened.append(packed)
        return torch.full((3,), 3.0) if packed == "three" else packed[0]

    graphs.replace_saved(view(z.grad_fn), choosing("three"), unpack)
    graphs.replace_saved(view(z.grad_fn), choosing("other"), unpack)  # one pair of hooks, the first
    (of_x, of_y) = torch.autograd.grad(z.sum(), [x, y])
    assert torch.equal(of_x, y)
    assert torch.equal(of_y, torch.full((3,), 3.0))
    assert "three" in opened
    assert "other" not in opened


def test_replace_saved_in_a_custom_function() -> None:
    """A custom Function's saved tensors are looked at too, and a node without any is no harm."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * ctx.saved_tensors[0]

    y = Square.apply(vector())
    graphs.replace_saved(y.grad_fn, lambda _: "five", lambda _: torch.full((3,), 5.0))
    graphs.replace_saved((vector() + 1).grad_fn, lambda _: "five", lambda _: torch.ones(3))
    assert torch.equal(y.grad_fn.saved_tensors[0], torch.full((3,), 5.0))


def test_is_plain() -> None:
    """Tensors, parameters and fake tensors are plain; a wrapper of another tensor is not, nor is anything else."""

    class Wrapper(torch.Tensor):
        pass

    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(3)
    assert _torch.is_plain(vector())
    assert _torch.is_plain(nn.Parameter(torch.ones(3)))
    assert _torch.is_plain(fake)
    assert not _torch.is_plain(torch.ones(3).as_subclass(Wrapper))
    assert not _torch.is_plain(3.0)


def test_autocast_on() -> None:
    """Says what autocast says, and False for a device that has none."""
    assert not _torch.autocast_on("cpu")
    assert not _torch.autocast_on("meta")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _torch.autocast_on("cpu")
        assert not _torch.autocast_on("meta")


def test_sequence_of() -> None:
    """Later nodes have larger numbers, and leaves the largest."""
    x = vector()
    y = x.sin()
    z = y.sin()
    leaf = z.grad_fn.next_functions[0][0].next_functions[0][0]
    assert _torch.sequence_of(y.grad_fn) < _torch.sequence_of(z.grad_fn) < _torch.sequence_of(leaf)


def test_function_of() -> None:
    """A node made by an autograd Function names it, and PyTorch's own nodes name none."""
    x = torch.ones(2, requires_grad=True)
    assert graphs.function_of(Look.apply(x, lambda: None).grad_fn) is Look
    assert graphs.function_of(x.sin().grad_fn) is None


def test_set_grad_enabled() -> None:
    """Switches grad mode on this thread."""
    _torch.set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        _torch.set_grad_enabled(True)
    assert torch.is_grad_enabled()


def test_version_of() -> None:
    """The number of changes in place that a tensor and its views have seen."""
    tensor = torch.zeros(3)
    before = _torch.version_of(tensor)
    tensor[0].add_(1)
    assert _torch.version_of(tensor) == _torch.version_of(tensor[1:]) == before + 1


# --- ambient modes ----------------------------------------------------------------------------------------------------


def test_function_modes() -> None:
    """Lists the modes, outermost first, and makes others the active ones without entering or leaving any."""
    assert _torch.function_modes() == ()
    with FunctionMode() as a, FunctionMode() as b:
        assert _torch.function_modes() == (a, b)
        _torch.set_function_modes((b,))
        assert _torch.function_modes() == (b,)
        _torch.set_function_modes(())
        assert _torch.function_modes() == ()
        _torch.set_function_modes((a, b))
        assert _torch.function_modes() == (a, b)
    assert _torch.function_modes() == ()


def test_dispatch_modes() -> None:
    """A mode pushed sees operations until it is popped, and is neither entered nor left."""
    mode = DispatchMode()
    torch.ones(3).sin()
    _torch.push_dispatch_mode(mode)
    torch.ones(3).sin()
    _torch.pop_dispatch_mode()
    torch.ones(3).sin()
    assert mode.count == 2
    assert mode.entered == 0


# --- devices and settings ---------------------------------------------------------------------------------------------


def test_device_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the accelerator that is initialised; none where none is, and where torch has no `xpu` at all."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delattr(torch, "xpu", raising=False)
    assert tuple(_torch.device_generators()) == ()
    generators = (torch.Generator(),)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    assert _torch.device_generators() is generators


def test_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The type that torch was built for is known without asking; that of this machine is None where there is none."""
    built_for = torch.accelerator.current_accelerator()
    assert getattr(built_for, "type", None) == _torch.ACCELERATOR
    monkeypatch.setattr(devices, "ACCELERATOR", "cuda")
    for there in (True, False):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda there=there: there)
        assert _torch.accelerator() == ("cuda" if there else None)


def test_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator is in use once its module says so, or has nothing to say; without one nothing is."""
    monkeypatch.setattr(devices, "ACCELERATOR", None)
    assert not _torch.in_use()
    monkeypatch.setattr(devices, "ACCELERATOR", "npu")
    for module, used in ((types.SimpleNamespace(is_initialized=lambda: False), False), (types.SimpleNamespace(), True)):
        monkeypatch.setattr(torch, "npu", module, raising=False)
        assert _torch.in_use() is used


def test_device_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """One state per device of an accelerator without generators, each put back alone; none for CUDA and XPU."""
    states = {0: torch.zeros(2), 1: torch.ones(2)}
    module = types.SimpleNamespace(device_count=lambda: 2, get_rng_state=states.get)
    module.set_rng_state = lambda state, index: states.update({index: state})
    assert _torch.device_states() == []
    monkeypatch.setattr(devices, "ACCELERATOR", "npu")
    monkeypatch.setattr(torch, "npu", module, raising=False)
    assert [state.tolist() for state in _torch.device_states()] == [[0, 0], [1, 1]]
    _torch.set_device_state(1, torch.full((2,), 7.0))
    assert [state.tolist() for state in _torch.device_states()] == [[0, 0], [7, 7]]


class Stream:
    """A stream of an acted machine."""

    def __init__(self, device_index: int, name: str, waits: list[Any]) -> None:
        self.device_index, self.name, self.waits = device_index, name, waits

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append((self.name, other.name))


def test_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is put on streams of several devices, waits both ways where they are others, and all is as before."""
    waits: list[Any] = []
    recorded: list[Any] = []
    a, b, c, d = (Stream(i, name, waits) for i, name in ((0, "a"), (1, "b"), (0, "c"), (1, "d")))
    present, here = {0: a, 1: b}, [0]
    monkeypatch.setattr(devices, "ACCELERATOR", "meta")
    monkeypatch.setattr(devices, "_module", lambda: types.SimpleNamespace(current_stream=None))
    monkeypatch.setattr(devices, "_present_device", lambda: here[0])
    monkeypatch.setattr(devices, "_present_stream", lambda index: present[index or 0])
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda s: present.update({s.device_index: s}))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: here.__setitem__(0, index))
    far = types.SimpleNamespace(device=torch.device("meta", 1), record_stream=lambda s: recorded.append(s.name))
    tensors: Any = [torch.ones(2), torch.ones(2, device="meta"), far]
    assert _torch.streams_of(tensors) == (b, a)
    assert _torch.stream_for(tensors[0]) is None
    assert _torch.stream_for(tensors[2]) is b
    with _torch.on_streams((b, a)):
        assert not waits
    with pytest.raises(KeyError), _torch.on_streams((c, d)):
        assert present == {0: c, 1: d}
        assert here == [1]
        raise KeyError
    assert present == {0: a, 1: b}
    assert here == [0]
    assert waits == [("c", "a"), ("d", "b"), ("a", "c"), ("b", "d")]
    _torch.wait_for(b, tensors[2])
    assert len(waits) == 4
    _torch.wait_for(d, tensors[2])
    assert waits[4:] == [("b", "d")]
    assert recorded == ["b"]
    monkeypatch.setattr(devices, "_module", types.SimpleNamespace)
    assert _torch.streams_of(tensors) == ()


def changes() -> Iterator[Any]:
    yield torch.autocast("cpu", torch.bfloat16)
    yield torch.autocast("cpu", torch.float16)
    yield torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    yield sdpa_kernel(SDPBackend.MATH)
    yield sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
    yield sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True)
    yield torch.backends.cudnn.flags(enabled=False)
    yield FunctionMode()
    yield DispatchMode()


@pytest.mark.parametrize("change", list(changes()), ids=lambda change: type(change).__name__)
def test_settings_show_what_chooses_a_kernel(change: Any) -> None:
    """Inside each context the settings differ from those outside, and are the same again afterwards."""
    before = _torch.settings()
    with change:
        assert _torch.settings() != before
    assert _torch.settings() == before


def test_settings_are_put_back() -> None:
    """Flags read in one place are put in force in another, and split from the modes that were read with them."""
    outside = _torch.settings()
    with torch.autocast("cpu", torch.bfloat16), FunctionMode() as function, DispatchMode() as dispatch:
        inside = _torch.settings()
    flags, functions, dispatches = _torch.split_settings(inside)
    assert functions == (function,)
    assert dispatches == (dispatch,)
    assert _torch.split_settings(outside) == (outside, (), ())
    _torch.set_flags(flags)
    try:
        assert torch.is_autocast_enabled("cpu")
        assert _torch.settings() == list(flags)
    finally:
        _torch.set_flags(outside)
    assert _torch.settings() == outside


def test_preferred_kernels_are_read_again() -> None:
    """What the process prefers now is taken into settings that were read before; what else has changed is not."""
    taken = _torch.settings()
    order = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(order, set_priority=True), torch.autocast("cpu", torch.bfloat16):
        wanted = torch._C._get_sdp_priority_order()
        for place, get in _torch.KERNEL_ORDERS:
            taken[place] = get()
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(wanted)
    try:
        assert taken == _torch.settings()
    finally:
        torch._C._set_sdp_priority_order(before)


def test_without_the_newer_interface_to_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has one interface to the precision of float32, that one is read and written."""
    monkeypatch.delattr(torch._C, "_get_fp32_precision_getter")
    lesser, before = load(inspect.getsource(_torch)), torch.get_float32_matmul_precision()
    default = lesser.settings()
    torch.set_float32_matmul_precision("medium")
    try:
        assert lesser.settings() != default
        lesser.set_flags(default)
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(default) == len(_torch.settings()) - 9


SETTINGS = [
    "flash_sdp_enabled",
    "cudnn_sdp_enabled",
    "overrideable_sdp_enabled",
    "sdp_priority_order",
    "mkldnn_enabled",
]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_torch_lacks_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the getter of a setting taken away the module loads, reads and writes the others."""
    source = inspect.getsource(_torch)
    monkeypatch.delattr(torch._C, f"_get_{name}")
    lesser = load(source)
    assert len(lesser.settings()) == len(_torch.settings()) - 1
    lesser.set_flags(lesser.settings())


def load(source: str) -> Any:
    """`_torch` once more, under another name, as it is when torch is what it is now."""
    specification = importlib.util.spec_from_file_location(
        "torch_recompute._compat_again", _torch.__file__, submodule_search_locations=_torch.__path__
    )
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch_recompute._compat_again", module)  # for its own imports
        exec(compile(source, _torch.__file__, "exec"), module.__dict__)
    for name in [name for name in sys.modules if name.startswith("torch_recompute._compat_again")]:
        del sys.modules[name]
    return module


def test_without_execution_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no groups of backward calls there is never one."""
    monkeypatch.delattr(torch._C, "_get_graph_exec_group")
    lesser = load(inspect.getsource(_torch))
    assert lesser.exec_group() is None


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "container"),
    [
        ((1,), True),
        ([], True),
        ({}, True),
        (OrderedDict(), True),
        (Pair(1, 2), True),
        (torch.ones(1), False),
        ("text", False),
        (None, False),
        ({1}, False),
        (object(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_is_container(value: Any, container: bool) -> None:
    """Containers are what pytrees take apart, and nothing else."""
    assert _torch.is_container(value) is container


class Sub(torch.Tensor):
    """A tensor subclass."""


def test_is_parameter() -> None:
    """A parameter is one also if its data is of a subclass; a plain tensor, with grad or not, is none."""
    assert _torch.is_parameter(nn.Parameter(torch.ones(3)))
    assert _torch.is_parameter(nn.Parameter(torch.ones(3), requires_grad=False))
    assert _torch.is_parameter(nn.Parameter(torch.ones(3).as_subclass(Sub)))
    for tensor in (torch.ones(3), vector(), torch.ones(3).as_subclass(Sub), nn.Parameter(torch.ones(3)).detach()):
        assert not _torch.is_parameter(tensor)


def test_parameter_of() -> None:
    """A parameter and its views lead to the parameter; results, plain tensors and views of those do not."""
    parameter = nn.Parameter(torch.ones(3, 4))
    assert _torch.parameter_of(parameter) is parameter
    assert _torch.parameter_of(parameter.mT) is parameter
    assert _torch.parameter_of(parameter[1:]) is parameter
    for tensor in (torch.ones(3), vector(), parameter * 2, vector()[1:]):
        assert _torch.parameter_of(tensor) is None


def test_storage_id() -> None:
    """Views and detached tensors share the identity of their memory, copies do not; sparse ones have none."""
    tensor = torch.ones(2, 3)
    assert _torch.storage_id(tensor) == _torch.storage_id(tensor[1]) == _torch.storage_id(tensor.mT.detach()) != 0
    assert _torch.storage_id(tensor.clone()) != _torch.storage_id(tensor)
    assert _torch.storage_id(torch.eye(2).to_sparse()) == 0


def test_same_bytes() -> None:
    """Equal bytes are equal; another byte, or another number of them, is not."""
    state = torch.default_generator.get_state()
    other = state.clone()
    other[-1] ^= 1
    assert [_torch.same_bytes(state, x) for x in (state.clone(), other, state[:-1])] == [True, False, False]
    assert _torch._differ(state.data_ptr(), other.data_ptr(), 5056)


# --- diagnosis --------------------------------------------------------------------------------------------------------


def test_copy_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor of one list takes the values of that of the other; a new list is made where there is none."""
    targets = [torch.zeros(2), torch.zeros(3)]
    _torch.copy_each(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert [t.tolist() for t in targets] == [[1, 1], [2, 2, 2]]
    for _ in range(2):
        assert [t.tolist() for t in load(inspect.getsource(_torch)).clone_each(targets)] == [[1, 1], [2, 2, 2]]
        monkeypatch.delattr(torch, "_foreach_clone", raising=False)


def test_versions_kept() -> None:
    """What is written within keeps its version, and is not recorded for backward."""
    tensor, other, weight = torch.zeros(2), torch.zeros(2), torch.ones(2, requires_grad=True)
    with _torch.versions_kept():
        tensor[:1].add_(weight[:1])
        torch._foreach_copy_([tensor, other], [weight, weight])
        assert (tensor._version, other._version) == (0, 0)
    assert tensor.tolist() == other.tolist() == [1, 1]
    assert not tensor.requires_grad
    assert tensor.add_(1)._version == 1


def test_assert_on_device() -> None:
    """Nothing is said of a tensor that is true; one that is false raises, on the CPU at once, with the text."""
    _torch.assert_on_device(torch.tensor(True), "never")
    with pytest.raises(RuntimeError, match="out of step"):
        _torch.assert_on_device(torch.tensor(False), "out of step")


def test_what_the_compiler_does_not_see() -> None:
    """`unseen` calls a function outside of what is compiled, and as it is where nothing is."""
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_dynamo_compiling())
        return x + len(seen)

    assert modes.compiler_at_work() is None
    assert modes.unseen(look, torch.zeros(())) == 1
    compiled = torch.compile(lambda x: modes.unseen(look, x.sin()).cos(), backend="eager")
    for _ in range(2):
        compiled(torch.zeros(()))
    assert seen == [False, False, False]


def test_stack() -> None:
    """A captured stack is told as the lines of user code, innermost last, without torch's own."""

    def innermost() -> Any:
        return graphs.capture_stack()

    lines = graphs.say_stack(innermost())
    text = "\n".join(lines)
    assert "return graphs.capture_stack()" in lines[-1]
    assert "innermost" in lines[-2]
    assert "/torch/" not in text
    assert len(graphs.say_stack(innermost(), last=2)) == 2


def test_overrides() -> None:
    """PyTorch's two context managers are read; outside of them, and for None, they say nothing."""
    assert checkpoints.early_stop_override() is None
    assert checkpoints.debug_override() is None
    for value in (True, False):
        with set_checkpoint_early_stop(value), set_checkpoint_debug_enabled(value):
            assert checkpoints.early_stop_override() is value
            assert checkpoints.debug_override() is value
    with set_checkpoint_debug_enabled(None):
        assert checkpoints.debug_override() is None
    assert checkpoints.early_stop_override() is None


def test_what_an_operation_writes_to() -> None:
    """The arguments that the schema marks as written, by position and by name; none of what has no schema."""
    x, y = torch.zeros(2), torch.ones(2)
    aten = torch.ops.aten
    assert [t is x for t in _torch.written_by(aten.add_.Tensor, (x, y), {})] == [True]
    assert [t is y for t in _torch.written_by(aten.add.out, (x, x), {"out": y})] == [True]
    assert _torch.written_by(aten._foreach_add_.List, ([x], [y]), {})[0][0] is x
    assert _torch.written_by(aten.add.Tensor, (x, y), {}) == []
    assert _torch.written_by(len, (x,), {}) == []


class Shown(torch.Tensor):
    """A tensor without memory that answers for itself."""

    __torch_function__ = _torch.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        """Answers with nothing."""
        return torch.empty(0)


def test_a_tensor_without_memory() -> None:
    """It has the layout that is asked for and no address, and functions reach its own dispatch."""
    made = _torch.without_memory(Shown, (2, 3), (1, 2), torch.float16, torch.device("cpu"))
    assert type(made) is Shown
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((2, 3), (1, 2), torch.float16, "cpu")
    assert not made.requires_grad
    assert torch.Tensor.data_ptr(made) == 0
    assert made.sin().shape == (0,)


def test_whether_code_is_being_traced() -> None:
    """Only while torch.compile looks at code."""
    seen: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(_torch.being_traced())
        return graph

    assert not _torch.being_traced()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert seen == [True]
    assert not _torch.being_traced()


def test_versions_of_tensors() -> None:
    """A tensor whose contents were put back is of the version that it had, so what a graph saved of it is valid."""
    weight, buffer = torch.ones(3, requires_grad=True), torch.ones(3)
    with torch.inference_mode():
        uncounted = torch.ones(3)
    loss = (weight * buffer).sum()
    versions = storages.versions_of([buffer, uncounted])
    assert [version for _, version in versions] == [0]
    buffer.add_(1).sub_(1)
    storages.set_versions(versions)
    assert buffer._version == 0
    loss.backward()


def test_the_dtype_of_autocast() -> None:
    """The dtype of the autocast that is on for one of the devices; nothing where none is, or a device knows none."""
    assert modes.autocast_dtype("", "meta", "cpu") == ""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert modes.autocast_dtype("meta", "cpu") == "bfloat16"


def test_what_backward_has_yet_to_reach() -> None:
    """In a backward the leaf that it leads to is upstream until it has been reached, another leaf is not."""
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    middle, seen = leaf.sin(), []
    middle.register_hook(lambda _: seen.append((_torch.leads_to(leaf), _torch.leads_to(other))))
    middle.exp().sum().backward()
    assert seen == [(True, False)]
    assert list(_torch.upstream()) == []
    assert len(list(_torch.nodes_from([None, middle.grad_fn]))) == 2


# How hooks of this library look to torch's selective contexts: tests/compat/test_checkpoint.py.
SELECTIVE = {"respect_hooks", "see_through", "SEE_THROUGH"}
# Bytes that a call allocates: tests/memory/test_measure.py, tests/memory/test_workspaces.py.
ALLOCATIONS = {"cpu_allocations", "cpu_bytes_between"}


def test_every_shim_is_tried() -> None:
    """This file speaks of each public name of `_torch/`, so a new shim cannot come without its test."""
    names = {
        target.id
        for node in ast.parse(inspect.getsource(_torch)).body
        for target in ([node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", ()))
        if isinstance(target, ast.Name)
    }
    names |= {node.name for node in ast.parse(inspect.getsource(_torch)).body if isinstance(node, ast.FunctionDef)}
    text = Path(__file__).read_text(encoding="utf-8")
    # Pytrees are public in all but name, and tried by tests/core/test_arguments.py.
    missing = {n for n in names if not n.startswith("_") and n not in text} - PYTREES - SELECTIVE
    assert not missing
    for module in (fakes, storages, graphs, checkpoints):
        made = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, STATEMENTS)]
        unspoken = {n.name for n in made if not n.name.startswith("_") and n.name not in text}
        unspoken -= SELECTIVE | ALLOCATIONS
        assert not unspoken, module.__name__


def test_every_stand_in_is_tried() -> None:
    """For each name of torch that a shim can do without, this file takes that name away."""
    found: set[str] = set()
    for path in sorted(Path(_torch.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(getattr(node, "func", None), "id", None)
            if name in ("getattr", "hasattr") and isinstance(node, ast.Call):
                owner, what = (ast.unparse(arg) for arg in node.args[:2])
                if owner.split(".")[0] in ("torch", "_C", "config") and (name == "hasattr" or len(node.args) == 3):
                    found.add(f"{owner}.{what}")
            if isinstance(node, ast.ExceptHandler) and ast.unparse(node.type or ast.Constant("")) == "ImportError":
                found.add(f"{path.name}: import")
    assert found == {
        "_C.'_get_graph_exec_group'",  # test_without_execution_groups
        "_C.f'_get_{name}'",  # test_a_setting_that_torch_lacks_is_left_out
        "_C.f'_set_{setter or name}'",
        "_C.'_get_fp32_precision_getter'",  # test_without_the_newer_interface_to_precision, test_tf32_is_...
        "torch.'xpu'",  # test_device_generators
        "torch.'_foreach_clone'",  # test_copy_each
        "torch.UntypedStorage.'_new_with_weak_ptr'",  # test_memory_that_torch_cannot_find_again
        "config.'activation_memory_budget'",  # test_the_budget_of_compiled_code
        "compiler.py: import",
    }


STATEMENTS = (ast.FunctionDef, ast.ClassDef)
PYTREES = {"tree_flatten", "tree_unflatten", "tree_leaves", "tensors_in"}


# --- memory held weakly -----------------------------------------------------------------------------------------------


def test_memory_is_found_again_while_it_is_alive() -> None:
    """Weakly held memory is the same memory as long as a tensor has it, and nothing afterwards."""
    tensor = torch.arange(6.0)
    memory = storages.Memory(tensor[2:])
    again = memory.flat(6, torch.float32)
    assert again is not None
    assert again.data_ptr() == tensor.data_ptr()
    assert torch.equal(again, tensor)
    del tensor
    assert memory.flat(6, torch.float32) is not None
    del again
    assert memory.flat(6, torch.float32) is None


def test_memory_that_torch_cannot_find_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the private name memory is not found again, so that it is copied once more."""
    monkeypatch.setattr(storages, "_revive", None)
    tensor = torch.arange(6.0)
    assert storages.Memory(tensor).flat(6, torch.float32) is None


# --- captures ---------------------------------------------------------------------------------------------------------


def test_a_generator_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed and offset are read from a state of sixteen bytes, and written back as one."""

    class Generator:
        state = torch.tensor([-5, 8], dtype=torch.int64).view(torch.uint8)

        def get_state(self) -> torch.Tensor:
            return self.state

        def set_state(self, state: torch.Tensor) -> None:
            assert (state.dtype, state.device.type, state.numel()) == (torch.uint8, "cpu", 16)
            self.state = state

    generator: Any = Generator()
    pair = devices.captured_state(generator)
    assert pair == (-5, 8)
    with torch.device("meta"):
        devices.set_captured_state(generator, (-5, 20))
    assert devices.captured_state(generator) == (-5, 20)


@pytest.mark.gpu
def test_capturing() -> None:
    """Inside a capture, and only there, work is captured; the offset in it begins at 0."""
    torch.rand(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    assert not devices.capturing()
    with torch.cuda.graph(graph):
        assert devices.capturing()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        assert devices.captured_state(generator)[1] == 0
        torch.rand(4, device="cuda")
        assert devices.captured_state(generator)[1] > 0
    assert not devices.capturing()


# --- fake tensors -----------------------------------------------------------------------------------------------------


def test_a_wrapper_of_tensors_is_told_from_a_sharded_one() -> None:
    """Only a `DTensor` of torch counts as sharded, whatever else wraps tensors."""
    own = type("DTensor", (torch.Tensor,), {"__module__": "mine"})
    torchs = type("DTensor", (torch.Tensor,), {"__module__": "torch.distributed.tensor"})
    assert not fakes.is_sharded(torch.ones(2).as_subclass(own))
    assert fakes.is_sharded(torch.ones(2).as_subclass(torchs))
    assert not fakes.is_wrapper(torch.ones(2))


def test_resizes_of_storages_are_told() -> None:
    """Each block hears of a storage's own resize, one inside another too, and torch's method is back afterwards."""
    outer, inner, storage = list[int](), list[int](), torch.ones(2).untyped_storage()
    with fakes.resizes(lambda: outer.append(1)):
        storage.resize_(0)
        with fakes.resizes(lambda: inner.append(1)):
            storage.resize_(16)
            torch.ones(3).resize_(5)  # an operation, which modes are shown
        torch.ones(2).untyped_storage().resize_(4)
    storage.resize_(32)
    assert (len(outer), len(inner), storage.nbytes()) == (3, 1, 32)
    assert "resize_" not in vars(torch.UntypedStorage)


def test_fake_parameters_are_converted_to_what_they_are() -> None:
    """A module keeps its parameters and the kind of its buffers; another type is refused; real modules are torch's."""
    real, method = torch.nn.Linear(2, 2), torch.nn.Module._apply
    with fakes.FakeTensorMode():
        faked = torch.nn.BatchNorm1d(2)
    with fakes.converted(lambda name, *_: ValueError(name)):
        weight = faked.weight
        assert faked.float().weight is weight
        assert faked.running_mean is not None
        assert real.double().weight.dtype == torch.float64
        with pytest.raises(ValueError, match="weight"):
            faked.double()
    assert torch.nn.Module._apply is method


def test_fakes_are_made_as_torch_makes_them() -> None:
    """Each of a mode and a device has the attributes and the memory that `FakeTensor` gives, and no address."""
    mode, device = fakes.FakeTensorMode(), torch.device("cpu")
    mode._allow_unsafe_data_ptr_access = False
    make = fakes.FakeMaker(mode)
    for meta in (torch.empty(2, 3, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")):
        wanted, made = fakes.FakeTensor(mode, meta, device), make(meta, device)
        assert type(made) is fakes.FakeTensor
        assert vars(made) == vars(wanted)
        assert (made.shape, made.dtype, made.device) == (wanted.shape, wanted.dtype, device)
        assert made.untyped_storage() is meta.untyped_storage()
        assert (made + 1).device == device
        for one in (wanted, made):
            with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                one.data_ptr()


def test_fakes_of_one_mode_can_be_answered_for() -> None:
    """What needs the memory of a fake goes to who answers for its mode; those of other modes refuse as before."""

    class Twos:
        def values_of(self, fake: torch.Tensor, what: str) -> torch.Tensor:
            return torch.full(fake.shape, 2.0)

        def address_of(self, fake: torch.Tensor) -> int:
            return 7

    answers, mode = Twos(), fakes.FakeTensorMode()
    fakes.answer_for(mode, answers)
    with mode:
        fake = torch.empty(3)
    assert fake.numpy().tolist() == [2.0, 2.0, 2.0]
    assert fake.data_ptr() == 7
    with fakes.FakeTensorMode():
        other = torch.empty(3)
    with pytest.raises(RuntimeError):
        other.numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once in a process PyTorch says that it will be an error
        assert other.data_ptr() == 0
    assert torch.ones(1).numpy().tolist() == [1.0]


def test_operations_on_fakes_need_no_active_mode() -> None:
    """`on_fakes` answers without values, and a tensor laid over a storage leaves its size alone."""
    mode = fakes.FakeTensorMode()
    with mode:
        x = torch.empty(4, 4)
    y = fakes.on_fakes(mode, torch.ops.aten.mm.default, (x, x), {})
    assert type(y) is fakes.FakeTensor
    assert y.shape == (4, 4)
    assert fakes.device_of(y) == torch.device("cpu")
    assert _torch.is_operator(torch.ops.aten.mm.default)
    y.untyped_storage().resize_(0)
    with mode:
        view = fakes.over(y.untyped_storage(), 0, y, "cpu")
    assert view.untyped_storage().nbytes() == 0
    with modes.without_modes():
        assert torch.ones(2).sum().item() == 2


def test_a_layout_over_memory() -> None:
    """A tensor is laid over memory as it is told, and memory that was discarded stays so."""
    memory = torch.arange(6.0).untyped_storage()
    laid = fakes.lay(memory, 1, ((2, 2), (1, 2)), torch.float32, "cpu")
    assert laid.tolist() == [[1.0, 3.0], [2.0, 4.0]]
    memory.resize_(0)
    again = fakes.lay(memory, 1, ((2, 2), (1, 2)), torch.float32, "cpu")
    assert (again.shape, memory.nbytes()) == ((2, 2), 0)


def test_a_fake_is_told_from_a_tensor() -> None:
    """A tensor on fake memory is a fake, with data or on meta it is not."""
    with fakes.FakeTensorMode() as mode:
        fake = torch.ones(2)
    assert storages.is_fake(fake)
    assert storages.is_fake(mode.from_tensor(torch.ones(2)))
    assert not storages.is_fake(torch.ones(2))
    assert not storages.is_fake(torch.ones(2, device="meta"))


def test_an_operation_that_writes_is_known() -> None:
    """`writes` follows the schema, and a class of tensors is plain as a tensor of it is."""
    assert fakes.writes(torch.ops.aten.add_.Tensor)
    assert not fakes.writes(torch.ops.aten.add.Tensor)
    assert not fakes.writes(len)
    assert _torch.is_plain_kind(torch.Tensor)
    assert _torch.is_plain(torch.ones(2))
    mode = fakes.FakeTensorMode()
    assert type(fakes.fake_like(mode, torch.ones(2))) is fakes.FakeTensor


# --- partitioning -----------------------------------------------------------------------------------------------------


def test_the_budget_of_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the context the setting has the value, afterwards its own again; where there is none, None says so."""
    config: Any = importlib.import_module("torch._functorch.config")
    before = config.activation_memory_budget
    context = compiler.activation_memory_budget(0.25)
    assert context is not None
    with context:
        assert config.activation_memory_budget == 0.25
    assert config.activation_memory_budget == before

    monkeypatch.setitem(sys.modules, "torch._functorch.config", types.ModuleType("config"))
    assert compiler.activation_memory_budget(0.25) is None
    monkeypatch.setitem(sys.modules, "torch._functorch.config", None)
    assert compiler.activation_memory_budget(0.25) is None


# --- what settings make of an operation on CUDA ----------------------------------------------------------------------


@pytest.mark.parametrize("gone", [False, True])
def test_tf32_is_what_the_settings_say(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a convolution may be computed in TF32 and a product not, also as torch says it without precisions."""
    if gone:
        monkeypatch.delattr(torch._C, "_get_fp32_precision_getter")
    assert cuda.tf32("aten.convolution.default")
    assert not cuda.tf32("aten.mm.default")


def test_kernels_of_attention_have_an_order() -> None:
    """A setting of the user counts; the default is that of torch, with cuDNN first where torch puts it there."""
    everywhere = ["flash", "efficient", "math", "cudnn"]
    assert cuda.enabled_backends((8, 0)) == everywhere
    assert cuda.enabled_backends((9, 0)) == ["cudnn", "flash", "efficient", "math"]
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert cuda.enabled_backends((9, 0)) == ["math", "flash"]


def test_flex_attention_does_not_compile_itself() -> None:
    """Inside it calls its operator as it is, and afterwards what it did before; it may not have been imported."""
    before = flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    with fakes.flex_uncompiled():
        assert flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is True
    assert flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is before
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, flex_attention.__name__)
        with fakes.flex_uncompiled():
            assert flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is before


def test_what_torch_traces_is_told_apart() -> None:
    """While it makes a graph of a function, or runs one on fakes, and not before or after."""
    seen: list[bool] = []
    make_fx(lambda x: (seen.append(fakes.traced()), x + 1)[1])(torch.ones(2))
    with fakes.FakeTensorMode():
        seen.append(fakes.traced())
    assert seen == [True, True]
    assert not fakes.traced()


def test_what_an_operator_takes() -> None:
    """The names of its arguments, in their order, by its schema."""
    assert fakes.taken_by(torch.ops.aten.addmm.default)[:3] == ["self", "mat1", "mat2"]


@pytest.mark.parametrize("looks_up", [True, False], ids=["as it is", "a release without the place"])
def test_checkpoints_run_by(looks_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's checkpoint is what runs in its place, by whatever name it is called, and itself again after an error."""
    if not looks_up:
        monkeypatch.setattr(checkpoints._checkpoint, "checkpoint", lambda fn, *args, **options: fn(*args))
    seen: list[Any] = []

    def run(original: Any, function: Any, *args: Any, **options: Any) -> Any:
        seen.append(options)
        return original(function, *args, **options)

    here = torch.utils.checkpoint.checkpoint
    for _ in range(2):
        with contextlib.suppress(KeyError), checkpoints.checkpoints_run_by(run):
            x = vector()
            here(torch.sin, x, use_reentrant=False).sum().backward()
            assert torch.equal(x.grad, x.cos())
            raise KeyError
    here(torch.sin, vector(), use_reentrant=False)
    assert seen == [{"use_reentrant": False}] * (2 if looks_up else 0)


def test_who_calls_an_operation() -> None:
    """Seen from a mode: the code around it, or the engine's where a formula of PyTorch's own runs in backward."""
    seen: list[types.CodeType] = []

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.cos.default:
                seen.append(graphs.caller(str(Path(__file__).parent)))
            return func(*args, **(kwargs or {}))

    elsewhere: dict[str, Any] = {}
    exec(compile("def user(x): return x.cos()", "/elsewhere/user.py", "exec"), elsewhere)
    user = elsewhere["user"]
    x = torch.ones(2, requires_grad=True)
    hooked = x * 2
    hooked.register_hook(user)
    with Asks():
        user(x.detach())
        hooked.sum().backward()
        x.sin().sum().backward()  # of which the formula has a cosine
    assert seen == [user.__code__, user.__code__, graphs.ENGINE]


def test_what_a_backward_began_with() -> None:
    """The nodes that running backward calls began with: of tensors and of edges; none outside of one."""
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    hooked = x * 2
    hooked.register_hook(lambda _: seen.append(graphs.roots_of_backward()))
    one, other = hooked.sum(), hooked.cos()
    torch.autograd.backward([one, torch.autograd.graph.get_gradient_edge(other)], [None, torch.ones(2)])
    assert seen == [[one.grad_fn, other.grad_fn]]
    assert graphs.roots_of_backward() == []
