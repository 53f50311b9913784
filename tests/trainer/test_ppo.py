"""PPO on real runs: warm-up, epochs, target_kl, checkpoints."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from tests import tiny
from tests.trainer import runs
from tests.trainer.test_critic import KINDS, ppo
from trl_variants import VariantError

# -- warm-up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_while_the_critic_warms_up_the_policy_stays_bit_for_bit(kind: str, tmp_path: Any) -> None:  # pains E15
    # Weight decay and Adam's momentum would move weights also on a gradient of 0; here there is none.
    trainer = ppo(tmp_path, kind, max_steps=3, critic_warmup_steps=2, weight_decay=0.1)
    kept, critic = [runs.weights(trainer.model)], [runs.weights(trainer.critic.model)]
    step = trainer.critic.step

    def stepping() -> Any:
        metrics = step()
        kept.append(runs.weights(trainer.model))
        critic.append(runs.weights(trainer.critic.model))
        return metrics

    trainer.critic.step = stepping
    trainer.train()
    assert [torch.equal(kept[i], kept[i + 1]) for i in range(3)] == [True, True, False]
    assert not any(torch.equal(critic[i], critic[i + 1]) for i in range(3))
    assert trainer.gradients[:2] == [None, None] and trainer.gradients[2] is not None
    # What is learned then is the critic's term alone, coefficient included.
    for log in trainer.logs[:2]:
        assert log["loss"] == pytest.approx(0.1 * log["value_loss"], rel=1e-4)
        assert log["approx_kl"] == 0.0
    assert trainer.logs[2]["loss"] != pytest.approx(0.1 * trainer.logs[2]["value_loss"], rel=1e-2)


def test_the_critic_has_its_own_learning_rate_and_clipping(tmp_path: Any) -> None:
    def moved(**settings: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        trainer = ppo(tmp_path, options={"rollout_func": runs.scripted()}, max_steps=1, optim="sgd", **settings)
        policy, critic = runs.weights(trainer.model), runs.weights(trainer.critic.model)
        trainer.train()
        return (
            runs.weights(trainer.model) - policy,
            runs.weights(trainer.critic.model) - critic,
            trainer.logs[0],
        )

    policy, critic, log = moved(max_grad_norm=0.0, learning_rate=0.1)
    assert log["critic/learning_rate"] == 0.1
    same, tenfold, log = moved(max_grad_norm=0.0, learning_rate=0.1, critic_learning_rate=1.0)
    assert torch.equal(same, policy) and log["critic/learning_rate"] == 1.0
    torch.testing.assert_close(tenfold, 10 * critic, rtol=1e-3, atol=1e-6)
    same, clipped, log = moved(max_grad_norm=0.0, learning_rate=0.1, critic_max_grad_norm=1e-3)
    assert torch.equal(same, policy) and log["critic/grad_norm"] > 1e-3  # the norm before clipping
    torch.testing.assert_close(clipped.norm(), torch.tensor(0.1 * 1e-3), rtol=1e-2, atol=0)
    # The policy's clipping is not the critic's, and 0 is no clipping, for both.
    _, free, _ = moved(max_grad_norm=1e-3, learning_rate=0.1, critic_max_grad_norm=0.0)
    torch.testing.assert_close(free, critic)


def test_the_critics_schedule_is_the_policys(tmp_path: Any) -> None:
    trainer = ppo(
        tmp_path, max_steps=4, lr_scheduler_type="linear", warmup_steps=1, learning_rate=0.01, critic_learning_rate=0.04
    )
    trainer.train()
    policy = [log["learning_rate"] for log in trainer.logs]
    assert policy == [0.0, 0.01, pytest.approx(0.01 * 2 / 3), pytest.approx(0.01 / 3)]
    assert [log["critic/learning_rate"] for log in trainer.logs] == [pytest.approx(4 * rate) for rate in policy]


def test_a_lambda_of_its_own_for_the_targets(tmp_path: Any) -> None:
    def returns(**gae: Any) -> tuple[torch.Tensor, torch.Tensor]:
        overrides = {"advantage_estimator": gae, "kl": "none"}
        trainer = ppo(tmp_path, overrides=overrides, options={"rollout_func": runs.scripted()}, max_steps=1)
        with torch.no_grad():
            trainer.critic.model.head.weight.fill_(0.2)
        trainer.train()
        rollout, result, _ = trainer.spy.rollouts[0]
        return result, rollout

    result, rollout = returns(lam=0.5, lam_returns=1.0)
    other, _ = returns(lam=0.5)
    # With lambda = gamma = 1 and no KL the target of every token is the completion's reward.
    expected = rollout.rewards[:, None].expand_as(rollout.mask)
    torch.testing.assert_close(result.returns[rollout.mask], expected[rollout.mask])
    assert torch.equal(result.advantages, other.advantages) and not torch.equal(result.returns, other.returns)


# -- epochs over mini-batches --------------------------------------------------------------------------------------


def test_steps_per_rollout_are_mini_batches_times_epochs_and_each_epoch_sees_each_row_once(tmp_path: Any) -> None:
    # 16 rows in 4 mini-batches of 2 micro-batches of 2; 3 epochs: 12 optimizer steps on a rollout.
    trainer = ppo(
        tmp_path,
        per_device_train_batch_size=2,
        steps_per_generation=8,
        num_iterations=3,
        max_steps=24,
        learning_rate=1e-4,
    )
    trainer.train()
    assert trainer.generations_before_step == [1] * 12 + [2] * 12
    assert len(trainer.gradients) == len(trainer.critic_gradients) == 24
    rewards = [batch.advantages[:, 0].tolist() for batch, *_ in trainer.spy.batches[: 12 * 2]]
    epochs = [rewards[8 * i : 8 * (i + 1)] for i in range(3)]
    flat = [[value for part in epoch for value in part] for epoch in epochs]
    assert sorted(flat[0]) == sorted(flat[1]) == sorted(flat[2]) and len(set(flat[0])) > 6
    assert flat[0] != flat[1] and flat[1] != flat[2]  # other mini-batches in each epoch
    assert [log["epochs_run"] for log in trainer.logs if "epochs_run" in log] == [3.0, 3.0]


def test_a_row_keeps_what_its_rollout_fixed_when_it_moves_to_another_mini_batch(tmp_path: Any) -> None:
    trainer = ppo(tmp_path, num_iterations=3, max_steps=6, learning_rate=1e-3)
    trainer.train()
    seen: dict[tuple[float, ...], tuple[Any, ...]] = {}
    for number, (batch, *_) in enumerate(trainer.spy.batches):
        for row in range(len(batch.mask)):
            mask = batch.mask[row]
            key = tuple(batch.ref_log_probs[row][mask].tolist())
            fixed = tuple(
                tuple(getattr(batch, name)[row][mask].tolist())
                for name in ("advantages", "old_values", "returns", "old_log_probs")
            )
            assert seen.setdefault(key, fixed) == fixed, number
    assert len(seen) == 16
    # Totals are those of the new mini-batches.
    for first, second in zip(trainer.spy.batches[::2], trainer.spy.batches[1::2], strict=True):
        tokens = float(first[0].mask.sum() + second[0].mask.sum())
        assert first[0].totals.tokens == second[0].totals.tokens == tokens


def test_grpo_keeps_trls_order_of_mini_batches(tmp_path: Any) -> None:
    trainer = runs.trained(tmp_path, "grpo", steps_per_generation=4, num_iterations=2, max_steps=4)
    order = [batch.advantages.flatten().tolist() for batch, *_ in trainer.spy.batches]
    assert order[:4] == order[4:]
    again = runs.trained(
        tmp_path, "grpo", steps_per_generation=4, num_iterations=2, max_steps=4, variant_overrides={"reshuffle": True}
    )
    order = [batch.advantages.flatten().tolist() for batch, *_ in again.spy.batches]
    assert order[:4] != order[4:] and sorted(sum(order[:4], [])) == sorted(sum(order[4:], []))


# -- target_kl -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_target_kl_stops_the_rest_of_a_rollout_and_only_that(kind: str, tmp_path: Any) -> None:
    settings = {"num_iterations": 3, "max_steps": 12, "learning_rate": 0.01, "weight_decay": 0.1}
    free = ppo(tmp_path, kind, **settings)
    free.train()
    measured = [log["approx_kl"] for log in free.logs[:6]]
    target = (measured[2] + measured[3]) / 2  # passed by the fourth step, which is run to its end
    assert measured[2] < target < measured[3]
    trainer = ppo(tmp_path, kind, target_kl=target, **settings)
    kept: list[torch.Tensor] = []
    step = trainer.critic.step
    forwards: list[int] = []
    trainer.model.base_model.register_forward_hook(lambda *_: forwards.append(trainer.state.global_step))

    def stepping() -> Any:
        metrics = step()
        kept.append(torch.cat([runs.weights(trainer.model), runs.weights(trainer.critic.model)]))
        return metrics

    trainer.critic.step = stepping
    trainer.train()
    assert [gradient is None for gradient in trainer.gradients[:6]] == [False] * 4 + [True] * 2
    assert [gradient is None for gradient in trainer.critic_gradients[:6]] == [False] * 4 + [True] * 2
    assert torch.equal(kept[3], kept[4]) and torch.equal(kept[4], kept[5]) and not torch.equal(kept[2], kept[3])
    assert not {4, 5} & set(forwards) and 6 in forwards  # no forward at all, until the next rollout
    assert trainer.state.global_step == 12 and trainer.generations_before_step == [1] * 6 + [2] * 6
    assert trainer.gradients[6] is not None
    run = [log["epochs_run"] for log in trainer.logs if "epochs_run" in log]
    assert run[0] == 2.0 and len(run) == 2
    assert all("approx_kl" not in log for log in trainer.logs[4:6])


def test_approx_kl_is_a_mean_over_the_tokens_of_the_whole_step(tmp_path: Any) -> None:
    trainer = ppo(tmp_path, num_iterations=2, max_steps=4)
    trainer.train()
    for log, first, second in zip(trainer.logs, trainer.spy.batches[::2], trainer.spy.batches[1::2], strict=True):
        ratios = torch.cat([(b.log_probs - b.old_log_probs).detach()[b.mask] for b in (first[0], second[0])]).double()
        assert log["approx_kl"] == pytest.approx(float((ratios.exp() - 1 - ratios).mean()), rel=1e-3, abs=1e-7)
    assert trainer.logs[3]["approx_kl"] > 1e-4


def test_target_kl_works_for_a_variant_without_a_critic(tmp_path: Any) -> None:
    trainer = runs.trained(tmp_path, "grpo", num_iterations=4, max_steps=4, target_kl=1e-9)
    assert [gradient is None for gradient in trainer.gradients] == [False, False, True, True]


# -- what is logged ------------------------------------------------------------------------------------------------


def test_the_critics_metrics_are_those_of_a_loop_over_the_rollout(tmp_path: Any) -> None:
    trainer = ppo(tmp_path, num_iterations=2, max_steps=8, critic_learning_rate=0.05)
    trainer.train()
    log = trainer.logs[4]  # the second rollout, whose values are no longer 0
    rollout, result, _ = trainer.spy.rollouts[1]
    values, returns = rollout.values[rollout.mask].double(), result.returns[rollout.mask].double()
    assert log["values/mean"] == pytest.approx(values.mean().item(), rel=1e-4)
    assert log["returns/mean"] == pytest.approx(returns.mean().item(), rel=1e-4)
    assert log["returns/std"] == pytest.approx(returns.std(correction=0).item(), rel=1e-4)
    explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert log["explained_variance"] == pytest.approx(explained.item(), rel=1e-3)
    for number, log in enumerate(trainer.logs):
        pairs, clipped, losses = trainer.spy.batches[2 * number : 2 * number + 2], [], []
        for batch, *_ in pairs:
            for v, old, r in zip(
                *(getattr(batch, n)[batch.mask].tolist() for n in ("values", "old_values", "returns")), strict=True
            ):
                near = min(max(v, old - 0.2), old + 0.2)
                clipped.append((near - r) ** 2 > (v - r) ** 2)
                losses.append(max((v - r) ** 2, (near - r) ** 2) / 2)
        assert log["clip_ratio/value"] == pytest.approx(sum(clipped) / len(clipped), abs=1e-6)
        assert log["value_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert max(log["clip_ratio/value"] for log in trainer.logs) > 0


# -- checkpoints ---------------------------------------------------------------------------------------------------

SAVED: dict[str, Any] = {
    "rows": 64,  # the run ends within the first pass over the prompts
    "num_iterations": 2,
    "max_steps": 12,
    "save_strategy": "steps",
    "save_steps": 4,
    "lr_scheduler_type": "linear",
    "critic_learning_rate": 0.02,
    "critic_warmup_steps": 1,
    "overrides": {"kl": {"controller": {"name": "adaptive", "target": 0.01, "horizon": 80}}},
}


@functools.cache
def whole(kind: str, folder: Path) -> runs.Watched:
    trainer = ppo(folder, kind, **SAVED)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ppo")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [4, 8])
def test_a_resumed_run_equals_the_uninterrupted_one_critic_and_all(
    kind: str, step: int, folder: Path, tmp_path: Any
) -> None:
    # pains E10. Rollouts begin before steps 1, 5 and 9.
    uninterrupted = whole(kind, folder / kind)
    shutil.copytree(folder / kind / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    trainer = ppo(tmp_path, kind, **SAVED)
    trainer.train(resume_from_checkpoint=True)
    assert torch.equal(runs.weights(trainer.model), runs.weights(uninterrupted.model))
    assert torch.equal(runs.weights(trainer.critic.model), runs.weights(uninterrupted.critic.model))
    mine, theirs = (t.critic._optimizer.state_dict() for t in (trainer, uninterrupted))
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()
    for key, state in mine["state"].items():
        assert all(torch.equal(value, theirs["state"][key][name]) for name, value in state.items())
    assert trainer.critic._scheduler.state_dict() == uninterrupted.critic._scheduler.state_dict()
    assert trainer._next_kl_coef == uninterrupted._next_kl_coef != 0.05
    for mine, theirs in zip(trainer.logs[step:], uninterrupted.logs[step:], strict=True):
        timed = ("step_time", "train_runtime", "epoch", "speed/")
        mine, theirs = ({k: v for k, v in log.items() if not k.startswith(timed)} for log in (mine, theirs))
        assert mine == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_policy_has_nothing_of_the_critic(kind: str, folder: Path, tmp_path: Any) -> None:
    uninterrupted = whole(kind, folder / kind)
    uninterrupted.save_model(str(tmp_path / "export"))
    for place in (tmp_path / "export", folder / kind / "checkpoint-12"):
        loaded, info = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
        assert not info["unexpected_keys"] and not info["missing_keys"]
        assert torch.equal(runs.weights(loaded), runs.weights(uninterrupted.model))
    assert not [path for path in (tmp_path / "export").rglob("*") if "critic" in path.name]


def test_the_critic_of_a_checkpoint_is_a_start_for_another_run(folder: Path, tmp_path: Any) -> None:
    uninterrupted = whole("separate", folder / "separate")
    critic = folder / "separate" / "checkpoint-12" / "critic"
    trainer = ppo(tmp_path, critic_model=str(critic))
    assert torch.equal(runs.weights(trainer.critic.model), runs.weights(uninterrupted.critic.model))
    trainer.train()


def test_a_checkpoint_without_the_critic_is_no_place_to_go_on_from(folder: Path, tmp_path: Any) -> None:
    whole("shared", folder / "shared")
    shutil.copytree(folder / "shared" / "checkpoint-4", tmp_path / "a" / "checkpoint-4")
    with pytest.raises(VariantError, match="of another kind than this run's"):
        ppo(tmp_path / "a", **SAVED).train(resume_from_checkpoint=True)
    shutil.rmtree(tmp_path / "a" / "checkpoint-4" / "critic")
    with pytest.raises(VariantError, match="has no critic"):
        ppo(tmp_path / "a", "shared", **SAVED).train(resume_from_checkpoint=True)


def test_save_only_model_leaves_the_optimizers_out(tmp_path: Any) -> None:
    trainer = ppo(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, save_only_model=True)
    trainer.train()
    critic = tmp_path / "checkpoint-1" / "critic"
    assert not (critic / "optimizer.pt").exists() and (critic / "config.json").exists()
    names = {name for name, _ in trainer.critic.model.named_parameters()}
    assert set(load_file(critic / "critic.safetensors")) == names


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_model_comes_back_with_its_critic(kind: str, tmp_path: Any) -> None:
    options = {"eval_dataset": tiny.dataset(4)}
    best = {"metric_for_best_model": "eval_step", "greater_is_better": False, "load_best_model_at_end": True}
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = ppo(
        tmp_path,
        kind,
        options=options,
        max_steps=6,
        num_generations_eval=1,
        per_device_eval_batch_size=4,
        **saving,
        **best,
    )
    evaluate = trainer.evaluate
    trainer.evaluate = lambda **kwargs: {**evaluate(**kwargs), "eval_step": trainer.state.global_step}
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    saved = load_file(tmp_path / "checkpoint-2" / "critic" / "critic.safetensors")
    assert all(torch.equal(p, saved[name]) for name, p in trainer.critic.model.named_parameters())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert torch.equal(runs.weights(loaded), runs.weights(trainer.model))


def test_a_checkpoint_is_whole_before_it_is_pushed(tmp_path: Any) -> None:
    trainer = ppo(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    pushed: list[list[str]] = []
    save = trainer._save_optimizer_and_scheduler

    def saving(folder: str) -> None:
        pushed.append(sorted(path.name for path in Path(folder).iterdir()))
        save(folder)

    trainer._save_optimizer_and_scheduler = saving
    trainer.train()
    assert {"critic", "variant_state.pt"} <= set(pushed[0])


class Stop(TrainerCallback):
    """Ends a run after its first micro-batch."""

    def __init__(self) -> None:
        self.done = False

    def on_substep_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
        control.should_training_stop, self.done = not self.done, True


def test_a_step_that_was_cut_off_leaves_nothing_for_the_next_run(tmp_path: Any) -> None:
    options = {"rollout_func": runs.scripted()}
    whole = {"max_steps": 1, "steps_per_generation": 2}  # one step sees all rows
    stopped = ppo(tmp_path, options={**options, "callbacks": [Stop()]}, **whole)
    stopped.train()
    stopped.train()
    fresh = ppo(tmp_path, options=options, **whole)
    fresh.train()
    torch.testing.assert_close(stopped.critic_gradients[-1], fresh.critic_gradients[0])
    assert stopped.logs[-1]["value_loss"] == pytest.approx(fresh.logs[0]["value_loss"])


def test_a_warm_up_as_long_as_the_run_is_refused(tmp_path: Any) -> None:
    with pytest.raises(VariantError, match="leaves none of the 2 steps for the policy"):
        ppo(tmp_path, max_steps=-1, num_train_epochs=1, critic_warmup_steps=1000).train()


# -- padding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_pad_equal_to_eos_changes_nothing(kind: str, tmp_path: Any) -> None:  # pains E13
    def run(pad_is_eos: bool) -> runs.Watched:
        tokenizer, model = tiny.tokenizer(), tiny.model()
        if pad_is_eos:
            tokenizer.pad_token = tokenizer.eos_token
            model.config.pad_token_id = model.generation_config.pad_token_id = 1
        options = {"rollout_func": runs.scripted(), "processing_class": tokenizer}
        trainer = ppo(
            tmp_path,
            kind,
            model=model,
            options=options,
            overrides={"reward_shaper": {"name": "missing_eos_penalty", "penalty": 0.5}},
            critic_learning_rate=0.05,
            num_iterations=2,
            max_steps=8,
        )
        trainer.train()
        return trainer

    apart, equal = run(False), run(True)
    assert (equal.generated[0]["completion_ids"] == 0).sum() == 0 < (apart.generated[0]["completion_ids"] == 0).sum()
    for (mine, first, _), (theirs, second, _) in zip(apart.spy.rollouts, equal.spy.rollouts, strict=True):
        assert torch.equal(mine.mask, theirs.mask) and torch.equal(mine.rewards, theirs.rewards)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(first.advantages, second.advantages, rtol=1e-4, atol=1e-5)
    assert float(apart.spy.rollouts[1][0].values.abs().max()) > 0.01
    assert apart.losses == pytest.approx(equal.losses, rel=1e-4, abs=1e-6)


# -- everything at once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_of_document_002_goes_together(kind: str, tmp_path: Any) -> None:
    async def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    overrides = {
        "reward_shaper": [
            {"name": "clip_rewards", "low": 0.0, "high": 6.0},
            {"name": "missing_eos_penalty", "penalty": 1.0},
            "whiten_token_rewards",
        ],
        "regularizer": ["value_loss", {"name": "entropy_bonus", "coef": 0.01}],
        "kl": {"controller": {"name": "adaptive", "target": 0.05}},
        "advantage_estimator": {"bootstrap_truncated": True, "lam_returns": 1.0},
    }
    trainer = ppo(tmp_path, kind, overrides=overrides, rewards=reward, num_iterations=2, max_steps=8, target_kl=0.5)
    trainer.train()
    assert all(gradient.isfinite().all() for gradient in trainer.gradients if gradient is not None)
    assert trainer.recipe.regularizers[0].parameters["coef"] == 0.1  # the variant's own component keeps its values
    assert {"entropy_bonus", "value_loss", "explained_variance"} <= set(trainer.logs[4])
