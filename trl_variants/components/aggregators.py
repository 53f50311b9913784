"""Loss aggregators: how the losses of tokens become one number.

Each returns this micro-batch's share of the loss of one optimizer step: a sum, divided by the totals of that step over
all micro-batches and ranks. So shares add up, and cutting a step differently changes nothing.
"""

from __future__ import annotations

from torch import Tensor

from trl_variants.components.masked import masked_mean, masked_sum
from trl_variants.data import Totals
from trl_variants.declaration import component

__all__ = ["seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_mean", "token_mean_local"]


def _sequences(totals: Totals, count_empty: bool) -> float:
    return max(totals.rows if count_empty else totals.sequences, 1)


@component(
    paper="https://arxiv.org/abs/2503.14476",
    formula=r"\frac{1}{\sum_i |o_i|} \sum_i \sum_t",
)
def token_mean(per_token_loss: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """The mean over all tokens of the step: every token weighs the same, long completions weigh more.

    Args:
        per_token_loss: (B, T).
        mask: (B, T) bool, True where a token counts.
        totals: Of the optimizer step.

    Returns:
        Scalar.

    References:
        Yu et al., DAPO, https://arxiv.org/abs/2503.14476, equation 12. The mean here is over the whole step, not
        group by group.

    Example:
        >>> losses, mask = torch.tensor([[2.0, 0, 0], [1, 1, 1]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
        >>> token_mean(losses, mask, Totals.of(mask))
        tensor(1.2500)
    """
    return masked_sum(per_token_loss, mask) / max(totals.tokens, 1)


@component(
    paper="https://arxiv.org/abs/2402.03300",
    formula=r"\frac{1}{N} \sum_i \frac{1}{|o_i|} \sum_t",
)
def seq_mean_token_mean(per_token_loss: Tensor, mask: Tensor, totals: Totals, *, count_empty: bool = False) -> Tensor:
    """The mean over completions of the mean over tokens: every completion weighs the same.

    Args:
        per_token_loss: (B, T).
        mask: (B, T) bool, True where a token counts.
        totals: Of the optimizer step.
        count_empty: Whether a fully masked completion counts as one of loss 0, as in TRL.

    Returns:
        Scalar.

    References:
        Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300, equation 3.

    Example:
        >>> losses, mask = torch.tensor([[2.0, 0, 0], [1, 1, 1]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
        >>> seq_mean_token_mean(losses, mask, Totals.of(mask))
        tensor(1.5000)
    """
    return masked_mean(per_token_loss, mask, dim=1).sum() / _sequences(totals, count_empty)


@component(
    paper="https://arxiv.org/abs/2402.14740",
    formula=r"\frac{1}{N} \sum_i \sum_t",
)
def seq_mean_token_sum(per_token_loss: Tensor, mask: Tensor, totals: Totals, *, count_empty: bool = False) -> Tensor:
    """The mean over completions of the sum over tokens: the policy gradient of whole completions.

    Args:
        per_token_loss: (B, T).
        mask: (B, T) bool, True where a token counts.
        totals: Of the optimizer step.
        count_empty: Whether a fully masked completion counts as one of loss 0, as in TRL.

    Returns:
        Scalar.

    References:
        Ahmadian et al., Back to Basics, https://arxiv.org/abs/2402.14740.

    Example:
        >>> losses, mask = torch.tensor([[2.0, 0, 0], [1, 1, 1]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
        >>> seq_mean_token_sum(losses, mask, Totals.of(mask))
        tensor(2.5000)
    """
    return masked_sum(per_token_loss, mask) / _sequences(totals, count_empty)


@component(
    paper="https://arxiv.org/abs/2503.20783",
    formula=r"\frac{1}{N L_{\max}} \sum_i \sum_t",
    check=lambda p: p.constant is None or p.constant > 0 or "constant must be above 0",
)
def seq_mean_token_sum_norm(
    per_token_loss: Tensor,
    mask: Tensor,
    totals: Totals,
    *,
    constant: float | None = None,
    count_empty: bool = False,
) -> Tensor:
    """The mean over completions of the sum over tokens, divided by a constant: no length bias (Dr. GRPO).

    Args:
        per_token_loss: (B, T).
        mask: (B, T) bool, True where a token counts.
        totals: Of the optimizer step.
        constant: The constant L, in tokens; the length limit of a completion by default.
        count_empty: Whether a fully masked completion counts as one of loss 0, as in TRL.

    Returns:
        Scalar.

    References:
        Liu et al., Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783, section 3.

    Example:
        >>> losses, mask = torch.tensor([[2.0, 0, 0], [1, 1, 1]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
        >>> seq_mean_token_sum_norm(losses, mask, Totals.of(mask), constant=8)
        tensor(0.3125)
    """
    length = totals.max_length if constant is None else constant
    return masked_sum(per_token_loss, mask) / (_sequences(totals, count_empty) * max(length, 1))


@component(
    formula=r"\frac{1}{M} \sum_m \frac{1}{\sum_{i \in m} |o_i|} \sum_{i \in m} \sum_t",
    batch_statistic=True,
)
def token_mean_local(per_token_loss: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """The mean over the micro-batch's own tokens, averaged over micro-batches (TRL's ``bnpo``).

    By definition it depends on how the step is cut into micro-batches; with one it is `token_mean`.

    Args:
        per_token_loss: (B, T).
        mask: (B, T) bool, True where a token counts.
        totals: Of the optimizer step.

    Returns:
        Scalar.

    References:
        TRL 1.16, ``GRPOConfig.loss_type="bnpo"``.

    Example:
        >>> losses, mask = torch.tensor([[2.0, 0, 0], [1, 1, 1]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
        >>> token_mean_local(losses, mask, Totals.of(mask))
        tensor(1.2500)
    """
    return masked_mean(per_token_loss, mask) / totals.micro_batches
