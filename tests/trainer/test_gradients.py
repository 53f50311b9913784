"""The gradient on a real run: what each variant trains, however its step is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.trainer import runs
from tests.trainer.variants import RECIPES, VARIANTS

# -- the gradient --------------------------------------------------------------------------------------------------


def plain_weight(recipe: Any, batch: Any, row: int) -> float:
    """What -A log pi of one token is multiplied by, on-policy, by the aggregator's definition."""
    length = int(batch.mask[row].sum())
    rows, tokens = batch.totals.rows, batch.totals.tokens
    name = recipe.loss_aggregator.name
    if recipe.importance_ratio.name == "sequence_sum":
        # d prod(rho) / d log pi_t = 1 for every token, and the mean over a completion's tokens of one value is itself.
        return 1 / rows
    return {
        "seq_mean_token_mean": 1 / (rows * length),
        "seq_mean_token_sum": 1 / rows,
        "seq_mean_token_sum_norm": 1 / (rows * 8),  # max_completion_length
        "token_mean": 1 / tokens,
        "token_mean_local": 1 / (int(batch.mask.sum()) * batch.totals.micro_batches),
    }[name]


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_epoch_and_one_mini_batch_give_the_plain_policy_gradient(variant: str, tmp_path: Any) -> None:
    trainer = runs.build(tmp_path, variant, max_steps=1, variant_overrides={"kl": "none"})
    checked = []
    loss = trainer.spy.loss

    def checking(batch: Any, **kwargs: Any) -> Any:
        result = loss(batch, **kwargs)
        (got,) = torch.autograd.grad(result.loss, batch.log_probs, retain_graph=True)
        for row, column in batch.mask.nonzero().tolist():
            advantage = batch.advantages.expand_as(got)[row, column].item()
            assert got[row, column].item() == pytest.approx(
                -advantage * plain_weight(RECIPES[variant], batch, row), rel=1e-5, abs=1e-9
            )
            checked.append(advantage)
        assert not got[~batch.mask].any()
        return result

    trainer.spy.loss = checking
    trainer.train()
    assert len(checked) > 20 and any(checked)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains_with_finite_numbers(variant: str, tmp_path: Any) -> None:
    model = tiny.model()
    before = runs.weights(model)
    trainer = runs.trained(tmp_path, variant, model=model)
    assert len(trainer.logs) == 3
    for entry in trainer.logs:
        for name, value in entry.items():
            assert isinstance(value, (int, float)) and math.isfinite(value), f"{name} is {value}"
        assert entry["grad_norm"] > 0
    after = runs.weights(model)
    assert after.isfinite().all() and (after - before).abs().max() > 1e-3


def gradient(folder: Any, variant: str, per_device: int, accumulation: int, **settings: Any) -> Tensor:
    trainer = runs.trained(
        folder,
        variant,
        options={"rollout_func": runs.scripted()},
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        learning_rate=0.0,
        max_grad_norm=0.0,
        max_steps=1,
        **settings,
    )
    (found,) = trainer.gradients
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradient_is_the_same_however_the_step_is_cut(variant: str, tmp_path: Any) -> None:
    whole = gradient(tmp_path, variant, 8, 1)
    assert whole.norm() > 0.01
    local = [b.name for b in RECIPES[variant].components if b.info.batch_statistic]
    assert local == (["token_mean_local"] if variant == "trl_bnpo" else [])
    for per_device, accumulation in ((4, 2), (2, 4)):
        cut = gradient(tmp_path, variant, per_device, accumulation)
        apart = (cut - whole).norm() / whole.norm()
        assert apart > 1e-2 if local else apart < 1e-5


@pytest.mark.parametrize("variant", ["grpo", "dapo", "reinforce_pp_baseline"])
def test_regularizers_do_not_depend_on_the_cut_either(variant: str, tmp_path: Any) -> None:
    overrides = {"regularizer": {"name": "entropy_bonus", "coef": 0.5}}
    whole = gradient(tmp_path, variant, 8, 1, variant_overrides=overrides)
    cut = gradient(tmp_path, variant, 2, 4, variant_overrides=overrides)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))
    assert (whole - gradient(tmp_path, variant, 8, 1)).norm() > 1e-2


@pytest.mark.parametrize("variant", ["grpo", "trl_dapo", "dr_grpo"])
def test_the_loss_of_a_window_is_its_own_mean_when_a_rollout_holds_several(variant: str, tmp_path: Any) -> None:
    # Two windows of 2 micro-batches from one rollout; their token counts differ (pains A02). lr 0, so on-policy.
    trainer = runs.trained(
        tmp_path,
        variant,
        options={"rollout_func": runs.scripted()},
        steps_per_generation=4,
        learning_rate=0.0,
        max_steps=2,
        variant_overrides={"kl": "none"},
    )
    tokens = []
    for step in range(2):
        window = trainer.spy.batches[2 * step : 2 * step + 2]
        total = sum(float(batch.mask.sum()) for batch, *_ in window)
        rows = sum(len(batch.mask) for batch, *_ in window)
        assert {batch.totals.tokens for batch, *_ in window} == {total}
        assert {batch.totals.rows for batch, *_ in window} == {rows}
        expected = -sum(
            batch.advantages.expand_as(batch.mask)[i, t].item() * plain_weight(RECIPES[variant], batch, i)
            for batch, *_ in window
            for i, t in batch.mask.nonzero().tolist()
        )
        assert trainer.losses[step] == pytest.approx(expected, abs=1e-6)
        tokens.append(total)
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize("variant", ["grpo", "reinforce_pp"])
def test_padding_to_a_multiple_changes_no_gradient(variant: str, tmp_path: Any) -> None:
    plain = gradient(tmp_path, variant, 4, 2)
    padded = gradient(tmp_path, variant, 4, 2, pad_to_multiple_of=16)
    torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))
