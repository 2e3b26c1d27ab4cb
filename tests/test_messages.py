"""Every text of an error, word for word, as a misuse through the public API raises it.

`CASES` is the table: for each class the whole texts, each with the misuse that it answers. A `raise` that no row
reaches fails the test below the table, so a new text cannot go unread.
"""

import ast
import contextlib
import functools
import json
import pickle
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import mock_open, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointError, create_selective_checkpoint_contexts

import torch_recompute
from laws.watch import vector
from torch_recompute import (
    ArgumentError,
    BudgetError,
    ChangedError,
    Choice,
    MismatchError,
    NotRecomputingError,
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
    checkpoint,
    checkpoint_sequential,
    doctor,
    doing_recompute,
    get_recompute_data,
    make_plan,
    measure,
    no_recompute,
    recompute,
    replay,
    save_for_recompute,
    saved_activations,
    simulate,
    solve,
    state,
    testing,
    values,
)
from torch_recompute.commands import bench, cli, demo, models, output
from torch_recompute.commands import verify as verify_command
from torch_recompute.commands.trials import Setting, Workload
from torch_recompute.compat import deepspeed, megatron, paddle
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
from torch_recompute.integrations import huggingface, policies
from torch_recompute.memory.free import free_bytes
from torch_recompute.plan.budget import read_budget
from torch_recompute.plan.cost import Costs, Kind, Option, Point, Segment
from torch_recompute.plan.plan import Prediction
from torch_recompute.plan.solve import choose
from torch_recompute.plan.units import find_units, register
from torch_recompute.planner.hosts import link_of
from torch_recompute.planner.layout import Layout, LayoutPlanner, RankPlan
from torch_recompute.planner.prices import Roofline
from torch_recompute.planner.schedules import Action, orders_named, orders_of, schedule_steps
from torch_recompute.planner.tensor_parallel import divided
from torch_recompute.simulation.fake_mode import Faker
from torch_recompute.stores import bandwidth, host
from torch_recompute.stores.transfers import Depot, Direct


def nn_linear() -> torch.nn.Module:
    return torch.nn.Linear(3, 3)


class Reads(torch.nn.Module):
    """Reads values of its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.nonzero()


class Reaches(torch.nn.Module):
    """Reaches its weight through a closure."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.inner = torch.nn.Linear(3, 3)
        self.call = lambda x: inner(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def a_dtensor() -> torch.Tensor:
    """A tensor of a class of that name; a true one needs a process group."""
    kind = type("DTensor", (torch.Tensor,), {"__module__": "torch.distributed.tensor"})
    return vector().as_subclass(kind)


REASONS = (
    "\n  The function must do the same work each time it is called with the same arguments. Common reasons that it "
    "does not: a choice made from values that are not deterministic (routing: wrap it in replay(fn) or "
    "no_recompute(fn)), random numbers from a generator that PyTorch does not know (state=[...]), a global "
    "or attribute changed between forward and backward."
)
WHY = f'{REASONS}\n  To see the first place where they differ: recompute(fn, check="values").'
FEWER = "(A different number of tensors was saved during the original forward and recomputation.)"
MORE = "(trying to save more tensors during recomputation than during the original forward pass)"
CAUSE = "one of the variables needed for gradient computation has been modified by an inplace operation"

MODEL = "Write pkg.module:name, or the path of a Hugging Face config.json or of its folder."
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
COUNT = (
    ", where a whole number of layers is expected, 1 or more.\n"
    "  Write recompute_num_layers=1, without quotes; leave it out, or write None (null in a file), for no number."
)
NO_OFFLOAD = " (What a module keeps without being recomputed is not moved; Megatron-LM does that in its own layers.)\n"
PATHS = (
    '  Paths of modules match too, as named_modules() gives them, and patterns of paths such as "layers.*.mlp"; a '
    "ModuleList does not, since it is never called."
)
UNCALLED = (
    '\n  Names that the author gave to calls, no_recompute(fn, name="..."), match if plan is given an example call, '
    "which alone shows them: config.plan(model, args, kwargs)."
)
FIELDS = (
    "\n  The fields are Megatron-LM's, written out: recompute_granularity, recompute_method, recompute_num_layers, "
    "recompute_modules."
)
FLAGS = (
    "\n  For example: --recompute_granularity selective --recompute_modules core_attn layernorm\n"
    "           or: --recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
)


class Turns:
    """A function that does something else each time it is called: what a region must not be given."""

    def __init__(self, *bodies: Callable[..., Any]) -> None:
        self.bodies = bodies
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        body = self.bodies[min(self.calls, len(self.bodies) - 1)]
        self.calls += 1
        return body(*args, **kwargs)


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


def plans_stages(**options: Any) -> None:
    """Plans two stages of one layer each, whatever is said wrong."""
    said: dict[str, Any] = {"budget": 2**30, "stages": Stages("GPipe", pipeline=2, microbatches=2), **options}
    model = said.pop("model", torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    sizes = "sizes" in options
    make_plan(model, () if sizes else (torch.ones(8, 4),), device="h100", **{"loss": torch.sum, **said})


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


GOLDEN = bench.Golden(
    Workload("gpt-tiny"), 1, "H200", 7, {"key": bench.Figure("every layer", 1.0, None)}, source="golden.json"
)


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


def simulates(hook: Callable[[torch.Tensor], object]) -> None:
    """A model whose forward does something with its output too."""
    model = torch.nn.Linear(4, 4)
    model.register_forward_hook(lambda *seen: hook(seen[-1]))
    simulate(model, (torch.ones(2, 4),), loss=torch.mean)


def small_stack() -> Any:
    two = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)) for _ in range(2)]
    return torch.nn.Sequential(*two), (torch.ones(64, 8),), torch.sum


def plans_for_too_little(**options: Any) -> None:
    model, args, loss = small_stack()
    make_plan(model, **(options or {"args": args}), budget=100, loss=loss, device="h100")


def cut_up(model: torch.nn.Module, **layout: Any) -> None:
    LayoutPlanner(model, "MODEL", Layout(**layout), 8, "none", "h100")


def too_little_on_a_command_line() -> None:
    with patch.dict(sys.modules, {"here": types.SimpleNamespace(small_stack=small_stack)}):
        plans("here:small_stack", "--budget", "100", "--device", "h100", "--optimizer", "none", "--out", "plan.json")


class OverFull:
    """Planned ranks of which none fits."""

    pipeline = types.SimpleNamespace(ranks=(0, 1))

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
            activation_bytes=(1 + rank) * GIB,
            plain_peak_bytes=6 * GIB,
            link_bytes=0,
            **times,
            plan=Plan((), "", promise),
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

