"""Plans in Hugging Face models: through their own switch, the Trainer, PEFT and caches of keys and values.

The models are transformers' own, tiny and random (`zoo.py`), with dropout, on the CPU.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_recompute
from support.training import assert_same
from support.zoo import LAYERS, build, scalar_loss, step
from torch_recompute import ArgumentError, Choice, Plan, RecomputeConfig, auto, doing_recompute, measure
from torch_recompute.integrations import policies
from torch_recompute.integrations.huggingface import RecomputeCallback, apply, plan_of, training_loop
from torch_recompute.plan import observe
from torch_recompute.plan.wrappers import wrappers_on

pytest.importorskip("transformers", reason="transformers is not installed (it needs Python 3.11)")

Step = dict[str, torch.Tensor]
POLICIES = ("full", "full:2", "core_attn,layernorm")
MODELS = ("llama", "mixtral", "gpt2", "gemma2")


@contextmanager
def runs(model: nn.Module, kind: str = "LlamaMLP") -> Iterator[list[int]]:
    """Counts the calls of all modules of a class, in forward and in replays."""
    count = [0]

    def called(*_: Any) -> None:
        count[0] += 1

    hooks = [m.register_forward_pre_hook(called) for m in model.modules() if type(m).__name__ == kind]
    yield count
    for hook in hooks:
        hook.remove()


def own(model: nn.Module) -> list[list[str]]:
    """The names of what each module's instance holds."""
    return [sorted(module.__dict__) for module in model.modules()]


@pytest.fixture(autouse=True)
def deprecated() -> Iterator[None]:
    """The old names of the library's switch are called on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
        yield


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_whatever_the_switch_says(name: str, policy: str) -> None:
    """Loss and gradients are the plain model's before, between and after the library's own enabling and disabling."""
    model, inputs = build(name)
    expected = step(build(name)[0], inputs)
    apply(model, policy)
    assert_same(step(model, inputs), expected)
    model.activation_checkpointing_enable()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert_same(step(model, inputs), expected)
    model.gradient_checkpointing_disable()
    assert_same(step(model, inputs), expected)
    model.activation_checkpointing_enable()
    assert_same(step(model, inputs), expected)


def test_the_switch_turns_the_plan_off_and_on() -> None:
    """The layers run twice a step while the switch is on and once while it is off, and the model says which it is."""
    model, inputs = build("llama")
    apply(model, "full")
    seen: list[tuple[int, bool]] = []
    for switch in (None, model.activation_checkpointing_disable, model.activation_checkpointing_enable):
        if switch is not None:
            switch()
        with runs(model) as count:
            step(model, inputs)
        seen.append((count[0], model.is_activation_checkpointing))
    assert seen == [(2 * LAYERS, True), (LAYERS, False), (2 * LAYERS, True)]


def test_apply_is_one_for_all_models() -> None:
    """The library's plain `apply` watches the model's own switch too: one replay, whatever was turned on and when."""
    for first in (True, False):
        model, inputs = build("llama")
        if first:
            model.activation_checkpointing_enable()
        torch_recompute.apply(model, plan_of("full", model))
        if not first:
            model.activation_checkpointing_enable()
        with runs(model) as count:
            step(model, inputs)
        assert count[0] == 2 * LAYERS
        model.activation_checkpointing_disable()
        with runs(model) as count:
            step(model, inputs)
        assert count[0] == LAYERS


def test_a_switch_below_is_the_same_switch() -> None:
    """The inner model's methods, and the private one that all end in, do not put a checkpoint inside a region."""
    model, inputs = build("llama")
    apply(model, "full")
    model.model.gradient_checkpointing_enable()
    model._set_gradient_checkpointing(enable=True)
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    model.model.activation_checkpointing_disable()
    with runs(model) as count:
        step(model, inputs)
    assert count[0] == LAYERS


def test_a_switch_that_was_on_is_on_again_afterwards() -> None:
    """Stock checkpointing turned on before the plan rests while the plan is there; `remove` gives it back."""
    model, inputs = build("llama")
    expected = step(model, inputs)
    model.activation_checkpointing_enable()
    before = own(model)
    handle = apply(model, "full:2")
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    assert_same(step(model, inputs), expected)
    handle.remove()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert own(model) == before


