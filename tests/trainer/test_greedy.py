"""Greedy completions as a baseline: what they are, what they are worth, and that nothing else feels them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from tests import tiny
from tests.trainer import runs
from trl_variants import KL, Variant, VariantError, component
from trl_variants.testing import make_rollout
from trl_variants.trainer.greedy import _aside, _key
from trl_variants.trainer.rows import join


@component
def minus_greedy(rewards: Tensor, greedy_rewards: Tensor, scored: Tensor) -> Tensor:
    """r - the reward of the greedy completion."""
    return torch.where(scored, rewards - greedy_rewards, 0.0)


@component
def centre_only(rewards: Tensor, scored: Tensor) -> Tensor:
    """r: the same run without greedy completions."""
    return torch.where(scored, rewards, 0.0)


PLAIN: dict[str, Any] = {
    "advantage_normalizer": None,
    "importance_ratio": "token",
    "clip_rule": "ppo_clip",
    "loss_aggregator": "token_mean",
}
GREEDY = Variant(name="minus_greedy", advantage_estimator=minus_greedy, **PLAIN)
WITHOUT = Variant(name="without", advantage_estimator=centre_only, **PLAIN)
RESAMPLED = {"sampling": "resample", "sample_filter": "zero_variance"}


class Greedy(runs.Watched):
    """Also remembers what was generated greedily."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.asked: list[list[str]] = []
        self.greedy: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def _generate(self, prompts: list[Any]) -> Any:
        output = super()._generate(prompts)
        if not self._sampling():
            self.asked.append(list(prompts))
            self.greedy.append(dict(zip(prompts, output[1], strict=True)))
        return output

    def _sampling(self) -> bool:
        return bool(self.generation_config.do_sample)


def built(folder: Any, variant: Any = GREEDY, **settings: Any) -> Greedy:
    options = {"train_dataset": tiny.dataset(settings.pop("rows", 16)), **settings.pop("options", {})}
    return Greedy(
        model=settings.pop("model", None) or tiny.model(),
        reward_funcs=settings.pop("rewards", tiny.low_words),
        args=tiny.config(folder, variant, **settings),
        processing_class=tiny.tokenizer(),
        **options,
    )


def trained(*args: Any, **settings: Any) -> Greedy:
    trainer = built(*args, **settings)
    trainer.train()
    return trainer


def texts(output: dict[str, Any]) -> list[str]:
    """The prompt of each row."""
    pairs = zip(output["prompt_ids"], output["prompt_mask"], strict=True)
    return [" ".join(tiny.WORDS[i - 3] for i in ids[mask.bool()].tolist()) for ids, mask in pairs]


def greedy_tokens(model: Any, prompt: str, limit: int = 8) -> list[int]:
    """What generate(do_sample=False) gives, cut after the stop token."""
    ids = torch.tensor([tiny.tokenizer()(prompt)["input_ids"]])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit)
    tokens = out[0, ids.shape[1] :].tolist()
    return tokens[: tokens.index(1) + 1] if 1 in tokens else tokens


def timeless(entry: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in entry.items() if n not in ("step_time", "greedy/reward") and not n.startswith("speed/")}


# -- what it is ----------------------------------------------------------------------------------------------------


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


# -- what it leaves alone ------------------------------------------------------------------------------------------


def chatty(completion_ids: list[list[int]], log_metric: Any = None, log_extra: Any = None, **_: Any) -> list[float]:
    """A reward that logs, and draws random numbers."""
    log_metric("seen", float(len(completion_ids)))
    log_extra("tokens", [len(ids) for ids in completion_ids])
    torch.rand(7)
    return tiny.low_words(completion_ids)


@pytest.mark.parametrize("sampling", [{}, RESAMPLED])
def test_completions_and_logs_are_those_of_a_run_without(sampling: dict[str, Any], tmp_path: Any) -> None:
    # no learning: the advantages differ
    settings = {"learning_rate": 0.0, "rewards": chatty, "variant_overrides": sampling, "log_completions": True}
    with_greedy = trained(tmp_path / "a", **settings)
    without = trained(tmp_path / "b", WITHOUT, **settings)
    assert with_greedy.greedy and not without.greedy
    for one, other in zip(with_greedy.generated, without.generated, strict=True):
        for name in ("prompt_ids", "completion_ids", "completion_mask"):
            assert torch.equal(one[name], other[name])
    ours = {"loss", "grad_norm", "advantages/group_spread", "clip_ratio/region_mean"}
    for one, other in zip(with_greedy.logs, without.logs, strict=True):
        one, other = ({n: v for n, v in timeless(entry).items() if n not in ours} for entry in (one, other))
        assert one == other and one["seen"] == 8 and "rewards/chatty/mean" in one
    for name in ("prompt", "completion"):
        assert list(with_greedy._logs[name]) == list(without._logs[name])
    assert with_greedy._logs["rewards"] == without._logs["rewards"]
    assert with_greedy._logs["extra"] == without._logs["extra"] and not with_greedy._pending_extra_logs
    assert with_greedy.generation_config.do_sample and with_greedy.num_generations == 4
    assert with_greedy.state.num_input_tokens_seen == without.state.num_input_tokens_seen


def test_rewards_that_write_into_their_columns_find_them_whole(tmp_path: Any) -> None:
    dataset = tiny.dataset(8)
    dataset = dataset.add_column("tags", [[n, n + 1] for n in range(8)])
    found: list[list[int]] = []

    def emptying(completion_ids: list[list[int]], tags: list[list[int]], **_: Any) -> list[float]:
        found.append([len(tag) for tag in tags])
        for tag in tags:
            tag.clear()
        return tiny.low_words(completion_ids)

    trained(tmp_path, rewards=emptying, options={"train_dataset": dataset}, max_steps=1)
    assert found == [[2] * 8, [2] * 2]


