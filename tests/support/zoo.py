"""Small copies of the models that people train, for every test that must hold on all of them.

`ZOO` maps a name to a function that returns a model and the keyword arguments of one call:

    model, inputs = build("llama")
    scalar_loss(model(**inputs)).backward()

Models are real library code (Hugging Face transformers, `torch.nn`) with tiny configurations and random weights, or,
where a library cannot be installed here or has no small model, a few lines by hand with that library's module names:
`zoo_handmade.py`. All are float32 on the CPU, in training mode, with dropout on wherever the architecture has
it, so that a replay which draws other random numbers shows. No cache of keys and values is asked for.

`each_row` gives a test the fixture `row` of each model (`zoo_rows.py`): of `FEW` in every run, of the others in
`make test-all`. Together the few have every role, label and kind of layer that the zoo has.

transformers is imported inside the functions only: a machine without it (Python 3.10) skips those rows with a reason.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from support.zoo_handmade import ConvNeXt, DecoderOnly, MegatronGPT, TitanDecoder, VisionTransformer, with_lora
from torch_recompute import Plan, RecomputeConfig
from torch_recompute.plan.labels import matching
from torch_recompute.plan.units import find_units

BATCH, TOKENS, WIDTH, HEADS, LAYERS, VOCABULARY = 2, 8, 32, 4, 3, 64
Built = tuple[nn.Module, dict[str, Any]]


def _ids(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape or (BATCH, TOKENS))


def _causal(config: str, **fields: Any) -> Built:
    """A Hugging Face language model from the name of its configuration class and the fields that differ."""
    import transformers

    model_type = getattr(transformers, config)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "attention_dropout": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    model = transformers.AutoModelForCausalLM.from_config(model_type(**{**common, **fields}))
    ids = _ids()
    return model, {"input_ids": ids, "labels": ids}


MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "output_router_logits": True}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
}


def bert() -> Built:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=32,
    )
    ids = _ids()
    return transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": ids}


def t5() -> Built:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_ff=2 * WIDTH,
        d_kv=8,
        num_layers=LAYERS,
        num_heads=HEADS,
        use_cache=False,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), {"input_ids": _ids(), "labels": _ids(BATCH, 6)}


def vit() -> Built:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=16,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    images = torch.randn(BATCH, 3, 16, 16)
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": torch.tensor([1, 4])}


def whisper() -> Built:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        num_mel_bins=8,
        max_source_positions=TOKENS,
        max_target_positions=16,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    features = torch.randn(BATCH, 8, 2 * TOKENS)
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": features, "labels": _ids(BATCH, 6)}


def lora_llama() -> Built:
    """Llama with the adapters of PEFT's shape on its projections; everything else is frozen."""
    model, inputs = _causal("LlamaConfig")
    return with_lora(model, ("q_proj", "v_proj", "down_proj")), inputs


def torch_encoder() -> Built:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS), {"src": torch.randn(BATCH, TOKENS, WIDTH)}


def torch_encoder_prenorm() -> Built:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    return model, {"src": torch.randn(BATCH, TOKENS, WIDTH)}


def torch_decoder() -> Built:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True)
    inputs = {"tgt": torch.randn(BATCH, 6, WIDTH), "memory": torch.randn(BATCH, TOKENS, WIDTH)}
    return nn.TransformerDecoder(layer, LAYERS), inputs


