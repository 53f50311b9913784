"""Every slot of a variant: what a component in it may name, what it returns, whether it takes one or several.

Shape letters, everywhere in this package:

- ``N`` completions of the generation batch, over all processes,
- ``B`` completions of one micro-batch,
- ``T`` completion tokens, padded on the right,
- ``G`` completions per prompt,
- ``F`` reward functions.

A mask is 1 (True) where a token counts: never padding, never a tool or environment token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

__all__ = ["LEARNING_INPUTS", "ROLLOUT_INPUTS", "SLOTS", "Slot"]

#: Inputs of the rollout phase (no gradient, the whole generation batch of all processes), with their meaning.
ROLLOUT_INPUTS: Mapping[str, str] = MappingProxyType(
    {
        "rewards": "(N,) weighted sum of the reward functions, as shaped so far; KL in the reward summed in",
        "token_rewards": "(N, T) rewards per token; a scalar reward stands on the last policy token",
        "rewards_per_func": "(N, F) what each reward function returned, NaN where it returned None",
        "reward_weights": "(F,) the weights of the reward functions",
        "reward_names": "the F names of the reward functions, as a tuple of strings",
        "part_advantages": "a list of Advantages, one for each entry of the component's parameter ``parts``",
        "greedy_rewards": "(N,) reward of the greedy completion of each row's prompt, generated besides",
        "scored": "(N,) bool, False where every reward function returned None, or did for the greedy completion",
        "group_ids": "(N,) equal for the completions of one prompt",
        "mask": "(N, T) bool, True where a token counts",
        "lengths": "(N,) tokens of each completion as generated",
        "truncated": "(N,) bool, True where the completion was cut by the length limit",
        "has_eos": "(N,) bool, True where the completion ends with a stop token",
        "max_length": "the length limit of a completion, an int",
        "log_probs": "(N, T) log pi of the policy at the rollout",
        "ref_log_probs": "(N, T) log pi of the reference model",
        "sampling_log_probs": "(N, T) log pi as the generation engine computed it",
        "values": "(N, T) the critic's V_t, read at the position that predicts token t",
        "final_values": "(N,) the critic's value after the last token, for completions that are cut",
        "keep": "(N,) bool, False for rows that a sample filter dropped",
        "advantages": "(N,) or (N, T) advantages so far",
        "kl": "(N, T) per-token KL to the reference",
        "kl_coef": "the KL coefficient in force, a float",
        "measured_kl": "mean KL per policy token over the whole rollout, a float",
        "measured_sequence_kl": "mean over completions of the KL summed over tokens, a float",
        "samples": "the number of completions in the rollout, an int",
        "state": "a dict of the component's own, saved in checkpoints",
    }
)

#: Inputs of the learning phase (one micro-batch; gradients flow through log_probs, entropies and values only).
LEARNING_INPUTS: Mapping[str, str] = MappingProxyType(
    {
        "log_probs": "(B, T) log pi of the current policy, with gradient",
        "old_log_probs": "(B, T) log pi of the policy at the rollout",
        "ref_log_probs": "(B, T) log pi of the reference model",
        "sampling_log_probs": "(B, T) log pi as the generation engine computed it",
        "mask": "(B, T) bool, True where a token counts",
        "advantages": "(B, T) or (B, 1)",
        "entropies": "(B, T) entropy of the next-token distribution in nats, with gradient",
        "log_ratio": "(B, T) or (B, 1) log of the importance ratio, within +-20",
        "token_weights": "(B, T) or (B, 1) product of the token weights",
        "per_token_loss": "(B, T) loss of each token so far",
        "kl": "(B, T) per-token KL to the reference, with gradient",
        "kl_coef": "the KL coefficient in force, a float",
        "values": "(B, T) the critic's current V_t, with gradient",
        "old_values": "(B, T) the critic's V_t at the rollout",
        "returns": "(B, T) targets of the critic",
        "rewards": "(B,) rewards of the completions",
        "scored": "(B,) bool, False where every reward function returned None",
        "totals": "Totals of the optimizer step that this micro-batch belongs to",
        "gather": "a function that concatenates a tensor over all ranks by rows; each rank may have another number",
        "step": "the number of the optimizer step, an int",
        "state": "a dict of the component's own, saved in checkpoints",
    }
)


@dataclass(frozen=True)
class Slot:
    """One place in a variant that a component fills.

    Attributes:
        name: The slot's name in a variant, in a config and in messages.
        hook: The registration hook; see ``hookspecs.py``.
        phase: When it runs; decides which inputs exist.
        inputs: Names that a component's positional parameters may have.
        shapes: Shapes that it may return, in the letters above; "" is a scalar.
        many: Whether the slot takes a list.
        optional: Whether it may be switched off.
        title: What it is, for a reader.
        parameters: Parameters that the slot itself adds to each of its components, with their defaults.
    """

    name: str
    phase: Literal["rollout", "learning", "both"]
    inputs: tuple[str, ...]
    shapes: tuple[str, ...]
    title: str
    many: bool = False
    optional: bool = False
    parameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def hook(self) -> str:
        """Name of the registration hook."""
        return f"register_{self.name}s"

    @property
    def meanings(self) -> dict[str, str]:
        """What each of its inputs is, with its shape; in a slot of both phases, what it is in either."""
        if self.phase != "both":
            known = ROLLOUT_INPUTS if self.phase == "rollout" else LEARNING_INPUTS
            return {name: known[name] for name in self.inputs}
        meanings = {name: ROLLOUT_INPUTS.get(name) or LEARNING_INPUTS[name] for name in self.inputs}
        for name in meanings.keys() & LEARNING_INPUTS.keys() - {"rewards"}:  # who names rewards runs at the rollout
            if LEARNING_INPUTS[name] != meanings[name]:
                same = meanings[name].partition(") ")[2]
                meanings[name] += f"; in the loss {LEARNING_INPUTS[name].removesuffix(f' {same}')}"
        return meanings


_ROWS = ("scored", "group_ids", "mask", "lengths", "truncated", "has_eos", "max_length", "keep", "state")
_REWARDS = ("rewards", "token_rewards", "rewards_per_func", "reward_weights", "reward_names")
_OF_ESTIMATORS = ("part_advantages", "greedy_rewards", "values", "final_values", "log_probs", "ref_log_probs")
_LEARNING = ("mask", "totals", "gather", "step", "state")

SLOTS: Mapping[str, Slot] = MappingProxyType(
    {
        slot.name: slot
        for slot in (
            Slot(
                "sample_filter",
                "rollout",
                tuple(n for n in (*_REWARDS, *_ROWS) if n not in ("token_rewards", "keep")),
                ("N",),
                "which rows are trained on",
                many=True,
                optional=True,
            ),
            Slot(
                "reward_shaper",
                "rollout",
                (*_REWARDS, *_ROWS),
                ("N", "NT"),
                "what is added to or done with the reward",
                many=True,
                optional=True,
            ),
            Slot("kl_estimator", "both", ("log_probs", "ref_log_probs"), ("NT",), "how KL is estimated per token"),
            Slot(
                "kl_placement",
                "both",
                ("rewards", "token_rewards", "per_token_loss", "kl", "kl_coef", "log_ratio", "mask"),
                ("N", "NT"),
                "where KL enters",
            ),
            Slot(
                "kl_controller",
                "rollout",
                ("kl_coef", "measured_kl", "measured_sequence_kl", "samples", "state"),
                ("",),
                "how the KL coefficient moves",
            ),
            Slot(
                "advantage_estimator",
                "rollout",
                (*_REWARDS, *_ROWS, *_OF_ESTIMATORS),
                ("N", "NT"),
                "how much better than expected",
            ),
            Slot(
                "advantage_normalizer",
                "rollout",
                ("advantages", *_REWARDS, *_ROWS),
                ("N", "NT"),
                "how advantages are scaled",
                many=True,
                optional=True,
            ),
            Slot(
                "importance_ratio",
                "learning",
                ("log_probs", "old_log_probs", "mask"),
                ("NT", "N1"),
                "the ratio pi / pi_old",
                optional=True,
            ),
            Slot(
                "clip_rule",
                "learning",
                (
                    "log_ratio",
                    "log_probs",
                    "old_log_probs",
                    "sampling_log_probs",
                    "advantages",
                    "token_weights",
                    "entropies",
                    *_LEARNING,
                ),
                ("NT", "N1"),
                "the surrogate loss and what it clips",
            ),
            Slot(
                "token_weight",
                "learning",
                ("log_probs", "old_log_probs", "sampling_log_probs", "advantages", "entropies", *_LEARNING),
                ("NT", "N1"),
                "factors on the policy loss",
                many=True,
                optional=True,
            ),
            Slot(
                "regularizer",
                "learning",
                (
                    "log_probs",
                    "old_log_probs",
                    "ref_log_probs",
                    "advantages",
                    "entropies",
                    "values",
                    "old_values",
                    "returns",
                    "rewards",
                    "scored",
                    *_LEARNING,
                ),
                ("NT",),
                "terms added to the loss, each a mean over the step's tokens",
                many=True,
                optional=True,
                parameters=MappingProxyType({"coef": 1.0}),
            ),
            Slot(
                "loss_aggregator",
                "learning",
                ("per_token_loss", "mask", "totals"),
                ("",),
                "how token losses become one number",
            ),
        )
    }
)
