"""State that a replay restores: generators, settings, modes, buffers, the user's own state."""

import contextlib
import contextvars
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from conftest import asks_for_a_device
from laws.watch import vector
from torch_recompute import ChangedError, _torch, no_recompute, recompute
from torch_recompute import state as states
from torch_recompute._torch import devices
from torch_recompute.engine import guards, taken
from torch_recompute.state import Ambient, CpuRng, DeviceRng, GeneratorRng, NumpyRng, PythonRng, TensorState


class Counter:
    """A user's own state: a number that each use changes."""

    def __init__(self) -> None:
        self.value = 0
        self.captured = 0
        self.restored: list[int] = []

    def use(self) -> int:
        self.value += 1
        return self.value

    def capture(self) -> int:
        self.captured += 1
        return self.value

    def restore(self, value: int) -> None:
        self.restored.append(value)
        self.value = value


def with_generator() -> tuple[Ambient, Callable[[], Any]]:
    generator = torch.Generator().manual_seed(7)
    return GeneratorRng(generator), lambda: torch.rand(3, generator=generator).tolist()


def with_numpy_generator() -> tuple[Ambient, Callable[[], Any]]:
    numpy = pytest.importorskip("numpy")
    generator = numpy.random.default_rng(7)
    return NumpyRng(generator), lambda: generator.random(3).tolist()


def with_numpy() -> tuple[Ambient, Callable[[], Any]]:
    numpy = pytest.importorskip("numpy")
    return NumpyRng(), lambda: numpy.random.rand(3).tolist()


def with_tensor() -> tuple[Ambient, Callable[[], Any]]:
    tensor = torch.zeros(3)
    return TensorState(tensor), lambda: tensor.add_(1).tolist()


def with_counter() -> tuple[Ambient, Callable[[], Any]]:
    counter = Counter()
    return counter, counter.use


# A state, and a use of it that reads and changes it.
STATES: dict[str, Callable[[], tuple[Ambient, Callable[[], Any]]]] = {
    "CpuRng": lambda: (CpuRng(), lambda: torch.rand(3).tolist()),
    "GeneratorRng": with_generator,
    "PythonRng": lambda: (PythonRng(), random.random),
    "NumpyRng": with_numpy,
    "NumpyRng(generator)": with_numpy_generator,
    "TensorState": with_tensor,
    "user's": with_counter,
}


each_state = pytest.mark.parametrize("make", STATES.values(), ids=STATES.keys())


@each_state
def test_restoring_takes_back_what_was_done(make: Any) -> None:
    """After `restore` the state is used as after `capture`, however often and whatever happened in between."""
    state, use = make()
    assert isinstance(state, Ambient)
    value = state.capture()
    first = [use(), use()]
    for _ in range(2):
        use()
        state.restore(value)
        assert [use(), use()] == first


@each_state
def test_a_region_uses_state_once(make: Any) -> None:
    """With `state=` the replay reads what the forward read, and leaves the state as backward found it."""
    state, use = make()
    seen: list[Any] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append([use(), use()])
        return x.sin().exp()

    y = recompute(fn, state=[state])(vector())
    between = use()
    start = state.capture()
    after = use()
    state.restore(start)
    y.sum().backward()
    assert seen[0] == seen[1]
    assert use() == after
    assert between not in (seen[0][0], seen[0][1])


@each_state
def test_state_is_put_back_besides_generators(make: Any) -> None:
    """With `state=`, PyTorch's default generators are those of the forward in the replay, too: dropout is the same."""
    state, use = make()
    masks: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        use()
        masks.append(torch.rand(8))
        return x.sin().exp()

    y = recompute(fn, state=[state])(vector())
    torch.rand(8)
    y.sum().backward()
    assert torch.equal(*masks)


@each_state
def test_a_saved_call_leaves_state_as_it_did(make: Any) -> None:
    """After a saved call, which is not run again, the state it used is in the replay what it was in forward."""
    state, use = make()
    runs: list[Any] = []
    seen: list[Any] = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        runs.append(use())
        return x.sin()

    def fn(x: torch.Tensor) -> torch.Tensor:
        x = no_recompute(inside)(x.exp())
        seen.append(use())
        return x.exp().exp()

    recompute(fn, state=[state])(vector()).sum().backward()
    assert len(runs) == 1
    assert seen[0] == seen[1]


