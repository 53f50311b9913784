"""The reference is the policy as it was handed over, whatever it is and wherever it came from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from trl import GRPOConfig, GRPOTrainer

from tests import tiny
from tests.trainer import runs
from trl_variants import KL

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


def test_a_second_trainer_over_the_same_model_starts_at_where_the_first_ended(tmp_path: Any) -> None:
    model = tiny.model()
    runs.trained(tmp_path, "grpo", model=model, **TWO_STEPS)
    trainer = runs.build(tmp_path, "grpo", model=model, **TWO_STEPS)
    assert runs.digest(trainer.ref_model) == runs.digest(model) != runs.digest(tiny.model())
    trainer.train()
    assert_starts_at_itself(trainer)


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
OFF = {name: ["none", {"coef": 0}] for name in WITH_KL} | {"grpo": ["none", None, False, {"coef": 0}]}


def forwards(trainer: runs.Watched) -> dict[str, int]:
    """How often each model's backbone ran in one optimizer step over 2 micro-batches, where nothing is generated."""
    trainer._passes.may_share(trainer.model.base_model)  # which tries it on a few tokens
    count = {"policy": 0, "reference": 0}
    for name, model in (("policy", trainer.model), ("reference", trainer.ref_model)):
        if model is not None:
            model.model.register_forward_hook(lambda *_, name=name: count.update({name: count[name] + 1}))
    trainer.train()
    return count


@pytest.mark.parametrize(
    ("variant", "overrides"),
    [*((name, None) for name in WITHOUT_KL), *((name, {"kl": off}) for name in WITH_KL for off in OFF[name])],
)
def test_without_kl_no_reference_is_made_or_scored(variant: str, overrides: Any, tmp_path: Any) -> None:
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


# -- constructor ---------------------------------------------------------------------------------------------------


def test_an_estimator_in_the_reward_needs_the_reference_as_well(tmp_path: Any) -> None:
    trainer = runs.build(tmp_path, "dr_grpo", variant_overrides={"kl": KL("k1", placement="token_reward", coef=0.1)})
    assert trainer.ref_model is not None and not trainer.ref_model.training


def test_the_reference_is_written_down_with_the_variant(tmp_path: Any) -> None:
    runs.trained(tmp_path, "grpo", max_steps=1)
    written = json.loads(Path(tmp_path, "variant.json").read_text())
    assert written["variant"] == "grpo" and math.isclose(written["kl"]["coef"], 0.04)
