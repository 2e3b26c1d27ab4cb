"""Regions in CUDA graphs: generators by their relative offset, and what is refused.

Where there is no device, a capture is acted: `Acted` is a generator that knows the rules of one (no absolute offset, an
offset that starts at 0 in each graph), and "drawing" moves it. What needs the device itself is marked `gpu`.
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_recompute import (
    ArgumentError,
    MismatchError,
    OnHost,
    SaveError,
    StoreError,
    _torch,
    doing_recompute,
    get_recompute_data,
    no_recompute,
    recompute,
    replay,
    save_for_recompute,
    state,
)
from torch_recompute._torch.devices import capturing
from torch_recompute.engine import mismatch
from torch_recompute.plan import observe
from torch_recompute.state import values
from torch_recompute.state.observer import Running
from torch_recompute.state.tape import Tape
from torch_recompute.stores import host


class Acted:
    """The generator of a device that captures graphs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # a handle, no plain data that a replay would put back
        self.graph = 0
        self.offset = 100
        self.intragraph = 0
        self.drawn: list[tuple[int, int]] = []

    # --- what torch asks ---

    def initial_seed(self) -> int:
        return 7

    def manual_seed(self, seed: int) -> None:
        assert seed == 7

    def get_offset(self) -> int:
        if self.graph:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::get_offset during CUDA graph capture")
        return self.offset

    def set_offset(self, offset: int) -> None:
        if self.graph:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::set_offset during CUDA graph capture")
        self.offset = offset

    def get_state(self) -> torch.Tensor:
        return torch.tensor([7, self.intragraph if self.graph else self.offset]).view(torch.uint8)

    def set_state(self, value: torch.Tensor) -> None:
        seed, offset = value.view(torch.int64).tolist()
        assert seed == 7
        if self.graph:
            self.intragraph = offset
        else:
            self.offset = offset

    # --- what the test does ---

    def begin(self) -> None:
        """Begins to capture the next graph."""
        self.graph += 1
        self.intragraph = 0

    def end(self) -> None:
        """Runs eagerly again."""
        self.graph = 0

    def draw(self) -> int:
        """Takes random numbers; returns from where."""
        if self.graph:
            self.intragraph += 4
            return self.intragraph
        self.offset += 4
        return self.offset


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> Acted:
    """A machine whose only device is acted."""
    device = Acted()
    for module in (state, values, mismatch, host, observe):
        monkeypatch.setattr(module, "capturing", lambda: device.graph > 0)
    monkeypatch.setattr(_torch, "device_generators", lambda: [device])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return device


