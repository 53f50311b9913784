"""Advantage baselines: what a completion's reward is compared with, and how the difference is scaled.

One file per family; each holds its components and the variants made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl_variants import Variant, hookimpl
from trl_variants_baselines.gpg import GPG, gpg
from trl_variants_baselines.leave_one_out import LOO_GRPO, leave_one_out_std
from trl_variants_baselines.maxrl import MAXRL, maxrl
from trl_variants_baselines.opo import OPO, opo
from trl_variants_baselines.pass_at_k import GRPO_PASSK, PASS_AT_K, grpo_passk, pass_at_k
from trl_variants_baselines.remax import REMAX, remax
from trl_variants_baselines.running import REINFORCE_EMA, REINFORCE_RUNNING, ema_baseline, running_baseline
from trl_variants_baselines.vapo import VAPO, length_adaptive_gae, positive_nll


@hookimpl
def register_advantage_estimators() -> list[Callable[..., Any]]:
    """Estimators, by the name that a config uses."""
    return [
        remax,
        opo,
        gpg,
        maxrl,
        pass_at_k,
        grpo_passk,
        running_baseline,
        ema_baseline,
        length_adaptive_gae,
    ]


@hookimpl
def register_advantage_normalizers() -> list[Callable[..., Any]]:
    """Normalizers."""
    return [leave_one_out_std]


@hookimpl
def register_regularizers() -> list[Callable[..., Any]]:
    """Terms added to the loss."""
    return [positive_nll]


@hookimpl
def register_variants() -> list[Variant]:
    """Variants."""
    return [
        REMAX,
        OPO,
        GPG,
        MAXRL,
        PASS_AT_K,
        GRPO_PASSK,
        LOO_GRPO,
        REINFORCE_RUNNING,
        REINFORCE_EMA,
        VAPO,
    ]
