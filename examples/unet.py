"""A U-Net for diffusion: blocks of unequal size, of which the planner recomputes the few that matter.

    python examples/unet.py unet.svg

A block at full resolution holds many times the bytes of one in the middle. To recompute every block, as a switch does,
pays for all of them. A plan for a budget takes the blocks that free the most for their time: the picture has the same
model with every block recomputed, and with a plan for a budget between that and none.
"""

import sys

import diffusers
import torch
from picture import finish, watch

from torch_recompute import apply, make_plan
from torch_recompute.integrations.huggingface import apply as apply_policy


def main(picture="unet.svg", size=32, channels=32, images=4, device=None):
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=size, layers_per_block=1, block_out_channels=(channels, 2 * channels), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).train()  # fmt: skip
    noisy, noise, times = torch.randn(images, 3, size, size), torch.randn(images, 3, size, size), torch.arange(images)

    def loss(out):
        return torch.nn.functional.mse_loss(out.sample, noise)

    def loss_of(batch):
        return loss(model(*batch))

    batch = (noisy, times)
    plain = watch(model, loss_of, [batch] * 2)
    handle = apply_policy(model, "full")
    every = watch(model, loss_of, [batch] * 2)
    handle.remove()
    budget = (plain.peak + every.peak) // 2
    plan = make_plan(model, batch, budget=budget, loss=loss, optimizer="adamw", hold_output=False, device=device)
    print("recomputed:", ", ".join(path for choice in plan.choices for path in choice.paths))
    apply(model, plan)
    planned = watch(model, loss_of, [batch] * 2)
    runs = {"without recomputation": plain, "with a plan": planned, "every block": every}
    return finish(picture, "U-Net: a budget chooses the blocks that free the most", runs, budget)


if __name__ == "__main__":
    main(*sys.argv[1:])
