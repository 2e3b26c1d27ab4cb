"""A step over ranks: a rank's share of the weights, the activations that it keeps, and its plan."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from support.zoo import mean_loss
from torch_recompute import Plan, apply, measure, simulate
from torch_recompute.errors import ArgumentError, BudgetError
from torch_recompute.memory.loop import Loop
from torch_recompute.plan.config import plan_of
from torch_recompute.plan.ranks import Ranks
from torch_recompute.planner.bound import bound
from torch_recompute.planner.cost import Costs, Graph, Kind, Node, Option, Segment
from torch_recompute.planner.hosts import PlanOptions
from torch_recompute.planner.layout import (
    ConfiguredLayout,
    Layout,
    LayoutPlanner,
    LayoutRanks,
    RankPlan,
    Sharded,
    configured,
    one_rank,
    step_seconds,
)
from torch_recompute.planner.longest import LongestOnRanks
from torch_recompute.planner.ops import Meta, Op
from torch_recompute.planner.pipeline import PipelineRank, graph_held
from torch_recompute.planner.schedules import FORWARD, Action
from torch_recompute.planner.tensor_parallel import rank_model
from torch_recompute.simulation.devices import DEVICES
from torch_recompute.simulation.step import simulate_step
from torch_recompute.simulation.training_step import TrainingStep

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


def kept(name: str, tp: int, *, sequence: bool = False) -> int:
    """What a layer adds to what a rank keeps: two layers less one."""
    sums: list[int] = []
    for layers in (1, 2):
        model = rank_model(built(name, num_hidden_layers=layers), "MODEL", tp, sequence)[0]
        sums.append(simulate(model, (), batch(), loss=mean_loss).saved_bytes)
    return sums[1] - sums[0]


def batch() -> dict[str, Any]:
    ids = torch.ones(1, TOKENS, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(TOKENS)[None], "use_cache": False}


def test_what_a_rank_of_a_real_model_keeps() -> None:
    """What slices keep is divided by the ranks and the rest is not; with sequence parallelism everything is."""
    one, two, four = (kept("llama", tp) for tp in (1, 2, 4))
    assert one - two == 2 * (two - four) > 0
    assert [kept("llama", tp, sequence=True) * tp for tp in (2, 4)] == [one, one]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence parallel"])
def test_the_ranks_of_a_group_make_up_the_model(name: str, sequence: bool) -> None:
    """Slices are a share of the whole weights, everything else is the same, and a rank's step can be simulated."""
    whole = built(name)
    part = rank_model(whole, "MODEL", 2, sequence)[0]
    before = {name: parameter.numel() for name, parameter in whole.named_parameters()}
    shares = {name: before[name] / parameter.numel() for name, parameter in part.named_parameters()}
    assert set(shares.values()) == {1.0, 2.0}
    assert {share for path, share in shares.items() if "norm" in path or "gate.weight" in path} == {1.0}
    assert {share for path, share in shares.items() if "o_proj" in path or "down_proj" in path} == {2.0}
    assert simulate(part, (), batch(), loss=mean_loss).saved_bytes > 0


