"""TRL itself as the oracle: the same seed and data in TRL's trainer and in ours give the same run.

Each variant is the one that ships, with its paper's numbers; what turns its conventions into TRL's are overrides, and
they are written here once. The second epoch over a rollout is far off-policy: each parameter must show there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from tests import tiny
from tests.trainer.test_oracle import GRPO, Oracle, Run, assert_same, ours, stock

PLUGINS = {"variant_plugins": ["trl_variants_soft"]}
#: A step that moves token ratios by a half and more, so that the second epoch is far from the first.
TWO_EPOCHS = {"num_iterations": 2, "max_steps": 4, "learning_rate": 0.3}

#: TRL's conventions: the sample's standard deviation with 1e-4 added, the rounding error of constant groups left as
#: it is, fully masked completions counted, KL multiplied by the ratio.
MEAN = {"advantage_estimator": {"zero_constant": False}}
GROUP = {**MEAN, "advantage_normalizer": {"correction": 1, "eps": 1e-4, "zero_constant": False}}
ROWS = {"loss_aggregator": {"count_empty": True}}
OF_TRL: dict[str, dict[str, Any]] = {
    "sapo": {**GROUP, **ROWS},
    "vespo": {**GROUP},
    "gmpo": {**GROUP, **ROWS},
    "luspo": {**GROUP, **ROWS},
    "two_sided_grpo": {**GROUP, **ROWS, "kl": {"weighted": True}},
    "bnpo": {**GROUP},
    "gdpo": {
        "advantage_estimator": {"correction": 1, "eps": 1e-4, "zero_constant": False},
        "advantage_normalizer": {"correction": 1, "eps": 1e-4},
        **ROWS,
    },
    "lite_ppo": {**GROUP},
}
SEQUENCE = {"loss_type": "luspo", "importance_sampling_level": "sequence"}
BOUNDS = {"epsilon": 2e-3, "epsilon_high": 2.5e-3}
GMPO = (GMPOTrainer, GMPOConfig)


def two(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A second reward on another scale, which skips some completions and is the same for many."""
    return [None if i % 5 == 0 else 10.0 * (ids[0] > 9) for i, ids in enumerate(completion_ids)]


