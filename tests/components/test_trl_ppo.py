"""What the last PPOTrainer of TRL computed for two tiny rollouts, and what our components make of the same numbers.

``tests/fixtures/record_trl_ppo.py`` recorded TRL 1.12.0. In ``full_length`` every completion runs into the length
limit, and everything agrees. In ``early_stops`` some stop before it, and there TRL has one more position than we have:
the first one of padding. It puts the score there, reads a value there, and trains the critic there; the policy is not
trained there. So whatever the extra position touches differs, by amounts that these tests work out:

- Advantages and returns: the score is discounted once more, and the value after the last token bootstraps.
- The value loss: a mean over one more position for each completion that stops early.

Given TRL's mask instead of ours, both agree; and with gamma = lam = 1 the extra position changes no advantage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.components.common import close
from trl_variants import KL, Variant, resolve, use
from trl_variants.components.advantages import gae
from trl_variants.components.aggregators import token_mean
from trl_variants.components.clip_rules import ppo_clip
from trl_variants.components.kl import k1, token_reward
from trl_variants.components.masked import at_last_token, masked_sum
from trl_variants.components.normalizers import batch_std
from trl_variants.components.regularizers import value_loss
from trl_variants.data import Batch, Rollout, Totals
from trl_variants.recipe import Recipe
from trl_variants.registry import load_registry
from trl_variants.testing import make_batch, make_rollout

RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "trl_ppo_1_12_0.json").read_text())["cases"]
CASES = tuple(RECORDED)
REGISTRY = load_registry("none")

#: TRL computes in float32, and its advantages and value losses are below 10: a unit in the last place is 1e-6.
TOLERANCE = 1e-5


def tensors(fields: dict[str, Any]) -> dict[str, Tensor]:
    """The recorded numbers, in float64; masks and ids as they are."""
    read = {name: torch.tensor(value) for name, value in fields.items()}
    return {
        name: torch.tensor(fields[name], dtype=torch.float64) if value.is_floating_point() else value
        for name, value in read.items()
    }


def settings_of(case: str) -> dict[str, Any]:
    return RECORDED[case]["settings"]


def rollout_of(case: str) -> dict[str, Tensor]:
    return tensors(RECORDED[case]["rollout"])


def mini_batches_of(case: str) -> list[dict[str, Tensor]]:
    return [tensors(fields) for fields in RECORDED[case]["mini_batches"]]


def discounts(case: str) -> dict[str, float]:
    return {name: settings_of(case)[name] for name in ("gamma", "lam")}


def recipe(case: str, whiten: bool = True) -> Recipe:
    """The variant that TRL's trainer is, in our components."""
    settings = settings_of(case)
    penalty = settings["missing_eos_penalty"]
    clip = settings["cliprange"]
    variant = Variant(
        name="trl_ppo",
        extends="grpo",
        reward_shaper=[] if penalty is None else use("missing_eos_penalty", penalty=penalty),
        kl=KL("k1", placement="token_reward", coef=settings["kl_coef"]),
        advantage_estimator=use("gae", **discounts(case)),
        advantage_normalizer=use("batch_std", correction=1) if whiten else None,
        importance_ratio="token",
        clip_rule=use("ppo_clip", epsilon_low=clip, epsilon_high=clip),
        token_weight=None,
        regularizer=use("value_loss", clip=settings["cliprange_value"], coef=settings["vf_coef"]),
        loss_aggregator="token_mean",
        critic="separate",
    )
    return resolve(variant, registry=REGISTRY)


def our_rollout(trl: dict[str, Tensor], mask: Tensor) -> Rollout:
    return make_rollout(
        trl["raw_scores"],
        mask=mask,
        has_eos=(trl["responses"] == 1).any(1),
        log_probs=trl["log_probs"],
        ref_log_probs=trl["ref_log_probs"],
        values=trl["values"],
    )


def our_batch(trl: dict[str, Tensor], mask: Tensor, **instead: Tensor) -> Batch:
    names = ("log_probs", "old_log_probs", "advantages", "returns", "old_values", "values")
    return make_batch(mask=mask, **{**{name: trl[name] for name in names}, **instead})


def extra(trl: dict[str, Tensor]) -> Tensor:
    """The positions that TRL has and we have not: the first of padding, where there is any."""
    return trl["padding_mask"] & ~trl["padding_mask_p1"]