@pytest.mark.parametrize("policy", POLICIES)
def test_remove_gives_everything_back(policy: str) -> None:
    """After `remove` no module holds a name or a value that it did not hold, and a plan can be applied again."""
    model, inputs = build("llama")
    before = own(model)
    keys = list(model.state_dict())
    handle = apply(model, policy)
    step(model, inputs)
    assert list(model.state_dict()) == keys
    handle.remove()
    handle.remove()
    assert own(model) == before
    apply(model, policy)


def test_a_refused_plan_leaves_nothing_behind() -> None:
    """When `apply` raises, the model is as it was."""
    model, _ = build("llama")
    handle = apply(model, "full")
    before = own(model)
    with pytest.raises(ArgumentError, match="has a plan already"):
        apply(model, "full")
    assert own(model) == before
    handle.remove()
    before = own(model)
    with pytest.raises(ArgumentError, match="no module"):
        apply(model, Plan(plan_of("full", build("gpt2")[0]).choices))
    assert own(model) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_have_plan_and_switch_of_their_own(copied: Callable[[nn.Module], Any]) -> None:
    """A copy is recomputed, and turning its switch off leaves the original on."""
    model, inputs = build("llama")
    apply(model, "full")
    twin = copied(model)
    twin.gradient_checkpointing_disable()
    with runs(model) as ours, runs(twin) as theirs:
        assert_same(step(model, inputs), step(twin, inputs))
    assert (ours[0], theirs[0]) == (2 * LAYERS, LAYERS)


def test_eval_with_gradients_is_recomputed_too() -> None:
    """In `eval()` the regions are regions as soon as gradients flow, where the library's own checkpointing is off."""
    model, inputs = build("llama")
    plain = build("llama")[0].eval()
    apply(model.eval(), "full")
    with runs(model) as count:
        assert_same(step(model, inputs), step(plain, inputs))
    assert count[0] == 2 * LAYERS


def test_less_is_kept() -> None:
    """With the plan and the default configuration, a forward keeps less than half of what it kept."""

    def kept(policy: str | None) -> int:
        model, inputs = build("llama")
        model.config.use_cache = True
        if policy is not None:
            handle = apply(model, policy)
            assert "config.use_cache counts as False in training" in repr(handle)
        with measure() as memory:
            output = model(**inputs)
            live = memory.live_bytes
        assert (output.past_key_values is None) == (policy is not None)
        return live

    assert kept("full") < kept(None) / 2


@pytest.mark.parametrize(
    ("name", "policy"), [*(("llama", policy) for policy in POLICIES), *((name, "full:2") for name in MODELS[1:])]
)
@pytest.mark.parametrize("filled", ["fresh", "filled", "filled with gradients"])
def test_caches_are_read_as_the_forward_read_them(name: str, policy: str, filled: str) -> None:
    """With a cache in training, loss, gradients and the cache that comes back are the plain model's."""

    def run(model: nn.Module, inputs: dict[str, Any]) -> Step:
        inputs = {**inputs, "use_cache": True}
        if filled != "fresh":
            torch.manual_seed(5)
            with torch.set_grad_enabled(filled == "filled with gradients"):
                inputs["past_key_values"] = model(input_ids=inputs["input_ids"], use_cache=True).past_key_values
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        output = model(**inputs)
        keys = {f"keys {i}": layer.keys.detach().clone() for i, layer in enumerate(output.past_key_values.layers)}
        output.loss.backward()
        after = {f"after {i}": layer.keys.detach() for i, layer in enumerate(output.past_key_values.layers)}
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": output.loss.detach(), **keys, **after, **found}

    model, inputs = build(name)
    apply(model, policy)
    assert_same(run(model, inputs), run(build(name)[0], inputs))


def test_a_cache_written_in_place_is_refused() -> None:
    """A static cache under gradients is an error in words, and without gradients it works."""
    from transformers import StaticCache

    model, inputs = build("llama")
    apply(model, "full")
    with torch.no_grad():
        model(**inputs, use_cache=True, past_key_values=StaticCache(config=model.config, max_cache_len=32))
    with pytest.raises(ArgumentError, match="written in place"):
        step(model, {**inputs, "past_key_values": StaticCache(config=model.config, max_cache_len=32)})


def test_generation_is_the_same_in_training_mode() -> None:
    """`generate()` finds the same tokens with a plan in the model."""
    model, inputs = build("llama")
    plain = build("llama")[0]
    apply(model, "full")

    def tokens(m: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return m.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)

    assert torch.equal(tokens(model), tokens(plain))