# A text, and the misuse that it answers, or several.
CASES: dict[type[RecomputeError], dict[str, Any]] = {
    ArgumentError: {
        # what a function is given
        "recompute(fn) needs a callable, but got Opaque: Opaque()\n"
        "  It returns a callable; pass the function itself, and the arguments to the result:\n"
        "      y = recompute(layer)(x)     # not recompute(layer(x))": lambda: recompute(Opaque()),
        "no_recompute(fn) needs a callable, but got Opaque: Opaque()\n"
        "  It returns a callable; pass the function itself, and the arguments to the result:\n"
        "      y = no_recompute(layer)(x)     # not no_recompute(layer(x))": lambda: no_recompute(Opaque()),
        "replay(fn) needs a callable, but got Opaque: Opaque()\n"
        "  It returns a callable; pass the function itself, and the arguments to the result:\n"
        "      y = replay(layer)(x)     # not replay(layer(x))": lambda: replay(Opaque()),
        "checkpoint(function, *args) needs a callable, but got Opaque: Opaque()\n"
        "  Pass the function itself, then its arguments:\n"
        "      y = checkpoint(layer, x)     # not checkpoint(layer(x))": lambda: checkpoint(Opaque(), vector()),
        "check='value' is not known. It says what a replay is compared with:\n"
        '      check="metadata"   shape, dtype and device of every saved tensor (the default)\n'
        '      check="values"     stride and contents too: slower, finds what is not deterministic\n'
        '      check="none"       only how many there are': lambda: recompute(torch.exp, check="value"),
        "inputs='cpu' is not a store: str has no put(tensor) and get(handle).\n"
        "  Write inputs=torch_recompute.OnHost(), or an object with "
        "these two methods.": lambda: recompute(torch.exp, inputs="cpu"),
        "store='cpu' is not a store: str has no put(tensor) and get(handle).\n"
        "  Write store=torch_recompute.OnHost(), or an object with "
        "these two methods.": lambda: no_recompute(torch.exp, store="cpu"),
        "state= holds 'numpy', and str has no capture() and restore(value).\n"
        "  Write state=[torch_recompute.state.NumpyRng()], or objects with "
        "these two methods.": lambda: recompute(torch.exp, state=["numpy"]),
        "argument 1 of layer 3 is a generator, which can be consumed only once: the forward would leave nothing for "
        "the replay.\n"
        "  Pass a list instead: list(...).": lambda: region(lambda x, parts: x)(vector(), (i for i in range(3))),
        "argument 'parts' of layer 3 is a list_iterator, which can be consumed only once: the forward would leave "
        "nothing for the replay.\n"
        "  Pass a list instead: list(...).": lambda: region(lambda x, parts: x)(vector(), parts=iter([1, 2])),
        # torch.utils.checkpoint's options
        "use_reentrant=True is not supported: it calls backward inside backward, which breaks DDP, "
        "torch.autograd.grad, backward(inputs=...) and gradient hooks, and trains nothing when no input of the region "
        "requires grad. (context_fn, debug and keyword arguments are only supported when use_reentrant=False.)\n"
        "  Write use_reentrant=False, or leave it out: gradients are the same, "
        "and it is faster.": (
            lambda: checkpoint(torch.exp, vector(), use_reentrant=True),
            lambda: checkpoint_sequential([torch.exp], 1, vector(), use_reentrant=True),
            lambda: checkpoint_sequential([torch.exp], 1, vector(), True),
        ),
        "use_reentrant is Tensor of shape (3,), where False, or nothing, is expected. (checkpoint_sequential takes "
        "one input: put several into a tuple that the functions "
        "take and return.)": lambda: checkpoint_sequential([torch.sin, torch.exp], 2, vector(), vector()),
        "determinism_check='defalt' is not known; write one of 'default', 'none'. To compare the contents of saved "
        "tensors as well: "
        'recompute(fn, check="values").': lambda: checkpoint(torch.exp, vector(), determinism_check="defalt"),
        "debug=True is incompatible with non-default context_fn: both want to see every operation of the region.\n"
        "  Find the mismatch with debug=True and without context_fn, or enter your own logging mode in "
        "context_fn.": lambda: checkpoint(torch.exp, vector(), debug=True, context_fn=lambda: (Silencer(), Silencer())),
        "Unexpected keyword arguments: mask. checkpoint without a function returns a decorator, which takes options "
        "alone\n"
        "  Pass them to the decorated function:\n"
        "      block = checkpoint(use_reentrant=False)(layer)\n"
        "      y = block(x, mask=mask)": lambda: checkpoint(use_reentrant=False, mask=None),
        f"respect_saved_tensors_hooks=True needs torch 2.14 or later: the selective context_fn of torch "
        f"{torch.__version__} stores what its policy saves where saved-tensor hooks (save_on_cpu) do not see it\n"
        "  Leave the option out, or mark the call to keep: no_recompute(fn, store=OnHost()) "
        "instead of a context_fn": respect_hooks_that_torch_does_not_know,
        "checkpoint_sequential: segments=4, but 3 functions make 1 to 3 segments.": lambda: checkpoint_sequential(
            [torch.sin, torch.exp, torch.sin], 4, vector()
        ),
        "checkpoint_sequential: segments=0, but 3 functions make 1 to 3 segments.": lambda: checkpoint_sequential(
            [torch.sin, torch.exp, torch.sin], 0, vector()
        ),
        # the calls of other systems
        "recompute(function, *args) needs a callable, but got Opaque: Opaque()\n"
        "  Pass the function itself, then its arguments:\n"
        "      y = recompute(layer, x)     # not recompute(layer(x))": lambda: paddle.recompute(Opaque(), vector()),
        "use_reentrant=True is not supported: it calls backward inside backward, which breaks DDP, "
        "torch.autograd.grad, backward(inputs=...) and gradient hooks, and trains nothing when no input of the region "
        "requires grad.\n"
        "  Write use_reentrant=False, or leave it out: gradients are the same, and it is faster.": (
            lambda: paddle.recompute(torch.exp, vector(), use_reentrant=True),
            lambda: paddle.recompute_sequential({}, [torch.sin], vector(), use_reentrant=True),
        ),
        "recompute: preserve_rng_state is str: 'no', where True or False is expected.\n"
        "  Write preserve_rng_state=False, "
        "or leave it out.": lambda: paddle.recompute(torch.exp, vector(), preserve_rng_state="no"),
        "recompute: offload_indices is int: 0, where a list of numbers is expected.\n"
        "  Write offload_indices=[0] for the first "
        "positional argument.": lambda: paddle.recompute(torch.exp, vector(), offload_indices=0),
        "offload_indices holds 2, but the positional arguments of add have numbers 0 to 1.\n"
        "  Write numbers of positional arguments, or leave "
        "offload_indices out.": lambda: paddle.recompute(torch.add, vector(), vector(), offload_indices=[0, 2]),
        "offload_indices holds 1, but the one positional argument of add has number 0.\n"
        "  Pass the tensor by position, or leave "
        "offload_indices out.": lambda: paddle.recompute(torch.add, vector(), other=vector(), offload_indices=[1]),
        "offload_indices holds 0, but exp was called without positional arguments.\n"
        "  Pass the tensor by position, or leave "
        "offload_indices out.": lambda: paddle.recompute(torch.exp, input=vector(), offload_indices=[0]),
        "offload_indices holds 1, but argument 1 of sum is int: 0, in which there is no tensor to offload.\n"
        "  Leave the number out. Numbers count all positional arguments, not only tensors; parameters stay where they "
        "are.": lambda: paddle.recompute(torch.sum, vector(), 0, offload_indices=[1]),
        "offload_indices holds 1, but argument 1 of mul is Parameter of shape (3,), in which there is no tensor to "
        "offload.\n"
        "  Leave the number out. Numbers count all positional arguments, not only tensors; parameters stay where they "
        "are.": lambda: paddle.recompute(torch.mul, vector(), Scale().weight, offload_indices=[1]),
        "recompute_sequential(ctx, functions, *args): ctx is dict: {'segments': 1, 'offload': True}, where a dict is "
        'expected, with no other keys than "segments" and "preserve_rng_state".\n'
        '  Write {"segments": 2}. Where inputs are kept is said by offload_indices=[0].': lambda: (
            paddle.recompute_sequential({"segments": 1, "offload": True}, [torch.sin], vector())
        ),
        "recompute_sequential(ctx, functions, *args): ctx is int: 2, where a dict is expected, with no other keys than "
        '"segments" and "preserve_rng_state".\n'
        '  Write {"segments": 2}. Where inputs are kept is said '
        "by offload_indices=[0].": lambda: paddle.recompute_sequential(2, [torch.sin, torch.exp], vector()),
        "recompute_sequential(ctx, functions, *args): the functions are called with one argument, but got 2.\n"
        "  Put several values into a tuple that the functions "
        "take and return.": lambda: paddle.recompute_sequential({}, [torch.sin], vector(), vector()),
        "recompute_sequential(ctx, functions, *args): the functions are not called with keywords, but got mask.\n"
        "  Put several values into a tuple that the functions "
        "take and return.": lambda: paddle.recompute_sequential({}, [torch.sin], vector(), mask=vector()),
        "offload_indices=[0] would have no effect: of one segment, which is also the last, nothing is recomputed.\n"
        '  Write {"segments": 2}, or leave offload_indices '
        "out.": lambda: paddle.recompute_sequential({}, [torch.sin, torch.exp], vector(), offload_indices=[0]),
        "recompute_sequential: segments=3, but 2 functions make 1 to 2 segments.": lambda: paddle.recompute_sequential(
            {"segments": 3}, [torch.sin, torch.exp], vector()
        ),
        "checkpoint: distribute_saved_activations is Tensor of shape (3,), where True or False is expected.\n"
        "  Write checkpoint(function, False, *args): in Megatron's call the arguments "
        "come after this one.": lambda: megatron.checkpoint(torch.exp, vector()),
        "distribute_saved_activations=True is not understood here: the inputs of a region are spread over the ranks of "
        "a group, and this function is not told the group.\n"
        "  Write checkpoint(function, False, *args), or, with ShardedOver from torch_recompute.distributed:  "
        "recompute(function, "
        "inputs=ShardedOver(group))(*args).": lambda: megatron.checkpoint(torch.exp, True, vector()),
        "CheckpointWithoutOutput: retain_input_tensors is NoneType: None, where True or False is expected.\n"
        "  Leave it out: outputs that lie in the memory of an input are "
        "always left alone.": lambda: megatron.CheckpointWithoutOutput(retain_input_tensors=None),
        "CheckpointWithoutOutput(fp8='hybrid'): Transformer Engine's recompute contexts are not entered here.\n"
        "  Leave fp8 out, and let the function enter the contexts that it needs itself: they are entered again in the "
        "replay.": lambda: megatron.CheckpointWithoutOutput("hybrid"),
        "CheckpointWithoutOutput(ckpt_manager=...): no manager is needed. Regions whose outputs feed one another find "
        "each other, in whatever order they are discarded.\n"
        "  Leave it out, and call discard_output_and_register_recompute(hook_tensor) "
        "on each of them.": lambda: megatron.CheckpointWithoutOutput(ckpt_manager=Opaque()),
        "configure: cpu_checkpointing is str: 'auto', where True or False is expected.\n"
        "  Write cpu_checkpointing=False (false in JSON), or leave it "
        "out.": lambda: deepspeed.configure(None, {"activation_checkpointing": {"cpu_checkpointing": "auto"}}),
        "partition_activations=True is not understood here: the inputs of a region are spread over the ranks of a "
        "group, and this function is not told the group.\n"
        "  Write checkpoint_in_cpu=True (cpu_checkpointing in JSON) to keep them in host memory, or, with ShardedOver "
        "from torch_recompute.distributed:  recompute(function, inputs=ShardedOver(group))(*args).": lambda: (
            deepspeed.configure(None, partition_activations=True, checkpoint_in_cpu=True)
        ),
        "contiguous_memory_optimization=True would have no effect: it lays out what partition_activations leaves on a "
        "rank in one buffer, and that is not understood here.\n"
        "  Against fragmentation, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or leave "
        "contiguous_memory_optimization out.": lambda: deepspeed.configure(
            None, {"activation_checkpointing": {"contiguous_memory_optimization": True}}
        ),
        "num_checkpoints=4 would have no effect: it is the size of the buffer of contiguous_checkpointing, and there "
        "is none.\n"
        "  Write None (null in JSON), or leave "
        "num_checkpoints out.": lambda: deepspeed.configure(None, num_checkpoints=4),
        "synchronize=True would have no effect: no region waits for the device, and none has to.\n"
        "  To time regions, call torch.accelerator.synchronize() in the function, or leave "
        "synchronize out.": lambda: deepspeed.configure(None, synchronize=True),
        "profile=True would have no effect: regions keep no timers.\n"
        "  Time them with torch.profiler, or leave profile out.": lambda: deepspeed.configure(None, profile=True),
        "no/such/ds.json cannot be read as a DeepSpeed configuration: No such file or directory.\n"
        "  Pass the path of a JSON file, or the "
        "dict that it holds.": lambda: deepspeed.configure(None, "no/such/ds.json"),
        "configure: the section activation_checkpointing is bool: True, where keys and values are expected.\n"
        '  Write {"activation_checkpointing": {"cpu_checkpointing": True}}, with any other '
        "sections beside.": lambda: deepspeed.configure(None, {"activation_checkpointing": True}),
        "configure: deepspeed_config is Opaque: Opaque(), where keys and values are expected.\n"
        '  Write {"activation_checkpointing": {"cpu_checkpointing": True}}, with any other '
        "sections beside.": lambda: deepspeed.configure(None, Opaque()),
        "'checkpoint_in_cpu' is not a key of activation_checkpointing, so it would have no effect.\n"
        "  It is the argument of configure; the key in a configuration is cpu_checkpointing.": lambda: (
            deepspeed.configure(None, {"activation_checkpointing": {"checkpoint_in_cpu": True}})
        ),
        "'partitioned_activations' is not a key of activation_checkpointing, so it would have no effect.\n"
        "  The keys are partition_activations, contiguous_memory_optimization, number_checkpoints, cpu_checkpointing, "
        "synchronize_checkpoint_boundary, "
        "profile.": lambda: deepspeed.configure(None, {"activation_checkpointing": {"partitioned_activations": True}}),
        # tiles
        "tiles=0, tile_dim=1: tiles is how many parts to cut the tokens into, 1 or more; tile_dim is the dimension "
        "that holds them.\n"
        "  Write recompute(mlp, tiles=8) for [batch, tokens, width], with tile_dim=0 for "
        "[tokens, width].": lambda: recompute(torch.sin, tiles=0),
        "tile_dim=0 has no effect without tiles=: the region is not cut.\n"
        "  Write recompute(fn, tiles=8, tile_dim=0), or leave it out.": lambda: recompute(torch.sin, tile_dim=0),
        "sin is cut into tiles along its first argument, a tensor, but got float: 3.0.\n"
        "  Pass the tensor that holds the tokens first and by position. What every tile needs whole "
        "goes by keyword.": lambda: recompute(torch.sin, tiles=2)(3.0),
        "sin is cut into tiles along its first argument, a tensor, but was called without positional arguments.\n"
        "  Pass the tensor that holds the tokens first and by position. What every tile needs whole "
        "goes by keyword.": lambda: recompute(torch.sin, tiles=2)(input=vector()),
        "sin: tile_dim=1, but its first argument has shape (3,), dimensions -1 to 0.\n"
        "  tile_dim is the dimension that holds the tokens: 1 in [batch, tokens, width], 0 in "
        "[tokens, width].": lambda: recompute(torch.sin, tiles=2)(vector()),
        "add cuts every positional tensor along dimension 0: argument 1 has shape (2, 3), argument 0 has (3,).\n"
        "  Pass what every tile needs whole by "
        "keyword: it is not cut.": lambda: recompute(torch.add, tiles=2, tile_dim=0)(vector(), torch.ones(2, 3)),
        "layer 3 is called once per tile, and what it returns is put together along the token dimension; it returned "
        "float: 1.5, which cannot be.\n"
        "  Return tensors that hold one entry per token. What is not per token (a loss, a count) belongs outside, or "
        "in a region without "
        "tiles=.": lambda: recompute(lambda x: (x.sin(), 1.5), name="layer 3", tiles=2, tile_dim=0)(vector()),
        "layer 3 returned a tensor of shape (1,) for a tile of 3 tokens, whose dimension 0 should be 3.\n"
        "  tiles= is for functions that act on each token on its own and return one entry per token; a function that "
        "mixes, drops or sums tokens needs a region without tiles=.": lambda: recompute(
            lambda x: x.sin().sum(0, keepdim=True), name="layer 3", tiles=1, tile_dim=0
        )(vector()),
        # a discarded output
        "discard_output_and_register_recompute: the tensor given for sin is Tensor of shape (3,), which was not "
        "computed from the output, so there is no operation that could let go of it.\n"
        "  Pass the result of what consumes the output:  y = consumer(h);  "
        "odc.discard_output_and_register_recompute(y)": lambda: discards(lambda h: vector() * 2),
        "discard_output_and_register_recompute: the tensor given for sin is the output itself, so there is no "
        "operation that could let go of it.\n"
        "  Pass the result of what consumes the output:  y = consumer(h);  "
        "odc.discard_output_and_register_recompute(y)": lambda: discards(lambda h: h),
        "OutputDiscardCheckpoint(fp8='e4m3'): Transformer Engine's recompute contexts are not entered here.\n"
        "  Leave fp8 out, and let the function enter the contexts that it needs itself: they are entered again in the "
        "replay.": lambda: OutputDiscardCheckpoint(fp8="e4m3"),
        "OutputDiscardCheckpoint(ckpt_manager=...): no manager is needed. Regions whose outputs feed one another find "
        "each other, in whatever order they are discarded.\n"
        "  Leave it out, and call discard_output_and_register_recompute(hook_tensor) "
        "on each of them.": lambda: OutputDiscardCheckpoint(ckpt_manager=Opaque()),
        # ranks
        "ShardedOver needs a process group, and torch.distributed has not been initialised.\n"
        "  Write before it:  torch.distributed.init_process_group()   (and start the "
        "script with torchrun)": lambda: ShardedOver(),
        "ShardedOver was given a process group that this process is not in.\n"
        "  Each rank passes the group it belongs to, for "
        'example device_mesh.get_group("tp").': lambda: among(3, -1, lambda: ShardedOver()),
        "ShardedOver was given a group of one rank, which would keep everything it is given: nothing is shared.\n"
        "  Pass the tensor parallel group, or leave the store out.": lambda: among(1, 0, lambda: ShardedOver()),
        "fork('expert') was entered while a CUDA graph is captured. It would set the seed of the device's generator, "
        "which a capture does not allow.\n"
        "  Capture only parts of the model without a fork, or draw from a generator of your own that the graph knows: "
        "graph.register_generator_state(generator), then "
        "torch.rand(..., generator=generator).": lambda: inside(captured(), RngStreams(1234).fork("expert").__enter__),
        "RngStreams: tensor is NoneType: None, where a process group or this rank's number in it is expected.\n"
        '  Write  RngStreams(1234, tensor=device_mesh.get_group("tp")).': lambda: RngStreams(1234, tensor=None),
        "RngStreams: seed is int: -1, where a whole number, 0 or more is expected.\n"
        '  Write  RngStreams(1234, tensor=device_mesh.get_group("tp")).': lambda: RngStreams(-1),
        "add('expert', 3): there is a stream 'expert' already.\n  Use another name.": lambda: RngStreams(10).add(
            "expert", 3
        ),
        "add('mine', 10): the stream 'default' has the seed 10 too, so both would draw the same numbers.\n"
        "  Use another seed.": lambda: RngStreams(10).add("mine", 10),
        "fork('model_parallel'): there is no such stream; known are 'default', 'model-parallel', 'expert'.\n"
        "  Write one of these, or make it first, on all ranks:  "
        "streams.add(name, seed)": lambda: RngStreams(10).fork("model_parallel").__enter__(),
        "keep_collectives: kind='all_reduce', where one of '@reduction', '@collective' is expected.": lambda: (
            keep_collectives(torch.sin, kind="all_reduce")
        ),
        # plans
        "this is not a plan: 'a' is in two choices.\n"
        "  A plan is made by RecomputeConfig(...).plan(model), by hand as Plan((Choice(('layers.0',)), ...)), or read "
        "by Plan.from_json(text) from what plan.to_json() wrote.": lambda: Plan((Choice(("a",)), Choice(("a",)))),
        "apply(model, plan) needs a torch.nn.Module and a Plan, but got Scale: Scale() and str: 'full'.\n"
        "  Write:  handle = apply(model, RecomputeConfig(...).plan(model))": lambda: apply(Scale(), "full"),
        "handle.watch() watches the regions of a plan, but this plan has been removed from Scale.\n"
        "  Watch before handle.remove(), or apply the plan again:  handle = "
        "apply(model, handle.plan)": watched_after_removal,
        "Scale has a plan already: the model itself is placed. Two plans on one model would nest their regions.\n"
        "  Take the first one out:  handle.remove()   (the handle is "
        "what apply returned)": lambda: [apply(model, Plan((Choice(("",)),))) for model in [Scale()] * 2],
        "Sequential has no module '00'. Close to it: '0'.\n"
        "  A plan names modules by the paths of model.named_modules(), of the module that apply is given; a plan made "
        "for another model, or for the whole of which this is a part, "
        "has other paths.": lambda: apply(torch.nn.Sequential(Scale(), Scale()), Plan((Choice(("00",)),))),
        "'1' and '0' are one and the same module, which can be placed only once.\n"
        "  Leave one of the two paths out; the region is there whenever the "
        "module is called.": lambda: apply(torch.nn.Sequential(*[Scale()] * 2), Plan((Choice(("0",)), Choice(("1",))))),
        "the plan keeps inputs of regions in 'sharded', and no store of that name was given.\n"
        "  Write:\n"
        "      from torch_recompute.distributed import ShardedOver\n"
        '      apply(model, plan, stores={"sharded": ShardedOver(group)})\n'
        "  where group is the process group of the tensor parallel ranks, all of which hold "
        "the same inputs.": lambda: apply(Scale(), Plan((Choice(("",), store="sharded"),))),
        "the plan keeps inputs of regions in 'disk', and no store of that name was given.\n"
        "  Write:\n"
        "      apply(model, plan, "
        "stores={'disk': store})": lambda: apply(Scale(), Plan((Choice(("",), store="disk"),))),
        "stores has 'host', which nothing in the plan uses: no region of it names a store.\n"
        "  Leave it out, or make the plan with it:  Choice(('layers.0',), "
        "store='host')": lambda: apply(Scale(), Plan((Choice(("",)),)), stores={"host": OnHost()}),
        "the plan recomputes 2 layers together, but each of them was sharded on its own: in backward the earlier ones "
        "are replayed while only the last one's parameters are gathered.\n"
        "  Shard what is recomputed together as one unit:  fully_shard([layers[0], layers[1]])\n"
        "  or recompute them one by one:  recompute_num_layers=1": shards_one_by_one,
        "the plan recomputes 2 layers together, but FullyShardedDataParallel was put around each of them alone: in "
        "backward the earlier ones are replayed while only the last one's parameters are sure to be there.\n"
        "  Wrap a module that holds all of them, or keep parameters after forward (ShardingStrategy.SHARD_GRAD_OP),\n"
        "  or recompute them one by one:  recompute_num_layers=1": wraps_one_by_one,
        "'1' would cost time and free nothing in Sequential: in the call given, 24 bytes are kept for backward with it "
        "and 24 without.\n"
        "  Leave it out, or place it around more: what a region keeps is its input.": lambda: RecomputeConfig(
            recompute_granularity="selective", recompute_modules=["1"]
        ).plan(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)), (torch.ones(2, 3),)),
        # a replay that does something else
        "the saved call product is marked values_unused, and returns a Tensor (sparse_coo); a tensor without values "
        "can stand in for a plain one only.\n"
        "  Keep its output: no_recompute(fn) without values_unused=True; in a plan, @product in the place of "
        "@values_unused.": lambda: step(
            lambda x: no_recompute(torch.Tensor.to_sparse, name="product", values_unused=True)(x.exp()).to_dense().exp()
        ),
        "A measurement can track modules, optimizers (torch.optim.Optimizer) and tensors, not a list. Name the tensors "
        "that it holds: m.track(*tensors)": lambda: measure([1]),
        "--steps is 0; expected a whole number of at least 1. Write for example --steps 8, which is what you get "
        "without it.": lambda: demo.DemoConfig(steps=0).check(),
        "--d-model is 130; expected a multiple of 4, because the model has 4 attention heads of equal width. Write "
        "--d-model 132": lambda: demo.DemoConfig(d_model=130).check(),
        "--text no/such.txt: no such file or directory; expected a readable file. Any text will do, the model reads "
        "bytes; without --text it reads the Python standard library.": lambda: demo.read_text(Path("no/such.txt"), 8),
        "/dev/null has 0 bytes; expected at least 9, one more than a sequence (--seq 8). Pass a longer text, or write "
        "--seq 1 or less.": lambda: demo.read_text(Path("/dev/null"), 8),
        # simulated steps
        "accumulate= is how many forwards and backwards come before a step of the optimizer, an integer from 1, but "
        "got int: 0": lambda: simulate(nn_linear(), (vector(),), accumulate=0),
        "hold_output= is whether the model's output is alive in backward, as in `out = model(batch); "
        "out.loss.backward()`; it is True or False, "
        "but got str: 'held'": lambda: simulate(nn_linear(), (vector(),), hold_output="held"),
        "simulate(device='hpu'): this build of PyTorch, on this machine, has no such device, and which kernels would "
        "run there cannot be asked.\n"
        "  Leave device= out to simulate the kernels of the CPU, or simulate on a "
        "machine that has one.": lambda: simulate(nn_linear(), (vector(),), device="hpu"),
        "simulate: layers.0.weight is a DTensor: the model is sharded (fully_shard, tensor parallelism), and its "
        "collectives cannot be simulated on one process.\n"
        "  Simulate the model as it was "
        "before sharding.": lambda: Faker(FakeTensorMode(), None).tensor(a_dtensor(), "layers.0.weight"),
        "simulate: args[0] is Tensor of shape (3,), of which no fake copy can be made: its class or layout says "
        "nothing of where its memory lies.\n"
        "  Simulate the model with plain tensors in its place (for a quantised module: "
        "before quantisation).": lambda: simulate(nn_linear(), (vector().to_sparse(),)),
        "the model returned Tensor of shape (2, 3), and which loss it is trained with cannot be told: it has no "
        "`.loss` and no scalar that requires grad. The peak depends on it: a loss over logits keeps several tensors of "
        "their size.\n"
        "  Say how the loss is computed, where the plan or the figures are asked for:  loss=lambda out: "
        "F.cross_entropy(out.flatten(0, -2), labels.flatten())": lambda: simulate(nn_linear(), (torch.ones(2, 3),)),
        "the loss must be a tensor with one element that requires grad, but is int: 3\n"
        "  Say how it is computed:  loss=lambda out: F.cross_entropy(out.logits.flatten(0, "
        "-2), labels.flatten())": lambda: simulate(nn_linear(), (vector(),), loss=lambda out: 3),
        "simulate(optimizer=...) takes an optimizer of the model's parameters, or a function from a list of parameters "
        "to one, but builtin_function_or_method: <built-in function len> returned int: 2\n"
        "  Write optimizer=torch.optim.AdamW, or optimizer=lambda p: "
        "torch.optim.SGD(p, lr=0.1).": lambda: simulate(nn_linear(), (vector(),), optimizer=len),
        # the lens
        "saved_activations(model, args) needs a module or another callable, but got Tensor of shape (3,)\n"
        "  It makes the call itself; pass the model, and the arguments as a tuple:\n"
        "      saved_activations(model, (x,))     # "
        "not saved_activations(model(x))": lambda: saved_activations(vector(), ()),
        "saved_activations(model, args) takes the positional arguments of one call as a tuple, but args is Tensor of "
        "shape (3,)\n"
        "  Write saved_activations(model, (x,)) for the call model(x), saved_activations(model, (x, y)) for "
        "model(x, y).": lambda: saved_activations(torch.exp, vector()),
        "saved_activations(model, args, kwargs) takes the keyword arguments of one call as a dict of names to values, "
        "but kwargs is list: [('input', 1)]\n"
        '  Write saved_activations(model, (x,), {"mask": mask}) for the call '
        "model(x, mask=mask).": lambda: saved_activations(torch.exp, (), [("input", 1)]),
        "audit(modules=...) takes a list of paths or globs, but got str: 'layers.*'\n"
        '  Write audit(model, (x,), modules=["layers.*"]); paths are those '
        "of model.named_modules().": lambda: audit(torch.nn.Linear(3, 3), (vector(),), modules="layers.*"),
        "audit(model, modules=...) finds modules by their paths in a torch.nn.Module, but got method: "
        "<bound method Opaque.__repr__ of Opaque()>\n"
        "  Pass the module, or a function that calls regions, "
        "without modules=.": lambda: audit(Opaque().__repr__, (), modules=["0"]),
        "audit(modules=['layers.*']): Sequential has no module of this path that is called.\n"
        "  Paths are those of model.named_modules(); a glob matches whole paths, dots included; a ModuleList is never "
        "called.": lambda: audit(torch.nn.Sequential(Scale()), (vector(),), modules=["layers.*"]),
        "audit: Scale called no region that backward would replay, so there is nothing to run twice.\n"
        '  Name the modules to look at, audit(model, (x,), modules=["layers.*"]), or place regions first: '
        "recompute(fn), apply(model, plan). A region whose inputs and parameters require no grad "
        "is never replayed.": lambda: audit(Scale(), (vector(),)),
        "audit(perturb=...) is how much to change the inputs of each region relative to themselves, a number from 0 to "
        "1, but got int: 2\n"
        "  Write perturb=0.002, half a step of bfloat16.": lambda: audit(Scale(), (vector(),), perturb=2),
        # configurations
        "recompute_granularity='none' is not known. It says how much of a layer is recomputed:\n"
        "      None          nothing (null in a file; leave the flag out)\n"
        '      "full"        whole layers; recompute_method and recompute_num_layers say which\n'
        '      "selective"   the parts that '
        "recompute_modules names": lambda: RecomputeConfig(recompute_granularity="none"),
        "recompute_method='every' is not known. It says which layers are recomputed:\n"
        '      "uniform"   all of them, recompute_num_layers at a time\n'
        '      "block"     the first recompute_num_layers, one by one; the others keep '
        "their activations": lambda: RecomputeConfig(**(FULL | {"recompute_method": "every"})),
        'recompute_granularity="full" needs recompute_method and recompute_num_layers: without, there is no saying '
        "which layers.\n"
        "  For every layer by itself, write "
        'recompute_method="uniform", recompute_num_layers=1.': lambda: RecomputeConfig(recompute_granularity="full"),
        'recompute_granularity="full" needs recompute_num_layers: without, there is no saying which layers.\n'
        '  For every layer by itself, write recompute_method="uniform", '
        "recompute_num_layers=1.": lambda: RecomputeConfig(recompute_granularity="full", recompute_method="block"),
        f"recompute_num_layers is bool: True{COUNT}": lambda: RecomputeConfig(
            **(FULL | {"recompute_num_layers": True})
        ),
        f"recompute_num_layers is str: '2'{COUNT}": lambda: RecomputeConfig(**(FULL | {"recompute_num_layers": "2"})),
        f"recompute_num_layers is int: 0{COUNT}": lambda: RecomputeConfig(**(FULL | {"recompute_num_layers": 0})),
        "sequence_parallel is str: 'yes', where True or False is expected.\n"
        "  Write sequence_parallel=True (sequence_parallel: true in a file, "
        "without quotes).": lambda: RecomputeConfig(sequence_parallel="yes"),
        "recompute_modules is str: 'core_attn', where a list of strings is expected.\n"
        "  Write recompute_modules=['core_attn']; [] recomputes nothing, which is the run "
        "to compare with.": lambda: RecomputeConfig(recompute_granularity="selective", recompute_modules="core_attn"),
        "recompute_modules is list: ['mlp', 3], where a list of strings is expected.\n"
        '  Write recompute_modules=["core_attn", "layernorm"]; [] recomputes nothing, which is the run to compare '
        "with.": lambda: RecomputeConfig(recompute_granularity="selective", recompute_modules=["mlp", 3]),
        "recompute_method='uniform' would have no effect: recompute_granularity=\"selective\" recomputes parts of "
        "every layer, whichever recompute_modules names.\n"
        '  For a part of some layers, name it by paths: recompute_modules=["layers.0.mlp", "layers.1.mlp"], or leave '
        "recompute_method out.": lambda: RecomputeConfig(recompute_granularity="selective", recompute_method="uniform"),
        "recompute_num_layers=4 would have no effect: recompute_granularity is None, which recomputes nothing.\n"
        '  Write recompute_granularity="full", recompute_method="block", recompute_num_layers=N for the first N layers '
        '(what Megatron-Bridge means by --recompute_num_layers alone), or recompute_method="uniform" for all, N at a '
        "time, or leave recompute_num_layers out.": lambda: RecomputeConfig.from_args(["--recompute_num_layers", "4"]),
        "recompute_modules=['mlp'] would have no effect: recompute_granularity is None, which recomputes nothing.\n"
        '  Write recompute_granularity="selective" for these parts, or leave '
        "recompute_modules out.": lambda: RecomputeConfig(recompute_modules=["mlp"]),
        "recompute_modules=['mlp'] would have no effect: recompute_granularity=\"full\" recomputes whole layers.\n"
        '  Write recompute_granularity="selective" for these parts, or leave '
        "recompute_modules out.": lambda: RecomputeConfig(**FULL, recompute_modules=("mlp",)),
        "cpu_offloading_num_layers=4 would have no effect: cpu_offloading is False.\n"
        "  Write cpu_offloading=True with it, or leave "
        "cpu_offloading_num_layers out.": lambda: RecomputeConfig.from_args(["--cpu-offloading-num-layers", "4"]),
        "distribute_saved_activations=True does not go with sequence_parallel=True: with the latter the input of a "
        "layer is already split over the tensor parallel ranks, so each rank keeps its own part and there is nothing "
        "to distribute.\n"
        "  Leave distribute_saved_activations "
        "out.": lambda: RecomputeConfig(**FULL, distribute_saved_activations=True, sequence_parallel=True),
        "distribute_saved_activations=True does not go with cpu_offloading=True: the one keeps the inputs of regions "
        "in parts on the tensor parallel ranks, the other in host memory, and they lie in one place.\n"
        '  Leave one of the two out, or make the choices by hand:  Choice((path,), store="sharded")  for some layers, '
        'store="host"  for others.': lambda: RecomputeConfig(
            **FULL, distribute_saved_activations=True, cpu_offloading=True, cpu_offloading_num_layers=1
        ),
        'distribute_saved_activations=True does not go with recompute_granularity="selective": what goes into a layer '
        "is the same on all tensor parallel ranks, but what goes into its parts (the queries, keys and values of its "
        "attention) is not, so it cannot be kept in common. (Megatron-LM's arguments refuse it too; its "
        "TransformerConfig takes it, and does nothing with it.)\n"
        "  Leave it out, or write it with full granularity. For a part whose input is the same on all ranks:  "
        'Choice((path,), store="sharded").': lambda: RecomputeConfig(
            recompute_granularity="selective", distribute_saved_activations=True
        ),
        "distribute_saved_activations=True would have no effect: recompute_granularity is None, which recomputes "
        "nothing, so there are no inputs to distribute.\n"
        '  Write recompute_granularity="full" with it, or leave '
        "distribute_saved_activations out.": lambda: RecomputeConfig(distribute_saved_activations=True),
        "repeat_collectives=True would have no effect: recompute_granularity is None, which recomputes nothing, so "
        "nothing is repeated.\n"
        '  Write recompute_granularity="full" with it, or leave '
        "repeat_collectives out.": lambda: RecomputeConfig(repeat_collectives=True),
        "repeat_collectives=True would have no effect: with distribute_saved_activations=True nothing is kept whole, "
        "so collectives are repeated anyway.\n"
        "  Write one of the two, or leave repeat_collectives "
        "out.": lambda: RecomputeConfig(**FULL, distribute_saved_activations=True, repeat_collectives=True),
        "repeat_collectives=True would have no effect: no weight in what is recomputed is split over ranks as "
        "parallelize_module splits it.\n"
        "  Plan after parallelize_module, or leave repeat_collectives out.": lambda: RecomputeConfig(
            recompute_granularity="selective", recompute_modules=["0"], repeat_collectives=True
        ).plan(nn.Sequential(nn.Linear(2, 2))),
        "cpu_offloading=True moves the inputs of whole layers, that are recomputed, to host memory, and here there are "
        f'none: it needs recompute_granularity="full".{NO_OFFLOAD}'
        '  Write recompute_granularity="full" with it, or place a store by hand: no_recompute(fn, store=OnHost()) '
        "inside a region.": lambda: RecomputeConfig(cpu_offloading=True, cpu_offloading_num_layers=2),
        "fine_grained_activation_offloading=True moves the inputs of parts, named in offload_modules too, that are "
        'recomputed, to host memory, and here there are none: it needs recompute_granularity="selective".'
        f"{NO_OFFLOAD}"
        '  Write recompute_granularity="selective" with it, or place a store by hand: '
        "no_recompute(fn, store=OnHost()) inside a "
        "region.": lambda: RecomputeConfig(fine_grained_activation_offloading=True, offload_modules=["core_attn"]),
        "offload_modules=['core_attn'] would have no effect: 'core_attn' is not among recompute_modules, and only "
        "inputs of what is recomputed are moved.\n"
        "  Write recompute_modules=['mlp', 'core_attn'], or leave offload_modules out.": lambda: RecomputeConfig(
            recompute_granularity="selective",
            recompute_modules=["mlp"],
            fine_grained_activation_offloading=True,
            offload_modules=["core_attn"],
        ),
        "activation_offload_fraction=0.5 would have no effect: a plan says whose inputs lie in host memory, and the "
        "store how many of them.\n"
        '  Write apply(model, plan, stores={"host": store}) with store = OnHost(fraction=...), or leave '
        "activation_offload_fraction out.": lambda: RecomputeConfig(
            recompute_granularity="selective",
            recompute_modules=["mlp"],
            fine_grained_activation_offloading=True,
            offload_modules=["mlp"],
            activation_offload_fraction=0.5,
        ),
        "OnHost(at_most='24GiB'): at_most must be a number of bytes, 0 or more.": lambda: OnHost(at_most="24GiB"),
        "bandwidth('meta'): expected a CUDA device of this machine, or 'cpu'.\n"
        "  Write bandwidth() for the machine's accelerator, or for the CPU "
        "where there is none.": lambda: bandwidth("meta"),
        'check="values" was asked for while a CUDA graph is captured; it reads the values that it compares, and '
        "nothing can be read from the device then.\n"
        "  Check the model once without a graph, and capture it with "
        'check="metadata", the default.': lambda: inside(captured(), lambda: step(torch.sin, check="values")),
        'moe_layer_recompute=True asks for recompute_granularity="selective" with "moe" among recompute_modules, but '
        'recompute_granularity is "full", which recomputes the layers that the experts are in.\n'
        "  Leave moe_layer_recompute out.": lambda: RecomputeConfig(**FULL, moe_layer_recompute=True),
        "mlp_chunks_for_training=4 cannot be applied from outside of a layer: it changes how an MLP computes; write "
        "recompute(mlp, tiles=N) "
        "where it is called.": lambda: RecomputeConfig.from_dict({"model": {**FULL, "mlp_chunks_for_training": 4}}),
        "'granularity' in recompute is not a field of RecomputeConfig, so it would have no effect; the nearest is "
        f"'recompute_granularity'.{FIELDS}": lambda: RecomputeConfig.from_dict({"recompute": {"granularity": "full"}}),
        "'--recompute-layers' is not a field of RecomputeConfig, so it would have no effect; the nearest is "
        f"'--recompute_num_layers'.{FIELDS}": lambda: RecomputeConfig.from_args(["--lr", "1", "--recompute-layers=2"]),
        "recompute_num_layers has one value in the top level and another in teacher; which of the two is meant cannot "
        "be told.\n"
        "  Pass one section: RecomputeConfig.from_dict(data['model']).": lambda: RecomputeConfig.from_dict(
            {**FULL, "teacher": {"recompute_num_layers": 4}}
        ),
        "the configuration is list: ['recompute_granularity', 'full'], where keys and values are expected.\n"
        '  Write {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, with any '
        "other keys beside, or "
        "inside of a section.": lambda: RecomputeConfig.from_dict(["recompute_granularity", "full"]),
        "train.toml is not a configuration: its name ends in '.toml'.\n"
        "  from_file reads JSON from *.json and YAML from *.yaml and *.yml; pass what you read from another file to "
        "RecomputeConfig.from_dict(data).": lambda: RecomputeConfig.from_file("train.toml"),
        "reading train.yaml needs the package PyYAML, which is not installed.\n"
        "  Write: pip install torch-recompute[config], or save "
        "the file as JSON.": lambda: without("yaml", lambda: RecomputeConfig.from_file("train.yaml")),
        "these flags cannot be used: -rl 4 means recompute_granularity='full', but recompute_granularity is given as "
        f"'selective'.{FLAGS}": lambda: RecomputeConfig.from_args(["-rl", "4", "--recompute-activations"]),
        "these flags cannot be used: argument --recompute_granularity/--recompute-granularity: expected one "
        f"argument.{FLAGS}": lambda: RecomputeConfig.from_args(["--recompute-granularity"]),
        "these flags cannot be used: they are one string, '--recompute-activations'; pass a list of words, as "
        f"shlex.split makes it.{FLAGS}": lambda: RecomputeConfig.from_args("--recompute-activations"),
        "RecomputeConfig.plan(model) needs a torch.nn.Module, but got str.": lambda: RecomputeConfig(**FULL).plan(
            "gpt2"
        ),
        "RecomputeConfig.plan(model) needs a torch.nn.Module, but got list.\n"
        "  For the chunks of an interleaved pipeline, one plan each: [config.plan(chunk) for "
        "chunk in chunks].": lambda: RecomputeConfig(**FULL).plan([Scale(), Scale()]),
        "recompute_num_layers=4, but the longest stack of layers in this model, layers, has 3. (Under pipeline "
        "parallelism a model is one stage, or one chunk of it; the number is per stage.)\n"
        "  Write a "
        "number from 1 to 3.": lambda: RecomputeConfig(**(FULL | {"recompute_num_layers": 4})).plan(encoder()),
        "recompute_num_layers=2, but this model is a single layer. (Under pipeline parallelism a model is one stage, "
        "or one chunk of it; the number is per stage.)\n"
        "  Write 1.": lambda: RecomputeConfig(**(FULL | {"recompute_num_layers": 2})).plan(encoder().layers[0]),
        "recompute_modules: 'moe' matches nothing in TransformerEncoder, so nothing would be recomputed for it.\n"
        "  These labels match:\n"
        "      core_attn   3 places\n"
        "      mlp         3 places\n"
        "      layernorm   3 places\n"
        f"{PATHS}{UNCALLED}": lambda: RecomputeConfig(
            recompute_granularity="selective", recompute_modules=["mlp", "moe"]
        ).plan(encoder()),
        "recompute_modules: 'layer' matches nothing in TransformerEncoderLayer, so nothing would be recomputed for "
        "it.\n"
        "  These labels match:\n"
        "      core_attn   1 place\n"
        "      mlp         1 place\n"
        "      layernorm   1 place\n"
        f"{PATHS}{UNCALLED}": lambda: RecomputeConfig(
            recompute_granularity="selective", recompute_modules=["layer"]
        ).plan(encoder().layers[0]),
        "recompute_modules: 'core_attn' matches nothing in Scale, so nothing would be recomputed for it.\n"
        "  No label does.\n"
        f"{PATHS}{UNCALLED}": lambda: RecomputeConfig(recompute_granularity="selective").plan(Scale()),
        "recompute_modules: 'sums' matches nothing in Named, so nothing would be recomputed for it.\n"
        "  These labels match:\n"
        "      squares   1 place\n"
        f"{PATHS}": lambda: selects("sums").plan(Named(), (vector(),)),
        "recompute_modules: 'sums' matches nothing in Scale, so nothing would be recomputed for it.\n"
        "  No label does.\n"
        f"{PATHS}\n  Its author gave no call a name: "
        f'no_recompute(fn, name="...").': lambda: selects("sums").plan(Scale(), (vector(),)),
        "recompute_modules: 'roots' is a region in the code of Named (in the model itself): recompute(fn, "
        "name='roots') is recomputed whatever a plan says, so naming it would have no effect.\n"
        "  Leave it out. A call that is recomputed only where it is listed is written in the model as "
        "no_recompute(fn, name='roots'), which is the "
        "plain call otherwise.": lambda: selects("roots").plan(Named(), (vector(),)),
        "no layers were found in Scale. Looked for: a ModuleList, Sequential or ModuleDict of alike modules, each with "
        "at least two products (linear layers, convolutions, stacked experts) inside.\n"
        "  Say which class is a layer, before the plan is made:\n"
        "      from torch_recompute.plan.units import register\n"
        '      register("layer", MyLayer)\n'
        "  or name modules by their paths, as named_modules() gives them:\n"
        '      RecomputeConfig(recompute_granularity="selective", '
        'recompute_modules=["blocks.*"])': lambda: RecomputeConfig(**FULL).plan(Scale()),
        # what a model is made of
        "find_units(model) needs a torch.nn.Module, but got str: 'gpt2'.": lambda: find_units("gpt2"),
        "register: 'core_attn' is not a role of a module.\n"
        "  Write one of layer, attention, mlp, router, experts, norm, product, "
        "activation, embedding.": lambda: register("core_attn", Scale),
        "register: int: 3 says nothing about a module.\n"
        '  Pass a class (MyNorm), a glob over class names ("My*Norm"), or a function from a '
        "module to a bool.": lambda: register("norm", 3),
        # torch-recompute show
        f"MODEL is 'llama-8b', which is no file, no folder and not of the form pkg.module:name. {MODEL} Known "
        "by name are llama3-8b, llama3-70b, llama3-405b, mixtral-8x7b, qwen3-30b-a3b, "
        "deepseek-v3, gpt2-xl, vit-h.": lambda: models.load("llama-8b"),
        f"MODEL is 'no_such_package:model': No module named 'no_such_package'. {MODEL}": lambda: models.load(
            "no_such_package:model"
        ),
        "MODEL is 'math:pi', which gives float: 3.141592653589793; expected a torch.nn.Module, or a function that "
        "returns one, or one and its batch (a tuple of arguments, or a dict of keyword arguments), and a function for "
        "its loss.": lambda: models.load("math:pi"),
        "MODEL is 'math:sin', and building it raises TypeError: math.sin() takes exactly one "
        "argument (0 given)": lambda: models.load("math:sin"),
        f"config.json is not the configuration of a Hugging Face model: it has no field model_type. {MODEL}": lambda: (
            shows_a_configuration('{"hidden_size": 32}')
        ),
        "config.json is not the configuration of a Hugging Face model: JSONDecodeError: Expecting value: line 1 "
        f"column 1 (char 0). {MODEL}": lambda: shows_a_configuration("hidden_size: 32"),
        "config.json is built with the package transformers, which is not installed. Write: pip "
        "install transformers": lambda: shows_a_configuration('{"model_type": "llama"}'),
        # torch-recompute plan
        "--dtype is for models that are built here; math:sin makes its own. Leave it out, and have "
        "it say so there.": lambda: models.load("math:sin", torch.float16),
        "MODEL is 'mine:model', which is Linear: no model of transformers that takes input_ids or pixel_values, so "
        "there is no batch for it. Write a function pkg.module:name that returns (model, batch), or (model, batch, "
        "loss), the batch a tuple of arguments or a "
        "dict of keywords.": lambda: models.batch_for(nn.Linear(1, 1), "mine:model"),
        "--sequence is a number of tokens, and vit-h takes pixel_values. Leave it out.": lambda: models.batch_for(
            described("pixel_values", image_size=8), "vit-h", sequence=8
        ),
        "--sequence is 9, and gpt2-xl has 8 positions. Write --sequence 8 or less.": lambda: models.batch_for(
            described("input_ids", max_position_embeddings=8), "gpt2-xl", sequence=9
        ),
        "--batch is 0; expected a whole number of at least 1. Write for example --batch 1.": lambda: plans(
            "math:sin", "--budget", "1GiB", "--batch", "0"
        ),
        "--plot goes with --frontier and says nothing without it. Add --frontier, or leave --plot out.": lambda: plans(
            "math:sin", "--budget", "1GiB", "--plot", "a.png"
        ),
        "--out is /: is a directory. Write the path of a file in a folder that is there, and "
        "that may be written.": lambda: output.write_plan(Path("/"), Plan(), {}),
        "--plot is plan.bmp; expected a file name that ends in .png, .svg, .pdf. Write for "
        "example --plot plan.png": lambda: plans("math:sin", "--frontier", "--plot", "plan.bmp"),
        "plan.json holds a plan and does not say for which model and batch; a file that torch-recompute plan --out "
        "wrote does. Add --model MODEL, and what else torch-recompute plan takes to "
        "describe a step.": lambda: reports_on({}),
        "plan.json says dtype='fp8' of its step, which no command line of torch-recompute plan says. Make the plan "
        "again, or add --model MODEL: then the command line alone says "
        "which step is meant.": lambda: reports_on({"task": {"model": "gpt2-xl", "dtype": "fp8"}}),
        "--points is 1; expected 0, for no curve, or at least 2. Write for example --points 10.": lambda: reports(
            "plan.json", "--points", "1"
        ),
        "--plot is plan.png, but the package matplotlib, which draws it, is not installed. Write: pip install "
        "torch-recompute[plot]": lambda: inside(
            patch.object(output, "find_spec", return_value=None),
            lambda: plans("math:sin", "--frontier", "--plot", "plan.png"),
        ),
        "tables are printed by the package rich, which is not installed. Write: pip install torch-recompute[cli], or "
        "add --json": lambda: inside(
            patch.object(output, "find_spec", return_value=None), lambda: plans("math:sin", "--frontier")
        ),
        "--plan is no/plan.json: no such file or directory. Write the path of a file that torch-recompute plan MODEL "
        "--budget ... --out plan.json has made, or that "
        "holds plan.to_json().": lambda: output.read_plan(Path("no/plan.json")),
        "--device is tpu; expected cpu, cuda or cuda:N; torch sees no CUDA device here. Leave it out for what is "
        "here.": lambda: inside(
            patch.object(torch.cuda, "is_available", return_value=False), lambda: verify_command._device("tpu")
        ),
        "this_test:on_meta makes a model on the meta device, which has no weights to run with. Have it make the "
        "model on a device that is here.": lambda: verifies("this_test:on_meta"),
        "a step of this_test:does_not_fit raises RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x2 and "
        "3x3). That is without a plan. Mend it, or write a function pkg.module:name that returns (model, batch) and "
        "runs.": lambda: verifies("this_test:does_not_fit"),
        "assert_same_gradients needs to know what to compare with, but got neither plan= nor plain=.\n"
        "  Write assert_same_gradients(model, (x,), plan=plan) for a plan, or "
        "assert_same_gradients(with_regions, (x,), plain=without) for "
        "regions in the code.": lambda: testing.assert_same_gradients(nn_linear(), (vector(),)),
        "@pytest.mark.peak_below takes one number of bytes, but got ('1MiB', '2MiB').\n"
        '  Write @pytest.mark.peak_below("200MiB"), with KB, MB, GB or KiB, MiB, GiB; or an '
        "int, which is bytes.": lambda: testing.read_limit("1MiB", "2MiB"),
        # torch-recompute bench run
        "bench run needs a MODEL: on the command line, or as model: in the file of --sweep. Write for example "
        "torch-recompute bench run gpt-tiny": benches,
        "--optimizer is lion; expected one of adamw, sgd, none. Write for example --optimizer adamw": lambda: Workload(
            "gpt-tiny", optimizer="lion"
        ).check(),
        "--threshold is -5.0; expected a number of percent, 0 or more, without a sign. Write for example --threshold "
        "5": lambda: benches("gpt-tiny", "--device", "cpu", "--golden", "a.json", "--threshold", "-5"),
        "--capacity is fit; expected the bytes that there are. Write for example --capacity 2GiB": lambda: benches(
            "gpt-tiny", "--capacity", "fit"
        ),
        "--capacity limits a process's memory on a CPU by Linux's RLIMIT_DATA, and this system is darwin. Leave it "
        "out, or write --device cuda, where the allocator keeps to "
        "it.": lambda: benches("gpt-tiny", "--device", "cpu", "--capacity", "2GiB", **{"sys.platform": "darwin"}),
        f"--device is cuda, but torch {torch.__version__} sees no such device here. Write --device cpu": lambda: (
            benches("gpt-tiny", "--device", "cuda", **{"torch.cuda.is_available": lambda: False})
        ),
        "budget and recompute_granularity both say what is recomputed. Leave one of them out: the recompute fields, "
        "budget and plan "
        "exclude each other.": lambda: benches("gpt-tiny", "--budget", "1GiB", "--recompute-activations"),
        "--budget says what is recomputed, and so does the file of --sweep. Make it an experiment in the file, or "
        "leave --sweep out.": lambda: benches("--sweep", "a.yaml", "--budget", "1GiB"),
        "--sweep is no/such.json: no such file or directory. Write the path of a file that is there, and that may be "
        "read.": lambda: benches("--sweep", "no/such.json"),
        "--sweep is a.json, which has no experiments; expected a list. Write for example:\n"
        "      experiments:\n"
        "        - name: every layer\n"
        "          recompute_granularity: full\n"
        "          recompute_method: uniform\n"
        "          recompute_num_layers: 1": lambda: reads("{}", bench.read_sweep),
        "a.json, experiment 1: it has no name. An experiment has a name of its own, and the fields of RecomputeConfig, "
        "or budget, or plan. The control, which recomputes nothing, is always there "
        "and has no entry.": lambda: reads('{"experiments": [{"budget": "1GiB"}]}', bench.read_sweep),
        "a.json: 'round' is not known, so it would have no effect; the nearest is 'rounds'. Write rounds:": lambda: (
            reads('{"experiments": [], "round": 3}', bench.read_sweep)
        ),
        "--golden is no/such.json: no such file or directory. Write the path of a file that --save-golden has written, "
        "on the same kind of device.": lambda: bench.Golden.read(Path("no/such.json")),
        "--golden is a.json: no golden figures of torch-recompute bench run, version 1. Write the path of a file that "
        "--save-golden has written, on the same kind of device.": lambda: reads('{"losses": []}', bench.Golden.read),
        "the figures in golden.json are of another device: H200, here H100. A comparison would say nothing. Write "
        "figures of your own with --save-golden, or leave --golden out.": lambda: GOLDEN.check_machine("H100", 7),
        "golden.json has no figure for 'half' and none for the control, only for 'every layer'. Run it once with "
        "--save-golden, or leave --golden out.": lambda: GOLDEN.of(Setting("half", budget="50%")),
        "--results is a.jsonl, whose line 1 is no result of bench run (schema_version is 2). Write the path of another "
        "file, or --fresh to begin this one again.": lambda: inside(
            patch.object(Path, "open", mock_open(read_data='{"schema_version": 2}\n')),
            lambda: bench.Journal(Path("a.jsonl")),
        ),
        # plans that meet other libraries
        "str: 'block' does not say what to recompute.\n"
        '  Write "full" (every layer), "full:2" (two layers as one region), "block:3" (the first three layers), labels '
        'such as "core_attn,mlp", the path of a .json or .yaml file, Megatron\'s flags, or "none"; or pass a Plan or a '
        "RecomputeConfig.": lambda: policies.apply(Switched(), "block"),
        "checkpointing was turned on with context_fn=None, but this model has a plan, which says what is recomputed; "
        "the setting would have no effect.\n"
        '  Leave it out and say it in the plan ("block:3" or labels, for less than all layers), or take the plan out: '
        "handle.remove()": turns_checkpointing_on_in_other_words,
        "layer is a region of a plan and also checkpointed by another library; it would be run again twice over.\n"
        "  Turn that off (gradient_checkpointing, activation_checkpointing_policy, checkpoint_wrapper), or take the "
        "plan out: handle.remove()": turns_other_checkpointing_on_inside,
        "the cache of keys and values that layer was given with gradients on is written in place, so what it held when "
        "the region ran is gone when it is run again.\n"
        "  Pass use_cache=False, or a DynamicCache, which appends; a static cache is for torch.no_grad().": lambda: (
            policies.apply(model := Switched(), ONE_LAYER) and model(vector(), cache=StaticCache())
        ),
        "every= is the number of steps from one taking of figures to the next, at least 3, but got int: 2. Two steps "
        "are watched each time.\n"
        "  Write every=100, or leave it out: then the first two steps are "
        "watched, and no other.": lambda: huggingface.RecomputeCallback("full", every=2),
        "RecomputeCallback() was given no plan, and the training arguments have none either.\n"
        '  Write RecomputeCallback("full"), or put activation_checkpointing_kwargs={"policy": "full"} into the '
        "TrainingArguments; to report on a plan that is applied already, pass its handle: "
        "RecomputeCallback(handle)": lambda: huggingface.RecomputeCallback().on_train_begin(
            None, None, None, Switched()
        ),
        # budgets of memory
        "budget='plenty' is not a budget.\n"
        '  Write bytes (24 * 2**30), a text with a unit ("24GiB", "24GB", "800MiB"), a share of the activation memory '
        'between 0 and 1 (0.4, "40%"), or "fit" for what the device has free.': lambda: read_budget("plenty"),
        "budget='24G': 'g' is not a unit of memory; 'g' could be GB or GiB, which differ.\n"
        "  Write B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB "
        "(powers of 1024).": lambda: read_budget("24G"),
        "budget='3 pages': 'pages' is not a unit of memory.\n"
        "  Write B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB "
        "(powers of 1024).": lambda: read_budget("3 pages"),
        "solver='gurobi' is not a solver.\n  Leave it out; there is one, \"auto\".": lambda: choose(
            COSTS, 20 * GIB, "gurobi"
        ),
        "planning for a memory budget needs the package numpy, which is not installed.\n  Write: "
        "pip install numpy": lambda: without("numpy", lambda: choose(COSTS, 20 * GIB)),
        "these costs cannot be: segment 'net' is of kind 'b', but there are a.\n"
        "  Costs are made by profiling a model; by hand, "
        "see plan/cost.py.": lambda: choose(Costs({"a": COSTS.kinds["layer"]}, (Segment("net", "b", 0, 0),)), 1),
        # steps over ranks
        "--frontier does not go with --pp: it is the curve of one device. Leave one of them out.": lambda: plans(
            "gpt2-xl", "--frontier", "--pp", "2"
        ),
        "--batch is 8, which 2 replicas (--dp) cannot take in microbatches of 3 (--mbs). Write "
        "a multiple of 6.": lambda: Layout(dp=2, mbs=3, batch=8),
        "--vpp: interleaved 1F1B takes the microbatches in turns of the pipeline's 4 ranks, and 6 are no multiple of "
        "it. Write a --batch that is a multiple of 4.": lambda: Layout(pp=4, vpp=2, batch=6),
        "--pp 4 --vpp 2 are 8 parts, and the model has 6 layers. Write fewer.": lambda: Layout(pp=4, vpp=2).pipeline(6),
        "--tp, --pp, --dp and --mbs are for language models of transformers; MODEL is Linear. Leave them out, or "
        "plan with make_plan what each rank runs.": lambda: cut_up(torch.nn.Linear(2, 2), dp=2),
        "--tp: MODEL is Linear, whose configuration does not say how wide a head is, so a rank's slice of it cannot "
        "be built. Use it without --tp, or a model of transformers with head_dim, such as those "
        "of Llama's kind.": lambda: cut_up(torch.nn.Linear(2, 2), tp=2),
        "--tp is 3, and --sequence of MODEL is 8, which 3 ranks cannot share. Write a divisor of it.": lambda: cut_up(
            torch.nn.Linear(2, 2), tp=3, sequence_parallel=True
        ),
        "--tp 2: MODEL is Linear, and built from a configuration for one rank weight is no slice of the model's. Use "
        "it without --tp.": lambda: divided(torch.nn.Linear(8, 8), torch.nn.Linear(4, 4), 2, "MODEL"),
        # planning
        "make_plan was given 1 positional arguments of the model and sizes, which are examples of whole calls.\n"
        "  Write one or the other:  make_plan(model, budget=..., "
        "sizes=[(short,), (long,)])": lambda: make_plan(Scale(), (vector(),), budget=1, sizes=[(vector(),)]),
        "sizes holds float: 5.12, where an example of a call is expected.\n"
        "  Write a tuple of positional arguments or a dictionary of keyword arguments for each size, with tensors of "
        "that size:\n"
        "      sizes=[(batch[:, :length],) for length in "
        "(512, 2048, 8192)]": lambda: make_plan(Scale(), budget=1, sizes=[5.12]),
        "LayerNorm has no module that a plan could recompute: none that is called in a forward holds a product.\n"
        '  Name one by hand: from torch_recompute.plan.units import register; register("layer", MyBlock)': lambda: (
            make_plan(torch.nn.LayerNorm(4), (torch.ones(2, 4),), budget=0.5, loss=torch.mean, device="h100")
        ),
        "the plan was made for a model with Block with 4 tensors at '0'; this model has Linear with 2 parameters of 20 "
        "elements there.\n"
        "  Make the plan again for this model, as it is when the plan is applied:  make_plan(model, args, "
        "budget=...)": lambda: apply(
            torch.nn.Sequential(torch.nn.Linear(4, 4)), Plan((), modules=(("0", "Block with 4 tensors"),))
        ),
        "device='h300' is neither a device of this machine nor one whose speeds are known.\n"
        "  Known are "
        "v100, t4, a10, a30, a40, a100, a100-40gb, a100-pcie, l4, l40, l40s, h20, h100, h100-pcie, h100-nvl, h200, "
        "h200-nvl, h800, gh200, b200, rtx-a6000, rtx3090, "
        "rtx4090, rtx5090.": lambda: make_plan(torch.nn.Linear(4, 4), (vector(),), budget=0.5, device="h300"),
        "sizes='learn' is not a choice of sizes.\n"
        '  Write sizes="all" for every length up to that of the call that is given, or the lengths: '
        "sizes=[512, 2048].": lambda: make_plan(Scale(), (torch.ones(2),), budget=1, sizes="learn"),
        "sizes holds lengths of sequences and tuple: (tensor([1., 1.]),); lengths are whole numbers above 0, and are "
        "not mixed with examples of calls.\n"
        "  Write one or the other:  make_plan(model, (batch,), budget=..., sizes=[512, 2048])\n"
        "                           make_plan(model, budget=..., sizes=[(short,), "
        "(long,)])": lambda: make_plan(Scale(), (torch.ones(2, 8),), budget=1, sizes=[4, (torch.ones(2),)]),
        "sizes are lengths, but the call has a first tensor of shape (2, 2), in which it could be two, so it cannot be "
        "told where its sequence is: the first tensor is expected to be tokens [batch, sequence] or embeddings [batch, "
        "sequence, width], and no other dimension of it to be as long as the sequence.\n"
        "  Give an example of each size instead:  make_plan(model, budget=..., "
        "sizes=[(short,), (long,)])": lambda: make_plan(Scale(), (torch.ones(2, 2),), budget=1, sizes=[4]),
        "profiles of different steps cannot be merged: the model is Net in one and Other in another.\n"
        "  Merge those of one model and one shape of batch: several measurements, or the ranks of a group. What two "
        "profiles differ in is shown by  print(one.diff(other)).": lambda: Profile(
            "Net", "h100", COSTS, 20 * GIB
        ).merge(Profile("Other", "h100", COSTS, 20 * GIB)),
        "offload='much' says neither whether nor how much of host memory may be used.\n"
        "  Write offload=True for as much as there is, or the most bytes of "
        'it: offload="64GiB".': lambda: make_plan(torch.nn.Linear(3, 3), (vector(),), budget=0.5, offload="much"),
        "offload: the step is planned for the CPU, whose memory is host memory, so offloading would free nothing.\n"
        '  To plan for a device that is not at hand, name it: device="h100" (known are '
        "v100, t4, a10, a30, a40, a100, a100-40gb, a100-pcie, l4, l40, l40s, h20, h100, h100-pcie, h100-nvl, h200, "
        "h200-nvl, h800, gh200, b200, rtx-a6000, rtx3090, rtx4090, "
        "rtx5090).": lambda: make_plan(torch.nn.Linear(3, 3), (vector(),), loss=torch.sum, budget=0.5, offload=True),
        "offload: how fast device 'mine' copies to and from host memory is not known.\n"
        "  Known are "
        "v100, t4, a10, a30, a40, a100, a100-40gb, a100-pcie, l4, l40, l40s, h20, h100, h100-pcie, h100-nvl, h200, "
        "h200-nvl, h800, gh200, b200, rtx-a6000, rtx3090, rtx4090, rtx5090, and any CUDA device of "
        "this machine, "
        "which is measured.": lambda: link_of(Roofline("mine", {1: 1e12}, 1e12, 1e-6), torch.device("cpu")),
        "this is not a profile: this version of the library reads version 1.\n"
        "  A profile is made by torch_recompute.profile(model, args), or read by Profile.from_json(text) from what "
        "profile.to_json() wrote.": lambda: Profile.from_json("[]"),
        "what memory of this machine is free is not known: its system (darwin) says it to psutil, which is not "
        "installed. pip install psutil, or pass the budget in bytes.": fits_where_memory_is_unknown,
        "budget=\"fit\": what a device of type 'mtia' has free is not known, since torch.mtia does not say it.\n"
        "  Pass the most bytes that the step may take, such "
        'as budget="24GiB".': lambda: free_bytes(nn.Linear(2, 2), torch.device("mtia")),
        'budget="fit" means what the device has free, and a profile knows no device.\n'
        '  Write make_plan(model, args, budget="fit") where the model is, or a number of bytes such '
        'as budget="24GiB".': lambda: solve(Profile("Net", "h100", COSTS, 20 * GIB), budget="fit"),
        # pipelines
        "the schedule does 0W0 before 0I0, which it needs.\n"
        "  A microbatch goes through a stage forward (F), then backward (B), or backward for its inputs (I) and then "
        "for its weights (W).": lambda: schedule_steps([Action(0, "F", 0), Action(0, "W", 0)]),
        "the schedule does 0I0 after 0B0, which is the same work.\n"
        "  On each stage a microbatch has one forward (F), and one backward: B, or "
        "the halves I and W.": lambda: schedule_steps([Action(0, "F", 0), Action(0, "B", 0), Action(0, "I", 0)]),
        "int: 4 is no schedule of torch.distributed.pipelining with a table of actions (pipeline_order).\n"
        "  Pass such a schedule, or the name of one: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, "
        "ZBVZeroBubble, DualPipeV.": lambda: orders_of(4),
        "schedule='2F2B' is not known.\n"
        "  Known are GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV, as in "
        "torch.distributed.pipelining.": lambda: orders_named("2F2B", 2, 4),
        "the schedule 1F1B does not take these numbers: it needs as many microbatches as ranks, and 2 are fewer than "
        "4.\n"
        "  Pass others, or another schedule.": lambda: orders_named("1F1B", 4, 2),
        "pipeline=0, microbatches=2, chunks=1, where whole numbers are expected, 1 or more.\n"
        "  pipeline is the number of ranks, microbatches those of one step, chunks the number of "
        "stages on each rank.": lambda: orders_named("1F1B", 0, 2),
        "split=(1, 1) does not fit: the model has 3 layers.\n"
        "  The model's layers are a to c, 3 of them. Write how many each stage has, or the path of the first of each "
        '("" for the first stage).': lambda: Stages("1F1B", 2, 4, split=(1, 1)).bounds(2, ["a", "b", "c"]),
        "stages is int: 4, where a pipeline is expected.\n"
        '  Write stages=Stages("1F1B", pipeline=4, microbatches=8), or pass a schedule of '
        "torch.distributed.pipelining.": lambda: plans_stages(stages=4),
        "budget holds 3 budgets, and the pipeline has 2 ranks.\n  Pass one for all, or a list "
        "with one per rank.": lambda: plans_stages(budget=[1, 2, 3]),
        'budget="fit" means what a device has free now, which each rank of a pipeline knows only of its own.\n'
        '  Pass bytes, such as budget="70GiB", or a list with one budget per rank.': lambda: plans_stages(budget="fit"),
        "optimizer is a SGD of the whole model, but each rank of a pipeline has one of its stages' parameters.\n"
        "  Pass what makes it: optimizer=torch.optim.AdamW, or a function from a list of parameters "
        "to an optimizer.": lambda: plans_stages(optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])),
        "layer is called 2 times in one forward, and a pipeline cannot be cut between calls of one module: its "
        "parameters would lie on several stages.\n"
        "  Plan the model without stages=, or give each stage a "
        "module of its own.": lambda: plans_stages(model=Twice(), loss=torch.sum),
        "make_plan was given stages and sizes; the microbatches of a pipeline are of one size.\n"
        "  Pass as args one microbatch of the largest size.": lambda: plans_stages(sizes=[(vector(),)]),
        "make_plan was given stages and offload; plans for the stages of a pipeline keep everything on the device.\n"
        "  Leave offload out, or let regions of a stage that you choose keep their inputs there: "
        'Choice(..., store="host").': lambda: plans_stages(offload=True),
        "hold_output=, accumulate= and set_to_none= describe a loop over one model, and a pipeline's schedule says "
        "itself what a rank holds.\n"
        "  Leave them out with stages=; microbatches are those of the schedule.": lambda: plans_stages(accumulate=2),
        # between ranks
        "bucket_bytes=0, where a number of bytes is expected, 1 or more.\n"
        "  Leave it out for 128 MiB, or write "
        "bucket_bytes=32 * 2**20.": lambda: fused_allreduce_gradients([], bucket_bytes=0),
        "fused_allreduce_gradients: there is no process group to take the mean over.\n"
        '  Call torch.distributed.init_process_group("nccl") first ("gloo" on CPU), in a process that torchrun has '
        "started; one process alone has "
        "nothing to reduce.": lambda: fused_allreduce_gradients([with_gradient(torch.ones(3))]),
        "fused_allreduce_gradients: rank 0 is not in the group that it was given.\n"
        "  Call it with the group that this rank has made of itself and those with other data; new_group and "
        "init_device_mesh are called by all ranks, and give each its own.": lambda: inside(
            two_ranks(), lambda: fused_allreduce_gradients([with_gradient(torch.ones(3))], dist.new_group([1]))
        ),
        "fused_allreduce_gradients takes an iterable of parameters, but got Scale: Scale().\n"
        "  Write:  fused_allreduce_gradients(model.parameters())": lambda: inside(
            two_ranks(), lambda: fused_allreduce_gradients(Scale())
        ),
        "fused_allreduce_gradients: parameter 0, a DTensor of shape (4, 3), is sharded over ranks 0, 1, and the group "
        "holds more than one of them: their shards are different parts of the parameter, and have no mean.\n"
        "  Pass the group of ranks that hold the same shard (for tensor parallel the data parallel one: "
        'mesh["dp"].get_group()). What fully_shard has sharded it reduces itself.': reduces_over_shards,
        "fused_allreduce_gradients: this rank was given 1 parameters, and some other rank different ones: another "
        "number, order, shape, dtype, or main_grad on one side alone.\n"
        "  Pass the same parameters in the same order on every rank, as model.parameters() gives them, also those that "
        "this rank has no gradient for.": reduces_other_parameters,
        "fused_allreduce_gradients: parameter 1 has a sparse gradient, which cannot share a bucket with others.\n"
        "  Make it dense (nn.Embedding(..., sparse=False)), or reduce it alone and leave it out here: "
        "torch.distributed.all_reduce(p.grad)": lambda: inside(
            two_ranks(),
            lambda: fused_allreduce_gradients([with_gradient(torch.ones(3)), with_gradient(torch.ones(3).to_sparse())]),
        ),
        "find_reentrant walks the autograd graph of a model's output or loss, but found no graph on Tensor of shape "
        "(3,).\n"
        "  Pass the tensor that backward is called on, before or after backward: "
        "find_reentrant(loss, model)": lambda: find_reentrant(torch.ones(3)),
        "the ranks of this group do not hold the same plan. One is held by ranks 0, 1.\n"
        "  rank 2 holds another. First difference:\n"
        "    -recompute b\n"
        "  rank 3 holds another. First difference:\n"
        "    -recompute a\n"
        "    +recompute a, decisions carried\n"
        "  Ranks that hold the same layers must recompute the same ones. Look for a configuration file, a command "
        "line or a checkpoint that is not the same everywhere; a plan made by measuring is made on one rank and "
        "sent to the others as plan.to_json(). The stages of a pipeline hold different layers: pass the data or "
        "tensor parallel group,  agree_on(plan, group).": lambda: compare(
            {0: TWO, 1: TWO, 2: Plan(TWO.choices[:1]), 3: Plan((Choice(("a",), carry=True), TWO.choices[1]))}
        ),
        "rank 1 passed no Plan to agree_on, but an object of type NoneType.\n"
        "  Write:  agree_on(RecomputeConfig(...).plan(model), group)   (a rank without "
        "regions passes Plan())": lambda: compare({0: TWO, 1: "NoneType"}),
        "agree_on compares plans over the ranks of a group, but there is no process group here, or this rank is not a "
        "member of the one that was passed.\n"
        "  Call torch.distributed.init_process_group first, and pass a group that this rank belongs to; a program of "
        "one process needs no agreement.": lambda: agree_on(TWO),
        # the doctor
        "run=True, but a part of Linear or of its batch lies on the meta device, where nothing can be run.\n"
        "  Leave run out: then a step is simulated, and the report says what "
        "was not looked for.": lambda: doctor.examine(nn.Linear(2, 2, device="meta"), (vector(),), run=True),
        "doctor.watch has seen no step of Linear yet: it was not called with gradients since.\n"
        "  Ask for the report after a step: loss(model(batch)).backward(); watching.report(). Watch the model that the "
        "training calls, with its wrappers; a compiled one as torch.compile(model) returns it, for model.compile() "
        "calls no hook.": lambda: inside(watching := doctor.watch(nn.Linear(2, 2)), watching.report),
        "closely=0 is not a number of steps.\n"
        "  Write a whole number of at least 1, or leave it out: three "
        "steps are enough.": lambda: doctor.watch(nn.Linear(2, 2), closely=0),
        "doctor.watch(model) needs a torch.nn.Module, whose steps it can see by hooks, but got Opaque: Opaque()\n"
        "  Pass the model that the training calls, with its wrappers.": lambda: doctor.watch(Opaque()),
    },
    RecomputeError: {
        # torch.utils.checkpoint's options
        "the context Silencer provided by context_fn suppressed an exception raised during the checkpointed call, so "
        "there is no result to return.\n"
        "  Its __exit__ must return False or None.": lambda: checkpoint(
            lambda x: x.view(7), vector(), context_fn=lambda: (Silencer(), contextlib.nullcontext())
        ),
        # a discarded output
        "discard_output_and_register_recompute() was called, but there is no output to discard: checkpoint() has not "
        "been called since the last discard.\n"
        "  Call them in turns:  h = odc.checkpoint(norm, x);  y = consumer(h);  "
        "odc.discard_output_and_register_recompute(y)": (
            lambda: OutputDiscardCheckpoint().discard_output_and_register_recompute(vector()),
            lambda: discards(lambda h: h.cos(), lambda h: h.cos()),
        ),
        # a replay that does something else
        "This measurement is over, so nothing more is counted. Start another: with "
        "measure(...) as m: ...": measures_after_its_end,
        "This measurement was entered before; one measurement is one block. Start another: with "
        "measure(...) as m: ...": measures_twice,
        # simulated steps
        "simulate: aten._to_sparse.default in the model cannot be run on tensors without values: it depends on them, "
        "is of a layout without strides (sparse), or is an operation of a library that says nothing of its shapes "
        "(NotImplementedError).\n"
        "  Use RecomputeConfig, which simulates nothing, or measure() a real step; for an operation of your own, write "
        "torch.library.register_fake.": lambda: simulates(lambda out: torch.sparse.mm(torch.eye(2).to_sparse(), out)),
        "simulate: the model asks for the address of a tensor of shape (2, 4), and simulated tensors have no memory.\n"
        "  Make the call that needs it an operation of its own, by torch.library.custom_op "
        "and register_fake.": lambda: simulates(torch.Tensor.data_ptr),
        "simulate: the model reads the values of a tensor of shape (33554432,) (aten.nonzero.default), and simulated "
        "tensors have none.\n"
        "  Simulate a smaller batch, or pass arguments of integers and masks as real "
        "tensors, not on meta.": lambda: simulate(Reads(), (torch.empty(2**25, device="meta"),), device="cpu"),
        "simulate: the copy of Reaches used parameters of the original, through a closure or a bound method that "
        "copy.deepcopy does not follow, so its figures mean nothing. The gradients of the original have been put back."
        "\n  Let the modules reach their parameters through attributes, so that "
        "copy.deepcopy(model) is independent.": lambda: simulate(Reaches(), (vector(),), loss=torch.sum),
    },
    ChangedError: {
        # a discarded output
        "the output of sin has been changed in place since (version 0 then, 1 now), so what would be rebuilt is not "
        "what its consumers saved.\n"
        "  Change a copy (h = h * 2, not h.mul_(2)), or do it inside the function "
        "that is recomputed.": lambda: discards(lambda h: h.mul_(2).cos()),
        # what is changed between forward and backward
        f"argument 1 of layer 3 has been changed in place since the forward (version 0 then, 1 now), so the region "
        f"cannot be run again: {CAUSE}.\n"
        "  Change a copy instead (x = x + y, not x += y), or pass the region a copy: region(x.clone()).": lambda: (
            changes(mask := torch.ones(3), region(lambda x, mask: (x * mask).sin().exp()), vector(), mask)
        ),
        f"argument 'mask' of layer 3 has been changed in place since the forward (version 0 then, 1 now), so the "
        f"region cannot be run again: {CAUSE}.\n"
        "  Change a copy instead (x = x + y, not x += y), or pass the region a copy: region(x.clone()).": lambda: (
            changes(mask := torch.ones(3), region(lambda x, *, mask: (x * mask).sin().exp()), vector(), mask=mask)
        ),
        f"an element of argument 'masks' of layer 3 has been changed in place since the forward (version 0 then, 2 "
        f"now), so the region cannot be run again: {CAUSE}.\n"
        "  Change a copy instead (x = x + y, not x += y), or pass the region a copy: region(x.clone()).": lambda: (
            changes(
                mask := torch.ones(3),
                region(lambda x, masks: (x * masks["a"]).sin().exp()),
                vector(),
                masks={"a": mask},
                times=2,
            )
        ),
        "parameter 'weight' of Scale, which Scale reads, has been changed in place since the forward (version 0 then, "
        "1 now): its replay would compute with other values than its forward.\n"
        "  Change it after backward (optimizer.step() after loss.backward()). If the region itself changes it, say so: "
        "recompute(fn, state=[torch_recompute.state.TensorState(tensor)]).": lambda: changes(
            (scale := Scale()).weight, recompute(scale), vector()
        ),
        "buffer 'offset' of Scale, which layer 3 reads, has been changed in place since the forward (version 0 then, 1 "
        "now): its replay would compute with other values than its forward.\n"
        "  Change it after backward (optimizer.step() after loss.backward()). If the region itself changes it, say so: "
        "recompute(fn, state=[torch_recompute.state.TensorState(tensor)]).": lambda: changes(
            (scale := Scale().eval()).offset, region(scale), vector()
        ),
        "closure variable 'weight', which layer 3 reads, has been changed in place since the forward (version 0 then, "
        "1 now): its replay would compute with other values than its forward.\n"
        "  Change it after backward (optimizer.step() after loss.backward()). If the region itself changes it, say so: "
        "recompute(fn, state=[torch_recompute.state.TensorState(tensor)]).": lambda: changes(
            weight := torch.ones(3, requires_grad=True), region(lambda x: (x * weight).sin().exp()), vector()
        ),
        f"{CAUSE}: a tensor saved in a region is at version 1; expected version 0 instead.\n"
        "  Use the out-of-place form of the operation "
        "that changes it.": lambda: changes(mask := torch.ones(3), region(lambda x: x * mask), vector()),
        f"{CAUSE}: a tensor saved in layer 3 is at version 1; expected version 0 instead.\n"
        "  Use the out-of-place form of the operation that changes it.": changes_a_tensor_that_it_saved,
        "the output of the saved call product in layer 3 has been changed in place (version 0 when it was returned, 1 "
        "now), and the replay needs it as it was returned.\n"
        "  Use the out-of-place form (y = y + r, not y += r), or move the change "
        "into the saved call.": changes_the_output_of_a_saved_call,
        "a tensor that layer 3 saved for its replay has been changed in place since (version 0 then, 1 now).\n"
        "  Save a copy: save_for_recompute(tensor.clone()), or return one from the function "
        "given to replay.": changes_a_value_that_it_saved,
        # configurations
        "a tensor that OnHost was given has been changed in place while it was being copied to the host (version 0 "
        "then, 1 now), so neither its old nor its new values are known to be there.\n"
        "  With ahead=1 it may be changed once two more regions have been called. Write x = x + y instead of x += y, "
        "or give the region a copy: region(x.clone()).": lambda: inside(
            patch.object(host, "depot_of", return_value=Depot(Slow())),
            lambda: changes(x := vector() * 2, region(lambda x: x.sin().exp(), inputs=OnHost()), x),
        ),
        "a tensor that OnHost left on the device has been changed in place since (version 0 then, 1 now). It was left "
        "there because of smallest=, at_most= or fraction=.\n"
        "  Write x = x + y instead of x += y, or give the region a copy: region(x.clone()).": lambda: changes(
            x := vector() * 2, region(lambda x: x.sin().exp(), inputs=OnHost(smallest=1000)), x
        ),
    },
    MismatchError: {
        # a discarded output
        "the replay of <turns> returned other tensors than its forward, and its output was discarded:\n"
        "      forward: float32[3] on cpu\n"
        f"      replay:  float32[6] on cpu{WHY}": returns_something_else,
        # a replay that does something else
        f"the replay of layer 3 saved fewer tensors than its forward: 2 now, 3 then. {FEWER} It is needed by "
        f"ExpBackward0 (result).{WHY}": lambda: step(Turns(lambda x: x.sin().exp().exp(), lambda x: x.sin().exp())),
        f"the replay of layer 3 saved more tensors than its forward: 2 then, and now at least one more. "
        f"{MORE}{WHY}": lambda: step(Turns(lambda x: x.sin().exp(), lambda x: x.sin().exp().exp()), early_stop=False),
        "the replay of layer 3 saved another tensor than its forward at position 1:\n"
        "      forward: float32[3] on cpu\n"
        "      replay:  float32[1] on cpu\n"
        "  (Recomputed values for the following tensors have different metadata than during the forward pass.) It is "
        f"needed by MulBackward0 (other).{WHY}": lambda: step(
            Turns(lambda x: (x.sin() * torch.ones(3)).exp(), lambda x: (x.sin() * torch.ones(1)).exp())
        ),
        "the replay of layer 3 saved another tensor than its forward at position 1:\n"
        "      forward: float32[3] on cpu\n"
        "      replay:  float64[3] on cpu\n"
        "  (Recomputed values for the following tensors have different metadata than during the forward pass.) It is "
        f"needed by SinBackward0 "
        f"(self).{WHY}": lambda: step(Turns(lambda x: x.exp().sin().exp(), lambda x: x.exp().double().sin().exp())),
        "the replay of layer 3 saved a tensor with other values than its forward at position 1; those before it are "
        "the same to the last bit. It is needed by PowBackward0 (self).\n"
        "      forward: bits 3f67f7bd-9f32fde3\n"
        f"      replay:  bits 52d16459-d0bbe84f{REASONS}": lambda: step(
            Turns(lambda x: (x * 2).square().square(), lambda x: (x * 2).square().add(1).square()), check="values"
        ),
        f"the replay of layer 3 reached attention(...) where its forward made no more saved calls "
        f"or choices.{WHY}": lambda: step(Turns(lambda x: x.exp().exp(), lambda x: attention(x).exp().exp())),
        f"the replay of layer 3 reached replay(argmax)(...) where its forward reached attention(...).{WHY}": lambda: (
            step(Turns(lambda x: attention(x).exp().exp(), lambda x: x[replay(torch.argmax)(x)].exp()))
        ),
        f"the replay of layer 3 did not reach the saved call attention, which its forward made.{WHY}": lambda: step(
            Turns(lambda x: attention(x.exp()), lambda x: x.exp())
        ),
        "aten.sum.default needs the values of what product returned in a replay, where it is marked values_unused "
        "and has none; and no replay can make them, because the tensor was taken out of the one that it belongs to "
        "(into an attribute, a list, another region).\n"
        "  Keep its output: no_recompute(fn) without values_unused=True; in a plan, @product in the place of "
        "@values_unused.": reads_an_unread_output_after_its_replay,
        "the replay of layer 3 reached the saved call attention with another tensor than its forward as input 0:\n"
        "      forward: float32[3] on cpu\n"
        f"      replay:  float32[2] on cpu{WHY}": lambda: step(
            Turns(lambda x: attention(x.exp()).sum().exp(), lambda x: attention(x.exp()[:2]).sum().exp())
        ),
        # configurations
        "the replay of layer 3 draws random numbers, but is not captured in the CUDA graph in which its forward was. "
        "Each graph is launched from the generator's offset at that moment, so the replay would draw other numbers "
        "than the forward, and the gradients would be wrong.\n"
        "  Capture forward and backward in one graph (torch.cuda.graph around the whole step); or keep what is drawn: "
        "no_recompute(F.dropout) is not repeated; or leave the region out "
        "of make_graphed_callables.": draws_in_another_graph,
    },
    StoreError: {
        # ranks
        "ShardedOver keeps one part of a tensor per rank, so all ranks of its group must hold the same tensor, but "
        "they do not: all have float32[2, 3] on cpu, with other values. Put together again, it would be none of "
        "theirs.\n"
        "  With sequence parallelism each rank has its own part of the input already, and nothing is to be shared: "
        "leave the store out.\n"
        "  Else the group is another one than that of the tensor parallel ranks, or something in the model (dropout, a "
        "kernel that is not deterministic to the bit) differs between ranks "
        "where it should not.": lambda: among(2, 0, lambda: ShardedOver().put(torch.ones(2, 3))),
        "ShardedOver gathered parts of different tensors: a graph that one rank still has was freed on another, so the "
        "ranks disagree about which tensor comes next.\n"
        "  Free the graphs of forwards that get no backward at the same moment on all ranks (leave no reference cycle "
        "around an output; call gc.collect() on every rank), or gather nothing ahead: "
        "ShardedOver(group, ahead=False).": lambda: among(2, 0, opened_out_of_step),
        "ShardedOver was given a DTensor that is Shard(dim=0) over dimension 0 of its mesh, which is the store's "
        "group: each rank has its own part of it already (sequence parallelism), so there is nothing to share.\n"
        "  Leave the store out.": lambda: among(2, 0, lambda: ShardedOver().put(split_over_all())),
        "ShardedOver cannot cut Tensor of shape (2, 2) in parts: its layout is torch.sparse_coo.\n"
        "  Leave the store out for this region, or make the tensor "
        "inside of the region.": lambda: among(2, 0, lambda: ShardedOver().put(torch.eye(2).to_sparse())),
        "ShardedOver cannot be pickled: it belongs to the process group of this run.\n"
        "  Save model.state_dict(), or take the plan out "
        "first: handle.remove().": lambda: among(2, 0, lambda: pickle.dumps(ShardedOver())),
        # what is changed between forward and backward
        "the store ShortStore of layer 3 was given a tensor (3,) torch.float32 on cpu and returned Tensor (1,) "
        "torch.float32 on cpu.\n"
        "  get(put(tensor)) must return a tensor of the same shape, dtype, "
        "device and values.": lambda: step(lambda x: x.sin().exp(), inputs=ShortStore()),
        "the store EmptyStore of product was given a tensor (3,) torch.float32 on cpu and returned NoneType.\n"
        "  get(put(tensor)) must return a tensor of the same shape, dtype, device and values.": lambda: step(
            lambda x: no_recompute(torch.sin, name="product", store=EmptyStore())(x.exp()).exp().exp()
        ),
        # configurations
        "OnHost was given a tensor while a CUDA graph is captured. What is copied in one graph could not be waited for "
        "in another, and pinned memory would be the same at every launch.\n"
        "  Keep the tensors of captured regions on the device: leave out inputs=OnHost() and store=OnHost() there, or "
        "capture only parts of the model that "
        "hold no such region.": lambda: inside(captured(), lambda: step(torch.sin, inputs=OnHost())),
    },
    SaveError: {
        # configurations
        "layer 3 carries 3 from its forward to its replay while a CUDA graph is captured. Every launch of the graph "
        "would use this one: what is decided on the host is decided once, when the graph is captured.\n"
        "  Carry a tensor on the device (a mask, indices) instead, or decide before the capture and pass the decision "
        "as an argument of the "
        "region.": lambda: inside(captured(), lambda: step(lambda x: (save_for_recompute(3), x.sin())[1])),
        "replay(size) failed while a CUDA graph is captured: operation not permitted when stream is capturing\n"
        "  Nothing can be read from the device then (.item(), .tolist(), a branch on a tensor), because nothing runs. "
        "Let it return a tensor on the device (a mask, indices), or decide before the capture.": reads_in_a_graph,
        # values
        "save_for_recompute in layer 3: tensor 1 ((3,), torch.float32, grad_fn=ExpBackward0) requires grad. A saved "
        "value is a constant in the replay, so its gradient would be lost.\n"
        "  Save what was decided (indices, counts, masks), not what is differentiated; keep a differentiable result "
        "with no_recompute(fn).": lambda: step(saves_what_requires_grad),
        "replay(fn) in layer 3 returned a tensor that requires grad: tensor 1 ((3,), torch.float32, "
        "grad_fn=SoftmaxBackward0). Its result is a constant in the replay, so its gradient would be lost.\n"
        "  Return indices, masks or sizes only: replay(lambda s: s.topk(2).indices); keep a differentiable result with "
        "no_recompute(fn).": lambda: step(lambda x: x * replay(lambda s: (s.argmax(), s.softmax(0)))(x)[1]),
        "save_for_recompute was called twice without a key in one call of saves_twice; the second would overwrite the "
        "first.\n"
        '  Give each its own key:  save_for_recompute(indices, key="router")  ...  get_recompute_data(key="router")\n'
        "  or wrap the choice in one word:  indices = replay(choose)(scores)": lambda: recompute(saves_twice)(vector()),
        "save_for_recompute was called twice under key='router' in one call of layer 3; the second would overwrite the "
        "first.\n"
        '  Give each its own key:  save_for_recompute(indices, key="router")  ...  get_recompute_data(key="router")\n'
        "  or wrap the choice in one word:  indices "
        "= replay(choose)(scores)": lambda: region(saves_twice)(vector(), key="router"),
        "get_recompute_data(key='rooter'): the forward of layer 3 saved nothing under this key; it saved None, "
        "'router'.\n"
        "  Call save_for_recompute(..., key=...) in the forward of "
        "the same region.": lambda: step(lambda x: reads_a_key(x, "rooter", None, "router")),
        "get_recompute_data(key='router'): the forward of layer 3 saved nothing under this key; it saved nothing.\n"
        "  Call save_for_recompute(..., key=...) in the forward of "
        "the same region.": lambda: step(lambda x: reads_a_key(x, "router")),
    },
    NotRecomputingError: {
        # values
        "get_recompute_data() was called while nothing is being recomputed: there is no data to hand out.\n"
        "  Ask first:  if doing_recompute(): (indices,) = get_recompute_data()\n"
        "              else: indices = choose(scores); save_for_recompute(indices)\n"
        "  or say it in one word:  indices = replay(choose)(scores)": get_recompute_data
    },
    BudgetError: {
        # torch-recompute plan
        "gpt2-xl is too large to run here: weights, two sets of gradients and a step without a plan need at least 3.00 "
        "GiB, and cpu has 2.00 GiB free. Write a smaller --batch or --sequence, or a config.json with fewer layers: "
        "layers that are alike need to be verified once.": lambda: inside(
            patch.object(verify_command, "free_bytes", return_value=2 * GIB),
            lambda: verify_command._check_size(
                "gpt2-xl", nn.Linear(2**14, 2**14, bias=False, device="meta"), {}, "cpu"
            ),
        ),
        # budgets of memory
        "budget=8.00 GiB is too small: no choice of what to recompute needs less than 9.01 GiB (9663676417 bytes).\n"
        "  With that choice the peak is in the loss, where 5.00 GiB are not for a plan to change: parameters, "
        "gradients, optimizer state and what lies between the planned modules.\n"
        '  Pass budget="9.01GiB" or more, or a smaller batch. The choice that needs the least is .solution of this '
        "error, and its bytes are .smallest.": lambda: choose(COSTS, 8 * GIB),
        "budget=8 bytes is too small: no choice of what to recompute needs less than 9 bytes.\n"
        "  With that choice the peak is in the backward of net, where 2 bytes are not for a plan to change: "
        "parameters, gradients, optimizer state and what lies between the planned modules.\n"
        '  Pass budget="9bytes" or more, or a smaller batch. The choice that needs the least is .solution of this '
        "error, and its bytes are "
        ".smallest.": lambda: choose(Costs({"a": Kind((Option((), 5, 5, 7, 0.0),))}, (Segment("net", "a", 1, 2),)), 8),
        # steps over ranks
        "budget=100 bytes is too small for rank 1 of the pipeline, which needs the most: with the plan that needs the "
        "least its peak is 5.00 GiB (5368709120 bytes), without recomputation 6.00 GiB; 3.00 GiB of either are "
        "weights, "
        "gradients and optimizer state.\n"
        "  Write --budget 5.00GiB or more, or spread the step "
        "over more ranks.": lambda: LayoutPlanner.plans(OverFull(), 100),
        "budget=100 bytes is too small for a step of this model: with the plan that needs the least its peak is "
        "13.98 KiB (14312 bytes), without recomputation 17.41 KiB.\n"
        "  Write --budget 13.98KiB or more, or a smaller batch. plan.json has not been written; with --budget 14312 it "
        "is that plan.\n"
        "  72% of the peak are 5 tensors of the loss as wide as the logits (8), 10,240 bytes, which no recomputation "
        "of layers frees. Compute the head and the loss for some tokens at a time: recompute(head_and_loss, tiles=8)"
        "(hidden, labels), where head_and_loss returns a loss per token.": too_little_on_a_command_line,
        # planning
        "budget=100 bytes is too small for a step of this model: with the plan that needs the least its peak is "
        "13.98 KiB (14312 bytes), without recomputation 17.41 KiB.\n"
        '  Pass budget="13.98KiB" or more, or a smaller batch. That plan is .solution of this error, and its bytes are '
        ".smallest.\n"
        "  72% of the peak are 5 tensors of the loss as wide as the logits (8), 10,240 bytes, which no recomputation "
        "of layers frees. Compute the head and the loss for some tokens at a time: recompute(head_and_loss, tiles=8)"
        "(hidden, labels), where head_and_loss returns a loss per token.": plans_for_too_little,
        "sizes: for calls of 64 x 8, budget=100 bytes is too small for a step of this model: with the plan that needs "
        "the least its peak is "
        "13.98 KiB (14312 bytes), without recomputation 17.41 KiB.\n"
        '  Pass budget="13.98KiB" or more, or a smaller batch. That plan is .solution of this error, and its bytes are '
        ".smallest.\n"
        "  72% of the peak are 5 tensors of the loss as wide as the logits (8), 10,240 bytes, which no recomputation "
        "of layers frees. Compute the head and the loss for some tokens at a time: recompute(head_and_loss, tiles=8)"
        "(hidden, labels), where head_and_loss returns "
        "a loss per token.": lambda: plans_for_too_little(sizes=[(torch.ones(64, 8),)]),
        # pipelines
        "rank 0 of the pipeline: budget=100 bytes is too small for a step of this model: with the plan that needs the "
        "least its peak is 1008 bytes (1008 bytes), without recomputation 1008 bytes.\n"
        '  Pass budget="1008bytes" or more, or a smaller batch. That plan is .solution of this error, and its bytes '
        "are .smallest.": lambda: plans_stages(budget=100),
    },
}


