"""VESPO and the engine that drew the completions, against TRL's own function for the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trl import GRPOTrainer
from trl_variants_soft.vespo import vespo

from trl_variants import load_registry, resolve
from trl_variants.testing import make_batch


def phi_of_trl(ratio: torch.Tensor, batch: Any, **parameters: float) -> torch.Tensor:
    return GRPOTrainer.get_gamma_weights(
        advantages=batch["advantages"],
        log_ratio_per_token=batch["log_probs"] - batch["old_log_probs"],
        mask=batch["mask"],
        importance_sampling_ratio=ratio,
        **parameters,
    )


def drawn(seed: int, rows: int = 64, width: int = 6) -> dict[str, torch.Tensor]:
    """Completions whose policy, old policy and engine differ, from hardly to beyond the bounds on W."""
    draw = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-2, 1, rows, dtype=torch.float64)[:, None]

    def near(x: torch.Tensor) -> torch.Tensor:
        return x + spread * torch.randn(rows, width, generator=draw, dtype=torch.float64)

    old = -torch.rand(rows, width, generator=draw, dtype=torch.float64)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=draw)
    return {
        "log_probs": near(old),
        "old_log_probs": old,
        "sampling_log_probs": near(old),
        "mask": torch.arange(width) < lengths,
        "advantages": torch.randint(-1, 2, (rows, 1), generator=draw).double(),
    }


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("zero_weight", ["sequence", "token"])
def test_the_engines_weights_enter_vespo_as_in_trl(mode: str, zero_weight: str) -> None:
    kernel = {"k_pos": 0.5, "lambda_pos": 1.0, "k_neg": 1.5, "lambda_neg": 2.5}
    given = drawn(seed=1)
    recipe = resolve(
        "vespo",
        {
            "clip_rule": {**kernel, "zero_weight": zero_weight},
            "token_weight": {"mode": mode},
            "loss_aggregator": "seq_mean_token_sum",
        },
        load_registry("none", extra=["trl_variants_soft"]),
    )
    log_probs = given["log_probs"].requires_grad_()
    recipe.loss(make_batch(**given)).loss.backward()

    # TRL's ratio of the engine, as it computes it; the loss is the mean over rows of the sum of -phi A log pi.
    gap = torch.where(given["mask"], given["old_log_probs"] - given["sampling_log_probs"], 0.0)
    ratio = (gap.sum(1, keepdim=True) if mode.startswith("sequence") else gap).clamp(-20, 20).exp()
    ratio = ratio.clamp(max=3.0) if mode.endswith("truncate") else ratio.masked_fill(ratio > 3.0, 0.0)
    assert 0.05 < ((ratio == 3.0) | (ratio == 0.0)).double().mean() < 0.7
    phi = phi_of_trl(ratio, given, **kernel)
    want = -(phi * given["advantages"] * given["mask"]) / len(phi)
    zero = (ratio == 0).expand_as(given["mask"])
    if zero_weight == "token":  # what is masked is left out; the other tokens of the completion stay
        assert bool((log_probs.grad[zero] == 0).all())
        some = zero.any(1) & (mode == "token_mask")
        ratio = ratio.masked_fill(ratio == 0, 1.0)
        phi = torch.where(some[:, None], phi_of_trl(ratio, given, **kernel), phi)
        want = (-(phi * given["advantages"] * given["mask"]) / len(phi)).masked_fill(zero, 0.0)
    torch.testing.assert_close(log_probs.grad, want, atol=1e-9, rtol=1e-9)
    assert 0.1 < (want != 0).double().mean()


def test_far_off_policy_vespo_weighs_as_trl() -> None:
    # Log-ratios of single tokens of up to 20: beyond, TRL bounds the token's and we the completion's.
    for seed in range(20):
        given = drawn(seed)
        given["log_probs"] = given["old_log_probs"] + (given["log_probs"] - given["old_log_probs"]).clamp(-20, 20)
        summed = torch.where(given["mask"], given["log_probs"] - given["old_log_probs"], 0.0).sum(1, keepdim=True)
        ones = torch.ones_like(summed)
        loss = vespo(summed, -torch.ones_like(given["log_probs"]), given["advantages"], ones, given["mask"]).loss
        torch.testing.assert_close(loss, (phi_of_trl(None, given) * given["advantages"]).expand_as(loss))
    assert float(summed.abs().max()) > 20