def test_saved_models_are_plain_models(tmp_path: Path) -> None:
    """What `save_pretrained` writes is loaded as a model without a plan and with the same weights."""
    import transformers

    model, _ = build("llama")
    apply(model, "full")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(loaded.state_dict(), model.state_dict())
    assert "torch_recompute" not in (tmp_path / "config.json").read_text()


# --- the Trainer --------------------------------------------------------------------------------------------------


def train(model: nn.Module, folder: Path, callbacks: list[Any] | None = None, **settings: Any) -> tuple[Step, Any]:
    """The weights after four steps, and the Trainer."""
    pytest.importorskip("accelerate", reason="accelerate is not installed (the Trainer needs it)")
    from transformers import Trainer, TrainingArguments

    ids = torch.randint(3, 64, (16, 8), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **{"max_steps": 4, "logging_steps": 2, **settings},
    )
    json.loads(arguments.to_json_string())
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": x, "labels": x} for x in ids], callbacks=callbacks)
    trainer.train()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, trainer


STOCK = {
    "off": {},
    "on": {"activation_checkpointing": True},
    "on, by its old name": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "bfloat16": {"bf16": True},
}


@pytest.mark.parametrize("stock", STOCK)
def test_a_plan_stays_through_the_trainer(stock: str, tmp_path: Path) -> None:
    """Whatever the Trainer turns on, the layers run twice a step, and weights and DDP settings are the right ones."""
    settings = STOCK[stock]
    expected, _ = train(build("llama")[0], tmp_path, **({"bf16": True} if "bf16" in settings else {}))
    model, _ = build("llama")
    handle = apply(model, "full")
    with runs(model) as count:
        weights, trainer = train(model, tmp_path, **settings)
    assert_same(weights, expected)
    assert count[0] == 4 * 2 * LAYERS
    assert model.is_activation_checkpointing
    assert trainer.accelerator.ddp_handler.find_unused_parameters is False
    handle.remove()
    with runs(model) as count:
        step(model, build("llama")[1])
    assert count[0] == LAYERS


def test_one_line_before_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`auto` with what a tokenizer returns, and nothing else changed: the plain weights, and layers that run again."""
    from transformers import BatchEncoding

    expected, _ = train(build("llama")[0], tmp_path)
    model, inputs = build("llama")
    batch = BatchEncoding({name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)})
    handle = auto(model, batch, budget=0.01, optimizer="adamw", device="h100", loss=scalar_loss)
    assert "recomputed" in capsys.readouterr().out
    callback = RecomputeCallback(handle)
    assert_same(train(model, tmp_path, callbacks=[callback])[0], expected)
    assert callback.figures["recompute_saved_bytes"] > 0


def test_the_callback_plans_in_the_trainer(tmp_path: Path) -> None:
    """`RecomputeCallback(budget=...)` under bf16 and accumulation: plain weights, the promised peak logged."""
    from transformers import TrainerCallback

    peaks: list[int] = []
    settings: dict[str, Any] = {"bf16": True, "gradient_accumulation_steps": 2, "max_steps": 4}

    class Measures(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 3:
                self.running = measure(model, kwargs["optimizer"].optimizer)
                self.memory = self.running.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                self.running.__exit__(None, None, None)
                peaks.append(self.memory.peak_bytes)

    expected, _ = train(build("llama")[0], tmp_path, **settings)
    model, _ = build("llama")
    callback = RecomputeCallback(budget=0.2)
    weights, _ = train(model, tmp_path, [callback, Measures()], **settings)
    assert_same(weights, expected)
    assert callback.handle is not None
    (plan,) = callback.handle.history
    assert plan is callback.handle.plan
    assert plan.choices
    assert plan.loop.accumulate == 2
    assert "loss: the output's .loss" in str(plan)
    batch = 2 * 2 * 8 * 8  # bytes of ids and labels
    assert callback.figures["recompute_peak_bytes"] == peaks[0]
    assert peaks[0] + batch == pytest.approx(plan.predicted_peak_bytes, rel=0.005)


def test_a_loss_of_the_trainer_is_planned_before_it(tmp_path: Path) -> None:
    """With `label_smoothing_factor` the callback's error says what to write, and with that the weights are as ever."""
    settings: dict[str, Any] = {"label_smoothing_factor": 0.1, "max_steps": 1}
    with pytest.raises(ArgumentError, match=r"(?s)with label_smoothing_factor, .*\*\*training_loop\(args\)\)"):
        train(build("llama")[0], tmp_path, [RecomputeCallback(budget=0.2)], **settings)
    expected, trainer = train(build("llama")[0], tmp_path, **settings)
    model, _ = build("llama")
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    handle = auto(model, batch, budget=0.2, loss=lambda out: out.logits.mean(), **training_loop(trainer.args))
    assert handle.plan.choices
    assert_same(train(model, tmp_path, **settings)[0], expected)


