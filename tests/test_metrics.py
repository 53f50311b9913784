"""Metrics: what each one counts, and that parts of a step join to the whole exactly."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.components.common import checked, double, numbers, tables
from trl_variants import Totals, Variant, component, resolve, use
from trl_variants.data import Metric
from trl_variants.registry import load_registry
from trl_variants.testing import make_batch, make_rollout

REGISTRY = load_registry("none")


def of_rollout(variant: str | Variant, rollout: object, **overrides: Any) -> dict[str, float]:
    metrics = resolve(variant, overrides, REGISTRY).advantages(rollout).metrics
    return {name: float(metric) for name, metric in metrics.items()}


def test_the_numbers_of_a_rollout_by_hand() -> None:
    rollout = make_rollout(
        [1.0, 1.0, 0.0, 1.0, math.nan, 0.0],
        group_ids=[0, 0, 1, 1, 2, 2],
        scored=[True, True, True, True, False, True],
        has_eos=torch.tensor([True, False, True, True, True, True]),
    )
    shaped = {"reward_shaper": {"name": "missing_eos_penalty", "penalty": 0.5}, "sample_filter": "zero_variance"}
    got = of_rollout("dr_grpo", rollout, **shaped)
    assert got["frac_reward_zero_std"] == pytest.approx(4 / 6)  # groups 0 and 2, by raw rewards
    assert got["keep_ratio"] == pytest.approx(2 / 6)
    assert got["reward_shaped"] == pytest.approx((1 + 0.5 + 0 + 1 + 0) / 5)  # the scored ones
    # advantages of the shaped rewards: +-.25, -+.5, and 0 for the one that is scored alone
    assert got["advantages/group_spread"] == pytest.approx((0.25 + 0.5 + 0) / 3)
    assert set(got) == {"frac_reward_zero_std", "keep_ratio", "reward_shaped", "advantages/group_spread"}


def test_advantages_per_token_are_averaged_over_the_completion_before_their_spread() -> None:
    rollout = make_rollout([1.0, 0.0], mask=[[1, 1], [1, 0]])
    got = of_rollout("reinforce_pp", rollout, kl=None, advantage_normalizer=None)
    assert got["advantages/group_spread"] == pytest.approx(0.5)  # completions 1 and 0


def test_kl_is_logged_where_it_is_measured_and_as_it_is_trained() -> None:  # pains D08
    rollout = make_rollout([1.0, 0.0], lengths=[2, 1], log_probs=[[0.5, -0.5], [1.0, 9.0]],
                           ref_log_probs=[[0.0, 0.0], [0.0, 0.0]])  # fmt: skip
    got = of_rollout("rloo", rollout)
    assert got["kl"] == pytest.approx((0.5 - 0.5 + 1.0) / 3)
    assert got["kl/k3"] == pytest.approx((math.exp(-0.5) - 0.5 + math.exp(0.5) - 1.5 + math.exp(-1)) / 3)
    assert "kl" not in of_rollout("grpo", rollout)


def test_the_numbers_of_a_batch_by_hand() -> None:
    # ratios 1.5 and 1, 0.5 and 1 (masked); advantages +1 and -1
    ratios = double([[1.5, 1.0], [0.5, 1.0]])
    log_probs = torch.full((2, 2), -1.0).double()
    batch = make_batch(
        advantages=[1.0, -1.0],
        log_probs=log_probs,
        old_log_probs=log_probs - ratios.log(),
        entropies=[[0.1, 0.2], [0.6, 9.0]],
        lengths=[2, 1],
    )
    metrics = resolve("dr_grpo", {"regularizer": "entropy_bonus"}, REGISTRY).loss(batch).metrics
    got = {name: float(metric) for name, metric in metrics.items()}
    assert got == pytest.approx(
        {
            "entropy": 0.3,
            "approx_kl": (1.5 - 1 - math.log(1.5) + 0 + 0.5 - 1 - math.log(0.5)) / 3,
            "clip_ratio/low_mean": 1 / 3,
            "clip_ratio/high_mean": 1 / 3,
            "clip_ratio/region_mean": 2 / 3,
            "clip_ratio/low_min": 0.0,  # the first completion's share
            "clip_ratio/high_max": 0.5,
            "entropy_bonus": -0.3,
        }
    )


def test_the_critics_numbers_of_a_rollout_by_hand() -> None:
    # lambda 1, no KL: every token's target is its completion's reward: 1, 1, 3. Values .5, 1.5, 2; errors .5, -.5, 1.
    variant = Variant(
        name="x",
        extends="reinforce",
        advantage_estimator=use("gae", lam=1.0),
        regularizer="value_loss",
        critic="shared",
    )
    rollout = make_rollout(
        [1.0, 3.0, 7.0],
        group_ids=[0, 1, 2],
        scored=[True, True, False],
        values=[[0.5, 1.5], [2.0, 9.0], [9.0, 9.0]],
        lengths=[2, 1, 2],
    )
    got = of_rollout(variant, rollout)
    assert got["values/mean"] == pytest.approx(4 / 3) and got["returns/mean"] == pytest.approx(5 / 3)
    spread = (1 + 1 + 9) / 3 - (5 / 3) ** 2
    assert got["returns/std"] == pytest.approx(spread**0.5)
    assert got["explained_variance"] == pytest.approx(1 - ((0.25 + 0.25 + 1) / 3 - (1 / 3) ** 2) / spread)
    same = make_rollout([1.0, 1.0], group_ids=[0, 1], values=[[0.5], [0.0]], lengths=[1, 1])
    assert math.isnan(of_rollout(variant, same)["explained_variance"])  # nothing to explain


def test_a_regularizer_named_like_a_metric_replaces_none() -> None:
    @component
    def approx_kl(entropies: Any) -> Any:
        return entropies * 0 + 100.0

    batch = make_batch(advantages=[1.0], entropies=[[0.5]])
    metrics = resolve("dr_grpo", {"regularizer": use(approx_kl, coef=0.0)}, REGISTRY).loss(batch).metrics
    assert float(metrics["approx_kl"]) == 0.0 and float(metrics["regularizer/approx_kl"]) == 100.0


def test_a_sequence_counts_once_where_the_ratio_is_one_per_sequence() -> None:
    log_probs = double([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]])
    batch = make_batch(
        advantages=[1.0, 1.0, 1.0], log_probs=log_probs, old_log_probs=log_probs - 0.1, mask=[[1, 1], [1, 0], [0, 0]]
    )
    metrics = resolve("gspo", registry=REGISTRY).loss(batch).metrics
    assert float(metrics["clip_ratio/high_mean"]) == 1.0
    assert float(metrics["clip_ratio/high_mean"].count) == 2  # the third has no token


def test_metrics_of_nothing_are_nan_and_join_as_nothing() -> None:
    batch = make_batch(advantages=[1.0], mask=[[0, 0]], entropies=[[1.0, 1.0]])
    metrics = resolve("dr_grpo", registry=REGISTRY).loss(batch).metrics
    for metric in metrics.values():
        assert math.isnan(float(metric))
        assert float(metric.count) == 0


def joined(parts: list[Metric]) -> float:
    """As the trainer joins micro-batches and ranks: sums over counts, or extremes."""
    count = sum(float(part.count) for part in parts)
    totals = [float(part.total) for part in parts]
    if not count:
        return math.nan
    return {"mean": sum(totals) / count, "min": min(totals), "max": max(totals)}[parts[0].reduce]


KL = {"estimator": "k2", "placement": "loss", "coef": 0.1}
RECIPES = [resolve(name, {"kl": KL, "regularizer": "entropy_bonus"}, REGISTRY) for name in ("grpo", "gspo", "cispo")]


@checked
@given(tables("log_probs", "old_log_probs", "ref_log_probs", "entropies", rows=5), st.data())
def test_micro_batches_join_to_the_metrics_of_the_step(table: dict, data: st.DataObject) -> None:
    mask = torch.tensor(table.pop("mask"))
    fields = {name: double(values) / 4 for name, values in table.items()}
    advantages = double(data.draw(st.lists(numbers, min_size=len(mask), max_size=len(mask))))
    cut = data.draw(st.integers(0, len(mask)))
    for recipe in RECIPES:
        whole = recipe.loss(make_batch(advantages=advantages, mask=mask, **fields)).metrics
        parts = []
        for rows in (slice(0, cut), slice(cut, None)):
            if len(mask[rows]):
                some = {name: values[rows] for name, values in fields.items()}
                totals = replace(Totals.of(mask), micro_batches=2)
                batch = make_batch(advantages=advantages[rows], mask=mask[rows], totals=totals, **some)
                parts.append(recipe.loss(batch).metrics)
        for name, metric in whole.items():
            assert joined([part[name] for part in parts]) == pytest.approx(float(metric), abs=1e-6, nan_ok=True)


def test_a_token_weight_logs_its_mean_and_what_it_takes_out() -> None:
    # pi_old / pi_engine: 2, .5 | 4; outside [1, 3] a token is taken out
    old = double([[-1.0, -1.0], [-1.0, -1.0]])
    engine = old - double([[2.0, 0.5], [4.0, 1.0]]).log()
    batch = make_batch(
        advantages=[1.0, 1.0], log_probs=old, old_log_probs=old, sampling_log_probs=engine, mask=[[1, 1], [1, 0]]
    )
    weight = {"mode": "token_mask", "clip_min": 1.0, "clip_max": 3.0}
    metrics = resolve("dr_grpo", {"token_weight": weight}, REGISTRY).loss(batch).metrics
    assert float(metrics["token_weight/rollout_correction"]) == pytest.approx(2 / 3)
    assert float(metrics["token_weight/rollout_correction/zero"]) == pytest.approx(2 / 3)
    plain = resolve("dr_grpo", registry=REGISTRY).loss(make_batch(advantages=[1.0])).metrics
    assert not [name for name in plain if name.startswith("token_weight")]
