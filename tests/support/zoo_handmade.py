"""Models by hand, in the shape and with the names of libraries that cannot be imported here.

    DecoderOnly         what people write in a notebook: fused qkv, an MLP as a Sequential, pre-norm
    MegatronGPT         Megatron-Core's names: self_attention.linear_qkv, input_layernorm, mlp.linear_fc1
    TitanDecoder        torchtitan's names: attention.wq, feed_forward.w1, attention_norm; layers in a ModuleDict
    VisionTransformer   timm's ViT: blocks as a Sequential, attn.qkv, norm1, layer scale, mlp.fc1
    ConvNeXt            timm's ConvNeXt: stages of blocks, no attention at all
    with_lora           wraps linear layers the way PEFT does

They are small but do what their originals do; nothing in them is there for the tests' convenience.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DROPOUT = 0.1


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part, self.heads) for part in self.c_attn(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=DROPOUT if self.training else 0.0)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(DROPOUT)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class DecoderOnly(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class DotProductAttention(nn.Module):
    """Megatron's core attention: a module of its own, without parameters, in eager arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = nn.Dropout(DROPOUT)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return self.attention_dropout(scores.masked_fill(hidden, -1e9).softmax(-1)) @ v


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.core_attention = DotProductAttention()
        self.linear_proj = nn.Linear(width, width)
        self.linear_qkv = nn.Linear(width, 3 * width)
        self.q_layernorm = nn.LayerNorm(width // heads)
        self.k_layernorm = nn.LayerNorm(width // heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part, self.heads) for part in self.linear_qkv(x).chunk(3, dim=-1))
        mixed = self.core_attention(self.q_layernorm(q), self.k_layernorm(k), v)
        return self.linear_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(width, hidden)
        self.linear_fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class TopKRouter(nn.Module):
    """Scores as a bare weight, as Megatron has it."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) * width**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).softmax(-1)
        return scores.topk(2, dim=-1)


class SequentialMLP(nn.Module):
    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.local_experts = nn.ModuleList(MLP(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.local_experts):
            tokens, slot = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, tokens, expert(x[tokens]) * weights[tokens, slot, None])
        return y


class MoELayer(nn.Module):
    def __init__(self, width: int, hidden: int, experts: int, shared: bool) -> None:
        super().__init__()
        self.router = TopKRouter(width, experts)
        self.experts = SequentialMLP(width, hidden, experts)
        self.shared_experts = MLP(width, hidden) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        y = self.experts(flat, *self.router(flat)).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)


class TransformerLayer(nn.Module):
    def __init__(self, width: int, heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(width)
        self.self_attention = SelfAttention(width, heads)
        self.pre_mlp_layernorm = nn.LayerNorm(width)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.self_attention(self.input_layernorm(x)), DROPOUT, self.training)
        return x + F.dropout(self.mlp(self.pre_mlp_layernorm(x)), DROPOUT, self.training)


class TransformerBlock(nn.Module):
    def __init__(self, layers: list[TransformerLayer], width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.final_layernorm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.final_layernorm(x)


class MegatronGPT(nn.Module):
    """`experts=0` is dense; with experts, all layers but the first are mixtures."""

    def __init__(
        self, vocabulary: int, width: int, heads: int, layers: int, experts: int = 0, shared: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(vocabulary, width)})
        parts = [
            MoELayer(width, 2 * width, experts, shared) if experts and number else MLP(width, 2 * width)
            for number in range(layers)
        ]
        self.decoder = TransformerBlock([TransformerLayer(width, heads, part) for part in parts], width)
        self.output_layer = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output_layer(self.decoder(self.embedding["word_embeddings"](ids)))


class TitanAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, heads // 2
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width // 2, bias=False)
        self.wv = nn.Linear(width, width // 2, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        q, k, v = _heads(self.wq(x), self.heads), _heads(self.wk(x), self.groups), _heads(self.wv(x), self.groups)
        mixed = F.scaled_dot_product_attention(q * turn, k * turn, v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GroupedExperts(nn.Module):
    """The weights of all experts in one tensor each, as torchtitan keeps them."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, hidden, width) * width**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.w3 = nn.Parameter(torch.randn(experts, hidden, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(torch.bmm(x, self.w1.transpose(-2, -1))) * torch.bmm(x, self.w3.transpose(-2, -1))
        return torch.bmm(h, self.w2.transpose(-2, -1))


class TokenChoiceTopKRouter(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).sigmoid()
        chosen = torch.topk(scores, k=2, dim=-1, sorted=False).indices
        return scores.gather(-1, chosen), chosen


class MoE(nn.Module):
    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.experts = GroupedExperts(width, hidden, experts)
        self.router = TokenChoiceTopKRouter(width, experts)
        self.shared_expert = FeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat)
        spread = torch.zeros(flat.shape[0], self.experts.w1.shape[0], dtype=x.dtype).scatter(-1, chosen, weights)
        every = self.experts(flat.expand(self.experts.w1.shape[0], -1, -1))
        return self.shared_expert(x) + torch.einsum("te,etd->td", spread, every).view_as(x)


class TitanBlock(nn.Module):
    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.attention = TitanAttention(width, heads)
        if experts:
            self.moe = MoE(width, 2 * width, experts)
        else:
            self.feed_forward = FeedForward(width, 2 * width)
        self.attention_norm = nn.RMSNorm(width)
        self.ffn_norm = nn.RMSNorm(width)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), turn)
        part = self.moe if hasattr(self, "moe") else self.feed_forward
        return h + part(self.ffn_norm(h))