def often(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A reward that skips every third completion, so that some have none at all."""
    return [None if i % 3 == 0 else reward for i, reward in enumerate(tiny.low_words(completion_ids))]


MANY = {"rewards": [tiny.low_words, two], "reward_weights": [0.7, 0.3]}

#: By name: the variant, its overrides beside those of `OF_TRL`, TRL's settings, and settings of both.
CASES: dict[str, tuple[str, dict[str, Any], Oracle, dict[str, Any]]] = {
    "sapo": ("sapo", {}, (*GRPO, {"loss_type": "sapo"}), {}),
    "sapo_sharper": (
        "sapo",
        {"clip_rule": {"tau_pos": 3.0, "tau_neg": 7.0}},
        (*GRPO, {"loss_type": "sapo", "sapo_temperature_pos": 3.0, "sapo_temperature_neg": 7.0}),
        {},
    ),
    "sapo_with_kl": (
        "sapo",
        {"kl": {"estimator": "k3", "placement": "loss", "coef": 0.04, "weighted": True}},
        (*GRPO, {"loss_type": "sapo", "beta": 0.04}),
        {},
    ),
    "vespo": ("vespo", {}, (*GRPO, {"loss_type": "vespo"}), {}),
    "vespo_other_kernel": (
        "vespo",
        {"clip_rule": {"k_pos": 0.5, "lambda_pos": 1.0, "k_neg": 1.5, "lambda_neg": 4.0}},
        (
            *GRPO,
            {
                "loss_type": "vespo",
                **{"vespo_k_pos": 0.5, "vespo_lambda_pos": 1.0, "vespo_k_neg": 1.5, "vespo_lambda_neg": 4.0},
            },
        ),
        {},
    ),
    "gmpo": ("gmpo", {}, (*GMPO, {}), {}),
    "gmpo_narrow": (
        "gmpo",
        {"clip_rule": {"epsilon_low": 0.02, "epsilon_high": 0.05}},
        (*GMPO, {"epsilon": 0.02, "epsilon_high": 0.05}),
        {},
    ),
    "gmpo_with_kl": (  # TRL's GMPO never multiplies KL by the ratio
        "gmpo",
        {"kl": {"estimator": "k3", "placement": "loss", "coef": 0.04}},
        (*GMPO, {"beta": 0.04}),
        {},
    ),
    "luspo": (
        "luspo",
        {},
        (*GRPO, {**SEQUENCE, **BOUNDS}),
        {"learning_rate": 3e-4},
    ),  # larger ones clip every completion
    "luspo_wide": (
        "luspo",
        {"clip_rule": {"epsilon_low": 0.2, "epsilon_high": 0.28}},
        (*GRPO, {**SEQUENCE, "epsilon": 0.2, "epsilon_high": 0.28}),
        {"learning_rate": 0.05},
    ),
    "two_sided_grpo": ("two_sided_grpo", {}, (*GRPO, {"loss_type": "grpo", "beta": 0.001, "delta": 4.0}), {}),
    "two_sided_grpo_close": (
        "two_sided_grpo",
        {"clip_rule": {"epsilon_low": 0.1, "epsilon_high": 0.15, "c": 1.2}},
        (*GRPO, {"loss_type": "grpo", "beta": 0.001, "epsilon": 0.1, "epsilon_high": 0.15, "delta": 1.2}),
        {"learning_rate": 1.0},
    ),
    "bnpo": ("bnpo", {}, (*GRPO, {"loss_type": "bnpo"}), {}),
    "gdpo": (
        "gdpo",
        {},
        (*GRPO, {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum"}),
        MANY,
    ),
    "gdpo_one_reward": (
        "gdpo",
        {},
        (*GRPO, {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum"}),
        {"rewards": often},
    ),
    "lite_ppo": ("lite_ppo", {}, (*GRPO, {"loss_type": "dapo", "scale_rewards": "batch"}), {}),
    "lite_ppo_some_unscored": (
        "lite_ppo",
        {},
        (*GRPO, {"loss_type": "dapo", "scale_rewards": "batch"}),
        {"rewards": often},
    ),
}


#: One parameter changed against TRL's setting, by case: the oracle must see it.
CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    ("sapo", "clip_rule", {"tau_pos": 1.1}),
    ("sapo", "clip_rule", {"tau_neg": 1.0}),
    ("vespo", "clip_rule", {"k_pos": 2.1}),
    ("vespo", "clip_rule", {"lambda_pos": 3.1}),
    ("vespo", "clip_rule", {"k_neg": 3.1}),
    ("vespo", "clip_rule", {"lambda_neg": 2.1}),
    ("gmpo", "clip_rule", {"epsilon_low": 0.39}),
    ("gmpo", "clip_rule", {"epsilon_high": 0.39}),
    ("luspo_wide", "clip_rule", {"epsilon_low": 0.02}),
    ("luspo_wide", "clip_rule", {"epsilon_high": 0.02}),
    ("two_sided_grpo_close", "clip_rule", {"c": 10.0}),
    ("two_sided_grpo_close", "kl", {"coef": 0.0}),
    ("gdpo", "advantage_estimator", {"correction": 0}),
    ("gdpo", "advantage_estimator", {"eps": 1e-2}),
    ("gdpo", "advantage_normalizer", {"correction": 0}),
    ("gdpo", "advantage_normalizer", {"level": "token"}),
    ("lite_ppo", "advantage_normalizer", {"correction": 0}),
    ("lite_ppo", "advantage_normalizer", {"eps": 1e-3}),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model and its tokenizer in a folder."""
    torch.set_num_threads(1)
    return tiny.saved(tmp_path_factory.mktemp("model"))


def of_trl(case: str, folder: Any, path: str, **settings: Any) -> Run:
    _, _, oracle, given = CASES[case]
    return stock(oracle, folder, path, **{**settings, **given})


def of_ours(case: str, folder: Any, path: str, change: Any = None, **settings: Any) -> Run:
    variant, overrides, _, given = CASES[case]
    merged: dict[str, Any] = {}
    for part in (OF_TRL[variant], overrides, change or {}):
        merged |= {slot: {**merged.get(slot, {}), **value} for slot, value in part.items()}
    return ours(variant, folder, path, variant_overrides=merged, **PLUGINS, **{**settings, **given})


@pytest.mark.parametrize("case", CASES)
def test_two_epochs_with_accumulation_equal_trl(case: str, tmp_path: Any, path: str) -> None:
    theirs = of_trl(case, tmp_path / "a", path, **TWO_EPOCHS)
    mine = of_ours(case, tmp_path / "b", path, **TWO_EPOCHS)
    assert_same(theirs, mine)
    assert min(mine.norms) > 0.05
    if CASES[case][0] not in ("sapo", "vespo"):  # these clip nothing
        assert mine.clipped > 0.1 and theirs.clipped > 0.1


@pytest.fixture(scope="module")
def runs_of_trl(path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("trl")
    return {case: of_trl(case, folder / case, path, **TWO_EPOCHS) for case in dict.fromkeys(c for c, _, _ in CHANGES)}


@pytest.mark.parametrize(("case", "slot", "change"), CHANGES, ids=lambda value: str(value))
def test_the_oracle_sees_every_parameter(
    case: str, slot: str, change: dict[str, Any], runs_of_trl: dict[str, Run], tmp_path: Any, path: str
) -> None:
    mine = of_ours(case, tmp_path, path, {slot: change}, **TWO_EPOCHS)
    assert (mine.weights - runs_of_trl[case].weights).abs().max() > 1e-5


@pytest.mark.parametrize("case", ["sapo", "gmpo", "luspo_wide", "two_sided_grpo", "gdpo"])
def test_two_optimizer_steps_per_rollout_equal_trl(case: str, tmp_path: Any, path: str) -> None:
    settings = {"steps_per_generation": 4, "max_steps": 4, "learning_rate": 0.1}
    assert_same(of_trl(case, tmp_path / "a", path, **settings), of_ours(case, tmp_path / "b", path, **settings))


# -- completions that are masked -----------------------------------------------------------------------------------

MASKED: dict[str, Any] = {**TWO_EPOCHS, "learning_rate": 0.1}


def masked(case: str, folder: Any, path: str) -> tuple[Run, Run]:
    theirs = of_trl(case, folder / "a", path, mask_truncated_completions=True, **MASKED)
    mine = of_ours(case, folder / "b", path, {"sample_filter": {"name": "truncated"}}, **MASKED)
    dropped = [(~output["loss_mask"].any(1)).sum().item() for output in mine.outputs]
    assert 0 < sum(dropped) < 8 * len(dropped)
    return theirs, mine


@pytest.mark.parametrize("case", ["sapo", "vespo", "luspo_wide", "two_sided_grpo", "bnpo"])
def test_masked_truncated_completions_equal_trl(case: str, tmp_path: Any, path: str) -> None:
    assert_same(*masked(case, tmp_path, path))


def test_a_masked_completion_has_a_loss_in_trls_gmpo_and_none_here(tmp_path: Any, path: str) -> None:
    # Over no tokens the geometric mean is e^0 = 1, so that TRL adds -A, a constant: the same gradients, another loss.
    theirs, mine = masked("gmpo", tmp_path, path)
    assert mine.norms == pytest.approx(theirs.norms, abs=1e-6)
    torch.testing.assert_close(mine.weights, theirs.weights, atol=1e-6, rtol=0)
    assert mine.losses[0] != pytest.approx(theirs.losses[0], abs=1e-3)


@pytest.mark.parametrize("case", ["gdpo", "lite_ppo"])
def test_the_batchs_scale_is_of_the_rows_kept_here_and_of_all_in_trl(case: str, tmp_path: Any, path: str) -> None:
    theirs, mine = masked(case, tmp_path, path)
    kept = mine.outputs[0]["loss_mask"].any(1)
    rewards = mine.trainer.state.log_history[0]["reward_std"]
    assert not torch.allclose(mine.advantages[0][kept], theirs.advantages[0][kept], atol=1e-3)
    if case == "lite_ppo":
        everyone = theirs.advantages[0] * (rewards + 1e-4)  # centred rewards, of which ours are a multiple
        factor = mine.advantages[0][kept] / everyone[kept]
        torch.testing.assert_close(factor, factor[:1].expand_as(factor), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["sapo", "vespo", "gmpo", "luspo_wide", "bnpo", "gdpo", "lite_ppo"])
def test_evaluation_equals_trl(case: str, tmp_path: Any, path: str) -> None:
    def evaluated(run: Any, folder: Any) -> float:
        settings = {"given": {"eval_dataset": tiny.dataset(3)}, "per_device_eval_batch_size": 4}
        done = run(case, folder, path, **settings)
        done.trainer.evaluate()
        (loss,) = (entry["eval_loss"] for entry in done.trainer.state.log_history if "eval_loss" in entry)
        return loss

    assert evaluated(of_ours, tmp_path / "b") == pytest.approx(evaluated(of_trl, tmp_path / "a"), abs=1e-6)
