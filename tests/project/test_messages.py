"""Every text of an error, word for word, as a misuse through the public API raises it.

`MISUSES` is the table; `messages.txt` has the class and the whole text for each row, as a user reads it. After a text
was changed on purpose, `PYTHONPATH=tests python tests/project/test_messages.py` writes that file again, and its diff is
the change. A `raise` that no row reaches fails the test below the table, so a new text cannot go unread.
"""

import ast
import contextlib
import copy
import errno
import functools
import json
import os
import pickle
import re
import shutil
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import mock_open, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointError, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

import torch_recompute
from laws.watch import Turns, vector
from support.elastic import Script
from support.models import Block, Made
from torch_recompute import (
    ArgumentError,
    BudgetError,
    ChangedError,
    Choice,
    Elastic,
    MismatchError,
    NotRecomputingError,
    OnDisk,
    OnHost,
    OutputDiscardCheckpoint,
    Plan,
    Profile,
    RecomputeConfig,
    RecomputeError,
    SaveError,
    Stages,
    StoreError,
    _torch,
    apply,
    audit,
    auto,
    checkpoint,
    checkpoint_sequential,
    doctor,
    doing_recompute,
    get_recompute_data,
    make_plan,
    measure,
    no_recompute,
    peaks,
    recompute,
    replay,
    save_for_recompute,
    saved_activations,
    simulate,
    solve,
    state,
    testing,
    verify,
)
from torch_recompute.commands import bench, cli, demo, models, output
from torch_recompute.commands import plan as plan_command
from torch_recompute.commands import verify as verify_command
from torch_recompute.commands.trials import DONE, Record, Setting, Workload
from torch_recompute.compat import deepspeed, megatron, paddle
from torch_recompute.compiling import Partition
from torch_recompute.compiling.layers import CompiledLayers, compile_layers
from torch_recompute.distributed import (
    RngStreams,
    ShardedOver,
    agree_on,
    find_reentrant,
    fused_allreduce_gradients,
    keep_collectives,
    rng,
)
from torch_recompute.distributed.agreement import compare
from torch_recompute.engine import mismatch
from torch_recompute.integrations import huggingface, lightning, policies
from torch_recompute.memory import meter
from torch_recompute.memory.budget import read_budget
from torch_recompute.memory.free import free_bytes
from torch_recompute.memory.meter import meter_for
from torch_recompute.plan.plan import Prediction
from torch_recompute.plan.ranks import Ranks
from torch_recompute.plan.units import find_units, register
from torch_recompute.planner.cost import Costs, Kind, Option, Point, Segment
from torch_recompute.planner.hosts import link_of
from torch_recompute.planner.layout import Layout, LayoutPlanner, RankPlan
from torch_recompute.planner.schedules import Action, orders_named, orders_of, schedule_steps
from torch_recompute.planner.solve import choose
from torch_recompute.planner.tensor_parallel import divided, rank_model
from torch_recompute.simulation import simulate_step
from torch_recompute.simulation.copies import Faker
from torch_recompute.simulation.devices import HOST_FIGURES, Roofline
from torch_recompute.simulation.ring import over_ring
from torch_recompute.simulation.training_step import TrainingStep
from torch_recompute.state import values
from torch_recompute.stores import bandwidth, host
from torch_recompute.stores.transfers import Direct, TransferQueue


def no_group() -> ShardedOver:
    return ShardedOver.__new__(ShardedOver)


class HidesIn:
    """Makes an optimizer of a model that it holds where no copy of it is reached."""

    __slots__ = ("model",)

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __call__(self, _: object) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.SGD(self.model.parameters())

    def __repr__(self) -> str:
        return "HidesIn(model)"


def nn_linear() -> torch.nn.Module:
    return torch.nn.Linear(3, 3)


def sines() -> torch.fx.GraphModule:
    """A joint graph of two operations and their backward."""

    def joint(x: torch.Tensor, tangents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        return y.exp(), tangents * y

    return make_fx(joint)(vector(), vector())


class Breaks(torch.nn.Module):
    """Has a graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x


class Reads(torch.nn.Module):
    """Reads values of its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.nonzero()


class Pads(torch.nn.Linear):
    """Writes the rows of which the first element is positive into a tensor as long as the longest."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kept = input[..., 0] > 0
        lengths = input[..., 0].sign().relu().sum(1).long()
        inside = torch.arange(lengths.max()) < lengths[:, None]
        made = input.new_zeros(*inside.shape, input.shape[2])
        made[inside.nonzero(as_tuple=True)] = super().forward(input)[kept.nonzero(as_tuple=True)]
        return made


class Differentiates(torch.nn.Module):
    """A layer that asks for a gradient by `torch.func`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(3, 6), torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: x.sin().sum())(x) * self.down(self.up(x).tanh())