@each_state
def test_state_is_put_back_after_an_error(make: Any) -> None:
    """A replay that raises leaves the state as backward found it."""
    state, use = make()
    runs: list[int] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        use()
        runs.append(1)
        if len(runs) > 1:
            raise KeyError("in the replay")
        return x.sin().exp()

    y = recompute(fn, state=[state])(vector())
    start = state.capture()
    after = use()
    state.restore(start)
    with pytest.raises(KeyError, match="in the replay"):
        y.sum().backward()
    assert use() == after


def test_what_was_not_used_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """No generator is set in a replay whose forward drew nothing; one is where it did."""
    restored: list[Any] = []
    monkeypatch.setattr(guards, "_set_cpu_state", restored.append)
    recompute(lambda x: x.sin().exp())(vector()).sum().backward()
    assert not restored
    recompute(lambda x: torch.dropout(x.sin(), 0.5, True).exp())(vector()).sum().backward()
    assert len(restored) == 2


@pytest.mark.parametrize(
    "given", [iter, lambda states: (one for one in states), tuple], ids=["iterator", "generator", "tuple"]
)
def test_states_may_be_given_by_anything_that_is_read_once(given: Any) -> None:
    """A generator that `state=` names by an iterator is put back as one that a list names."""
    masks = []
    region = recompute(lambda x: (x * random.random()).sin().exp(), state=given([PythonRng()]))
    for wrap in (region, region.__wrapped__):
        random.seed(0)
        x = vector()
        (wrap(x) + wrap(x)).sum().backward()
        masks.append(x.grad)
    assert torch.equal(*masks)


def test_no_device_no_state() -> None:
    """Where no accelerator is initialised its generators are none, and restoring none is harmless."""
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    assert DeviceRng().capture() == []
    DeviceRng().restore([])
    if torch.accelerator.current_accelerator() is None:  # torch was built for none, so there can be none later
        assert states.DEFAULT == (states.CPU_RNG,)


@pytest.mark.gpu
def test_device_generators() -> None:
    """A replay on a CUDA device draws what the forward drew, and leaves the device's generator alone."""
    x = torch.ones(1000, device="cuda", requires_grad=True)
    masks: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        masks.append(torch.rand(1000, device="cuda"))
        return (x.sin() * masks[-1]).exp()

    y = recompute(fn)(x)
    state = torch.cuda.get_rng_state()
    y.sum().backward()
    assert torch.equal(*masks)
    assert torch.equal(state, torch.cuda.get_rng_state())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_tensor_state_of_a_nested_tensor(layout: torch.layout) -> None:
    """A nested tensor has its contents again, though it has no sizes."""
    tensor = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    state = TensorState(tensor)
    value = state.capture()
    tensor.mul_(3)
    state.restore(value)
    assert all(torch.equal(part, torch.ones_like(part)) for part in tensor.unbind())


def test_tensor_state_keeps_versions() -> None:
    """Putting a tensor back does not make what autograd saved of it invalid."""
    tensor = torch.ones(3)
    state = TensorState(tensor)
    value = state.capture()
    tensor.add_(1)
    version = tensor._version
    state.restore(value)
    assert torch.equal(tensor, torch.ones(3))
    assert tensor._version == version


# --- settings ---------------------------------------------------------------------------------------------------------


