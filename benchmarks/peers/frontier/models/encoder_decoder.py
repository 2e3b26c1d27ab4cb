"""A translator: an encoder whose result every layer of the decoder reads, so that it lives through all of them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from torch_recompute.commands.small_models import VOCABULARY, Attention, TransformerBlock, mlp


class Reading(nn.Module):
    """A layer of the decoder, which reads what the encoder found."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention, self.cross = Attention(width), Attention(width, causal=False)
        self.mlp = mlp(width)
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        """Add what attention, the source and the MLP have to say."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.cross(self.norm2(x), source))
        return x + self.dropout(self.mlp(self.norm3(x)))


class EncoderDecoder(nn.Module):
    """Tokens in, and the loss of saying them again.

    Args:
        layers: Of both halves together.
        width: Of the residual streams.
        tokens: Of a sequence.
    """

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(tokens, width)
        half = max(1, layers // 2)
        self.encoder = nn.ModuleList(TransformerBlock.gpt(width, causal=False) for _ in range(half))
        self.decoder = nn.ModuleList(Reading(width) for _ in range(max(1, layers - half)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of predicting each token from those before it and the whole source."""
        source = x = self.embed(text[:, :-1]) + self.places.weight
        for layer in self.encoder:
            source = layer(source)
        for layer in self.decoder:
            x = layer(x, source)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())

    def stacks(self) -> list[list[nn.Module]]:
        """Both halves."""
        return [list(self.encoder), list(self.decoder)]
