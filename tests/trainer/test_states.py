"""What moves between rollouts: the KL controller and the states of components; and what an evaluation leaves alone."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from tests import tiny
from tests.trainer import runs
from tests.trainer.variants import VARIANTS
from trl_variants import KL, VariantError, component, use

# -- the controller ------------------------------------------------------------------------------------------------

ADAPTIVE = use("adaptive", target=0.01, horizon=80)


def steered(placement: str) -> dict[str, Any]:
    return {"kl": KL("k1" if "reward" in placement else "k3", placement=placement, coef=0.2, controller=ADAPTIVE)}


@pytest.mark.parametrize("placement", ["sequence_reward", "token_reward", "loss"])
def test_the_controller_moves_after_each_rollout_by_the_clipped_rule(placement: str, tmp_path: Any) -> None:
    trainer = runs.trained(
        tmp_path,
        "reinforce_pp_baseline",
        variant_overrides=steered(placement),
        num_iterations=2,
        max_steps=6,
        learning_rate=0.03,
    )
    beta, used = 0.2, []
    for index, (rollout, result, given) in enumerate(trainer.spy.rollouts):
        assert given["kl_coef"] == pytest.approx(beta, abs=1e-12)
        d = (rollout.log_probs - rollout.ref_log_probs)[rollout.mask].double()
        kl = d if "reward" in placement else (-d).exp() + d - 1
        error = min(max(float(kl.mean()) / 0.01 - 1, -0.2), 0.2)
        assert index or error == -0.2  # the policy has not moved yet
        used += [beta, beta]  # two epochs
        beta *= 1 + error * 8 / 80
        assert result.next_kl_coef == pytest.approx(beta, rel=1e-9)
    assert [entry["kl_coef"] for entry in trainer.logs if "kl_coef" in entry] == pytest.approx(used[::2])
    assert {given["kl_coef"] for _, _, given in trainer.spy.batches} == {used[0], used[2], used[4]}
    assert used[2] < used[0] and trainer._next_kl_coef == pytest.approx(beta)


def test_the_kl_that_is_trained_and_the_kl_that_steers_are_logged_apart(tmp_path: Any) -> None:
    settings = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 4, "logging_steps": 4}
    trainer = runs.trained(tmp_path, "grpo", variant_overrides=steered("loss"), learning_rate=0.03, **settings)
    (entry,) = trainer.logs
    steps = []
    for i in range(0, 8, 2):
        d = torch.cat([(b.log_probs - b.ref_log_probs)[b.mask].double() for b, *_ in trainer.spy.batches[i : i + 2]])
        steps.append(float(((-d).exp() + d - 1).mean()))
    assert entry["kl"] == pytest.approx(sum(steps) / 4, abs=1e-6) and entry["kl"] > 1e-3
    assert entry["rollout/kl"] == pytest.approx(0, abs=1e-9)


def test_the_controller_is_saved_and_restored(tmp_path: Any) -> None:
    settings = {
        "variant_overrides": steered("loss"),
        "num_iterations": 2,
        "learning_rate": 0.03,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 6,
    }
    whole = runs.trained(tmp_path, "grpo", **settings)
    resumed = runs.build(tmp_path, "grpo", **settings)
    assert resumed.kl_coef == 0.2
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.spy.rollouts[0][2]["kl_coef"] == whole.spy.rollouts[2][2]["kl_coef"] != 0.2
    assert resumed._next_kl_coef == pytest.approx(whole._next_kl_coef, rel=1e-9)


def test_adaptive_entropy_is_saved_and_restored(tmp_path: Any) -> None:
    settings = {
        "variant_overrides": {"regularizer": use("adaptive_entropy", target=10.0, delta=0.1)},
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
    }
    whole = runs.trained(tmp_path, "dapo", **settings)
    state = whole._states["regularizer.adaptive_entropy"]
    assert state["coef"] == pytest.approx(0.3)  # from 0, once after each of the first three steps
    resumed = runs.build(tmp_path, "dapo", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again = resumed._states["regularizer.adaptive_entropy"]
    assert again == {key: pytest.approx(value, rel=1e-5) for key, value in state.items()}


@component
def moving_baseline(rewards: torch.Tensor, state: dict[str, Any], *, decay: float = 0.5) -> Any:
    """Rewards against a moving average of the rollouts before."""
    baseline = state.get("mean", 0.0)
    mean = decay * baseline + (1 - decay) * float(rewards.mean())
    return rewards - baseline, {"mean": mean, "rollouts": state.get("rollouts", 0) + 1}


def test_the_state_of_a_rollout_component_moves_once_per_rollout_and_is_saved(tmp_path: Any) -> None:
    settings = {
        "variant_overrides": {"advantage_estimator": moving_baseline},
        "options": {"eval_dataset": tiny.dataset(6)},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
        "num_iterations": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 6,
    }
    whole = runs.trained(tmp_path, "reinforce_pp", **settings)
    means, baseline = [], 0.0
    for rollout, result, _ in (r for r in whole.spy.rollouts if len(r[0].rewards) == 8):
        rewards = result.rewards.double().mean().item()
        means.append(baseline)
        torch.testing.assert_close(
            result.states["advantage_estimator.moving_baseline"]["mean"],
            0.5 * baseline + 0.5 * rewards,
            atol=1e-6,
            rtol=0,
        )
        baseline = 0.5 * baseline + 0.5 * rewards
        assert rollout.max_length == 8
    assert len(means) == 3
    state = whole._states["advantage_estimator.moving_baseline"]
    assert state == {"mean": pytest.approx(baseline, abs=1e-6), "rollouts": 3}
    resumed = runs.build(tmp_path, "reinforce_pp", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed._states == whole._states


# -- one completion per prompt -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["reinforce", "reinforce_pp"])
def test_one_completion_per_prompt_is_enough_where_no_group_is_needed(variant: str, tmp_path: Any) -> None:
    model = tiny.model()
    before = runs.weights(model)
    trainer = runs.trained(tmp_path, variant, model=model, num_generations=1)
    rollout, result, _ = trainer.spy.rollouts[0]
    assert rollout.group_ids.tolist() == list(range(8))
    assert len({tuple(ids.tolist()) for ids in trainer.generated[0]["prompt_ids"]}) == 8
    assert all(math.isfinite(value) for entry in trainer.logs for value in entry.values())
    assert not torch.equal(runs.weights(model), before)
    tokens = result.advantages[rollout.mask] if result.advantages.dim() == 2 else result.advantages
    assert tokens.abs().min() > 0
    if variant == "reinforce_pp":  # whitened over all tokens of the batch
        assert float(tokens.double().mean()) == pytest.approx(0, abs=1e-5)
        assert float(tokens.double().std(correction=0)) == pytest.approx(1, abs=1e-5)
    else:
        assert tokens.tolist() == rollout.rewards.tolist()


def test_a_batch_of_one_completion_trains(tmp_path: Any) -> None:
    settings = {"num_generations": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    trainer = runs.trained(tmp_path, "reinforce", **settings)
    for entry in trainer.logs:  # one completion has no standard deviation
        assert entry.pop("reward_std") is None and entry.pop("rewards/low_words/std") is None
        assert all(math.isfinite(value) for value in entry.values())
    assert trainer.gradients[0].norm() > 0


# -- evaluation ----------------------------------------------------------------------------------------------------

STATEFUL = {
    "kl": KL("k3", placement="loss", coef=0.2, controller=ADAPTIVE),
    "regularizer": use("adaptive_entropy", target=10.0, delta=0.1),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation_gives_finite_numbers_and_changes_nothing(variant: str, tmp_path: Any) -> None:
    # pains F09: five prompts in batches of 4, so the last batch holds one completion.
    trainer = runs.build(
        tmp_path,
        variant,
        options={"eval_dataset": tiny.dataset(5)},
        num_generations_eval=1,
        per_device_eval_batch_size=4,
        max_steps=2,
    )
    trainer.train()
    before = runs.digest(trainer.model), trainer.kl_coef, trainer._next_kl_coef, copy.deepcopy(trainer._states)
    buffered = trainer._buffered_inputs
    result = trainer.evaluate()
    assert before == (runs.digest(trainer.model), trainer.kl_coef, trainer._next_kl_coef, trainer._states)
    assert trainer._buffered_inputs is buffered
    assert len(trainer.spy.rollouts[-1][0].rewards) == 1 and len(trainer.spy.rollouts[-2][0].rewards) == 4
    for name, value in result.items():
        assert math.isfinite(value), name
    (entry,) = (entry for entry in trainer.state.log_history if "eval_loss" in entry)
    for name in ("eval_reward", "eval_entropy", "eval_loss"):
        assert math.isfinite(entry[name])
    for name, value in entry.items():
        assert value is None or math.isfinite(value), name
        assert value is not None or name == "eval_reward_std", name  # of one completion: there is none
    assert trainer.model.training or trainer.evaluate() is not None


def test_evaluation_between_rollouts_moves_no_controller_and_no_state(tmp_path: Any) -> None:
    def run(**settings: Any) -> runs.Watched:
        # One micro-batch per rollout: evaluation draws random numbers, and with them TRL shuffles rows otherwise.
        return runs.trained(
            tmp_path,
            "trl_dapo",
            options={"eval_dataset": tiny.dataset(6), "rollout_func": runs.scripted()},
            variant_overrides=STATEFUL,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
            num_iterations=2,
            max_steps=5,
            per_device_eval_batch_size=4,
            **{**runs.SGD, **settings},
        )

    plain, evaluated = run(), run(eval_strategy="steps", eval_steps=1)
    assert len(evaluated.spy.rollouts) > len(plain.spy.rollouts)
    torch.testing.assert_close(runs.weights(plain.model), runs.weights(evaluated.model), atol=1e-5, rtol=0)
    coefficients = [[given["kl_coef"] for *_, given in run.spy.batches] for run in (plain, evaluated)]
    assert coefficients[0] == pytest.approx(coefficients[1], rel=1e-5) and len(set(coefficients[0])) == 3
    ((key, state),) = plain._states.items()
    assert evaluated._states[key] == {name: pytest.approx(value, rel=1e-4) for name, value in state.items()}
    assert state["step"] == 4 and state["coef"] != 0
    for entry in evaluated.state.log_history:
        if "eval_loss" in entry:
            assert min(abs(entry["eval_kl_coef"] - coefficient) for coefficient in coefficients[0]) < 1e-6


def test_groups_of_an_evaluation_are_whole(tmp_path: Any) -> None:
    trainer = runs.build(
        tmp_path, "grpo", options={"eval_dataset": tiny.dataset(5)}, per_device_eval_batch_size=4, max_steps=1
    )
    trainer.evaluate()
    assert [rollout.group_ids.tolist() for rollout, *_ in trainer.spy.rollouts] == [[0] * 4] * 5
    assert all(math.isfinite(value) for value in trainer.evaluate().values())


def test_an_evaluation_batch_that_cuts_groups_is_an_error(tmp_path: Any) -> None:
    # The config checks it where evaluation is planned; here it is called by hand.
    trainer = runs.build(tmp_path, "grpo", options={"eval_dataset": tiny.dataset(5)}, per_device_eval_batch_size=6)
    with pytest.raises(VariantError) as caught:
        trainer.evaluate()
    assert str(caught.value) == (
        "A batch of 6 completions holds no whole number of groups of 4. Set num_generations_eval: 1, or make "
        "per_device_eval_batch_size x processes a multiple of it."
    )
