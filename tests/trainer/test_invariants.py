"""What must hold on a real run, whatever the variant (design.md, section 4)."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.trainer import runs
from tests.trainer.variants import RECIPES, REUSING

# -- the learning phase --------------------------------------------------------------------------------------------


class Frozen(runs.Watched):
    """Remembers what each micro-batch held at its first visit, and the policy as it was at the rollout."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.at_rollout = copy.deepcopy({k: v.detach() for k, v in self.model.state_dict().items()})
        self.first_seen: dict[int, dict[str, Tensor]] = {}
        self.visits = 0
        return super()._generate_and_score_completions(inputs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        names = ("advantages", "ref_per_token_logps", "loss_mask", "rewards")
        seen = self.first_seen.setdefault(id(inputs), {name: inputs[name].clone() for name in names})
        for name in names:
            assert torch.equal(seen[name], inputs[name]), f"{name} changed while learning"
        loss = super()._compute_loss(model, inputs)
        batch = self.spy.batches[-1][0]
        old = seen.setdefault("old", batch.old_log_probs.clone())
        assert torch.equal(old, batch.old_log_probs), "old log-probs changed while learning"
        self.visits += 1
        self.check_old(inputs, old)
        return loss

    def check_old(self, inputs: dict[str, Any], old: Tensor) -> None:
        """They are those of the policy at the rollout, from a plain forward in float64."""
        policy = tiny.model()
        policy.load_state_dict(self.at_rollout)
        expected = runs.log_probs(policy, inputs)
        mask = inputs["loss_mask"]
        torch.testing.assert_close(old[mask].double(), expected[mask], atol=2e-5, rtol=0)


@pytest.mark.parametrize("variant", ["grpo", "trl_rloo", "reinforce_pp"])
def test_what_the_rollout_fixed_never_changes_while_learning(variant: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(runs, "Watched", Frozen)
    trainer = runs.trained(tmp_path, variant, steps_per_generation=4, num_iterations=3, max_steps=8)
    # Two mini-batches, three epochs: six steps for the first rollout; the other two, of two micro-batches each,
    # begin the second.
    assert len(trainer.spy.rollouts) == 2 and trainer.visits == 4 and len(trainer.spy.batches) == 16
    moved = [not torch.equal(batch.log_probs, batch.old_log_probs) for batch, *_ in trainer.spy.batches]
    assert moved == [False] * 2 + [True] * 10 + [False] * 2 + [True] * 2


def test_the_optimizer_steps_mini_batches_times_epochs_per_rollout(tmp_path: Any) -> None:
    trainer = runs.build(tmp_path, "grpo", steps_per_generation=6, num_iterations=2, max_steps=13)
    steps = []
    create = trainer.create_optimizer

    def counted(*args: Any, **kwargs: Any) -> Any:
        optimizer = create(*args, **kwargs)
        optimizer.register_step_post_hook(lambda *_: steps.append(len(trainer.generated)))
        return optimizer

    trainer.create_optimizer = counted
    trainer.train()
    # 6 / 2 = 3 mini-batches, 2 epochs: 6 steps on each of the first two rollouts, the 13th begins the third.
    assert steps == trainer.generations_before_step == [1] * 6 + [2] * 6 + [3]


def test_reference_and_reward_model_never_change_and_the_policy_does(tmp_path: Any) -> None:
    judge = runs.reward_model()
    trainer = runs.build(
        tmp_path,
        "grpo",
        rewards=[judge, tiny.low_words],
        options={"reward_processing_classes": [tiny.tokenizer(), None]},
        num_iterations=2,
        max_steps=4,
    )
    before = runs.digest(trainer.model), runs.digest(trainer.ref_model), runs.digest(judge)
    assert before[0] == before[1]
    trainer.train()
    after = runs.digest(trainer.model), runs.digest(trainer.ref_model), runs.digest(judge)
    assert after[0] != before[0] and after[1:] == before[1:]
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())


@pytest.mark.parametrize("variant", REUSING)
def test_the_first_step_after_a_rollout_has_ratio_one_and_clips_nothing(variant: str, tmp_path: Any) -> None:
    trainer = runs.trained(tmp_path, variant, steps_per_generation=4, num_iterations=2, max_steps=5, learning_rate=0.03)
    # Two mini-batches of two micro-batches, two epochs; the fifth step is the first on the second rollout.
    later = []
    for index, (batch, result, _) in enumerate(trainer.spy.batches):
        shares = [float(m.total) for name, m in result.metrics.items() if name.startswith("clip_ratio/")]
        assert shares
        if index in (0, 1, 8, 9):
            assert torch.equal(batch.log_probs, batch.old_log_probs)
            assert not any(shares), f"{variant} clips on-policy"
        else:
            later.append(sum(shares))
    if RECIPES[variant].clip_rule.name == "ppo_clip":
        assert max(later) > 0  # it would have been seen


def test_with_dropout_too_the_first_step_has_ratio_one(tmp_path: Any) -> None:
    # A scoring pass of its own would draw other dropout, and on other machines round in another way.
    model = runs.variation(attention_dropout=0.5)
    trainer = runs.trained(tmp_path, "grpo", model=model, steps_per_generation=4, num_iterations=2, max_steps=4)
    ones = [torch.equal(batch.log_probs, batch.old_log_probs) for batch, *_ in trainer.spy.batches]
    assert ones == [True] * 2 + [False] * 6


def test_the_end_of_an_epoch_cuts_no_rollout_and_no_step(tmp_path: Any) -> None:
    # Five prompts, two to a rollout: the fifth waits for the next epoch, and every step has its two micro-batches.
    trainer = runs.trained(tmp_path, "grpo", rows=5, max_steps=-1, num_train_epochs=2, num_iterations=2)
    assert trainer.generations_before_step == [1, 1, 2, 2, 3, 3, 4, 4]
    assert len(trainer.spy.batches) == 16
    assert {batch.totals.rows for batch, *_ in trainer.spy.batches} == {8.0}


def test_a_streamed_dataset_follows_the_same_schedule(tmp_path: Any) -> None:
    options = {"train_dataset": tiny.dataset().to_iterable_dataset()}
    trainer = runs.trained(tmp_path, "grpo", options=options, num_iterations=2, max_steps=6)
    assert trainer.generations_before_step == [1, 1, 2, 2, 3, 3]
    ones = [torch.equal(batch.log_probs, batch.old_log_probs) for batch, *_ in trainer.spy.batches]
    assert ones == [True, True, False, False] * 3


def test_mixed_precision_has_ratio_one_too(tmp_path: Any) -> None:
    trainer = runs.trained(tmp_path, "grpo", bf16=True, steps_per_generation=4, max_steps=2)
    batches = [batch for batch, *_ in trainer.spy.batches]
    for name in ("log_probs", "old_log_probs", "ref_log_probs", "entropies", "advantages"):
        assert {getattr(batch, name).dtype for batch in batches} == {torch.float32}
    assert [torch.equal(batch.log_probs, batch.old_log_probs) for batch in batches] == [True, True, False, False]


def test_a_model_in_bfloat16_has_ratio_one_too_and_components_see_float32(tmp_path: Any) -> None:
    model = tiny.model(dtype=torch.bfloat16)
    trainer = runs.trained(tmp_path, "grpo", model=model, steps_per_generation=4, max_steps=2)
    batches = [batch for batch, *_ in trainer.spy.batches]
    for name in ("log_probs", "old_log_probs", "ref_log_probs", "entropies", "advantages"):
        assert {getattr(batch, name).dtype for batch in batches} == {torch.float32}
    assert [torch.equal(batch.log_probs, batch.old_log_probs) for batch in batches] == [True, True, False, False]


def test_the_sampling_temperature_is_that_of_every_log_prob(tmp_path: Any) -> None:
    trainer = runs.build(tmp_path, "rloo", temperature=0.5, max_steps=1)
    policy = copy.deepcopy(tiny.model())
    trainer.train()
    (output,) = trainer.generated
    mask, expected = output["loss_mask"], runs.log_probs(policy, output, temperature=0.5)
    for name in ("rollout_log_probs", "ref_per_token_logps"):
        torch.testing.assert_close(output[name][mask].double(), expected[mask], atol=2e-5, rtol=0)
    learnt = torch.cat([batch.log_probs.detach()[batch.mask] for batch, *_ in trainer.spy.batches])
    torch.testing.assert_close(learnt.double().sort()[0], expected[mask].sort()[0], atol=2e-5, rtol=0)
    (entry,) = trainer.logs
    assert entry["kl"] == pytest.approx(0, abs=1e-6)
    assert entry["entropy"] == pytest.approx(float(runs.entropies(policy, output, 0.5)[mask].mean()), abs=1e-4)


# -- masked places -------------------------------------------------------------------------------------------------


class Junk(runs.Watched):
    """Puts a value into every masked position of every tensor per token."""

    value = 0.0

    def _forward(self, model: Any, inputs: dict[str, Any], **kwargs: Any) -> Any:
        log_probs, entropies, aux = super()._forward(model, inputs, **kwargs)
        mask = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            mask = mask & inputs["tool_mask"].bool()
        log_probs = log_probs.masked_fill(~mask, self.value)
        return log_probs, entropies if entropies is None else entropies.masked_fill(~mask, self.value), aux


def env_mask(prompt: str, index: int, tokens: list[int]) -> list[int]:
    """Every third token was written by the environment."""
    return [int(i % 3 != 1) for i in range(len(tokens))]


@pytest.mark.parametrize("variant", ["grpo", "reinforce_pp", "trl_rloo", "gspo"])
def test_junk_at_masked_places_changes_nothing(variant: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(runs, "Watched", Junk)

    def run(value: float) -> tuple[runs.Watched, list[dict[str, Any]]]:
        monkeypatch.setattr(Junk, "value", value)
        options = {"rollout_func": runs.scripted(env_mask=env_mask)}
        trainer = runs.trained(tmp_path, variant, options=options, num_iterations=2, max_steps=2)
        return trainer, [
            {k: v for k, v in entry.items() if not k.endswith("step_time") and "speed/" not in k}
            for entry in trainer.logs
        ]

    clean, logs = run(0.0)
    assert clean.gradients[-1].isfinite().all() and all(0 < batch.mask.sum() for batch, *_ in clean.spy.batches)
    for value in (math.nan, math.inf, -math.inf, 200.0, -200.0):
        spoilt, other = run(value)
        assert torch.equal(runs.weights(clean.model), runs.weights(spoilt.model)), value
        assert torch.equal(clean.gradients[-1], spoilt.gradients[-1]), value
        assert logs == other, value
