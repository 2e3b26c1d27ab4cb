"""Region inputs in parts on the ranks of a group: the same gradients, an N-th of the bytes, gathered ahead."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from distributed.ranks import Ranks
from torch_recompute import Choice, Plan, RecomputeConfig, RecomputeError, StoreError, apply, measure, recompute
from torch_recompute.distributed import ShardedOver, agree_on, fused_allreduce_gradients
from torch_recompute.distributed import sharded as module

RANKS = 3
SIZE = 333  # no multiple of the number of ranks

MAKERS: dict[str, Any] = {
    "float32": lambda: torch.randn(SIZE, 7),
    "bfloat16": lambda: torch.randn(SIZE, 7).bfloat16(),
    "complex": lambda: torch.randn(SIZE, 7, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(SIZE, 7, dtype=torch.complex64).conj(),
    "bool": lambda: torch.rand(SIZE, 7) > 0.5,
    "int64": lambda: torch.randint(100, (SIZE, 7)),
    "float8": lambda: torch.randn(SIZE, 7).to(torch.float8_e4m3fn),
    "transposed": lambda: torch.randn(7, SIZE).t(),
    "channels last": lambda: torch.randn(3, 5, 7, 11).to(memory_format=torch.channels_last),
    "part of a tensor": lambda: torch.randn(SIZE, 9)[:, 2:],
    "expanded": lambda: torch.randn(SIZE, 1, 7).expand(SIZE, 4, 7),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(0, 4),
    "small": lambda: torch.randn(5),
}


def back_and_forth(name: str) -> Any:
    tensor = MAKERS[name]()
    before = tensor.clone()
    store = ShardedOver()
    handle = store.put(tensor)
    found = [store.get(handle) for _ in range(2)]
    unpacked = [t.to(torch.float32) if t.dtype is torch.float8_e4m3fn else t for t in (tensor, before, *found)]
    same = all(torch.equal(unpacked[0], other) for other in unpacked[1:])
    meta = all((t.shape, t.dtype, t.device) == (tensor.shape, tensor.dtype, tensor.device) for t in found)
    dense = name in ("part of a tensor", "expanded") or all(t.stride() == tensor.stride() for t in found)
    own = handle.part.untyped_storage().nbytes()
    return same, meta, dense, own, tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_put_comes_back(ranks, name: str) -> None:
    """Values, shape, dtype and dense strides come back, twice; the caller's tensor is as it was; each keeps a third."""
    for same, meta, dense, own, whole in ranks.run(back_and_forth, name):
        assert (same, meta, dense) == (True, True, True)
        if name not in ("scalar", "empty", "small", "part of a tensor"):
            assert own == -(-whole // 3)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 64), nn.Linear(64, SIZE)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, scale: dict[str, torch.Tensor]) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)) * mask) * scale["scale"]


def _model() -> tuple[nn.ModuleList, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    layers = nn.ModuleList(Layer() for _ in range(4))
    return layers, torch.randn(16, SIZE), torch.rand(16, 64) > 0.3, torch.randn(16, SIZE)


def _train(layers: nn.ModuleList, x: Any, mask: Any, scale: Any, regions: Any) -> list[torch.Tensor]:
    h = x.clone().requires_grad_()
    y = h
    for layer in layers:
        y = regions(layer)(y, mask, scale={"scale": scale})
    y.square().mean().backward()
    grads = [h.grad, *(p.grad for p in layers.parameters())]
    layers.zero_grad()
    return [g.clone() for g in grads if g is not None]


def gradients() -> Any:
    layers, *inputs = _model()
    plain = _train(layers, *inputs, lambda layer: layer)
    answers = []
    for ahead in (True, False):
        store = ShardedOver(compared=None, ahead=ahead)
        got = _train(layers, *inputs, lambda layer, store=store: recompute(layer, inputs=store))
        answers.append(len(got) == len(plain) and all(map(torch.equal, got, plain)))
    return answers


def test_gradients_are_those_of_the_plain_model(ranks) -> None:
    """Several tensors per region, positional, nested and by keyword: gradients bit for bit, ahead or not."""
    assert ranks.run(gradients) == [[True, True]] * 3


def kept_bytes() -> Any:
    layers, x, mask, scale = _model()
    kept = []
    for store in (None, ShardedOver()):
        with measure() as m:
            graphs = []
            for layer in layers:
                region = recompute(layer, inputs=store)
                graphs.append(region(x.clone(), mask.clone(), scale={"scale": scale.clone()}).sum().grad_fn)
            kept.append(m.live_bytes)
            del graphs
    inputs = sum(t.nbytes for t in (x, mask, scale))
    parts = sum(-(-t.nbytes // 3) + 24 if t.nbytes > 3 * 512 else t.nbytes for t in (x, mask, scale))
    return kept[0] - kept[1], 4 * (inputs - parts)


def test_an_nth_of_the_bytes(ranks) -> None:
    """What regions keep of their inputs is a third of them, rounded up, and a fingerprint; the smallest are whole."""
    for freed, expected in ranks.run(kept_bytes):
        assert freed == expected > 0


def order_of_gathers(tensors: int) -> Any:
    log: list[str] = []
    gather = module._all_gather

    def noting(out: Any, part: Any, **kwargs: Any) -> Any:
        if part.dtype == torch.uint8:  # not what is said of the part
            log.append("gather")
        return gather(out, part, **kwargs)

    module._all_gather = noting
    try:
        store = ShardedOver(compared=0)
        layers = [nn.Linear(64, 64) for _ in range(4)]

        def body(n: int, *xs: torch.Tensor) -> torch.Tensor:
            log.append(f"run {n}")
            return layers[n](torch.stack(xs).sum(0)).tanh()

        x = torch.randn(64, 64)
        for n in range(4):
            x = recompute(lambda *xs, n=n: body(n, *xs), inputs=store)(*[x + i for i in range(tensors)])
        log.clear()
        x.sum().backward()
        return log
    finally:
        module._all_gather = gather


@pytest.mark.parametrize("tensors", [1, 3])
def test_gathered_one_region_ahead(ranks, tensors: int) -> None:
    """When a region runs again, its inputs and those of the one before it have been asked for, and no others."""
    for log in ranks.run(order_of_gathers, tensors):
        seen = [(what, len(list(group))) for what, group in itertools.groupby(log)]
        one, two = ("gather", tensors), ("gather", 2 * tensors)
        assert seen == [two, ("run 3", 1), one, ("run 2", 1), one, ("run 1", 1), ("run 0", 1)]


def applied(paths: Any) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(SIZE, 64), nn.Dropout(), nn.Tanh(), nn.Linear(64, SIZE)) for _ in range(4)]
    )
    x = torch.randn(16, SIZE, requires_grad=True)

    def step() -> list[torch.Tensor]:
        torch.manual_seed(2)
        model(x).square().mean().backward()
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        return grads

    plain = step()
    if paths == "selective":
        parts = {"recompute_granularity": "selective", "recompute_modules": ["0", "2"]}
        plan = RecomputeConfig(**parts, distribute_saved_activations=True).plan(model, x)
    elif paths is None:
        config = RecomputeConfig(
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=2,
            distribute_saved_activations=True,
        )
        plan = config.plan(model)
    else:
        plan = Plan(tuple(Choice(p, store="sharded") for p in paths))
    handle = apply(model, plan, stores={"sharded": ShardedOver()})
    other = copy.deepcopy(model)
    same = all(map(torch.equal, step(), plain))
    model = other
    return same, all(map(torch.equal, step(), plain)), [c.store for c in plan], handle.plan == plan


@pytest.mark.parametrize("paths", [[("0",), ("2",)], [("0", "1"), ("2", "3")], None, "selective"])
def test_plans_use_it(ranks, paths: Any) -> None:
    """Regions and groups of a plan keep their inputs in the store; so do Megatron's field and a copy of the model."""
    for same, copied, stores, kept in ranks.run(applied, paths):
        assert (same, copied, kept) == (True, True, True)
        assert stores == ["sharded"] * 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(64), nn.LayerNorm(64), Attention()
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def selective(distribute: bool | None) -> Any:
    """Bytes that a forward keeps, and gradients, of a model in which parts of layers are recomputed, or none."""
    torch.manual_seed(1)
    model = nn.Sequential(*(Block() for _ in range(3)))
    x = torch.randn(2, 64, 64)
    parts = ["attention_output", "mlp"] if distribute is not None else []
    fields = {"recompute_granularity": "selective", "recompute_modules": parts}
    plan = RecomputeConfig(**fields, distribute_saved_activations=bool(distribute)).plan(model, x)
    assert {choice.store for choice in plan} <= {"sharded" if distribute else ""}
    apply(model, plan, stores={"sharded": ShardedOver()} if distribute else None)
    with measure() as memory:
        loss = model(x).square().mean()
        kept = memory.live_bytes
    loss.backward()
    return kept, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.nightly), RANKS])
