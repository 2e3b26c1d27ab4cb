"""Layers with fused kernels: the table of what they keep, beside layers of custom functions that save just these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.training import kept_in
from torch_recompute.errors import ArgumentError
from torch_recompute.memory.ledger import CountedOnce
from torch_recompute.plan.apply import apply
from torch_recompute.plan.config import plan_of
from torch_recompute.simulation import Simulation, simulate_step
from torch_recompute.simulation.fused import fuse
from torch_recompute.simulation.training_step import TrainingStep, any_loss

transformers = pytest.importorskip("transformers")

TOKENS, WIDTH, CHOSEN, INNER, SEEDS = 64, 64, 2, 32, 16
BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "intermediate_size": 96,
    "max_position_embeddings": TOKENS,
}
MOE = {"num_experts_per_tok": CHOSEN, "moe_intermediate_size": INNER}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "GQA": ("qwen3", {"num_key_value_heads": 2}),
    "MLA": ("deepseek_v3", {**MOE, **MLA, **ROUTED, "first_k_dense_replace": 2}),
    "MLA and MoE": ("deepseek_v3", {**MOE, **MLA, **ROUTED, "first_k_dense_replace": 0}),
    "GQA and MoE": ("qwen3_moe", {**MOE, "num_key_value_heads": 2, "num_experts": 4, "norm_topk_prob": True}),
}
kept = partial(kept_in, path="model.layers.0")
every_model = pytest.mark.parametrize("name", MODELS)


def built(name: str, device: str = "meta", dtype: torch.dtype = torch.bfloat16) -> Any:
    """A small model of the table."""
    kind, sizes = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **{**BASE, **sizes})
    config.dtype = dtype
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def simulated(model: nn.Module, words: str = "none") -> Simulation:
    """A step of a model for an H100, under a configuration."""
    ids = torch.ones(1, TOKENS, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    step = TrainingStep(model, (), batch, any_loss, device="h100")
    return simulate_step(step, prepare=lambda copy: apply(copy, plan_of(words, copy)), rounding=1)


# --- custom functions that save what the table says, and compute the gradients from it ---


class Custom(torch.autograd.Function):
    """A function with a backward of its own, which reads what `saved` returns and nothing else."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], saved: Callable[..., Any], backward: Any, *inputs: Any) -> Any:
        out = run(*inputs)
        ctx.save_for_backward(*saved(*inputs, out))
        ctx.backward = backward
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = ctx.backward(grad, *ctx.saved_tensors)
        return None, None, None, *found


