"""The ranks of a training run, as plain data: how many there are of each kind, and which of them share what.

    Ranks(tp=8, sequence_parallel=True, pp=4, vpp=5, dp=2)     Megatron's words
    Ranks(fsdp=8)                                              FSDP2, or ZeRO-3
    Ranks(dp=4, fsdp=8)                                        HSDP: 4 replicas of 8 ranks that share all weights

The batch is shared by `dp x fsdp` replicas, each of `tp x cp x pp` ranks. What a replica has of weights, gradients and
optimizer states is shared further (`zero`): by ZeRO-1 the states over the ranks of `dp x cp`, by ZeRO-2 and 3 all of
them over those of `fsdp x cp`. The ranks that a group needs are counted here and nowhere else; whether a model's sizes
can be shared so is said where the model is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .. import errors
from ..errors.text import counted

SIZES = ("tp", "pp", "vpp", "cp", "ep", "dp", "fsdp")
KINDS_OF_CP = ("all-gather", "ring", "ulysses")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a training run.

    Attributes:
        tp: Ranks that share each layer (tensor parallel).
        sequence_parallel: Whether norms and residuals hold a share of the tokens each, instead of all.
        pp: Ranks that share the layers (pipeline parallel).
        vpp: Chunks of layers on each of these (interleaved 1F1B); 1 for 1F1B.
        cp: Ranks that share the tokens of each sequence (context parallel); weights, gradients and states are shared
            over these as over the ranks with batches of their own.
        ep: Ranks that share the experts of each mixture (expert parallel). They are ranks of `dp`, `fsdp` and `cp`, and
            with fewer of `etp` of `tp`; of these every `ep`-th has the same experts.
        etp: Ranks that share each expert (expert tensor parallel); by default those of `tp`. With fewer, a rank's
            experts are wider and take its own share of the tokens, which needs `sequence_parallel`.
        dp: Replicas (data parallel), each with batches of its own.
        fsdp: Ranks with batches of their own that share weights, gradients and states (`fully_shard`).
        zero: What ranks with batches of their own share: 0 nothing, 1 the optimizer's states, 2 gradients and states
            (weights are whole from forward to backward: `reshard_after_forward=False`), 3 weights as well. By default
            3 with `fsdp`, and 2 with `fsdp` in a pipeline, else 1; 2 and 3 with `dp` alone are `fsdp` in its place.
        cp_kind: How attention sees the others' tokens: by an "all-gather" of keys and values, by a "ring" in which
            their blocks go round, or by "ulysses", which exchanges tokens for heads.
        imbalance: How many times as many tokens as with perfect balance the rank receives whose experts are asked the
            most; that rank is the one that is planned.
        param_dtype: With `fsdp`, the type of gathered weights and of what is computed, as "bfloat16"; "" for that of
            the model's weights. It is that of `MixedPrecisionPolicy`, as the next.
        reduce_dtype: The type in which gradients are reduced, and in a pipeline added up; "" for that in which they are
            computed.
        on_host: Whether shards of weights, gradients and states are in host memory (FSDP2's `CPUOffloadPolicy`,
            ZeRO-3's offload), also those of one rank alone.

    Raises:
        ArgumentError: A size is none, or one goes without another that it needs.
    """

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    fsdp: int = 1
    zero: int | None = None
    cp_kind: str = "all-gather"
    imbalance: float = 1.0
    param_dtype: str = ""
    reduce_dtype: str = ""
    on_host: bool = False

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise errors.ArgumentError(errors.not_a_size(f"--{name}", value))
        if self.vpp > 1 and self.pp == 1:
            raise errors.ArgumentError(errors.goes_with("--vpp", "--pp"))
        if self.sequence_parallel and self.tp == 1:
            raise errors.ArgumentError(errors.goes_with("--sequence-parallel", "--tp"))
        self._check_experts()
        if not self.imbalance >= 1:
            raise errors.ArgumentError(
                f"--imbalance is {self.imbalance}: the tokens of the rank that receives the most, over those of "
                "perfect balance. Write 1 or more."
            )
        if self.cp_kind not in KINDS_OF_CP:
            raise errors.ArgumentError(f"--cp-kind is {self.cp_kind!r}; expected {', '.join(KINDS_OF_CP)}.")
        if self.on_host and self.pp > 1:
            raise errors.ArgumentError(
                f"--weights-on-host does not go with --pp {self.pp}: stages of a pipeline are planned with weights on "
                "the device. Leave one of them out."
            )
        allowed = (0, 1, 2, 3) if self.fsdp == 1 and not self.on_host else (2, 3)
        if self.zero is not None and self.zero not in allowed:
            raise errors.ArgumentError(
                f"--zero is {self.zero!r}; expected {', '.join(map(str, allowed[:-1]))} or {allowed[-1]}"
                f"{', since gradients and states are sharded at least' if len(allowed) == 2 else ''}. Write "
                "--dp 8 --zero 1 for ranks that share the optimizer's states alone."
            )
        self._check_words()

    def _check_words(self) -> None:
        """Refuses what says how ranks share something that none shares."""
        goes = ("cp_kind", "cp", self.cp > 1), ("imbalance", "ep", self.ep > 1)
        adds_up = self.fully_sharded or self.pp > 1  # gradients of several microbatches
        goes += ("param_dtype", "fsdp", self.fully_sharded), ("reduce_dtype", "fsdp or --pp", adds_up)
        goes += (("zero", "dp", self.on_host or self.batches * self.cp > 1),)
        for name, other, there in goes:
            if getattr(self, name) not in (getattr(Ranks, name), 0) and not there:
                raise errors.ArgumentError(errors.goes_with(f"--{name.replace('_', '-')}", f"--{other}"))

    def _check_experts(self) -> None:
        etp = self.expert_tp
        if type(etp) is not int or etp < 1 or self.tp % etp:
            raise errors.ArgumentError(
                f"--etp is {self.etp}, and an expert is shared by ranks of --tp, which are {self.tp}; {self.etp} does "
                f"not divide that. Write --etp {those_that_fit(range(1, self.tp + 1), self.tp)}."
            )
        if etp < self.tp and not self.sequence_parallel:
            raise errors.ArgumentError(
                f"--etp is {etp} and --tp is {self.tp}: experts that fewer ranks share take each rank's own tokens, "
                "and without --sequence-parallel all of these have the same ones. Write --sequence-parallel as well."
            )
        sharing = self.expert_ranks
        if sharing % self.ep:
            raise errors.ArgumentError(
                f"--ep is {self.ep}, and experts are shared by the ranks of --dp, --fsdp and --cp, and of --tp over "
                f"--etp, which are {sharing}; {self.ep} does not divide that. Write --ep "
                f"{those_that_fit(range(1, sharing + 1), sharing)}."
            )

    @property
    def expert_tp(self) -> int:
        """The number of ranks that share each expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def shares_experts(self) -> bool:
        """Whether experts are shared otherwise than layers are."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def expert_ranks(self) -> int:
        """The number of ranks of one stage of a pipeline, each group that shares an expert counted as one."""
        return self.batches * self.cp * self.tp // self.expert_tp

    @property
    def expert_shards(self) -> int:
        """The number of ranks that share the weights of an expert which they all have; 1 where they are whole."""
        return self.shards * self.tp // self.expert_tp // self.ep if self.fully_sharded else 1

    @property
    def fully_sharded(self) -> bool:
        """Whether weights, gradients and states are shared by ranks with batches of their own."""
        return self.fsdp > 1 or self.on_host or (self.dp * self.cp > 1 and self.zero in (2, 3))

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered weights stay until backward: with `zero` 2, and unless `zero` is 3 in a pipeline.

        There a layer would be gathered again for each microbatch; torchtitan keeps them too.
        """
        return self.zero == 2 or (self.zero is None and self.pp > 1)

    @property
    def shards(self) -> int:
        """The number of ranks that share weights, gradients and states; 1 where they are whole."""
        return (self.fsdp if self.fsdp > 1 else self.dp) * self.cp if self.fully_sharded else 1

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same shard."""
        return self.dp if self.fsdp > 1 or not self.fully_sharded else 1

    @property
    def state_shards(self) -> int:
        """The number of ranks that share the optimizer's states."""
        return self.shards if self.fully_sharded else 1 if self.zero == 0 else self.dp * self.cp

    @property
    def in_buckets(self) -> bool:
        """Whether DDP reduces the gradients, in buckets that are there throughout: replicas that share nothing."""
        return self.zero == 0 and self.dp > 1 and not self.shares_experts

    def copies_of(self, weight: object) -> int:
        """The number of ranks with the same weight, where weights are whole: fewer of an expert's that is shared."""
        of_experts = not getattr(weight, "allreduce", True)
        return self.expert_ranks // self.ep if of_experts else self.batches * self.cp

    def group(self, word: str, size: int) -> str:
        """The name of a group of ranks for collectives: what it is for, in how many ranks in a row it lies, its size.

        Ranks are numbered as Megatron and torchtitan do it: those of `tp` are next to each other, then those of `cp`,
        of experts and shards, of replicas, of the pipeline.
        """
        spans = {"context": self.cp, "experts": self.ep, "shard": self.shards, "replica": self.shards * self.replicas}
        return f"{word}-{self.tp * spans[word]}-{size}"

    @property
    def divides_tokens(self) -> int:
        """The number that divides the tokens of a sequence, so that ranks can share them."""
        return math.lcm(self.tp if self.sequence_parallel else 1, 2 * self.cp if self.cp > 1 else 1)

    @property
    def batches(self) -> int:
        """The number of ranks with a batch of their own."""
        return self.dp * self.fsdp

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.pp * self.batches

    def as_data(self) -> dict[str, Any]:
        """The ranks as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        """The ranks in words, those of one alone left out."""
        sequence = " with sequence parallel" if self.sequence_parallel else ""
        chunks = f" with {self.vpp} chunks each" if self.vpp > 1 else ""
        parts = [
            f"tensor parallel {self.tp}{sequence}" if self.tp > 1 else "",
            f"pipeline {self.pp}{chunks}" if self.pp > 1 else "",
            f"expert parallel {self.ep}{f', imbalance {self.imbalance:g}' if self.imbalance > 1 else ''}"
            if self.ep > 1
            else "",
            f"expert tensor parallel {self.expert_tp}" if self.expert_tp != self.tp else "",
            f"context parallel {self.cp} by {self.cp_kind}" if self.cp > 1 else "",
            f"fully sharded over {self.shards}{', whole from forward to backward' if self.keeps_gathered else ''}"
            if self.fully_sharded
            else "",
            "shards in host memory" if self.on_host else "",
            f"data parallel {self.replicas}" if self.replicas > 1 else "",
        ]
        return ": ".join(filter(None, [", ".join(filter(None, parts)), counted(self.world, "rank")]))


def those_that_fit(numbers: Iterable[int], *sizes: int) -> str:
    """Lists the numbers of ranks that divide all sizes, in words."""
    fitting = [str(number) for number in numbers if all(size % number == 0 for size in sizes)]
    return ", ".join(fitting if len(fitting) < 6 else [*fitting[:3], "...", fitting[-1]])


def size_of(group: str) -> int:
    """The number of ranks in a group that `Ranks.group` has named."""
    return int(group.rpartition("-")[2])
