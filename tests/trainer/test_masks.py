"""Which tokens count on a real run: tools, truncation, stop tokens, padding and lengths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests import tiny
from tests.trainer import runs
from tests.trainer.test_rewards import by_place, rollout_of
from trl_variants import resolve

# -- tokens of tools and environments ------------------------------------------------------------------------------


def env_mask(prompt: str, index: int, tokens: list[int]) -> list[int]:
    """Tokens 1, 4, 7 ... are the environment's, and so is all of the first completion of a group."""
    return [int(i % 3 != 1 and index != 0) for i in range(len(tokens))]


def tool_run(folder: Any, variant: str = "grpo", write: Any = runs.completion, **settings: Any) -> runs.Watched:
    return runs.trained(
        folder,
        variant,
        options={"rollout_func": runs.scripted(write, env_mask=env_mask)},
        **{"max_steps": 1, "learning_rate": 0.0, "max_grad_norm": 0.0, **settings},
    )


def test_tool_tokens_are_attended_and_carry_neither_loss_nor_weight(tmp_path: Any) -> None:
    overrides = {"sample_filter": "none", "sampling": "mask", "reward_shaper": "none"}
    trainer = tool_run(tmp_path, "dapo", variant_overrides=overrides)
    rollout, result = rollout_of(trainer)
    (output,) = trainer.generated
    policy_tokens = (output["completion_mask"] * output["tool_mask"]).bool()
    assert torch.equal(rollout.mask, policy_tokens) and not rollout.mask[0].any()
    assert torch.equal(rollout.lengths, output["completion_mask"].sum(1))
    # The denominator counts policy tokens, and the loss is the mean over them alone.
    batches = [batch for batch, *_ in trainer.spy.batches]
    assert {batch.totals.tokens for batch in batches} == {float(policy_tokens.sum())}
    assert {batch.totals.sequences for batch in batches} == {6.0} and {batch.totals.rows for batch in batches} == {8.0}
    expected = -sum(a * n for a, n in zip(result.advantages.tolist(), policy_tokens.sum(1).tolist(), strict=True))
    assert trainer.logs[0]["loss"] == pytest.approx(expected / float(policy_tokens.sum()), abs=1e-6)
    # Changing a tool token changes the log-probs of the tokens after it.
    policy = tiny.model()
    other = {**output, "completion_ids": output["completion_ids"].clone()}
    row = next(i for i in range(8) if output["completion_mask"][i].sum() > 3 and policy_tokens[i].any())
    other["completion_ids"][row, 1] = (other["completion_ids"][row, 1] + 5) % 29 + 3
    before, after = runs.log_probs(policy, output), runs.log_probs(policy, other)
    assert (before - after)[row, 2].abs() > 1e-3 and torch.equal(before[row, :1], after[row, :1])


def test_entropy_and_kl_are_of_the_policys_tokens_alone(tmp_path: Any) -> None:
    # pains D09. Two steps on one rollout, so that the KL of the second is not 0.
    trainer = tool_run(tmp_path, "grpo", steps_per_generation=4, max_steps=2, learning_rate=0.05)
    for step in range(2):
        window = trainer.spy.batches[2 * step : 2 * step + 2]
        tokens = sum(int(b.mask.sum()) for b, *_ in window)
        d = torch.cat([(b.log_probs - b.ref_log_probs)[b.mask].double() for b, *_ in window])
        entropies = torch.cat([b.entropies[b.mask].double() for b, *_ in window])
        assert len(d) == len(entropies) == tokens < sum(b.mask.numel() for b, *_ in window)
        assert trainer.logs[step]["kl"] == pytest.approx(float(((-d).exp() + d - 1).mean()), abs=1e-6)
        assert trainer.logs[step]["entropy"] == pytest.approx(float(entropies.mean()), abs=1e-6)
    assert trainer.logs[1]["kl"] > 1e-4


@pytest.mark.parametrize("variant", ["grpo", "gspo", "trl_rloo", "reinforce_pp", "cispo"])
def test_an_impossible_tool_token_harms_nothing(variant: str, tmp_path: Any) -> None:
    # A model that gives token 9 a log-prob of about -1e4: as a tool token it must neither reach the loss nor, through
    # exp, the gradient. Two epochs, so that ratios are not 1.
    def write(prompt: str, index: int) -> list[int]:
        tokens = runs.completion(prompt, index)
        return [9 if i % 3 == 1 else (10 if t == 9 else t) for i, t in enumerate(tokens)]

    def run() -> runs.Watched:
        model = tiny.model()
        with torch.no_grad():
            head = torch.nn.Linear(16, 32)
            head.weight.copy_(model.lm_head.weight)
            head.bias.zero_()
            head.bias[9] = -1e4
        model.lm_head = head.requires_grad_(False)
        return runs.trained(
            tmp_path,
            variant,
            model=model,
            options={"rollout_func": runs.scripted(write, env_mask=env_mask)},
            num_iterations=2,
            max_steps=2,
            **runs.SGD,
        )

    trainer = run()
    assert runs.weights(trainer.model).isfinite().all()
    assert all(math.isfinite(value) for entry in trainer.logs for value in entry.values())
    assert all(gradient.isfinite().all() for gradient in trainer.gradients) and trainer.gradients[0].norm() > 0
    (output,) = trainer.generated
    assert runs.log_probs(trainer.model, output)[output["completion_ids"] == 9].max() < -1000


