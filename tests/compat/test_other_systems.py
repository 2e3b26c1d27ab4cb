"""The calls of Megatron-Core, DeepSpeed and Paddle on this engine: the same gradients, and what each option does.

`FACES` is the table of calls and `PROGRAMS` that of what is called; the refusals are rows of `test_messages.py`.
"""

import contextlib
import inspect
import json
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_recompute
from torch_recompute import ArgumentError, ChangedError, OnHost, OutputDiscardCheckpoint, measure, recompute
from torch_recompute.compat import deepspeed, megatron, paddle

Face = Callable[..., Any]

FACES: dict[str, Face] = {
    "megatron": lambda fn, *args, **kwargs: megatron.checkpoint(fn, False, *args, **kwargs),
    "deepspeed": deepspeed.checkpoint,
    "deepspeed, non reentrant": lambda fn, *args, **kwargs: deepspeed.non_reentrant_checkpoint(
        lambda *args: fn(*args, **kwargs), *args
    ),
    "paddle": paddle.recompute,
    "paddle, use_reentrant=False": lambda fn, *args, **kwargs: paddle.recompute(
        fn, *args, use_reentrant=False, **kwargs
    ),
    "paddle, offload": lambda fn, *args, **kwargs: paddle.recompute(fn, *args, offload_indices=[0], **kwargs),
    "paddle, own random states only": lambda fn, *args, **kwargs: paddle.recompute(
        fn, *args, preserve_external_rng_state=False, **kwargs
    ),
}


class Layer(nn.Module):
    """Norm, two products, dropout; takes a mask by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        h = F.dropout(F.gelu(self.up(self.norm(x))), 0.3)
        y = self.down(h) * scale
        return x + (y if mask is None else y * mask)


class Parts(nn.Module):
    """Takes and returns what is not a tensor: a tuple, a dict, a number, None."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, pair: Any, n: int, nothing: None) -> Any:
        a, b = pair
        return self.up(x).sin() * a["weight"] + b * n, nothing, n