class Linearized(torch.nn.Module):
    """Calls its layer only for a directional derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(self.layer, (x,), (x,))[1]


class Reaches(torch.nn.Module):
    """Reaches its weight through a closure in an object."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.inner = torch.nn.Linear(3, 3)
        self.calls = types.SimpleNamespace(inner=lambda x: inner(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.calls.inner(x)


def a_dtensor() -> torch.Tensor:
    """A tensor of a class of that name; a true one needs a process group."""
    kind = type("DTensor", (torch.Tensor,), {"__module__": "torch.distributed.tensor"})
    return vector().as_subclass(kind)


FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class Named(torch.nn.Module):
    """Two calls with names."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return recompute(torch.sqrt, name="roots")(no_recompute(torch.square, name="squares")(x))


def selects(label: str) -> RecomputeConfig:
    return RecomputeConfig(recompute_granularity="selective", recompute_modules=[label])


class Scale(torch.nn.Module):
    """A weight and a buffer, both at version 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight + self.offset).sin().exp()


def loads_no_head() -> None:
    """Asks for the loss of a model whose configuration names no class with a head."""
    model = nn_linear()
    model.config = types.SimpleNamespace(architectures=None, model_type="llama")  # type: ignore[assignment]
    heads = {"llama": "LlamaForCausalLM"}
    auto = types.SimpleNamespace(
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES=heads, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES={}
    )
    with patch.dict(sys.modules, {"transformers.models.auto.modeling_auto": auto}):  # type: ignore[dict-item]
        models.check_head(model, "config.json", {"input_ids": vector()})


def loads(made: object) -> None:
    """Loads what a function of the user makes."""
    with patch.dict(sys.modules, {"mine": types.SimpleNamespace(model=lambda: made)}):  # type: ignore[dict-item]
        models.load("mine:model")


STAGED = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def plans_stages(**options: Any) -> None:
    """Plans two stages of one layer each, whatever is said wrong."""
    said: dict[str, Any] = {"budget": 2**30, "stages": Stages("GPipe", pipeline=2, microbatches=2), **options}
    model = said.pop("model", STAGED)
    sizes = "sizes" in options
    make_plan(model, () if sizes else (torch.ones(8, 4),), device="h100", **{"loss": torch.sum, **said})


def in_backward() -> torch.nn.Module:
    """A model whose optimizer steps in backward."""
    model = torch.nn.Linear(8, 8, bias=False)
    own = torch.optim.SGD([model.weight])
    model.weight.register_post_accumulate_grad_hook(lambda _: own.step())
    return model


def without_peft() -> None:
    """Adapters on a machine without PEFT."""
    with patch.dict(sys.modules, {"peft": None}):
        plans("gpt2", "--budget", "1GiB", "--lora", "8")


class Opaque:
    """Something with a short repr that is of no use."""

    def __repr__(self) -> str:
        return "Opaque()"


class ShortStore:
    """A store that returns a part of what it was given."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def get(self, handle: torch.Tensor) -> Any:
        return handle[:1]


class EmptyStore(ShortStore):
    """A store that returns nothing."""

    def get(self, handle: torch.Tensor) -> Any:
        return None


@contextlib.contextmanager
def full_disk() -> Any:
    """A disk with one page left."""

    def refuses(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    usage = types.SimpleNamespace(free=4096)
    with (
        patch.object(os, "posix_fallocate", refuses, create=True),
        patch.object(shutil, "disk_usage", lambda folder: usage),
    ):
        yield


@contextlib.contextmanager
def lacking(module: types.ModuleType, name: str) -> Any:
    """A module that lacks a function, as on other systems."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delattr(module, name)
        yield


@contextlib.contextmanager
def damaged_disk() -> Any:
    """A disk that changes the first byte of each block."""
    write = os.pwrite

    def flips(fd: int, view: memoryview, place: int) -> int:
        return write(fd, bytes([view[0] ^ 1]) + bytes(view[1:]), place)

    with patch.object(os, "pwrite", flips):
        yield


def three_by_way_of_a_disk() -> None:
    store, y = OnDisk("/tmp", ahead=0), vector()
    for _ in range(3):
        y = region(lambda x: x.sin().exp(), inputs=store)(y)
    y.sum().backward()


class Silencer(contextlib.AbstractContextManager[None]):
    """A context that swallows exceptions."""

    def __exit__(self, *exception: object) -> bool:
        return True


def region(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The region `layer 3`."""
    return recompute(fn, name="layer 3", **options)


def step(fn: Callable[..., Any], **options: Any) -> None:
    """One forward and backward of a region."""
    region(fn, **options)(vector()).sum().backward()


def inside(context: contextlib.AbstractContextManager[Any], misuse: Callable[[], Any]) -> Any:
    """A misuse inside of a context."""
    with context:
        return misuse()


def by_hand() -> nn.Module:
    """A layer whose attention is a function."""
    return Made(lambda m, x: m.layer(x), layer=Block(8, True))


class NoOptimizer:
    """Is called without parameters."""

    def __call__(self) -> None: ...
    def __repr__(self) -> str:
        return "NoOptimizer()"


def yields(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x.sin()


@contextlib.contextmanager
def file_of(content: object) -> Iterator[None]:
    """A folder that holds content in config.json."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("config.json").write_text(json.dumps(content))
            yield
        finally:
            os.chdir(before)


NO_HOST = dict.fromkeys((f"{name}_seconds" for name in HOST_FIGURES), "fast")


def with_host(host: Any, text: str = "", **options: Any) -> None:
    """Plans with a host; a text is written into its file first."""
    if text:
        Path(host).write_text(text)
    make_plan(torch.nn.Linear(4, 4), (torch.ones(2, 4),), budget=0.5, loss=torch.sum, host=host, **options)


def changes(tensor: torch.Tensor, region: Callable[..., Any], *args: Any, times: int = 1, **kwargs: Any) -> None:
    """Changes a tensor in place between the forward and the backward of a region."""
    y = region(*args, **kwargs)
    with torch.no_grad():
        for _ in range(times):
            tensor.add_(1)
    y.sum().backward()


class Stamped:
    """The generator of a device while a CUDA graph is captured: seed and relative offset."""

    def __init__(self) -> None:
        self.offset = 0

    def get_state(self) -> torch.Tensor:
        return torch.tensor([7, self.offset]).view(torch.uint8)

    def set_state(self, value: torch.Tensor) -> None:
        _, self.offset = value.view(torch.int64).tolist()


@contextlib.contextmanager
def captured(generator: Stamped | None = None) -> Iterator[None]:
    """As if a CUDA graph were captured."""
    with contextlib.ExitStack() as stack:
        for module in (state, values, mismatch, host, rng):
            stack.enter_context(patch.object(module, "capturing", return_value=True))
        stack.enter_context(patch.object(_torch, "device_generators", return_value=[generator or Stamped()]))
        stack.enter_context(patch.object(torch.cuda, "current_device", return_value=0))
        yield


def draws_in_another_graph() -> None:
    generator = Stamped()

    def draw(x: torch.Tensor) -> torch.Tensor:
        generator.offset += 4
        return x.sin().exp()

    with captured(generator):
        y = recompute(draw, name="layer 3", state=[state.DEVICE_RNG])(vector())
        generator.offset = 0
        y.sum().backward()


def reads_in_a_graph() -> None:
    def size() -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")

    size.__qualname__ = "size"
    inside(captured(), lambda: step(lambda x: x.sin().exp() * replay(size)()))


class Slow(Direct):
    """A host whose copies take time."""

    direct = False


# --- misuses --------------------------------------------------------------------------------------------------------


def among(count: int, rank: int, misuse: Callable[[], Any]) -> Any:
    """A misuse by one of `count` ranks, where no other rank holds the tensor that it does."""

    def others_have_none(mine: Any, _: Any, group: Any, async_op: bool = False) -> Any:
        mine.zero_()
        return types.SimpleNamespace(wait=lambda: None)

    def others_say_the_same(sides: list[Any], mine: Any, group: Any) -> None:
        sides[:] = [mine] * len(sides)

    group = {
        "is_initialized": lambda: True,
        "get_world_size": lambda _: count,
        "get_rank": lambda _: rank,
        "get_process_group_ranks": lambda _: range(count),
        "all_gather_object": others_say_the_same,
    }
    with (
        patch.multiple("torch.distributed", **group),
        patch("torch_recompute.distributed.sharded._all_gather", others_have_none),
    ):
        return misuse()


def no_plan_on_another_rank() -> None:
    def another_fails(held: list[Any], mine: Any) -> None:
        held[:] = [mine, (mine[0], "no plan fits.", True)]

    group = {"get_world_size": lambda: 2, "get_rank": lambda: 0, "all_gather_object": another_fails}
    with patch.multiple("torch.distributed", is_initialized=lambda: True, **group):
        model, args, loss = small_stack()
        auto(model, args, loss=loss, budget="1GiB", device="h100")


def opened_out_of_step() -> None:
    store = ShardedOver(compared=0)
    handles = [store.put(torch.ones(64, 64)) for _ in range(3)]
    store.get(handles[2])
    store.get(handles[1])


def split_over_all() -> Any:
    """What looks like a DTensor that is split over a mesh of all ranks."""
    tensor = types.SimpleNamespace(placements=[Shard(0)], device_mesh=types.SimpleNamespace(get_group=lambda dim: None))
    tensor.detach = lambda: tensor
    return tensor


def shows_a_configuration(text: str) -> None:
    """`show` of a file with this text, on a machine without transformers."""
    with (
        patch.object(Path, "is_file", return_value=True),
        patch.object(Path, "read_text", return_value=text),
        patch.dict(sys.modules, {"transformers": None}),
    ):
        models.load("config.json")


def described(takes: str, **config: int) -> nn.Module:
    """A model that transformers could have made."""
    model = nn.Module()
    model.main_input_name, model.config = takes, types.SimpleNamespace(**config)  # type: ignore[assignment]
    model.forward = lambda input_ids=None: None
    return model


def with_table(positions: int) -> nn.Module:
    """A model whose positions are a table."""
    model = described("input_ids", max_position_embeddings=positions)
    model.wpe = nn.Embedding(positions, 1)
    return model


def runs(*argv: str) -> None:
    """A command without what turns its errors into exit codes."""
    args = cli.build_parser().parse_args(argv)
    args.command(args)


plans = functools.partial(runs, "plan")
reports = functools.partial(runs, "report")


def reports_on(more: dict[str, Any]) -> None:
    """Runs it on a plan's file with something more in it."""
    text = json.dumps({**json.loads(Plan().to_json()), **more})
    with patch.object(Path, "read_text", return_value=text):
        reports("plan.json")


def benches(*argv: str, **patched: Any) -> None:
    """`torch-recompute bench run` up to its own errors."""
    with contextlib.ExitStack() as stack:
        for name, value in patched.items():
            stack.enter_context(patch(name, value))
        runs("bench", "run", *argv)


def reads(text: str, read: Callable[[Path], object], name: str = "a.json") -> None:
    """A file that holds this text."""
    with patch.object(Path, "read_text", return_value=text):
        read(Path(name))


FIGURE = bench.Figure("every layer", 1.0, 9.0, None, None, 0.0, 1.0, 8, {"activations": 8}, [["0x1p+0"]], "a plan")
GOLDEN = bench.Golden(Workload("gpt-tiny"), 1, 9, "H200", 7, {"key": FIGURE}, source="golden.json")


def reads_golden(**changes: Any) -> None:
    """A file of golden figures, one of which is otherwise."""
    data: dict[str, Any] = {**bench.GOLDEN, **asdict(GOLDEN)}
    del data["source"]
    data["figures"]["key"].update(changes)
    reads(json.dumps(data), bench.Golden.read)


def planned_output(*keep: str) -> tuple[Any, torch.nn.Module, torch.Tensor]:
    """A model with a plan, and what it returned."""
    model = torch.nn.Sequential(torch.nn.Sequential(nn_linear(), torch.nn.Tanh(), nn_linear()), torch.nn.Tanh())
    handle = apply(model, Plan((Choice(("0",), keep),)))
    return handle, model, model(torch.ones(2, 3, requires_grad=True)).sum()


def freezes_a_layer() -> None:
    _, model, out = planned_output()
    model.requires_grad_(False)
    out.backward()


def takes_the_plan_out() -> None:
    handle, _, out = planned_output("0")
    handle.remove()
    out.backward()


def watched_after_removal() -> None:
    handle = apply(Scale(), Plan((Choice(("",)),)))
    handle.remove()
    with handle.watch():
        pass


def respect_hooks_that_torch_does_not_know() -> None:
    """What 2.14's selective contexts look for the user's hooks with is not there, as before."""
    contexts = functools.partial(create_selective_checkpoint_contexts, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks", raising=False)
        checkpoint(torch.exp, vector(), context_fn=contexts, respect_saved_tensors_hooks=True)


def fits_where_memory_is_unknown() -> None:
    elsewhere = patch("torch_recompute.memory.free.sys", types.SimpleNamespace(platform="darwin"))
    with elsewhere, patch.dict(sys.modules, {"psutil": None}):
        make_plan(nn.Sequential(nn.Linear(2, 2)), (torch.ones(1, 2),), loss=torch.sum, budget="fit")


class Said:
    """A meter that says what it is told to."""

    def __init__(self, live: int) -> None:
        self.bytes = live

    def live(self) -> int:
        return self.bytes

    def reset_lap(self) -> None:
        pass

    def lap(self) -> int:
        return self.bytes + 300


def elastic_under(limit: int, fn: Callable[..., Any], live: int = 2_000) -> Any:
    """The call of an elastic region, while so many bytes are alive."""
    return recompute(fn, name="layer 3", elastic=Elastic(limit, meter=Said(live)))(vector().clone())


def emptied_of_another_call() -> None:
    """A saved call that is evicted with its region, and does other work when it is made again."""
    script, runs = Script("forward", saved=True), []

    def attend(x: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        return x.exp() if len(runs) == 1 else x.exp().exp()

    body = no_recompute(attend, name="attention")
    recompute(lambda x: body(x.cos()).sin(), name="layer 3", elastic=script)(vector()).sum().backward()


def elastic_beside_others(**options: Any) -> None:
    """A limit that is enough for the step alone, and not with all else that is alive."""
    with patch("torch_recompute.memory.elastic.meter_for", return_value=Said(9_000_000)):
        auto(nn.Sequential(nn_linear(), nn.ReLU()), vector(), loss=torch.sum, **options)


def elastic_in_a_graph() -> None:
    with patch("torch_recompute.engine.elastic.capturing", return_value=True):
        elastic_under(10_000, torch.sin)


def on_meta() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    return torch.nn.Linear(3, 3, device="meta"), (torch.ones(1, 3),)


class Unfit(torch.nn.Linear):
    """What torch says of a batch of another width, in the words of 2.13."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (1x2 and 3x3)")


def does_not_fit() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    return Unfit(3, 3), (torch.ones(1, 2),)


def verifies(model: str) -> None:
    """`torch-recompute verify` up to its own errors."""
    here = patch.dict(sys.modules, this_test=sys.modules[__name__])
    with here, patch.object(verify_command, "read_plan", return_value=Plan()):
        runs("verify", model, "--plan", "plan.json", "--quiet")


attention = no_recompute(torch.sin, name="attention")


def reads_an_unread_output_after_its_replay() -> None:
    held: list[torch.Tensor] = []
    product = no_recompute(torch.sin, name="product", values_unused=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = product(x.exp())
        held.append(y)
        return y + x.cos().exp()

    step(layer)
    held[-1].sum()


def empties_a_large_container() -> None:
    """The replay would read a table that has fewer entries than in forward."""
    scale = Scale()
    scale.table = dict.fromkeys(range(2000))
    y = recompute(scale)(vector()).sum()
    scale.table.clear()
    y.backward()


def changes_a_tensor_that_it_saved() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        z = y.sin()
        y.add_(1)
        return z

    step(fn, early_stop=False)


def changes_the_output_of_a_saved_call() -> None:
    product = no_recompute(torch.exp, name="product")

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = product(x)
        z = y.sin().sin()
        y.add_(1)
        return z.exp()

    step(fn)


def changes_a_value_that_it_saved() -> None:
    mask = torch.ones(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            (chosen,) = get_recompute_data()
        else:
            chosen = mask.clone()
            save_for_recompute(chosen)
            held.append(chosen)
        return (x * chosen).exp()

    held: list[torch.Tensor] = []
    y = recompute(fn, name="layer 3")(vector())
    held[0].add_(1)
    y.sum().backward()


def plans_two_models_of_one_layer() -> None:
    layer = Scale()
    for model in (torch.nn.Sequential(layer), torch.nn.ModuleList([layer])):
        apply(model, Plan((Choice(("0",)),)))


def saves_twice(x: torch.Tensor, **key: str) -> torch.Tensor:
    save_for_recompute(0, key="another")
    save_for_recompute(1, **key)
    save_for_recompute(2, **key)
    return x


def reads_a_key(x: torch.Tensor, key: str, *saved: str | None) -> torch.Tensor:
    if doing_recompute():
        get_recompute_data(key)
    for one in saved:
        save_for_recompute(1, key=one)
    return x.sin().exp()


def saves_what_requires_grad(x: torch.Tensor) -> torch.Tensor:
    scores = x.exp()
    save_for_recompute(scores.argmax(), {"scores": scores})
    return scores.sin()


def discards(*consumers: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Discards the output of a sine once for each consumer."""
    odc = OutputDiscardCheckpoint()
    h = odc.checkpoint(torch.sin, vector())
    for consumer in consumers:
        odc.discard_output_and_register_recompute(consumer(h))


class Sharded(Scale):
    """A module with a sharding state of its own, as `fully_shard` gives each that it is called with."""

    def _get_fsdp_state(self) -> object:
        return self.__dict__.setdefault("state", object())


def shards_one_by_one() -> None:
    """A plan over two layers, each sharded on its own."""
    model = torch.nn.Sequential(Sharded(), Sharded())
    apply(model, Plan((Choice(("0", "1")),)))
    model(vector())


def returns_something_else() -> None:
    """A replay whose result has another shape, and whose forward's was discarded."""
    odc = OutputDiscardCheckpoint()
    turns = Turns(lambda x: x * 2, lambda x: torch.cat([x, x]))
    turns.__qualname__ = "<turns>"
    y = odc.checkpoint(turns, vector()).sin()
    odc.discard_output_and_register_recompute(y)
    y.sum().backward()


class Scaled(torch.nn.Module):
    """Multiplies by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).exp().exp()


def needs_what_another_thread_has_exchanged() -> None:
    """A replay inside of one, which needs a module that a replay on another thread holds in the meantime."""
    held, done = threading.Event(), threading.Event()
    layer = Scaled()

    def waits(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        if doing_recompute():
            held.set()
            done.wait(20)
        return y.exp()

    def goes_back(x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            inner[0].backward()
        return x.exp().exp()

    inner = [recompute(layer, name="inner")(vector()).sum()]
    other = recompute(waits, name="other")(vector()).sum()
    outer = recompute(goes_back, name="outer")(vector()).sum()
    layer.scale = 3.0
    thread = threading.Thread(target=other.backward)
    thread.start()
    try:
        held.wait(20)
        outer.backward()
    finally:
        done.set()
        thread.join()


def encoder() -> torch.nn.Module:
    """Three layers, under the path `layers`."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 3)


class Switched(torch.nn.Module):
    """A module with the methods and the flag of Hugging Face's, and a cache that is written in place."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = Flagged()

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None: ...

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.layer(x, **kwargs)


class Flagged(Scale):
    """A layer of `Switched`."""

    gradient_checkpointing = False

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        if cache is not None:
            cache.keys += 1
        return super().forward(x)


class StaticCache:
    """What passes for a cache of transformers."""

    __module__ = "transformers.cache_utils"

    def __init__(self) -> None:
        self.keys = torch.zeros(2)


ONE_LAYER = Plan((Choice(("layer",)),))


def turns_other_checkpointing_on_inside() -> None:
    model = Switched()
    policies.apply(model, ONE_LAYER)
    model.layer.gradient_checkpointing = True
    model(vector())


def turns_checkpointing_on_in_other_words() -> None:
    model = Switched()
    policies.apply(model, ONE_LAYER)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": None})


@contextlib.contextmanager
def two_ranks() -> Any:
    """The first of two ranks; the second is imagined, and agrees with whatever the first says."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def simulates_wrapped(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    with two_ranks():
        simulate(torch.nn.Sequential(wrap(nn_linear())), (vector(),))


def with_gradient(grad: torch.Tensor) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = grad
    return weight


def reduces_over_shards() -> None:
    with two_ranks():
        mesh = init_device_mesh("cpu", (2,))
        shard = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
        fused_allreduce_gradients([torch.nn.Parameter(shard)])


def reduces_other_parameters() -> None:
    def all_reduce(tensor: torch.Tensor, *_: Any) -> None:
        tensor[0] += 1  # what the other rank says

    with two_ranks(), patch.object(dist, "all_reduce", all_reduce):
        fused_allreduce_gradients([with_gradient(torch.ones(3))])


def wraps_one_by_one() -> None:
    with two_ranks():
        layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        apply(layers, Plan((Choice(("0", "1")),)))
        for i in range(2):
            layers[i] = FullyShardedDataParallel(layers[i], device_id=torch.device("cpu"))
        layers(torch.ones(2, 3))


def summed_over_ranks(x: torch.Tensor) -> torch.Tensor:
    total = x.detach().exp()
    dist.all_reduce(total)
    return x.exp() * total


def evicts_what_gathers_weights() -> None:
    """Backward replays two sharded layers before the hooks that gather their weights."""
    layers = {name: torch.nn.Linear(3, 3) for name in ("up", "down")}
    model = Made(lambda m, _: elastic_under(10**9, lambda x: m.down(m.up(x[None])).sin()), **layers)
    with two_ranks():
        for module in (*layers.values(), model):
            fully_shard(module)
        model(torch.ones(2, 3)).sum().backward()


def measures_twice() -> None:
    measured = measure()
    for _ in range(2):
        with measured:
            pass


def measures_after_its_end() -> None:
    with measure() as measured:
        pass
    measured.track(nn_linear())


GIB = 2**30


class Twice(torch.nn.Module):
    """Calls its layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x)).sum()


class Converts(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super(Converts, self.double()).forward(x)


def in_trainer(**arguments: Any) -> nn.Module:
    """A model with a callback that is to plan, in a Trainer with these arguments."""
    callback, model = huggingface.RecomputeCallback(budget="24GiB"), nn.Sequential(nn.Linear(4, 4))
    callback.on_train_begin(types.SimpleNamespace(**arguments), None, None, model)
    return model


@torch.library.custom_op("messages::without_shapes", mutates_args=())
def without_shapes(x: torch.Tensor) -> torch.Tensor:
    """An operation that says nothing of its shapes."""
    return x.clone()


def nested() -> torch.Tensor:
    """A nested tensor in the layout that PyTorch had first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])


def simulates(hook: Callable[[torch.Tensor], object]) -> None:
    """A model whose forward does something with its output too."""
    model = torch.nn.Linear(4, 4)
    model.register_forward_hook(lambda *seen: hook(seen[-1]))
    simulate(model, (torch.ones(2, 4),), loss=torch.mean)


def small_stack() -> Any:
    two = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)) for _ in range(2)]
    return torch.nn.Sequential(*two), (torch.ones(64, 8),), torch.sum


