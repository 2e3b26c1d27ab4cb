"""Operations timed alone: which ones, on which inputs; none that can crash the process, and no generator advances."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_recompute import make_plan
from torch_recompute.planner.ops import Op, logging
from torch_recompute.planner.prices import Measured, made_up, runs_alone

pytestmark = pytest.mark.usefixtures("cold")
CPU = torch.device("cpu")
Call = Callable[[], Any]


def ops(call: Call, name: str) -> list[Op]:
    """The operations of a name that a call runs, forward and backward."""
    found: list[Op] = []
    with logging(lambda op, *_: found.append(op)):
        result = call()
        if result.requires_grad:
            result.sum().backward()
    return [op for op in found if op.func.overloadpacket.__name__ == name]


def one(call: Call) -> Op:
    """The one operation that a call runs."""
    found: list[Op] = []
    with logging(lambda op, *_: found.append(op)):
        call()
    assert len(found) == 1
    return found[0]


def grad(*shape: int) -> torch.Tensor:
    """A tensor that requires grad."""
    return torch.full(shape, 0.5, requires_grad=True)


QUERY = (1, 2, 8, 16)
UNSAFE: dict[str, tuple[str, Call]] = {
    "draws": ("bernoulli", lambda: torch.bernoulli(torch.full((4,), 0.5))),
    "draws in place": ("bernoulli_", lambda: torch.empty(4).bernoulli_(0.5)),
    "drops": ("native_dropout", lambda: torch.native_dropout(grad(4), 0.5, True)[0]),
    "chooses": ("multinomial", lambda: torch.multinomial(torch.ones(4), 2)),
    "asserts": ("binary_cross_entropy", lambda: F.binary_cross_entropy(grad(4), torch.ones(4))),
    "asserts backward": ("binary_cross_entropy_backward", lambda: F.binary_cross_entropy(grad(4), torch.ones(4))),
    "reads a workspace": ("mkldnn_rnn_layer_backward", lambda: nn.LSTM(4, 4)(grad(3, 2, 4))[0]),
    "reads lengths": ("_ctc_loss", lambda: ctc(grad(8, 2, 5))),
    "reads offsets": ("_embedding_bag", lambda: nn.EmbeddingBag(8, 4)(torch.tensor([1, 2]), torch.tensor([0]))),
    "expects a matrix of a kind": ("linalg_cholesky_ex", lambda: torch.linalg.cholesky(torch.eye(4))),
    "counts": ("nonzero", lambda: torch.ones(4).nonzero()),
    "counts a mask": ("index", lambda: torch.ones(4)[torch.ones(4) > 0]),
    "fills a mask": ("masked_scatter", lambda: torch.ones(4).masked_scatter(torch.ones(4) > 0, torch.ones(4))),
}


def ctc(x: torch.Tensor) -> torch.Tensor:
    """A loss of two sequences."""
    targets = torch.ones(2, 3, dtype=torch.long)
    return F.ctc_loss(x, targets, torch.tensor([8, 8]), torch.tensor([3, 3]))


@pytest.mark.parametrize("case", UNSAFE)
def test_what_expects_more_than_shapes_is_not_run(case: str) -> None:
    """An operation that reads, draws or asserts is priced by the roofline, and the plan says so."""
    name, call = UNSAFE[case]
    (op, *_) = ops(call, name)
    assert not runs_alone(op)
    price = Measured(CPU)
    price._times = lambda _: pytest.fail("it was run")  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    assert price(op) > 0
    assert price.timing == f"operations timed one by one on cpu (aten.{name} estimated)"


def test_a_custom_operation_is_not_run() -> None:
    """What a user's own kernel expects of its inputs is not known."""
    ran: list[int] = []

    @torch.library.custom_op("ordinary::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return 2 * x

    (op,) = ops(lambda: twice(torch.ones(4)), "twice")
    assert len(ran) == 1
    assert Measured(CPU)(op) > 0
    assert len(ran) == 1


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_is_run_where_it_drops_nothing(dropout: float) -> None:
    """With dropout the kernel on CUDA reads the seed through a pointer of the host."""
    back = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    shape = {"device": "meta", "dtype": torch.float32}
    like, scores, seed = torch.empty(QUERY, **shape), torch.empty(1, 2, 8, **shape), torch.empty((), device="meta")
    op = one(lambda: back(like, like, like, like, None, like, scores, seed, seed, dropout, [True] * 4))
    assert runs_alone(op) is (dropout == 0)
    q = torch.ones(QUERY)
    (op, *_) = ops(lambda: F.scaled_dot_product_attention(q, q, q), "_scaled_dot_product_flash_attention_for_cpu")
    assert runs_alone(op)


def test_what_lay_on_the_cpu_stays_there() -> None:
    """A scalar of the host in an operation of a device is made on the host again."""
    (op,) = ops(lambda: torch.empty(4, device="meta") * torch.tensor(2.0), "mul")
    args, _ = made_up(op, torch.device("meta"))
    assert [arg.device.type for arg in args] == ["meta", "cpu"]


INDEXING: dict[str, tuple[str, Call, int, int]] = {
    # the operation, the call, which argument indexes, how many places there are to index
    "embedding": ("embedding", lambda: F.embedding(torch.zeros(6, 4, dtype=torch.long), grad(8, 3)), 1, 8),
    "embedding backward": (
        "embedding_dense_backward",
        lambda: F.embedding(torch.zeros(6, 4, dtype=torch.long), grad(8, 3)),
        1,
        8,
    ),
    "gather": ("gather", lambda: grad(3, 16).gather(1, torch.zeros(3, 32, dtype=torch.long)), 2, 16),
    "index_add": (
        "index_add",
        lambda: torch.index_add(torch.ones(9, 2), 0, torch.zeros(18, dtype=torch.long), torch.ones(18, 2)),
        2,
        9,
    ),
    "loss": ("nll_loss_forward", lambda: F.nll_loss(grad(32, 10), torch.zeros(32, dtype=torch.long)), 1, 10),
    "index": ("index", lambda: grad(5, 2)[torch.zeros(10, dtype=torch.long)], 1, 5),
}


@pytest.mark.parametrize("case", INDEXING)
def test_indices_are_spread(case: str) -> None:
    """Indices are spread evenly over what they index, so nothing contends for one place."""
    name, call, place, count = INDEXING[case]
    (op,) = ops(call, name)
    args, kwargs = made_up(op, CPU)
    index = args[place][0] if isinstance(args[place], list) else args[place]
    assert set(index.flatten().tolist()) == set(range(count))
    op.func(*args, **kwargs)


def test_offsets_cut_into_equal_groups() -> None:
    """The groups of a product have equal parts of the rows, where zeros would leave all of them empty."""
    a, b = (torch.ones(*shape, dtype=torch.bfloat16) for shape in ((32, 16), (4, 16, 8)))
    offs = torch.tensor([32] * 4, dtype=torch.int32)
    (op,) = ops(lambda: torch.nn.functional.grouped_mm(a, b, offs=offs), "_grouped_mm")
    args, kwargs = made_up(op, CPU)
    assert kwargs.get("offs", args[-1]).tolist() == [8, 16, 24, 32]


def test_floats_are_probabilities() -> None:
    """Floats lie between 0.01 and 0.99, repeated and complex ones, too."""
    repeated = torch.ones(4, 1).expand(4, 3)
    (op,) = ops(lambda: repeated + torch.ones(4, 3, dtype=torch.complex64), "add")
    (one, other), _ = made_up(op, CPU)
    for x in (one, torch.view_as_real(other)):
        assert x.min() >= 0.01
        assert x.max() <= 0.99
    assert one.stride() == (1, 0)


class Drops(nn.Module):
    """Dropout, random choices and a loss of probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.one(x).relu(), 0.1)
        x = self.two(x[torch.randperm(len(x))])
        return F.binary_cross_entropy(x.sigmoid(), torch.bernoulli(torch.full_like(x, 0.5)))


def test_no_generator_moves() -> None:
    """The generator stands where it stood, after the first plan and after one with prices that are kept."""
    torch.manual_seed(0)
    model, x = Drops(), torch.ones(4, 8)
    before = torch.get_rng_state()
    for _ in range(2):
        plan = make_plan(model, (x,), budget=0.5, loss=lambda loss: loss)
        assert torch.equal(torch.get_rng_state(), before)
    assert plan.prediction is not None
    assert "aten.binary_cross_entropy" in plan.prediction.timing


@pytest.mark.nightly
def test_an_lstm_is_planned_in_a_live_process() -> None:
    """An LSTM on the CPU is planned; its backward alone on made-up inputs is a segmentation fault."""
    program = """
        import torch
        from torch import nn
        from torch_recompute import make_plan
        model = nn.Sequential(nn.Linear(16, 16), nn.LSTM(16, 16, batch_first=True))
        plan = make_plan(model, (torch.randn(2, 8, 16),), budget='1GB', loss=lambda out: out[0].mean())
        print(plan.prediction.timing)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "aten.mkldnn_rnn_layer_backward" in ran.stdout
