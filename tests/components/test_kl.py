"""KL: estimators in value, placements, controllers. Gradients of estimators as losses are in test_kl_gradients.py."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.components.common import checked, close, double, tables
from trl_variants import KL, Variant, VariantError, component, resolve, use
from trl_variants.components import kl
from trl_variants.registry import load_registry
from trl_variants.testing import make_batch, make_rollout

REGISTRY = load_registry("none")

ESTIMATORS = {  # of d = log pi - log pi_ref
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) + d - 1,
    "abs": abs,
}
FUNCTIONS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "abs": kl.abs_kl}


@pytest.mark.parametrize(
    ("name", "at_half", "at_minus_half"),
    [  # k3: e^-.5 + .5 - 1 = .10653, e^.5 - .5 - 1 = .14872
        ("k1", 0.5, -0.5),
        ("k2", 0.125, 0.125),
        ("k3", math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5),
        ("abs", 0.5, 0.5),
    ],
)
def test_estimators_give_the_hand_checked_numbers(name: str, at_half: float, at_minus_half: float) -> None:
    close(FUNCTIONS[name](double([[0.5, -0.5]]), double([[0.0, 0.0]])), [[at_half, at_minus_half]])
    # the logged KL is the mean of the tensor used, and k3 is logged besides (pains D08)
    weighted = True if name == "k1" else False
    recipe = resolve("grpo", {"kl": {"estimator": name, "weighted": weighted}}, REGISTRY)
    batch = make_batch(advantages=[0.0], log_probs=[[0.5, -0.5]], ref_log_probs=[[0.0, 0.0]])
    metrics = recipe.loss(batch).metrics
    assert float(metrics["kl"]) == pytest.approx((at_half + at_minus_half) / 2, abs=1e-12)
    assert float(metrics["kl/k3"]) == pytest.approx((math.exp(-0.5) + math.exp(0.5) - 2) / 2, abs=1e-12)
    close(recipe.loss(batch).loss, 0.04 * (at_half + at_minus_half) / 2)  # beta .04, ratio 1


@checked
@given(st.lists(st.floats(-15, 15), min_size=1, max_size=8), st.sampled_from(list(ESTIMATORS)))
def test_estimators_equal_a_loop(differences: list[float], name: str) -> None:
    got = FUNCTIONS[name](double([differences]) - 1.0, torch.full((1, len(differences)), -1.0).double())
    want = double([[ESTIMATORS[name](d) for d in differences]])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "negative"), [("k1", True), ("k2", False), ("k3", False), ("abs", False)])
def test_only_k1_can_be_negative(name: str, negative: bool) -> None:  # pains D07
    d = torch.linspace(-300, 300, 1201, dtype=torch.float64)[None]
    assert bool((FUNCTIONS[name](d, torch.zeros_like(d)) < 0).any()) == negative


@pytest.mark.parametrize("difference", [100.0, -100.0, 1e4, -1e4])
def test_one_token_cannot_make_k3_or_its_gradient_infinite(difference: float) -> None:  # pains D01
    leaf = torch.tensor([[difference]], requires_grad=True)
    value = kl.k3(leaf, torch.zeros(1, 1))
    value.sum().backward()
    assert value.isfinite().all()
    assert leaf.grad.isfinite().all()


def test_k3_never_pushes_away_from_the_reference() -> None:
    d = torch.linspace(-60, 60, 241, dtype=torch.float64)[None].requires_grad_()
    kl.k3(d, torch.zeros_like(d)).sum().backward()
    assert (d.grad * d.detach().sign() >= 0).all()
    close(d.grad[0, 90], 1 - math.exp(15), atol=1e-3)  # d = -15, as TRL's: -3.27e6


def test_trls_weighted_k3_has_the_gradient_of_k2() -> None:
    # at d = -15 and ratio 1: d/d(log pi) [rho k3] = k3 + k3' = (e^15 - 16) + (1 - e^15) = -15
    log_probs = double([[-16.0]]).requires_grad_()
    recipe = resolve("trl_grpo", {"kl": {"coef": 1.0}}, REGISTRY)
    recipe.loss(make_batch(advantages=[0.0], log_probs=log_probs, ref_log_probs=[[-1.0]])).loss.backward()
    close(log_probs.grad, [[-15.0]], atol=1e-6)


def test_kl_is_taken_on_policy_tokens_only() -> None:  # pains D09
    far = make_batch(
        advantages=[0.0],
        log_probs=[[-1.0, -1.0, -1.0]],
        ref_log_probs=[[-1.5, 200.0, -1.5]],
        mask=[[1, 0, 1]],
    )
    result = resolve("grpo", {"kl": {"estimator": "k2"}}, REGISTRY).loss(far)
    assert float(result.metrics["kl"]) == pytest.approx(0.125)
    close(result.loss, 0.04 * 0.125)


# -- placements -------------------------------------------------------------------------------------------------------

KL_ROLLOUT = {"log_probs": [[0.5, -0.5, 1.0]], "ref_log_probs": [[0.0, 0.0, 0.0]]}  # k1 = .5, -.5, 1


def test_placements_by_hand() -> None:
    k, ones = double([[0.5, -0.5, 1.0]]), torch.ones(1, 3)
    close(kl.token_reward(double([[0.0, 0.0, 2.0]]), k, ones, 0.1), [[-0.05, 0.05, 1.9]])
    close(kl.sequence_reward(double([2.0]), k, ones, 0.1), [1.9])
    close(kl.loss(double([[1.0]]), double([[0.5]]), double([[0.0]]), 0.1), [[1.05]])
    log_ratio = double([[math.log(2)]])
    close(kl.loss(double([[1.0]]), double([[0.5]]), log_ratio, 0.1, weighted=True), [[1.1]])
    close(kl.loss(double([[1.0]]), double([[0.5]]), log_ratio, 0.1, weighted="detached"), [[1.1]])


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        # score 2 on the last token, beta .1, gamma 1/2
        # per token: rewards -.05, .05, 1.9; A_3 = 1.9, A_2 = .05 + .95 = 1, A_1 = -.05 + .5 = .45
        ("token_reward", [0.45, 1.0, 1.9]),
        # one sum at the end: 2 - .1 * 1 = 1.9, discounted: 1.9/4, 1.9/2, 1.9
        ("sequence_reward", [0.475, 0.95, 1.9]),
    ],
)
def test_token_kl_is_discounted_and_sequence_kl_is_not(placement: str, expected: list[float]) -> None:  # pains D06
    overrides = {
        "kl": {"placement": placement, "coef": 0.1},
        "advantage_estimator": {"gamma": 0.5},
        "advantage_normalizer": None,
    }
    recipe = resolve("reinforce_pp", overrides, REGISTRY)
    close(recipe.advantages(make_rollout([2.0], lengths=[3], **KL_ROLLOUT)).advantages, [expected])


@checked
@given(
    tables("log_probs", "ref_log_probs"),
    st.sampled_from(["token_reward", "sequence_reward"]),
    st.sampled_from(list(ESTIMATORS)),
    st.sampled_from([1.0, 0.5]),
)
def test_kl_in_the_reward_equals_a_loop(table: dict, placement: str, estimator: str, gamma: float) -> None:
    beta, expected, totals = 0.1, [], []
    scores = [1.0 + i for i in range(len(table["mask"]))]
    for mask, log_probs, ref, score in zip(*(table[n] for n in ("mask", "log_probs", "ref_log_probs")), scores,
                                           strict=True):  # fmt: skip
        policy = [t for t, m in enumerate(mask) if m]
        k = [ESTIMATORS[estimator](log_probs[t] - ref[t]) for t in policy]
        if placement == "token_reward":
            r = [-beta * x + (score if i == len(k) - 1 else 0.0) for i, x in enumerate(k)]
        else:
            r = [score - beta * sum(k) if i == len(k) - 1 else 0.0 for i in range(len(k))]
        totals.append(score - beta * sum(k) if policy else None)
        to_go = {t: sum(gamma**s * x for s, x in enumerate(r[i:])) for i, t in enumerate(policy)}
        expected.append([to_go.get(t, 0.0) for t in range(len(mask))])
    rollout = make_rollout(scores, **{n: double(table[n]) for n in ("log_probs", "ref_log_probs")}, mask=table["mask"])
    term = {"estimator": estimator, "placement": placement, "coef": beta}
    per_token = resolve(
        "reinforce_pp",
        {"kl": term, "advantage_estimator": {"gamma": gamma}, "advantage_normalizer": None},
        REGISTRY,
    )
    close(per_token.advantages(rollout).advantages, expected, atol=1e-8)
    # an estimator that reads the scalar sees the tokens' KL summed in, whatever the placement
    scalar = resolve("reinforce", {"kl": term}, REGISTRY).advantages(rollout)
    filled = [i for i, total in enumerate(totals) if total is not None]
    close(scalar.advantages[filled], [totals[i] for i in filled], atol=1e-8)
    close(scalar.rewards[filled], [totals[i] for i in filled], atol=1e-8)


def test_kl_in_the_reward_leaves_no_kl_in_the_loss() -> None:  # pains D04
    recipe = resolve("grpo", {"kl": {"estimator": "k1", "placement": "sequence_reward", "coef": 0.1}}, REGISTRY)
    rollout = make_rollout(
        [1.0, 0.0], log_probs=[[-1.0, -2.0], [-1.0, -1.0]], ref_log_probs=[[-1.5, -1.0], [-2.0, -1.0]], lengths=[2, 2]
    )
    result = recipe.advantages(rollout)
    close(result.rewards, [1.0 - 0.1 * (0.5 - 1.0), 0.0 - 0.1 * 1.0])
    log_probs = double([[-1.0, -2.0], [-1.0, -1.0]]).requires_grad_()
    loss = recipe.loss(make_batch(advantages=result.advantages, log_probs=log_probs))
    loss.loss.backward()
    close(log_probs.grad, -result.advantages[:, None].expand(2, 2) / 4)
    assert "kl" not in loss.metrics
    assert float(result.metrics["kl"]) == pytest.approx((0.5 - 1.0 + 1.0 + 0.0) / 4)


def test_k1_in_the_loss_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(VariantError) as error:
        resolve("grpo", {"kl": {"estimator": "k1"}}, REGISTRY)
    assert str(error.value) == (
        "kl_estimator 'k1' in the loss has an expected gradient of zero, so it would not hold the policy to the "
        "reference. Use kl: {weighted: true}, kl: {estimator: k2}, or a placement in the reward."
    )


def test_rloo_uses_k1_and_k3_can_be_chosen() -> None:  # pains D07
    assert resolve("rloo", registry=REGISTRY).kl.estimator.name == "k1"
    assert resolve("rloo", {"kl": {"estimator": "k3"}}, REGISTRY).kl.estimator.name == "k3"
    assert resolve("grpo", registry=REGISTRY).kl.estimator.name == "k3"


@pytest.mark.parametrize("off", [{"coef": 0}, {"coef": "0.0"}, None, "none", False])
def test_without_kl_nothing_needs_a_reference(off: object) -> None:  # pains D10
    for name in REGISTRY.variants:
        if name != "reinforce" and resolve(name, registry=REGISTRY).kl:
            recipe = resolve(name, {"kl": off}, REGISTRY)
            assert (recipe.needs_reference, recipe.needs_rollout_log_probs) == (False, False)
            critic = {name: [[0.0]] for name in ("values", "old_values", "returns")} if recipe.variant.critic else {}
            assert "kl" not in recipe.loss(make_batch(advantages=[1.0], **critic)).metrics


# -- controllers ------------------------------------------------------------------------------------------------------


def test_the_adaptive_controller_by_hand() -> None:
    # KL .2, target .1: error 1, clipped to .2; .2 (1 + .2 * 256 / 10000) = .201024
    assert kl.adaptive(0.2, 0.2, 4.0, 256) == pytest.approx(0.201024, abs=1e-12)
    assert kl.adaptive(0.2, 0.2, 4.0, 256, level="sequence", target=4.0) == pytest.approx(0.2)
    assert kl.fixed(0.04) == 0.04
    recipe = resolve("rloo", {"kl": {"coef": 0.2, "controller": {"name": "adaptive", "target": 0.1}}}, REGISTRY)
    constant = {"log_probs": torch.full((256, 1), 0.2).double(), "ref_log_probs": torch.zeros(256, 1).double()}
    assert recipe.advantages(make_rollout([1.0] * 256, **constant)).next_kl_coef == pytest.approx(0.201024, abs=1e-9)


@checked
@given(
    st.lists(st.lists(st.floats(-3, 3), min_size=2, max_size=2), min_size=1, max_size=6),
    st.sampled_from(["token", "sequence"]),
)
def test_the_adaptive_controller_equals_a_loop_over_rollouts(rollouts: list, level: str) -> None:
    target, horizon, coef = 0.5, 40.0, 0.2
    controller = use("adaptive", target=target, horizon=horizon, level=level)
    recipe = resolve("rloo", {"kl": {"controller": controller, "coef": coef}}, REGISTRY)
    got = coef
    for first, second in rollouts:  # two completions, of one token and of two
        rollout = make_rollout([1.0, 0.0], lengths=[1, 2], log_probs=double([[first, 9.0], [second, first]]),
                               ref_log_probs=torch.zeros(2, 2).double())  # fmt: skip
        measured = (first + second + first) / (3 if level == "token" else 2)
        coef *= 1 + min(max(measured / target - 1, -0.2), 0.2) * 2 / horizon
        result = recipe.advantages(rollout, kl_coef=got)
        close(result.rewards, [1.0 - got * first, 0.0 - got * (second + first)], atol=1e-9)  # the coefficient in force
        got = result.next_kl_coef
        assert got == pytest.approx(coef, rel=1e-9)


def test_the_adaptive_controller_steers_a_kl_in_the_loss_too() -> None:
    recipe = resolve("grpo", {"kl": {"controller": {"name": "adaptive", "target": 0.1}}}, REGISTRY)
    assert recipe.kl.measured
    assert recipe.needs_rollout_log_probs
    rollout = make_rollout([1.0, 0.0], lengths=[1, 1], log_probs=[[0.5], [0.5]], ref_log_probs=[[0.0], [0.0]])
    k3 = math.exp(-0.5) - 0.5  # .10653, error .0653
    assert recipe.advantages(rollout).next_kl_coef == pytest.approx(0.04 * (1 + (k3 / 0.1 - 1) * 2 / 10000))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -0.1])
def test_a_controllers_coefficient_must_be_finite_and_not_negative(number: float) -> None:
    @component
    def wild(kl_coef: float) -> float:
        return number

    with pytest.raises(VariantError) as error:
        resolve("rloo", {"kl": {"controller": wild}}, REGISTRY)
    assert str(error.value) == (
        f"kl_controller 'wild' ({__name__}) returned {number}; a coefficient is finite and not negative."
    )


def test_controllers_parameters_are_checked() -> None:
    with pytest.raises(VariantError, match="^kl_controller 'adaptive': target and horizon must be above 0.$"):
        resolve("rloo", {"kl": {"controller": {"name": "adaptive", "target": 0}}}, REGISTRY)


def test_a_placement_of_ones_own_is_told_by_what_it_names() -> None:
    @component
    def half_in_reward(rewards, kl, mask, kl_coef):
        return rewards - 0.5 * kl_coef * (kl * mask).sum(1)

    variant = Variant(name="x", extends="reinforce", kl=KL("k1", placement=half_in_reward, coef=0.1))
    recipe = resolve(variant, registry=REGISTRY)
    assert recipe.kl.in_reward
    close(recipe.advantages(make_rollout([2.0], lengths=[3], **KL_ROLLOUT)).advantages, [2.0 - 0.05])
