"""Greedy completions beside a run: nothing else feels them, and what cannot have them is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests import tiny
from tests.trainer import runs
from tests.trainer.greedy_runs import RESAMPLED, WITHOUT, built, greedy_tokens, timeless, trained
from trl_variants import VariantError
from trl_variants.testing import make_rollout
from trl_variants.trainer.greedy import _aside, _key
from trl_variants.trainer.rows import join


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