# -- truncation ----------------------------------------------------------------------------------------------------


def cut(prompt: str, index: int) -> list[int]:
    """Completion 0 of a group is cut at the limit of 8 tokens; the others end by themselves after 3."""
    return [5 + index] * 8 if index == 0 else [5, 6 + index, 1]


def test_truncated_completions_can_be_left_out_of_loss_and_denominator_but_not_of_lengths(tmp_path: Any) -> None:
    # pains A04, F06: of 8 completions 2 are cut. The loss is that of the remaining six alone.
    trainer = runs.trained(
        tmp_path,
        "trl_dapo",
        rewards=by_place([1, 0, 0.5, 0]),
        options={"rollout_func": runs.scripted(cut)},
        variant_overrides={"sample_filter": "truncated"},
        max_steps=1,
        learning_rate=0.0,
    )
    rollout, result = rollout_of(trainer)
    assert rollout.truncated.tolist() == result.keep.logical_not().tolist() == [True, False, False, False] * 2
    batches = [batch for batch, *_ in trainer.spy.batches]
    assert {batch.totals.tokens for batch in batches} == {18.0}
    a = result.advantages.tolist()
    assert trainer.logs[0]["loss"] == pytest.approx(-sum(3 * a[i] for i in (1, 2, 3, 5, 6, 7)) / 18, abs=1e-6)
    entry = trainer.logs[0]
    assert entry["completions/mean_length"] == pytest.approx((8 + 3 + 3 + 3) / 4)
    assert entry["completions/max_length"] == 8 and entry["completions/clipped_ratio"] == 0.25
    assert entry["keep_ratio"] == 0.75


@pytest.mark.parametrize("variant", ["grpo", "dapo", "gspo", "trl_grpo", "reinforce_pp"])
def test_a_step_with_nothing_left_moves_nothing(variant: str, tmp_path: Any) -> None:
    model = tiny.model()
    before = runs.weights(model)
    trainer = runs.trained(
        tmp_path,
        variant,
        model=model,
        options={"rollout_func": runs.scripted(lambda prompt, index: [5 + index] * 8)},
        variant_overrides={"sample_filter": "truncated"},
        max_steps=1,
        **runs.SGD,
    )
    assert torch.equal(runs.weights(model), before)
    assert trainer.logs[0]["loss"] == 0 and trainer.logs[0]["keep_ratio"] == 0
    assert all(value is None or math.isfinite(value) for value in trainer.logs[0].values())


def test_padding_after_a_completion_without_a_stop_token_is_in_no_loss(tmp_path: Any) -> None:
    # pains F07: two completions of 3 tokens, none of which stops, beside one of 8.
    def write(prompt: str, index: int) -> list[int]:
        return [5 + index] * (8 if index == 3 else 3)

    trainer = runs.trained(
        tmp_path, "trl_dapo", options={"rollout_func": runs.scripted(write)}, max_steps=1, learning_rate=0.0
    )
    rollout, _ = rollout_of(trainer)
    assert rollout.mask.sum(1).tolist() == [3, 3, 3, 8] * 2
    assert trainer.spy.batches[0][0].totals.tokens == 34


# -- stop tokens ---------------------------------------------------------------------------------------------------


def stops(folder: Any, completions: list[list[int]], *, pad_is_eos: bool = False, **settings: Any) -> runs.Watched:
    tokenizer = tiny.tokenizer()
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    trainer = runs.Watched(
        model=tiny.model(),
        reward_funcs=by_place([1.0]),
        args=tiny.config(
            folder,
            "reinforce",
            max_steps=1,
            variant_overrides={"reward_shaper": {"name": "missing_eos_penalty", "penalty": 0.25}},
            **settings,
        ),
        train_dataset=tiny.dataset(),
        processing_class=tokenizer,
        rollout_func=runs.scripted(lambda prompt, index: completions[index]),
    )
    trainer.train()
    return trainer


#: Ends with <eos>; is cut; stops at token 7; holds token 7 in the middle only.
ENDINGS = [[5, 6, 1], [5] * 8, [5, 6, 7], [5, 7, 6]]