class Doubling(TorchFunctionMode):
    """Makes `torch.sin` return twice the sine."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.sin, torch.Tensor.sin) else result


SETTING: contextvars.ContextVar[int] = contextvars.ContextVar("SETTING", default=0)


@contextlib.contextmanager
def setting(value: int) -> Any:
    token = SETTING.set(value)
    yield
    SETTING.reset(token)


@contextlib.contextmanager
def precision(value: str) -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    yield
    torch.set_float32_matmul_precision(before)


# What surrounds the forward only, and how the function sees it.
SURROUNDINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.is_autocast_enabled("cpu")),
    "autocast dtype": (lambda: torch.autocast("cpu", torch.float16), lambda: torch.get_autocast_dtype("cpu")),
    "autocast off": (lambda: torch.autocast("cpu", enabled=False), lambda: torch.is_autocast_enabled("cpu")),
    "autocast cache": (
        lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        torch.is_autocast_cache_enabled,
    ),
    "attention kernel": (
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()),
    ),
    "precision": (lambda: precision("medium"), torch.get_float32_matmul_precision),
    "default device": (lambda: torch.device("meta"), lambda: torch.empty(1).device.type),
    "function mode": (Doubling, lambda: float(torch.sin(torch.ones(())))),
    "context variable": (lambda: setting(5), SETTING.get),
    "grad mode": (contextlib.nullcontext, torch.is_grad_enabled),
}


@pytest.mark.parametrize(("surround", "look"), SURROUNDINGS.values(), ids=SURROUNDINGS.keys())
def test_the_replay_runs_in_the_surroundings_of_the_forward(surround: Any, look: Callable[[], Any]) -> None:
    """What surrounded the forward surrounds the replay, although the caller has left it; then it is gone again."""
    seen: list[Any] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(look())
        return x.cos().exp()

    outside = look()
    with surround():
        y = recompute(fn)(vector())
    y.float().sum().backward()
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert look() == outside


@pytest.mark.parametrize(("surround", "look"), SURROUNDINGS.values(), ids=SURROUNDINGS.keys())
def test_surroundings_of_backward_do_not_reach_the_replay(surround: Any, look: Callable[[], Any]) -> None:
    """What surrounds only backward is not seen by the replay, and still surrounds backward afterwards."""
    seen: list[Any] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(look())
        return x.cos().exp()

    y = recompute(fn)(vector()).sum()
    with surround():
        inside = look()
        y.backward()
        assert look() == inside
    assert seen[0] == seen[1]


class FirstChoice(torch.autograd.Function):
    """Attention whose first call in the process decides for good which kernel comes first, as on a Hopper GPU.

    What it saves has another shape for each kernel: CUDA's flash attention saves [B, H, S], cuDNN's [B, H, S, 1].
    """

    decided = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if not FirstChoice.decided:
            FirstChoice.decided = True
            order = torch._C._get_sdp_priority_order()
            torch._C._set_sdp_priority_order([int(SDPBackend.CUDNN_ATTENTION.value), *order[:3], *order[4:]])
        first = torch._C._get_sdp_priority_order()[0]
        ctx.save_for_backward(x.detach().new_ones(first + 1))
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        assert ctx.saved_tensors[0].numel() == torch._C._get_sdp_priority_order()[0] + 1
        return grad * 2


@pytest.mark.parametrize("check", ["metadata", "none"])
def test_the_first_attention_of_a_process_may_choose_its_kernel(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A priority order that the forward itself set for good is what its replay finds, nested regions too."""
    order = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(FirstChoice, "decided", False)
    attend = recompute(lambda x: FirstChoice.apply(x.sin()).exp(), check=check)
    try:
        x = vector()
        recompute(lambda x: attend(x.cos()), check=check)(x).sum().backward()
        assert torch._C._get_sdp_priority_order()[0] == SDPBackend.CUDNN_ATTENTION.value
    finally:
        torch._C._set_sdp_priority_order(order)
    assert torch.equal(x.grad, torch.autograd.grad((x.cos().sin() * 2).exp().sum(), x)[0])


def test_an_order_around_the_forward_is_not_its_own() -> None:
    """Inside `sdpa_kernel` a region finds that order in its replay, and leaves the present one alone."""
    seen: list[Any] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch._C._get_sdp_priority_order())
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
            return x.sin().exp()

    outside = torch._C._get_sdp_priority_order()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        y = recompute(fn)(vector())
    y.sum().backward()
    assert seen[0] == seen[1] != outside
    assert torch._C._get_sdp_priority_order() == outside