def tiled_logits(x: torch.Tensor) -> Any:
    """Logits that a plan makes in tiles with their loss, after a step; of larger numbers through another function."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            return 2 * logits.detach()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return 2 * grads[0]

    head = nn.Linear(4, 8)
    apply(nn.Sequential(head), Plan((Choice(("0",), tiles=2, with_loss=True),)))
    logits = head(x)
    if float(x.max()) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which says that the logits are read whole
            return Doubled.apply(logits)
    with torch.no_grad():
        head.weight.zero_()
    return logits


def plans_for_too_little(**options: Any) -> None:
    model, args, loss = small_stack()
    make_plan(model, **(options or {"args": args}), budget="100B", loss=loss, device="h100")


def mixture() -> torch.nn.Module:
    """A mixture of 8 experts, as transformers has it."""
    import transformers

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
    return transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(transformers.MixtralConfig(**sizes))


class Listed(torch.nn.Module):
    """A mixture whose experts are a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(8, 4, bias=False)
        each = (torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in range(4))
        self.experts = torch.nn.ModuleList(each)


class Scalar(torch.nn.Linear):
    """A product that is scaled."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale = torch.nn.Parameter(torch.ones(()))


def on_ranks(ranks: Ranks, *, model: torch.nn.Module | None = None, **options: Any) -> None:
    args = {"args": (torch.ones(2, 8),), "loss": torch.sum, "device": "h100", "budget": "1GiB"}
    make_plan(model or torch.nn.Linear(8, 8), ranks=ranks, **args, **options)


def attends_in_a_ring(*backends: Any, **options: Any) -> None:
    q = torch.ones(1, 1, 4, 8)
    with torch.nn.attention.sdpa_kernel([*backends] or [torch.nn.attention.SDPBackend.FLASH_ATTENTION]):
        over_ring("context-1-0", 1, q, q, q, **options)


def shared_mixture() -> torch.nn.Module:
    """A model whose mixtures have shared experts, too."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "first_k_dense_replace": 0}
    more = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "vocab_size": 32}
    with torch.device("meta"):
        return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes, **heads, **more))


def cut_up(model: torch.nn.Module, **layout: Any) -> None:
    LayoutPlanner(model, "MODEL", Layout(Ranks(**layout)), 8, "none", "h100")


def too_little_on_a_command_line(*options: str) -> None:
    with patch.dict(sys.modules, {"here": types.SimpleNamespace(small_stack=small_stack)}):
        plans("here:small_stack", "--budget", "2KiB", "--device", "h100", *options)


def on_its_own_device(*options: str) -> None:
    with patch.dict(sys.modules, {"here": types.SimpleNamespace(small_stack=small_stack)}):
        plans("here:small_stack", "--budget", "2KiB", *options)


def compiled_without_a_kernel() -> None:
    class Attention(torch.nn.Module):
        """It is written in single operations."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (torch.nn.Linear(8, 8, device="meta") for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.o((self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1) @ self.v(x))

    model, ranks = torch.nn.Sequential(*(torch.nn.Sequential(Attention()) for _ in range(2))), Ranks(cp=2, zero=0)
    compile_layers(model, ranks)
    batch = torch.ones(1, 4, 8, device="meta")
    simulate_step(TrainingStep(model, (batch,), {}, torch.sum, device="h100", ranks=ranks))


def compiled_in_parts() -> None:
    class Reading(torch.nn.Module):
        """A layer whose graph depends on a value."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 8, device="meta"), torch.nn.Linear(8, 8, device="meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x)) * x.sum().item()

    model = torch.nn.Sequential(Reading(), Reading())
    compile_layers(model, Ranks())
    batch = torch.ones(2, 8, device="meta")
    simulate_step(TrainingStep(model, (batch,), {}, torch.sum, device="h100"))


class OverFull:
    """Planned ranks of which none fits."""

    layout = _optimizer = ""
    pipeline = planner = types.SimpleNamespace(ranks=(0, 1), known=types.SimpleNamespace(plans={}))

    def _plan(self, rank: int, budget: int) -> RankPlan:
        promise = Prediction(budget, 5 * GIB, 6 * GIB, 1.0, 1.0, 0, 1.0, "h100", "", ())
        sizes = {"weight_bytes": GIB, "gradient_bytes": GIB, "optimizer_bytes": GIB}
        times = dict.fromkeys(("microbatch_seconds", "replay_seconds", "optimizer_seconds", "link_seconds"), 1.0)
        return RankPlan(
            rank=rank,
            layers=((0,),),
            parameters=1,
            **sizes,
            held=(1,),
            sent=(),
            activation_bytes=(1 + rank) * GIB,
            plain_peak_bytes=6 * GIB,
            link_bytes=0,
            **times,
            plan=Plan((), "", promise),
            made_of={},
            where="",
        )