# -- what the fixture holds ------------------------------------------------------------------------------------------


def test_the_cases_are_what_they_are_called() -> None:
    full, early = rollout_of("full_length"), rollout_of("early_stops")
    assert not full["padding_mask"].any() and not extra(full).any()
    stops = extra(early).any(1)
    assert 0 < stops.sum() < len(stops)
    # An extra position where there is padding, and the token before it is eos.
    assert early["padding_mask"][:, -1].tolist() == stops.tolist() == (early["responses"] == 1).any(1).tolist()
    assert len(set(early["sequence_lengths"].tolist())) >= 4


@pytest.mark.parametrize("case", CASES)
def test_both_clips_bind_for_some_tokens_and_not_for_others(case: str) -> None:
    for trl in mini_batches_of(case)[1:]:
        assert 0 < trl["policy_clip_fraction"] < 1 and 0 < trl["value_clip_fraction"] < 1
    ratios = [(b["log_probs"] - b["old_log_probs"]).exp()[~b["padding_mask"]] for b in mini_batches_of(case)]
    close(ratios[0], torch.ones_like(ratios[0]), TOLERANCE)  # nothing is updated yet
    assert all(ratio.min() < 0.8 and ratio.max() > 1.2 for ratio in ratios[2:])


# -- the rollout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_kl_agrees(case: str) -> None:
    trl = rollout_of(case)
    close(k1(trl["log_probs"], trl["ref_log_probs"]), trl["kl"], TOLERANCE)
    assert (trl["kl"][trl["padding_mask"]] == 0).all()


@pytest.mark.parametrize("case", CASES)
def test_the_penalty_for_not_stopping_agrees(case: str) -> None:
    trl = rollout_of(case)
    penalty = settings_of(case)["missing_eos_penalty"] or 0.0
    close(trl["raw_scores"] - penalty * ~(trl["responses"] == 1).any(1), trl["scores"], TOLERANCE)
    # Our recipe's rewards have the KL summed in, on whatever token it stands.
    beta, mask = settings_of(case)["kl_coef"], ~trl["padding_mask"]
    result = recipe(case).advantages(our_rollout(trl, mask))
    close(result.rewards, trl["scores"] - beta * masked_sum(trl["kl"], mask, dim=1), TOLERANCE)
    close(result.rewards, trl["rewards"].sum(1), TOLERANCE)


def test_token_rewards_agree_at_full_length() -> None:
    trl, mask = rollout_of("full_length"), ~rollout_of("full_length")["padding_mask"]
    placed = at_last_token(trl["scores"], mask)
    close(token_reward(placed, trl["kl"], mask, settings_of("full_length")["kl_coef"]), trl["rewards"], TOLERANCE)


def test_trl_puts_the_score_after_the_last_token_of_a_completion_that_stops_early() -> None:
    trl, beta = rollout_of("early_stops"), settings_of("early_stops")["kl_coef"]
    ours, theirs = ~trl["padding_mask"], ~trl["padding_mask_p1"]
    at_ours, at_theirs = (at_last_token(trl["scores"], mask) for mask in (ours, theirs))
    close(token_reward(at_theirs, trl["kl"], theirs, beta), trl["rewards"], TOLERANCE)
    # The same rewards, but for the score's place.
    difference = trl["rewards"] - token_reward(at_ours, trl["kl"], ours, beta)
    close(difference, at_theirs - at_ours, TOLERANCE)
    assert at_theirs.ne(at_ours).any(1).tolist() == extra(trl).any(1).tolist()


def test_advantages_and_returns_agree_at_full_length() -> None:
    trl, mask = rollout_of("full_length"), ~rollout_of("full_length")["padding_mask"]
    result = gae(trl["rewards"], trl["values"], mask, **discounts("full_length"))
    close(result.advantages, trl["raw_advantages"], TOLERANCE)
    close(result.returns, trl["returns"], TOLERANCE)
    whole = recipe("full_length").advantages(our_rollout(trl, mask))
    close(whole.advantages, trl["advantages"], TOLERANCE)
    close(whole.returns, trl["returns"], TOLERANCE)


