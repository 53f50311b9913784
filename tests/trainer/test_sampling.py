"""Dynamic sampling: rounds of prompts until a rollout is full of groups with signal.

Prompt i of the dataset is drawn i-th (no shuffling); a set of numbers says which prompts have groups whose rewards
differ. Unless said otherwise a rollout holds 2 groups of 4.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Any

import pandas as pd
import pytest
import torch
from trl.trainer import grpo_trainer

from tests import tiny
from tests.trainer import runs
from trl_variants import KL, Variant, VariantConfig, VariantError, component, use

NUMBERS = {prompt: i for i, prompt in enumerate(tiny.dataset(29)["prompt"])}
#: Of the first 20 prompts, 70 % have equal rewards.
THIRTY_PERCENT = {1, 4, 5, 9, 13, 18}
COUNTS = ("rounds", "kept_ratio", "trained_groups", "carried_groups", "dropped_groups")


def signal(numbers: Collection[int]) -> Any:
    """1, 0, 1, 0 for the prompts given, 1 for all others."""

    def reward(number: list[int], **_: Any) -> list[float]:
        return [float(i % 2 == 0) if n in numbers else 1.0 for i, n in enumerate(number)]

    return reward


def built(folder: Any, numbers: Collection[int], variant: str = "dapo", **settings: Any) -> runs.Watched:
    fields, options = settings.pop("fields", {}), settings.pop("options", {})
    return runs.build(
        folder,
        variant,
        rows=settings.pop("rows", 20),
        rewards=settings.pop("rewards", signal(numbers)),
        options={"rollout_func": runs.scripted(**fields), **options},
        **{"shuffle_dataset": False, "max_steps": 2, **settings},
    )


def resampled(*args: Any, **settings: Any) -> runs.Watched:
    trainer = built(*args, **settings)
    trainer.train()
    return trainer


def prompts(output: dict[str, Any]) -> list[int]:
    """The numbers of a rollout's prompts, one per group of 4."""
    texts = [
        " ".join(tiny.WORDS[i - 3] for i in ids[mask.bool()].tolist())
        for ids, mask in zip(output["prompt_ids"], output["prompt_mask"], strict=True)
    ]
    numbers = [NUMBERS[text] for text in texts]
    assert all(numbers[i] == numbers[i // 4 * 4] for i in range(len(numbers)))
    return numbers[::4]


def timeless(entry: dict[str, Any]) -> dict[str, Any]:
    """A log line without what a clock says."""
    return {name: value for name, value in entry.items() if name != "step_time" and not name.startswith("speed/")}


def counts(trainer: runs.Watched, index: int) -> dict[str, Any]:
    return {name: trainer.logs[index][f"sampling/{name}"] for name in COUNTS}


#: Micro-batches in the order of the rows.
IN_ORDER = {"cut_micro_batches": False}


@pytest.fixture
def unshuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)


# -- rounds --------------------------------------------------------------------------------------------------------


def test_with_70_percent_of_the_groups_degenerate_every_rollout_is_full(tmp_path: Any) -> None:
    # Kept in order: 1 4 | 5 9 | 13 18 | 21 24, and after the end of the epoch 1 (drawn as 20 + 1), and so on.
    trainer = resampled(tmp_path, THIRTY_PERCENT, max_steps=6)
    assert [prompts(output) for output in trainer.generated] == [[1, 4], [5, 9], [13, 18]] * 2
    for output, (rollout, result, _) in zip(trainer.generated, trainer.spy.rollouts, strict=True):
        assert output["loss_mask"].any(1).all() and result.keep.all() and len(rollout.rewards) == 8
        assert rollout.rewards.tolist() == [1, 0, 1, 0] * 2
    assert all(entry["frac_reward_zero_std"] == 0 and entry["keep_ratio"] == 1 for entry in trainer.logs)
    assert sum(entry["sampling/trained_groups"] for entry in trainer.logs) == 12
    assert trainer.state.global_step == 6  # the loader only paces


def test_rounds_are_counted_apart(tmp_path: Any) -> None:
    # Rounds of two: (0 1) (2 3) (4 5): 2 and 5 are kept, 2 of 6. Then (6 7): both, 2 of 2.
    trainer = resampled(tmp_path, {2, 5, 6, 7})
    assert [prompts(output) for output in trainer.generated] == [[2, 5], [6, 7]]
    nothing = {"carried_groups": 0, "dropped_groups": 0, "trained_groups": 2}
    assert counts(trainer, 0) == {"rounds": 3, "kept_ratio": pytest.approx(1 / 3), **nothing}
    assert counts(trainer, 1) == {"rounds": 1, "kept_ratio": 1, **nothing}
    for log, first, last in ((trainer.logs[0], 0, 6), (trainer.logs[1], 6, 8)):
        made = {n: sum(len(runs.completion(p, i)) for i in range(4)) for p, n in NUMBERS.items() if first <= n < last}
        assert log["sampling/generated_tokens"] == sum(made.values())
        trained = sum(tokens for n, tokens in made.items() if n in (2, 5, 6, 7))
        assert log["sampling/trained_tokens"] == trained
    # Every token that was generated has been seen, prompts of two tokens included: 12 and 4 groups' worth of rows.
    seen = [log["sampling/generated_tokens"] + 2 * 4 * n for log, n in zip(trainer.logs, (6, 2), strict=True)]
    assert [log["num_tokens"] for log in trainer.logs] == [seen[0], sum(seen)]


def test_at_the_limit_it_trains_on_what_there_is(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = resampled(tmp_path, {2}, max_rounds=2, max_steps=1, learning_rate=0.0)
    assert "max_rounds (2) reached with 1 of 2 groups kept by the filters; training on these." in caplog.text
    assert counts(trainer, 0) == {
        "rounds": 2,
        "kept_ratio": 0.25,
        "trained_groups": 1,
        "carried_groups": 0,
        "dropped_groups": 0,
    }
    (output,) = trainer.generated
    # The first dropped group fills up; no token of it counts.
    assert prompts(output) == [2, 0]
    assert output["loss_mask"].any(1).tolist() == [True] * 4 + [False] * 4
    assert output["advantages"][4:].tolist() == [0] * 4
    tokens = sum(len(runs.completion(tiny.dataset(3)["prompt"][2], i)) for i in range(4))
    for batch, *_ in trainer.spy.batches:
        assert (batch.totals.tokens, batch.totals.sequences, batch.totals.rows) == (tokens, 4, 8)
    # No statistic holds the group that fills up.
    rollout, result, _ = trainer.spy.rollouts[0]
    assert len(rollout.rewards) == len(result.advantages) == 4
    log = trainer.logs[0]
    assert (log["reward"], log["frac_reward_zero_std"], log["keep_ratio"]) == (0.5, 0, 1)
    # mean over the trained tokens of -A: ratio 1, nothing clipped.
    lengths = output["loss_mask"][:4].sum(1).tolist()
    expected = -sum(a * n for a, n in zip(result.advantages.tolist(), lengths, strict=True)) / tokens
    assert log["loss"] == pytest.approx(expected, abs=1e-6)
    assert len(trainer._logs["prompt"]) == len(trainer._logs["advantages"]) == 4


def test_without_any_kept_group_the_step_trains_on_nothing(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = resampled(tmp_path, (), max_rounds=3, max_steps=2)
    assert torch.equal(runs.weights(trainer.model), runs.weights(tiny.model()))
    assert [entry["sampling/rounds"] for entry in trainer.logs] == [3, 3]
    assert caplog.text.count("reached with 0 of 2 groups") == 1  # said once, and counted for every rollout
    for index in range(2):
        log = trainer.logs[index]
        assert (log["loss"], log["grad_norm"], log["sampling/trained_tokens"], log["keep_ratio"]) == (0, 0, 0, 0)
        assert counts(trainer, index)["trained_groups"] == 0
        # As with `mask`, what is logged is of the rows in the batch.
        assert (log["reward"], log["frac_reward_zero_std"]) == (1, 1)
    assert [prompts(output) for output in trainer.generated] == [[0, 1], [6, 7]]


def test_a_filter_may_look_at_another_reward_than_the_one_trained_on(tmp_path: Any) -> None:
    def accuracy(number: list[int], **_: Any) -> list[float]:
        return [float(i % 4 == 0) if n in (1, 3) else 0.0 for i, n in enumerate(number)]

    trainer = resampled(
        tmp_path,
        (),
        rewards=[signal(range(20)), accuracy],
        reward_weights=[1.0, 0.0],
        variant_overrides={"sample_filter": {"name": "mean_band", "reward": "accuracy"}},
        max_steps=1,
    )
    assert prompts(trainer.generated[0]) == [1, 3] and counts(trainer, 0)["rounds"] == 2
    assert trainer.spy.rollouts[0][0].rewards.tolist() == [1, 0, 1, 0] * 2
    assert trainer.logs[0]["rewards/accuracy/mean"] == 0.25


def test_filters_see_rewards_before_shaping_and_rows_may_still_be_masked_inside_a_kept_group(tmp_path: Any) -> None:
    # Lengths of 5 to 8 with a limit of 8: the overlong penalty differs inside every group, which is no signal. The
    # fourth completion is cut.
    trainer = resampled(
        tmp_path,
        {1, 2},
        fields={"write": lambda prompt, index: [5] * (4 + index) + ([1] if index < 3 else [5])},
        variant_overrides={
            "reward_shaper": {"name": "soft_overlong", "cache": 4},
            "sample_filter": ["zero_variance", "truncated"],
        },
        max_steps=1,
    )
    (output,) = trainer.generated
    assert prompts(output) == [1, 2]
    assert output["loss_mask"].any(1).tolist() == [True, True, True, False] * 2
    assert trainer.logs[0]["keep_ratio"] == 0.75
    assert trainer.logs[0]["sampling/trained_tokens"] == 2 * (5 + 6 + 7)


def test_a_filter_with_a_state_changes_it_once_a_rollout(tmp_path: Any) -> None:
    @component
    def every_other(group_ids: torch.Tensor, state: dict[str, Any]) -> Any:
        return group_ids % 2 == 1, {"calls": state.get("calls", 0) + 1}

    variant = Variant(name="counted", extends="dapo", sample_filter=use(every_other))
    trainer = resampled(tmp_path, (), variant, max_steps=3)
    assert trainer._states["sample_filter.every_other"] == {"calls": 3}
    # What a round kept stays kept, wherever the group stands in the rollout.
    assert [prompts(output) for output in trainer.generated] == [[1, 3], [5, 7], [9, 11]]
    assert all(result.keep.all() for _, result, _ in trainer.spy.rollouts)


# -- the surplus ---------------------------------------------------------------------------------------------------

#: (0 1) keeps 0, (2 3) keeps both: 0 and 2 are trained on, 3 is surplus. Then 3 first, and (4 5) keeps 5.
CARRYING = {0, 2, 3, 5}


def test_surplus_groups_go_first_into_the_next_rollout_with_their_own_old_log_probs(
    tmp_path: Any, unshuffled: None
) -> None:
    trainer = resampled(tmp_path, CARRYING, learning_rate=0.05, **IN_ORDER)
    assert [prompts(output) for output in trainer.generated] == [[0, 2], [3, 5]]
    assert [counts(trainer, i)["rounds"] for i in (0, 1)] == [2, 1]
    assert [counts(trainer, i)["carried_groups"] for i in (0, 1)] == [0, 1]
    assert [counts(trainer, i)["dropped_groups"] for i in (0, 1)] == [0, 0]
    assert counts(trainer, 1)["kept_ratio"] == 0.5  # of what this rollout generated
    assert "carried" not in trainer.generated[0]
    output = trainer.generated[1]
    assert output["carried"].tolist() == [True] * 4 + [False] * 4
    # The policy that generated them is that of the start.
    mask = output["completion_mask"].bool()
    expected = runs.log_probs(tiny.model(), output)
    gap = (output["carried_log_probs"] - expected)[:4][mask[:4]]
    assert gap.abs().max() < 1e-5
    # Micro-batches: two of the first rollout, then the carried group, then the fresh one.
    carried, fresh = (batch for batch, *_ in trainer.spy.batches[2:])
    width = carried.mask.shape[1]
    assert torch.equal(carried.old_log_probs, output["carried_log_probs"][:4, :width] * carried.mask)
    assert ((carried.log_probs - carried.old_log_probs).abs() > 1e-3).any(1).all()
    assert torch.equal(fresh.log_probs, fresh.old_log_probs)
    assert trainer.logs[0]["approx_kl"] == 0 < trainer.logs[1]["approx_kl"]
    # Raw rewards; shaping comes after.
    assert trainer.spy.rollouts[1][0].rewards.tolist() == [1, 0, 1, 0] * 2


def test_carried_rows_keep_their_old_log_probs_in_every_step_and_through_shuffling(tmp_path: Any) -> None:
    # Two mini-batches and two epochs: 4 optimizer steps a rollout of 4 groups. Kept of (0 1 2 3) (4 5 6 7): six.
    trainer = built(
        tmp_path,
        set(range(20)) - {0, 1},
        steps_per_generation=4,
        num_iterations=2,
        max_steps=8,
        learning_rate=0.05,
        variant_overrides={"reshuffle": True},
    )
    seen: list[dict[str, Any]] = []
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: (seen.append(dict(inputs)), compute(model, inputs))[1]  # type: ignore
    trainer.train()
    assert [prompts(output) for output in trainer.generated] == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert counts(trainer, 4)["carried_groups"] == 2
    second = list(zip(seen[8:], trainer.spy.batches[8:], strict=True))
    assert [int(sum(inputs["carried"].sum() for inputs, _ in second[i : i + 4])) for i in (0, 4)] == [8, 8]
    for index, (inputs, (batch, *_)) in enumerate(second):
        for row, own in enumerate(inputs["carried"].tolist()):
            mask = batch.mask[row]
            stored = inputs["carried_log_probs"][row][mask]
            if own:
                assert torch.equal(batch.old_log_probs[row][mask], stored)
            elif index < 2:  # the first step after the rollout
                assert torch.equal(batch.old_log_probs[row], batch.log_probs[row])
    # Not only in the first step: in the second one the fresh rows' old log-probs are of the policy at the rollout.
    moved = [(batch.log_probs - batch.old_log_probs).abs().max() for _, (batch, *_) in second[2:]]
    assert min(moved) > 1e-4


def test_without_carrying_the_surplus_is_dropped_and_counted(tmp_path: Any) -> None:
    trainer = resampled(tmp_path, {*CARRYING, 6}, carry_surplus=False)
    # 3 is lost; (4 5) keeps 5, (6 7) keeps 6.
    assert [prompts(output) for output in trainer.generated] == [[0, 2], [5, 6]]
    assert [counts(trainer, i)["dropped_groups"] for i in (0, 1)] == [1, 0]
    assert counts(trainer, 1)["carried_groups"] == 0 and "carried" not in trainer.generated[1]
    assert trainer.logs[1]["approx_kl"] == 0


def test_a_variant_that_corrects_for_no_other_policy_carries_nothing(tmp_path: Any) -> None:
    overrides = {"sampling": "resample", "sample_filter": "zero_variance"}
    trainer = resampled(tmp_path, {*CARRYING, 6}, "rloo", variant_overrides=overrides)
    assert [prompts(output) for output in trainer.generated] == [[0, 2], [5, 6]]
    assert counts(trainer, 0)["dropped_groups"] == 1


@pytest.mark.parametrize(
    ("age", "trained", "rounds", "dropped"),
    [(None, [13, 16], [0, 1], [0, 2]), (1, [13, 16], [0, 1], [0, 2]), (2, [13, 14], [0, 0], [0, 0])],
)
def test_groups_that_waited_too_long_are_dropped_and_counted(
    age: int | None, trained: list[int], rounds: list[int], dropped: list[int], tmp_path: Any
) -> None:
    # Rollouts of 4 groups: (0 1 2 3) keeps 1, (4 5 6 7) all: 1 4 5 6 are trained on, 7 waits. In the next one, too:
    # 7 enters, (8 9 10 11) keeps 8 9, (12 13 14 15) all: 7 8 9 12 are trained on, 13 14 15 wait. A run that goes on
    # with rollouts of one group takes 13 without a round; 14 and 15 have then waited for one rollout. In the next they
    # would have waited for two: they are dropped, and (16) is drawn; or 14 goes on, and 15 waits.
    numbers = {1, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15, 16, 17}
    settings = {"save_strategy": "steps", "save_steps": 1, "rows": 20}
    big = {"per_device_train_batch_size": 8, "max_steps": 2, **settings}
    trainer = resampled(tmp_path, numbers, **big)
    assert [prompts(output) for output in trainer.generated] == [[1, 4, 5, 6], [7, 8, 9, 12]]
    small = {"per_device_train_batch_size": 2, "max_steps": 4, **settings}
    trainer = built(tmp_path, numbers, max_carry_age=age, **small)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [prompts(output)[0] for output in trainer.generated] == trained
    for name, expected in (("rounds", rounds), ("dropped_groups", dropped)):
        assert [entry[f"sampling/{name}"] for entry in trainer.logs[2:]] == expected
    assert [entry["sampling/carried_groups"] for entry in trainer.logs[2:]] == [1 - n for n in rounds]
    assert trainer.logs[2]["num_tokens"] == trainer.logs[1]["num_tokens"]  # nothing was generated
    waiting = trainer.resampler.state()["surplus"]
    assert (waiting is None) == (age != 2)
    if waiting:  # 15 still waits, with the log-probs that it got when it was generated
        saved = torch.load(tmp_path / "checkpoint-2" / "variant_state.pt", weights_only=True)["sampling"]["surplus"]
        width = waiting["carried_log_probs"].shape[1]
        assert waiting["prompt"] == saved["prompt"][8:] and waiting["age"].tolist() == [2] * 4
        assert torch.equal(waiting["carried_log_probs"], saved["carried_log_probs"][8:, :width])


def test_kl_in_the_reward_of_carried_rows_is_of_the_policy_that_generated_them(tmp_path: Any) -> None:
    # The reference is the start, which generated the carried group: its KL is 0. Fresh rows come from a policy that
    # has moved. Token rewards, from KL alone but for the last token.
    trainer = resampled(
        tmp_path,
        CARRYING,
        "reinforce_pp",
        num_generations=4,
        learning_rate=0.05,
        variant_overrides={"sampling": "resample", "sample_filter": "zero_variance", "kl": {"coef": 0.5}},
    )
    rollout = trainer.spy.rollouts[1][0]
    output = trainer.generated[1]
    assert [prompts(o) for o in trainer.generated] == [[0, 2], [3, 5]]
    start = runs.log_probs(tiny.model(), output)
    for name in ("log_probs", "ref_log_probs"):
        assert ((getattr(rollout, name) - start) * rollout.mask)[:4].abs().max() < 1e-5
    assert ((rollout.log_probs - start) * rollout.mask)[4:].abs().max() > 1e-3
    assert ((rollout.ref_log_probs - start) * rollout.mask)[4:].abs().max() < 1e-5
    expected = 0.5 * ((rollout.log_probs - rollout.ref_log_probs) * rollout.mask).sum(1)
    shaped = trainer.spy.rollouts[1][1].rewards
    assert shaped.tolist() == pytest.approx((rollout.rewards - expected).tolist(), abs=1e-5)
    assert shaped[:4].tolist() == pytest.approx([1, 0, 1, 0], abs=1e-4)


def test_kl_in_the_loss_and_a_reference_work_with_carried_rows(tmp_path: Any) -> None:
    trainer = resampled(
        tmp_path, CARRYING, learning_rate=0.05, variant_overrides={"kl": KL("k3", placement="loss", coef=0.1)}
    )
    output = trainer.generated[1]
    mask = output["completion_mask"].bool()
    gap = (output["ref_per_token_logps"] - runs.log_probs(tiny.model(), output))[mask]
    assert gap.abs().max() < 1e-5 and trainer.logs[1]["kl"] > 0


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_critic_values_carried_rows_anew(critic: str, tmp_path: Any) -> None:
    overrides = {"sampling": "resample", "sample_filter": "zero_variance", "critic": critic}
    trainer = resampled(
        tmp_path, CARRYING, "ppo", num_generations=4, num_iterations=1, variant_overrides=overrides, learning_rate=0.05
    )
    assert [prompts(output) for output in trainer.generated] == [[0, 2], [3, 5]]
    assert counts(trainer, 1)["carried_groups"] == 1
    # Values of the first step are those of the rollout: nothing of an earlier critic is left.
    assert [entry["clip_ratio/value"] for entry in trainer.logs] == [0, 0]
    for batch, *_ in trainer.spy.batches:
        assert torch.allclose(batch.values, batch.old_values, atol=1e-5)


def test_tools_and_an_engines_log_probs_go_along(tmp_path: Any, unshuffled: None) -> None:
    fields = {
        "env_mask": lambda prompt, index, tokens: [int(i % 3 != 1) for i in range(len(tokens))],
        "logprobs": lambda prompt, index, tokens: [-3.0 - index - 0.1 * i for i in range(len(tokens))],
    }
    trainer = resampled(tmp_path, CARRYING, fields=fields, learning_rate=0.05)
    assert [prompts(output) for output in trainer.generated] == [[0, 2], [3, 5]]
    for output, numbers in zip(trainer.generated, ([0, 2], [3, 5]), strict=True):
        assert torch.equal(output["loss_mask"], (output["completion_mask"] * output["tool_mask"]).bool())
        for row in range(8):
            prompt, index = tiny.dataset(20)["prompt"][numbers[row // 4]], row % 4
            written = runs.completion(prompt, index)
            mask = output["completion_mask"][row].bool()
            assert output["completion_ids"][row][mask].tolist() == written
            tools = fields["env_mask"](prompt, index, written)
            assert output["tool_mask"][row][mask].tolist() == tools
            engine = [value * own for value, own in zip(fields["logprobs"](prompt, index, written), tools, strict=True)]
            assert output["sampling_per_token_logps"][row][mask].tolist() == pytest.approx(engine)
    # Lengths in TRL's metrics are of the policy's tokens.
    lengths = trainer.generated[1]["loss_mask"].sum(1).float()
    assert trainer.logs[1]["completions/mean_length"] == pytest.approx(lengths.mean().item())
    assert trainer.logs[1]["sampling/trained_tokens"] == lengths.sum()


def test_fresh_rows_have_ratio_1_in_half_precision_too(tmp_path: Any, unshuffled: None) -> None:
    model = tiny.model(dtype=torch.bfloat16)
    trainer = resampled(tmp_path, CARRYING, model=model, learning_rate=0.05, **IN_ORDER)
    carried, fresh = (batch for batch, *_ in trainer.spy.batches[2:])
    assert torch.equal(fresh.log_probs, fresh.old_log_probs)
    assert not torch.equal(carried.log_probs, carried.old_log_probs)


def test_conversations_go_along_and_come_back_from_a_checkpoint(tmp_path: Any) -> None:
    texts = tiny.dataset(20)["prompt"]
    talks = [[{"role": "user", "content": text}] for text in texts]
    data = tiny.dataset(20).remove_columns("prompt").add_column("prompt", talks)

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return runs.scripted()([talk[0]["content"] for talk in prompts], trainer)

    more = {"save_strategy": "steps", "save_steps": 1}
    options = {"train_dataset": data, "rollout_func": rollout}
    whole = resampled(tmp_path, CARRYING, options=options, **more)
    again = built(tmp_path, CARRYING, options=options, **more)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert torch.equal(runs.weights(again.model), runs.weights(whole.model))
    for trainer in (whole, again):
        assert list(trainer._logs["prompt"]) == [talks[n] for n in (3, 5) for _ in range(4)]
        written = [runs.completion(texts[n], i) for n in (3, 5) for i in range(4)]
        decoded = tiny.tokenizer().batch_decode(written, skip_special_tokens=True)
        assert list(trainer._logs["completion"]) == [[{"role": "assistant", "content": text}] for text in decoded]


# -- what is logged ------------------------------------------------------------------------------------------------


def test_metrics_and_the_table_are_those_of_the_trained_rows(tmp_path: Any) -> None:
    def first(completion_ids: list[list[int]], number: list[int], log_extra: Any, log_metric: Any, **_: Any) -> Any:
        log_extra("number", list(number))
        log_metric("largest", float(max(number)))
        kept = [n in CARRYING for n in number]
        return [len(ids) / 8 if keep else 1.0 for ids, keep in zip(completion_ids, kept, strict=True)]

    def second(number: list[int], **_: Any) -> list[float | None]:
        return [None if i % 4 == 0 else float(n) for i, n in enumerate(number)]

    trainer = resampled(
        tmp_path,
        (),
        rewards=[first, second],
        reward_weights=[1.0, 0.5],
        log_completions=True,
        variant_overrides={"sample_filter": {"reward": "first"}},
    )
    texts = tiny.dataset(20)["prompt"]
    for step, (numbers, rounds) in enumerate([([0, 2], [1, 3]), ([3, 5], [5])]):
        assert prompts(trainer.generated[step]) == numbers
        log = trainer.logs[step]
        completions = [runs.completion(texts[n], i) for n in numbers for i in range(4)]
        lengths = torch.tensor([float(len(ids)) for ids in completions])
        ended = torch.tensor([ids[-1] == 1 for ids in completions])
        one = lengths / 8
        two = [float(n) for n in numbers for _ in range(3)]
        total = one + 0.5 * torch.tensor([0.0 if i == 0 else float(n) for n in numbers for i in range(4)])
        expected = {
            "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(),
            "completions/clipped_ratio": (~ended).float().mean(),
            "completions/mean_terminated_length": lengths[ended].mean(),
            "completions/min_terminated_length": lengths[ended].min(),
            "completions/max_terminated_length": lengths[ended].max(),
            "rewards/first/mean": one.mean(),
            "rewards/first/std": one.std(),
            "rewards/second/mean": torch.tensor(two).mean(),
            "rewards/second/std": torch.tensor(two).std(),
            "reward": total.mean(),
            "reward_std": total.std(),
            "frac_reward_zero_std": 0.0,
        }
        assert {name: log[name] for name in expected} == {
            name: pytest.approx(float(value), abs=1e-6) for name, value in expected.items()
        }
        # What belongs to no row is a mean over the rounds: the largest numbers of (0 1) and (2 3), of (4 5).
        assert log["largest"] == sum(rounds) / len(rounds)
        table = pd.read_parquet(tmp_path / "completions" / f"completions_{step + 1:05d}.parquet")
        assert table["prompt"].tolist() == [texts[n] for n in numbers for _ in range(4)]
        assert table["number"].tolist() == [n for n in numbers for _ in range(4)]
        decoded = tiny.tokenizer().batch_decode(completions, skip_special_tokens=True)
        assert table["completion"].tolist() == decoded
        assert table["first"].tolist() == pytest.approx(one.tolist())
        assert table["second"].isna().tolist() == [i == 0 for _ in numbers for i in range(4)]
        _, result, _ = trainer.spy.rollouts[step]
        assert table["advantage"].tolist() == pytest.approx(result.advantages.tolist(), abs=1e-6)


def test_several_rollouts_of_one_log_line_weigh_alike(tmp_path: Any) -> None:
    def reward(number: list[int], log_metric: Any, **_: Any) -> list[float]:
        log_metric("largest", float(max(number)))
        return signal({2, 5, 6, 7})(number)

    # Rounds (0 1) (2 3) (4 5), then (6 7): means 3 and 7 are 5.
    trainer = resampled(tmp_path, (), rewards=reward, logging_steps=2)
    (entry,) = trainer.logs
    assert entry["largest"] == 5 and entry["sampling/rounds"] == 2 and entry["reward"] == 0.5


def test_the_log_says_what_epochs_count(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    said = "so num_train_epochs (1) counts optimizer steps"
    with caplog.at_level(logging.WARNING):
        # 8 prompts are 4 rollouts of 2, whatever the rounds take.
        trainer = resampled(tmp_path, {2, 5, 6, 7}, rows=8, max_steps=-1, num_train_epochs=1)
        assert caplog.text.count(said) == 1
        caplog.clear()
        resampled(tmp_path, {2, 5, 6, 7}, max_steps=1, num_train_epochs=1)
        assert said not in caplog.text  # max_steps decides
    assert trainer.state.global_step == 4 and len(trainer.generated) == 4


# -- evaluation, datasets, masks -----------------------------------------------------------------------------------


def test_an_evaluation_is_one_round_and_changes_nothing(tmp_path: Any, unshuffled: None) -> None:
    def evaluated(**settings: Any) -> runs.Watched:
        trainer = built(tmp_path, CARRYING, options={"eval_dataset": tiny.dataset(4)}, **settings)
        trainer.train()
        return trainer

    plain = evaluated()
    trainer = evaluated(eval_strategy="steps", eval_steps=1)
    assert torch.equal(runs.weights(trainer.model), runs.weights(plain.model))
    assert trainer.resampler.state()["prompts"] == plain.resampler.state()["prompts"] == {"epoch": 0, "index": 6}
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 2
    for entry in evaluations:
        assert not [name for name in entry if "sampling/rounds" in name]
        # Four prompts, two to a batch: 0 2 3 carry signal and 1 does not, so 3 of 4 groups.
        assert entry["eval_keep_ratio"] == 0.75 and entry["eval_frac_reward_zero_std"] == 0.25
    for a, b in zip(trainer.logs, plain.logs, strict=True):
        assert timeless(a) == timeless(b)


def test_an_iterable_dataset_gives_the_same_run(tmp_path: Any) -> None:
    numbers = {*CARRYING, 9, 12, 15}
    mapped = resampled(tmp_path, numbers, max_steps=4)
    options = {"train_dataset": tiny.dataset(20).to_iterable_dataset()}
    streamed = resampled(tmp_path, numbers, max_steps=4, options=options)
    assert [prompts(o) for o in streamed.generated] == [prompts(o) for o in mapped.generated]
    assert torch.equal(runs.weights(streamed.model), runs.weights(mapped.model))
    assert mapped.resampler.state()["prompts"] == streamed.resampler.state()["prompts"]


def test_what_a_rollout_function_adds_to_a_row_is_that_rows_own(tmp_path: Any) -> None:
    seen = []

    def reward(place: list[int], **_: Any) -> list[float]:
        seen.append(place)
        return [float(i % 2) for i in place]

    fields = {"place": lambda prompt, index, tokens: index}
    resampled(tmp_path, (), rewards=reward, fields=fields, max_steps=1)
    assert seen == [[0, 1, 2, 3] * 2]


def test_unused_columns_are_removed_where_asked(tmp_path: Any) -> None:
    seen = set()

    def reward(completions: list[str], **columns: Any) -> list[float]:
        seen.update(columns)
        return [float(i % 2) for i in range(len(completions))]

    resampled(tmp_path, (), rewards=reward, max_steps=1, remove_unused_columns=True)
    assert "number" not in seen
    resampled(tmp_path, (), rewards=reward, max_steps=1)
    assert "number" in seen


def test_masking_stays_as_it_is(tmp_path: Any) -> None:
    trainer = resampled(tmp_path, {1, 2}, variant_overrides={"sampling": "mask"})
    assert trainer.resampler is None
    assert [prompts(output) for output in trainer.generated] == [[0, 1], [2, 3]]
    masks = [output["loss_mask"].any(1).tolist() for output in trainer.generated]
    assert masks == [[False] * 4 + [True] * 4, [True] * 4 + [False] * 4]
    assert [entry["keep_ratio"] for entry in trainer.logs] == [0.5, 0.5]
    assert not [name for name in trainer.logs[0] if name.startswith("sampling/")]


def test_where_every_group_is_kept_resampling_is_masking(tmp_path: Any) -> None:
    resampling = resampled(tmp_path, range(20), max_steps=3)
    masking = resampled(tmp_path, range(20), max_steps=3, variant_overrides={"sampling": "mask"})
    assert torch.equal(runs.weights(resampling.model), runs.weights(masking.model))
    for a, b in zip(resampling.logs, masking.logs, strict=True):
        own = {name: value for name, value in a.items() if not name.startswith("sampling/")}
        assert timeless(own) == timeless(b)


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "settings", "message"),
    [
        (
            "grpo",
            {"max_rounds": 3, "carry_surplus": False},
            "max_rounds, carry_surplus is set, and variant 'grpo' draws no further prompts (sampling: mask). Use "
            "variant_overrides: {sampling: resample, sample_filter: zero_variance}, or leave it out.",
        ),
        (
            "dapo",
            {"max_carry_age": 1, "variant_overrides": {"sampling": "mask"}},
            "max_carry_age is set, and variant 'dapo' draws no further prompts (sampling: mask). Use "
            "variant_overrides: {sampling: resample}, or leave it out.",
        ),
        ("dapo", {"max_rounds": 0}, "max_rounds must be a whole number of at least 1, not 0."),
        ("dapo", {"max_rounds": 2.5}, "max_rounds must be a whole number of at least 1, not 2.5."),
        ("dapo", {"max_rounds": True}, "max_rounds must be a whole number of at least 1, not True."),
        (
            "dapo",
            {"max_carry_age": 0},
            "max_carry_age must be a whole number of at least 1, not 0; to carry none, use carry_surplus: false.",
        ),
        ("dapo", {"carry_surplus": "some"}, "carry_surplus must be true or false, not 'some'."),
        (
            "dapo",
            {"carry_surplus": False, "max_carry_age": 2},
            "max_carry_age is set, and no surplus is carried. Set carry_surplus: true, or leave it out.",
        ),
        (
            "rloo",
            {
                "carry_surplus": True,
                "variant_overrides": {"sampling": "resample", "sample_filter": "zero_variance"},
            },
            "carry_surplus is set, and variant 'rloo' does not correct for a policy that has moved on. Leave it out, "
            "or use a variant with an importance ratio and a clip rule.",
        ),
        (
            "dapo",
            {"variant_overrides": {"sample_filter": "none"}},
            "sampling 'resample' draws again for what a sample_filter drops, and variant 'dapo' has none, so it would "
            "never draw again. Use sample_filter: zero_variance, or sampling: mask.",
        ),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(
    variant: str, settings: dict[str, Any], message: str, tmp_path: Any
) -> None:
    with pytest.raises(VariantError) as error:
        tiny.config(tmp_path, variant, **settings)
    assert str(error.value) == message


def test_the_defaults_are_said_by_the_help(tmp_path: Any) -> None:
    args = tiny.config(tmp_path, "dapo")
    assert (args.max_rounds, args.carry_surplus, args.max_carry_age) == (None, None, None)
    for name, default in (("max_rounds", "10"), ("carry_surplus", "yes"), ("max_carry_age", "1")):
        assert f"Default: {default}" in VariantConfig.__dataclass_fields__[name].metadata["help"]


def test_images_and_environments_are_refused(tmp_path: Any) -> None:
    class Environment:
        def reset(self, **_: Any) -> None: ...

    end = "in this release. Use variant_overrides: {sampling: mask}."
    with pytest.raises(VariantError) as error:
        built(tmp_path, (), options={"train_dataset": tiny.dataset(8).add_column("image", [None] * 8)})
    assert str(error.value) == f"sampling 'resample' does not work with images {end}"
    with pytest.raises(VariantError) as error:
        built(tmp_path, (), options={"environment_factory": Environment})
    assert str(error.value) == f"sampling 'resample' does not work with an environment_factory {end}"
    # A stream whose columns nobody knows beforehand.
    rows = [{**row, "images": []} for row in tiny.dataset(20)]
    stream = tiny.dataset(1).to_iterable_dataset().from_generator(lambda: iter(rows))
    assert stream.column_names is None
    trainer = built(tmp_path, (), options={"train_dataset": stream})
    with pytest.raises(VariantError, match="does not work with images"):
        trainer.train()


def test_numbers_stay_finite(tmp_path: Any) -> None:
    for entry in resampled(tmp_path, CARRYING, num_iterations=2, max_steps=4).logs:
        assert all(value is None or math.isfinite(value) for value in entry.values())


def test_a_column_that_a_reward_fills_only_at_times_is_none_elsewhere(tmp_path: Any) -> None:
    calls: list[int] = []

    def reward(completions: list[str], log_extra: Any = None, **_: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 1:
            log_extra("note", ["first"] * len(completions))
        return [float(i % 2) for i in range(len(completions))]

    trainer = runs.build(tmp_path, "dapo", rewards=reward, max_steps=2, log_completions=True)
    trainer.train()
    assert list(trainer._logs["extra"]["note"])[-1] is None


def test_fewer_prompts_than_a_rollout_takes_are_refused(tmp_path: Any) -> None:
    with pytest.raises(VariantError, match="The training dataset has 1 prompts, and one rollout takes 2"):
        runs.build(tmp_path, "dapo", rows=1).train()