def test_parts_of_layers_keep_parts_of_their_inputs(ranks, count: int) -> None:
    """With selective granularity each rank keeps its part of the input of each part; gradients are the plain ones."""
    group = Ranks(ranks._pool, count)
    for plain, whole, parts in zip(*(group.run(selective, one) for one in (None, False, True)), strict=True):
        assert plain[0] > whole[0]
        size = 2 * 64 * 64 * 4
        assert whole[0] - parts[0] == 6 * (size - -(-size // count) - 24)  # two parts of three layers
        assert all(map(torch.equal, plain[1], parts[1]))


def text_of(call: Any, *args: Any) -> str:
    with pytest.raises(RecomputeError) as caught:
        call(*args)
    return str(caught.value)


def different(how: str) -> Any:
    shape = (16, 8 + dist.get_rank()) if how == "shape" else (16, 8)
    x = torch.full(shape, 1.0 + (dist.get_rank() if how == "values" else 0))
    if how == "dtype" and dist.get_rank() == 1:
        x = x.double()
    return text_of(recompute(torch.sin, inputs=ShardedOver()), x.requires_grad_())


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("values", "all have float32[16, 8] on cpu, with other values"),
        (
            "shape",
            "rank 0 has float32[16, 8] on cpu; rank 1 has float32[16, 9] on cpu; rank 2 has float32[16, 10] on cpu",
        ),
        (
            "dtype",
            "rank 0 has float32[16, 8] on cpu; rank 1 has float64[16, 8] on cpu; rank 2 has float32[16, 8] on cpu",
        ),
    ],
)
def test_ranks_that_differ_are_told_on_every_rank(ranks, how: str, text: str) -> None:
    """Other values, shapes or dtypes on one rank are refused in the forward, on all of them, with the reason."""
    for said in ranks.run(different, how):
        assert text in said
        assert "With sequence parallelism each rank has its own part" in said


