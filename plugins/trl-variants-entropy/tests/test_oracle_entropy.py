"""TRL itself as the oracle: its top_entropy_quantile and its use_adaptive_entropy give the same runs as ours."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.test_oracle import assert_same, ours, stock

HERE = {"variant_plugins": ["trl_variants_entropy"]}
TWO_EPOCHS = {"num_iterations": 2, "max_steps": 4}


def masked(share: float) -> dict[str, Any]:
    weights = ["rollout_correction", {"name": "high_entropy_mask", "top_entropy_quantile": share}]
    return {"variant_overrides": {"token_weight": weights}, **HERE}


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("variant", ["trl_grpo", "trl_dapo"])  # with KL in the loss, and without
def test_the_mask_equals_trls_top_entropy_quantile(variant: str, share: float, tmp_path: Any, path: str) -> None:
    theirs = stock(variant, tmp_path / "a", path, top_entropy_quantile=share, **TWO_EPOCHS)
    assert_same(theirs, ours(variant, tmp_path / "b", path, **masked(share), **TWO_EPOCHS))


def test_the_mask_changes_a_run_and_a_share_of_1_does_not(tmp_path: Any, path: str) -> None:
    plain = ours("trl_dapo", tmp_path / "a", path, **TWO_EPOCHS)
    assert_same(plain, ours("trl_dapo", tmp_path / "b", path, **masked(1.0), **TWO_EPOCHS))
    fifth = ours("trl_dapo", tmp_path / "c", path, **masked(0.2), **TWO_EPOCHS)
    assert fifth.norms[0] != pytest.approx(plain.norms[0], rel=1e-2)


#: A target amid the entropies of the steps, so that the bonus comes and goes; α of a size that shows.
TARGET = {"target": 2.75, "delta": 0.1, "start": 0.2}
THEIRS = {"use_adaptive_entropy": True, "entropy_target": 2.75, "entropy_coef_delta": 0.1, "entropy_coef": 0.2}
#: TRL's bonus is a mean over each micro-batch, ours over the tokens of the step: the same where they hold as many.
EQUAL_LENGTHS = {"generation_kwargs": {"min_new_tokens": 8}}


@pytest.mark.parametrize(
    "settings", [{"gradient_accumulation_steps": 1}, EQUAL_LENGTHS], ids=["one micro-batch", "two of equal lengths"]
)
@pytest.mark.parametrize("variant", ["trl_grpo", "trl_dapo"])
def test_adaptive_entropy_equals_trls(variant: str, settings: dict[str, Any], tmp_path: Any, path: str) -> None:
    # Small steps: on a model this steep, large ones make rounding grow.
    settings = {"max_steps": 6, "learning_rate": 0.01, **settings}
    theirs = stock(variant, tmp_path / "a", path, **THEIRS, **settings)
    overrides = {"regularizer": {"name": "adaptive_entropy", **TARGET}}
    mine = ours(variant, tmp_path / "b", path, variant_overrides=overrides, **settings)
    assert_same(theirs, mine)
    without = ours(variant, tmp_path / "c", path, **settings)
    assert without.norms != pytest.approx(mine.norms, rel=1e-3)  # the bonus acted
    # TRL logs the coefficient as it is after each step; ours moves at the start of the next one.
    coefs = [entry["entropy_coef"] for entry in theirs.trainer.state.log_history if "entropy_coef" in entry]
    assert mine.trainer._states["regularizer.adaptive_entropy"]["coef"] == pytest.approx(coefs[-2], abs=1e-12)
    moves = [after - before for before, after in zip(coefs, coefs[1:], strict=False)]
    assert min(moves) < 0 < max(moves)
