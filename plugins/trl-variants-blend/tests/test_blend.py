"""Weighted sums of advantages: numbers by hand, what is refused, the contract, and training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_variants_blend

from trl_variants import VariantError, load_registry, resolve, use
from trl_variants.testing import check_component, check_plugin, make_rollout, train_config

CONFIGS = Path(__file__).parent.parent / "configs"
REGISTRY = load_registry("none", extra=["trl_variants_blend"])
GAE, MEAN = {"advantage_estimator": "gae"}, {"advantage_estimator": "group_mean"}


def blend(variant: str, parts: list[Any], **parameters: Any) -> Any:
    overrides = {
        "advantage_estimator": use("weighted_sum", parts=parts, **parameters),
        "advantage_normalizer": "none",
        "kl": None,
    }
    return resolve(variant, overrides, REGISTRY)


def test_a_scalar_part_is_spread_over_the_tokens_of_another() -> None:
    # gae with lambda 1, V = 0: the return, 1 on the first completion and 0 on the second; group_mean: .5 and -.5
    recipe = blend("ppo", [{"advantage_estimator": {"name": "gae", "lam": 1.0}}, MEAN], weights=[2.0, 1.0])
    rollout = make_rollout([1.0, 0.0], lengths=[2, 1], values=[[0.0, 0.0], [0.0, 0.0]])
    got = recipe.advantages(rollout)
    torch.testing.assert_close(got.advantages, torch.tensor([[2.5, 2.5], [-0.5, 0.0]]).double())
    torch.testing.assert_close(got.returns, torch.tensor([[1.0, 1.0], [0.0, 0.0]]).double())


def test_scalar_parts_stay_one_number_for_a_completion() -> None:
    # group_mean .75 and -.25 three times; leave_one_out 1 and -1/3 three times; .25 x + .5 y
    recipe = blend("grpo", [MEAN, {"advantage_estimator": "leave_one_out"}], weights=[0.25, 0.5])
    got = recipe.advantages(make_rollout([1.0, 0.0, 0.0, 0.0])).advantages
    torch.testing.assert_close(got, torch.tensor([0.1875 + 0.5] + [-0.0625 - 0.5 / 3] * 3).double())


def test_without_weights_each_counts_once_and_one_part_is_itself() -> None:
    rollout = make_rollout([1.0, 0.0])
    close = torch.testing.assert_close
    close(blend("grpo", [MEAN, MEAN]).advantages(rollout).advantages, torch.tensor([1.0, -1.0]).double())
    plain = resolve("dr_grpo", registry=REGISTRY).advantages(rollout).advantages
    assert torch.equal(blend("dr_grpo", [MEAN]).advantages(rollout).advantages, plain)


def test_the_returns_of_the_part_that_is_named_train_the_critic() -> None:
    two = [{"advantage_estimator": {"name": "gae", "lam": lam}} for lam in (0.0, 1.0)]
    with pytest.raises(VariantError, match=r"parts \[1, 2\] make returns, and a critic has one target: set returns_of"):
        blend("ppo", two)
    # r = [0, 1], V = [.5, .25]: lambda 0 targets r + V' = [.25, 1], lambda 1 the return [1, 1]
    rollout = make_rollout([1.0], lengths=[2], values=[[0.5, 0.25]])
    for number, returns in ((1, [0.25, 1.0]), (2, [1.0, 1.0])):
        got = blend("ppo", two, returns_of=number).advantages(rollout)
        torch.testing.assert_close(got.returns, torch.tensor([returns]).double())
    with pytest.raises(VariantError, match="returns_of is 2, and that part makes no returns"):
        blend("ppo", [GAE, MEAN], returns_of=2)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"parts": []}, "parts must hold at least one"),
        ({"parts": [MEAN], "weights": [1.0, 2.0]}, "there are 2 weights for 1 parts"),
        ({"parts": [MEAN, MEAN], "weights": [0.0, 0.0]}, "every weight is 0"),
        ({"parts": [MEAN], "returns_of": 2}, r"returns_of \(2\) must be the number of a part, from 1 to 1"),
        ({"parts": [MEAN], "weight": 1.0}, "no parameter 'weight'. Did you mean 'weights'"),
    ],
)
def test_what_does_not_fit_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(VariantError, match=message):
        blend("grpo", **parameters)


def test_it_keeps_the_contract() -> None:
    check_plugin(trl_variants_blend)
    parts = [{**MEAN, "advantage_normalizer": "group_std"}, {"advantage_estimator": "reward_to_go"}]
    held = check_component("advantage_estimator", "weighted_sum", parameters={"parts": parts}, registry=REGISTRY)
    assert "unscored_rows_count_for_nothing" in held


def test_the_config_trains(tmp_path: Path) -> None:
    log = train_config(CONFIGS / "ppo_grpo_blend.yaml", tmp_path, plugins=["trl_variants_blend"], critic_warmup_steps=1)
    assert len(log) == 3 and all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in log[1:])