@pytest.mark.parametrize("pad_is_eos", [False, True])
@pytest.mark.parametrize(
    ("settings", "stopped"),
    [
        ({}, [True, False, False, False]),
        ({"generation_kwargs": {"eos_token_id": [1, 7]}}, [True, False, True, False]),
        ({"generation_kwargs": {"eos_token_id": 7}}, [True, False, True, False]),
        ({"generation_kwargs": {"eos_token_id": None}}, [True, False, False, False]),
    ],
    ids=["default", "list", "one", "none"],
)
def test_the_penalty_for_a_missing_stop_knows_every_stop_token(
    settings: dict[str, Any], stopped: list[bool], pad_is_eos: bool, tmp_path: Any
) -> None:
    # pains E08, E13: judged on the completion alone, subtracted, with pad = eos as well.
    trainer = stops(tmp_path, ENDINGS, pad_is_eos=pad_is_eos, **settings)
    rollout, result = rollout_of(trainer)
    assert rollout.has_eos.tolist() == stopped * 2
    assert rollout.truncated.tolist() == [not s for s in stopped] * 2
    assert result.rewards.tolist() == pytest.approx([1.0 if s else 0.75 for s in stopped] * 2)
    assert rollout.mask.sum(1).tolist() == [3, 8, 3, 3] * 2
    assert trainer.logs[0]["completions/clipped_ratio"] == 1 - sum(stopped) / 4


def test_an_eos_in_the_prompt_is_not_one_in_the_completion(tmp_path: Any) -> None:
    script = runs.scripted(lambda prompt, index: ENDINGS[index])

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {**script(prompts, trainer), "prompt_ids": [[5, 1] for _ in prompts]}

    trainer = runs.trained(
        tmp_path,
        "reinforce",
        options={"rollout_func": rollout},
        variant_overrides={"reward_shaper": "missing_eos_penalty"},
        max_steps=1,
    )
    assert rollout_of(trainer)[0].has_eos.tolist() == [True, False, False, False] * 2


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_what_the_model_generates_after_a_stop_token_of_ones_own_is_no_completion(
    pad_is_eos: bool, tmp_path: Any
) -> None:
    # Half of the vocabulary stops, so that completions end early and at different places. generate() fills up with
    # <pad>, which is not what the policy said.
    ours = list(range(3, 17))
    tokenizer = tiny.tokenizer()
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    trainer = runs.Watched(
        model=tiny.model(),
        reward_funcs=tiny.length,
        args=tiny.config(tmp_path, "reinforce", max_steps=2, generation_kwargs={"eos_token_id": [1, *ours]}),
        train_dataset=tiny.dataset(),
        processing_class=tokenizer,
    )
    trainer.train()
    lengths = []
    for output in trainer.generated:
        for ids, mask in zip(output["completion_ids"], output["completion_mask"], strict=True):
            tokens = ids[mask.bool()].tolist()
            assert not [t for t in tokens[:-1] if t in (1, *ours)]
            assert tokens[-1] in (1, *ours) or len(tokens) == 8
            lengths.append(len(tokens))
    assert min(lengths) < 4 and len(set(lengths)) > 2
    assert trainer.logs[0]["completions/min_length"] < 4


# -- lengths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, 4])
def test_the_overlong_penalty_sees_lengths_as_generated(cache: int | None, tmp_path: Any) -> None:
    # pains B26: limit 8, buffer 4, lengths 4, 6, 8: 0, -0.5, -1. By default the buffer is a fifth of the limit, 1.6:
    # (8 - 1.6 - 6) / 1.6 = 0.25 is above 0, so nothing for 6.
    lengths = [4, 6, 8, 1]
    expected = [0, -0.5, -1, 0] if cache else [0, 0, -1, 0]
    trainer = runs.trained(
        tmp_path,
        "dapo",
        rewards=by_place([0.0]),
        options={
            "rollout_func": runs.scripted(
                lambda prompt, index: [5] * lengths[index], env_mask=lambda p, i, tokens: [1] + [0] * (len(tokens) - 1)
            )
        },
        variant_overrides={"reward_shaper": {"name": "soft_overlong", "cache": cache}},
        max_steps=1,
    )
    rollout, result = rollout_of(trainer)
    assert rollout.lengths.tolist() == lengths * 2 and rollout.max_length == 8
    assert result.rewards.tolist() == pytest.approx(expected * 2)


def test_the_filter_sees_rewards_before_any_shaping(tmp_path: Any) -> None:
    # Equal rewards, different lengths: no signal, though the penalty differs.
    trainer = runs.trained(
        tmp_path,
        "dapo",
        rewards=by_place([1, 1, 1, 1, 1, 0, 0, 0]),
        options={"rollout_func": runs.scripted(lambda prompt, index: [5] * (5 + index))},
        variant_overrides={"reward_shaper": {"name": "soft_overlong", "cache": 4}, "sampling": "mask"},
        max_steps=1,
    )
    _, result = rollout_of(trainer)
    assert result.keep.tolist() == [False] * 4 + [True] * 4
    assert {batch.totals.sequences for batch, *_ in trainer.spy.batches} == {4.0}
    assert trainer.logs[0]["keep_ratio"] == trainer.logs[0]["frac_reward_zero_std"] == 0.5
    assert resolve("dapo").sample_filters[0].name == "zero_variance"
