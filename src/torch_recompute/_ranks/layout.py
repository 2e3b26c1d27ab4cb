"""How a step is spread over ranks: the numbers that a launcher is given, checked, and what follows from them.

The words are Megatron's. A step has `batch` sequences; each of `dp` replicas takes its share in microbatches of `mbs`.
A replica is a pipeline of `pp` ranks, each of which holds `vpp` chunks of layers, and each place in it is a group of
`tp` ranks that hold a part of every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import errors


@dataclass(frozen=True)
class Layout:
    """How a step is spread over ranks.

    Attributes:
        tp: Ranks that share each layer (tensor parallel).
        pp: Ranks that share the layers (pipeline parallel).
        vpp: Chunks of layers on each of these (interleaved 1F1B); 1 for 1F1B.
        dp: Replicas (data parallel), over which the optimizer's state is sharded.
        mbs: Sequences in a microbatch.
        sequence_parallel: Whether norms and residuals hold a share of the tokens each, instead of all.
        batch: Sequences in a step, over all replicas; None for as many as give `microbatches` their default, one
            without a pipeline and two per rank with one.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    mbs: int = 1
    sequence_parallel: bool = False
    batch: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "dp", "mbs"):
            value = getattr(self, name)
            if value < 1:
                raise errors.ArgumentError(errors.not_a_size(f"--{name}", value))
        if self.vpp > 1 and self.pp == 1:
            raise errors.ArgumentError(errors.goes_with("--vpp", "--pp"))
        if self.sequence_parallel and self.tp == 1:
            raise errors.ArgumentError(errors.goes_with("--sequence-parallel", "--tp"))
        share = self.dp * self.mbs
        if self.batch is not None and (self.batch < share or self.batch % share):
            raise errors.ArgumentError(
                f"--batch is {self.batch}, which {self.dp} replicas (--dp) cannot take in microbatches of {self.mbs} "
                f"(--mbs). Write a multiple of {self.dp * self.mbs}."
            )
        if self.vpp > 1 and self.microbatches % self.pp:
            raise errors.ArgumentError(
                f"--vpp: interleaved 1F1B takes the microbatches in turns of the pipeline's {self.pp} ranks, and "
                f"{self.microbatches} are no multiple of it. Write a --batch that is a multiple of {self.pp * share}."
            )

    @property
    def microbatches(self) -> int:
        """Of one replica in a step."""
        if self.batch is None:
            return 2 * self.pp if self.pp > 1 else 1
        return self.batch // (self.dp * self.mbs)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.tp * self.pp * self.dp

    def chunks(self, layers: int) -> list[list[list[int]]]:
        """The numbers of the layers in each chunk of each pipeline rank.

        Where they do not divide evenly, the first chunk and the last, which also hold the embedding and the head, are
        the last to get one more.
        """
        count = self.pp * self.vpp
        if layers < count:
            raise errors.ArgumentError(
                f"--pp {self.pp} --vpp {self.vpp} are {self.pp * self.vpp} parts, and the model has {layers} "
                "layers. Write fewer."
            )
        sizes = [layers // count] * count
        for place in [*range(1, count - 1), 0, count - 1][: layers % count]:
            sizes[place] += 1
        starts = [sum(sizes[:place]) for place in range(count)]
        chunks = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
        return [chunks[rank :: self.pp] for rank in range(self.pp)]

    def as_data(self) -> dict[str, Any]:
        """The layout as plain data."""
        return {
            "tp": self.tp,
            "pp": self.pp,
            "vpp": self.vpp,
            "dp": self.dp,
            "mbs": self.mbs,
            "sequence_parallel": self.sequence_parallel,
            "microbatches": self.microbatches,
        }

    def __str__(self) -> str:
        sequence = " with sequence parallel" if self.sequence_parallel else ""
        chunks = f" with {self.vpp} chunks each" if self.vpp > 1 else ""
        return (
            f"tensor parallel {self.tp}{sequence}, pipeline {self.pp}{chunks}, data parallel {self.dp}: {self.ranks} "
            f"ranks; {self.microbatches} microbatches of {self.mbs}"
        )
