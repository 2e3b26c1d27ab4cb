"""The Trainer with a plan on two processes, under DDP and FSDP2: the losses and weights of training without a plan.

One pair of processes (gloo, CPU) is started and runs every case; what they found is compared here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distributed.ranks import free_port

pytest.importorskip("transformers", reason="transformers is not installed (it needs Python 3.11)")
pytest.importorskip("accelerate", reason="accelerate is not installed (the Trainer needs it)")

pytestmark = pytest.mark.nightly

RANKS, STEPS, LAYERS = 2, 2, 3
FOLDER = Path(__file__).parents[1]
SHARDED = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
    },
}
RUNS: dict[str, tuple[dict[str, Any], str | None]] = {
    "ddp": ({}, None),
    "ddp, full": ({"activation_checkpointing": True}, "full"),
    "ddp, parts": ({}, "core_attn,mlp"),
    "fsdp2": (SHARDED, None),
    "fsdp2, full": (SHARDED, "full"),
}


def one_rank(out: str) -> None:
    """Everything in RUNS on this rank; rank 0 writes what came out."""
    import warnings

    import torch
    import transformers
    from accelerate.state import AcceleratorState, DistributedType, PartialState
    from torch import nn

    from support.zoo import build
    from torch_recompute import measure
    from torch_recompute.integrations.huggingface import RecomputeCallback, apply

    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    ids = torch.randint(3, 64, (16, 32), generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {}
    for way, (settings, policy) in RUNS.items():
        model, _ = build("llama")
        callbacks = [] if policy is None else [RecomputeCallback(apply(model, policy), peak=False)]
        runs = [0]

        def count(*_: Any, runs: list[int] = runs) -> None:
            runs[0] += 1

        for layer in model.model.layers:
            layer.self_attn.q_proj.register_forward_pre_hook(count)
        arguments = transformers.TrainingArguments(
            output_dir=str(Path(out).parent), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2,
            logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, seed=7,
            dataloader_pin_memory=False, ddp_timeout=60, **settings,
        )  # fmt: skip
        AcceleratorState._reset_state()
        # Accelerate turns to FSDP on accelerators only; the rest of its path runs on the CPU as well.
        kind = DistributedType.MULTI_HPU if "fsdp" in settings else DistributedType.MULTI_CPU
        PartialState._shared_state["distributed_type"] = kind
        data = [{"input_ids": x, "labels": x} for x in ids]
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        with measure(model) as memory:
            trainer.train()
        wrapper: nn.Module = trainer.model_wrapped
        whole = [getattr(p.detach(), "full_tensor", p.detach)() for p in wrapper.parameters()]
        found[way] = {
            "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
            "norm": sum(float(p.double().square().sum()) for p in whole).hex(),
            "runs": runs[0],
            "peak": memory.peak_bytes,
            "kind": type(wrapper).__name__,
        }
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the two processes found, by way and policy."""
    out = tmp_path_factory.mktemp("ranks") / "found.json"
    shared = {
        **os.environ, "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path]),
    }  # fmt: skip
    command = [sys.executable, "-c", f"from integrations.test_trainer_on_ranks import one_rank; one_rank({str(out)!r})"]
    ranks = [
        subprocess.Popen(
            command, env={**shared, "RANK": str(i), "LOCAL_RANK": str(i)}, cwd=out.parent,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(RANKS)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(text[-3000:] for text in said)
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize("way", [way for way, (_, policy) in RUNS.items() if policy is not None])
def test_training_is_that_without_a_plan(found: dict[str, Any], way: str) -> None:
    """On two ranks losses and weights are those without a plan, in the same wrapper, for replays and a lower peak."""
    plain, ours = found[way.partition(",")[0]], found[way]
    assert ours["kind"] == plain["kind"] == ("FSDPLlamaForCausalLM" if "fsdp" in way else "DistributedDataParallel")
    assert len(ours["losses"]) == STEPS
    assert (ours["losses"], ours["norm"]) == (plain["losses"], plain["norm"])
    assert (ours["runs"], plain["runs"]) == (2 * STEPS * LAYERS, STEPS * LAYERS)
    assert ours["peak"] < plain["peak"]