LEAVES_OUT = 4  # a seed with which the planned step runs less than four of six layers


@pytest.mark.nightly
def test_layerdrop_is_planned_again() -> None:
    """Whisper with LayerDrop: after the first steps the promise is that of the step in which all layers run."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64}
    drop = {"encoder_layers": 4, "decoder_layers": 2, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}
    sizes = {"vocab_size": 64, "d_model": 16, "max_source_positions": 16, "num_mel_bins": 8, **heads, **drop}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **ids)).train()
    batch = {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(4, 64, (2, 8))}
    adam = torch.optim.AdamW(model.parameters())
    torch.manual_seed(LEAVES_OUT)
    handle = auto(model, batch, budget=0.3, optimizer=adam, device="h100", hold_output=False)
    assert len(handle.plan.modules) < 4

    def train_step() -> None:
        model(**batch).loss.backward()
        adam.step()
        adam.zero_grad()

    for _ in range(3):
        train_step()
    assert len(handle.history) == 2
    model.model.encoder.layerdrop = model.model.decoder.layerdrop = 0.0
    train_step()  # the optimizer makes its state for layers that have not run yet
    with measure(model, adam).track(*batch.values()) as memory:
        train_step()
    assert memory.peak_bytes == pytest.approx(handle.plan.predicted_peak_bytes, rel=0.005)


@pytest.mark.parametrize(("policy", "budget"), [("full", 0.5), (None, "much")])
def test_a_callback_takes_a_policy_or_a_budget(policy: Any, budget: Any) -> None:
    """Both at once, and a budget that is none, are refused where they are written."""
    with pytest.raises(ArgumentError, match="budget"):
        RecomputeCallback(policy, budget=budget)


def test_the_callback_applies_reports_and_removes(tmp_path: Path) -> None:
    """A callback with a string applies it, adds its figures to the log, and takes the plan out when asked to."""
    expected, _ = train(build("llama")[0], tmp_path)
    model, _ = build("llama")
    callback = RecomputeCallback("full", remove=True)
    with runs(model) as count:
        weights, trainer = train(model, tmp_path, [callback])
    assert_same(weights, expected)
    assert count[0] == 4 * 2 * LAYERS
    first, second = trainer.state.log_history[:2]
    assert first["recompute_saved_bytes"] > 0
    assert 0 < first["recompute_replay_share"] < 1
    parameters = sum(p.nbytes for p in model.parameters())
    assert second["recompute_peak_bytes"] > parameters  # the third step's
    assert not first.keys() & second.keys() & callback.figures.keys()
    assert callback.figures == {key: (first | second)[key] for key in callback.figures}
    assert callback.handle is None
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_the_measured_peak_is_lower_with_a_plan(tmp_path: Path) -> None:
    """The peak that the callback logs falls when there is something to recompute."""
    peaks = {}
    for policy in ("none", "full"):
        callback = RecomputeCallback(policy)
        train(build("llama")[0], tmp_path, [callback])
        peaks[policy] = callback.figures["recompute_peak_bytes"]
    assert peaks["full"] < peaks["none"]


@pytest.mark.parametrize("of", ["callback", "arguments"])
def test_a_search_makes_regions_in_every_model(of: str) -> None:
    """A callback that has trained one model makes regions in the next one, as a search over parameters has many."""
    arguments = types.SimpleNamespace(activation_checkpointing_kwargs={"policy": "full"})
    callback = RecomputeCallback("full" if of == "callback" else None)
    models = [build("llama")[0] for _ in range(2)]
    for model in (models[0], models[0], models[1]):
        callback.on_train_begin(arguments, None, None, model)
        with runs(model) as count:
            step(model, build("llama")[1])
        assert count[0] == 2 * LAYERS


@pytest.mark.parametrize("every", [None, 3])
def test_the_callback_watches_as_often_as_it_is_told(every: int | None, tmp_path: Path) -> None:
    """Two steps are watched, and two more each time `every` steps have passed; logging watches none."""
    model, _ = build("llama")
    watched: list[bool] = []
    from transformers import TrainerCallback

    class Looks(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            region: Any = wrappers_on(model.model.layers[0])[0]
            watched.append(region.figures is not None)

    callback = RecomputeCallback("full", every=every)
    _, trainer = train(
        model, tmp_path, [callback, Looks()], logging_steps=1, gradient_accumulation_steps=2, max_steps=6
    )
    assert watched == [True, True, False] + [every is not None] * 2 + [False]
    logged = ["recompute_saved_bytes" in log for log in trainer.state.log_history[:6]]
    assert logged == [False, True, False, False, every is not None, False]


def test_the_share_of_replays_is_by_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays and the step are timed by the same moments, of the device, and no earlier step counts."""
    now = itertools.count()
    for module in (policies, observe):
        monkeypatch.setattr(module, "stamp", lambda: float(next(now)))  # each moment is one second after the last
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)))
    figures = policies.StepFigures(None)
    handle = policies.apply(model, Plan(tuple(Choice((str(i),)) for i in range(3))))
    for _ in range(2):
        figures.begin(handle)
        model(torch.ones(2, 4)).sum().backward()
        figures.end()
    # the second step is begin, three replays of two moments each, end: seven seconds, three of them replays
    assert figures.taken()["recompute_replay_share"] == round(3 / 7, 4)
    assert figures.taken() == {}


