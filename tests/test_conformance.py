"""The conformance kit catches what breaks the contract, and says what, where and on which input."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trl_variants import KL, ClipResult, Variant, VariantError, component, hookimpl
from trl_variants.conformance import PROPERTIES
from trl_variants.testing import NonConformance, check_component, check_plugin, check_variant, make_rollout

# -- the kit catches ------------------------------------------------------------------------------------------------


@component
def masked_mean_by_product(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    return ((log_probs - old_log_probs) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


@component
def first_row_is_special(rewards: Tensor) -> Tensor:
    return rewards - rewards[0]


@component(group_centred=True)
def sum_of_the_group(rewards: Tensor, scored: Tensor) -> Tensor:
    return rewards * scored


@component
def mean_over_the_micro_batch(per_token_loss: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, per_token_loss, 0.0).sum() / mask.sum().clamp(min=1)


@component
def half_the_gradient(log_ratio: Tensor, advantages: Tensor) -> ClipResult:
    return ClipResult(loss=-(log_ratio / 2).exp() * advantages)


@component
def cries_clip(log_ratio: Tensor, advantages: Tensor) -> ClipResult:
    return ClipResult(loss=-log_ratio.exp() * advantages, low=torch.ones_like(log_ratio).bool())


@component
def narrow(per_token_loss: Tensor, mask: Tensor, totals: Any) -> Tensor:
    return torch.where(mask, per_token_loss, 0.0).sum().float() / max(totals.tokens, 1)


@component
def unbounded_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return (ref_log_probs - log_probs).exp()


@component
def mean_with_the_unscored(rewards: Tensor) -> Tensor:
    return rewards - rewards.mean()


@component
def in_place(advantages: Tensor) -> Tensor:
    return advantages.mul_(2)


@component
def counts_in_its_state(kl_coef: float, state: dict) -> tuple[float, dict]:
    state["calls"] = state.get("calls", 0) + 1
    return kl_coef, state


@component
def random_weight(log_probs: Tensor) -> Tensor:
    return torch.rand_like(log_probs)


@component
def baseline_of_all(rewards: Tensor, scored: Tensor, state: dict) -> tuple[Tensor, dict]:
    return torch.where(scored, rewards, 0.0) - state.get("mean", 0.0) * scored, {"mean": float(rewards.mean())}


@component
def counts_micro_batches(log_probs: Tensor, state: dict) -> tuple[Tensor, dict]:
    return log_probs * 0.0, {"calls": state.get("calls", 0) + 1}


@component
def counts_own_tokens(log_probs: Tensor, mask: Tensor, state: dict) -> tuple[Tensor, dict]:
    return log_probs * 0.0, {"tokens": state.get("tokens", 0.0) + float(mask.sum())}


MARK = [0.0]


@component
def knows_its_own_list(log_probs: Tensor, state: dict) -> tuple[Tensor, dict]:
    return log_probs * (1.0 if state.get("mark") is MARK else 2.0), {"mark": MARK}


LAST: list[float] = []


@component
def remembers_elsewhere(rewards: Tensor) -> Tensor:
    before = sum(LAST)
    LAST[:] = rewards.tolist()
    return rewards - before


@component
def ignores_its_width(log_ratio: Tensor, advantages: Tensor, *, width: float = 0.2) -> ClipResult:
    return ClipResult(loss=-log_ratio.exp() * advantages)


BROKEN = [
    (
        "regularizer",
        counts_own_tokens,
        "ranks_change_nothing",
        r"rows \[0\] and \[1\] on two ranks make another step: state regularizer.counts_own_tokens.tokens was 2",
    ),
    (
        "regularizer",
        knows_its_own_list,
        "state_survives_a_checkpoint",
        "'knows_its_own_list': it goes on differently after its state was saved and loaded: loss was",
    ),
    (
        "advantage_estimator",
        remembers_elsewhere,
        "evaluation_changes_nothing",
        "'remembers_elsewhere': an evaluation in between changes what training does: advantages was",
    ),
    (
        "clip_rule",
        ignores_its_width,
        "every_parameter_acts",
        "'ignores_its_width': its parameter 'width' acts on nothing: 0.1, 0.4, .* give what 0.2 gives",
    ),
    (
        "advantage_estimator",
        baseline_of_all,
        "unscored_rows_count_for_nothing",
        r"rows \[0\] have no reward and change the others: state advantage_estimator.baseline_of_all.mean was",
    ),
    (
        "regularizer",
        counts_micro_batches,
        "the_cut_changes_no_gradient",
        r"another step: state regularizer.counts_micro_batches.calls was 1.0 and is 2.0",
    ),
    (
        "importance_ratio",
        masked_mean_by_product,
        "masked_junk_changes_nothing",
        "importance_ratio 'masked_mean_by_product': nan at masked positions changes what the bare function gives",
    ),
    (
        "advantage_estimator",
        first_row_is_special,
        "row_order_decides_nothing",
        r"advantage_estimator 'first_row_is_special': rows in the order \[1, 0\] change something: advantages was",
    ),
    (
        "advantage_estimator",
        sum_of_the_group,
        "constant_groups_get_zero",
        r"'sum_of_the_group': 8 rewards of 0.7 in torch.float64 give \[0.7, .*\], not 0",
    ),
    (
        "loss_aggregator",
        mean_over_the_micro_batch,
        "the_cut_changes_no_gradient",
        r"'mean_over_the_micro_batch': the rows cut into \[\[0\], \[1\]\] make another step: loss was",
    ),
    (
        "clip_rule",
        half_the_gradient,
        "the_gradient_on_policy_is_minus_the_advantage",
        "clip_rule 'half_the_gradient': at ratio 1 the gradient is not that of -A log pi: gradient of log_probs was",
    ),
    (
        "clip_rule",
        cries_clip,
        "the_gradient_on_policy_is_minus_the_advantage",
        "clip_rule 'cries_clip': at ratio 1 it reports clipping: {'metric clip_ratio/low_mean': 1.0,",
    ),
    (
        "loss_aggregator",
        narrow,
        "floats_are_wide",
        "loss_aggregator 'narrow': with torch.float64 given, loss comes out as torch.float32",
    ),
    (
        "kl_estimator",
        unbounded_kl,
        "extremes_are_finite",
        "kl_estimator 'unbounded_kl': .* is not finite|'unbounded_kl' .* made a value that is not finite",
    ),
    (
        "advantage_estimator",
        mean_with_the_unscored,
        "unscored_rows_count_for_nothing",
        r"'mean_with_the_unscored': rows \[0\] have no reward and change the others: advantages was \[0.0\]",
    ),
    (
        "advantage_normalizer",
        in_place,
        "inputs_and_states_are_left_alone",
        "advantage_normalizer 'in_place': its input advantages was .* and is .* after the call",
    ),
    (
        "kl_controller",
        counts_in_its_state,
        "inputs_and_states_are_left_alone",
        r"kl_controller 'counts_in_its_state': its input state was \{\} and is \{'calls': 1\} after the call",
    ),
    (
        "token_weight",
        random_weight,
        "inputs_and_states_are_left_alone",
        "token_weight 'random_weight': the same inputs and states give another result: loss was",
    ),
]


@pytest.mark.parametrize(("slot", "broken", "rule", "message"), BROKEN)
def test_a_component_that_breaks_a_property_is_caught(slot: str, broken: Callable, rule: str, message: str) -> None:
    others = {check.__name__ for check in PROPERTIES} - {rule}
    with pytest.raises((NonConformance, VariantError), match=message):
        check_component(slot, broken, excepted=others)


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
        return ClipResult(loss=-ratio * advantages * log_probs, high=(ratio > 1) & (advantages > 0))

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


# -- whole plugins ----------------------------------------------------------------------------------------------------


@component(group_centred=True, min_generations=2)
def median_centred(rewards: Tensor, scored: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards minus the median of the group's scored ones."""
    out = torch.zeros_like(rewards)
    for group in group_ids.unique():
        mine = scored & (group_ids == group)
        if mine.any():
            out[mine] = rewards[mine] - rewards[mine].median()
    return out


