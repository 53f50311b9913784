"""The conformance kit catches what breaks the contract, and says what, where and on which input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import broken_in_learning, broken_in_rollout
from tests.conformance.broken_in_learning import mean_over_the_micro_batch
from tests.conformance.broken_in_rollout import mean_with_the_unscored
from trl_variants import ClipResult, Variant, VariantError, component
from trl_variants.conformance import PROPERTIES
from trl_variants.testing import NonConformance, check_component, check_variant

BROKEN = [*broken_in_rollout.BROKEN, *broken_in_learning.BROKEN]


@pytest.mark.parametrize(("slot", "broken", "rule", "message"), BROKEN)
def test_a_component_that_breaks_a_property_is_caught(slot: str, broken: Callable, rule: str, message: str) -> None:
    others = {check.__name__ for check in PROPERTIES} - {rule}
    with pytest.raises(NonConformance, match=message) as error:
        check_component(slot, broken, excepted=others)
    assert error.value.broken == rule and str(error.value).endswith(f" [{rule}]")


@component
def reads_every_value(rewards: Tensor, scored: Tensor, values: Tensor) -> Tensor:
    return torch.where(scored, rewards - values.clamp(-5, 5).sum(1), 0.0)


@pytest.mark.parametrize(
    ("slot", "sound"), [("clip_rule", "policy_gradient"), ("advantage_estimator", reads_every_value)]
)
def test_junk_would_be_caught_if_rollouts_and_batches_let_it_in(
    monkeypatch: pytest.MonkeyPatch, slot: str, sound: Any
) -> None:
    only = {check.__name__ for check in PROPERTIES} - {"masked_junk_changes_nothing"}
    assert check_component(slot, sound, excepted=only) == ("masked_junk_changes_nothing",)
    monkeypatch.setattr("trl_variants.data._Tensors._clean", lambda self, *names: None)
    with pytest.raises((NonConformance, VariantError), match="at masked positions changes something|not finite"):
        check_component(slot, sound, excepted=only)


def test_every_property_has_a_component_that_breaks_it() -> None:
    assert {rule for _, _, rule, _ in BROKEN} == {check.__name__ for check in PROPERTIES}


def test_a_message_shows_the_smallest_input_tried() -> None:
    with pytest.raises(NonConformance) as error:
        check_component("advantage_estimator", mean_with_the_unscored)
    # one prompt of two completions of one token
    assert "Smallest input tried that shows it: mask=[[1], [1]], rewards=[" in str(error.value)


def test_a_declaration_of_batch_statistic_lifts_the_cut_only() -> None:
    @component(batch_statistic=True)
    def declared(per_token_loss: Tensor, mask: Tensor) -> Tensor:
        return mean_over_the_micro_batch(per_token_loss, mask)

    held = check_component("loss_aggregator", declared)
    assert "the_cut_changes_no_gradient" not in held
    assert "masked_junk_changes_nothing" in held


def test_on_policy_the_engine_is_the_policy_too() -> None:
    @component
    def by_the_sampler(log_probs: Tensor, advantages: Tensor, sampling_log_probs: Tensor) -> ClipResult:
        ratio = (log_probs.detach() - sampling_log_probs).clamp(-20, 20).exp()
        return ClipResult(loss=-ratio.clamp(max=1.0) * advantages * log_probs, high=ratio > 1)

    assert "the_gradient_on_policy_is_minus_the_advantage" in check_component("clip_rule", by_the_sampler)


def test_a_rule_that_gathers_can_be_resolved() -> None:
    @component(batch_statistic=True)
    def above_average(log_ratio: Tensor, advantages: Tensor, gather: Callable[[Tensor], Tensor]) -> ClipResult:
        return ClipResult(loss=-log_ratio.exp() * advantages / gather(torch.ones(1)).mean())

    assert check_component("clip_rule", above_average, excepted={"extremes_are_finite"})


def test_a_variant_that_breaks_a_property_is_named() -> None:
    variant = Variant(name="wrong", extends="dr_grpo", loss_aggregator=mean_over_the_micro_batch)
    with pytest.raises(NonConformance, match="^variant 'wrong': the rows cut into"):
        check_variant(variant)


def test_an_exception_that_names_no_property_is_refused() -> None:
    with pytest.raises(VariantError, match="^There is no property 'cut'. Properties: masked_junk_changes_nothing, "):
        check_component("clip_rule", "ppo_clip", excepted={"cut"})
