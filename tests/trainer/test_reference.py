"""The reference is the policy as it was handed over, whatever it is and wherever it came from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from trl import GRPOConfig, GRPOTrainer

from tests import tiny
from tests.trainer import runs
from trl_variants import KL, VariantTrainer

#: Two optimizer steps on one rollout: on the first one KL must be 0, on the second it must not.
TWO_STEPS = {"steps_per_generation": 4, "max_steps": 2, "learning_rate": 0.05}
NOTHING = 1e-9  # k3 of a rounding error of 1e-5 in log-probs is 5e-11


def kls(trainer: runs.Watched) -> list[float]:
    return [entry["kl"] for entry in trainer.logs]


def assert_starts_at_itself(trainer: runs.Watched) -> None:
    first, second = kls(trainer)
    assert 0 <= first < NOTHING and second > 1e-3


def changed(model: Any, seed: int = 1) -> Any:
    """The model with other weights than its file has."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


# -- whole models --------------------------------------------------------------------------------------------------


def test_a_model_by_path_is_its_own_reference(tmp_path: Any, path: str) -> None:
    assert_starts_at_itself(runs.trained(tmp_path, "grpo", model=path, **TWO_STEPS))


def test_a_model_whose_weights_were_changed_is_its_own_reference_and_not_its_file(tmp_path: Any, path: str) -> None:
    model = changed(AutoModelForCausalLM.from_pretrained(path))
    trainer = runs.build(tmp_path, "grpo", model=model, **TWO_STEPS)
    assert runs.digest(trainer.ref_model) == runs.digest(model)
    trainer.train()
    assert_starts_at_itself(trainer)


def test_trl_itself_measures_kl_to_the_file_of_a_changed_model_and_fails_without_one(tmp_path: Any, path: str) -> None:
    # Why the reference is made here and not by TRL: it loads one anew from the path in the model's config.
    def stock(model: Any) -> Any:
        settings = {**tiny.SETTINGS, "num_generations": 4, "beta": 0.04, "max_steps": 1}
        return GRPOTrainer(
            model=model,
            reward_funcs=tiny.low_words,
            args=GRPOConfig(output_dir=str(tmp_path), **settings),
            train_dataset=tiny.dataset(),
            processing_class=tiny.tokenizer(),
        )

    trainer = stock(changed(AutoModelForCausalLM.from_pretrained(path)))
    trainer.train()
    assert trainer.state.log_history[0]["kl"] > 0.1
    with pytest.raises((OSError, ValueError)):
        stock(tiny.model())


def test_a_model_without_a_path_is_its_own_reference(tmp_path: Any) -> None:
    model = tiny.model()
    assert not model.config._name_or_path
    assert_starts_at_itself(runs.trained(tmp_path, "grpo", model=model, **TWO_STEPS))


def test_the_reference_of_tied_embeddings_is_tied_and_shares_nothing_with_the_policy(tmp_path: Any) -> None:
    model = runs.variation(tie_word_embeddings=True)
    trainer = runs.trained(tmp_path, "grpo", model=model, **TWO_STEPS)
    reference = trainer.ref_model
    assert reference.lm_head.weight is reference.model.embed_tokens.weight
    assert not {p.data_ptr() for p in reference.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert_starts_at_itself(trainer)


def test_a_head_in_float32_over_a_bfloat16_model_keeps_both_apart(tmp_path: Any) -> None:
    model = tiny.model(dtype=torch.bfloat16)
    trainer = runs.trained(tmp_path, "grpo", model=model, cast_lm_head_to_fp32=True, **TWO_STEPS)
    assert trainer.ref_model.lm_head.weight.dtype == torch.float32
    first, second = kls(trainer)
    assert first < 1e-3 < second


def test_the_temperature_holds_for_the_reference_too(tmp_path: Any) -> None:
    assert_starts_at_itself(runs.trained(tmp_path, "grpo", temperature=0.5, **TWO_STEPS))


def test_the_reference_has_no_dropout_though_the_policy_has(tmp_path: Any) -> None:
    trainer = runs.build(tmp_path, "grpo", model=runs.variation(attention_dropout=0.5), **TWO_STEPS)
    policy = runs.variation(attention_dropout=0.5).eval()
    trainer.train()
    for output in trainer.generated:
        mask, expected = output["loss_mask"], runs.log_probs(policy, output)
        found = output["ref_per_token_logps"][mask].double()
        torch.testing.assert_close(found, expected[mask], atol=2e-5, rtol=0)
    assert kls(trainer)[0] > 1e-3  # the policy's own dropout
    assert trainer.model.training


def test_a_model_that_has_dropout_starts_at_itself_where_trl_switches_it_off(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5))
    assert model.config.embd_pdrop == 0.1
    assert_starts_at_itself(runs.trained(tmp_path, "grpo", model=model, disable_dropout=True, **TWO_STEPS))