def test_advantages_and_returns_agree_given_the_extra_position() -> None:
    trl, mask = rollout_of("early_stops"), ~rollout_of("early_stops")["padding_mask_p1"]
    result = gae(trl["rewards"], trl["values"], mask, **discounts("early_stops"))
    close(result.advantages, trl["raw_advantages"], TOLERANCE)
    close(result.returns, trl["returns"], TOLERANCE)
    # The recipe puts the score on the last position of the mask it is given, which is TRL's place for it.
    whole = recipe("early_stops", whiten=False).advantages(our_rollout(trl, mask))
    close(whole.advantages, trl["raw_advantages"], TOLERANCE)
    close(whole.returns, trl["returns"], TOLERANCE)


def test_advantages_differ_by_what_the_extra_position_adds() -> None:
    # With s the score, V' the value after the last token L, and k the KL there:
    #   ours  A_L = s - beta k - V_L                     TRL's  A_L = -beta k + gamma V' - V_L + gamma lam (s - V')
    # so TRL's is (gamma lam - 1) s + gamma (1 - lam) V' more, and (gamma lam)^(L - t) times that at a token t before.
    # R = A + V differs by the same. V after the end of an episode is 0 by definition; TRL bootstraps from one that is
    # trained towards the score.
    trl, (gamma, lam) = rollout_of("early_stops"), discounts("early_stops").values()
    mask, beyond = ~trl["padding_mask"], extra(trl)
    result = recipe("early_stops", whiten=False).advantages(our_rollout(trl, mask))
    after = masked_sum(trl["values"], beyond, dim=1)
    at_last = ((gamma * lam - 1) * trl["scores"] + gamma * (1 - lam) * after) * beyond.any(1)
    before_last = trl["sequence_lengths"][:, None] - torch.arange(mask.shape[1])
    expected = torch.where(mask, at_last[:, None] * (gamma * lam) ** before_last, 0.0)
    close((trl["raw_advantages"] - result.advantages) * mask, expected, TOLERANCE)
    close((trl["returns"] - result.returns) * mask, expected, TOLERANCE)
    assert expected.abs().amax(1).gt(1e-3).tolist() == beyond.any(1).tolist()
    # At the extra position itself TRL's critic learns the score; there is no such target in ours.
    close(trl["returns"][beyond], trl["scores"][beyond.any(1)], TOLERANCE)
    assert (result.returns[beyond] == 0).all()


