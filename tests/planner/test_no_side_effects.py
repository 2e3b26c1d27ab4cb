"""Planning has no side effects: process, model, batch and optimizer are as before, also after an error."""

from __future__ import annotations

import os
import random
import sys
import threading
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from torch_recompute import (
    BudgetError,
    Choice,
    Plan,
    apply,
    audit,
    doctor,
    make_plan,
    measure,
    profile,
    saved_activations,
    simulate,
    verify,
)
from torch_recompute._torch.storages import is_fake

numpy = pytest.importorskip("numpy", reason="numpy is not installed (planning needs it)")

WIDTH = 16


class Block(nn.Module):
    """What a step may leave traces in: dropout, running statistics, two kinds of spectral norm, a cache, attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), spectral_norm(nn.Linear(4 * WIDTH, WIDTH))
        self.mix = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.register_buffer("cache", torch.zeros(4, WIDTH))
        self.position = 0
        self.last: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.down(self.up(self.norm(x)).relu()))
        self.cache[self.position % 4] = y.detach().mean(0)
        self.position += 1
        self.last = [y.detach()]
        return x + self.mix(y) + self.cache.mean()


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("told to")


class Net(nn.Module):
    """Blocks, and a place to fail at."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.fails, self.hooked = fails, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.hooked:  # as transformers does where hidden states are first asked for
            self.blocks[0].up.register_forward_hook(lambda _, args, output: output * 2)
            self.hooked = True
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and (self.fails == "in forward" or (self.fails == "with values" and not is_fake(x))):
                raise ValueError("told to")
        return Fails.apply(x) if self.fails == "in backward" else x


def loss_of(net: Net) -> Callable[[torch.Tensor], torch.Tensor]:
    def loss(output: torch.Tensor) -> torch.Tensor:
        if net.fails == "in the loss":
            raise ValueError("told to")
        return output.square().mean()

    return loss


class Scene:
    """A training in the middle: gradients, an optimizer with state, hooks, one part frozen, another in `eval`.

    The next call of the model registers a hook.
    """

    def __init__(self, fails: str = "") -> None:
        torch.manual_seed(0)
        self.net = Net("").train()
        self.batch = torch.randn(8, WIDTH, requires_grad=True)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 0.01)
        self.loss = loss_of(self.net)
        for _ in range(2):
            self.optimizer.step()
            self.loss(self.net(self.batch)).backward()
        self.net.blocks[0].norm.eval()
        self.net.blocks[1].up.bias.requires_grad_(False)
        self.net.blocks[1].register_forward_hook(lambda *_: None)
        self.net.fails, self.net.hooked = fails, False
        self.plan = Plan((Choice(("blocks.0",)), Choice(("blocks.1",), keep=("@product",))))

    def picture(self) -> dict[str, Any]:
        """Everything that nobody but the user is to change."""
        found: dict[str, Any] = {
            "torch's generator": _bytes(torch.get_rng_state()),
            "python's generator": random.getstate(),
            "numpy's generator": str(numpy.random.get_state(legacy=False)),
            "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
            "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
            "autocast cache": torch.is_autocast_cache_enabled(),
            "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
            "kernels": _kernels(),
            "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
            "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
            "warnings": (list(warnings.filters), warnings.showwarning),
            "files": sorted(_open_files()),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "the environment": (dict(os.environ), Path.cwd(), list(sys.path)),
            "tracing": (sys.gettrace(), sys.getprofile()),
            "torch's checkpoint": (torch.utils.checkpoint.checkpoint, torch.utils.checkpoint.CheckpointFunction),
            "the batch": (_bytes(self.batch), self.batch._version, self.batch.grad, _bytes(self.batch.grad)),
            "the optimizer": {
                (n, key): _bytes(value)
                for n, state in enumerate(self.optimizer.state.values())
                for key, value in state.items()
            },
        }
        for path, module in self.net.named_modules():
            attributes = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers")}
            found[f"attributes of {path}"] = {key: _said(value) for key, value in attributes.items()}
            found[f"class of {path}"] = type(module)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    grad = tensor.grad if isinstance(tensor, nn.Parameter) else None
                    known = id(tensor), _bytes(tensor), tensor._version, tensor.requires_grad, id(grad), _bytes(grad)
                    found[f"{path}.{name}"] = known
        return found


def _said(value: Any) -> Any:
    """An attribute, or what is in it."""
    if isinstance(value, torch.Tensor):
        return id(value), _bytes(value)
    if isinstance(value, dict):
        return {key: id(one) for key, one in value.items()}
    return [id(one) for one in value] if isinstance(value, list) else value


def _bytes(value: Any) -> Any:
    return value.detach().numpy().tobytes() if isinstance(value, torch.Tensor) else value


def _kernels() -> list[Any]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return [
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        *(torch._C._get_sdp_priority_order(), torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled),
        *(cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()),
    ]


def _open_files() -> list[str]:
    folder = Path("/proc/self/fd")
    links = [folder / name for name in os.listdir(folder)] if folder.is_dir() else []
    return [os.readlink(link) for link in links if link.is_symlink()]  # except for that of the listing itself


def _planned(scene: Scene, **options: Any) -> Any:
    return {"loss": scene.loss, "optimizer": scene.optimizer, **options}


def _measured(scene: Scene) -> None:
    with measure(scene.net, scene.optimizer):
        torch.ones(3).sum()
        if scene.net.fails:
            raise ValueError("told to")


