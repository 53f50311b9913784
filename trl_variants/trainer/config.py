"""`VariantConfig`: TRL's GRPOConfig, with a variant instead of the settings that a variant decides."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from trl_variants.errors import VariantError
from trl_variants.recipe import Recipe
from trl_variants.registry import load_registry
from trl_variants.rehearsal import rehearse
from trl_variants.resolution import resolve
from trl_variants.trainer.config_checks import (
    check_engine,
    check_layout,
    check_learning,
    check_prefill,
    check_sampling,
    check_schedule,
)
from trl_variants.trainer.config_values import parse_mapping, plain
from trl_variants.trainer.owned import Owned, OwnedSettings, refusal

__all__ = ["VariantConfig"]

_DEFAULT_GENERATIONS = 8  # TRL's


@dataclass
class VariantConfig(OwnedSettings, GRPOConfig):
    """Configuration of `VariantTrainer`: `trl.GRPOConfig` plus a variant.

    Parameters:
        variant (`str`, *optional*, defaults to `"grpo"`):
            Name of a registered variant; ``trl-variants list`` shows them. From Python also a `Variant`.
        variant_overrides (`dict[str, Any]`, *optional*):
            Changes to the variant by slot: `{slot: name}`, `{slot: {name: ..., param: ...}}`, `{slot: {param: ...}}`,
            a list for slots that take several, or `none` to switch a slot off.
        variant_plugins (`list[str]`, *optional*):
            Dotted modules or `.py` files with components and variants of your own, besides the installed plugins.
        num_generations (`int`, *optional*):
            Completions per prompt. Default: 8, or 1 where the variant's components can do with one.
        num_iterations (`int`, *optional*):
            Epochs over each rollout. Default: the variant's.
        target_kl (`float`, *optional*):
            Stop the updates of a rollout once KL(old policy, policy), estimated over a whole optimizer step, passes
            this, in nats per token.
        shuffle (`str`, *optional*, defaults to `"rows"`):
            What is shuffled before a rollout is cut into mini-batches: `"rows"`, or `"groups"`, which keeps the
            completions of a prompt in one mini-batch where they fit.
        cut_micro_batches (`bool`, *optional*, defaults to `True`):
            Cut each optimizer step into its micro-batches so that the least padding is computed. Rows per micro-batch
            then differ; none holds more tokens than `per_device_train_batch_size` rows of the longest.
        share_prompts (`str`, *optional*, defaults to `"auto"`):
            Compute each distinct prompt of a micro-batch once and its completions on top: `"auto"` where it costs
            less, `"always"` wherever the model can, `"never"`.
        critic_model (`str`, *optional*):
            Where a separate critic starts from: a folder or id of a model, or the `critic` folder of a checkpoint.
            Default: the reward model where there is one, else the policy.
        critic_learning_rate (`float`, *optional*):
            Learning rate of the critic. Default: `learning_rate`. The schedule is the policy's.
        critic_max_grad_norm (`float`, *optional*):
            Largest gradient norm of the critic. Default: `max_grad_norm`.
        critic_warmup_steps (`int`, *optional*):
            First optimizer steps, in which the critic alone learns and the policy stays as it is. Default: 0.
        prefill_once (`bool`, *optional*):
            Run each distinct prompt through the model once when transformers generates, not once per completion. True
            is an error where the config rules it out, and a warning where the model does; False switches it off.
            Default: wherever it gives the same tokens.

        max_rounds (`int`, *optional*):
            With `sampling: resample`: rounds of prompts that one rollout may take; at the limit it trains on what
            there is. Default: 10.
        carry_surplus (`bool`, *optional*):
            With `sampling: resample`: kept groups beyond a full rollout go first into the next one, with their own old
            log-probs. Default: yes where the variant corrects for a policy that has moved on.
        max_carry_age (`int`, *optional*):
            Rollouts that a carried group may wait; then it is dropped. A group waits longer than one where a resumed
            run has smaller rollouts. Default: 1.

    What the variant decides (`beta`, `loss_type`, `epsilon`, `scale_rewards`, ...) is refused here, with the override
    to use instead. Every other field is TRL's.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "variant_overrides"]

    variant: str = field(
        default="grpo", metadata={"help": "Name of a registered variant; `trl-variants list` shows them."}
    )
    variant_overrides: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Changes to the variant by slot, e.g. {clip_rule: {epsilon_high: 0.28}, kl: none}."},
    )
    variant_plugins: list[str] | None = field(
        default=None,
        metadata={"help": "Dotted modules or .py files with components and variants, besides the installed plugins."},
    )

    # The variant proposes, the user wins.
    num_generations: int | None = field(
        default=None,
        metadata={"help": "Completions per prompt. Default: 8, or 1 where the variant's components can do with one."},
    )
    num_iterations: int | None = field(
        default=None, metadata={"help": "Epochs over each rollout. Default: the variant's."}
    )

    # Of several updates per rollout, and of the critic.
    target_kl: float | None = field(
        default=None, metadata={"help": "Stop a rollout's updates once KL(old policy, policy) per token passes this."}
    )
    critic_model: str | None = field(
        default=None,
        metadata={"help": "Where a separate critic starts from. Default: the reward model, else the policy."},
    )
    critic_learning_rate: float | None = field(default=None, metadata={"help": "Default: learning_rate."})
    critic_max_grad_norm: float | None = field(default=None, metadata={"help": "Default: max_grad_norm."})
    critic_warmup_steps: int | None = field(
        default=None, metadata={"help": "First optimizer steps, in which the critic alone learns. Default: 0."}
    )

    # Of dynamic sampling.
    max_rounds: int | None = field(
        default=None, metadata={"help": "Rounds of prompts that a rollout may take to fill up. Default: 10."}
    )
    carry_surplus: bool | None = field(
        default=None,
        metadata={"help": "Surplus groups go first into the next rollout. Default: yes, where the variant allows it."},
    )
    max_carry_age: int | None = field(
        default=None, metadata={"help": "Rollouts that a carried group may wait; then it is dropped. Default: 1."}
    )

    # How a rollout is laid out and computed; the numbers are the same.
    shuffle: str = field(
        default="rows",
        metadata={
            "help": "What is shuffled before mini-batches are cut: rows, or groups, which keeps prompts together."
        },
    )
    cut_micro_batches: bool = field(
        default=True, metadata={"help": "Cut each optimizer step into micro-batches with the least padding."}
    )
    share_prompts: str = field(
        default="auto",
        metadata={"help": "Compute each distinct prompt of a micro-batch once: auto (by cost), always or never."},
    )

    # Of generation.
    prefill_once: bool | None = field(
        default=None,
        metadata={"help": "Run each prompt once when transformers generates. Default: where the tokens are the same."},
    )

    def __post_init__(self) -> None:
        """Resolve the variant, then run every check of TRL's with neutral values in the fields that it decides."""
        set_here = [owned for owned in self._owned_fields() if getattr(self, owned.name) is not None]
        if set_here:
            raise VariantError("\n".join(refusal(owned.name, owned.metadata["help"].override) for owned in set_here))
        for owned in self._owned_fields():
            setattr(self, owned.name, owned.metadata["help"].neutral)
        if isinstance(self.variant_overrides, str):
            self.variant_overrides = parse_mapping(self.variant_overrides)
        self._recipe = self._resolve()
        if self.num_iterations is None:
            self.num_iterations = self._recipe.variant.num_iterations or 1
        if self.num_generations is None:
            proposed = self._recipe.variant.num_generations
            self.num_generations = proposed or (_DEFAULT_GENERATIONS if self._recipe.min_generations > 1 else 1)
        check_engine(self)
        with self._generations_unchecked():
            super().__post_init__()
        check_schedule(self)
        check_learning(self)
        check_sampling(self)
        check_layout(self)
        check_prefill(self)
        rehearse(self._recipe, max_length=self.max_completion_length)

    @property
    def recipe(self) -> Recipe:
        """The variant with every component bound."""
        if "_recipe" not in self.__dict__:  # pickling leaves it out
            self._recipe = self._resolve()
        return self._recipe

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps on each rollout: mini-batches times epochs."""
        return int(self.num_iterations * self.steps_per_generation // self.gradient_accumulation_steps)

    def _resolve(self) -> Recipe:
        return resolve(self.variant, self.variant_overrides, load_registry(extra=self.variant_plugins or ()))

    @classmethod
    def _owned_fields(cls) -> Iterator[Any]:
        return (f for f in fields(cls) if isinstance(f.metadata.get("help"), Owned))

    @contextmanager
    def _generations_unchecked(self) -> Iterator[None]:
        """Run TRL's checks with a number of generations that passes the two that are ours.

        TRL refuses one generation, and words divisibility without saying what would fit; both checks sit in the middle
        of others, which must all run.
        """
        generations, generations_eval = int(self.num_generations), self.num_generations_eval
        self.num_generations = _Unchecked(generations)
        self.num_generations_eval = _Unchecked(generations_eval or generations)
        try:
            yield
        finally:
            self.num_generations, self.num_generations_eval = generations, generations_eval

    def to_dict(self) -> dict[str, Any]:
        """The fields, for logging: those that the variant decides are None, so that no log shows what is not used."""
        shown = super().to_dict()
        shown |= {owned.name: None for owned in self._owned_fields() if owned.name in shown}
        return shown | {"variant": plain(self.variant), "variant_overrides": plain(self.variant_overrides)}

    def __str__(self) -> str:
        """What is logged, tokens hidden. (TrainingArguments copies every value for it, and functions cannot be.)"""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def __getstate__(self) -> dict[str, Any]:
        """What a checkpoint keeps: components by name, since a function of a notebook cannot be pickled."""
        state = {name: value for name, value in self.__dict__.items() if name != "_recipe"}
        return state | {"variant": plain(self.variant), "variant_overrides": plain(self.variant_overrides)}

    def __deepcopy__(self, memo: dict[int, Any]) -> VariantConfig:
        """A copy that keeps the recipe, whose components are functions."""
        shared = ("_recipe", "variant", "variant_overrides")
        new = object.__new__(type(self))
        new.__dict__.update(
            {name: value if name in shared else copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        )
        return new


class _Unchecked(int):
    """A number that is never too small, and divides everything."""

    def __lt__(self, other: object) -> bool:
        return False

    def __rmod__(self, other: object) -> int:
        return 0
