"""Properties of gradients: what they are on-policy, where clipping takes them away, and that a KL is one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trl_variants.binding import Bound
from trl_variants.conformance.running import Subject, bare, outcome
from trl_variants.data import ClipResult

__all__ = [
    "a_kl_is_a_divergence",
    "clips_are_reported_where_they_bind",
    "the_gradient_on_policy_is_minus_the_advantage",
]


def the_gradient_on_policy_is_minus_the_advantage(subject: Subject) -> bool | str:
    """At ratio 1 the gradient with respect to log pi is -A, and nothing is reported as clipped.

    Of a ratio per sequence and of an aggregator, the sign: they weigh tokens.
    """
    if subject.bound is not None and subject.bound.slot not in ("clip_rule", "importance_ratio", "loss_aggregator"):
        return False
    per_sequence = subject.recipe.importance_ratio.info.level == "sequence"
    if per_sequence and subject.bound is None:
        return f"{subject.recipe.importance_ratio.name} gives every token its sequence's mean gradient"
    on_policy = replace(subject.recipe, kl=None, regularizers=(), token_weights=())
    rule = subject.recipe.clip_rule
    plain = replace(rule, info=replace(rule.info, function=_plain, inputs=("log_probs", "advantages"), parameters={}))
    reference = replace(on_policy, clip_rule=plain)
    by_sign = per_sequence or (subject.bound is not None and subject.bound.slot == "loss_aggregator")
    for case, per_token in itertools.product(subject.cases(), (False,) if by_sign else (False, True)):
        given = case.batch(per_token)
        given["old_log_probs"] = given["sampling_log_probs"] = given["log_probs"]  # current, old and sampler are one
        _require_ratio_one(subject, given)
        got = outcome(on_policy, given)
        clipped = {n: float(v) for n, v in got.items() if n.startswith("metric clip_ratio") and abs(float(v)) > 0}
        if clipped:
            raise subject.fail(f"at ratio 1 it reports clipping: {clipped}", given)
        name = "gradient of log_probs"
        if by_sign:
            against = got[name] * given["advantages"]
            if bool((against > 0).any()) or bool((against == 0).all()):
                raise subject.fail(
                    f"at ratio 1 the {name} does not go against the advantages: {got[name].tolist()}", given
                )
            continue
        want = outcome(reference, given)[name]
        subject.compare(got, {name: want}, "at ratio 1 the gradient is not that of -A log pi", given, tol=1e-9)
    return True


def _require_ratio_one(subject: Subject, given: Mapping[str, Any]) -> None:
    """A ratio of a policy to itself is exactly 1."""
    if subject.bound is not None and subject.bound.slot == "importance_ratio":
        ratio = bare(subject.bound, given)["it"]
        if bool((ratio != 0).any()):
            raise subject.fail(f"of a policy to itself, the log of the ratio is {ratio.tolist()}, not 0", given)


def _plain(log_probs: Tensor, advantages: Tensor) -> ClipResult:
    return ClipResult(loss=-advantages * log_probs)


def clips_are_reported_where_they_bind(subject: Subject) -> bool:
    """A clip rule reports a token where a bound takes of its gradient, and only there: low below 1, high above."""
    bound = subject.bound
    if bound is None or bound.slot != "clip_rule":
        return False
    for case, spread, advantage in itertools.product(subject.cases(), (0.3, 3.0), (1.0, -1.0)):
        given = case.inputs("clip_rule")
        away = spread * (given["old_log_probs"] - given["log_probs"])
        given["old_log_probs"] = given["sampling_log_probs"] = given["log_probs"] + away
        given |= {
            "advantages": torch.full_like(given["advantages"], advantage),
            "token_weights": torch.ones(case.rows, 1),
        }
        gradient, result = _clipped(bound, given)
        counts = given["mask"] & (away.abs() < 10)
        flags = {n: _flag(getattr(result, n), counts) for n in ("low", "high", "dual")}
        reported = flags["low"] | flags["high"] | flags["dual"]
        full = -(-away).exp() * given["advantages"]
        whole = torch.isclose(gradient, full, rtol=1e-9, atol=0)
        wrong = {
            "it takes the gradient away where it reports no clip": counts & (gradient == 0) & ~reported,
            "it reports a clip where the gradient is whole": reported & whole,
        }
        if "log_ratio" in bound.info.inputs:  # another rule makes a ratio of its own, of whole completions perhaps
            wrong["it reports a low clip where the ratio is above 1"] = flags["low"] & (away < 0)
            wrong["it reports a high clip where the ratio is below 1"] = flags["high"] & (away > 0)
        for message, where in wrong.items():
            if bool(where.any()):
                row, token = where.nonzero()[0].tolist()
                ratio = float((-away[row, token]).exp())
                raise subject.fail(
                    f"{message}: ratio {ratio:.4g}, advantage {advantage}, row {row}, token {token}", given
                )
    return True


def _clipped(bound: Bound, given: Mapping[str, Any]) -> tuple[Tensor, ClipResult]:
    """The gradient of the summed loss with respect to log pi, and what the rule returned."""
    log_probs = given["log_probs"].clone().requires_grad_()
    inputs = {**given, "log_probs": log_probs, "log_ratio": log_probs - given["old_log_probs"]}
    own = {name: bound.parameters[name] for name in bound.info.parameters}
    result = bound.info.function(*(inputs[name] for name in bound.info.inputs), **own)
    result = result[0] if "state" in bound.info.inputs else result
    loss = torch.where(given["mask"], result.loss.expand_as(log_probs), 0.0).sum()
    if not loss.requires_grad:
        return torch.zeros_like(log_probs), result
    return torch.autograd.grad(loss, log_probs)[0], result


def _flag(flag: Tensor | None, counts: Tensor) -> Tensor:
    return counts & flag.expand_as(counts) if flag is not None else torch.zeros_like(counts)


def a_kl_is_a_divergence(subject: Subject) -> bool:
    """A KL estimator is 0 where the policy is the reference, above 0 on average where not, and has a gradient."""
    bound = subject.bound
    if bound is None or bound.slot != "kl_estimator":
        return False
    uneven, even = torch.tensor([[0.7], [0.2], [0.1]]).double(), torch.full((3, 1), 1 / 3).double()
    for policy, reference in ((uneven, uneven), (uneven, even), (even, uneven), (uneven, uneven.flip(0))):
        given = {"log_probs": policy.log(), "ref_log_probs": reference.log(), "mask": torch.ones(3, 1).bool()}
        found = bare(bound, given)
        mean = float((policy * found["it"]).sum())
        if policy is reference:
            if bool((found["it"].abs() > 1e-12).any()):
                raise subject.fail(f"of a policy to itself it is {found['it'].flatten().tolist()}, not 0", given)
        elif mean <= 0:
            raise subject.fail(
                f"its mean over three tokens of probabilities {policy.flatten().tolist()} is {mean}", given
            )
        elif "gradient of log_probs" not in found or bool((found["gradient of log_probs"] == 0).all()):
            raise subject.fail("it has no gradient, so that in the loss it would hold the policy to nothing", given)
    return True
