"""With PEFT the reference is the adapter as it was handed over, or none; it is never trained and never saved."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from peft import IA3Config, LNTuningConfig, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file

from tests import tiny
from tests.trainer import runs
from tests.trainer.test_reference import TWO_STEPS, assert_starts_at_itself
from trl_variants import VariantError

# -- PEFT ----------------------------------------------------------------------------------------------------------

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}


def adapted(name: str = "default", **lora: Any) -> Any:
    """A model with an adapter that is not zero, as one that was trained before."""
    model = get_peft_model(tiny.model(), LoraConfig(**{**LORA, **lora}), adapter_name=name)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def base_weights(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name and ".modules_to_save." not in name
    }


def adapter_weights(model: Any, name: str) -> dict[str, torch.Tensor]:
    return {
        key.replace(f".{name}", ""): tensor.detach().clone()
        for key, tensor in model.named_parameters()
        if f".{name}." in key or key.endswith(f".{name}")
    }


@pytest.mark.parametrize("init", [True, "gaussian"])
def test_a_new_adapter_is_measured_against_the_model_without_it(init: Any, tmp_path: Any) -> None:
    lora = LoraConfig(**LORA, init_lora_weights=init)
    trainer = runs.build(tmp_path, "grpo", options={"peft_config": lora}, **TWO_STEPS)
    assert trainer.ref_model is None and trainer.reference.adapter is None
    assert list(trainer.model.peft_config) == ["default"]
    before = base_weights(trainer.model)
    trainer.train()
    assert_starts_at_itself(trainer)
    after = base_weights(trainer.model)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    policy = tiny.model()
    (output,) = trainer.generated
    mask, expected = output["loss_mask"], runs.log_probs(policy, output)
    torch.testing.assert_close(output["ref_per_token_logps"][mask].double(), expected[mask], atol=2e-5, rtol=0)


@pytest.mark.parametrize("init", [False, "pissa", "orthogonal"])
def test_a_new_adapter_that_does_not_start_at_zero_is_measured_against_its_start(init: Any, tmp_path: Any) -> None:
    lora = LoraConfig(**LORA, init_lora_weights=init)
    trainer = runs.build(tmp_path, "grpo", options={"peft_config": lora}, **TWO_STEPS)
    assert sorted(trainer.model.peft_config) == ["default", "reference"]
    trainer.train()
    assert_starts_at_itself(trainer)


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("default", {}),
        ("policy", {}),
        ("default", {"use_dora": True}),
        ("default", {"modules_to_save": ["embed_tokens"]}),
        ("default", {"lora_dropout": 0.5}),
    ],
    ids=["lora", "named", "dora", "modules_to_save", "dropout"],
)
def test_a_trained_adapter_is_measured_against_a_frozen_copy_of_itself(
    name: str, lora: dict[str, Any], tmp_path: Any
) -> None:
    model = adapted(name, **lora)
    start, base = adapter_weights(model, name), base_weights(model)
    assert start
    trainer = runs.build(
        tmp_path, "grpo", model=model, save_strategy="steps", save_steps=1, disable_dropout=True, **TWO_STEPS
    )
    assert trainer.reference.adapter == "reference" and model.active_adapter == name
    trainer.train()
    assert_starts_at_itself(trainer)
    # The copy has not moved, the policy has, and the base is as it was.
    frozen, moved = adapter_weights(model, "reference"), adapter_weights(model, name)
    assert frozen.keys() == start.keys() == moved.keys()
    assert all(torch.equal(frozen[key], start[key]) for key in start)
    assert any(not torch.equal(moved[key], start[key]) for key in start)
    after = {key: tensor for key, tensor in base_weights(model).items() if "reference" not in key}
    assert all(torch.equal(base[key], after[key]) for key in base)
    # It is neither optimized nor saved.
    copied = {id(p) for key, p in model.named_parameters() if ".reference" in key}
    assert copied and not any(p.requires_grad for p in model.parameters() if id(p) in copied)
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimized and not optimized & copied
    for checkpoint in (tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"):
        assert not list(checkpoint.rglob("*reference*"))
        (saved,) = checkpoint.rglob("adapter_model.safetensors")
        assert not [key for key in load_file(saved) if "reference" in key]
        assert list(json.loads((saved.parent / "adapter_config.json").read_text()).items())
    loaded = PeftModel.from_pretrained(tiny.model(), saved.parent)
    (output,) = trainer.generated
    mask = output["loss_mask"]
    model.eval()
    torch.testing.assert_close(
        runs.log_probs(loaded.eval(), output)[mask], runs.log_probs(model, output)[mask], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(**LORA, modules_to_save=["embed_tokens"]),
        LoraConfig(**LORA, trainable_token_indices=[3, 4]),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
        PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        LNTuningConfig(target_modules=["norm"], task_type="CAUSAL_LM"),
    ],
    ids=["modules_to_save", "tokens", "ia3", "prompt", "norms"],
)
def test_other_kinds_of_adapters_have_a_reference_that_stays(config: Any, tmp_path: Any) -> None:
    settings = {**TWO_STEPS, "learning_rate": 0.3}
    trainer = runs.trained(tmp_path, "grpo", options={"peft_config": config}, **settings)
    first, second = (entry["kl"] for entry in trainer.logs)
    assert 0 <= first < 1e-9 and second > 1e-5
    batch = trainer._buffered_inputs[0]
    with trainer.reference.scored() as model:
        again = trainer._passes.score(model, batch, 4)["log_probs"]
    torch.testing.assert_close(again, batch["ref_per_token_logps"], atol=1e-6, rtol=0)


def test_an_adapter_that_trains_the_base_too_is_refused_where_a_reference_is_needed(tmp_path: Any) -> None:
    # With bias="all" PEFT trains biases of the base model, which switching the adapter off does not bring back: after
    # one step at this rate the log-probs of such a reference had moved by 0.2 nats.
    with pytest.raises(VariantError) as caught:
        runs.build(tmp_path, "grpo", options={"peft_config": LoraConfig(**LORA, bias="all")})
    assert str(caught.value) == (
        "The base model is the reference, and 6 of its own weights are trained beside the adapter "
        "(base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias, ...). Use bias='none' and modules_to_save "
        "in the PEFT config, or kl: none."
    )
    runs.trained(tmp_path, "dapo", options={"peft_config": LoraConfig(**LORA, bias="all")}, max_steps=1)


def test_a_final_save_has_no_reference_in_it(tmp_path: Any) -> None:
    trainer = runs.trained(tmp_path, "grpo", model=adapted(), **TWO_STEPS)
    trainer.save_model(str(tmp_path / "final"))
    names = {file.relative_to(tmp_path / "final").as_posix() for file in (tmp_path / "final").rglob("*")}
    assert "adapter_model.safetensors" in names and not any("reference" in name for name in names)


@pytest.mark.parametrize("new", [True, False], ids=["new", "handed_over"])
def test_the_reference_of_an_adapter_has_no_dropout(new: bool, tmp_path: Any) -> None:
    options = {"peft_config": LoraConfig(**LORA, lora_dropout=0.5)} if new else {}
    base = runs.variation(attention_dropout=0.5) if new else adapted(lora_dropout=0.5)
    trainer = runs.build(tmp_path, "grpo", model=base, options=options, **TWO_STEPS)
    trainer.train()
    start = runs.variation(attention_dropout=0.5).eval() if new else adapted().eval()
    for output in trainer.generated:
        mask, expected = output["loss_mask"], runs.log_probs(start, output)
        found = output["ref_per_token_logps"][mask].double()
        torch.testing.assert_close(found, expected[mask], atol=2e-5, rtol=0)
    assert trainer.model.training


def test_a_second_trainer_over_the_same_adapter_starts_at_where_the_first_ended(tmp_path: Any) -> None:
    model = adapted()
    runs.trained(tmp_path, "grpo", model=model, **TWO_STEPS)
    between = adapter_weights(model, "default")
    trainer = runs.trained(tmp_path, "grpo", model=model, **TWO_STEPS)
    assert_starts_at_itself(trainer)
    frozen = adapter_weights(model, trainer.reference.adapter)
    assert all(torch.equal(frozen[key], between[key]) for key in between)


def test_an_adapter_without_kl_gets_no_copy(tmp_path: Any) -> None:
    model = adapted()
    runs.trained(tmp_path, "dapo", model=model, max_steps=1)
    assert list(model.peft_config) == ["default"]


# -- gradient checkpointing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["whole", "new", "handed_over"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_number(kind: str, reentrant: bool, tmp_path: Any) -> None:
    def run(**settings: Any) -> runs.Watched:
        model = adapted() if kind == "handed_over" else tiny.model()
        options = {"rollout_func": runs.scripted()}
        if kind == "new":
            options["peft_config"] = LoraConfig(**LORA)
        return runs.trained(tmp_path, "grpo", model=model, options=options, **TWO_STEPS, **settings)

    plain = run()
    checkpointed = run(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert checkpointed.model.is_gradient_checkpointing and not plain.model.is_gradient_checkpointing
    assert_starts_at_itself(checkpointed)
    for a, b in zip(plain.gradients, checkpointed.gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 * float(a.abs().max()), rtol=1e-4)
