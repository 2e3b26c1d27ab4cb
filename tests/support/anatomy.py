"""The parts of models: roles by path for each architecture of the zoo.

`ANATOMY` was written by reading each model's source, not by running the search. A row names the stacks with their
numbers of layers, then, for one layer or more, which paths (from the layer) have which role. Roles that a row does not
name must not be found in that layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field


def roles(text: str) -> dict[str, str]:
    """Roles with their paths, written `role role: path path; role: path`."""
    return {role: paths for part in text.split("; ") for names, paths in [part.split(": ")] for role in names.split()}


QKVO = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
GLU = "mlp.gate_proj mlp.up_proj mlp.down_proj"
PRE = "input_layernorm post_attention_layernorm"
QK_NORM = "self_attn.q_norm self_attn.k_norm"
LATENT = roles(
    "attention core_attention: self_attn; "
    "down_projection: self_attn.q_a_proj self_attn.kv_a_proj_with_mqa; "
    "up_projection: self_attn.q_b_proj self_attn.kv_b_proj; "
    f"inner_norm: self_attn.q_a_layernorm self_attn.kv_a_layernorm; norm: {PRE}"
)
LLAMA = roles(
    f"attention core_attention: self_attn; mlp: mlp; norm: {PRE}; product: {QKVO} {GLU}; activation: mlp.act_fn"
)
MIXTURE = roles(
    f"attention core_attention: self_attn; norm: {PRE}; product: {QKVO}; moe: mlp; router: mlp.gate; "
    "experts: mlp.experts; activation: mlp.experts.act_fn"
)
GEMMA = LLAMA | roles(f"norm: {PRE} pre_feedforward_layernorm post_feedforward_layernorm")
DEEPSEEK = {
    "model.layers.0": LATENT | roles(f"mlp: mlp; activation: mlp.act_fn; product: self_attn.o_proj {GLU}"),
    "model.layers.2": LATENT
    | roles(
        "moe: mlp; router: mlp.gate; experts: mlp.experts; shared_experts: mlp.shared_experts; "
        "activation: mlp.experts.act_fn mlp.shared_experts.act_fn; "
        "product: self_attn.o_proj mlp.shared_experts.gate_proj mlp.shared_experts.up_proj "
        "mlp.shared_experts.down_proj"
    ),
}
FLAT = roles(
    "attention core_attention: self_attn; mlp: fc1+fc2; norm: self_attn_layer_norm final_layer_norm; "
    "activation: activation_fn; "
    "product: self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj fc1 fc2"
)
TORCH = roles("attention core_attention: self_attn; mlp: linear1+linear2; norm: norm1 norm2; product: linear1 linear2")
MEGATRON = roles(
    "attention: self_attention; core_attention: self_attention.core_attention; "
    "norm: input_layernorm pre_mlp_layernorm; "
    "inner_norm: self_attention.q_layernorm self_attention.k_layernorm; mlp: mlp; "
    "product: self_attention.linear_qkv self_attention.linear_proj mlp.linear_fc1 mlp.linear_fc2"
)
TITAN = roles(
    "attention core_attention: attention; norm: attention_norm ffn_norm; "
    "product: attention.wq attention.wk attention.wv attention.wo"
)
LOCAL = " ".join(f"mlp.experts.local_experts.{e}.linear_fc{n}" for e in range(4) for n in (1, 2))


def t5_half(path: str, number: int) -> str:
    return " ".join(f"layer.{number}.{path}.{name}" for name in "qkvo")


@dataclass
class Row:
    """What is expected of one architecture.

    Attributes:
        stacks: The layers of each stack, by path.
        layers: Paths of layers with what is in each.
        outside: Roles that are not in a layer.
    """

    stacks: dict[str, int]
    layers: dict[str, dict[str, str]]
    outside: dict[str, str] = field(default_factory=dict)


def decoder(layer: dict[str, str], *, at: str = "model.layers") -> Row:
    """A Hugging Face decoder with Llama's names around the layers."""
    outside = roles("embedding: model.embed_tokens; norm: model.norm; head: lm_head")
    return Row({at: 3}, {f"{at}.1": layer}, outside)


