"""Which distribution of ours has what is not built in, so that an error about a missing name can say it."""

from __future__ import annotations

from collections.abc import Collection
from difflib import SequenceMatcher
from importlib import metadata

from trl_variants.errors import did_you_mean

__all__ = ["FIRST_PARTY", "hint", "where_to_get"]

#: Names of variants, components and rewards by the distribution that registers them; a test holds it against them.
_NAMES = {
    "trl-variants-baselines": (
        "ema_baseline",
        "gpg",
        "grpo_passk",
        "leave_one_out_std",
        "length_adaptive_gae",
        "loo_grpo",
        "maxrl",
        "opo",
        "pass_at_k",
        "positive_nll",
        "reinforce_ema",
        "reinforce_running",
        "remax",
        "running_baseline",
        "vapo",
    ),
    "trl-variants-blend": (
        "ppo_grpo_blend",
        "weighted_sum",
    ),
    "trl-variants-entropy": (
        "clip_cov",
        "forking_tokens",
        "high_entropy_mask",
        "kl_cov",
        "skywork_or1",
    ),
    "trl-variants-offpolicy": (
        "decoupled_grpo",
        "decoupled_ppo",
        "dppo_kl",
        "dppo_tv",
        "geo_is_grpo",
        "geo_rs_grpo",
        "geometric_correction",
        "icepop",
        "k3_rs_grpo",
        "m2po",
        "off_policy_mask",
        "opsm_grpo",
        "rejection",
        "second_moment_mask",
        "topr",
    ),
    "trl-variants-rewards": (
        "math_verify",
        "reasoning_gym",
    ),
    "trl-variants-soft": (
        "batch_reward_std",
        "bnpo",
        "gdpo",
        "gmpo",
        "lite_ppo",
        "luspo",
        "sapo",
        "seq_mean_length_weighted",
        "two_sided_grpo",
        "vespo",
    ),
}
FIRST_PARTY = {name: distribution for distribution, names in _NAMES.items() for name in names}


def where_to_get(name: str) -> str:
    """A sentence that says what to install for a name, with a blank before it; nothing where it is not ours."""
    home = FIRST_PARTY.get(name)
    return f" '{name}' is in the plugin {_how(home)}." if home else ""


def hint(name: str, known: Collection[str]) -> str:
    """What to say of a name that is not registered: which plugin has it, or the nearest that there is or a plugin has.

    Args:
        name: The name that was asked for.
        known: The names that are registered.
    """
    # Of two that are as near, max takes the first: one that is registered.
    nearest = max((*known, *FIRST_PARTY), key=lambda other: SequenceMatcher(None, other, str(name)).ratio())
    if name in FIRST_PARTY or nearest in known:
        return where_to_get(name) or did_you_mean(name, known)
    near = did_you_mean(name, [nearest])
    return near and f"{near} It is in the plugin {_how(FIRST_PARTY[nearest])}."


def _how(distribution: str) -> str:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"{distribution}: pip install {distribution}"
    return f"{distribution}, which is installed"