COSTS = Costs(
    {"layer": Kind((Option((), 2 * GIB, 3 * GIB, 4 * GIB, 0.0), Option((Choice(("",)),), GIB, 3 * GIB, 4 * GIB, 0.5)))},
    tuple(Segment(f"layers.{i}", "layer", GIB, 5 * GIB // 4) for i in range(4)),
    (Point(4, 5 * GIB + 1, "in the loss"),),
)


def without(package: str, misuse: Callable[[], object]) -> None:
    """A misuse where a package is not installed."""
    inside(patch.dict(sys.modules, {package: None}), misuse)


TWO = Plan((Choice(("a",)), Choice(("b",))))


# --- the table ------------------------------------------------------------------------------------------------------

# What is asked wrongly, by class of error. The texts are in messages.txt, each under its misuse.
MISUSES: tuple[Callable[[], Any], ...] = (
    # --- ArgumentError
    # what a function is given
    lambda: recompute(Opaque()),
    lambda: no_recompute(Opaque()),
    lambda: replay(Opaque()),
    lambda: checkpoint(Opaque(), vector()),
    lambda: recompute(torch.exp, check="value"),
    lambda: recompute(torch.exp, inputs="cpu"),
    lambda: no_recompute(torch.exp, store="cpu"),
    lambda: recompute(torch.exp, state=["numpy"]),
    lambda: region(lambda x, parts: x)(vector(), (i for i in range(3))),
    lambda: region(lambda x, parts: x)(vector(), parts=iter([1, 2])),
    lambda: recompute(torch.nn.Sequential(torch.jit.script(torch.nn.ReLU())))(vector()),
    # torch.utils.checkpoint's options
    lambda: checkpoint(torch.exp, vector(), use_reentrant="no"),
    lambda: checkpoint(torch.exp, vector(), use_reentrant=True, debug=True),
    lambda: checkpoint_sequential([torch.sin, torch.exp], 2, vector(), vector()),
    lambda: checkpoint(torch.exp, vector(), determinism_check="defalt"),
    lambda: checkpoint(torch.exp, vector(), debug=True, context_fn=lambda: (Silencer(), Silencer())),
    lambda: checkpoint(use_reentrant=False, mask=None),
    respect_hooks_that_torch_does_not_know,
    lambda: checkpoint_sequential([torch.sin, torch.exp, torch.sin], 4, vector()),
    lambda: checkpoint_sequential([torch.sin, torch.exp, torch.sin], 0, vector()),
    # the calls of other systems
    lambda: paddle.recompute(Opaque(), vector()),
    lambda: paddle.recompute(torch.exp, vector(), preserve_rng_state="no"),
    lambda: paddle.recompute(torch.exp, vector(), offload_indices=0),
    lambda: paddle.recompute(torch.add, vector(), vector(), offload_indices=[0, 2]),
    lambda: paddle.recompute(torch.add, vector(), other=vector(), offload_indices=[1]),
    lambda: paddle.recompute(torch.exp, input=vector(), offload_indices=[0]),
    lambda: paddle.recompute(torch.sum, vector(), 0, offload_indices=[1]),
    lambda: paddle.recompute(torch.mul, vector(), Scale().weight, offload_indices=[1]),
    lambda: paddle.recompute_sequential({"segments": 1, "offload": True}, [torch.sin], vector()),
    lambda: paddle.recompute_sequential(2, [torch.sin, torch.exp], vector()),
    lambda: paddle.recompute_sequential({}, [torch.sin], vector(), vector()),
    lambda: paddle.recompute_sequential({}, [torch.sin], vector(), mask=vector()),
    lambda: paddle.recompute_sequential({}, [torch.sin, torch.exp], vector(), offload_indices=[0]),
    lambda: paddle.recompute_sequential({"segments": 3}, [torch.sin, torch.exp], vector()),
    lambda: megatron.checkpoint(torch.exp, vector()),
    lambda: megatron.checkpoint(torch.exp, True, vector()),
    lambda: megatron.CheckpointWithoutOutput(retain_input_tensors=None),
    lambda: megatron.CheckpointWithoutOutput("hybrid"),
    lambda: megatron.CheckpointWithoutOutput(ckpt_manager=Opaque()),
    lambda: deepspeed.configure(None, {"activation_checkpointing": {"cpu_checkpointing": "auto"}}),
    lambda: deepspeed.configure(None, partition_activations=True, checkpoint_in_cpu=True),
    lambda: deepspeed.configure(None, {"activation_checkpointing": {"contiguous_memory_optimization": True}}),
    lambda: deepspeed.configure(None, num_checkpoints=4),
    lambda: deepspeed.configure(None, synchronize=True),
    lambda: deepspeed.configure(None, profile=True),
    lambda: deepspeed.configure(None, "no/such/ds.json"),
    lambda: deepspeed.configure(None, {"activation_checkpointing": True}),
    lambda: deepspeed.configure(None, Opaque()),
    lambda: deepspeed.configure(None, {"activation_checkpointing": {"checkpoint_in_cpu": True}}),
    lambda: deepspeed.configure(None, {"activation_checkpointing": {"partitioned_activations": True}}),
    # tiles
    lambda: recompute(torch.sin, elastic=True),
    lambda: Elastic(0.5),
    lambda: Elastic("72G"),
    lambda: Elastic("24GiB", slack=5),
    lambda: Elastic("24GiB", to="cpu"),
    lambda: elastic_under(1_000, torch.sin),
    elastic_in_a_graph,
    emptied_of_another_call,
    lambda: recompute(torch.sin, tiles=0),
    lambda: recompute(torch.sin, tile_dim=0),
    lambda: recompute(torch.sin, tiles=2)(3.0),
    lambda: recompute(torch.sin, tiles=2)(input=vector()),
    lambda: recompute(torch.sin, tiles=2)(vector()),
    lambda: recompute(torch.add, tiles=2, tile_dim=0)(vector(), torch.ones(2, 3)),
    lambda: recompute(lambda x: (x.sin(), 1.5), name="layer 3", tiles=2, tile_dim=0)(vector()),
    lambda: recompute(lambda x: x.sin().sum(0, keepdim=True), name="layer 3", tiles=1, tile_dim=0)(vector()),
    # a discarded output
    lambda: discards(lambda h: vector() * 2),
    lambda: discards(lambda h: h),
    lambda: OutputDiscardCheckpoint(fp8="e4m3"),
    lambda: OutputDiscardCheckpoint(ckpt_manager=Opaque()),
    # ranks
    lambda: ShardedOver(),
    lambda: among(3, -1, lambda: ShardedOver()),
    lambda: among(1, 0, lambda: ShardedOver()),
    lambda: among(2, 0, lambda: ShardedOver(compared="all")),
    lambda: inside(two_ranks(), lambda: ShardedOver(init_device_mesh("cpu", (2,)))),
    lambda: inside(captured(), RngStreams(1234).fork("expert").__enter__),
    lambda: RngStreams(1234, tensor=None),
    lambda: RngStreams(-1),
    lambda: RngStreams(10).add("expert", 3),
    lambda: RngStreams(10).add("mine", 10),
    lambda: RngStreams(10).fork("model_parallel").__enter__(),
    lambda: keep_collectives(torch.sin, kind="all_reduce"),
    lambda: inside(two_ranks(), lambda: elastic_under(10**9, summed_over_ranks)),
    evicts_what_gathers_weights,
    lambda: inside(two_ranks(), lambda: Elastic(group=[0, 1])),
    # plans
    lambda: Plan((Choice(("a",)), Choice(("a",)))),
    lambda: Choice("layers.0"),
    lambda: Plan(("layers.0",)),
    lambda: Plan().diff("full"),
    lambda: Plan.from_json({"version": 1}),
    lambda: Plan.from_json('{"version": 99}'),
    lambda: Plan.from_json('{"version": 1, "source": "", "choices": [{"paths": "12"}]}'),
    lambda: Plan.from_json('{"version": 1, "source": "", "choices": [{"paths": ["1"], "carry": "false"}]}'),
    lambda: apply(Scale(), Plan(), stores=[OnHost()]),
    lambda: apply(nn.DataParallel(nn.Sequential(Scale())), Plan((Choice(("0",)),))),
    lambda: apply(nn.DataParallel(nn.Sequential(Scale())), Plan(modules=(("0", "Scale with 1 parameters"),))),
    lambda: simulate(Scale(), (torch.ones(2),), plan="full"),
    lambda: simulate(Scale(), (torch.ones(2),), rounding=-1),
    lambda: measure(nn.LazyLinear(4)),
    lambda: measure(device="h100"),
    lambda: Ranks(param_dtype="bfloat16"),
    lambda: solve(Plan(), budget=0.5),
    lambda: make_plan(nn_linear(), (torch.ones(2, 3),), budget=0.5, sizes=64),
    lambda: make_plan(nn_linear(), (torch.ones(2, 3, dtype=torch.float64),), budget=0.5),
    lambda: make_plan(nn_linear(), (torch.ones(2, 3),), budget=0.5, ranks=4),
    lambda: make_plan(nn_linear(), (torch.ones(2, 3),), budget=0.5, optimizer=NoOptimizer()),
    lambda: recompute(yields),
    lambda: recompute(torch.sin, inputs=OnHost),
    lambda: recompute(torch.sin, state=[state.PythonRng]),
    lambda: recompute(torch.sin, elastic=Elastic),
    lambda: register("layer", Scale()),
    lambda: recompute(nn.TransformerEncoderLayer(4, 2, batch_first=True), tiles=2),
    lambda: apply(by_hand(), Plan((Choice(("layer",), tiles=2),))),
    lambda: make_plan(nn_linear(), (torch.ones(2, 3),), budget=0.5, loss="mse"),
    lambda: make_plan(nn_linear(), (torch.ones(2, 3),), budget=0.5, loss=nn.MSELoss),
    lambda: make_plan(nn_linear().requires_grad_(False), (torch.ones(2, 3),), budget=0.5),
    lambda: Plan((Choice(("a",), tiles=-1),)),
    lambda: Plan((Choice(("a",), tiles=2, offload=True),)),
    lambda: Plan((Choice(("head",), tiles=2, with_loss=True, store="host"),)),
    lambda: Plan((Choice(("a@scores",), tiles=2),)),
    lambda: tiled_logits(2 * torch.eye(4)).sum().backward(),
    lambda: tiled_logits(torch.eye(4)).argmax(),
    lambda: apply(Scale(), "full"),
    watched_after_removal,
    lambda: [apply(model, Plan((Choice(("",)),))) for model in [Scale()] * 2],
    lambda: apply(copy.deepcopy(apply(Scale(), Plan((Choice(("",)),))).model), Plan()),
    lambda: plans_two_models_of_one_layer(),
    lambda: apply(torch.nn.Sequential(Scale(), Scale()), Plan((Choice(("00",)),))),
    lambda: apply(torch.nn.ModuleDict({"a@b": Scale()}), Plan((Choice(("a@b",)),))),
    lambda: apply(torch.nn.Sequential(*[Scale()] * 2), Plan((Choice(("0",)), Choice(("1",))))),
    lambda: apply(torch.nn.Sequential(nn.ModuleList([Scale(), Scale()])), Plan((Choice(("0",)),))),
    lambda: apply(torch.nn.Sequential(Scale()), Plan((Choice(("0",), tiles=2, with_loss=True),))),
    lambda: inside(file_of({"model_type": "gpt2"}), lambda: huggingface.apply(Scale(), "config.json")),
    lambda: apply(Scale(), Plan((Choice(("",), store="sharded"),))),
    lambda: apply(Scale(), Plan((Choice(("",), store="disk"),))),
    lambda: apply(Scale(), Plan((Choice(("",), store="scratch", offload=True),))),
    lambda: apply(Scale(), Plan((Choice(("",)),)), stores={"host": OnHost()}),
    lambda: apply(Scale(), Plan((Choice(("",)),)), elastic=True),
    lambda: apply(Scale(), Plan((Choice(("",), offload=True),)), elastic=Elastic("1GiB")),
    lambda: apply(Scale(), Plan((Choice(("",), store="tp", elastic=True),)), stores={"tp": no_group()}),
    shards_one_by_one,
    wraps_one_by_one,
    lambda: RecomputeConfig(recompute_granularity="selective", recompute_modules=["1"]).plan(
        torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)), (torch.ones(2, 3),)
    ),
    # a replay that does something else
    lambda: measure([1]),
    lambda: demo.DemoConfig(steps=0).check(),
    lambda: demo.DemoConfig(d_model=130).check(),
    lambda: demo.DemoConfig(seed=2**64).check(),
    lambda: demo.read_text(Path("no/such.txt"), 8),
    lambda: demo.read_text(Path("/dev/null"), 8),
    # simulated steps
    lambda: simulate(nn_linear(), (vector(),), accumulate=0),
    lambda: simulate(nn_linear(), (vector(),), hold_output="held"),
    lambda: simulate(nn_linear(), (vector(),), device="hpu"),
    lambda: Faker(FakeTensorMode(), None).tensor(a_dtensor(), "layers.0.weight"),
    lambda: simulate(nn_linear(), (vector().to_sparse(),)),
    lambda: simulate(nn_linear(), (nested(),)),
    lambda: simulate(nn_linear(), (torch.ones(2, 3),)),
    lambda: simulate(nn_linear(), (vector(),), loss=lambda out: 3),
    lambda: simulate(
        nn_linear(), (vector(),), loss=lambda out: torch.autograd.grad(out.sum(), torch.ones(2, requires_grad=True))[0]
    ),
    lambda: simulate(nn_linear(), (vector(),), optimizer=len),
    lambda: simulate(model := nn_linear(), (vector(),), loss=torch.sum, optimizer=HidesIn(model)),
    # the lens
    lambda: saved_activations(vector(), ()),
    lambda: saved_activations(torch.exp, 3),
    lambda: saved_activations(torch.exp, (), [("input", 1)]),
    # a batch
    lambda: make_plan(nn_linear(), [vector(), torch.ones(3)], budget=0.4),
    lambda: audit(nn_linear(), (vector(), vector())),
    lambda: simulate(nn_linear(), {"input": vector(), "labels": vector()}),
    lambda: simulate(nn_linear(), {"inputs": vector()}),
    lambda: verify(nn_linear().requires_grad_(False), torch.ones(3), plan=Plan((Choice(("",)),))),
    lambda: verify(nn_linear(), vector(), plan=Plan((Choice(("",)),)), loss=lambda out: out.detach().sum()),
    lambda: verify(nn_linear().to("meta"), vector().to("meta"), plan=Plan((Choice(("",)),))),
    lambda: make_plan(nn_linear(), budget=0.4),
    lambda: simulate(nn_linear(), DataLoader([vector()])),
    lambda: simulate(nn_linear(), {"input": [[1, 2], [3, 4]]}),
    lambda: simulate(nn_linear(), {3: vector()}),
    lambda: auto(nn_linear(), vector(), loss=torch.sum, cache="no/such/folder/plan.json"),
    lambda: auto(nn_linear(), vector(), loss=torch.sum, cache=True),
    lambda: auto(nn_linear(), vector(), loss=torch.sum, cache="pyproject.toml"),
    lambda: auto(nn_linear(), vector(), loss=torch.sum, elastic=True, offload=True),
    lambda: auto(nn_linear(), vector(), loss=torch.sum, tiles=8),
    lambda: auto(nn_linear(), vector(), loss=torch.sum, elastic=True, sizes="all"),
    lambda: auto(nn_linear(), vector(), loss=torch.sum, sizes=[vector()]),
    lambda: auto(nn_linear(), vector(), loss=torch.sum, elastic=Elastic("1GiB"), budget="2GiB"),
    lambda: elastic_beside_others(elastic=True, budget="1MiB"),
    lambda: elastic_beside_others(elastic=Elastic("1MiB")),
    # an optimizer
    lambda: make_plan(nn_linear(), vector(), budget=0.4, optimizer="adamv"),
    lambda: make_plan(torch.nn.Sequential(Differentiates()), (vector(),), budget=0.4, loss=torch.sum),
    lambda: make_plan(Linearized(), (vector(),), budget=0.4, loss=torch.sum),
    lambda: make_plan(nn_linear(), vector(), budget=0.4, optimizer=3),
    lambda: make_plan(nn_linear(), vector(), budget=0.4, optimizer=torch.optim.LBFGS),
    lambda: make_plan(nn_linear(), vector(), budget=0.4, optimizer=[torch.optim.SGD(nn_linear().parameters())] * 2),
    lambda: simulate(nn_linear(), vector(), optimizer=torch.optim.SGD(nn_linear().parameters())),
    lambda: audit(torch.nn.Linear(3, 3), (vector(),), modules="layers.*"),
    lambda: audit(Opaque().__repr__, (), modules=["0"]),
    lambda: audit(torch.nn.Sequential(Scale()), (vector(),), modules=["layers.*"]),
    lambda: audit(Scale(), (vector(),)),
    lambda: audit(Scale(), (vector(),), perturb=2),
    # configurations
    lambda: RecomputeConfig(recompute_granularity="none"),
    lambda: RecomputeConfig(**(FULL | {"recompute_method": "every"})),
    lambda: RecomputeConfig(recompute_granularity="full"),
    lambda: RecomputeConfig(recompute_granularity="full", recompute_method="block"),
    lambda: RecomputeConfig(**(FULL | {"recompute_num_layers": True})),
    lambda: RecomputeConfig(**(FULL | {"recompute_num_layers": "2"})),
    lambda: RecomputeConfig(**(FULL | {"recompute_num_layers": 0})),
    lambda: RecomputeConfig(sequence_parallel="yes"),
    lambda: RecomputeConfig(recompute_granularity="selective", recompute_modules="core_attn"),
    lambda: RecomputeConfig(recompute_granularity="selective", recompute_modules=["mlp", 3]),
    lambda: RecomputeConfig(recompute_granularity="selective", recompute_method="uniform"),
    lambda: RecomputeConfig.from_args(["--recompute_num_layers", "4"]),
    lambda: RecomputeConfig(recompute_modules=["mlp"]),
    lambda: RecomputeConfig(**FULL, recompute_modules=("mlp",)),
    lambda: RecomputeConfig.from_args(["--cpu-offloading-num-layers", "4"]),
    lambda: RecomputeConfig(**FULL, distribute_saved_activations=True, sequence_parallel=True),
    lambda: RecomputeConfig(
        **FULL, distribute_saved_activations=True, cpu_offloading=True, cpu_offloading_num_layers=1
    ),
    lambda: RecomputeConfig(
        recompute_granularity="selective",
        recompute_modules=["mlp"],
        distribute_saved_activations=True,
        fine_grained_activation_offloading=True,
        offload_modules=["mlp"],
    ),
    lambda: RecomputeConfig(recompute_granularity="selective", recompute_modules=["core_attn"]).plan(
        Block(8, by_hand=False), torch.ones(1, 4, 8)
    ),
    lambda: RecomputeConfig(distribute_saved_activations=True),
    lambda: RecomputeConfig(repeat_collectives=True),
    lambda: RecomputeConfig(**FULL, distribute_saved_activations=True, repeat_collectives=True),
    lambda: RecomputeConfig(recompute_granularity="selective", recompute_modules=["0"], repeat_collectives=True).plan(
        nn.Sequential(nn.Linear(2, 2))
    ),
    lambda: RecomputeConfig(cpu_offloading=True, cpu_offloading_num_layers=2),
    lambda: RecomputeConfig(fine_grained_activation_offloading=True),
    lambda: RecomputeConfig(**FULL, fine_grained_activation_offloading=True, offload_modules=["core_attn"]),
    lambda: RecomputeConfig(
        **{**FULL, "recompute_method": "block", "recompute_num_layers": 2},
        fine_grained_activation_offloading=True,
        offload_modules=["*.1"],
    ).plan(small_stack()[0]),
    lambda: RecomputeConfig(fine_grained_activation_offloading=True, offload_modules=["attn_proj"]),
    lambda: RecomputeConfig(fine_grained_activation_offloading=True, offload_modules=["moe_act"]).plan(
        small_stack()[0]
    ),
    lambda: Plan((Choice(("a", "b"), offload=True),)),
    lambda: Plan((Choice(("a",), offload=True, elastic=True),)),
    lambda: OnDisk("/no/such/folder"),
    lambda: OnDisk(".", threads=0),
    lambda: inside(lacking(os, "pwrite"), lambda: OnDisk(".")),
    lambda: RecomputeConfig(
        recompute_granularity="selective",
        recompute_modules=["mlp"],
        fine_grained_activation_offloading=True,
        offload_modules=["mlp"],
        activation_offload_fraction=0.5,
    ),
    lambda: OnHost(at_most="24GiB"),
    lambda: OnHost("24GiB"),
    lambda: bandwidth("meta"),
    lambda: inside(captured(), lambda: step(torch.sin, check="values")),
    lambda: RecomputeConfig(**FULL, moe_layer_recompute=True),
    lambda: RecomputeConfig.from_dict({"model": {**FULL, "mlp_chunks_for_training": 4}}),
    lambda: RecomputeConfig.from_dict({"recompute": {"granularity": "full"}}),
    lambda: RecomputeConfig.from_args(["--lr", "1", "--recompute-layers=2"]),
    lambda: RecomputeConfig.from_dict({**FULL, "teacher": {"recompute_num_layers": 4}}),
    lambda: RecomputeConfig.from_dict(["recompute_granularity", "full"]),
    lambda: RecomputeConfig.from_file("train.toml"),
    lambda: without("yaml", lambda: RecomputeConfig.from_file("train.yaml")),
    lambda: RecomputeConfig.from_args(["-rl", "4", "--recompute-activations"]),
    lambda: RecomputeConfig.from_args(["--recompute-granularity"]),
    lambda: RecomputeConfig.from_args("--recompute-activations"),
    lambda: RecomputeConfig(**FULL).plan("gpt2"),
    lambda: RecomputeConfig(**FULL).plan([Scale(), Scale()]),
    lambda: RecomputeConfig(**(FULL | {"recompute_num_layers": 4})).plan(encoder()),
    lambda: RecomputeConfig(**(FULL | {"recompute_num_layers": 2})).plan(encoder().layers[0]),
    lambda: RecomputeConfig(recompute_granularity="selective", recompute_modules=["mlp", "moe"]).plan(encoder()),
    lambda: RecomputeConfig(recompute_granularity="selective", recompute_modules=["layer"]).plan(encoder().layers[0]),
    lambda: RecomputeConfig(recompute_granularity="selective").plan(Scale()),
    lambda: selects("sums").plan(Named(), (vector(),)),
    lambda: selects("sums").plan(Scale(), (vector(),)),
    lambda: selects("roots").plan(Named(), (vector(),)),
    lambda: RecomputeConfig(**FULL).plan(Scale()),
    # what a model is made of
    lambda: find_units("gpt2"),
    lambda: register("core_attn", Scale),
    lambda: register("norm", 3),
    # torch-recompute show
    lambda: models.load("llama-8b"),
    lambda: models.load("meta-llama/Meta-Llama-3-8B"),
    lambda: loads_no_head(),
    lambda: models.load("no_such_package:model"),
    lambda: models.load("math:pi"),
    lambda: models.load("math:sin"),
    lambda: shows_a_configuration('{"hidden_size": 32}'),
    lambda: shows_a_configuration("hidden_size: 32"),
    lambda: shows_a_configuration('{"model_type": "llama"}'),
    # torch-recompute plan
    lambda: models.load("math:sin", torch.float16),
    lambda: models.batch_for(nn.Linear(1, 1), "mine:model"),
    lambda: loads((nn_linear(), [vector(), vector()])),
    lambda: models.batch_for(described("pixel_values", image_size=8), "vit-h", sequence=8),
    lambda: models.batch_for(with_table(8), "gpt2-xl", sequence=9),
    lambda: plans("math:sin", "--budget", "1GiB", "--batch", "0"),
    lambda: plans("math:sin", "--budget", "1GiB", "--plot", "a.png"),
    lambda: output.write_plan(Path("/"), Plan(), {}),
    lambda: plans("math:sin", "--frontier", "--plot", "plan.bmp"),
    lambda: reports_on({}),
    lambda: reports_on({"task": {"model": "gpt2-xl", "dtype": "fp8"}}),
    lambda: reports("plan.json", "--points", "1"),
    lambda: inside(
        patch.object(output, "find_spec", return_value=None),
        lambda: plans("math:sin", "--frontier", "--plot", "plan.png"),
    ),
    lambda: inside(patch.object(output, "find_spec", return_value=None), lambda: plans("math:sin", "--frontier")),
    lambda: output.read_plan(Path("no/plan.json")),
    lambda: inside(
        patch.object(torch.cuda, "is_available", return_value=False), lambda: verify_command.device_here("tpu")
    ),
    lambda: verifies("this_test:on_meta"),
    lambda: verifies("this_test:does_not_fit"),
    lambda: testing.assert_same_gradients(nn_linear(), (vector(),)),
    lambda: testing.read_limit("1MiB", "2MiB"),
    # torch-recompute bench run
    benches,
    lambda: Workload("gpt-tiny", optimizer="lion").check(),
    lambda: benches("gpt-tiny", "--device", "cpu", "--golden", "a.json", "--threshold", "-5"),
    lambda: benches("gpt-tiny", "--capacity", "fit"),
    lambda: benches("gpt-tiny", "--device", "cpu", "--capacity", "2GiB", **{"sys.platform": "darwin"}),
    lambda: benches("gpt-tiny", "--device", "cuda", **{"torch.cuda.is_available": lambda: False}),
    lambda: benches("gpt-tiny", "--budget", "1GiB", "--recompute-activations"),
    lambda: benches("--sweep", "a.yaml", "--budget", "1GiB"),
    lambda: benches("--sweep", "no/such.json"),
    lambda: reads("{}", bench.read_sweep),
    lambda: reads('{"experiments": [{"budget": "1GiB"}]}', bench.read_sweep),
    lambda: reads('{"experiments": [], "round": 3}', bench.read_sweep),
    lambda: bench.Golden.read(Path("no/such.json")),
    lambda: reads('{"losses": []}', bench.Golden.read),
    lambda: reads_golden(step_seconds=float("nan")),
    lambda: reads_golden(per_second=13.5),
    lambda: GOLDEN.check_machine([Record(DONE, device="H100", parameters=7, items=9)]),
    lambda: GOLDEN.of(Setting("half", budget="50%")),
    lambda: inside(
        patch.object(Path, "open", mock_open(read_data='{"schema_version": 4}\n')),
        lambda: bench.Journal(Path("a.jsonl")),
    ),
    # the most that a budget holds
    lambda: make_plan(nn_linear(), torch.ones(2, 3), budget=0.5, longest=True, device="h100"),
    lambda: make_plan(nn_linear(), torch.ones(2, 3), budget="1MiB", longest="tokens", device="h100"),
    lambda: make_plan(
        Block(8, False), torch.ones(2, 3, 8), budget="8B", longest="batch", loss=torch.mean, device="h100"
    ),
    lambda: plan_command._check_asked(
        types.SimpleNamespace(  # type: ignore[arg-type]
            recompute=["full"], frontier=False, out=None, budget="1GiB", longest=False, largest_batch=False
        )
    ),
    lambda: plan_command._search_of(
        types.SimpleNamespace(longest=True, model="vit-h"),  # type: ignore[arg-type]
        models.AskedStep(nn_linear(), kwargs={"pixel_values": vector()}, built_here=True),
    ),
    # configurations that are stated
    lambda: peaks(Switched(), vector(), recompute="none,,full"),
    lambda: peaks(Switched().to("meta"), vector(), recompute="ful"),
    lambda: peaks(Switched(), vector(), recompute="no/such.json"),
    # plans that meet other libraries
    lambda: policies.apply(Switched(), "block"),
    turns_checkpointing_on_in_other_words,
    turns_other_checkpointing_on_inside,
    lambda: policies.apply(model := Switched(), ONE_LAYER) and model(vector(), cache=StaticCache()),
    lambda: huggingface.RecomputeCallback("full", every=2),
    lambda: huggingface.RecomputeCallback("full", budget="24GiB"),
    lambda: lightning.Recompute(),
    lambda: huggingface.RecomputeCallback().on_train_begin(None, None, None, Switched()),
    lambda: in_trainer(torch_compile=True),
    lambda: in_trainer()(torch.ones(2, 4)),
    # budgets of memory
    lambda: read_budget("plenty"),
    lambda: read_budget("24G"),
    lambda: read_budget("3 pages"),
    lambda: without("numpy", lambda: choose(COSTS, 20 * GIB)),
    lambda: Profile.from_json(Profile("Net", "h100", replace(COSTS, turn_bytes=-1), 20 * GIB).to_json()),
    # steps over ranks
    lambda: plans("gpt2-xl", "--frontier", "--plot", "a.png", "--pp", "2"),
    lambda: plans("gpt2-xl", "--budget", "1GiB", "--tiles", "--pp", "2"),
    lambda: plans("gpt2-xl", "--budget", "1GiB", "--tiles", "--tp", "2"),
    lambda: plans("gpt2-xl", "--budget", "1GiB", "--tiles", "--pp", "2", "--fsdp", "2"),
    lambda: plans("gpt2-xl", "--budget", "1GiB", "--optimizer-in-backward", "--dp", "2"),
    lambda: plans("gpt2-xl", "--budget", "1GiB", "--host-bandwidth", "50GB"),
    lambda: plans("gpt2-xl", "--budget", "1GiB", "--offload", "--host-bandwidth", "fast"),
    lambda: Ranks(zero=4),
    lambda: Ranks(fsdp=8, zero=1),
    lambda: Ranks(pp=2, on_host=True),
    lambda: Ranks(cp=2, cp_kind="zigzag"),
    lambda: on_ranks(Ranks(cp=2, zero=0)),
    lambda: plans("llama3-8b", "--budget", "100GiB", "--sequence", "96", "--cp", "64"),
    lambda: plans("llama3-8b", "--budget", "100GiB", "--sequence", "96", "--cp", "16", "--cp-kind", "ulysses"),
    lambda: Ranks(dp=12, ep=8),
    lambda: Ranks(tp=2, dp=4, ep=4, etp=1),
    lambda: Ranks(tp=4, sequence_parallel=True, etp=3),
    lambda: rank_model(shared_mixture(), "MODEL", 4, True, 2),
    lambda: attends_in_a_ring(attn_mask=torch.ones(4, 4)),
    lambda: attends_in_a_ring(torch.nn.attention.SDPBackend.MATH),
    lambda: plans("gpt2", "--budget", "1GiB", "--network", "450"),
    lambda: plans("gpt2", "--budget", "1GiB", "--node", "0"),
    lambda: plans("gpt2", "--budget", "1GiB", "--node", "4", "--device", "cpu"),
    lambda: plans("gpt2", "--budget", "500MiB"),
    lambda: plans("gpt2", "--budget", "400MiB", "--pp", "2"),
    lambda: plans("gpt2", "--budget", "1GiB", "--ep", "2", "--fsdp", "2"),
    lambda: plans("gpt2", "--budget", "1GiB", "--ep", "2"),
    lambda: plans("gpt2", "--budget", "1GiB", "--cp-kind", "ring"),
    lambda: Ranks(dp=4, ep=4, imbalance=0.5),
    lambda: on_ranks(Ranks(dp=4, ep=4, zero=0)),
    lambda: on_ranks(Ranks(dp=3, ep=3, zero=0), model=mixture()),
    lambda: on_ranks(Ranks(dp=2, ep=2, zero=0), model=Listed()),
    lambda: on_ranks(Ranks(pp=2)),
    lambda: on_ranks(Ranks(dp=2)),
    lambda: on_ranks(Ranks(fsdp=2, param_dtype="fp9")),
    lambda: on_ranks(Ranks(fsdp=2), stages=Stages("1F1B", 2, 2)),
    lambda: on_ranks(Ranks(fsdp=2), model=Scalar()),
    lambda: on_ranks(Ranks(fsdp=2), model=(one := torch.nn.Linear(8, 8)), optimizer=torch.optim.SGD([one.weight])),
    lambda: plans("gpt2", "--budget", "1GiB", "--dp", "2", "--reshard-after-forward", "no"),
    lambda: plans("gpt2", "--budget", "1GiB", "--layers", "fussed"),
    lambda: plans("gpt2", "--budget", "1GiB", "--layers", "eager+efficient-permutation"),
    lambda: too_little_on_a_command_line("--layers", "fused"),
    lambda: on_its_own_device("--layers", "fused"),
    lambda: compile_layers(torch.nn.Linear(2, 2), Ranks()),
    lambda: compile_layers(torch.nn.Linear(2, 2), Ranks(tp=2)),
    lambda: compile_layers(torch.nn.Linear(2, 2), Ranks(cp=2, cp_kind="ulysses")),
    lambda: compiled_without_a_kernel(),
    lambda: CompiledLayers({}, frozenset()).check({"mlp": Plan((Choice(("0.mlp",)),))}),
    lambda: compiled_in_parts(),
    lambda: plans("gpt2", "--budget", "1GiB", "--states", "8bit", "--optimizer", "sgd"),
    lambda: plans("gpt2", "--budget", "1GiB", "--lora", "0"),
    lambda: plans("gpt2", "--budget", "1GiB", "--lora", "8:c_atn"),
    lambda: plans("gpt2", "--budget", "1GiB", "--lora", "8:drop"),
    lambda: plans("gpt2", "--budget", "1GiB", "--lora", "8", "--base", "nf4"),
    without_peft,
    lambda: on_its_own_device("--optimizer-on-host"),
    lambda: simulate(in_backward(), (torch.ones(2, 8),), loss=torch.sum, accumulate=2),
    lambda: on_ranks(Ranks(fsdp=2), model=in_backward()),
    lambda: Layout(Ranks(dp=2), mbs=3, batch=8),
    lambda: Layout(Ranks(pp=4, vpp=2), batch=6),
    lambda: Layout(Ranks(pp=4, vpp=2)).pipeline(6),
    lambda: cut_up(torch.nn.Linear(2, 2), dp=2),
    lambda: cut_up(torch.nn.Linear(2, 2), tp=2),
    lambda: cut_up(torch.nn.Linear(2, 2), tp=3, sequence_parallel=True),
    lambda: divided(torch.nn.Linear(8, 8), torch.nn.Linear(4, 4), 2, "MODEL"),
    # planning
    lambda: make_plan(Scale(), (vector(),), budget=40),
    lambda: make_plan(nn_linear(), torch.ones(2, 3), budget=0, loss=torch.nn.CrossEntropyLoss()),
    lambda: make_plan(nn_linear(), torch.ones(2, 3), budget=0, loss=torch.nn.TripletMarginLoss()),
    lambda: make_plan(nn_linear(), (torch.ones(2, 3), torch.ones(3)), budget=0, loss=torch.nn.CrossEntropyLoss()),
    lambda: make_plan(torch.nn.LazyLinear(3), torch.ones(2, 8), budget=0, loss=torch.sum),
    lambda: make_plan(nn_linear(), torch.ones(2, 9), budget=0, loss=torch.sum, device="h100"),
    lambda: make_plan(Scale(), (vector(),), budget="1B", sizes=[(vector(),)]),
    lambda: make_plan(Scale(), budget="1B", sizes=[5.12]),
    lambda: make_plan(torch.nn.LayerNorm(4), (torch.ones(2, 4),), budget=0.5, loss=torch.mean, device="h100"),
    lambda: with_host("slwo"),
    lambda: with_host(42e-6),
    lambda: inside(file_of({}), lambda: with_host("config.json", "fast")),
    lambda: inside(file_of({}), lambda: with_host("config.json")),
    lambda: inside(file_of(NO_HOST), lambda: with_host("config.json")),
    lambda: with_host("slow"),
    lambda: with_host("slow", compiled=True),
    lambda: apply(torch.nn.Sequential(torch.nn.Linear(4, 4)), Plan((), modules=(("0", "Block with 4 tensors"),))),
    lambda: make_plan(torch.nn.Linear(4, 4), (vector(),), budget=0.5, device="h300"),
    lambda: make_plan(Scale(), (torch.ones(2),), budget="1B", sizes="learn"),
    lambda: make_plan(Scale(), (torch.ones(2, 8),), budget="1B", sizes=[4, (torch.ones(2),)]),
    lambda: make_plan(Scale(), (torch.ones(2, 2),), budget="1B", sizes=[4]),
    lambda: make_plan(torch.nn.Linear(3, 3), (vector(),), budget=0.5, offload="much"),
    lambda: make_plan(torch.nn.Linear(3, 3), (vector(),), loss=torch.sum, budget=0.5, offload=True),
    lambda: link_of(Roofline("mine", {1: 1e12}, 1e12, 1e-6), torch.device("cpu")),
    lambda: Profile.from_json("[]"),
    fits_where_memory_is_unknown,
    lambda: free_bytes(nn.Linear(2, 2), torch.device("mtia")),
    lambda: meter_for(torch.device("mtia")),
    lambda: inside(patch.object(meter, "heap", return_value=None), lambda: meter_for(torch.device("cpu"))),
    lambda: solve(Profile("Net", "h100", COSTS, 20 * GIB), budget="fit"),
    # pipelines
    lambda: schedule_steps([Action(0, "F", 0), Action(0, "W", 0)]),
    lambda: schedule_steps([Action(0, "F", 0), Action(0, "B", 0), Action(0, "I", 0)]),
    lambda: orders_of(4),
    lambda: orders_named("2F2B", 2, 4),
    lambda: orders_named("1F1B", 4, 2),
    lambda: orders_named("1F1B", 0, 2),
    lambda: Stages("1F1B", 2, 4, split=(1, 1)).bounds(2, ["a", "b", "c"]),
    lambda: plans_stages(stages=4),
    lambda: plans_stages(budget=[1, 2, 3]),
    lambda: plans_stages(budget="fit"),
    lambda: plans_stages(model=STAGED, optimizer=torch.optim.SGD(STAGED.parameters())),
    lambda: plans_stages(model=Twice(), loss=torch.sum),
    lambda: plans_stages(sizes=[(vector(),)]),
    lambda: plans_stages(tiles=True),
    lambda: plans_stages(accumulate=2),
    # between ranks
    lambda: fused_allreduce_gradients([], bucket_bytes=0),
    lambda: fused_allreduce_gradients([with_gradient(torch.ones(3))]),
    lambda: inside(two_ranks(), lambda: fused_allreduce_gradients([with_gradient(torch.ones(3))], dist.new_group([1]))),
    lambda: inside(two_ranks(), lambda: fused_allreduce_gradients(Scale())),
    reduces_over_shards,
    reduces_other_parameters,
    lambda: inside(
        two_ranks(),
        lambda: fused_allreduce_gradients([with_gradient(torch.ones(3)), with_gradient(torch.ones(3).to_sparse())]),
    ),
    lambda: find_reentrant(torch.ones(3)),
    lambda: compare({0: TWO, 1: TWO, 2: Plan(TWO.choices[:1]), 3: Plan((Choice(("a",), carry=True), TWO.choices[1]))}),
    lambda: compare({0: TWO, 1: "NoneType"}),
    lambda: agree_on(TWO),
    no_plan_on_another_rank,
    # the doctor
    lambda: doctor.examine(nn.Linear(2, 2, device="meta"), (vector(),), run=True),
    lambda: inside(watching := doctor.watch(nn.Linear(2, 2)), watching.report),
    lambda: doctor.watch(nn.Linear(2, 2), closely=0),
    lambda: doctor.watch(Opaque()),
    # --- RecomputeError
    # torch.utils.checkpoint's options
    lambda: checkpoint(lambda x: x.view(7), vector(), context_fn=lambda: (Silencer(), contextlib.nullcontext())),
    # a discarded output
    lambda: OutputDiscardCheckpoint().discard_output_and_register_recompute(vector()),
    lambda: discards(lambda h: h.cos(), lambda h: h.cos()),
    # a replay that does something else
    measures_after_its_end,
    measures_twice,
    # simulated steps
    lambda: simulates(lambda out: torch.sparse.mm(torch.eye(2).to_sparse(), out)),
    lambda: simulates(without_shapes),
    lambda: simulates(lambda x: x.data_ptr()),
    lambda: simulate(Converts(4, 4), (torch.ones(2, 4),)),
    lambda: simulate(Reads(), (torch.empty(2**25, device="meta"),), device="cpu"),
    lambda: simulate(Reaches(), (vector(),), loss=torch.sum),
    lambda: simulates_wrapped(DistributedDataParallel),
    lambda: simulates_wrapped(functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))),
    lambda: simulate(Pads(4, 4), (torch.ones(2, 512, 4),), loss=torch.sum),
    # threads
    needs_what_another_thread_has_exchanged,
    # --- ChangedError
    # a discarded output
    lambda: discards(lambda h: h.mul_(2).cos()),
    # what is changed between forward and backward
    lambda: changes(mask := torch.ones(3), region(lambda x, mask: (x * mask).sin().exp()), vector(), mask),
    lambda: changes(mask := torch.ones(3), region(lambda x, *, mask: (x * mask).sin().exp()), vector(), mask=mask),
    lambda: changes(
        mask := torch.ones(3),
        region(lambda x, masks: (x * masks["a"]).sin().exp()),
        vector(),
        masks={"a": mask},
        times=2,
    ),
    lambda: changes((scale := Scale()).weight, recompute(scale), vector()),
    lambda: changes((scale := Scale().eval()).offset, region(scale), vector()),
    lambda: changes(weight := torch.ones(3, requires_grad=True), region(lambda x: (x * weight).sin().exp()), vector()),
    lambda: changes(mask := torch.ones(3), region(lambda x: x * mask), vector()),
    empties_a_large_container,
    freezes_a_layer,
    takes_the_plan_out,
    changes_a_tensor_that_it_saved,
    changes_the_output_of_a_saved_call,
    changes_a_value_that_it_saved,
    # configurations
    lambda: inside(
        patch.object(host, "queue_of", return_value=TransferQueue(Slow())),
        lambda: changes(x := vector() * 2, region(lambda x: x.sin().exp(), inputs=OnHost()), x),
    ),
    lambda: changes(x := vector() * 2, region(lambda x: x.sin().exp(), inputs=OnHost(smallest=1000)), x),
    # --- MismatchError
    # a discarded output
    returns_something_else,
    # a replay that does something else
    lambda: step(Turns(lambda x: x.sin().exp().exp(), lambda x: x.sin().exp())),
    lambda: step(Turns(lambda x: x.sin().exp(), lambda x: x.sin().exp().exp()), early_stop=False),
    lambda: step(Turns(lambda x: (x.sin() * torch.ones(3)).exp(), lambda x: (x.sin() * torch.ones(1)).exp())),
    lambda: step(Turns(lambda x: x.exp().sin().exp(), lambda x: x.exp().double().sin().exp())),
    lambda: step(
        Turns(lambda x: (x * 2).square().square(), lambda x: (x * 2).square().add(1).square()), check="values"
    ),
    lambda: step(Turns(lambda x: x.exp().exp(), lambda x: attention(x).exp().exp())),
    lambda: step(Turns(lambda x: attention(x).exp().exp(), lambda x: x[replay(torch.argmax)(x)].exp())),
    lambda: step(Turns(lambda x: attention(x.exp()), lambda x: x.exp())),
    reads_an_unread_output_after_its_replay,
    lambda: step(Turns(lambda x: attention(x.exp()).sum().exp(), lambda x: attention(x.exp()[:2]).sum().exp())),
    # configurations
    draws_in_another_graph,
    # --- StoreError
    # ranks
    lambda: among(2, 0, lambda: ShardedOver().put(torch.ones(2, 3))),
    lambda: among(2, 0, opened_out_of_step),
    lambda: among(2, 0, lambda: (store := ShardedOver(compared=0)).get(store.put(torch.ones(64, 64)))),
    lambda: among(2, 0, lambda: ShardedOver().put(split_over_all())),
    lambda: among(2, 0, lambda: ShardedOver().put(torch.eye(2).to_sparse())),
    lambda: among(2, 0, lambda: pickle.dumps(ShardedOver())),
    # what is changed between forward and backward
    lambda: step(lambda x: x.sin().exp(), inputs=ShortStore()),
    lambda: step(lambda x: no_recompute(torch.sin, name="product", store=EmptyStore())(x.exp()).exp().exp()),
    # a disk
    lambda: inside(full_disk(), lambda: OnDisk("/tmp").put(torch.ones(64, 64))),
    lambda: inside(damaged_disk(), three_by_way_of_a_disk),
    # configurations
    lambda: inside(captured(), lambda: step(torch.sin, inputs=OnHost())),
    # --- SaveError
    # configurations
    lambda: inside(captured(), lambda: step(lambda x: (save_for_recompute(3), x.sin())[1])),
    reads_in_a_graph,
    # values
    lambda: step(saves_what_requires_grad),
    lambda: step(lambda x: x * replay(lambda s: (s.argmax(), s.softmax(0)))(x)[1]),
    lambda: recompute(saves_twice)(vector()),
    lambda: region(saves_twice)(vector(), key="router"),
    lambda: step(lambda x: reads_a_key(x, "rooter", None, "router")),
    lambda: step(lambda x: reads_a_key(x, "router")),
    # --- NotRecomputingError
    # values
    get_recompute_data,
    # --- BudgetError
    # torch-recompute plan
    lambda: inside(
        patch.object(verify_command, "free_bytes", return_value=2 * GIB),
        lambda: verify_command._check_size("gpt2-xl", nn.Linear(2**14, 2**14, bias=False, device="meta"), {}, "cpu"),
    ),
    # budgets of memory
    lambda: choose(COSTS, 8 * GIB),
    lambda: choose(Costs({"a": Kind((Option((), 5, 5, 7, 0.0),))}, (Segment("net", "a", 1, 2),)), 8),
    # steps over ranks
    lambda: LayoutPlanner.plans(OverFull(), 100),
    lambda: too_little_on_a_command_line("--optimizer", "none", "--out", "plan.json"),
    lambda: too_little_on_a_command_line("--optimizer", "adam"),
    lambda: too_little_on_a_command_line("--budget", "100B"),
    # planning
    plans_for_too_little,
    lambda: plans_for_too_little(sizes=[(torch.ones(64, 8),)]),
    # pipelines
    lambda: plans_stages(budget="100B"),
    # compiled graphs
    lambda: Partition("8B", exact=False)(sines(), (), num_fwd_outputs=1),
    lambda: Partition(0.5)(sines(), ()),
    lambda: Partition("fit"),
    lambda: Partition(0.5, layers=0),
    lambda: Partition(Plan((Choice(("layers.0",)),))),
    lambda: apply(small_stack()[0], Plan(graph_bytes=2**20)),
    lambda: make_plan(small_stack()[0], small_stack()[1], budget=0.4, compiled=True, offload=True),
    lambda: make_plan(nn.Linear(8, 8, device="meta"), (torch.ones(2, 8),), budget=0.4, compiled=True, device="h100"),
    lambda: make_plan(Breaks(), (torch.ones(2, 8),), budget=0.4, compiled=True),
)