@pytest.mark.parametrize("carry", [False, True])
def test_the_callback_logs_routing_flips(carry: bool, tmp_path: Path) -> None:
    """Tokens that a replay routes otherwise are in the log; where decisions are carried, that they are, and none."""
    model, _ = build("mixtral")
    plan = Plan(tuple(Choice((path,), carry=carry) for choice in plan_of("full", model) for path in choice.paths))
    routers = [module for module in model.modules() if type(module).__name__ == "MixtralTopKRouter"]
    assert len(routers) == LAYERS
    for router in routers:
        router.register_forward_pre_hook(lambda _, args: (args[0].roll(1, -1),) if doing_recompute() else None)
    callback = RecomputeCallback(plan, peak=False)
    _, trainer = train(model, tmp_path, [callback])
    logged = trainer.state.log_history[0]
    assert logged["recompute_regions_carrying"] == (LAYERS if carry else 0)
    assert (logged["recompute_routing_flips"] > 0) is not carry


@pytest.mark.parametrize("on", [False, True])
def test_the_policy_can_stand_among_the_training_arguments(on: bool, tmp_path: Path) -> None:
    """A callback without a plan takes the string from the arguments, whether or not they turn checkpointing on too."""
    expected, _ = train(build("llama")[0], tmp_path)
    model, _ = build("llama")
    callback = RecomputeCallback()
    settings = {"activation_checkpointing": on, "activation_checkpointing_kwargs": {"policy": "full:2"}}
    weights, _ = train(model, tmp_path, [callback], **settings)
    assert_same(weights, expected)
    assert callback.handle is not None
    assert callback.handle.plan == plan_of("full:2", model)


def test_a_callback_can_report_on_a_handle(tmp_path: Path) -> None:
    """A plan that is there already is reported on, not applied again."""
    model, _ = build("llama")
    handle = apply(model, "core_attn")
    callback = RecomputeCallback(handle, peak=False)
    train(model, tmp_path, [callback])
    assert callback.handle is handle
    assert callback.figures["recompute_saved_bytes"] > 0
    assert "recompute_peak_bytes" not in callback.figures


# --- PEFT ---------------------------------------------------------------------------------------------------------


