"""Elastic regions: batches of varied length under one limit, and only the long ones pay.

    python examples/elastic.py elastic.svg

One text in a few is long. To recompute every layer makes all steps slower for its sake. An elastic region keeps its
activations while memory lasts, and is recomputed where it does not. `memory.report()` says how often each layer was
replayed. Losses are those of plain training, to the last bit.
"""

import sys

import torch
from picture import finish, watch
from torch import nn

from torch_recompute import Elastic, recompute
from torch_recompute.commands.demo_elastic import MeasuredMeter


def main(picture="elastic.svg", layers=6, width=64, lengths=(64, 64, 96, 512, 64, 160, 384, 96)):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True) for _ in range(layers))
    )
    batches = [torch.randn(4, length, width) for length in lengths]

    def plain_loss(x):
        return model(x).square().mean()

    def elastic_loss(x):
        for layer in elastic:
            x = layer(x)
        return x.square().mean()

    plain = watch(model, plain_loss, batches)
    meter = (
        MeasuredMeter()
    )  # what is alive by the count of the picture; on a GPU the allocator says it, without a meter
    memory = Elastic(int(0.6 * plain.peak), meter=meter)
    elastic = [recompute(layer, elastic=memory) for layer in model]
    saved = watch(model, elastic_loss, batches, meter)
    print(memory.report())
    title = f"Elastic regions: texts of {min(lengths)} to {max(lengths)} tokens, and only long ones are recomputed"
    return finish(
        picture, title, {"without recomputation": plain, "elastic": saved}, memory.limit, f"{len(lengths) - 1} steps"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