LIBRARY: dict[str, Callable[[], Built]] = {
    "gpt2": lambda: _causal("GPT2Config", n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=32),
    "gpt_neox": lambda: _causal("GPTNeoXConfig", hidden_dropout=0.1),
    "llama": lambda: _causal("LlamaConfig"),
    "mistral": lambda: _causal("MistralConfig"),
    "qwen2": lambda: _causal("Qwen2Config"),
    "qwen3": lambda: _causal("Qwen3Config", head_dim=8),
    "gemma2": lambda: _causal("Gemma2Config", head_dim=8),
    "gemma3": lambda: _causal("Gemma3TextConfig", head_dim=8),
    "phi": lambda: _causal("PhiConfig", resid_pdrop=0.1, embd_pdrop=0.1),
    "opt": lambda: _causal("OPTConfig", ffn_dim=2 * WIDTH, dropout=0.1, word_embed_proj_dim=WIDTH),
    "falcon": lambda: _causal("FalconConfig", hidden_dropout=0.1, ffn_hidden_size=2 * WIDTH),
    "mixtral": lambda: _causal("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    "qwen3_moe": lambda: _causal("Qwen3MoeConfig", **MIXTURE, num_experts=4, head_dim=8, mlp_only_layers=[0]),
    "deepseek_v2": lambda: _causal("DeepseekV2Config", **LATENT),
    "deepseek_v3": lambda: _causal("DeepseekV3Config", **LATENT, n_group=2, topk_group=1),
    "olmo": lambda: _causal("OlmoConfig"),
    "olmoe": lambda: _causal("OlmoeConfig", num_experts=4, num_experts_per_tok=2, output_router_logits=True),
    "mamba": lambda: _causal("MambaConfig", state_size=8),
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "whisper": whisper,
    "lora_llama": lora_llama,
}
PLAIN: dict[str, Callable[[], Built]] = {
    "torch_encoder": torch_encoder,
    "torch_encoder_prenorm": torch_encoder_prenorm,
    "torch_decoder": torch_decoder,
    "handmade_gpt": lambda: (DecoderOnly(VOCABULARY, WIDTH, HEADS, LAYERS), {"ids": _ids()}),
    "megatron": lambda: (MegatronGPT(VOCABULARY, WIDTH, HEADS, LAYERS), {"ids": _ids()}),
    "megatron_moe": lambda: (MegatronGPT(VOCABULARY, WIDTH, HEADS, LAYERS, experts=4, shared=True), {"ids": _ids()}),
    "torchtitan": lambda: (TitanDecoder(VOCABULARY, WIDTH, HEADS, LAYERS), {"tokens": _ids()}),
    "torchtitan_moe": lambda: (TitanDecoder(VOCABULARY, WIDTH, HEADS, LAYERS, experts=4), {"tokens": _ids()}),
    "timm_vit": lambda: (VisionTransformer(WIDTH, HEADS, LAYERS), {"x": torch.randn(BATCH, 3, 16, 16)}),
    "convnext": lambda: (ConvNeXt((8, 16), (2, 3)), {"x": torch.randn(BATCH, 3, 16, 16)}),
}
ZOO = {**LIBRARY, **PLAIN}
FEW = (
    *("mixtral", "qwen3_moe", "deepseek_v3", "mamba", "whisper", "lora_llama"),
    *("torch_decoder", "megatron_moe", "torchtitan_moe", "convnext"),
)


def row_of(name: str) -> Any:
    """The parameter for a row; only the tests of a few rows are in the fast tier."""
    return pytest.param(name, id=name, marks=[] if name in FEW else [pytest.mark.nightly])


each_row = pytest.mark.parametrize("row", [row_of(name) for name in ZOO], indirect=True)


def build(name: str, seed: int = 0) -> Built:
    """The model in training mode and its inputs, the same every time; the caller's random numbers are left alone.

    A test that asks for a model of transformers where that is not installed is skipped.
    """
    if name in LIBRARY and importlib.util.find_spec("transformers") is None:
        pytest.skip(f"{name} is a model of transformers, which is not installed (it needs Python 3.11)")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, inputs = ZOO[name]()
    return model.train(), inputs


def mean_loss(output: Any) -> Tensor:
    """The output's own loss, or else the mean of its first floating tensor."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point]
    return leaves[0].mean()


def scalar_loss(output: Any) -> Tensor:
    """The output's own loss, or else a scalar that depends on every entry of its first floating tensor."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    tensor = output[0] if isinstance(output, tuple) else output
    weights = torch.linspace(-1, 1, tensor.numel(), dtype=tensor.dtype).view_as(tensor)
    return (tensor * weights).sum()


def step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """One step from fixed random numbers: its loss, the gradients, and the buffers afterwards."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    loss = scalar_loss(model(**inputs))
    loss.backward()
    found = {"loss": loss.detach()}
    found.update((name, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None)
    found.update((name, b.clone()) for name, b in model.named_buffers())
    return found


FULL = {
    "uniform 1": {"recompute_method": "uniform", "recompute_num_layers": 1},
    "uniform 2": {"recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_method": "block", "recompute_num_layers": 2},
}


def plans(model: nn.Module) -> dict[str, Plan]:
    """Every plan that fits the model, by name."""
    found: dict[str, Plan] = {}
    for name, fields in FULL.items():
        found[name] = RecomputeConfig(recompute_granularity="full", **fields).plan(model)
    labels = [label for label, count in matching(find_units(model)).items() if count]
    for label in labels:
        found[label] = RecomputeConfig(recompute_granularity="selective", recompute_modules=[label]).plan(model)
    if len(labels) > 1:
        found["all labels"] = RecomputeConfig(recompute_granularity="selective", recompute_modules=labels).plan(model)
    return found