# -- no reference, no forward --------------------------------------------------------------------------------------

WITH_KL = ["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "trl_grpo", "trl_rloo"]
WITHOUT_KL = ["reinforce", "dr_grpo", "dapo", "gspo", "cispo"]


def forwards(trainer: runs.Watched) -> dict[str, int]:
    """How often each model's backbone ran in one optimizer step over 2 micro-batches, where nothing is generated."""
    count = {"policy": 0, "reference": 0}
    for name, model in (("policy", trainer.model), ("reference", trainer.ref_model)):
        if model is not None:
            model.model.register_forward_hook(lambda *_, name=name: count.update({name: count[name] + 1}))
    trainer.train()
    return count


@pytest.mark.parametrize("variant", [*WITH_KL, *WITHOUT_KL])
@pytest.mark.parametrize("off", ["none", {"coef": 0}, None])
def test_without_kl_no_reference_is_made_or_scored(variant: str, off: Any, tmp_path: Any) -> None:
    if variant in WITHOUT_KL:
        if isinstance(off, dict):
            pytest.skip("has no KL to set to 0")
        overrides = {} if off is None else {"kl": off}
    else:
        overrides = {"kl": off}
    trainer = runs.build(
        tmp_path, variant, options={"rollout_func": runs.scripted()}, variant_overrides=overrides, max_steps=1
    )
    assert trainer.reference is trainer.ref_model is None
    assert forwards(trainer) == {"policy": 2, "reference": 0}
    assert not [name for name in trainer.logs[0] if name.startswith("kl")]
    assert "ref_per_token_logps" not in trainer.generated[0]


@pytest.mark.parametrize(
    ("variant", "policy"),
    # With KL in the reward the policy is scored at the rollout, two chunks of a micro-batch's size, and then learns.
    [("grpo", 2), ("reinforce_pp_baseline", 2), ("rloo", 4), ("reinforce_pp", 4), ("trl_rloo", 4)],
)
def test_with_kl_each_model_is_scored_no_more_than_needed(variant: str, policy: int, tmp_path: Any) -> None:
    trainer = runs.build(tmp_path, variant, options={"rollout_func": runs.scripted()}, max_steps=1)
    assert forwards(trainer) == {"policy": policy, "reference": 2}


def test_old_log_probs_cost_one_pass_for_the_later_steps_only(tmp_path: Any) -> None:
    # Three mini-batches of 2 micro-batches, two epochs: old log-probs are scored for the last two of the first epoch,
    # 4 passes, and 12 learn. The first mini-batch and the second epoch need none.
    settings = {"steps_per_generation": 6, "num_iterations": 2, "max_steps": 6, "variant_overrides": {"kl": "none"}}
    trainer = runs.build(tmp_path, "grpo", options={"rollout_func": runs.scripted()}, rows=6, **settings)
    assert forwards(trainer) == {"policy": 4 + 12, "reference": 0}


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


# -- constructor ---------------------------------------------------------------------------------------------------


def test_an_estimator_in_the_reward_needs_the_reference_as_well(tmp_path: Any) -> None:
    trainer = runs.build(tmp_path, "dr_grpo", variant_overrides={"kl": KL("k1", placement="token_reward", coef=0.1)})
    assert trainer.ref_model is not None and not trainer.ref_model.training


def test_the_reference_is_written_down_with_the_variant(tmp_path: Any) -> None:
    runs.trained(tmp_path, "grpo", max_steps=1)
    written = json.loads(Path(tmp_path, "variant.json").read_text())
    assert written["variant"] == "grpo" and math.isclose(written["kl"]["coef"], 0.04)
    assert issubclass(runs.Watched, VariantTrainer)