PRECISION = """
    import itertools, os, sys, warnings
    import torch
    from torch_recompute import recompute
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    b = torch.backends
    nodes = (b, b.cuda.matmul, b.cudnn, b.mkldnn, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv)
    ways = [lambda node=node, value=value: setattr(node, "fp32_precision", value)
            for value, these in (("tf32", nodes), ("ieee", nodes[:4])) for node in these]
    ways += [lambda: setattr(b.mkldnn.matmul, "fp32_precision", "bf16"), lambda: None]
    ways += [lambda v=v: torch.set_float32_matmul_precision(v) for v in ("high", "medium", "highest")]
    ways += [lambda: setattr(b.cuda.matmul, "allow_tf32", True), lambda: setattr(b.cudnn, "allow_tf32", False)]

    def older(get):
        try:
            return get()
        except RuntimeError:
            return None

    def found():
        legacy = (torch.get_float32_matmul_precision, lambda: b.cuda.matmul.allow_tf32, lambda: b.cudnn.allow_tf32)
        return [node.fp32_precision for node in nodes], [older(get) for get in legacy]

    def same(now, then):
        return now[0] == then[0] and all(old is None or new == old for new, old in zip(now[1], then[1]))

    def one(before, after):
        seen = []
        def fn(x):
            seen.append(found())
            return x.sin().exp()
        before()
        y = recompute(fn)(torch.ones(2, requires_grad=True))
        after()
        present = found()
        y.sum().backward()
        assert len(seen) == 2 and same(seen[1], seen[0]), seen
        assert same(found(), present), (found(), present)

    after = (0, 1, 12, len(ways) - 6, len(ways) - 4, len(ways) - 1)  # one of each interface, and nothing
    for i, j in itertools.product(range(len(ways)), after):
        child = os.fork()
        if child == 0:
            try:
                one(ways[i], ways[j])
            except BaseException as error:
                print(i, j, type(error), error, flush=True)
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)

    def inherited(around):
        read, write = os.pipe()
        if os.fork() == 0:
            with b.flags(fp32_precision="tf32"):
                y = around(lambda x: x.sin().exp())(torch.ones(2, requires_grad=True))
            y.sum().backward()
            for value in ("ieee", "tf32"):
                b.fp32_precision = value
                found = [n.fp32_precision for n in (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul)]
                os.write(write, repr(found).encode())
            os._exit(0)
        os.wait()
        os.close(write)
        return os.read(read, 4096)

    assert inherited(recompute) == inherited(lambda fn: fn) != b""
"""


def script(text: str) -> None:
    """Runs a script in a process of its own."""
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_float32_precision_in_every_spelling() -> None:
    """The replay finds the forward's precision of float32 whichever interface set it, and leaves none set.

    What a replay under another precision left behind would stop inheriting.
    """
    script(PRECISION)


# --- devices ----------------------------------------------------------------------------------------------------------


BUILT_FOR = """
    import torch
    def asked(*args, **kwargs):
        raise AssertionError("the driver was started")
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device({device!r})
    for owner in (torch.accelerator, torch.cuda):
        owner.is_available = owner.device_count = asked
    torch.cuda._lazy_init = torch.cuda.current_device = torch.cuda.is_current_stream_capturing = asked
"""


def test_importing_starts_no_driver() -> None:
    """On a build for CUDA, neither the import nor a region on the CPU asks the driver for anything."""
    script(
        textwrap.dedent(BUILT_FOR.format(device="cuda"))
        + textwrap.dedent("""
        import torch_recompute
        from torch_recompute import state, no_recompute, OnHost
        assert state.DEFAULT == (state.CPU_RNG, state.DEVICE_RNG)
        x = torch.ones(3, requires_grad=True)
        def fn(x):
            return torch.dropout(no_recompute(torch.sin)(x).exp(), 0.5, True).exp()
        torch_recompute.recompute(fn, check="values")(x).sum().backward()
        """)
    )


@pytest.mark.parametrize(
    ("expression", "asked"),
    [("", False), ("gpu", True), ("gpu and not slow", True), ("not gpu", False), ("gpus", False)],
)
def test_which_runs_ask_for_a_device(expression: str, asked: bool) -> None:
    """`-m gpu` asks for the machine's devices; other runs of the tests do not, and see none."""
    assert asks_for_a_device(expression) is asked


def test_other_runs_see_no_device(pytestconfig: pytest.Config) -> None:
    """This run sees the machine's devices if `-m gpu` was given; else none, on any machine."""
    if not asks_for_a_device(pytestconfig.getoption("markexpr")):
        assert not torch.cuda.is_available()


