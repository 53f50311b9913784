"""Greedy completions as a baseline: what they are, and what they are worth."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests import tiny
from tests.trainer import runs
from tests.trainer.greedy_runs import GREEDY, RESAMPLED, built, greedy_tokens, texts, trained
from trl_variants import KL


@pytest.mark.parametrize("generations", [1, 4])
def test_it_is_what_generate_gives_without_sampling_once_per_prompt(generations: int, tmp_path: Any) -> None:
    trainer = trained(tmp_path, num_generations=generations, max_steps=1)
    (asked,), (greedy,), (output,) = trainer.asked, trainer.greedy, trainer.generated
    assert len(asked) == len(set(asked)) == 8 // generations
    assert sorted(asked) == sorted(set(texts(output)))
    for prompt, tokens in greedy.items():  # the policy as it was before its step
        assert tokens == greedy_tokens(tiny.model(), prompt)
    assert output["completion_ids"].shape[0] == 8


def test_it_follows_the_policy(tmp_path: Any) -> None:
    model = tiny.model()
    trainer = built(tmp_path, model=model, max_steps=2, learning_rate=0.05, num_generations=1)
    snapshots: list[Any] = []

    class Snapshot(runs.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            snapshots.append({n: p.detach().clone() for n, p in model.state_dict().items()})

    trainer.add_callback(Snapshot())
    trainer.train()
    moved = tiny.model()
    moved.load_state_dict(snapshots[0])
    for prompt, tokens in trainer.greedy[1].items():
        assert tokens == greedy_tokens(moved, prompt)
    assert any(tokens != greedy_tokens(tiny.model(), prompt) for prompt, tokens in trainer.greedy[1].items())


def test_advantages_are_rewards_minus_the_greedy_reward(tmp_path: Any) -> None:
    trainer = trained(tmp_path, max_steps=3, reward_weights=[1.0, 0.5], rewards=[tiny.low_words, tiny.length])
    assert len(trainer.spy.rollouts) == 3
    found: set[float] = set()
    for (rollout, result, _), greedy, output in zip(
        trainer.spy.rollouts, trainer.greedy, trainer.generated, strict=True
    ):
        worth = {
            prompt: tiny.low_words([tokens])[0] + 0.5 * tiny.length([tokens])[0] for prompt, tokens in greedy.items()
        }
        assert result.advantages.ne(0).any()
        found |= set(worth.values())
        # Rows of a prompt lie side by side; what is buffered is shuffled.
        wanted = dict(zip(texts(output), output["greedy_rewards"].tolist(), strict=True))
        assert wanted == pytest.approx(worth, abs=1e-6)
        assert sorted(rollout.greedy_rewards.tolist()) == pytest.approx(
            sorted(value for value in worth.values() for _ in range(4)), abs=1e-6
        )
        torch.testing.assert_close(result.advantages, rollout.rewards - rollout.greedy_rewards)
    assert len(found) > 2
    for entry, (rollout, *_) in zip(trainer.logs, trainer.spy.rollouts, strict=True):
        assert entry["greedy/reward"] == pytest.approx(float(rollout.greedy_rewards.mean()), abs=1e-6)


def test_equal_prompts_are_generated_once_and_scored_by_their_own_columns(tmp_path: Any) -> None:
    prompts, numbers = ["w1 w2", "w1 w2", "w3 w4", "w1 w2"], [10, 20, 30, 10]
    dataset = Dataset.from_dict({"prompt": prompts, "number": numbers})
    seen: list[list[int]] = []

    def by_number(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        seen.append(number)
        return [n + share for n, share in zip(number, tiny.low_words(completion_ids), strict=True)]

    trainer = trained(
        tmp_path,
        options={"train_dataset": dataset},
        rewards=by_number,
        num_generations=2,
        max_steps=1,
        shuffle_dataset=False,
    )
    assert trainer.asked == [["w1 w2", "w3 w4"]]
    assert seen == [[10, 10, 20, 20, 30, 30, 10, 10], [10, 20, 30]]
    shares = [tiny.low_words([trainer.greedy[0][prompt]])[0] for prompt in prompts]
    wanted = [n + share for n, share in zip(numbers, shares, strict=True) for _ in range(2)]
    assert trainer.spy.rollouts[0][0].greedy_rewards.tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_conversation_is_a_prompt(tmp_path: Any) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in tiny.dataset(8)["prompt"]]})

    def characters(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    trainer = runs.Watched(
        model=tiny.model(),
        reward_funcs=characters,
        args=tiny.config(tmp_path, GREEDY, max_steps=1, shuffle_dataset=False),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.train()
    greedy = [tokenizer.decode(greedy_tokens(tiny.model(), p), skip_special_tokens=True) for p in ("w0 w3", "w1 w10")]
    wanted = [float(len(text)) for text in greedy for _ in range(4)]
    assert trainer.spy.rollouts[0][0].greedy_rewards.tolist() == wanted


def test_an_evaluation_has_greedy_completions_of_its_own(tmp_path: Any) -> None:
    trainer = built(
        tmp_path,
        max_steps=1,
        per_device_eval_batch_size=4,
        num_generations_eval=2,
        options={"eval_dataset": tiny.dataset(4)},
    )
    found = trainer.evaluate()
    assert [len(asked) for asked in trainer.asked] == [2, 2]
    worth = [tiny.low_words([tokens])[0] for greedy in trainer.greedy for tokens in greedy.values()]
    assert found["eval_greedy/reward"] == pytest.approx(sum(worth) / 4, abs=1e-6)
    assert trainer.num_generations_eval == 2


def test_completions_whose_greedy_one_is_unscored_are_unscored(tmp_path: Any) -> None:
    calls: list[int] = []

    def picky(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float | None]:
        calls.append(len(number))
        greedy = len(number) == 2
        shares = tiny.low_words(completion_ids)
        return [None if greedy and n == 1 else share for n, share in zip(number, shares, strict=True)]

    trainer = trained(tmp_path, rewards=picky, max_steps=1, shuffle_dataset=False)
    assert calls == [8, 2]
    (rollout, result, _), entry = trainer.spy.rollouts[0], trainer.logs[0]
    assert rollout.scored.tolist() == [True] * 4 + [False] * 4
    assert result.advantages[4:].tolist() == [0.0] * 4 and result.advantages[:4].ne(0).any()
    assert rollout.greedy_rewards[4:].tolist() == [0.0] * 4
    (worth,) = {value for value in rollout.greedy_rewards[:4].tolist()}
    assert entry["greedy/reward"] == pytest.approx(worth)
    assert math.isfinite(entry["loss"]) and entry["rewards/picky/mean"] == pytest.approx(entry["reward"])


def test_resampled_groups_bring_their_own_and_carried_ones_keep_it(tmp_path: Any) -> None:
    """Of the prompts in order, 1 and 2 have signal in the first two rounds of two, 4, 5 and 6 after that."""
    signal = {1, 2, 3, 4, 5, 6}

    def reward(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        shares = tiny.low_words(completion_ids)
        if len(number) < 8:  # greedy: a number of its own for each prompt
            return [100.0 + n for n in number]
        return [share + i if n in signal else 0.5 for i, (n, share) in enumerate(zip(number, shares, strict=True))]

    trainer = trained(tmp_path, rewards=reward, variant_overrides=RESAMPLED, shuffle_dataset=False, max_steps=2)
    assert [len(asked) for asked in trainer.asked] == [2, 2, 2]
    # Rounds (0 1) (2 3): 1 and 2 are trained on, 3 is carried. (4 5): 3 and 4.
    for index, (first, second) in enumerate([(1, 2), (3, 4)]):
        rollout, result, _ = trainer.spy.rollouts[index]
        assert rollout.greedy_rewards.tolist() == [100.0 + first] * 4 + [100.0 + second] * 4
        torch.testing.assert_close(result.advantages, rollout.rewards - rollout.greedy_rewards)
    assert trainer.logs[1]["sampling/carried_groups"] == 1
    assert trainer.logs[0]["greedy/reward"] == 101.5


def test_kl_in_the_reward_is_not_in_the_baseline(tmp_path: Any) -> None:
    kl = KL("k1", placement="sequence_reward", coef=0.5)
    trainer = trained(tmp_path, variant_overrides={"kl": kl}, max_steps=2, learning_rate=0.05)
    rollout, result, _ = trainer.spy.rollouts[1]
    k1 = ((rollout.log_probs - rollout.ref_log_probs) * rollout.mask).sum(1)
    assert k1.abs().max() > 1e-3
    torch.testing.assert_close(result.advantages, rollout.rewards - 0.5 * k1 - rollout.greedy_rewards)
