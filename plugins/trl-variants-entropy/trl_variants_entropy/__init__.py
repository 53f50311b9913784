"""Training that keeps the policy's entropy, for trl-variants.

Three ways of acting on few tokens rather than on all: train on those of high entropy alone, take the gradient from
some whose covariance of log-prob and advantage is large, or hold those near the old policy. And the adaptive entropy
bonus of Skywork-OR1, which the core holds, as a variant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl_variants import Variant, hookimpl
from trl_variants_entropy import covariance, high_entropy, skywork

__version__ = "0.1.0"


@hookimpl
def register_token_weights() -> list[Callable[..., Any]]:
    return [high_entropy.high_entropy_mask]


@hookimpl
def register_clip_rules() -> list[Callable[..., Any]]:
    return [covariance.clip_cov, covariance.kl_cov]


@hookimpl
def register_variants() -> list[Variant]:
    return [high_entropy.FORKING_TOKENS, covariance.CLIP_COV, covariance.KL_COV, skywork.SKYWORK_OR1]
