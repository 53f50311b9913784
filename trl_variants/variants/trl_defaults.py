r"""TRL 1.16's own defaults, number for number: what its trainers train, for comparison and migration.

They differ from the papers in the sample's standard deviation with 1e-4 added, in leaving the rounding error of
constant groups (0.7 eight times gives 6e-4), in a k3 that is multiplied by the ratio, and in counting fully masked
completions.
"""

from __future__ import annotations

from trl_variants.variant import KL, Variant, use

_SEQUENCES = use("seq_mean_token_mean", count_empty=True)

TRL_GRPO = Variant(
    name="trl_grpo",
    summary='TRL\'s GRPOConfig(loss_type="grpo", beta=0.04).',
    advantage_estimator=use("group_mean", zero_constant=False),
    advantage_normalizer=use("group_std", correction=1, eps=1e-4, zero_constant=False),
    importance_ratio="token",
    clip_rule=use("ppo_clip", epsilon_low=0.2, epsilon_high=0.2),
    loss_aggregator=_SEQUENCES,
    kl=KL("k3", placement="loss", coef=0.04, weighted=True),
)

VARIANTS = [
    TRL_GRPO,
    Variant(
        name="trl_dapo",
        extends="trl_grpo",
        summary="TRL's GRPOConfig() as shipped: loss_type=\"dapo\", no KL; neither DAPO's filter nor its penalty.",
        loss_aggregator="token_mean",
        kl=None,
    ),
    Variant(
        name="trl_dr_grpo",
        extends="trl_grpo",
        summary='TRL\'s GRPOConfig(loss_type="dr_grpo", scale_rewards="none").',
        advantage_normalizer="none",
        loss_aggregator=use("seq_mean_token_sum_norm", count_empty=True),
        kl=None,
    ),
    Variant(
        name="trl_bnpo",
        extends="trl_grpo",
        summary='TRL\'s GRPOConfig(loss_type="bnpo"); depends on how a step is cut into micro-batches.',
        loss_aggregator="token_mean_local",
        kl=None,
    ),
    Variant(
        name="trl_cispo",
        extends="trl_dapo",
        summary='TRL\'s GRPOConfig(loss_type="cispo", epsilon_high=5.0).',
        clip_rule=use("cispo", epsilon_max=5.0),
    ),
    Variant(
        name="trl_gspo",
        extends="trl_grpo",
        summary='TRL\'s GRPOConfig(loss_type="grpo", importance_sampling_level="sequence") with GSPO\'s bounds.',
        importance_ratio="sequence",
        clip_rule=use("ppo_clip", epsilon_low=3e-4, epsilon_high=4e-4),
        kl=None,
    ),
    Variant(
        name="trl_rloo",
        summary="TRL's RLOOConfig() as shipped: the product of the tokens' ratios, clipped.",
        advantage_estimator=use("leave_one_out", zero_constant=False),
        advantage_normalizer="none",
        importance_ratio="sequence_sum",
        clip_rule=use("ppo_clip", epsilon_low=0.2, epsilon_high=0.2),
        loss_aggregator=_SEQUENCES,
        kl=KL("k1", placement="sequence_reward", coef=0.05),
        num_generations=2,
    ),
]
