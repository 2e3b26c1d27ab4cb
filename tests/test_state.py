"""What a replay finds as the forward found it: generators, settings, modes, buffers, the user's own state."""

import contextlib
import contextvars
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from torch_recompute import ChangedError, no_recompute, recompute
from torch_recompute import state as states
from torch_recompute.state import (
    Ambient,
    CpuRng,
    DeviceRng,
    GeneratorRng,
    NumpyRng,
    PythonRng,
    TensorState,
)


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


def vector() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


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


def test_generators_are_found() -> None:
    """A generator in the arguments, nested arguments, a closure, a global or a partial needs no `state=`."""
    generator = torch.Generator()

    def by_argument(x: torch.Tensor, source: torch.Generator) -> torch.Tensor:
        return (x.sin() * torch.rand(3, generator=source)).exp()

    def by_closure(x: torch.Tensor) -> torch.Tensor:
        return by_argument(x, generator)

    calls: list[Callable[[Any, torch.Tensor], torch.Tensor]] = [
        lambda wrap, x: wrap(by_argument)(x, generator),
        lambda wrap, x: wrap(by_argument)(x, source=generator),
        lambda wrap, x: wrap(lambda x, options: by_argument(x, options["source"]))(x, {"source": generator}),
        lambda wrap, x: wrap(by_closure)(x),
        lambda wrap, x: wrap(lambda x: by_closure(x))(x),
        lambda wrap, x: wrap(by_global)(x),
    ]
    for call in calls:
        grads, ends = [], []
        for wrap in (recompute, lambda fn: fn):
            generator.manual_seed(1)
            GENERATOR.manual_seed(1)
            x = vector()
            y = call(wrap, x)
            torch.rand(1, generator=generator)
            y.sum().backward()
            grads.append(x.grad)
            ends.append((generator.get_state(), GENERATOR.get_state()))
        assert torch.equal(*grads)
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


GENERATOR = torch.Generator()


def by_global(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * torch.rand(3, generator=GENERATOR)).exp()


def test_what_was_not_used_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """No generator is set in a replay whose forward drew nothing; one is where it did."""
    restored: list[Any] = []
    monkeypatch.setattr(CpuRng, "restore", lambda self, value: restored.append(value))
    recompute(lambda x: x.sin().exp())(vector()).sum().backward()
    assert not restored
    recompute(lambda x: torch.dropout(x.sin(), 0.5, True).exp())(vector()).sum().backward()
    assert len(restored) == 2


def test_no_device_no_state() -> None:
    """Where no accelerator is initialised its generators are none, and restoring none is harmless."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert DeviceRng().capture() == []
    DeviceRng().restore([])
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


def test_grad_mode_inside() -> None:
    """A replay runs with grad although backward does not, also where backward is called under `no_grad`."""
    x = vector()
    y = recompute(lambda x: x.sin().exp())(x).sum()
    with torch.no_grad():
        y.backward()
        assert not torch.is_grad_enabled()
    assert torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp())


# --- modules ----------------------------------------------------------------------------------------------------------


def running(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if kind == "batch norm":
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh()), torch.randn(5, 4)
    if kind == "batch norm without momentum":
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Tanh()), torch.randn(5, 4)
    if kind == "spectral norm":
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh()), torch.randn(5, 4)
    return nn.Sequential(Rebinding(), nn.Tanh()), torch.randn(5, 4)


class Rebinding(nn.Module):
    """Counts in a buffer by replacing it, and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return self.linear(x) * self.count


@pytest.mark.parametrize("kind", ["batch norm", "batch norm without momentum", "spectral norm", "rebinding"])
@pytest.mark.parametrize("wrap", [recompute, lambda m: recompute(lambda x: m(x))], ids=["module", "closure"])
def test_buffers_are_updated_once(kind: str, wrap: Any) -> None:
    """After steps with recomputation buffers and gradients are bitwise those of steps without."""
    results: list[list[torch.Tensor]] = []
    for region in (wrap, lambda m: m):
        module, data = running(kind)
        for _ in range(3):
            region(module)(data).square().sum().backward()
        results.append([*module.buffers(), *[p.grad for p in module.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_large_buffers() -> None:
    """Buffers beyond the small size are updated once as well, and are watched once they were left unchanged."""

    class Large(nn.Module):
        def __init__(self, write: bool) -> None:
            super().__init__()
            self.write = write
            self.register_buffer("cache", torch.zeros(states.SMALL // 4 + 1))

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


def test_eval_before_backward() -> None:
    """`model.eval()` between forward and backward does not reach the replay, and is still in force after it."""
    seen: list[bool] = []

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.training)
            return x.sin().exp()

    module = nn.Sequential(Layer(), nn.Identity())
    y = recompute(module)(vector())
    module.eval()
    y.sum().backward()
    assert seen == [True, True]
    assert not module.training
    assert not module[0].training


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
