r"""LUSPO (2026): GSPO with each completion weighted by its length.

    ρᵢ = (π_θ(oᵢ) / π_old(oᵢ))^{1/|oᵢ|}
    L  = 1/N Σᵢ -|oᵢ| min(ρᵢ Âᵢ, clip(ρᵢ, 1-2e-3, 1+2.5e-3) Âᵢ)

GSPO's ratio is a mean over tokens, so that its gradient is divided by the length: a token of a long answer counts for
less, and answers shorten. The factor takes that back.
"""

from __future__ import annotations

from torch import Tensor

from trl_variants import Totals, Variant, component, masked_sum, use

__all__ = ["LUSPO", "seq_mean_length_weighted"]


@component(
    paper="https://arxiv.org/abs/2602.05261",
    formula=r"\frac{1}{N} \sum_i |o_i| \cdot \frac{1}{|o_i|} \sum_t",
    length_weighted=True,
)
def seq_mean_length_weighted(
    per_token_loss: Tensor, mask: Tensor, totals: Totals, *, count_empty: bool = False
) -> Tensor:
    """The mean over completions of length times loss, for losses that are one per completion.

    1/N Σᵢ |oᵢ| ℓᵢ with ℓᵢ the mean of the completion's tokens. In number it is `seq_mean_token_sum`, which is refused
    for such losses because the weight is seldom meant; here it is.

    Args:
        per_token_loss: (B, T), the same on each token of a completion where the loss is the completion's.
        mask: (B, T) bool, True where a token counts.
        totals: Of the optimizer step.
        count_empty: Whether a fully masked completion counts as one of loss 0, as in TRL.

    Returns:
        Scalar.

    References:
        LUSPO, https://arxiv.org/abs/2602.05261; TRL 1.16, ``GRPOConfig.loss_type="luspo"``.

    Example:
        >>> losses, mask = torch.tensor([[2.0, 2, 0], [1, 1, 1]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> seq_mean_length_weighted(losses, mask, Totals.of(mask))  # (2 * 2 + 3 * 1) / 2
        tensor(3.5000)
    """
    return masked_sum(per_token_loss, mask) / max(totals.rows if count_empty else totals.sequences, 1)


LUSPO = Variant(
    name="luspo",
    extends="gspo",
    paper="https://arxiv.org/abs/2602.05261",
    summary="GSPO with each completion weighted by its length, so that long answers do not learn less.",
    clip_rule=use("ppo_clip", epsilon_low=2e-3, epsilon_high=2.5e-3),
    loss_aggregator="seq_mean_length_weighted",
)