def test_experts_that_fewer_ranks_share() -> None:
    """With one rank to an expert, a mixture is that of a rank with a share of the tokens, and its weights are whole."""
    ranks = Ranks(tp=2, sequence_parallel=True, etp=1, ep=2)
    whole = built("qwen3-moe")
    part, _, batch = one_rank(whole, "MODEL", ranks, 1, TOKENS)
    less = built("qwen3-moe")
    alone = {name: x[:, : TOKENS // 2] if torch.is_tensor(x) else x for name, x in batch.items()}
    kept: list[int] = []
    for model, call, of in ((part, batch, ranks), (less, alone, Ranks(dp=2, ep=2, zero=0))):
        step = TrainingStep(model, (), call, mean_loss, loop=Loop(hold_output=False), ranks=of)
        found = simulate_step(step)
        kept.append(sum(n for path, n in found.saved_by_module.items() if ".mlp" in path))
    assert kept[0] == kept[1] > 0
    names = [name for name, _ in whole.named_parameters() if ".experts." in name]
    assert all(part.get_parameter(name).shape == whole.get_parameter(name).shape for name in names)
    assert Ranks(tp=4, sequence_parallel=True, etp=2, dp=3, ep=6).expert_ranks == 6
    sliced, _, _ = one_rank(whole, "MODEL", Ranks(tp=4, sequence_parallel=True, etp=2), 1, TOKENS)
    assert {2 * sliced.get_parameter(name).numel() for name in names} == {whole.get_parameter(names[0]).numel()} | {
        whole.get_parameter(name).numel() for name in names
    }
    with pytest.raises(ArgumentError, match=r"shared_experts\) beside its experts.*--etp 1, or --etp 4"):
        one_rank(built("deepseek-v3"), "MODEL", Ranks(tp=4, sequence_parallel=True, etp=2), 1, TOKENS)


def test_layers_that_do_not_divide_evenly() -> None:
    """The ranks with the embedding and the head are the last to get one more."""
    assert Layout(Ranks(pp=4)).pipeline(10).bounds == ((0, 2), (2, 5), (5, 8), (8, 10))
    assert Layout(Ranks(pp=2, vpp=2)).pipeline(5).bounds == ((0, 1), (1, 3), (3, 4), (4, 5))
    assert Layout(Ranks(pp=4)).pipeline(11).bounds == ((0, 3), (3, 6), (6, 9), (9, 11))


@pytest.fixture(scope="module")
def planner() -> LayoutPlanner:
    layout = Layout(Ranks(tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True), batch=16)
    return LayoutPlanner(built(), "MODEL", layout, TOKENS, "adamw", "h100")


def test_plans_fit(planner: LayoutPlanner) -> None:
    """Every rank stays within its budget, its figures add up to its peak, and its plan names its own layers."""
    for rank in planner.plans("40%"):
        promise = rank.plan.prediction
        assert promise is not None
        assert promise.peak_bytes == rank.peak_bytes <= promise.budget_bytes < rank.plain_peak_bytes
        assert promise.plain_step_seconds < promise.bound_seconds < promise.step_seconds
        assert rank.optimizer_bytes == 3 * 4 * -(-rank.parameters // 2) - rank.parameters * 4 // 2
        assert rank.link_bytes > 0 < rank.link_seconds < rank.microbatch_seconds
        layers = {f"model.layers.{layer}" for chunk in rank.layers for layer in chunk}
        assert all(any(f"{path}.".startswith(f"{layer}.") for layer in layers) for c in rank.plan for path in c.paths)
        assert Plan.from_json(rank.plan.to_json()) == rank.plan


# How many ranks there are and of which kinds, the batch, and the layers of the model.
LAYOUTS: dict[str, tuple[Ranks, int, int]] = {
    "alone": (Ranks(dp=2), 4, 3),
    "tensor parallel": (Ranks(tp=2, sequence_parallel=True), 2, 3),
    "pipeline": (Ranks(pp=2), 4, 4),
    "chunks": (Ranks(pp=2, vpp=2), 4, 4),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "chunks")) for name in LAYOUTS]
)
def test_what_a_peak_is_made_of(name: str) -> None:
    """A plan that is stated has the peak of the one that was planned, and its parts sum to it; replays take seconds."""
    ranks, batch, layers = LAYOUTS[name]
    how: Any = (built(num_hidden_layers=layers), "MODEL", Layout(ranks, batch=batch), TOKENS, "adamw", "h100")
    stated, planner = LayoutRanks(*how), LayoutPlanner(*how)
    plain = stated.under(Plan())
    assert [one.peak_bytes for one in plain] == [one.plain_peak_bytes for one in plain]
    assert step_seconds(how[2], plain) == step_seconds(how[2], plain, plain=True) > 0
    full = stated.under(plan_of("full", stated.step.model))
    for one in (*plain, *full):
        assert sum(one.made_of.values()) == one.peak_bytes
        assert min(one.made_of.values()) >= 0
        assert one.made_of["weights"] - one.weight_bytes in (0, 16)  # the frequencies of rotary positions
        assert one.made_of["states"] == one.optimizer_bytes
    assert step_seconds(how[2], full) > step_seconds(how[2], full, plain=True)
    assert all(
        a.made_of.get("kept by layers", 0) < b.made_of["kept by layers"] for a, b in zip(full, plain, strict=True)
    )
    away = stated.under(PlanOptions(True).stated(plan_of("full", stated.step.model)))
    lower = [a.peak_bytes - b.peak_bytes for a, b in zip(away, full, strict=True)]
    assert min(lower) < 0  # of a rank with two layers both inputs are still on their way
    told = [[*configured([ConfiguredLayout("full", how[2], some)])] for some in (away, full)]
    assert ["not in the seconds: copies" in lines[-1] for lines in told] == [True, False]
    planned = planner.plans("30%")
    whole = Plan(tuple(choice for one in planned for choice in one.plan))
    again = stated.under(whole)
    assert [one.peak_bytes for one in again] == [one.peak_bytes for one in planned]
    assert [one.made_of for one in again] == [one.made_of for one in planned]


