"""One rank of many: what it holds of a model, what it keeps, what its schedule has in flight, and the plan for it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from torch_recompute import Plan, apply, measure, simulate
from torch_recompute._ranks.flight import Instant, instants, seconds_at_least
from torch_recompute._ranks.layout import Layout
from torch_recompute._ranks.model import Rank, ranks
from torch_recompute._ranks.optimizer import Sharded
from torch_recompute._ranks.planning import PipelinePlanner, RankPlanner, step_seconds
from torch_recompute.errors import ArgumentError, BudgetError
from torch_recompute.plan.bound import bound
from torch_recompute.plan.cost import Costs, Graph, Kind, Node, Option, Segment
from torch_recompute.plan.inflight import FORWARD, Action, one_f_one_b
from torch_recompute.planning.ops import Meta, Op
from torch_recompute.planning.prices import DEVICES, sent_bytes
from torch_recompute.planning.schedules import orders_named
from zoo import mean_loss

transformers = pytest.importorskip("transformers")

TOKENS = 64
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": TOKENS,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {}),
    "mixtral": ("mixtral", "MixtralForCausalLM", EXPERTS),
    "qwen3-moe": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
    ),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3ForCausalLM", MLA),
}


def built(name: str = "llama", device: str = "meta", **more: Any) -> nn.Module:
    kind, cls, fields = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **fields, **more})
    torch.manual_seed(0)
    with torch.device(device):
        return getattr(transformers, cls)._from_config(config)


def cut(model: nn.Module, **layout: Any) -> list[Rank]:
    return ranks(model, "MODEL", Layout(**layout), TOKENS)


def kept(name: str, tp: int, *, sequence: bool = False) -> int:
    """What a layer adds to what a rank keeps: the third of three less the two before."""
    sums: list[int] = []
    for layers in (3, 4):
        (rank,) = cut(built(name, num_hidden_layers=layers), tp=tp, sequence_parallel=sequence)
        sums.append(simulate(rank.model, (), rank.batch, loss=mean_loss).saved_bytes)
    return sums[1] - sums[0]


@pytest.mark.parametrize("name", ["llama"])
def test_what_a_rank_of_a_real_model_keeps(name: str) -> None:
    """What slices keep is divided by the ranks and the rest is not; with sequence parallelism everything is."""
    one, two, four = (kept(name, tp) for tp in (1, 2, 4))
    assert one - two == 2 * (two - four) > 0
    assert [kept(name, tp, sequence=True) * tp for tp in (2, 4)] == [one, one]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence parallel"])
def test_the_ranks_of_a_group_make_up_the_model(name: str, sequence: bool) -> None:
    """Slices are a share of the whole weights, everything else is the same, and a rank's step can be simulated."""
    whole = built(name)
    (rank,) = cut(whole, tp=2, sequence_parallel=sequence)
    before = {name: parameter.numel() for name, parameter in whole.named_parameters()}
    shares = {name: before[name] / parameter.numel() for name, parameter in rank.model.named_parameters()}
    assert set(shares.values()) == {1.0, 2.0}
    assert {share for path, share in shares.items() if "norm" in path or "gate.weight" in path} == {1.0}
    assert {share for path, share in shares.items() if "o_proj" in path or "down_proj" in path} == {2.0}
    assert simulate(rank.model, (), rank.batch, loss=mean_loss).saved_bytes > 0


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2)])
def test_the_ranks_of_a_pipeline_make_up_the_model(pp: int, vpp: int) -> None:
    """Every parameter lies on one rank, under its own name; the first has the embedding, the last norm and head."""
    whole = built()
    found = cut(whole, pp=pp, vpp=vpp)
    names = [name for rank in found for name, _ in rank.model.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    first, last = (dict(found[place].model.named_parameters()) for place in (0, -1))
    assert "model.embed_tokens.weight" in first
    assert {"model.norm.weight", "lm_head.weight"} <= set(last)
    assert sorted(layer for rank in found for chunk in rank.chunks for layer in chunk) == [0, 1, 2, 3]


def test_layers_that_do_not_divide_evenly() -> None:
    """The ranks with the embedding and the head are the last to get one more."""
    assert Layout(pp=4).chunks(10) == [[[0, 1]], [[2, 3, 4]], [[5, 6, 7]], [[8, 9]]]
    assert Layout(pp=2, vpp=2).chunks(5) == [[[0], [3]], [[1, 2], [4]]]
    assert Layout(pp=4).chunks(11) == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]], [[9, 10]]]