PROGRAMS: dict[str, Callable[[Face, nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "dropout": lambda face, layer, x, y: face(layer, x),
    "keyword": lambda face, layer, x, y: face(layer, x, mask=y.sin(), scale=0.5),
    "positional mask": lambda face, layer, x, y: face(layer, x, y),
    "frozen input": lambda face, layer, x, y: face(layer, x.detach(), mask=y),
    "stack": lambda face, layer, x, y: face(layer, face(layer, face(layer, x), y)),
    "nested": lambda face, layer, x, y: face(lambda x: face(layer, x.cos()).sin(), x),
    "in a region": lambda face, layer, x, y: recompute(lambda x: face(layer, x.cos(), y).sin())(x),
    "containers": lambda face, layer, x, y: face(layer.parts, x, ({"weight": y}, y), 3, None)[0],
    "view": lambda face, layer, x, y: face(lambda x, y: (x.mT.exp() @ y).sin(), x[1:], y[1:]),
    "one tensor twice": lambda face, layer, x, y: face(lambda a, b: (a.exp() * b.sin()).exp(), x, x),
}


def train(program: str, face: Face) -> list[torch.Tensor]:
    """The result and the gradients of every leaf."""
    torch.manual_seed(5)
    layer = Layer()
    layer.parts = Parts()
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(6)
    result = PROGRAMS[program](face, layer, x, y)
    leaves = [x, y, *layer.parameters()]
    grads = torch.autograd.grad(result.square().mean(), leaves, allow_unused=True)
    return [result.detach(), *(torch.zeros(()) if g is None else g for g in grads), torch.rand(3)]


def plain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def vector(n: int = 4) -> torch.Tensor:
    return torch.linspace(0.1, 0.9, n).requires_grad_()


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    """DeepSpeed's settings are the process's; each test begins and ends without any."""
    yield
    deepspeed.configure(None)


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the tensors that any `OnHost` store takes."""
    shapes: list[tuple[int, ...]] = []
    put = OnHost.put

    def counting(self: OnHost, tensor: torch.Tensor) -> Any:
        shapes.append(tuple(tensor.shape))
        return put(self, tensor)

    monkeypatch.setattr(OnHost, "put", counting)
    return shapes


# --- all faces --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("face", FACES)
def test_gradients_are_those_of_the_plain_call(face: str, program: str) -> None:
    """Results, gradients and the random numbers drawn afterwards are the plain call's to the last bit."""
    for ours, wanted in zip(train(program, FACES[face]), train(program, plain), strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_with_inputs_on_the_host(program: str, hosted: list[tuple[int, ...]]) -> None:
    """The same with DeepSpeed's `checkpoint_in_cpu`, and inputs do go to the host."""
    deepspeed.configure(None, checkpoint_in_cpu=True)
    for ours, wanted in zip(train(program, deepspeed.checkpoint), train(program, plain), strict=True):
        assert torch.equal(ours, wanted)
    assert hosted


@pytest.mark.parametrize("face", FACES)
def test_it_is_a_region(face: str) -> None:
    """The function runs once in forward and once in backward, and of what it makes nothing stays in between."""
    runs: list[bool] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        runs.append(torch_recompute.doing_recompute())
        return x.exp().sin().exp().sum()

    x = vector(1024)
    with measure() as memory:
        y = FACES[face](fn, x)
        kept = memory.live_bytes - y.nbytes
        y.backward()
    assert runs == [False, True]
    assert kept == (x.nbytes if "offload" in face else 0)


@pytest.mark.parametrize("face", FACES)
def test_without_grad_it_is_the_plain_call(face: str, hosted: list[tuple[int, ...]]) -> None:
    """Under `no_grad` the function is called once and nothing is stored."""
    deepspeed.configure(None, checkpoint_in_cpu=True)
    with torch.no_grad():
        assert torch.equal(FACES[face](torch.sin, vector()), vector().sin())
    assert hosted == []


@pytest.mark.parametrize("face", [name for name in FACES if name != "deepspeed, non reentrant"])
@pytest.mark.filterwarnings("ignore:.* has no effect:RuntimeWarning")  # see test_compiled_plans.py
def test_compiled_without_a_break(face: str) -> None:
    """Inside `torch.compile` a face is traced: no graph break, the same gradients."""
    compiled = torch.compile(lambda x: FACES[face](lambda x: x.sin().exp(), x), fullgraph=True, backend="aot_eager")
    x = vector()
    (ours,) = torch.autograd.grad(compiled(x).sum(), [x])
    (wanted,) = torch.autograd.grad(x.sin().exp().sum(), [x])
    torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize(
    ("face", "parameters"),
    [
        (megatron.checkpoint, "function distribute_saved_activations *args **kwargs"),
        (megatron.CheckpointWithoutOutput, "fp8=False ckpt_manager=None retain_input_tensors=False"),
        (
            deepspeed.configure,
            "mpu_ deepspeed_config=None partition_activations=None contiguous_checkpointing=None num_checkpoints=None "
            "checkpoint_in_cpu=None synchronize=None profile=None",
        ),
        (deepspeed.checkpoint, "function *args **kwargs"),
        (deepspeed.non_reentrant_checkpoint, "function *args"),
        (
            paddle.recompute,
            "function *args preserve_rng_state=True preserve_external_rng_state=None use_reentrant=None "
            "offload_indices=() **kwargs",
        ),
        (paddle.recompute_sequential, "ctx functions *args **kwargs"),
    ],
)
def test_names_order_and_defaults(face: Callable[..., Any], parameters: str) -> None:
    """Parameters have the names and the order that callers of the other system use."""
    found = inspect.signature(face).parameters.values()
    assert " ".join(str(p.replace(annotation=p.empty)) for p in found).replace(" = ", "=") == parameters


def test_the_old_import_works() -> None:
    """`torch_recompute.compat` still has what it had before the faces, and the package exports the same objects."""
    from torch_recompute.compat import OutputDiscardCheckpoint, checkpoint, checkpoint_sequential

    assert checkpoint is torch_recompute.checkpoint
    assert checkpoint_sequential is torch_recompute.checkpoint_sequential
    assert OutputDiscardCheckpoint is torch_recompute.OutputDiscardCheckpoint


# --- Paddle -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("indices", "shapes"),
    [([], []), ([0], [(4,)]), ([2], [(6,)]), ([0, 2], [(4,), (6,)]), ([3], [(2,), (3,)]), ((0, 0), [(4,)])],
)
def test_offload_indices_count_arguments(
    hosted: list[tuple[int, ...]], indices: list[int], shapes: list[tuple[int, ...]]
) -> None:
    """Exactly the tensors in the positional arguments of these numbers go to the host, no others."""

    def fn(x: torch.Tensor, n: int, y: torch.Tensor, pair: Any, *, k: torch.Tensor) -> torch.Tensor:
        return (x * n).exp().sum() * y.exp().sum() * pair[0].exp().sum() * pair[1].exp().sum() * k.exp().sum()

    args = (vector(4), 2, vector(6), (vector(2), vector(3)))
    y = paddle.recompute(fn, *args, k=vector(5), offload_indices=indices)
    assert hosted == shapes
    y.backward()


def test_offloaded_tensor_is_a_copy() -> None:
    """What waits on the host may be changed meanwhile; the gradient is that of the forward."""
    x = vector()
    y = paddle.recompute(lambda x: x.exp().sin(), x, offload_indices=[0])
    wanted = (x.exp().cos() * x.exp()).detach()
    with torch.no_grad():
        x.mul_(2)
    y.sum().backward()
    torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize("where", ["argument 1", "argument 'mask'", "a closure variable"])
def test_what_is_not_offloaded_is_watched(where: str) -> None:
    """Beside an offloaded argument, a change in place of another input is an error that names it."""
    mask, x = torch.ones(4), vector()

    def closed(x: torch.Tensor) -> torch.Tensor:
        return (x * mask).exp().sin()

    def fn(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask).exp().sin()

    if where == "argument 1":
        y = paddle.recompute(fn, x, mask, offload_indices=[0])
    elif where == "argument 'mask'":
        y = paddle.recompute(fn, x, mask=mask, offload_indices=[0])
    else:
        y = paddle.recompute(closed, x, offload_indices=[0])
    mask.zero_()
    with pytest.raises(ChangedError, match=rf"{where} of .* has been changed in place .*version 0 then, 1 now"):
        y.sum().backward()


@pytest.mark.parametrize("numbers", ["torch", "random", "numpy"])
@pytest.mark.parametrize("kept", [True, False])
def test_random_states(numbers: str, kept: bool) -> None:
    """Each switch governs its generators: kept, the replay draws what the forward drew; else something else."""
    numpy = pytest.importorskip("numpy")
    draw: dict[str, Callable[[], float]] = {
        "torch": lambda: torch.rand(()).item(),
        "random": random.random,
        "numpy": numpy.random.rand,
    }
    drawn: list[float] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        drawn.append(float(draw[numbers]()))
        return (x * drawn[-1]).exp().sin()

    option = "preserve_rng_state" if numbers == "torch" else "preserve_external_rng_state"
    paddle.recompute(fn, vector(), **{option: kept}).sum().backward()
    assert len(drawn) == 2
    assert (drawn[0] == drawn[1]) is kept


def test_external_states_follow_the_first_switch() -> None:
    """`preserve_rng_state=False` alone leaves `random` alone too; both switches said are both obeyed."""
    drawn: list[float] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        drawn.append(random.random())
        return (x * drawn[-1]).exp().sin()

    paddle.recompute(fn, vector(), preserve_rng_state=False).sum().backward()
    paddle.recompute(fn, vector(), preserve_rng_state=False, preserve_external_rng_state=True).sum().backward()
    assert drawn[0] != drawn[1]
    assert drawn[2] == drawn[3]


@pytest.mark.parametrize(("segments", "again"), [(1, ""), (2, "ab"), (3, "a b"), (4, "a b c"), (5, "a b c d")])
@pytest.mark.parametrize("module", [True, False])
def test_recompute_sequential(segments: int, again: str, module: bool) -> None:
    """All segments but the last run again, from the last to the first, and gradients are the plain chain's."""
    runs: list[str] = []

    class Noted(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.linear = name, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(self.name)
            return F.dropout(self.linear(x).sin(), 0.3)

    torch.manual_seed(1)
    functions = nn.Sequential(*map(Noted, "abcde"))
    x = torch.randn(3, 8, requires_grad=True)
    torch.manual_seed(2)
    wanted = torch.autograd.grad(functions(x).square().sum(), [x, *functions.parameters()])
    runs.clear()
    torch.manual_seed(2)
    y = paddle.recompute_sequential({"segments": segments}, functions if module else list(functions), x)
    assert runs == list("abcde")
    got = torch.autograd.grad(y.square().sum(), [x, *functions.parameters()])
    assert "".join(runs[5:]) == "".join(reversed(again.split()))
    assert all(map(torch.equal, got, wanted))


def test_recompute_sequential_hands_its_options_on(hosted: list[tuple[int, ...]]) -> None:
    """`preserve_rng_state` in `ctx` and the options of `recompute` reach each region."""
    drawn: list[float] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(()).item())
        return (x * drawn[-1]).exp().sin()

    ctx = {"segments": 3, "preserve_rng_state": False}
    y = paddle.recompute_sequential(ctx, [fn] * 3, vector(), use_reentrant=False, offload_indices=[0])
    assert hosted == [(4,), (4,)]
    y.sum().backward()
    assert len(set(drawn)) == 5


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def test_settings_hold_until_the_next(hosted: list[tuple[int, ...]]) -> None:
    """`checkpoint_in_cpu` sends every input to the host until `configure` is called again."""
    fn = lambda x, y: (x * y).exp().sin()  # noqa: E731
    deepspeed.checkpoint(fn, vector(), vector())
    assert hosted == []
    deepspeed.configure(None, checkpoint_in_cpu=True)
    assert deepspeed.is_configured()
    first = deepspeed.checkpoint(fn, vector(), y=vector())
    assert hosted == [(4,), (4,)]
    deepspeed.configure(None)
    deepspeed.checkpoint(fn, vector(), vector())
    assert len(hosted) == 2
    first.sum().backward()


@pytest.mark.parametrize("way", ["dict", "file", "section"])
def test_configuration(way: str, tmp_path: Path, hosted: list[tuple[int, ...]]) -> None:
    """The section of a DeepSpeed configuration is read by its JSON names; arguments come before it."""
    section = {"cpu_checkpointing": True, "partition_activations": False, "number_checkpoints": None, "profile": False}
    config: Any = {"train_batch_size": 8, "activation_checkpointing": section}
    if way == "file":
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        config = path
    elif way == "section":
        config = {"train_batch_size": 8}
    deepspeed.configure(None, config)
    deepspeed.checkpoint(torch.exp, vector())
    assert len(hosted) == (0 if way == "section" else 1)
    deepspeed.configure(None, config, checkpoint_in_cpu=False)
    deepspeed.checkpoint(torch.exp, vector())
    assert len(hosted) == (0 if way == "section" else 1)


def test_refused_configuration_changes_nothing(hosted: list[tuple[int, ...]]) -> None:
    """After a refusal the settings are those before."""
    deepspeed.configure(None, checkpoint_in_cpu=True)
    with pytest.raises(ArgumentError, match="partition_activations=True is not understood here"):
        deepspeed.configure(None, checkpoint_in_cpu=False, partition_activations=True)
    deepspeed.reset()
    deepspeed.checkpoint(torch.exp, vector())
    assert len(hosted) == 1


def test_results_have_the_form_that_deepspeed_gives_them() -> None:
    """A tuple or list of one is opened, a longer list is a tuple, all else is as the function returned it."""
    x = vector()
    assert isinstance(deepspeed.checkpoint(lambda x: (x.sin(),), x), torch.Tensor)
    assert isinstance(deepspeed.checkpoint(lambda x: [x.sin()], x), torch.Tensor)
    assert type(deepspeed.checkpoint(lambda x: [x.sin(), x.cos()], x)) is tuple
    assert deepspeed.checkpoint(lambda x: {"y": x.sin()}, x).keys() == {"y"}
    assert deepspeed.checkpoint(lambda x: None, x) is None
    assert megatron.checkpoint(lambda x: None, None, x) is None  # as Megatron's own tests call it


# --- Megatron ---------------------------------------------------------------------------------------------------------


def test_checkpoint_without_output() -> None:
    """Megatron's class frees the output between forward and backward, and its gradients are the plain ones."""
    x = torch.randn(64, 64, requires_grad=True)
    with measure() as memory:
        norm = megatron.CheckpointWithoutOutput(fp8=None, retain_input_tensors=True)
        h = norm.checkpoint(lambda x, n: x * n, x, 2)
        y = h.sin()
        norm.discard_output_and_register_recompute(y)
        del h
        assert memory.live_bytes == y.nbytes
        y.sum().backward()
    assert isinstance(norm, OutputDiscardCheckpoint)
    assert torch.equal(x.grad, torch.autograd.grad((x * 2).sin().sum(), [x])[0])


class Tracker:
    """Named random streams with the methods of Megatron-Core's and DeepSpeed's trackers, on the CPU."""

    def __init__(self) -> None:
        self.states_ = {"model-parallel-rng": torch.Generator().manual_seed(1).get_state()}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[torch.Generator | None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        yield None
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)


class Generators(Tracker):
    """The same with generators for states, which a fork advances: the form for CUDA graphs."""

    def __init__(self) -> None:
        self.states_ = {"model-parallel-rng": torch.Generator().manual_seed(1)}

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[torch.Generator | None]:
        yield self.states_[name]


def discarding(fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    odc = megatron.CheckpointWithoutOutput()
    y = odc.checkpoint(fn, x).exp()
    odc.discard_output_and_register_recompute(y)
    return y


MEGATRON, DEEPSPEED = "megatron.core.tensor_parallel.random", "deepspeed.runtime.activation_checkpointing.checkpointing"
STREAMS: dict[str, tuple[str, Face]] = {
    "megatron.checkpoint": (MEGATRON, lambda fn, x: megatron.checkpoint(fn, False, x).exp()),
    "CheckpointWithoutOutput": (MEGATRON, discarding),
    "deepspeed.checkpoint": (DEEPSPEED, lambda fn, x: deepspeed.checkpoint(fn, x).exp()),
}


@pytest.mark.parametrize("kind", [Tracker, Generators])
@pytest.mark.parametrize("way", STREAMS)
def test_named_streams_are_put_back(way: str, kind: type[Tracker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system's tracker is loaded, dropout in a fork has the same mask in the replay, and streams go on."""
    place, face = STREAMS[way]

    def run(face: Face) -> tuple[torch.Tensor, torch.Tensor]:
        module = types.ModuleType(place)
        tracker = kind()
        module.get_cuda_rng_tracker = lambda: tracker
        monkeypatch.setitem(sys.modules, place, module)

        def dropped(x: torch.Tensor) -> torch.Tensor:
            with sys.modules[place].get_cuda_rng_tracker().fork() as generator:
                return (x.exp() * torch.rand(x.shape, generator=generator)).sin()

        x = vector(16)
        (grad,) = torch.autograd.grad(face(dropped, x).sum(), [x])
        with tracker.fork() as generator:
            return grad, torch.rand(3, generator=generator)

    wanted = run(lambda fn, x: fn(x).exp())
    assert all(map(torch.equal, run(face), wanted))
    assert not torch.equal(run(lambda fn, x: recompute(fn)(x).exp())[0], wanted[0])


def test_tracker_without_streams_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker that holds no streams is not told any: for Megatron's, that would mean that it is in use."""
    tracker, told = Tracker(), []
    tracker.states_ = {}
    monkeypatch.setattr(tracker, "set_states", told.append)
    recompute(lambda x: x.exp().sin(), state=[megatron.TrackerRng(tracker)])(vector()).sum().backward()
    assert told == []


def test_tracker_by_hand() -> None:
    """`TrackerRng` is a state that any region takes."""
    tracker, masks = Tracker(), []

    def dropped(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            masks.append(torch.rand(4))
        return (x * masks[-1]).exp().sin()

    recompute(dropped, state=[megatron.TrackerRng(tracker)])(vector()).sum().backward()
    assert torch.equal(*masks)