TEXTS = Path(__file__).with_name("messages.txt")
WRITE = "PYTHONPATH=tests python tests/project/test_messages.py"
VERSION = "TORCH_VERSION"  # stands in a text for torch's


def as_written() -> list[str]:
    """The misuses as they are written above, each on one line."""
    source = Path(__file__).read_text(encoding="utf-8")
    lines = source.encode().splitlines(keepends=True)  # `ast.get_source_segment` would split the file for each row
    tables = [node for node in ast.parse(source).body if isinstance(node, ast.AnnAssign)]
    (rows,) = [table.value.elts for table in tables if ast.unparse(table.target) == "MISUSES"]  # type: ignore[union-attr]
    found: list[str] = []
    for row in rows:
        assert row.end_lineno is not None
        segment = b"".join(lines[row.lineno - 1 : row.end_lineno])
        rest = len(lines[row.end_lineno - 1]) - (row.end_col_offset or 0)
        text = segment[row.col_offset : len(segment) - rest].decode()
        found.append(" ".join(text.split()).removeprefix("lambda: "))
    return found


def pinned() -> dict[str, tuple[type[Exception], str]]:
    """The class and the text for each misuse, from the file."""
    found: dict[str, tuple[type[Exception], str]] = {}
    for block in TEXTS.read_text(encoding="utf-8").split("\n### ")[1:]:
        head, _, text = block.partition("\n")
        kind, _, misuse = head.partition(": ")
        found[misuse] = getattr(torch_recompute, kind), text.rstrip("\n").replace(VERSION, torch.__version__)
    return found