def later(how: str) -> Any:
    store = ShardedOver(compared=1)
    x = torch.randn(16, 64)
    x[0, 0] = float("nan")
    first = store.put(x)
    second = x.clone()
    if how == "one bit" and dist.get_rank() == 1:
        second.view(torch.int32)[3, 5] ^= 1
    handles = [first, store.put(second), store.put(x + 1)]
    said = []
    for handle in reversed(handles):
        with contextlib.suppress(StoreError):
            said.append(float(store.get(handle).nansum()))
            continue
        said.append(text_of(store.get, handle))
    return said


@pytest.mark.parametrize("how", ["equal", "one bit"])
def test_those_after_the_first_are_compared_when_they_are_gathered(ranks, how: str) -> None:
    """Past those that are compared in forward, one bit that differs on one rank raises on all ranks in backward."""
    for last, second, first in ranks.run(later, how):
        assert isinstance(first, float)
        assert isinstance(last, float)
        assert ("was not the same on all ranks" in str(second)) == (how == "one bit")


def dtensors() -> Any:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    store = ShardedOver(mesh.get_group("tp"))
    local = torch.randn(6, 400)
    whole = distribute_tensor(local, mesh, [Replicate()])
    back = store.get(store.put(whole))
    assert isinstance(back, DTensor)
    assert back.placements == whole.placements
    assert torch.equal(back.to_local(), local)
    split_over = [DTensor.from_local(local, mesh, [how], run_check=False) for how in (Shard(0), Partial())]
    said = [text_of(store.put, tensor) for tensor in split_over]
    split = init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "tp"))
    return [*said, text_of(ShardedOver, split.get_group("tp"))]


def test_dtensors(ranks) -> None:
    """One that is replicated over the group comes back as one; one that is split over it is refused with the reason."""
    for shard, partial, alone in ranks.run(dtensors):
        assert "is Shard(dim=0) over dimension 0 of its mesh, which is the store's group" in shard
        assert "is Partial(sum) over dimension 0" in partial
        assert "a group of one rank" in alone


def wrong() -> Any:
    store = ShardedOver(compared=0)
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    others = groups[dist.get_rank() < 2]
    said = [text_of(store.put, torch.eye(40).to_sparse()), text_of(pickle.dumps, store)]
    mesh = init_device_mesh("cpu", (RANKS,))
    meshes = [text_of(face, mesh) for face in (ShardedOver, functools.partial(fused_allreduce_gradients, []))]
    meshes += [text_of(agree_on, Plan(), mesh), text_of(functools.partial(ShardedOver, compared=-1))]
    return [*said, text_of(ShardedOver, others), meshes]


def test_misuse(ranks) -> None:
    """What cannot be cut, pickled, or is no group of this rank, as a mesh is none, is refused in words."""
    for sparse, pickled, group, meshes in ranks.run(wrong):
        faces = [text.partition(":")[0] for text in meshes]
        assert faces == ["ShardedOver", "fused_allreduce_gradients", "agree_on", "ShardedOver(compared=-1)"]
        assert "its layout is torch.sparse_coo" in sparse
        assert "cannot be pickled" in pickled
        assert "a process group that this process is not in" in group


def freed_on_one_rank() -> Any:
    store = ShardedOver(compared=0)
    handles = [store.put(torch.full((64, 64), float(i))) for i in range(3)]
    dropped = 1 if dist.get_rank() == 0 else 0
    handles[dropped] = None  # as the garbage collector may free a graph, on one rank before the others
    last = store.get(handles[2])
    return float(last.mean()), text_of(store.get, handles[1 - dropped])


def test_ranks_that_open_different_tensors_are_told(ranks) -> None:
    """Parts of different tensors are never put together without a word, on any rank."""
    for last, said in ranks.run(freed_on_one_rank):
        assert last == 2.0
        assert "gathered parts of different tensors" in said


def retained() -> Any:
    layers, *inputs = _model()
    store = ShardedOver()
    x, mask, scale = inputs
    y = recompute(layers[0], inputs=store)(x.requires_grad_(), mask, scale={"scale": scale})
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    second = torch.autograd.grad(y.sum(), x)[0]
    live = len(store._live)
    del y
    return torch.equal(first, second), live, len(store._live)


def test_kept_graphs_and_freed_ones(ranks) -> None:
    """A graph that is kept opens its inputs again; nothing is held once the graph is gone."""
    assert ranks.run(retained) == [(True, 0, 0)] * 3