class TitanDecoder(nn.Module):
    turn: Tensor

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, experts: int = 0) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.register_buffer("turn", torch.linspace(0.5, 1.5, width // heads), persistent=False)
        self.layers = nn.ModuleDict({str(i): TitanBlock(width, heads, experts) for i in range(layers)})
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.turn)
        return self.output(self.norm(h))


class VisionAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = nn.LayerNorm(width // heads)
        self.k_norm = nn.LayerNorm(width // heads)
        self.attn_drop = nn.Dropout(DROPOUT)
        self.proj = nn.Linear(width, width)
        self.proj_drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        p = self.attn_drop.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, dropout_p=p)
        return self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(DROPOUT)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden, width)
        self.drop2 = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class VisionBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = VisionAttention(width, heads)
        self.ls1 = LayerScale(width)
        self.drop_path1 = nn.Identity()
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, 2 * width)
        self.ls2 = LayerScale(width)
        self.drop_path2 = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class PatchEmbed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, 8, stride=8)
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class VisionTransformer(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        self.patch_embed = PatchEmbed(width)
        self.pos_drop = nn.Dropout(DROPOUT)
        self.norm_pre = nn.Identity()
        self.blocks = nn.Sequential(*(VisionBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.fc_norm = nn.Identity()
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = self.pos_drop(torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed)
        x = self.norm(self.blocks(self.norm_pre(x)))
        return self.head(self.fc_norm(x[:, 0]))


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, 4 * width)
        self.gamma = nn.Parameter(torch.full((width,), 0.5))
        self.shortcut = nn.Identity()
        self.drop_path = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))) * self.gamma
        return self.drop_path(y.permute(0, 3, 1, 2)) + self.shortcut(x)


class ConvNeXtStage(nn.Module):
    def __init__(self, before: int, width: int, depth: int) -> None:
        super().__init__()
        self.downsample = (
            nn.Identity()
            if before == width
            else nn.Sequential(LayerNorm2d(before), nn.Conv2d(before, width, 2, stride=2))
        )
        self.blocks = nn.Sequential(*(ConvNeXtBlock(width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class ConvNeXt(nn.Module):
    def __init__(self, widths: tuple[int, ...], depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 4, stride=4), LayerNorm2d(widths[0]))
        befores = (widths[0], *widths[:-1])
        self.stages = nn.Sequential(
            *(ConvNeXtStage(before, width, depth) for before, width, depth in zip(befores, widths, depths, strict=True))
        )
        self.norm_pre = nn.Identity()
        self.head = nn.ModuleDict({"norm": LayerNorm2d(widths[-1]), "fc": nn.Linear(widths[-1], 5)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_pre(self.stages(self.stem(x)))
        return self.head["fc"](self.head["norm"](x.mean((2, 3), keepdim=True)).flatten(1))


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter beside it, with the submodules that PEFT's has."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(DROPOUT)})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        update = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        return self.base_layer(x) + update * 2.0


def with_lora(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """The model with adapters on the linear layers of these names, and all its own parameters frozen."""
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in names and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), name, LoraLinear(module))
    return model


def decoder() -> DecoderOnly:
    """A decoder of three layers, the same every time."""
    torch.manual_seed(0)
    return DecoderOnly(64, 32, 4, 3)