def write_texts() -> None:
    """Writes the file again, from what the misuses raise now."""
    blocks = [f"Every text of an error, under the misuse that it answers. Written by `{WRITE}`."]
    for said, misuse in zip(as_written(), MISUSES, strict=True):
        with pytest.raises(RecomputeError) as caught:
            misuse()
        text = str(caught.value).replace(torch.__version__, VERSION)
        blocks.append(f"### {type(caught.value).__name__}: {said}\n{text}")
    TEXTS.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


UNPINNED = (RecomputeError, f"This misuse has no text in tests/project/messages.txt; run {WRITE}.")
PINNED = pinned()
ROWS = [(*PINNED.get(said, UNPINNED), misuse) for said, misuse in zip(as_written(), MISUSES, strict=True)]


def raises() -> dict[str, list[tuple[str, int, int]]]:
    """Where the package raises an error of its own, by text: the function that makes it, or the place of the raise."""
    folder = Path(torch_recompute.__file__).parent
    found: dict[str, list[tuple[str, int, int]]] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                name = ast.unparse(node.exc.func).removeprefix("errors.")
                if name not in vars(torch_recompute.errors):
                    continue
                text = node.exc.args[0]
                starts = text.values[0] if isinstance(text, ast.JoinedStr) else text
                if isinstance(text, ast.Call) and "_" in (made_by := ast.unparse(text.func)):
                    found[made_by.rpartition(".")[2]] = []
                elif isinstance(starts, ast.Constant | ast.BinOp):
                    place = (str(path), node.lineno, node.end_lineno or node.lineno)
                    found.setdefault(f"{path}:{node.lineno}", []).append(place)
    return found