def test_the_most_that_the_budget_of_each_rank_holds() -> None:
    """The most that is found has plans within the budget, and with a little more no plan is within it."""

    def make(kind: Any, mbs: int) -> Any:
        small = built(num_hidden_layers=2)
        return kind(small, "MODEL", Layout(Ranks(pp=2), mbs=mbs), TOKENS, "none", "cpu")

    budget = make(LayoutPlanner, 2).least_bytes
    search = LongestOnRanks(make, budget, True, None)
    points = search.plans(2)
    assert [length for length, _ in points] == [1, 2]
    assert search.best == 2
    assert all(plan.peak_bytes <= budget for _, plans in points for plan in plans)
    with pytest.raises(BudgetError, match=r"too small for a batch of one, whose peak is .* weights"):
        LongestOnRanks(make, make(LayoutRanks, 1).under(Plan())[0].weight_bytes, True, None).plans(1)


@pytest.mark.parametrize("budget", [20, 40, 60, 90, 120])
def test_the_bound_counts_what_is_in_flight(budget: int) -> None:
    """With as much again in flight it is that of one microbatch within half the room."""
    graph = Graph((Node(0.5, 8, (-1,), True), Node(0.25, 4, (0,), True), Node(2.0, 16, (1,), True)), 2, 16)

    def costs(times: int) -> Costs:
        kinds = {"a": Kind((Option((), 28 * times, 28 * times, 28 * times, 0.0),), graph_held(graph, times))}
        return Costs(kinds, tuple(Segment(f"layers.{i}", "a", 0, 0) for i in range(2)), (), 5.5, 10)

    assert bound(costs(2), 2 * budget - 10) == pytest.approx(bound(costs(1), budget))


def test_more_memory_never_costs_more(planner: LayoutPlanner) -> None:
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