ANATOMY: dict[str, Row] = {
    "gpt2": Row(
        {"transformer.h": 3},
        {
            "transformer.h.2": roles(
                "attention core_attention: attn; mlp: mlp; norm: ln_1 ln_2; activation: mlp.act; "
                "product: attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"
            )
        },
        roles("embedding: transformer.wte transformer.wpe; norm: transformer.ln_f; head: lm_head"),
    ),
    "gpt_neox": Row(
        {"gpt_neox.layers": 3},
        {
            "gpt_neox.layers.0": roles(
                f"attention core_attention: attention; mlp: mlp; norm: {PRE}; activation: mlp.act; "
                "product: attention.query_key_value attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h"
            )
        },
        roles("embedding: gpt_neox.embed_in; norm: gpt_neox.final_layer_norm; head: lm_head"),
    ),
    **dict.fromkeys(["llama", "mistral", "qwen2", "olmo", "lora_llama"], decoder(LLAMA)),
    "qwen3": decoder(LLAMA | roles(f"inner_norm: {QK_NORM}")),
    "gemma2": decoder(GEMMA),
    "gemma3": decoder(GEMMA | roles(f"inner_norm: {QK_NORM}")),
    "mixtral": decoder(MIXTURE),
    "olmoe": decoder(MIXTURE | roles(f"inner_norm: {QK_NORM}")),
    "qwen3_moe": Row(
        {"model.layers": 3},
        {
            "model.layers.0": LLAMA | roles(f"inner_norm: {QK_NORM}"),
            "model.layers.1": MIXTURE | roles(f"inner_norm: {QK_NORM}"),
        },
    ),
    "deepseek_v2": Row({"model.layers": 3}, DEEPSEEK),
    "deepseek_v3": Row({"model.layers": 3}, DEEPSEEK),
    "phi": Row(
        {"model.layers": 3},
        {
            "model.layers.1": roles(
                "attention core_attention: self_attn; mlp: mlp; norm: input_layernorm; "
                "activation: mlp.activation_fn; "
                "product: self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.dense mlp.fc1 mlp.fc2"
            )
        },
    ),
    "opt": Row(
        {"model.decoder.layers": 3},
        {"model.decoder.layers.1": FLAT},
        roles(
            "embedding: model.decoder.embed_tokens model.decoder.embed_positions; "
            "norm: model.decoder.final_layer_norm; head: lm_head"
        ),
    ),
    "falcon": Row(
        {"transformer.h": 3},
        {
            "transformer.h.1": roles(
                "attention core_attention: self_attention; mlp: mlp; norm: input_layernorm; activation: mlp.act; "
                "product: self_attention.query_key_value self_attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h"
            )
        },
    ),
    "mamba": Row(
        {"backbone.layers": 3},
        {
            "backbone.layers.2": roles(
                "mixer: mixer; norm: norm; activation: mixer.act; "
                "product: mixer.conv1d mixer.in_proj mixer.x_proj mixer.dt_proj mixer.out_proj"
            )
        },
        roles("embedding: backbone.embeddings; norm: backbone.norm_f; head: lm_head"),
    ),
    "bert": Row(
        {"bert.encoder.layer": 3},
        {
            "bert.encoder.layer.1": roles(
                "attention: attention; core_attention: attention.self; mlp: intermediate.dense+output.dense; "
                "norm: attention.output.LayerNorm output.LayerNorm; activation: intermediate.intermediate_act_fn; "
                "product: attention.self.query attention.self.key attention.self.value attention.output.dense "
                "intermediate.dense output.dense"
            )
        },
        roles(
            "embedding: bert.embeddings; norm: bert.embeddings.LayerNorm cls.predictions.transform.LayerNorm; head: cls"
        ),
    ),
    "t5": Row(
        {"encoder.block": 3, "decoder.block": 3},
        {
            "encoder.block.0": roles(
                "attention core_attention: layer.0.SelfAttention; mlp: layer.1.DenseReluDense; "
                "norm: layer.0.layer_norm layer.1.layer_norm; activation: layer.1.DenseReluDense.act; "
                f"product: {t5_half('SelfAttention', 0)} layer.1.DenseReluDense.wi_0 layer.1.DenseReluDense.wi_1 "
                "layer.1.DenseReluDense.wo"
            ),
            "decoder.block.2": roles(
                "attention core_attention: layer.0.SelfAttention layer.1.EncDecAttention; "
                "mlp: layer.2.DenseReluDense; norm: layer.0.layer_norm layer.1.layer_norm layer.2.layer_norm; "
                "activation: layer.2.DenseReluDense.act; "
                f"product: {t5_half('SelfAttention', 0)} {t5_half('EncDecAttention', 1)} layer.2.DenseReluDense.wi_0 "
                "layer.2.DenseReluDense.wi_1 layer.2.DenseReluDense.wo"
            ),
        },
        roles(
            "embedding: shared encoder.embed_tokens decoder.embed_tokens; "
            "norm: encoder.final_layer_norm decoder.final_layer_norm; head: lm_head"
        ),
    ),
    "vit": Row(
        {"vit.layers": 3},
        {
            "vit.layers.0": roles(
                "attention core_attention: attention; mlp: mlp; norm: layernorm_before layernorm_after; "
                "activation: mlp.activation_fn; "
                "product: attention.q_proj attention.k_proj attention.v_proj attention.o_proj mlp.fc1 mlp.fc2"
            )
        },
        roles("embedding: vit.embeddings; norm: vit.layernorm; head: classifier"),
    ),
    "whisper": Row(
        {"model.encoder.layers": 3, "model.decoder.layers": 3},
        {
            "model.encoder.layers.1": FLAT,
            "model.decoder.layers.1": FLAT
            | roles(
                "attention core_attention: self_attn encoder_attn; "
                "norm: self_attn_layer_norm encoder_attn_layer_norm final_layer_norm; "
                f"product: {FLAT['product']} encoder_attn.q_proj encoder_attn.k_proj encoder_attn.v_proj "
                "encoder_attn.out_proj"
            ),
        },
        roles(
            "embedding: model.encoder.embed_positions model.decoder.embed_tokens model.decoder.embed_positions; "
            "norm: model.encoder.layer_norm model.decoder.layer_norm; head: proj_out"
        ),
    ),
    "torch_encoder": Row({"layers": 3}, {"layers.1": TORCH}, {}),
    "torch_encoder_prenorm": Row({"layers": 3}, {"layers.1": TORCH}, roles("norm: norm")),
    "torch_decoder": Row(
        {"layers": 3},
        {"layers.1": TORCH | roles("attention core_attention: self_attn multihead_attn; norm: norm1 norm2 norm3")},
    ),
    "handmade_gpt": Row(
        {"h": 3},
        {
            "h.1": roles(
                "attention core_attention: attn; mlp: mlp; norm: ln_1 ln_2; activation: mlp.1; "
                "product: attn.c_attn attn.c_proj mlp.0 mlp.2"
            )
        },
        roles("embedding: wte; norm: ln_f; head: lm_head"),
    ),
    "megatron": Row(
        {"decoder.layers": 3},
        {"decoder.layers.0": MEGATRON},
        roles("embedding: embedding.word_embeddings; norm: decoder.final_layernorm; head: output_layer"),
    ),
    "megatron_moe": Row(
        {"decoder.layers": 3},
        {
            "decoder.layers.0": MEGATRON,
            "decoder.layers.1": {role: paths for role, paths in MEGATRON.items() if role != "mlp"}
            | roles(
                "moe: mlp; router: mlp.router; experts: mlp.experts; shared_experts: mlp.shared_experts; "
                "product: self_attention.linear_qkv self_attention.linear_proj mlp.shared_experts.linear_fc1 "
                f"mlp.shared_experts.linear_fc2 {LOCAL}"
            ),
        },
    ),
    "torchtitan": Row(
        {"layers": 3},
        {
            "layers.2": TITAN
            | roles(f"mlp: feed_forward; product: {TITAN['product']} feed_forward.w1 feed_forward.w2 feed_forward.w3")
        },
        roles("embedding: tok_embeddings; norm: norm; head: output"),
    ),
    "torchtitan_moe": Row(
        {"layers": 3},
        {
            "layers.2": TITAN
            | roles(
                "moe: moe; router: moe.router; experts: moe.experts; shared_experts: moe.shared_expert; "
                f"product: {TITAN['product']} moe.shared_expert.w1 moe.shared_expert.w2 moe.shared_expert.w3"
            )
        },
    ),
    "timm_vit": Row(
        {"blocks": 3},
        {
            "blocks.1": roles(
                "attention core_attention: attn; mlp: mlp; norm: norm1 norm2; inner_norm: attn.q_norm attn.k_norm; "
                "activation: mlp.act; product: attn.qkv attn.proj mlp.fc1 mlp.fc2"
            )
        },
        roles("embedding: patch_embed; norm: norm; head: head"),
    ),
    "convnext": Row(
        {"stages.0.blocks": 2, "stages.1.blocks": 3},
        {"stages.1.blocks.2": roles("mlp: mlp; norm: norm; activation: mlp.act; product: conv_dw mlp.fc1 mlp.fc2")},
        roles("norm: stem.1 stages.1.downsample.0 head.norm; head: head.fc"),
    ),
}
