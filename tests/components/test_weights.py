"""Token weights: TRL's correction for the engine's probabilities, mode by mode."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.components.common import checked, close, double, tables
from trl_variants import Variant, VariantError, component, resolve
from trl_variants.components.weights import rollout_correction
from trl_variants.registry import load_registry
from trl_variants.testing import make_batch

REGISTRY = load_registry("none")
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
LN2, LN3 = math.log(2), math.log(3)


def constrained(weight: float, mode: str, low: float | None, high: float | None) -> float:
    """TRL 1.16: truncate clamps, mask sets what is strictly outside to 0."""
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if mode.endswith("truncate"):
        return min(max(weight, low), high)
    return 0.0 if weight < low or weight > high else weight


@checked
@given(
    tables("old", "engine"),
    st.sampled_from(MODES),
    st.sampled_from([(None, 3.0), (0.5, 2.0), (0.5, None)]),
    st.data(),
)
def test_every_mode_equals_a_loop_of_trls_rules(table: dict, mode: str, bounds: tuple, data: st.DataObject) -> None:
    mask, old, engine = table["mask"], table["old"], table["engine"]
    low, high = bounds
    unknown = data.draw(st.lists(st.booleans(), min_size=len(mask), max_size=len(mask)))
    expected = []
    for valid, ours, theirs, nan in zip(mask, old, engine, unknown, strict=True):
        if nan:  # vLLM could not score the first token: it is not corrected
            theirs[0] = math.nan
        differences = [0.0 if not m or math.isnan(b) else a - b for a, b, m in zip(ours, theirs, valid, strict=True)]
        if mode.startswith("sequence"):
            differences = [min(max(sum(differences), -20.0), 20.0)]
        expected.append([constrained(math.exp(d), mode, low, high) for d in differences])
    got = rollout_correction(double(old), torch.tensor(mask), double(engine), mode=mode, clip_min=low, clip_max=high)
    torch.testing.assert_close(got, double(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [  # pi_old / pi_engine = 2 and 3, together 6; bound 2.5
        ("token_truncate", [[2.0, 2.5]]),
        ("token_mask", [[2.0, 0.0]]),
        ("sequence_truncate", [[2.5]]),
        ("sequence_mask", [[0.0]]),
    ],
)
def test_each_mode_by_hand_alone_and_on_the_policy_loss(mode: str, expected: list[list[float]]) -> None:
    old, engine = double([[-1.0, -1.0]]), double([[-1.0 - LN2, -1.0 - LN3]])
    close(rollout_correction(old, torch.ones(1, 2), engine, mode=mode, clip_max=2.5), expected)
    recipe = resolve("dr_grpo", {"token_weight": {"mode": mode, "clip_max": 2.5}}, REGISTRY)
    log_probs = old.clone().requires_grad_()
    batch = make_batch(advantages=[1.0], log_probs=log_probs, old_log_probs=old, sampling_log_probs=engine)
    recipe.loss(batch).loss.backward()
    weights = double(expected).expand(1, 2)
    close(log_probs.grad, -weights / 2)  # -A w / (N L), L = 2


def test_a_token_that_the_engine_could_not_score_is_not_corrected() -> None:
    old, engine = double([[-1.0, -1.0]]), double([[math.nan, -1.0 - LN2]])
    close(rollout_correction(old, torch.ones(1, 2), engine, mode="token_mask"), [[1.0, 2.0]])
    close(rollout_correction(old, torch.ones(1, 2), engine, mode="sequence_mask"), [[2.0]])
    batch = make_batch(advantages=[1.0], log_probs=old, sampling_log_probs=engine)
    assert resolve("grpo", {"kl": None}, REGISTRY).loss(batch).loss.isfinite()


def test_where_the_engine_gives_no_log_probs_nothing_is_weighted() -> None:
    assert rollout_correction(double([[-1.0, -2.0]]), torch.ones(1, 2)) is None
    batch = make_batch(advantages=[1.0], log_probs=[[-1.0, -2.0]])
    with_it, without = (resolve("dr_grpo", {"token_weight": w}, REGISTRY) for w in ("rollout_correction", None))
    close(with_it.loss(batch).loss, without.loss(batch).loss)


def test_weights_scale_the_policy_loss_and_not_the_kl() -> None:
    old, engine, ref = double([[-1.0]]), double([[-1.0 - LN2]]), double([[-1.5]])
    recipe = resolve(
        "grpo",
        {"kl": {"estimator": "k2", "coef": 1.0}, "token_weight": {"mode": "token_truncate"}},
        REGISTRY,
    )
    batch = make_batch(advantages=[1.0], log_probs=old, sampling_log_probs=engine, ref_log_probs=ref)
    close(recipe.loss(batch).loss, -2.0 + 0.125)  # w = 2; k2 = .5^2 / 2


def test_weights_carry_no_gradient() -> None:
    old = double([[-1.0]]).requires_grad_()
    weight = rollout_correction(old, torch.ones(1, 1), double([[-1.5]]), mode="token_truncate")
    assert not weight.requires_grad


def test_weights_multiply() -> None:
    @component
    def halve(mask: Tensor) -> Tensor:
        return torch.full(mask.shape, 0.5, dtype=torch.float64)

    variant = Variant(name="x", extends="dr_grpo", token_weight=["rollout_correction", halve])
    batch = make_batch(advantages=[1.0], log_probs=[[-1.0]], sampling_log_probs=[[-1.0 - LN2]])
    close(resolve(variant, registry=REGISTRY).loss(batch).loss, -1.0)  # 2 * 1/2


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"clip_min": 3, "clip_max": 2}, "clip_min (3.0) must be below clip_max (2.0)"),  # pains C16
        ({"clip_min": 2, "clip_max": 2}, "clip_min (2.0) must be below clip_max (2.0)"),
        (
            {"mode": "token_truncate", "clip_max": None},
            "mode 'token_truncate' needs clip_min or clip_max",
        ),
        (
            {"mode": "token"},
            "mode must be one of 'token_truncate', 'token_mask', 'sequence_truncate', 'sequence_mask', not 'token'",
        ),
    ],
)
def test_bounds_that_make_no_sense_are_refused(parameters: dict, message: str) -> None:
    with pytest.raises(VariantError) as error:
        resolve("grpo", {"token_weight": parameters}, REGISTRY)
    assert str(error.value) == f"token_weight 'rollout_correction': {message}."