def test_what_generation_was_set_to_comes_back_after_an_error(tmp_path: Any) -> None:
    def broken(completion_ids: list[list[int]], **_: Any) -> list[float]:
        if len(completion_ids) < 8:  # the greedy ones
            raise RuntimeError("no")
        return tiny.low_words(completion_ids)

    trainer = built(tmp_path, rewards=broken)
    with pytest.raises(RuntimeError, match="no"):
        trainer.train()
    assert trainer.generation_config.do_sample and trainer.generation_kwargs["do_sample"]
    assert (trainer.num_generations, trainer.num_generations_eval) == (4, 4)


def test_sampling_settings_make_no_difference(tmp_path: Any) -> None:
    settings = {"temperature": 0.7, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "max_steps": 1, "num_generations": 1}
    trainer = trained(tmp_path, **settings)
    for prompt, tokens in trainer.greedy[0].items():
        assert tokens == greedy_tokens(tiny.model(), prompt)


def test_no_greedy_completion_is_made_for_whom_nobody_asks(tmp_path: Any) -> None:
    trainer = trained(tmp_path, "grpo", max_steps=1)
    assert not trainer.greedy and "greedy/reward" not in trainer.logs[0]
    assert trainer.spy.rollouts[0][0].greedy_rewards is None


# -- evaluation, unscored completions, resampling ------------------------------------------------------------------


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


# -- with KL, and what is refused ----------------------------------------------------------------------------------


def test_kl_in_the_reward_is_not_in_the_baseline(tmp_path: Any) -> None:
    kl = KL("k1", placement="sequence_reward", coef=0.5)
    trainer = trained(tmp_path, variant_overrides={"kl": kl}, max_steps=2, learning_rate=0.05)
    rollout, result, _ = trainer.spy.rollouts[1]
    k1 = ((rollout.log_probs - rollout.ref_log_probs) * rollout.mask).sum(1)
    assert k1.abs().max() > 1e-3
    torch.testing.assert_close(result.advantages, rollout.rewards - 0.5 * k1 - rollout.greedy_rewards)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"rollout_func": runs.scripted()}, "a rollout_func, which generates as it likes"),
        ({"environment_factory": object}, "an environment_factory"),
        ({"tools": [len]}, "tools"),
        (
            {
                "train_dataset": Dataset.from_dict(
                    {"prompt": [[{"role": "user", "content": "w1"}]] * 8, "image": [None] * 8}
                )
            },
            "images",
        ),
    ],
)
def test_what_cannot_be_generated_greedily_is_refused(options: dict[str, Any], what: str, tmp_path: Any) -> None:
    with pytest.raises(VariantError) as error:
        built(tmp_path, options=options)
    assert str(error.value) == (
        "advantage_estimator 'minus_greedy' needs greedy_rewards, a greedy completion of each prompt, which does not "
        f"work with {what} in this release."
    )


def test_an_engine_is_asked_for_the_likeliest_token_and_then_for_what_it_was() -> None:
    engine = SimpleNamespace(temperature=0.7, generation_kwargs={"seed": 3, "temperature": 0.8})
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        _metrics={"train": {"reward": [1.0]}},
        _pending_metrics={},
        _pending_extra_logs={},
        _rewards_per_func=torch.ones(8, 1),
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        state=SimpleNamespace(num_input_tokens_seen=5),
        num_generations=4,
        num_generations_eval=2,
        use_vllm=True,
        vllm_generation=engine,
    )
    with _aside(trainer):
        assert (engine.temperature, engine.generation_kwargs) == (0.0, {"seed": 3, "temperature": 0.0})
        assert (trainer.num_generations, trainer.num_generations_eval) == (1, 1)
        trainer._metrics["train"]["reward"].append(2.0)
        trainer._rewards_per_func, trainer.state.num_input_tokens_seen = None, 9
    assert (engine.temperature, engine.generation_kwargs) == (0.7, {"seed": 3, "temperature": 0.8})
    assert (trainer.num_generations, trainer.num_generations_eval) == (4, 2)
    assert trainer._metrics == {"train": {"reward": [1.0]}}
    assert trainer._rewards_per_func.shape == (8, 1) and trainer.state.num_input_tokens_seen == 5


def test_rows_are_told_apart_by_all_that_they_hold() -> None:
    zeros, other = torch.zeros(5000), torch.zeros(5000)
    other[2500] = 1.0  # in the middle, which a tensor's repr leaves out
    assert _key({"prompt": "a", "x": zeros}) == _key({"prompt": "a", "x": torch.zeros(5000)})
    assert _key({"prompt": "a", "x": zeros}) != _key({"prompt": "a", "x": other})
    assert _key({"prompt": "a", "x": {None: 1, "b": object}}) != _key({"prompt": "a", "x": {None: 2, "b": object}})


def test_groups_carried_from_a_run_without_baselines_are_unscored() -> None:
    shared = {"completion_ids": torch.ones(2, 3), "completion_mask": torch.ones(2, 3)}
    rows = join([shared, {**shared, "greedy_rewards": torch.tensor([0.5, 0.25])}], pad_id=0)
    assert rows["greedy_rewards"].isnan().tolist() == [True, True, False, False]


def test_a_baseline_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(VariantError) as error:
        make_rollout([1.0, 0.0], greedy_rewards=[0.5, float("nan")])
    assert (
        str(error.value) == "Rollout.greedy_rewards holds a value that is not finite, at a completion that is scored."
    )
    kept = make_rollout([1.0, 0.0], greedy_rewards=[0.5, float("nan")], scored=[True, False])
    assert kept.greedy_rewards.tolist() == [0.5, 0.0]
    assert kept.first(1).greedy_rewards.tolist() == [0.5]
