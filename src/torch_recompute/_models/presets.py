"""Models that have a name: their published sizes, as fields of a configuration of transformers.

What does not change a shape (the base of rotary embeddings, token ids) is left out. `parameters` is the published
count, which the tests compare with the model that is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Preset:
    """A model by its size.

    Attributes:
        kind: The `model_type` of its configuration.
        cls: The class in transformers.
        parameters: How many it has.
        fields: Of its configuration, where they are not the default of that kind.
    """

    kind: str
    cls: str
    parameters: int
    fields: Mapping[str, Any]


def _preset(kind: str, cls: str, parameters: int, **fields: Any) -> Preset:
    return Preset(kind, cls, parameters, MappingProxyType(fields))


def _llama3(parameters: int, hidden: int, intermediate: int, layers: int, heads: int, positions: int) -> Preset:
    return _preset(
        "llama",
        "LlamaForCausalLM",
        parameters,
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=positions,
    )


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "llama3-8b": _llama3(8_030_261_248, 4096, 14_336, 32, 32, 8192),
        "llama3-70b": _llama3(70_553_706_496, 8192, 28_672, 80, 64, 8192),
        "llama3-405b": _llama3(405_853_388_800, 16_384, 53_248, 126, 128, 131_072),
        "mixtral-8x7b": _preset(
            "mixtral",
            "MixtralForCausalLM",
            46_702_792_704,
            vocab_size=32_000,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=32_768,
            tie_word_embeddings=False,
        ),
        "qwen3-30b-a3b": _preset(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            30_532_122_624,
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            max_position_embeddings=40_960,
            tie_word_embeddings=False,
        ),
        "deepseek-v3": _preset(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            671_026_404_352,
            vocab_size=129_280,
            hidden_size=7168,
            intermediate_size=18_432,
            moe_intermediate_size=2048,
            num_hidden_layers=61,
            num_attention_heads=128,
            num_key_value_heads=128,
            n_shared_experts=1,
            n_routed_experts=256,
            num_experts_per_tok=8,
            first_k_dense_replace=3,
            kv_lora_rank=512,
            q_lora_rank=1536,
            qk_rope_head_dim=64,
            v_head_dim=128,
            qk_nope_head_dim=128,
            n_group=8,
            topk_group=4,
            max_position_embeddings=163_840,
            num_nextn_predict_layers=0,
            tie_word_embeddings=False,
        ),
        "gpt2-xl": _preset(
            "gpt2", "GPT2LMHeadModel", 1_557_611_200, n_embd=1600, n_layer=48, n_head=25, n_positions=1024
        ),
        "vit-h": _preset(
            "vit",
            "ViTForImageClassification",
            632_045_800,
            hidden_size=1280,
            intermediate_size=5120,
            num_hidden_layers=32,
            num_attention_heads=16,
            patch_size=14,
            image_size=224,
            num_labels=1000,
        ),
    }
)