def test_advantages_do_not_differ_without_discounts() -> None:
    # gamma = lam = 1: A = return - V, whatever values lie between.
    trl = rollout_of("early_stops")
    ours, theirs = ~trl["padding_mask"], ~trl["padding_mask_p1"]
    with_extra = gae(trl["rewards"], trl["values"], theirs, gamma=1.0, lam=1.0)
    rewards = token_reward(at_last_token(trl["scores"], ours), trl["kl"], ours, settings_of("early_stops")["kl_coef"])
    without = gae(rewards, trl["values"], ours, gamma=1.0, lam=1.0)
    close(with_extra.advantages * ours, without.advantages, TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_whitening_agrees_with_the_correction_for_samples(case: str) -> None:
    # Over the policy's tokens in both cases: the extra position is not in TRL's statistics. TRL adds 1e-8 to the
    # variance and we add it to the standard deviation, far below the tolerance for advantages of this size.
    trl = rollout_of(case)
    mask, rows = ~trl["padding_mask"], torch.ones(len(trl["scores"]), dtype=torch.bool)
    close(batch_std(trl["raw_advantages"], mask, rows, correction=1), trl["advantages"], TOLERANCE)
    n = float(mask.sum())
    population = batch_std(trl["raw_advantages"], mask, rows, correction=0)
    close(population, trl["advantages"] * (n / (n - 1)) ** 0.5, TOLERANCE)


def test_whitening_over_the_extra_position_would_differ() -> None:
    trl = rollout_of("early_stops")
    rows = torch.ones(len(trl["scores"]), dtype=torch.bool)
    over_both = batch_std(trl["raw_advantages"], ~trl["padding_mask_p1"], rows, correction=1)
    assert (over_both - trl["advantages"])[~trl["padding_mask"]].abs().max() > 1e-2


# -- the loss --------------------------------------------------------------------------------------------------------
# TRL's losses are means over each micro-batch, here a mini-batch and so an optimizer step: token_mean and the local
# mean are the same. With several micro-batches they would not be.


@pytest.mark.parametrize("case", CASES)
def test_policy_loss_and_its_clip_fraction_agree(case: str) -> None:
    epsilon = settings_of(case)["cliprange"]
    for trl in mini_batches_of(case):
        mask = ~trl["padding_mask"]
        clip = ppo_clip(
            trl["log_probs"] - trl["old_log_probs"], trl["advantages"], epsilon_low=epsilon, epsilon_high=epsilon
        )
        close(token_mean(clip.loss, mask, Totals.of(mask)), trl["policy_loss"], TOLERANCE)
        clipped = (clip.low | clip.high).double()
        close(token_mean(clipped, mask, Totals.of(mask)), trl["policy_clip_fraction"], TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_value_loss_and_its_clip_fraction_agree_over_the_positions_of_trl(case: str) -> None:
    width = settings_of(case)["cliprange_value"]
    for trl in mini_batches_of(case):
        mask = ~trl["padding_mask_p1"]
        inputs = (trl["values"], trl["old_values"], trl["returns"])
        clipped, plain = value_loss(*inputs, clip=width), value_loss(*inputs, clip=None)
        close(token_mean(clipped, mask, Totals.of(mask)), trl["value_loss"], TOLERANCE)
        binds = (clipped > plain).double()
        close(token_mean(binds, mask, Totals.of(mask)), trl["value_clip_fraction"], TOLERANCE)


def test_value_loss_differs_by_the_extra_positions() -> None:
    # TRL's mean is over the policy's tokens and the extra ones; ours is over the policy's tokens.
    width, met = settings_of("early_stops")["cliprange_value"], 0
    for trl in mini_batches_of("early_stops"):
        ours, beyond = ~trl["padding_mask"], extra(trl)
        per_token = value_loss(trl["values"], trl["old_values"], trl["returns"], clip=width)
        tokens, more = ours.sum(), beyond.sum()
        mine = token_mean(per_token, ours, Totals.of(ours))
        close((mine * tokens + masked_sum(per_token, beyond)) / (tokens + more), trl["value_loss"], TOLERANCE)
        assert abs(mine - trl["value_loss"]) > 1e-2
        met += int(more)
    assert met == 2 * int(extra(rollout_of("early_stops")).sum())  # each row once in each of two epochs


@pytest.mark.parametrize("case", CASES)
def test_the_recipe_has_the_loss_and_gradients_of_trl(case: str) -> None:
    coef = settings_of(case)["vf_coef"]
    for trl in mini_batches_of(case):
        mask, beyond = ~trl["padding_mask"], extra(trl)
        log_probs, values = trl["log_probs"].requires_grad_(), trl["values"].requires_grad_()
        result = recipe(case).loss(our_batch(trl, mask, log_probs=log_probs, values=values))
        result.loss.backward()
        close(log_probs.grad, trl["log_probs_gradient"], TOLERANCE)
        close(torch.tensor(float(result.metrics["clip_ratio/region_mean"])), trl["policy_clip_fraction"], TOLERANCE)
        # The critic's share is divided by fewer positions (see above): at full length by the same number.
        mine = float(result.metrics["value_loss"])
        close(result.loss, trl["policy_loss"] + coef * mine, TOLERANCE)
        close(result.loss - trl["loss"], coef * (mine - trl["value_loss"]), TOLERANCE)
        share = mask.sum() / (mask | beyond).sum()
        close(values.grad * share, trl["values_gradient"] * mask, TOLERANCE)
        if case == "full_length":
            close(result.loss, trl["loss"], TOLERANCE)
            close(values.grad, trl["values_gradient"], TOLERANCE)


def test_from_scores_to_losses_the_recipe_is_trl_at_full_length() -> None:
    trl = rollout_of("full_length")
    ours = recipe("full_length")
    result = ours.advantages(our_rollout(trl, ~trl["padding_mask"]))
    for batch in mini_batches_of("full_length"):
        rows = batch["rows"]
        made = {
            "advantages": result.advantages[rows],
            "returns": result.returns[rows],
            "old_values": trl["values"][rows],
            "old_log_probs": trl["log_probs"][rows],
        }
        close(ours.loss(our_batch(batch, ~batch["padding_mask"], **made)).loss, batch["loss"], TOLERANCE)
