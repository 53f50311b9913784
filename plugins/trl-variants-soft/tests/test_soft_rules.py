"""Clip rules and the aggregator: losses and gradients by hand, and against loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl_variants_soft.gmpo import gmpo
from trl_variants_soft.luspo import seq_mean_length_weighted
from trl_variants_soft.sapo import sapo
from trl_variants_soft.vespo import vespo

from tests.components.common import checked, close, double, tables
from trl_variants import Totals, VariantError, load_registry, resolve
from trl_variants.testing import make_batch

REGISTRY = load_registry("none", extra=["trl_variants_soft"])


def of(variant: str, **overrides: Any) -> Any:
    return resolve(variant, overrides, REGISTRY)


def refusal(variant: str, **overrides: Any) -> str:
    with pytest.raises(VariantError) as error:
        of(variant, **overrides)
    return str(error.value)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# -- sapo ----------------------------------------------------------------------------------------------------------

# ratio, advantage -> loss -4/tau p A with p = sigmoid(tau (rho - 1)), gradient by log pi: -4 p (1 - p) rho A
SAPO = [
    (1.0, 1.0, -2.0, -1.0),  # p = 1/2: -4/2; on-policy -A
    (1.0, -1.0, 2 / 1.05, 1.0),
    (2.0, 1.0, -4 * sigmoid(1), -8 * sigmoid(1) * sigmoid(-1)),  # -2.924, -1.573 where no gate has -2
    (2.0, -1.0, 4 / 1.05 * sigmoid(1.05), 8 * sigmoid(1.05) * sigmoid(-1.05)),
    (0.5, -1.0, 4 / 1.05 * sigmoid(-0.525), 2 * sigmoid(0.525) * sigmoid(-0.525)),
    (0.5, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), SAPO)
def test_sapo(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    log_ratio = double([[math.log(ratio)]]).requires_grad_()
    result = sapo(log_ratio, double([[advantage]]))
    result.loss.sum().backward()
    close(result.loss, [[loss]])
    close(log_ratio.grad, [[gradient]])
    assert result.low is None and result.high is None


def test_sapos_gate_closes_on_both_sides_and_is_widest_on_policy() -> None:
    log_ratio = double([[-3.0, -1.0, 0.0, 1.0, 2.0]]).requires_grad_()
    sapo(log_ratio, double([[1.0]]), tau_pos=2.0).loss.sum().backward()
    weight = (-log_ratio.grad / log_ratio.exp()).detach()[0]  # f'(rho)
    close(weight[2], 1.0)
    assert weight[0] < weight[1] < weight[2] > weight[3] > weight[4] > 0


# -- vespo ---------------------------------------------------------------------------------------------------------

# W, advantage -> phi = W^k e^(lambda (1 - W)): (2, 3) where A >= 0, else (3, 2)
VESPO = [
    (1.0, 1.0, 1.0),
    (1.0, -1.0, 1.0),
    (2.0, 1.0, 4 * math.exp(-3)),  # .1991
    (2.0, -1.0, 8 * math.exp(-2)),  # 1.0827
    (0.5, 1.0, 0.25 * math.exp(1.5)),  # 1.1204
    (0.5, -1.0, 0.125 * math.e),  # .3398
]


@pytest.mark.parametrize(("ratio", "advantage", "phi"), VESPO)
def test_vespo(ratio: float, advantage: float, phi: float) -> None:
    # Two tokens whose ratios have that product, through the whole recipe: L = -phi A (log pi_1 + log pi_2) / 2.
    log_probs = double([[-2.0, -1.0]]).requires_grad_()
    old = [[-2.0 - math.log(4 * ratio), -1.0 + math.log(4)]]
    result = of("vespo").loss(make_batch(advantages=[advantage], log_probs=log_probs, old_log_probs=old))
    result.loss.backward()
    close(result.loss, 1.5 * phi * advantage)
    close(log_probs.grad, [[-phi * advantage / 2] * 2])


def test_weights_are_a_factor_of_vespos_ratio_and_not_of_its_loss() -> None:
    # W = 1/2 * 2 * 1.5 = 1.5 on both tokens, the masked one's 9 apart: phi = 1.5^2 e^(3 (1 - 1.5)) = .50203
    def loss(**parameters: Any) -> Any:
        return vespo(
            double([[0.5]]).log(),
            double([[-1.0, -2.0, -9.0]]),
            double([[1.0]]),
            double([[2.0, 1.5, 9.0]]),
            double([[1, 1, 0]]).bool(),
            **parameters,
        ).loss[:, :2]

    phi = 2.25 * math.exp(-1.5)
    close(loss(), [[phi, 2 * phi]])
    close(loss(zero_weight="sequence"), [[phi, 2 * phi]])


def test_a_weight_of_zero_takes_out_the_token_or_the_completion() -> None:
    # The second token is masked: W = 1/2 * 2 = 1, phi = 1. As in TRL, W = 1e-8: phi = 1e-16 e^(3 (1 - 1e-8)).
    given = (double([[0.5]]).log(), double([[-1.0, -2.0]]), double([[1.0]]), double([[2.0, 0.0]]))
    mask = double([[1, 1]]).bool()
    close(vespo(*given, mask).loss, [[1.0, 0.0]])
    tiny = 1e-16 * math.exp(3 * (1 - 1e-8))
    close(vespo(*given, mask, zero_weight="sequence").loss, [[tiny, 2 * tiny]], atol=1e-25)


def test_vespo_with_a_ratio_for_each_token_weighs_each_token() -> None:
    given = make_batch(advantages=[1.0], log_probs=[[-1.0, -1.0]], old_log_probs=[[-1.0, -1.0 - math.log(2)]])
    close(of("vespo", importance_ratio="token").loss(given).loss, (1 + 4 * math.exp(-3)) / 2)


# -- gmpo ----------------------------------------------------------------------------------------------------------

# log ratios, advantage -> loss -A e^mean, gradients -A e^mean / 2 where not clipped, low, high; the third is masked
GMPO = [
    ([0.1, 0.9], 1.0, -math.exp(0.25), [-math.exp(0.25) / 2, 0.0], [False, False], [False, True]),  # .9 -> .4
    ([-0.1, -0.9], -1.0, math.exp(-0.25), [math.exp(-0.25) / 2, 0.0], [False, True], [False, False]),
    ([0.1, -0.9], 1.0, -math.exp(-0.4), [-math.exp(-0.4) / 2] * 2, [False, False], [False, False]),  # kept: -.8 / 2
    ([0.9, 0.1], -1.0, math.exp(0.5), [math.exp(0.5) / 2] * 2, [False, False], [False, False]),
    ([0.0, 0.0], 2.0, -2.0, [-1.0, -1.0], [False, False], [False, False]),
    ([0.9, -0.9], 0.0, 0.0, [0.0, 0.0], [False, False], [False, False]),
]


@pytest.mark.parametrize(("logs", "advantage", "loss", "gradient", "low", "high"), GMPO)
def test_gmpo(
    logs: list[float], advantage: float, loss: float, gradient: list[float], low: list[bool], high: list[bool]
) -> None:
    log_ratio = double([[*logs, 7.0]]).requires_grad_()
    result = gmpo(log_ratio, double([[advantage]]), double([[1, 1, 0]]).bool())
    result.loss.sum().backward()
    close(result.loss, [[loss]])
    close(log_ratio.grad, [[*gradient, 0.0]])
    assert (result.low[0, :2].tolist(), result.high[0, :2].tolist()) == (low, high)


def test_gmpo_with_advantages_per_token_has_the_completions_ratio_and_the_tokens_gradient() -> None:
    # .1 stays, .9 is not clipped where A < 0: mean .5; losses -A_t e^.5, gradients the same where they are not clipped
    log_ratio = double([[0.1, 0.9]]).requires_grad_()
    result = gmpo(log_ratio, double([[1.0, -2.0]]), double([[1, 1]]).bool())
    result.loss.sum().backward()
    close(result.loss, [[-math.exp(0.5), 2 * math.exp(0.5)]])
    close(log_ratio.grad, [[-math.exp(0.5), 2 * math.exp(0.5)]])


@checked
@given(table=tables("log_ratio", "advantage"))
def test_gmpo_against_a_loop(table: dict[str, Any]) -> None:
    mask, logs = table["mask"], table["log_ratio"]
    advantages = [row[0] for row in table["advantage"]]
    want = []
    for row, a, counts in zip(logs, advantages, mask, strict=True):
        kept = [min(x, 0.3) if a > 0 else max(x, -0.2) for x, c in zip(row, counts, strict=True) if c]
        want.append([-a * math.prod(math.exp(x) for x in kept) ** (1 / max(len(kept), 1))])
    got = gmpo(double(logs), double([[a] for a in advantages]), double(mask).bool(), epsilon_low=0.2, epsilon_high=0.3)
    if len(logs[0]) > 1:
        close(got.loss, want, atol=1e-9)


# -- luspo and bnpo ------------------------------------------------------------------------------------------------


def test_luspo_weighs_every_token_alike_where_gspo_divides_by_the_length() -> None:
    # Ratios of 1; lengths 1 and 3, A = 1 and -1: (1 * -1 + 3 * 1) / 2 = 1 where gspo has 0. One token's ratio is
    # 1/|o| of the completion's, times |o|: every token of A has -A / 2.
    def run(variant: str) -> Any:
        log_probs = double([[-1.0] * 3] * 2).requires_grad_()
        loss = of(variant).loss(make_batch(advantages=[1.0, -1.0], log_probs=log_probs, lengths=[1, 3])).loss
        loss.backward()
        return loss, log_probs.grad

    loss, gradient = run("luspo")
    close(loss, 1.0)
    close(gradient, [[-0.5, 0.0, 0.0], [0.5, 0.5, 0.5]])
    loss, gradient = run("gspo")
    close(loss, 0.0)
    close(gradient, [[-0.5, 0.0, 0.0], [0.5 / 3] * 3])


def test_empty_completions_count_or_not() -> None:
    losses, mask = double([[2.0, 2.0], [5.0, 5.0]]), double([[1, 1], [0, 0]]).bool()
    close(seq_mean_length_weighted(losses, mask, Totals.of(mask)), 4.0)
    close(seq_mean_length_weighted(losses, mask, Totals.of(mask), count_empty=True), 2.0)


def test_a_sequences_loss_is_weighted_by_length_only_by_what_says_so() -> None:
    assert "would weigh it by the sequence's length" in refusal("luspo", loss_aggregator="seq_mean_token_sum")


def test_bnpo_depends_on_the_cut() -> None:
    # Ratios of 1, so that losses are -A: [2] and [1, 1, 1]. One micro-batch: 5/4; one each: (2/1 + 3/3) / 2.
    def share(rows: list[int], cut: int) -> Any:
        advantages, lengths = [[-2.0], [-1.0]], [1, 3]
        totals = Totals(tokens=4, sequences=2, rows=2, micro_batches=cut)
        picked = {"advantages": [advantages[i] for i in rows], "lengths": [lengths[i] for i in rows]}
        return of("bnpo").loss(make_batch(**picked, totals=totals)).loss

    close(share([0, 1], 1), 1.25)
    close(share([0], 2) + share([1], 2), 1.5)


# -- two-sided -----------------------------------------------------------------------------------------------------


@checked
@given(
    ratio=st.floats(0.01, 30.0),
    advantage=st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0]),
    low=st.floats(0.0, 0.9),
    high=st.floats(0.0, 0.9),
    above=st.floats(0.01, 5.0),
)
def test_delta_is_the_c_of_dual_clip(ratio: float, advantage: float, low: float, high: float, above: float) -> None:
    delta = 1 + high + above
    clip = {"epsilon_low": low, "epsilon_high": high, "c": delta}
    batch = make_batch(advantages=[advantage], log_probs=[[-1.0]], old_log_probs=[[-1.0 - math.log(ratio)]])
    got = of("two_sided_grpo", kl=None, clip_rule=clip).loss(batch).loss
    clipped = min(max(ratio, 1 - low), 1 + high)
    close(got, -min(min(ratio, delta) * advantage, clipped * advantage), atol=1e-9)


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "clip", "expected"),
    [
        ("sapo", {"tau_pos": 0}, "clip_rule 'sapo': tau_pos and tau_neg must be above 0."),
        ("sapo", {"tau_neg": -1}, "clip_rule 'sapo': tau_pos and tau_neg must be above 0."),
        ("vespo", {"k_neg": -1}, "clip_rule 'vespo': k_pos and k_neg must not be negative."),
        ("vespo", {"lambda_pos": 0}, "clip_rule 'vespo': lambda_pos and lambda_neg must be above 0."),
        ("gmpo", {"epsilon_low": -0.1}, "clip_rule 'gmpo': epsilon_low and epsilon_high must not be negative."),
        ("two_sided_grpo", {"c": 1.2}, "clip_rule 'dual_clip': c (1.2) must be above 1 + epsilon_high (1.2)."),
    ],
)
def test_parameters_that_are_refused(variant: str, clip: dict[str, float], expected: str) -> None:
    assert refusal(variant, clip_rule=clip) == expected


def test_gmpo_takes_no_ratio_of_the_whole_completion() -> None:
    assert refusal("gmpo", importance_ratio="sequence") == (
        "clip_rule 'gmpo' averages the ratios of tokens itself. Use importance_ratio: token."
    )