def with_adapters(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(model, settings)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("first", ["plan", "adapters"])
def test_adapters_train_without_gradients_of_the_embedding(first: str, policy: str) -> None:
    """With everything but the adapters frozen, each adapter gets the plain gradient, and no hook is needed for it."""
    expected = step(with_adapters(build("llama")[0]), build("llama")[1])
    model, inputs = build("llama")
    if first == "plan":
        handle = apply(model, policy)
        model = with_adapters(model)
        model.base_model.model.disable_input_require_grads()  # PEFT turns it on where it sees checkpointing
    else:
        model = with_adapters(model)
        handle = apply(model, policy)
    assert not model.get_input_embeddings()._forward_hooks
    assert_same(step(model, inputs), expected)
    assert sum("lora" in name for name in expected) == 2 * 3 * LAYERS
    model.gradient_checkpointing_disable()
    assert_same(step(model, inputs), expected)
    model.gradient_checkpointing_enable()
    assert model.is_activation_checkpointing
    handle.remove()
    assert_same(step(model, inputs), expected)


@pytest.mark.parametrize("policy", ["full", "full:2"])
def test_hooks_for_one_forward_are_there_in_its_replay(policy: str) -> None:
    """PEFT's aLoRA registers hooks in the layers for the forward alone: gradients are the plain ones all the same."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    ids = torch.randint(7, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    ids[0, 3:5] = ids[1, 5:7] = torch.tensor([5, 6])
    found = []
    for plan in ("none", policy):
        torch.manual_seed(1)
        settings = peft.LoraConfig(
            r=4,
            task_type="CAUSAL_LM",
            alora_invocation_tokens=[5, 6],
            target_modules=["q_proj", "v_proj"],
            init_lora_weights=False,
            lora_dropout=0.1,
        )
        model = peft.get_peft_model(build("llama")[0], settings).train()
        apply(model, plan)
        with runs(model) as count:
            found.append(step(model, {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}))
    assert count[0] == 2 * LAYERS
    assert_same(*found)
    assert sum("lora" in name for name in found[0]) == 2 * 2 * LAYERS


def test_adapters_train_through_the_trainer(tmp_path: Path) -> None:
    """The plan stays when PEFT wraps the model after it and the Trainer turns checkpointing on."""
    expected, _ = train(with_adapters(build("llama")[0]), tmp_path)
    model, _ = build("llama")
    apply(model, "full")
    model = with_adapters(model)
    with runs(model) as count:
        weights, _ = train(model, tmp_path, activation_checkpointing=True)
    assert_same(weights, expected)
    assert count[0] == 4 * 2 * LAYERS


# --- TRL ----------------------------------------------------------------------------------------------------------


@contextmanager
def without_checkpointing(model: Any, kwargs: dict[str, Any] | None = None) -> Iterator[None]:
    """The calls that TRL 1.16 makes around generation (`trl.models.utils.disable_gradient_checkpointing`)."""
    was_on = model.is_gradient_checkpointing
    if was_on:
        model.gradient_checkpointing_disable()
    try:
        yield
    finally:
        if was_on:
            model.gradient_checkpointing_enable(kwargs)


@pytest.mark.parametrize("real", [False, True], ids=["its calls", "itself"])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": False}])
def test_a_plan_comes_back_after_trl_generates(kwargs: dict[str, Any] | None, adapters: bool, real: bool) -> None:
    """Between TRL's disabling and enabling the layers run once, and before and after it twice, PEFT around or not."""
    off: Any = without_checkpointing
    if real:
        reason = "trl is no development dependency (it needs datasets and pyarrow); its calls are made above"
        off = pytest.importorskip("trl.models.utils", reason=reason).disable_gradient_checkpointing
    model, inputs = build("llama")
    apply(model, "block:2")
    tuned = with_adapters(model) if adapters else model
    seen: list[int] = []

    def look() -> None:
        with runs(model) as count:
            step(tuned, inputs)
        seen.append(count[0])

    look()
    with off(tuned, kwargs):
        look()
        tuned.generate(input_ids=inputs["input_ids"], max_new_tokens=2, do_sample=False)
    look()
    assert seen == [LAYERS + 2, LAYERS, LAYERS + 2]


# --- policies -----------------------------------------------------------------------------------------------------


def test_policies_are_settings_in_other_words(tmp_path: Path) -> None:
    """Strings, mappings, flags and files mean the plan that the settings of the same meaning make."""
    model, _ = build("llama")

    def plan(**settings: Any) -> tuple[Any, ...]:
        return RecomputeConfig(**settings).plan(model).choices

    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    two = plan(**full, recompute_num_layers=2)
    saved, settings = tmp_path / "plan.json", tmp_path / "settings.json"
    saved.write_text(plan_of("full:2", model).to_json())
    settings.write_text(json.dumps({"model": {**full, "recompute_num_layers": 2}}))
    flags = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 2"
    for policy in ("full:2", {**full, "recompute_num_layers": 2}, flags, str(saved), str(settings)):
        assert plan_of(policy, model).choices == two
    assert plan_of("full", model).choices == plan(**full, recompute_num_layers=1)
    block = plan(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
    assert plan_of("block:1", model).choices == block
    parts = plan(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
    assert plan_of("core_attn, mlp", model).choices == parts
    assert plan_of("selective", model).choices == plan(recompute_granularity="selective")
    assert plan_of("none", model).choices == ()