@pytest.mark.usefixtures("free_launches_here")
def test_a_budget_that_earlier_ranks_feel_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that hold alike recompute the more the earlier they are, and run alike stages once."""
    planner = LayoutPlanner(built(), "MODEL", Layout(Ranks(pp=4)), TOKENS, "none", "h100")
    assert planner.pipeline.alike == [0, 1, 1, 3]
    plain = [rank.plain_peak_bytes for rank in planner.plans("1TiB")]
    budget = (plain[1] + plain[2]) // 2 - (plain[1] - plain[2])
    costs = [rank.replay_seconds for rank in planner.plans(budget)]
    assert costs[1] > costs[2] > 0
    monkeypatch.setattr(type(planner.pipeline.runner), "run", lambda *_: pytest.fail("a stage is run again"))
    assert [rank.replay_seconds for rank in planner.plans(budget)] == costs
    assert planner.pipeline.ranks[1].plain.seconds == 0  # whose run is there for any other budget


@functools.cache
def planned(pp: int, vpp: int) -> LayoutPlanner:
    return LayoutPlanner(built(), "MODEL", Layout(Ranks(pp=pp, vpp=vpp), batch=2 * pp), TOKENS, "none", "cpu")


def ran(spread: LayoutRanks, plan: RankPlan) -> int:
    """The measured peak of a rank that is planned for this CPU, whose actions run here in their order."""
    number, sizes = plan.rank, spread.step.model.config
    model: Any = built(device="cpu", vocab_size=sizes.vocab_size, intermediate_size=sizes.intermediate_size)
    names = PipelineRank(spread.pipeline, number).parameters
    held = nn.ParameterList(model.get_parameter(name) for name in names)
    for parameter in held:
        parameter.grad = torch.zeros_like(parameter)
    stages = Stages(model, plan, spread.layout.ranks.pp)
    handle = apply(model, plan.plan)
    with measure(held) as memory:
        if number == 0:  # which computes rotary tables in a stage
            memory.track(model.model.rotary_emb.inv_freq)
        for action in spread.cut.orders[number]:
            stages.run(action)
    handle.remove()
    return memory.peak_bytes + 4 * (number == 1)  # the loss, which is freed here


@pytest.mark.parametrize("share", ["1TiB", "30%"], ids=["no region", "30%"])
@pytest.mark.parametrize(("vpp", "number"), [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_the_peak_of_a_rank_that_runs(vpp: int, number: int, share: str) -> None:
    """A rank planned for this CPU, whose actions run here in the order of its schedule, has the predicted peak."""
    planner = planned(2, vpp)
    plan = planner.plans(share)[number]
    assert ran(planner, plan) == plan.peak_bytes


@pytest.mark.parametrize(
    ("vocab", "part", "vpp"),
    [
        (2048, "lm_head", 1),
        pytest.param(1024, "model.layers.3.mlp", 2, marks=pytest.mark.nightly),
        pytest.param(2048, "lm_head", 2, marks=pytest.mark.nightly),
        pytest.param(1024, "model.layers.3.mlp", 1, marks=pytest.mark.nightly),
    ],
)
def test_the_peak_of_a_rank_with_tiles(vocab: int, part: str, vpp: int) -> None:
    """The head with its loss, or MLPs, in tiles lower the peak of a pipeline's rank; each rank runs as predicted."""
    wide = built(vocab_size=vocab, intermediate_size=512)
    how: Any = wide, "MODEL", Layout(Ranks(pp=2, vpp=vpp), batch=4), TOKENS, "none", "cpu"
    plan, spread = (
        plan_of("full", wide),
        [LayoutRanks(*how, plan_options=PlanOptions(tiles=tiles)) for tiles in (False, True)],
    )
    whole, tiled = (ranks.configured("full", plan) for ranks in spread)
    assert not whole.tiled
    assert any(part.rpartition(".")[2] in words.replace("MLP", "mlp") for words in tiled.tiled)
    assert any((part,) == choice.paths for choice in tiled.ranks[1].plan if choice.tiles)
    for before, one in zip(whole.ranks, tiled.ranks, strict=True):
        assert ran(spread[1], one) == one.peak_bytes
        assert ran(spread[0], before) == before.peak_bytes
    assert tiled.ranks[1].peak_bytes < whole.ranks[1].peak_bytes


