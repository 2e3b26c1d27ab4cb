"""What no recomputation helps against, and what does: the logits.

A loss over a large vocabulary keeps several tensors as wide as the vocabulary alive at once, at the end of the forward,
where everything else that is kept is alive too: the logits, their copy in float32, the logarithm of their softmax, and
in backward their gradients. A plan can free none of them, because the loss uses them at once.
"""

from __future__ import annotations

from ..memory.ledger import Entry

WORTH = 0.1


def advise(activations: list[tuple[Entry, int]], peak_bytes: int, logits: tuple[int, int] | None) -> str:
    """What to say of the loss head's share of the peak; "" where it is small.

    Args:
        activations: The activations alive at the peak, and their bytes.
        peak_bytes: The peak.
        logits: The number of the operation that made the logits, and how wide they are.
    """
    if logits is None:
        return ""
    since, width = logits
    wide = [
        nbytes
        for entry, nbytes in activations
        if entry.place.event >= since and entry.place.shape and entry.place.shape[-1] == width
    ]
    share = sum(wide) / peak_bytes if peak_bytes else 0.0
    if share < WORTH:
        return ""
    return (
        f"{share:.0%} of the peak are {len(wide)} tensors of the loss as wide as the logits ({width:,}), "
        f"{sum(wide):,} bytes, which no recomputation of layers frees. Compute the head and the loss for some tokens "
        "at a time: recompute(head_and_loss, tiles=8)(hidden, labels), where head_and_loss returns a loss per token."
    )