def _watched(scene: Scene) -> None:
    with doctor.watch(scene.net):
        if scene.net.fails:
            raise ValueError("told to")


def _applied(scene: Scene) -> None:
    handle = apply(scene.net, scene.plan)
    try:
        with handle.watch():
            if scene.net.fails:
                raise ValueError("told to")
        handle.report()
    finally:
        handle.remove()


ASKED: dict[str, Callable[[Scene], object]] = {
    "make_plan": lambda s: make_plan(s.net, (s.batch,), budget=0.5, **_planned(s)),
    "make_plan for an h100": lambda s: make_plan(s.net, (s.batch,), budget=0.5, **_planned(s, device="h100")),
    "make_plan, too small": lambda s: make_plan(s.net, (s.batch,), budget=1000, **_planned(s, device="h100")),
    "profile": lambda s: profile(s.net, (s.batch,), **_planned(s)),
    "simulate": lambda s: simulate(s.net, (s.batch,), plan=s.plan, **_planned(s)),
    "audit": lambda s: audit(s.net, (s.batch,), modules=["blocks.*"]),
    "verify": lambda s: verify(s.net, (s.batch,), plan=s.plan, loss=s.loss),
    "measure": _measured,
    "saved_activations": lambda s: saved_activations(s.net, (s.batch,)),
    "doctor.examine": lambda s: doctor.examine(s.net, (s.batch,), plan=s.plan, budget=0.5, **_planned(s)),
    "doctor.watch": _watched,
    "apply": _applied,
}


FAILS = ("", "in forward", "in backward", "in the loss", "with values")
AS_MAKE_PLAN = {"make_plan, too small", "profile"}  # up to where the model raises


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize(
    ("asked", "fails"),
    [
        pytest.param(asked, fails, marks=[pytest.mark.nightly] * (fails != "" and asked in AS_MAKE_PLAN))
        for asked in ASKED
        for fails in FAILS
    ],
)
def test_asking_changes_nothing(asked: str, fails: str) -> None:
    """Whatever is asked, with no price known or all, and where the model raises: all is as before."""
    scene = Scene(fails)
    for temperature in ("cold",) if fails else ("cold", "warm"):
        before = scene.picture()
        error: Exception | None = None
        try:
            ASKED[asked](scene)
        except (ValueError, BudgetError) as raised:
            error = raised
        after = scene.picture()
        assert [key for key in before | after if before.get(key) != after.get(key)] == [], temperature
        del error


class Tracker:
    """Counts calls, with what came."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, defaultdict[nn.Module, list[torch.Tensor]](list)

    def hook(self, module: nn.Module, args: Any) -> None:
        self.calls += 1
        self.seen[module].append(args[0])


class Counted(nn.Linear):
    """Fills what its class and its module have."""

    everywhere: ClassVar[list[torch.Tensor]] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        global latest_of_all
        latest_of_all = input
        self.everywhere.append(input)
        return super().forward(input)


latest_of_all: Any = None


def test_what_hooks_and_the_loss_fill_is_as_before() -> None:
    """Containers, objects, variables and tensors that the user's code writes to in a planned step are put back."""
    model = nn.Sequential(*(nn.Sequential(Counted(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))
    inputs: dict[nn.Module, list[torch.Tensor]] = {}
    norms, recent = OrderedDict[str, torch.Tensor](old=torch.ones(1)), deque[torch.Tensor](maxlen=2)
    names, losses, met = {one: name for name, one in model.named_modules()}, [torch.ones(1)], set[nn.Module]()
    tracker, beside = Tracker(), Tracker()
    mean, bank, latest, calls = torch.zeros(1), torch.zeros(500, WIDTH), None, 0

    def forward_hook(module: nn.Module, args: Any) -> None:
        nonlocal latest, calls
        latest, calls = args[0], calls + 1
        forward_hook.calls = getattr(forward_hook, "calls", 0) + 1  # pyright: ignore[reportFunctionMemberAccess]
        inputs.setdefault(module, []).append(args[0])
        recent.append(args[0])
        met.add(module)
        bank[:4] = args[0].detach()

    def backward_hook(module: nn.Module, _: Any, gradients: Any) -> None:
        norms[names[module]] = (gradients[0].t() @ inputs[module].pop()).norm()

    def loss(output: torch.Tensor) -> torch.Tensor:
        beside.hook(nn.Identity(), (output,))
        losses.append(output.mean().detach())
        mean.add_(losses[-1])
        return output.mean()

    for layer in [one for one in model.modules() if isinstance(one, nn.Linear)]:
        layer.register_forward_pre_hook(forward_hook)
        layer.register_forward_pre_hook(tracker.hook)
        layer.register_full_backward_hook(backward_hook)
    version = mean._version
    make_plan(model, (torch.randn(4, WIDTH, requires_grad=True),), budget=0.5, loss=loss)
    assert (inputs, [*norms], [*recent], len(losses), met) == ({}, ["old"], [], 1, set())
    assert (tracker.calls, tracker.seen, beside.calls, beside.seen, vars(forward_hook)) == (0, {}, 0, {}, {})
    assert (latest, calls, latest_of_all, Counted.everywhere, [*names]) == (None, 0, None, [], [*model.modules()])
    assert (mean.item(), bank.sum().item(), mean._version) == (0, 0, version)
    loss(model(torch.randn(4, WIDTH, requires_grad=True))).backward()
    assert (len(norms), tracker.calls, len(met), calls) == (4, 3, 3, 3)
