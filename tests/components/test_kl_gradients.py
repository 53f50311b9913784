"""What each KL estimator does as a loss, by enumerating a categorical of three symbols exactly.

A batch holds one completion of one token for each draw that the behaviour policy (1/2, 1/4, 1/4) makes in four:
symbols 0, 0, 1, 2. Its mean is the expectation, without sampling. With advantages of 0, a recipe's loss is beta times
the KL term, and its gradient with respect to the logits is compared with that of the exact KL.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.components.common import close, double
from trl_variants import resolve
from trl_variants.components.kl import k1, k2, k3
from trl_variants.registry import load_registry
from trl_variants.testing import make_batch

REGISTRY = load_registry("none")
DRAWS = torch.tensor([0, 0, 1, 2])
BEHAVIOUR = double([0.5, 0.25, 0.25]).log()
REFERENCE = double([0.2, 0.3, 0.5]).log()
ON_POLICY = BEHAVIOUR
OFF_POLICY = double([0.3, 0.6, 0.1]).log()


def gradient(function: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    (out,) = torch.autograd.grad(function(leaf.log_softmax(0)), leaf)
    return out


def reverse(logits: Tensor) -> Tensor:
    """The gradient of KL(pi, ref) = sum of pi (log pi - log ref)."""
    return gradient(lambda log_pi: (log_pi.exp() * (log_pi - REFERENCE)).sum(), logits)


def forward(logits: Tensor) -> Tensor:
    """The gradient of KL(ref, pi)."""
    return gradient(lambda log_pi: (REFERENCE.exp() * (REFERENCE - log_pi)).sum(), logits)


def half_square(logits: Tensor) -> Tensor:
    """The gradient of the expectation of d^2 / 2 under pi, which is no KL's."""
    return gradient(lambda log_pi: (log_pi.exp() * (log_pi - REFERENCE).square() / 2).sum(), logits)


def trained(estimator: str, logits: Tensor, weighted: bool | str) -> Tensor:
    """The gradient that a recipe trains with."""
    overrides = {"kl": {"estimator": estimator, "coef": 1.0, "weighted": weighted}}
    recipe = resolve("grpo", overrides, REGISTRY)

    def loss(log_pi: Tensor) -> Tensor:
        column = [values[DRAWS][:, None] for values in (log_pi, BEHAVIOUR, REFERENCE)]
        fields = dict(zip(("log_probs", "old_log_probs", "ref_log_probs"), column, strict=True))
        return recipe.loss(make_batch(advantages=[0.0] * 4, **fields)).loss

    return gradient(loss, logits)


def bare(estimator: Callable[[Tensor, Tensor], Tensor], logits: Tensor, weight: str) -> Tensor:
    """The same with nothing but the function: the expectation under the behaviour policy of weight times k."""

    def loss(log_pi: Tensor) -> Tensor:
        ratio = (log_pi - BEHAVIOUR).exp()
        factor = {"plain": torch.ones(3).double(), "weighted": ratio, "detached": ratio.detach()}[weight]
        return (BEHAVIOUR.exp() * factor * estimator(log_pi, REFERENCE)).sum()

    return gradient(loss, logits)


def test_the_two_kls_pull_differently_so_that_the_tests_below_can_tell() -> None:
    assert (reverse(ON_POLICY) - forward(ON_POLICY)).abs().max() > 0.05
    assert (reverse(ON_POLICY) - half_square(ON_POLICY)).abs().max() > 0.05


def test_on_policy_plain_k2_has_the_reverse_kls_gradient_k3_the_forward_kls_and_k1_none() -> None:
    close(trained("k2", ON_POLICY, False), reverse(ON_POLICY))
    close(trained("k3", ON_POLICY, False), forward(ON_POLICY))
    close(bare(k2, ON_POLICY, "plain"), reverse(ON_POLICY))
    close(bare(k3, ON_POLICY, "plain"), forward(ON_POLICY))
    close(bare(k1, ON_POLICY, "plain"), torch.zeros(3))  # so a recipe refuses it


@pytest.mark.parametrize("logits", [ON_POLICY, OFF_POLICY], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize(("name", "function"), [("k1", k1), ("k3", k3)])
def test_weighted_k1_and_k3_have_the_reverse_kls_gradient(name: str, function: Callable, logits: Tensor) -> None:
    close(trained(name, logits, True), reverse(logits))
    close(bare(function, logits, "weighted"), reverse(logits))


@pytest.mark.parametrize("logits", [ON_POLICY, OFF_POLICY], ids=["on-policy", "off-policy"])
def test_k2_times_the_detached_ratio_has_the_reverse_kls_gradient(logits: Tensor) -> None:
    close(trained("k2", logits, "detached"), reverse(logits))
    close(bare(k2, logits, "detached"), reverse(logits))


@pytest.mark.parametrize("logits", [ON_POLICY, OFF_POLICY], ids=["on-policy", "off-policy"])
def test_differentiably_weighted_k2_is_the_gradient_of_its_own_expectation(logits: Tensor) -> None:
    close(trained("k2", logits, True), half_square(logits))


@pytest.mark.parametrize("logits", [ON_POLICY, OFF_POLICY], ids=["on-policy", "off-policy"])
def test_k3_times_the_detached_ratio_has_the_forward_kls_gradient(logits: Tensor) -> None:
    close(trained("k3", logits, "detached"), forward(logits))


def test_off_policy_the_plain_estimators_are_biased() -> None:
    assert (trained("k2", OFF_POLICY, False) - reverse(OFF_POLICY)).abs().max() > 0.05
    assert (trained("k3", OFF_POLICY, False) - forward(OFF_POLICY)).abs().max() > 0.05


def test_in_value_k1_and_k3_are_unbiased_and_k2_is_not() -> None:
    pi = OFF_POLICY.exp()
    exact = (pi * (OFF_POLICY - REFERENCE)).sum()
    close((pi * k1(OFF_POLICY, REFERENCE)).sum(), exact)
    close((pi * k3(OFF_POLICY, REFERENCE)).sum(), exact)
    assert ((pi * k2(OFF_POLICY, REFERENCE)).sum() - exact).abs() > 0.05