class Accelerator:
    """A device module that shows its generators' states only, as `torch.npu` does."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(i) for i in range(2)]
        self.is_initialized = lambda: True
        self.device_count = lambda: 2

    def get_rng_state(self, device: int) -> torch.Tensor:
        return self.generators[device].get_state()

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.generators[device].set_state(state)


def test_random_numbers_of_other_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay on MPS, NPU, HPU or MTIA draws what the forward drew, and leaves the generators alone."""
    npu = Accelerator()
    monkeypatch.setattr(devices, "ACCELERATOR", "npu")
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    masks: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        masks.append(torch.rand(3, generator=npu.generators[1]))
        return (x.sin() * masks[-1]).exp()

    y = recompute(fn, state=[states.DEVICE_RNG])(vector())
    torch.rand(7, generator=npu.generators[1])
    present = [generator.get_state() for generator in npu.generators]
    y.sum().backward()
    assert torch.equal(*masks)
    assert all(torch.equal(g.get_state(), then) for g, then in zip(npu.generators, present, strict=True))


class Stream:
    """A stream of an acted device, which writes down who waits for whom."""

    device_index = 0

    def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
        self.name, self.waits = name, waits

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append((self.name, other.name))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The CPU acts a device with streams; `now` is the present one."""
    acted = SimpleNamespace(now=None, waits=[], recorded=[])
    acted.stream = lambda name: Stream(name, acted.waits)
    monkeypatch.setattr(devices, "ACCELERATOR", "cpu")
    monkeypatch.setattr(devices, "_module", lambda: SimpleNamespace(current_stream=None, device_count=lambda: 0))
    monkeypatch.setattr(devices, "_present_device", lambda: 0)
    monkeypatch.setattr(devices, "_present_stream", lambda index: acted.now)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: setattr(acted, "now", stream))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: acted.recorded.append(stream.name))
    return acted


def test_the_replay_runs_on_the_stream_of_the_forward(streams: SimpleNamespace) -> None:
    """Whatever asks for the replay, it runs where the forward ran, between the two streams' waits."""
    seen: list[str] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(streams.now.name)
        return x.sin().exp()

    streams.now = streams.stream("main")
    y = recompute(fn)(vector())
    streams.now = other = streams.stream("other")
    y.sum().backward()
    assert seen == ["main", "main"]
    assert streams.now is other
    assert streams.waits[:2] == [("main", "other"), ("other", "main")]
    assert set(streams.waits[2:]) <= {("other", "main")}  # readers of what was computed on main


def test_a_reader_on_another_stream_waits(streams: SimpleNamespace) -> None:
    """What a region rebuilt on a side stream is read on another one only after a wait, and recorded there.

    The function makes a stream of its own in each run, so what was recorded in the replay is on another than the nodes.
    """
    main, sides = streams.stream("main"), iter(["side 1", "side 2"])

    def fn(x: torch.Tensor) -> torch.Tensor:
        streams.now = streams.stream(next(sides))
        y = x.sin().exp()
        streams.now = main
        return no_recompute(torch.cos)(y.exp())

    streams.now = main
    y = recompute(fn)(vector())
    y.sum().backward()
    assert streams.waits
    assert set(streams.waits) == {("main", "side 2")}
    assert set(streams.recorded) == {"main"}


def test_equal_streams_cost_no_wait(streams: SimpleNamespace) -> None:
    """Where forward and backward run on one stream nobody waits."""
    streams.now = streams.stream("main")
    recompute(lambda x: no_recompute(torch.cos)(x.sin().exp()).exp())(vector()).sum().backward()
    assert not streams.waits
    assert not streams.recorded