def lines_of(error: BaseException | None) -> set[tuple[str, int]]:
    """The lines that an error and those before it passed through."""
    lines: set[tuple[str, int]] = set()
    while error is not None:
        lines |= {(one.filename, one.lineno or 0) for one in traceback.extract_tb(error.__traceback__)}
        error = error.__cause__ or error.__context__
    return lines


@contextlib.contextmanager
def calls(into: set[str]) -> Iterator[None]:
    """Adds the names of the package's functions that run."""

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and "torch_recompute" in frame.f_code.co_filename:
            into.add(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


class Answer(NamedTuple):
    """What a misuse raised, the lines that the error passed through, and the package's functions that ran."""

    kind: type[RecomputeError]
    text: str
    lines: set[tuple[str, int]]
    called: set[str]


@functools.cache
def answer(row: int) -> Answer:
    """Runs a misuse, once in a process."""
    called: set[str] = set()
    with pytest.raises(RecomputeError) as caught, calls(called):
        MISUSES[row]()
    return Answer(type(caught.value), str(caught.value), lines_of(caught.value), called)


@pytest.mark.parametrize("row", range(len(ROWS)), ids=[re.sub(r"\W+", "-", row[1][:60]) for row in ROWS])
def test_misuse_is_answered_word_for_word(row: int) -> None:
    """A misuse raises the class and the whole text of its row; the next region gives the plain gradient."""
    kind, text, _ = ROWS[row]
    said = answer(row)
    assert said.text == text
    assert said.kind is kind
    assert not doing_recompute()
    plain, ours = vector(), vector()
    plain.sin().exp().sum().backward()
    recompute(lambda x: x.sin().exp())(ours).sum().backward()
    assert torch.equal(plain.grad, ours.grad)


def test_every_pinned_text_is_of_a_misuse() -> None:
    """The file holds nothing else than the texts of the table, one for each row."""
    said = as_written()
    assert len(set(said)) == len(said)
    assert list(PINNED) == said


def test_every_text_has_a_row() -> None:
    """Each text that the package raises is reached by a misuse in the table."""
    answers = [answer(row) for row in range(len(ROWS))]
    reached = set().union(*(said.lines for said in answers))
    called = set().union(*(said.called for said in answers))
    missed = [
        text
        for text, places in raises().items()
        if text not in called
        and not any((path, line) in reached for path, first, last in places for line in range(first, last + 1))
    ]
    assert not missed, "\n".join(missed)


def test_texts_are_laid_out_for_reading() -> None:
    """A text has no trailing blanks, no doubled full stops, matching brackets, and indents all lines but the first."""
    for _, text, _ in ROWS:
        lines = text.split("\n")
        assert all(line == line.rstrip() for line in lines), text
        assert ".." not in text.replace("...", ""), text
        assert all(line.startswith("  ") for line in lines[1:]), text
        assert text.count("(") == text.count(")"), text


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (RecomputeError, (RuntimeError,)),
        (ArgumentError, (RecomputeError, TypeError, ValueError)),
        (BudgetError, (ArgumentError,)),
        (MismatchError, (RecomputeError, CheckpointError)),
        (ChangedError, (RecomputeError,)),
        (SaveError, (RecomputeError, AssertionError)),
        (NotRecomputingError, (RecomputeError, AssertionError)),
        (StoreError, (RecomputeError,)),
    ],
)
def test_error_is_caught_where_others_were(kind: type[Exception], bases: tuple[type[Exception], ...]) -> None:
    """Each class is public and derives from what existing code catches in the same place."""
    assert getattr(torch_recompute, kind.__name__) is kind
    assert kind.__name__ in torch_recompute.__all__
    assert issubclass(kind, bases[0])
    assert all(issubclass(kind, base) for base in bases)


if __name__ == "__main__":
    write_texts()
