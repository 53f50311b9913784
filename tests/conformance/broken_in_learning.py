"""Components of the learning phase that break the contract: the slot, the component, the property, what is said."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trl_variants import ClipResult, component


@component
def masked_mean_by_product(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    return ((log_probs - old_log_probs) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


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


DICE = torch.Generator().manual_seed(0)


@component
def random_weight(log_probs: Tensor) -> Tensor:
    return torch.rand(log_probs.shape, generator=DICE)


@component
def draws_for_nothing(log_probs: Tensor) -> Tensor:
    torch.rand(1)
    return torch.ones_like(log_probs)


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


@component
def ignores_its_width(log_ratio: Tensor, advantages: Tensor, *, width: float = 0.2) -> ClipResult:
    return ClipResult(loss=-log_ratio.exp() * advantages)


@component
def through_half(entropies: Tensor) -> Tensor:
    return entropies.half().to(entropies.dtype)


@component
def log_of_the_entropy(entropies: Tensor) -> Tensor:
    return entropies.log()


@component
def detached_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return log_probs.detach() - old_log_probs


@component
def shifted_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return log_probs - old_log_probs + 0.01


@component
def ratio_of_the_sequence_said_to_be_the_tokens(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    total = torch.where(mask, log_probs - old_log_probs, 0.0).sum(1, keepdim=True)
    return total / mask.sum(1, keepdim=True).clamp(min=1)


@component
def upside_down(per_token_loss: Tensor, mask: Tensor, totals: Any) -> Tensor:
    return -torch.where(mask, per_token_loss, 0.0).sum() / max(totals.tokens, 1)


def clipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    return torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)


@component
def silent_clip(log_ratio: Tensor, advantages: Tensor) -> ClipResult:
    return ClipResult(loss=clipped(log_ratio.exp(), advantages))


@component
def swapped_flags(log_ratio: Tensor, advantages: Tensor) -> ClipResult:
    ratio = log_ratio.exp()
    low, high = (ratio < 0.8) & (advantages < 0), (ratio > 1.2) & (advantages > 0)
    return ClipResult(loss=clipped(ratio, advantages), low=high, high=low)


@component
def region_for_clip(log_ratio: Tensor, advantages: Tensor) -> ClipResult:
    ratio = log_ratio.exp()
    return ClipResult(loss=clipped(ratio, advantages), low=ratio < 0.8, high=ratio > 1.2)


@component
def kl_the_wrong_way(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return ref_log_probs - log_probs


@component
def kl_without_gradient(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return (log_probs - ref_log_probs).detach()


@component
def kl_plus_one(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return log_probs - ref_log_probs + 1.0


@component
def asks_for_a_critic(entropies: Tensor, values: Tensor) -> Tensor:
    return entropies


@component
def coefficient_of_its_own(per_token_loss: Tensor, kl: Tensor) -> Tensor:
    return per_token_loss + 0.1 * kl


BROKEN: list[Any] = [
    ("regularizer", through_half, "floats_are_wide", "through_half makes torch.float32 into torch.float16"),
    ("regularizer", log_of_the_entropy, "extremes_are_finite", "made a value that is not finite"),
    (
        "importance_ratio",
        detached_ratio,
        "the_gradient_on_policy_is_minus_the_advantage",
        r"'detached_ratio': at ratio 1 the gradient is not that of -A log pi: gradient of log_probs was",
    ),
    (
        "importance_ratio",
        shifted_ratio,
        "the_gradient_on_policy_is_minus_the_advantage",
        r"'shifted_ratio': of a policy to itself, the log of the ratio is .*0.01",
    ),
    (
        "importance_ratio",
        ratio_of_the_sequence_said_to_be_the_tokens,
        "the_gradient_on_policy_is_minus_the_advantage",
        "at ratio 1 the gradient is not that of -A log pi",
    ),
    (
        "loss_aggregator",
        upside_down,
        "the_gradient_on_policy_is_minus_the_advantage",
        "'upside_down': at ratio 1 the gradient of log_probs does not go against the advantages",
    ),
    (
        "clip_rule",
        silent_clip,
        "clips_are_reported_where_they_bind",
        r"'silent_clip': it takes the gradient away where it reports no clip: ratio 1.\d+, advantage 1.0, row",
    ),
    (
        "clip_rule",
        swapped_flags,
        "clips_are_reported_where_they_bind",
        "'swapped_flags': it reports a low clip where the ratio is above 1: ratio",
    ),
    (
        "clip_rule",
        region_for_clip,
        "clips_are_reported_where_they_bind",
        "'region_for_clip': it reports a clip where the gradient is whole: ratio",
    ),
    (
        "kl_estimator",
        kl_the_wrong_way,
        "a_kl_is_a_divergence",
        r"its mean over three tokens of probabilities .* is -0\.",
    ),
    ("kl_estimator", kl_without_gradient, "a_kl_is_a_divergence", "'kl_without_gradient': it has no gradient"),
    ("kl_estimator", kl_plus_one, "a_kl_is_a_divergence", r"of a policy to itself it is \[1.0, 1.0, 1.0\], not 0"),
    (
        "token_weight",
        draws_for_nothing,
        "inputs_and_states_are_left_alone",
        "draws_for_nothing changes the state of torch's random numbers, and with it what others do",
    ),
    (
        "regularizer",
        asks_for_a_critic,
        "every_input_acts",
        "'asks_for_a_critic': values changes nothing of what it returns",
    ),
    ("kl_placement", coefficient_of_its_own, "every_input_acts", "kl_coef changes nothing of what it returns"),
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
        "clip_rule",
        ignores_its_width,
        "every_parameter_acts",
        "'ignores_its_width': its parameter 'width' acts on nothing: 0.1, 0.4, .* give what 0.2 gives",
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
        "loss_aggregator 'narrow': with torch.float64 given, narrow makes torch.float64 into torch.float32",
    ),
    (
        "kl_estimator",
        unbounded_kl,
        "extremes_are_finite",
        "kl_estimator 'unbounded_kl': .* is not finite|'unbounded_kl' .* made a value that is not finite",
    ),
    (
        "token_weight",
        random_weight,
        "inputs_and_states_are_left_alone",
        "token_weight 'random_weight': the same inputs and states give another result: loss was",
    ),
]
