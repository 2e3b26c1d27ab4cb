"""Long context: when every layer is recomputed, one wide tensor is the peak; tiles compute it part by part.

    python examples/long_context.py long_context.svg

With layers recomputed, what is left is the inside of one layer, and the logits of the loss: tokens x vocabulary, a few
times. `recompute(fn, tiles=8)` cuts the tokens into eight parts and makes a region of each, in forward and in backward.
It is for functions that treat each token alone, such as a feed-forward part or the head with its loss.
"""

import sys

import torch
from picture import finish, watch
from torch import nn

from torch_recompute import recompute


class Layer(nn.Module):
    def __init__(self, width, tiles):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.feed_forward = recompute(self.mlp, tiles=tiles) if tiles else self.mlp

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


def run(layers, width, tokens, vocabulary, recomputed, tiles=0):
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(vocabulary, width), "head": nn.Linear(width, vocabulary)})
    model["layers"] = nn.ModuleList(Layer(width, tiles) for _ in range(layers))
    ids = torch.randint(vocabulary, (1, tokens))

    def head_and_loss(x, labels):  # a loss for each token
        return nn.functional.cross_entropy(model["head"](x).transpose(1, 2), labels, reduction="none")

    def loss_of(ids):
        x = model["embed"](ids)
        for layer in model["layers"]:
            x = (recompute(layer) if recomputed else layer)(x)
        return (recompute(head_and_loss, tiles=tiles) if tiles else head_and_loss)(x, ids).mean()

    return watch(model, loss_of, [ids] * 2)


def main(picture="long_context.svg", layers=4, width=64, tokens=2048, vocabulary=2048):
    sizes = layers, width, tokens, vocabulary
    runs = {
        "without recomputation": run(*sizes, False),
        "layers recomputed": run(*sizes, True),
        "and tiles": run(*sizes, True, 8),
    }
    return finish(picture, "Long context: tiles for the feed-forward parts and the loss", runs)


if __name__ == "__main__":
    main(*sys.argv[1:])