class Stages:
    """The chunks of a rank as stages: each takes what the one before sends, and its backward what comes back.

    As in Megatron, what a stage has sent is freed, and only its place in the graph is kept.
    """

    def __init__(self, model: Any, plan: RankPlan, ranks: int) -> None:
        self._model, self._ranks, self._layers = model, ranks, plan.layers
        self._last = SIZES["num_hidden_layers"] - 1
        self._flying: dict[tuple[int, int], Any] = {}
        self._ids = torch.ones(1, TOKENS, dtype=torch.long)

    def run(self, action: Action) -> None:
        key = action.stage, action.microbatch
        if action.kind == FORWARD:
            given, out = self._forward(self._layers[action.stage // self._ranks])
            self._flying[key] = given, torch.autograd.graph.get_gradient_edge(out), out.shape
            return
        given, edge, shape = self._flying.pop(key)
        torch.autograd.backward([edge], [torch.ones(shape)])

    def _forward(self, layers: tuple[int, ...]) -> tuple[Any, torch.Tensor]:
        body = self._model.model
        given = None
        if layers[0] == 0:
            x = body.embed_tokens(self._ids)
        else:
            x = given = torch.randn(1, TOKENS, SIZES["hidden_size"]).requires_grad_()
        position = body.rotary_emb(x, torch.arange(TOKENS)[None])
        for layer in layers:
            x = body.layers[layer](x, attention_mask=None, position_embeddings=position)
        if layers[-1] == self._last:
            logits = self._model.lm_head(body.norm(x))
            return given, self._model.loss_function(
                logits=logits, labels=self._ids, vocab_size=self._model.config.vocab_size
            )
        return given, x


def test_the_optimizer_of_a_rank() -> None:
    """Its state is a share of what one replica alone has, gradients are there before and after, and "none" has none."""
    sizes: dict[tuple[str, int], int] = {}
    for word, replicas in (("adamw", 1), ("adamw", 4), ("sgd", 1), ("none", 1)):
        weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        optimizer = Sharded([weight], Ranks(dp=replicas), word)
        assert weight.grad is not None
        weight.grad.fill_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert not weight.grad.any()
        state = optimizer.state.get(weight, {})
        sizes[word, replicas] = sum(tensor.untyped_storage().nbytes() for tensor in state.get("held", ()))
    assert sizes == {("adamw", 1): 12 * 64, ("adamw", 4): 12 * 16, ("sgd", 1): 0, ("none", 1): 0}


def test_the_states_of_experts() -> None:
    """Those of an expert's weight are shared by the ranks that have it, with and without context parallelism."""
    for ranks, copies in ((Ranks(dp=8), 8), (Ranks(dp=8, ep=4), 2), (Ranks(dp=2, cp=2, ep=4), 1), (Ranks(ep=1), 1)):
        weight: Any = nn.Parameter(torch.ones(8, 8))
        weight.allreduce = False
        optimizer = Sharded([weight], ranks, "adamw")
        optimizer.step()
        assert [moment.numel() for moment in optimizer.state[weight]["held"]] == [64 // copies] * 2


@pytest.mark.parametrize(
    ("op", "sent"),
    [("all_gather_into_tensor", 3 * 64), ("reduce_scatter_tensor", 48), ("all_reduce", 96), ("wait_tensor", None)],
)
def test_what_a_collective_sends(op: str, sent: int | None) -> None:
    """In a ring of four a gathering sends three quarters of its result, a reduction twice that of its input."""
    from torch_recompute._torch.ranks import functional

    func = getattr(functional(), op).default
    share, whole = Meta((8, 4), (4, 1), torch.bfloat16), Meta((32, 4), (4, 1), torch.bfloat16)
    found = Op(func, (share, "sum", "tensor-4"), (), (whole if "gather" in op else share,), 0)
    assert found.sent_bytes == sent
    if sent is not None:
        h100 = DEVICES["h100"]
        assert h100(found) == pytest.approx(sent / (0.8 * 450e9) + h100.launch)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, "num_attention_heads of MODEL is 8, which 3 ranks cannot share"),
        ({"tp": 8}, "num_key_value_heads of MODEL is 4, which 8 ranks cannot share"),
        ({"pp": 5}, "^--pp 5 are 5 parts, and the model has 4 layers"),
        ({"pp": 3, "vpp": 2}, "--pp 3 --vpp 2 are 6 parts, and the model has 4 layers"),
    ],
)
def test_layouts_that_a_model_refuses(layout: dict[str, Any], message: str) -> None:
    """Sizes that cannot be shared, and pipelines longer than the model."""
    with pytest.raises(ArgumentError, match=message):
        LayoutPlanner(built(), "MODEL", Layout(Ranks(**layout)), TOKENS, "none", "h100")


def test_a_model_with_more_before_its_layers() -> None:
    """GPT-2's positions are on the first rank, the tied embedding on the first and the last; it has no slices."""
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=TOKENS)
    with torch.device("meta"):
        gpt2: Any = transformers.GPT2LMHeadModel._from_config(config)
    with pytest.raises(ArgumentError, match="does not say how wide a head is"):
        rank_model(gpt2, "MODEL", 2, False)
    first, last = LayoutPlanner(gpt2, "MODEL", Layout(Ranks(pp=2)), TOKENS, "none", "h100").pipeline.ranks
    assert "transformer.wpe.weight" in first.parameters
    assert "transformer.wpe.weight" not in last.parameters
    assert set(first.parameters) & set(last.parameters) == {"transformer.wte.weight"}
    assert set(first.parameters) | set(last.parameters) == {name for name, _ in gpt2.named_parameters()}
