"""Every extension point, on one page.

A plugin implements any of these hooks with ``@hookimpl``. None takes an argument; each returns a list. Registration
happens once, when the registry is built, never during training, so hook order decides nothing and hook wrappers are
not supported. A component is a function decorated with ``@component``; the positional parameters that it may name,
and what it must return, stand per slot in ``slots.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from trl_variants.variant import Variant

__all__ = ["PROJECT", "hookimpl", "hookspec"]

PROJECT = "trl_variants"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Components = Iterable[Callable[..., Any]]


# -- rollout phase: once per generation batch, over all processes, without gradient --------------------------------


@hookspec
def register_sample_filters() -> Components:  # type: ignore[empty-body]
    """Components that say which rows are trained on: ``(N,)`` bool, True = keep. All of a variant's must agree."""


@hookspec
def register_reward_shapers() -> Components:  # type: ignore[empty-body]
    """Components that change rewards.

    One that names ``rewards`` returns the new ``(N,)`` rewards, one that names ``token_rewards`` the new ``(N, T)``;
    one that names neither returns a term that is added. They run in order, before KL, or after it with
    ``@component(after_kl=True)``.
    """


@hookspec
def register_kl_estimators() -> Components:  # type: ignore[empty-body]
    """Components from ``log_probs, ref_log_probs`` to the per-token KL, ``(N, T)``."""


@hookspec
def register_kl_placements() -> Components:  # type: ignore[empty-body]
    """Components that put ``kl_coef`` times the KL somewhere.

    One that names ``rewards`` or ``token_rewards`` runs in the rollout phase and returns those; one that names
    ``per_token_loss`` runs in the learning phase and returns that.
    """


@hookspec
def register_kl_controllers() -> Components:  # type: ignore[empty-body]
    """Components that return the next KL coefficient, once per rollout and only in training."""


@hookspec
def register_advantage_estimators() -> Components:  # type: ignore[empty-body]
    """Components that return ``Advantages(advantages, returns)`` or a bare ``(N,)`` or ``(N, T)`` tensor."""


@hookspec
def register_advantage_normalizers() -> Components:  # type: ignore[empty-body]
    """Components that scale ``advantages``; ``(N,)`` or ``(N, T)``. They run in order."""


# -- learning phase: once per micro-batch, with gradient ------------------------------------------------------------


@hookspec
def register_importance_ratios() -> Components:  # type: ignore[empty-body]
    """Components that return the log of the importance ratio, ``(B, T)``, or ``(B, 1)`` for one per sequence."""


@hookspec
def register_clip_rules() -> Components:  # type: ignore[empty-body]
    """Components that return ``ClipResult(loss, low, high, dual)``: the surrogate loss and which tokens it clipped."""


@hookspec
def register_token_weights() -> Components:  # type: ignore[empty-body]
    """Components that return factors on the policy loss, ``(B, T)`` or ``(B, 1)``; KL is added after them.

    None stands for 1 everywhere: nothing to weigh, as where the engine of a rollout correction returned no log-probs.
    """


@hookspec
def register_regularizers() -> Components:  # type: ignore[empty-body]
    """Components that return a term per token, ``(B, T)``.

    Each enters the loss as ``coef`` times its mean over the tokens of the optimizer step; ``coef`` (default 1) is a
    parameter that every regularizer has besides its own.
    """


@hookspec
def register_loss_aggregators() -> Components:  # type: ignore[empty-body]
    """Components that return a scalar: this micro-batch's share of the loss of one optimizer step."""


# -- names for a config ---------------------------------------------------------------------------------------------


@hookspec
def register_reward_functions() -> Components:  # type: ignore[empty-body]
    """Reward functions with TRL's signature, so that a config can name them."""


@hookspec
def register_variants() -> Iterable[Variant]:  # type: ignore[empty-body]
    """Named combinations of components."""