def test_a_tensor_of_another_device_has_no_stream(streams: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device with streams is in use, tensors on the CPU are rebuilt and read without any wait."""
    monkeypatch.setattr(devices, "ACCELERATOR", "cuda")
    streams.now = streams.stream("main")
    y = recompute(lambda x: no_recompute(torch.cos)(x.sin().exp()).exp())(vector())
    streams.now = streams.stream("other")
    y.sum().backward()
    assert set(streams.waits) <= {("main", "other"), ("other", "main")}  # the replay's own
    assert not streams.recorded


# --- modules ----------------------------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts operations, except for those that only look at memory in another way, or ask for some."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func is torch.ops.aten.empty_like.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("older", "device"), [(False, False), (True, False), (False, True), (True, True)])
def test_running_statistics_take_few_operations(older: bool, device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a block of three BatchNorms what is put back adds a handful of operations to the replay's own.

    Also before torch 2.12, which has no operation that copies several tensors; on a device, five for each dtype less
    one, since only floating-point statistics are saved for backward.
    """
    if older:
        monkeypatch.setattr(_torch, "clone_each", _torch._clone_each)
    if device:
        monkeypatch.setattr(states, "_CPU", None)
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    block, x = nn.Sequential(*layers), torch.randn(2, 4, 8, 8, requires_grad=True)
    counts, results = [], []
    start = [buffer.clone() for buffer in block.buffers()]
    for region in (lambda x: checkpoint(block, x, use_reentrant=False), recompute(block), block):
        for buffer, then in zip(block.buffers(), start, strict=True):
            buffer.copy_(then)
        region(x).square().sum().backward()
        with Launches() as launches:
            region(x).square().sum().backward()
        counts.append(launches.count)
        results.append([*(p.grad.clone() for p in block.parameters()), *(b.clone() for b in block.buffers())])
        block.zero_grad()
    assert 0 < counts[1] - counts[0] <= (9 if device else 5)
    assert all(torch.equal(a, b) for a, b in zip(*results[1:], strict=True))
    assert results[0][-1] == 4  # torch's checkpoint updates them twice
    assert results[1][-1] == 2


def test_a_buffer_changed_after_it_was_saved() -> None:
    """A buffer that the function changes after its values were saved is an error in backward, as without a region."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp() * self.scale
            self.scale.add_(1)
            return y.exp()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Layer()(vector()).sum().backward()
    with pytest.raises(ChangedError):
        recompute(Layer())(vector()).sum().backward()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_first_call_of_lazy_modules(momentum: Any) -> None:
    """A region may be the first call of a LazyModule: parameters and running statistics are those without it."""
    results: list[list[torch.Tensor]] = []
    for region in (recompute, lambda m: m):
        torch.manual_seed(0)
        module = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(momentum=momentum), nn.Tanh())
        for _ in range(2):
            region(module)(torch.randn(5, 4)).square().sum().backward()
        results.append([*module.buffers(), *[p.grad for p in module.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][2] == 2


def test_large_buffers() -> None:
    """Buffers beyond the small size are updated once as well, and are watched once they were left unchanged."""

    class Large(nn.Module):
        def __init__(self, write: bool) -> None:
            super().__init__()
            self.write = write
            self.register_buffer("cache", torch.zeros(taken.SMALL // 4 + 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.write:
                self.cache[:3] += x.detach()
            return (x * self.cache[:3]).sin().exp()

    module = Large(write=True)
    for _ in range(2):
        recompute(module)(vector()).sum().backward()
    assert torch.equal(module.cache[:3], vector() * 2)
    module = Large(write=False)
    for _ in range(2):
        y = recompute(module)(vector())
        module.cache.add_(1)
        with pytest.raises(ChangedError, match="buffer 'cache' of Large"):
            y.sum().backward()


def test_state_in_the_documentation_of_the_error() -> None:
    """A tensor reached by closure that the region changes is updated once; `TensorState` does it for any other."""

    class Holder:
        def __init__(self) -> None:
            self.inner = {"deep": [torch.zeros(3)]}

    holder = Holder()
    deep = holder.inner["deep"][0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        holder.inner["deep"][0].add_(1)
        return (x * deep.clone()).sin().exp()

    results = []
    for region in (recompute(fn, state=[TensorState(deep)]), fn):
        deep.zero_()
        x = vector()
        region(x).sum().backward()
        results.append((x.grad, deep.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.expand(2, 4),
        lambda t: t.unfold(0, 2, 1),
        lambda t: t[None].expand(3, 4)[:, ::2],
        lambda t: t.view(2, 2).t(),
        lambda t: t[1:1],
    ],
    ids=["expanded", "overlapping", "expanded and strided", "transposed", "empty"],
)
def test_tensor_state_of_a_view(view):
    """A tensor whose elements lie on one another is put back like any other, also as a closure of a region."""
    base = torch.arange(4.0)
    state = TensorState(view(base))
    then = state.capture()
    base += 5
    state.restore(then)
    assert torch.equal(view(base), view(torch.arange(4.0)))

    grads = []
    for wrap in (recompute, lambda fn: fn):
        base, weight = torch.arange(4.0), torch.ones((), requires_grad=True)
        seen = view(base)

        def body(weight, base=base, seen=seen):
            base.mul_(2)
            return (seen * weight).sin().exp()

        wrap(body)(weight).sum().backward()
        grads.append(weight.grad)
        assert torch.equal(base, 2 * torch.arange(4.0))
    assert torch.equal(*grads)
