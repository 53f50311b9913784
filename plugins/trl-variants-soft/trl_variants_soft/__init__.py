"""Every loss that TRL's GRPOTrainer offers beyond the core's, as variants: soft trust regions and other scales.

SAPO, VESPO and GMPO replace the hard clip; two-sided GRPO adds a second one; LUSPO, BNPO, GDPO and Lite PPO weigh
completions, rewards or advantages otherwise. Each has its paper's numbers; the README says which overrides give TRL's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl_variants import Variant, hookimpl
from trl_variants_soft import bnpo, gdpo, gmpo, lite_ppo, luspo, sapo, two_sided, vespo

__version__ = "0.1.0"


@hookimpl
def register_advantage_estimators() -> list[Callable[..., Any]]:
    return [gdpo.gdpo]


@hookimpl
def register_advantage_normalizers() -> list[Callable[..., Any]]:
    return [lite_ppo.batch_reward_std]


@hookimpl
def register_clip_rules() -> list[Callable[..., Any]]:
    return [sapo.sapo, vespo.vespo, gmpo.gmpo]


@hookimpl
def register_loss_aggregators() -> list[Callable[..., Any]]:
    return [luspo.seq_mean_length_weighted]


@hookimpl
def register_variants() -> list[Variant]:
    return [
        sapo.SAPO,
        vespo.VESPO,
        gmpo.GMPO,
        luspo.LUSPO,
        two_sided.TWO_SIDED_GRPO,
        bnpo.BNPO,
        gdpo.GDPO,
        lite_ppo.LITE_PPO,
    ]