ROWS = [
    (kind, text, misuse)
    for kind, texts in CASES.items()
    for text, misuses in texts.items()
    for misuse in (misuses if isinstance(misuses, tuple) else (misuses,))
]


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
                    found[made_by.removeprefix("errors.")] = []
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


@pytest.mark.parametrize(("kind", "text", "misuse"), ROWS, ids=[re.sub(r"\W+", "-", row[1][:60]) for row in ROWS])
def test_misuse_is_answered_word_for_word(kind: type[Exception], text: str, misuse: Callable[[], object]) -> None:
    """A misuse raises the class and the whole text of its row; the next region gives the plain gradient."""
    with pytest.raises(RecomputeError) as caught:
        misuse()
    assert str(caught.value) == text
    assert type(caught.value) is kind
    assert not doing_recompute()
    plain, ours = vector(), vector()
    plain.sin().exp().sum().backward()
    recompute(lambda x: x.sin().exp())(ours).sum().backward()
    assert torch.equal(plain.grad, ours.grad)


def test_every_text_has_a_row() -> None:
    """Each text that the package raises is reached by a misuse in the table."""
    reached: set[tuple[str, int]] = set()
    called: set[str] = set()
    for _, _, misuse in ROWS:
        with pytest.raises(RecomputeError) as caught, calls(called):
            misuse()
        reached |= lines_of(caught.value)
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