def total(found: Sequence[Instant]) -> int:
    return max(sum(one.held) + 1 for one in found)


@pytest.mark.parametrize(("pp", "vpp"), [(4, 1), (8, 1), (4, 2), (4, 5)])
def test_what_is_in_flight(pp: int, vpp: int) -> None:
    """1F1B holds as many microbatches as ranks follow; interleaved, Megatron's warm-up and one: 2 (p-r-1) + (v-1) p."""
    microbatches = 4 * pp
    orders = orders_named("Interleaved1F1B", pp, microbatches, vpp) if vpp > 1 else one_f_one_b(pp, microbatches)
    counted = [total(instants(orders[rank], pp)) for rank in range(pp)]
    if vpp == 1:
        assert counted == [pp - rank for rank in range(pp)]
    else:
        assert counted == [2 * (pp - rank - 1) + (vpp - 1) * pp + 1 for rank in range(pp)]


@pytest.fixture(scope="module")
def planner() -> PipelinePlanner:
    layout = Layout(tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, batch=16)
    return PipelinePlanner(built(), "MODEL", layout, TOKENS, "adamw", "h100")


def test_plans_fit(planner: PipelinePlanner) -> None:
    """Every rank stays within its budget, its figures add up to its peak, and its plan names its own layers."""
    for rank in planner.plans("40%"):
        promise = rank.plan.prediction
        assert promise is not None
        assert promise.peak_bytes == rank.peak_bytes <= promise.budget_bytes < rank.plain_peak_bytes
        assert promise.plain_step_seconds < promise.bound_seconds < promise.step_seconds
        assert rank.optimizer_bytes == 3 * 4 * -(-rank.parameters // 2) - rank.parameters * 4 // 2
        layers = {f"model.layers.{layer}" for chunk in rank.layers for layer in chunk}
        assert all(any(f"{path}.".startswith(f"{layer}.") for layer in layers) for c in rank.plan for path in c.paths)
        assert Plan.from_json(rank.plan.to_json()) == rank.plan


@pytest.mark.parametrize("budget", [20, 40, 60, 90, 120])
def test_the_bound_counts_what_is_in_flight(budget: int) -> None:
    """Alone it is that of one step; with as much again in flight that within half the room; more chunks add up."""
    graph = Graph((Node(0.5, 8, (-1,), True), Node(0.25, 4, (0,), True), Node(2.0, 16, (1,), True)), 2, 16)
    kinds = {"a": Kind((Option((), 28, 28, 28, 0.0),), graph)}
    costs = Costs(kinds, tuple(Segment(f"layers.{i}", "a", 0, 0) for i in range(2)), (), 5.5, 10)
    assert seconds_at_least(costs, [2], [Instant(0, True, (0,))], budget, 10) == bound(costs, budget)
    twice = Instant(0, False, (1,))
    assert seconds_at_least(costs, [2], [twice], 2 * budget - 10, 10) == pytest.approx(bound(costs, budget))
    assert seconds_at_least(costs, [2], [twice, Instant(0, True, (0,))], 2 * budget - 10, 10) == pytest.approx(
        bound(costs, budget)
    )
    apart = seconds_at_least(costs, [1, 1], [Instant(1, True, (1, 0))], budget, 10)
    assert apart <= bound(costs, budget)
    assert (apart == 0) == (budget >= 10 + 2 * 28)


def test_more_memory_never_costs_more(planner: PipelinePlanner) -> None:
    """Along the budgets the step gets no longer; with enough there is no plan; with too little the least is said."""
    plans = [planner.plans(share) for share in ("10%", "70%")]
    seconds = [step_seconds(planner.layout, ranks) for ranks in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] > step_seconds(planner.layout, plans[0], plain=True)
    roomy = planner.plans("1TiB")
    assert [len(rank.plan) for rank in roomy] == [0, 0]
    with pytest.raises(BudgetError, match="is too small for rank") as caught:
        planner.plans(1000)
    least = planner.plans(caught.value.smallest)
    assert max(rank.peak_bytes for rank in least) == caught.value.smallest
    with pytest.raises(BudgetError):
        planner.plans(caught.value.smallest - 1)


def test_a_budget_that_earlier_ranks_feel_more() -> None:
    """Ranks that hold alike recompute the more the earlier they are, and are profiled once."""
    layout = Layout(pp=4, batch=8)
    planner = PipelinePlanner(built(), "MODEL", layout, TOKENS, "none", "h100")
    first, second, third, last = planner.ranks
    assert second.planner is third.planner
    assert len({id(rank.planner) for rank in (first, second, last)}) == 3
    plain = [rank.plain_peak_bytes for rank in planner.plans("1TiB")]
    budget = (plain[1] + plain[2]) // 2 - (plain[1] - plain[2])
    costs = [rank.replay_seconds for rank in planner.plans(budget)]
    assert costs[1] > costs[2] > 0


@functools.cache
def planned(pp: int, vpp: int, number: int) -> RankPlanner:
    layout = Layout(pp=pp, vpp=vpp, batch=2 * pp)
    rank = ranks(built(), "MODEL", layout, TOKENS)[number]
    return RankPlanner(rank, instants(orders_of(pp, vpp)[number], pp), layout, "none", "cpu")


def orders_of(pp: int, vpp: int) -> Any:
    return orders_named("Interleaved1F1B", pp, 2 * pp, vpp) if vpp > 1 else one_f_one_b(pp, 2 * pp)


@pytest.mark.parametrize("share", ["1TiB", "30%"], ids=["no region", "30%"])
@pytest.mark.parametrize(("pp", "vpp", "number"), [(2, 1, 0), (2, 2, 1)])
def test_the_peak_of_a_rank_that_runs(pp: int, vpp: int, number: int, share: str) -> None:
    """A rank planned for this CPU, whose actions run here in the order of its schedule, has the predicted peak.

    Rotary embeddings, 4 KiB for each microbatch in flight, are not predicted one by one.
    """
    plan = planned(pp, vpp, number).plan(share)
    rank = ranks(built(device="cpu"), "MODEL", Layout(pp=pp, vpp=vpp, batch=2 * pp), TOKENS)[number]
    chunks = Chunks(rank, pp)
    for parameter in rank.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    handle = apply(rank.model, plan.plan)
    with measure(rank.model) as memory:
        for action in orders_of(pp, vpp)[number]:
            chunks.run(action)
    handle.remove()
    assert abs(memory.peak_bytes - plan.peak_bytes) <= 4096 * sum(plan.held) + 8


class Chunks:
    """The chunks of a rank as stages: each takes what the one before sends, and its backward what comes back.

    As in Megatron, what a stage has sent is let go of, and only its place in the graph is kept.
    """

    def __init__(self, rank: Rank, ranks: int) -> None:
        self._ranks = ranks
        self._layers = [[rank.model.get_submodule(f"model.layers.{i}") for i in chunk] for chunk in rank.chunks]
        self._model: Any = rank.model
        self._first, self._last = rank.number == 0, "labels" in rank.batch
        self._flying: dict[tuple[int, int], Any] = {}
        self._ids = torch.ones(1, TOKENS, dtype=torch.long)
        self._position = rank.model.model.rotary_emb(torch.empty(1), torch.arange(TOKENS)[None])

    def run(self, action: Action) -> None:
        chunk, key = action.stage // self._ranks, (action.stage, action.microbatch)
        if action.kind == FORWARD:
            given, out = self._forward(chunk)
            self._flying[key] = given, torch.autograd.graph.get_gradient_edge(out), out.shape
            return
        given, edge, shape = self._flying.pop(key)
        torch.autograd.backward([edge], [torch.ones(shape)])

    def _forward(self, chunk: int) -> tuple[Any, torch.Tensor]:
        body = self._model.model
        given = None
        if self._first and chunk == 0:
            x = body.embed_tokens(self._ids)
        else:
            x = given = torch.randn(1, TOKENS, SIZES["hidden_size"]).requires_grad_()
        for layer in self._layers[chunk]:
            x = layer(x, attention_mask=None, position_embeddings=self._position)
        if self._last and chunk == len(self._layers) - 1:
            logits = self._model.lm_head(body.norm(x))
            return given, self._model.loss_function(logits=logits, labels=self._ids, vocab_size=SIZES["vocab_size"])
        return given, x


def test_the_optimizer_of_a_rank() -> None:
    """Its state is a share of what one replica alone has, gradients are there before and after, and "none" has none."""
    sizes: dict[tuple[str, int], int] = {}
    for word, replicas in (("adamw", 1), ("adamw", 4), ("sgd", 1), ("none", 1)):
        weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        optimizer = Sharded([weight], replicas, word)
        assert weight.grad is not None
        weight.grad.fill_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert not weight.grad.any()
        state = optimizer.state.get(weight, {})
        sizes[word, replicas] = sum(tensor.untyped_storage().nbytes() for tensor in state.values())
    assert sizes == {("adamw", 1): 12 * 64, ("adamw", 4): 12 * 16, ("sgd", 1): 0, ("none", 1): 0}


@pytest.mark.parametrize(
    ("op", "sent"),
    [("all_gather_into_tensor", 3 * 64), ("reduce_scatter_tensor", 48), ("all_reduce", 96), ("wait_tensor", None)],
)
def test_what_a_collective_sends(op: str, sent: int | None) -> None:
    """In a ring of four a gathering sends three quarters of its result, a reduction twice that of its input."""
    from torch_recompute._compat.collectives import functional

    func = getattr(functional(), op).default
    share, whole = Meta((8, 4), (4, 1), torch.bfloat16), Meta((32, 4), (4, 1), torch.bfloat16)
    found = Op(func, (share, "sum", "tensor-4"), (), (whole if "gather" in op else share,), 0)
    assert sent_bytes(found) == sent
    if sent is not None:
        h100 = DEVICES["h100"]
        assert h100(found) == pytest.approx(sent / (0.8 * 450e9) + h100.launch)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, "num_attention_heads of MODEL is 8, which 3 ranks cannot share"),
        ({"tp": 8}, "num_key_value_heads of MODEL is 4, which 8 ranks cannot share"),
        ({"pp": 3, "vpp": 2}, "--pp 3 --vpp 2 are 6 parts, and the model has 4 layers"),
    ],
)
def test_layouts_that_a_model_refuses(layout: dict[str, int], message: str) -> None:
    """Sizes that cannot be shared, and pipelines longer than the model."""
    with pytest.raises(ArgumentError, match=message):
        cut(built(), **layout)


def test_models_that_cannot_be_spread() -> None:
    """A width that is not in the configuration, and more than an embedding before the layers, are refused."""
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64)
    with torch.device("meta"):
        gpt2 = transformers.GPT2LMHeadModel._from_config(config)
    with pytest.raises(ArgumentError, match="does not say how wide a head is"):
        cut(gpt2, tp=2)
    with pytest.raises(ArgumentError, match="holds wpe before its layers"):
        cut(copy.deepcopy(gpt2), pp=2)
    assert len(cut(gpt2, dp=4)) == 1