def region(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A region that looks after the acted device's generator."""
    known = state.DEVICE_RNG in state.DEFAULT  # as where torch was built for an accelerator
    return recompute(fn, state=[] if known else [state.DEVICE_RNG], **options)


def noisy(device: Acted, seen: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(device.draw())
        return (x.sin() * seen[-1]).exp()

    return fn


def test_forward_and_replay_in_one_graph(acted: Acted) -> None:
    """In a captured step the replay draws from where its forward drew, and the generator ends where it would."""
    seen: list[int] = []
    call = region(noisy(acted, seen))
    acted.begin()
    acted.draw()
    x = torch.ones(3, requires_grad=True)
    loss = call(call(x)).sum()
    acted.draw()
    end = acted.intragraph
    loss.backward()
    assert seen == [8, 12, 12, 8]
    assert acted.intragraph == end


def test_a_generator_that_the_graph_does_not_know(acted: Acted) -> None:
    """A region that reaches an explicit generator, and does not draw from it, is captured all the same.

    torch does not say where a generator is that was not registered with the graph, and lets nobody draw from it.
    """

    class Unregistered:
        device = torch.device("cuda", 0)

        def get_state(self) -> torch.Tensor:
            raise RuntimeError("the generator is not registered with the graph")

    x = torch.ones(3, requires_grad=True)
    acted.begin()
    recompute(lambda x: x.sin().exp(), state=[state.GeneratorRng(Unregistered())])(x).sum().backward()
    assert torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())


def test_forward_and_replay_in_different_graphs(acted: Acted) -> None:
    """A replay captured in another graph than its forward is an error if it draws, and right if it does not."""
    x = torch.ones(3, requires_grad=True)
    acted.begin()
    noise = region(noisy(acted, []), name="layer 3")(x).sum()
    still = region(lambda x: x.sin().exp())(x).sum()
    acted.begin()
    still.backward()
    assert torch.equal(x.grad, x.detach().sin().exp() * x.detach().cos())
    with pytest.raises(MismatchError, match=r"the replay of layer 3 draws random numbers"):
        noise.backward()


@pytest.mark.parametrize("captured", ["forward", "replay"])
def test_one_of_the_two_in_a_graph(acted: Acted, captured: str) -> None:
    """So it is where only one of the two is captured."""
    if captured == "forward":
        acted.begin()
    loss = region(noisy(acted, []))(torch.ones(3, requires_grad=True)).sum()
    if captured == "forward":
        acted.end()
    else:
        acted.begin()
    offset = acted.offset
    with pytest.raises(MismatchError, match="draws random numbers"):
        loss.backward()
    assert acted.offset <= offset + 4


def test_saved_calls_may_draw_in_another_graph(acted: Acted) -> None:
    """What only saved calls drew is not drawn again, so the graphs may differ; the generator is left alone."""
    seen: list[int] = []
    mask = no_recompute(noisy(acted, seen))
    x = torch.ones(3, requires_grad=True)
    acted.begin()
    loss = region(lambda x: mask(x.sin()).sin().exp())(x).sum()
    acted.begin()
    loss.backward()
    assert len(seen) == 1
    assert acted.intragraph == 0
    y = torch.ones(3, requires_grad=True)
    (y.sin().sin() * seen[0]).exp().sin().exp().sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_outside_of_a_capture_nothing_changes(acted: Acted) -> None:
    """Eagerly the generator's absolute offset is used."""
    seen: list[int] = []
    region(noisy(acted, seen))(torch.ones(3, requires_grad=True)).sum().backward()
    assert seen == [104, 104]
    assert acted.offset == 104


@pytest.mark.parametrize("value", [3, 0.5, True, torch.ones(2), [torch.ones(2)], {"a": (None, 1)}])
def test_values_of_the_host_are_refused(acted: Acted, value: Any) -> None:
    """A number or a tensor on the CPU is not carried from a captured forward to its replay."""

    def saves(x: torch.Tensor) -> torch.Tensor:
        save_for_recompute(value)
        return x.sin().exp()

    def chooses(x: torch.Tensor) -> torch.Tensor:
        replay(lambda: value)()
        return x.sin().exp()

    for fn in (saves, chooses):
        x = torch.ones(3, requires_grad=True)
        recompute(fn)(x).sum().backward()  # eagerly it is
        acted.begin()
        with pytest.raises(SaveError, match="decided once, when the graph is captured"):
            recompute(fn)(x)
        acted.end()


@pytest.mark.parametrize("value", [torch.ones(2, device="meta"), "a word", None, (), torch.float32])
def test_other_values_are_carried(acted: Acted, value: Any) -> None:
    """Tensors on a device, and what is no number, reach the replay as ever."""
    acted.begin()
    carried: list[Any] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            carried.extend(get_recompute_data())
        else:
            save_for_recompute(value)
        carried.append(replay(lambda: value)())
        return x.sin().exp()

    recompute(fn)(torch.ones(3, requires_grad=True)).sum().backward()
    assert [type(one) for one in carried] == [type(value)] * 3
    assert isinstance(value, torch.Tensor) or all(one is value for one in carried)


def test_reading_the_device_is_said_in_words(acted: Acted) -> None:
    """Where a choice reads from the device in a capture, the error names it; other errors are left as they are."""

    def reads(text: str) -> Any:
        raise RuntimeError(text)

    acted.begin()
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(SaveError, match=r"replay\(.*reads\) failed while a CUDA graph is captured"):
        recompute(lambda x: replay(reads)("operation not permitted when stream is capturing\nmore"))(x)
    with pytest.raises(RuntimeError, match=r"^shapes differ$"):
        recompute(lambda x: replay(reads)("shapes differ"))(x)


def test_what_reads_or_leaves_the_device_is_refused(acted: Acted) -> None:
    """Comparing values and moving tensors to the host are refused in a capture, and work outside of one."""
    x = torch.ones(3, requires_grad=True)
    for options, error in (({"check": "values"}, ArgumentError), ({"inputs": OnHost()}, StoreError)):
        call = recompute(lambda x: x.sin().exp(), **options)
        call(x).sum().backward()
        acted.begin()
        with pytest.raises(error, match="while a CUDA graph is captured"):
            call(x)
        acted.end()


def test_a_captured_replay_is_not_timed(acted: Acted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan's figures leave replays out that are captured, because nothing runs then."""
    figures = observe.Figures()
    monkeypatch.setattr(observe, "stamp", lambda: pytest.fail("timed"))
    acted.begin()
    with figures.around(Running("replay", "", SimpleNamespace(tape=Tape()))):
        pass
    assert figures.replays == 0


def test_no_device_captures_nothing() -> None:
    """Without a CUDA device nothing is ever captured."""
    if not torch.cuda.is_available():
        assert capturing() is False


# --- on a device ------------------------------------------------------------------------------------------------------


def step(blocks: nn.ModuleList, x: torch.Tensor, wrap: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    y = x
    for block in blocks:
        y = wrap(block)(y)
    return list(torch.autograd.grad(y.square().mean(), list(blocks.parameters())))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # of the plain gradient before
@pytest.mark.parametrize("saved", [False, True])
def test_graphed_callables(saved: bool) -> None:
    """Regions in `make_graphed_callables`: right without random numbers, or with them saved; else an error."""
    torch.manual_seed(0)
    dropout = no_recompute(F.dropout) if saved else F.dropout

    class Net(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.up, self.down, self.p = nn.Linear(64, 256), nn.Linear(256, 64), p

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(dropout(F.gelu(self.up(x)), self.p))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return recompute(self.inner, name="layer")(x)

    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    for p in (0.0, 0.5):
        net = Net(p).cuda()
        if p and not saved:
            with pytest.raises(MismatchError, match="draws random numbers"):
                torch.cuda.make_graphed_callables(net, (x,))
            continue
        plain = torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
        graphed = torch.cuda.make_graphed_callables(net, (x,))
        found = torch.autograd.grad(graphed(x).square().sum(), [x, *net.parameters()])
        if not p:
            for a, b in zip(plain, found, strict=True):
                torch.testing.assert_close(a, b)