def again(run: Callable[..., torch.Tensor], grad: torch.Tensor, *inputs: torch.Tensor) -> Any:
    """The gradients of a function by its inputs, which are all that it needs."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        made = torch.autograd.grad(run(*leaves), [x for x in leaves if x.requires_grad], grad)
    found = iter(made)
    return [next(found) if x.requires_grad else None for x in leaves]


def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    eps = module.variance_epsilon

    def scale_of(x: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * (x.float() * scale_of(x)).to(x.dtype)

    def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Any:
        normed, given = x.float() * scale, grad.float() * weight.float()
        of_x = scale * (given - normed * (given * normed).mean(-1, keepdim=True))
        return of_x.to(x.dtype), (grad.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)

    return Custom.apply(run, lambda x, w, out: (x, w, scale_of(x)), backward, x, module.weight)


def half_turned(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, way: int = 1) -> torch.Tensor:
        if interleaved and way > 0:  # pairs to halves
            x = torch.cat([x[..., 0::2], x[..., 1::2]], -1)
        x = x * cos[:, None] + way * half_turned(x) * sin[:, None]
        if interleaved and way < 0:
            x = torch.stack(x.chunk(2, -1), -1).flatten(-2)
        return x

    def backward(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return turn(grad, cos, sin, -1), None, None

    return Custom.apply(turn, lambda x, cos, sin, out: (cos, sin), backward, x, cos, sin)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, seeds: int) -> torch.Tensor:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.transpose(-2, -1)).float() * scale
        masked = scores.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), float("-inf"))
        return (masked.softmax(-1).to(q.dtype) @ v).transpose(1, 2).contiguous()

    def saved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Any:
        return q, k, v, out, torch.zeros(q.shape[:3]), torch.zeros(seeds, dtype=torch.uint8)

    def own(x: torch.Tensor) -> torch.Tensor:  # queries, keys and values each in memory of their own
        return Custom.apply(lambda x: x.clone(), lambda x, out: (), lambda grad: (grad,), x)

    return Custom.apply(run, saved, lambda g, q, k, v, *_: again(run, g, q, k, v), own(q), own(k), own(v))


def activated(*wide: torch.Tensor, halved: bool = False) -> torch.Tensor:
    def run(*wide: torch.Tensor) -> torch.Tensor:
        gate, up = wide[0].chunk(2, -1) if halved else wide
        return F.silu(gate) * up

    return Custom.apply(run, lambda *all: all[:-1], lambda grad, *wide: again(run, grad, *wide), *wide)


def routed(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = F.linear(x, module.weight)
    sigmoid = hasattr(module, "routed_scaling_factor")

    def scores_of(logits: torch.Tensor) -> torch.Tensor:
        return logits.sigmoid() if sigmoid else logits.softmax(-1)

    experts = scores_of(logits.detach().float()).topk(CHOSEN, -1).indices
    dtype = torch.float32 if sigmoid else logits.dtype

    def weights_of(logits: torch.Tensor) -> torch.Tensor:
        picked = scores_of(logits).gather(1, experts)
        return (picked / picked.sum(-1, keepdim=True) * (module.routed_scaling_factor if sigmoid else 1)).to(dtype)

    def saved(narrow: torch.Tensor, experts: torch.Tensor, out: torch.Tensor) -> Any:
        wide = narrow.float()
        return wide, scores_of(wide), experts, out

    def backward(grad: torch.Tensor, wide: torch.Tensor, *_: Any) -> Any:
        return again(weights_of, grad, wide)[0].to(logits.dtype), None

    weights = Custom.apply(lambda narrow, _: weights_of(narrow.float()), saved, backward, logits, experts)
    return weights, experts


def grouped(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Products with stacked weights (experts, outputs, inputs), which keep rows, weights and where the rows end."""

    def run(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        parts = x.tensor_split(ends[:-1].long())
        return torch.cat([part @ w.t() for part, w in zip(parts, weights, strict=True)])

    return Custom.apply(run, lambda *all: all[:-1], lambda grad, *saved: again(run, grad, *saved), x, weights, ends)


def mixed(module: Any, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    flat = experts.flatten()
    order = flat.argsort().to(torch.int32)
    ends = flat.bincount(minlength=len(module.gate_up_proj)).cumsum(0).to(torch.int32)

    def dispatch(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return x[order.long() // CHOSEN]

    def gather(grad: torch.Tensor, order: torch.Tensor) -> Any:
        return grad.new_zeros(len(grad) // CHOSEN, grad.shape[1]).index_add_(0, order.long() // CHOSEN, grad), None

    def combine(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        weighted = rows * weights.flatten()[order.long()][:, None].to(rows.dtype)
        return rows.new_zeros(len(weights), rows.shape[1]).index_add_(0, order.long() // CHOSEN, weighted)

    rows = Custom.apply(dispatch, lambda x, order, out: (order,), gather, x, order)
    inner = activated(grouped(rows, module.gate_up_proj, ends), halved=True)
    returned = grouped(inner, module.down_proj, ends)
    return Custom.apply(
        combine, lambda *all: all[:-1], lambda grad, *saved: again(combine, grad, *saved), returned, weights, order
    )


class CustomLayer(nn.Module):
    """A layer of transformers with its weights, made of the functions above."""

    def __init__(self, layer: Any, seeds: int) -> None:
        super().__init__()
        self.layer, self.seeds = layer, seeds

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        x = x + self.attention(layer.self_attn, norm(layer.input_layernorm, x), cos, sin)
        normed = norm(layer.post_attention_layernorm, x)
        if not hasattr(layer.mlp, "experts"):
            return x + self.mlp(layer.mlp, normed)
        flat = normed.view(-1, WIDTH)
        out = mixed(layer.mlp.experts, flat, *routed(layer.mlp.gate, flat)).view_as(x)
        shared = getattr(layer.mlp, "shared_experts", None)
        return x + (out if shared is None else out + self.mlp(shared, normed))

    @staticmethod
    def mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.down_proj(activated(module.gate_proj(x), module.up_proj(x)))

    def attention(self, module: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def heads(x: torch.Tensor, width: int) -> torch.Tensor:
            return x.view(1, TOKENS, -1, width).transpose(1, 2)

        latent = hasattr(module, "kv_a_layernorm")
        if latent:
            q = heads(module.q_b_proj(norm(module.q_a_layernorm, module.q_a_proj(x))), 16)
            kv, turned = module.kv_a_proj_with_mqa(x).split([16, 8], -1)
            k, v = heads(module.kv_b_proj(norm(module.kv_a_layernorm, kv)), 16).split(8, -1)
            turned = rotated(heads(turned, 8), cos, sin, True).expand(-1, 8, -1, -1)
            q = torch.cat([q[..., :8], rotated(q[..., 8:], cos, sin, True)], -1)
            k = torch.cat([k, turned], -1)
        else:
            q, k, v = (heads(getattr(module, f"{one}_proj")(x), 8) for one in "qkv")
            if hasattr(module, "q_norm"):
                q, k = norm(module.q_norm, q), norm(module.k_norm, k)
            q, k = (rotated(one, cos, sin, False) for one in (q, k))
        return module.o_proj(attended(q, k, v, module.scaling, self.seeds).flatten(2))


def inputs(model: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The hidden states and positions that a layer is given."""
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    return x, *model.model.rotary_emb(x.detach(), torch.arange(TOKENS)[None])


@every_model
def test_a_layer_of_custom_functions_keeps_what_the_table_says(name: str) -> None:
    """What the functions save, measured, is to the byte what the fused layer keeps in a simulated step."""
    model = built(name, "cpu")
    x, cos, sin = inputs(model, torch.bfloat16)
    held: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        CustomLayer(model.model.layers[0], SEEDS)(x, cos, sin)
    saved = CountedOnce()
    saved.add([*model.parameters(), cos, sin])
    others = saved.nbytes
    saved.add(held)
    fused = built(name)
    fuse(fused)
    assert kept(simulated(fused)) == saved.nbytes - others
    assert kept(simulated(fused)) < kept(simulated(built(name)))


@every_model
def test_what_the_table_keeps_is_enough_for_the_gradients(name: str) -> None:
    """The custom layer, which saves just that, computes the loss and the gradients of the layer of transformers."""
    model = built(name, "cpu", torch.float32).double()
    model.config._experts_implementation = "eager"
    layer = model.model.layers[0]
    with torch.no_grad():
        for module in layer.modules():  # which from_config leaves at zero
            if hasattr(module, "routed_scaling_factor") or type(module).__name__.endswith("Router"):
                module.weight.normal_()
    x, cos, sin = inputs(model, torch.float64)
    found: list[Any] = []
    for run in (lambda: layer(x, position_embeddings=(cos, sin)), lambda: CustomLayer(layer, 0)(x, cos, sin)):
        out = run()
        out = out[0] if isinstance(out, tuple) else out
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    for there, here in zip(*found, strict=True):
        assert torch.allclose(there, here, rtol=1e-4, atol=1e-4)


def test_no_label_means_something_else_in_fused_layers() -> None:
    """A plan by labels frees bytes of fused layers, each label what its kernels keep."""
    heads = TOKENS * 8 * 2 * (16 + 16 + 8)  # queries, keys and values
    latents = TOKENS * (24 + 16) * 2 + 2 * 4 * TOKENS  # normed, and a scale for each row
    rows = TOKENS * CHOSEN * INNER * 2
    frees = {"mla_up_proj": heads + latents, "moe_act": rows}
    model = built("MLA and MoE")
    fuse(model)
    plain = kept(simulated(model))
    for label, nbytes in frees.items():
        freed = plain - kept(simulated(model, label))
        assert nbytes <= freed, label


def test_weights_before_the_last_product_free_its_result() -> None:
    """Efficient permutation frees what experts return, and nothing else."""
    models = built("MLA and MoE"), built("MLA and MoE")
    fuse(models[0])
    fuse(models[1], ["efficient-permutation"])
    later, early = (kept(simulated(model)) for model in models)
    assert later - early == TOKENS * CHOSEN * WIDTH * 2


def test_products_in_8_bits_keep_a_byte_of_each_input() -> None:
    """Of what only products keep half is left; the result of attention, which it keeps too, is there once more."""
    halves = {"dense": WIDTH + WIDTH + 96, "GQA and MoE": WIDTH + CHOSEN * (WIDTH + INNER)}
    for name, half in halves.items():
        models = built(name), built(name)
        fuse(models[0])
        fuse(models[1], ["fp8"])
        wide, narrow = (kept(simulated(model)) for model in models)
        assert wide - narrow == TOKENS * (half - WIDTH), name
        assert kept(simulated(models[1], "full")) == kept(simulated(models[0], "full"))


def test_parts_without_a_kernel_are_named() -> None:
    """A part that the table does not know is left as it is, with its class, and a model without a known one refused."""
    model = built("GQA and MoE")
    model.model.layers[0].mlp.gate = nn.Linear(WIDTH, 4, device="meta")
    found = fuse(model)
    assert [(name, count) for (name, _), count in found.eager.items()] == [("Linear", 1)]
    assert "Linear" in found.notes[0]
    with pytest.raises(ArgumentError, match="no fused kernel is known"):
        fuse(nn.Sequential(nn.TransformerEncoderLayer(8, 2, batch_first=True)))
