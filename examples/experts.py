"""A mixture of experts: a replay must send each token to the expert that the forward chose.

    python examples/experts.py experts.svg

Where two scores are nearly equal, a sum in another order sends a token elsewhere in the replay, and its gradient is
wrong. `audit` counts the layers where that happens: it runs each again with its inputs off by a hundredth. A `Choice`
with `carry=True` keeps the router's choice, a few bytes per token, and then it happens in none. Plans from `auto` and
`make_plan` do that by themselves.
"""

import sys

import torch
import transformers
from picture import finish, watch

from torch_recompute import Choice, Plan, apply, audit


def main(picture="experts.svg", layers=4, width=128, tokens=128):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).train()
    ids = torch.randint(3, 256, (4, tokens))
    batch = {"input_ids": ids, "labels": ids}

    def loss_of(batch):
        return model(**batch).loss

    plain = watch(model, loss_of, [batch] * 2)
    for carry in (False, True):
        handle = apply(model, Plan(tuple(Choice((f"model.layers.{i}",), carry=carry) for i in range(layers))))
        flips = [row for row in audit(model, batch, perturb=0.01).rows if row.kind == "flips"]
        print(f"carry={carry}: tokens change their expert in {len(flips)} of {layers} layers")
        if not carry:
            handle.remove()
    recomputed = watch(model, loss_of, [batch] * 2)
    title = "Mixture of experts: layers recomputed, each token sent where the forward sent it"
    return finish(picture, title, {"without recomputation": plain, "layers recomputed": recomputed})


if __name__ == "__main__":
    main(*sys.argv[1:])
