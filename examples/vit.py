"""A vision transformer: a plan made first, read, and then applied.

    python examples/vit.py vit.svg

`make_plan` changes nothing. It says which layers it recomputes, what that frees and what it costs. A budget between 0
and 1 is a share of the activations: 0 is the least that is possible, 1 is none recomputed. `handle.remove()` takes the
plan out again. The loss is one of your own, from the model's output to a number.
"""

import sys

import torch
import transformers
from picture import finish, watch

from torch_recompute import apply, make_plan


def main(picture="vit.svg", layers=6, width=192, images=16, device=None):
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=3,
            image_size=64, patch_size=8, num_labels=10,
        )
    ).train()  # fmt: skip
    batch, labels = torch.randn(images, 3, 64, 64), torch.randint(10, (images,))

    def loss(out):
        return torch.nn.functional.cross_entropy(out.logits, labels)

    def loss_of(batch):
        return loss(model(batch))

    plain = watch(model, loss_of, [batch] * 2)
    plan = make_plan(model, batch, budget=0.3, loss=loss, optimizer="adamw", hold_output=False, device=device)
    print(plan)
    handle = apply(model, plan)
    planned = watch(model, loss_of, [batch] * 2)
    handle.remove()
    title = "Vision transformer: a budget of 0.3 of the activations"
    return finish(picture, title, {"without recomputation": plain, "with a plan": planned}, plan.predicted_peak_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
