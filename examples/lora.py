"""LoRA: a fine-tune in half the memory, and the plan made by one line.

    python examples/lora.py lora.svg

A language model with random weights has adapters of PEFT. Frozen weights have no gradients and no optimizer state, so
nearly all memory of a step is activations, which `auto` lowers to a budget. The loss is the same to the last bit, with
dropout too. For a model of your own, replace the first lines by `from_pretrained(...)`.
"""

import sys

import peft
import torch
import transformers
from picture import finish, watch

from torch_recompute import auto


def main(picture="lora.svg", layers=6, width=256, tokens=256, device=None):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=4, vocab_size=512
    )
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters).train()
    ids = torch.randint(3, 512, (4, tokens))
    batch = {"input_ids": ids, "labels": ids}

    def loss_of(batch):
        return model(**batch).loss

    plain = watch(model, loss_of, [batch] * 2)
    budget = plain.peak // 2
    auto(model, batch, budget=budget, optimizer="adamw", hold_output=False, device=device)
    planned = watch(model, loss_of, [batch] * 2)
    title = "LoRA: one line fits the step into half of its memory"
    return finish(picture, title, {"without recomputation": plain, "with a plan": planned}, budget)


if __name__ == "__main__":
    main(*sys.argv[1:])