def plugin_of(**hooks: Callable[[], list]) -> SimpleNamespace:
    return SimpleNamespace(__name__="a_plugin", **{name: hookimpl(hook) for name, hook in hooks.items()})


def test_a_sound_plugin_passes_whole_and_is_told_what_it_was_held_to() -> None:
    def register_advantage_estimators() -> list:
        return [median_centred]

    def register_variants() -> list:
        return [
            Variant(name="median", extends="dapo", advantage_estimator="median_centred"),
            Variant(name="median_kl", extends="median", kl=KL("k3", placement="loss", coef=0.1)),
        ]

    plugin = plugin_of(register_advantage_estimators=register_advantage_estimators, register_variants=register_variants)
    held = check_plugin(plugin)
    assert set(held) == {"advantage_estimator.median_centred", "variant.median", "variant.median_kl"}
    assert all("constant_groups_get_zero" in properties for properties in held.values())


def test_a_plugin_with_one_broken_component_fails() -> None:
    def register_advantage_estimators() -> list:
        return [median_centred, mean_with_the_unscored]

    with pytest.raises(NonConformance, match="mean_with_the_unscored"):
        check_plugin(plugin_of(register_advantage_estimators=register_advantage_estimators))


def test_lists_become_float64_exactly() -> None:
    assert make_rollout([0.1, 0.7]).rewards.tolist() == [0.1, 0.7]
    assert make_rollout([1.0], values=[[0.1]]).values.tolist() == [[0.1]]


def test_a_verdict_says_what_excepts_a_component_from_the_contract() -> None:
    local = check_component("loss_aggregator", "token_mean_local", excepted=["every_parameter_acts"])
    assert local.exceptions == {
        "the_cut_changes_no_gradient": "token_mean_local is declared batch_statistic",
        "ranks_change_nothing": "token_mean_local is declared batch_statistic, and gathers nothing",
        "every_parameter_acts": "excepted by the caller",
    }
    gspo = check_variant("gspo")
    assert [*gspo.exceptions] == ["the_gradient_on_policy_is_minus_the_advantage"]


def test_a_statistic_that_gathers_is_held_to_ranks() -> None:
    @component(batch_statistic=True)
    def centred_entropy(entropies: Tensor, mask: Tensor, gather: Callable) -> Tensor:
        sums = torch.stack([torch.where(mask, entropies, 0.0).sum(), mask.sum()]).detach()
        total, tokens = gather(sums[None]).sum(0)
        return entropies - total / tokens

    verdict = check_component("regularizer", centred_entropy)
    assert "ranks_change_nothing" in verdict and "the_cut_changes_no_gradient" in verdict.exceptions


def test_a_plugin_that_is_not_installed_is_named_with_the_nearest() -> None:
    with pytest.raises(VariantError, match="No installed plugin or distribution of plugins named 'no-such-plugin'"):
        check_plugin("no-such-plugin")


def test_a_failure_says_which_property_it_is() -> None:
    with pytest.raises(NonConformance, match=r"\(property unscored_rows_count_for_nothing\)$"):
        check_component("advantage_estimator", mean_with_the_unscored)
