"""The rollout phase: from what TRL generated and scored to advantages that stay until the next rollout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trl_variants.components.masked import masked_mean, select
from trl_variants.data import Rollout
from trl_variants.errors import VariantError
from trl_variants.recipe import AdvantageResult
from trl_variants.trainer.batch import gather_rows, local_rows
from trl_variants.trainer.rows import own_old_log_probs

__all__ = ["Selection", "build_rollout", "finish_rollout", "loss_mask"]


#: What may hold something where nothing counts.
_PER_TOKEN = (
    "advantages",
    "ref_per_token_logps",
    "rollout_log_probs",
    "carried_log_probs",
    "sampling_per_token_logps",
    "old_values",
    "returns",
)


@dataclass(frozen=True)
class Selection:
    """What of a rollout that was drawn in rounds is trained on.

    Attributes:
        keep: (N,) bool; what the filters said of each row when it was drawn.
        rows: The first so many rows are the rollout; what follows only fills the batch up, and is in no statistic.
    """

    keep: Tensor
    rows: int


def finish_rollout(
    trainer: Any, output: dict[str, Any], mode: str, generations: int, selection: Selection | None = None
) -> dict[str, Any]:
    """Score a rollout, take its advantages, log it, and return what the learning phase needs.

    Args:
        trainer: The trainer.
        output: TRL's generation batch of this process.
        mode: ``train`` or ``eval``; an evaluation changes no state.
        generations: Completions per prompt.
        selection: What is trained on, where the rows were drawn in rounds; by default the filters say it here.
    """
    _score(trainer, output, mode)
    if mode == "train":
        trainer.kl_coef = trainer._next_kl_coef
    rollout = build_rollout(trainer, output, generations)
    keep = None
    if selection:
        rollout, keep = rollout.first(selection.rows), selection.keep[: selection.rows]
    result = trainer.recipe.advantages(rollout, kl_coef=trainer.kl_coef, states=trainer._states, keep=keep)
    if mode == "train":
        trainer._states = dict(result.states)
        trainer._next_kl_coef = trainer.kl_coef if result.next_kl_coef is None else result.next_kl_coef
    _log(trainer, mode, result, rollout)

    own = loss_mask(output)
    made = {"advantages": result.advantages, "rewards": result.rewards, "scored": rollout.scored, "keep": result.keep}
    if result.returns is not None:
        made["returns"] = result.returns
    total = len(trainer._rewards_per_func)
    made = {name: local_rows(_filled_up(value, total), own, trainer.accelerator) for name, value in made.items()}
    kept = made.pop("keep")
    output |= made
    if mode == "train":  # filters say what is trained on; an evaluation measures all
        own = own & kept[:, None]
    output["loss_mask"] = own
    for name in _PER_TOKEN:  # once here, and not in every micro-batch of every epoch
        value = output.get(name)
        if value is not None and value.shape == own.shape:
            output[name] = select(value, own)
    return output


def _filled_up(values: Tensor, rows: int) -> Tensor:
    """Values of the first rows, with 0 for the others."""
    return torch.cat([values, values.new_zeros(rows - len(values), *values.shape[1:])])


def _score(trainer: Any, output: dict[str, Any], mode: str) -> None:
    """Add what the frozen models and the critic say: log-probs and values, without gradient."""
    args, critic, recipe = trainer.args, trainer.critic, trainer.recipe
    size = args.per_device_train_batch_size if mode == "train" else args.per_device_eval_batch_size
    rows = {**output, "loss_mask": loss_mask(output)}
    if critic and trainer._passes.by_trl(output):
        raise VariantError("A critic goes with neither images, prompt tuning nor torch_compile in this release.")
    if trainer.reference:
        with trainer.reference.scored() as model:
            output["ref_per_token_logps"] = trainer._passes.score(model, rows, size)["log_probs"]
    if recipe.needs_rollout_log_probs or critic:
        scored = trainer._passes.score(trainer.model, rows, size, critic=critic)
        output["rollout_log_probs"] = own_old_log_probs(output, scored.pop("log_probs"))
        output |= {"old_values": scored["values"], "final_values": scored["final_values"]} if critic else {}


def _log(trainer: Any, mode: str, result: AdvantageResult, rollout: Rollout) -> None:
    """Log the rollout; where TRL logged advantages and groups of its own, ours replace them."""
    metrics = {name: float(metric) for name, metric in result.metrics.items()}
    trainer._metrics[mode]["frac_reward_zero_std"][-1] = metrics.pop("frac_reward_zero_std")
    kl = trainer.recipe.kl
    if kl:
        metrics["kl_coef"] = trainer.kl_coef
        if not kl.in_reward:  # the loss logs the KL that it trains; what steers a controller is apart
            metrics = {f"rollout/{n}" if n in ("kl", "kl/k3") else n: value for n, value in metrics.items()}
    if rollout.greedy_rewards is not None:
        metrics["greedy/reward"] = float(masked_mean(rollout.greedy_rewards, rollout.scored))
    trainer._log_metrics(mode, metrics)
    advantages = result.advantages
    if advantages.dim() == 2:
        advantages = masked_mean(advantages, rollout.mask, dim=1)
    logged = trainer._logs["advantages"]
    for _ in range(min(len(logged), len(advantages))):
        logged.pop()
    logged.extend(advantages.tolist())


def build_rollout(trainer: Any, output: dict[str, Any], generations: int) -> Rollout:
    """Build the `Rollout` of all processes from what TRL generated on this one.

    Args:
        trainer: The trainer, which holds the rewards of all processes, NaN where a function returned None.
        output: TRL's generation batch of this process.
        generations: Completions per prompt.
    """
    rewards_per_func, gather = trainer._rewards_per_func, partial(gather_rows, accelerator=trainer.accelerator)
    completion_mask = output["completion_mask"].bool()
    lengths = completion_mask.sum(1)
    last = output["completion_ids"].gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]
    has_eos = torch.isin(last, torch.tensor(trainer.eos_token_ids, device=last.device)) & (lengths > 0)
    weights = trainer.reward_weights.to(rewards_per_func)
    rows = len(rewards_per_func)
    tensors = {
        field: gather(output[key])
        for field, key in (
            ("log_probs", "rollout_log_probs"),
            ("ref_log_probs", "ref_per_token_logps"),
            ("sampling_log_probs", "sampling_per_token_logps"),
            ("values", "old_values"),
            ("final_values", "final_values"),
        )
        if key in output
    }
    scored = ~rewards_per_func.isnan().all(1)
    if trainer.recipe.needs("greedy_rewards"):
        # Without a baseline a completion has nothing to be compared with: a baseline of 0 in its place would be another
        # estimator for these prompts, of another scale.
        tensors["greedy_rewards"] = gather(output["greedy_rewards"])
        scored = scored & ~tensors["greedy_rewards"].isnan()
    return Rollout(
        rewards=(rewards_per_func * weights).nansum(1),
        scored=scored,
        rewards_per_func=rewards_per_func,
        reward_weights=weights,
        reward_names=tuple(trainer.reward_func_names),
        # TRL lays completions of a prompt side by side, over the processes in order.
        group_ids=torch.arange(rows, device=rewards_per_func.device) // generations,
        mask=gather(loss_mask(output)),
        lengths=gather(lengths),
        # For TRL's clipped_ratio, the padding token is an end too.
        truncated=gather(~has_eos & (last != trainer._tokenizer.pad_token_id)),
        has_eos=gather(has_eos),
        max_length=trainer.max_completion_length,
        **tensors,
    )


def loss_mask(output: dict[str, Any]) -> Tensor:
    """(·, T) bool: tokens of the policy; neither padding nor what a tool or environment wrote."""
    mask = output["completion_mask"].bool()
    return mask & output["tool_mask"].bool() if "tool_mask" in output else mask
