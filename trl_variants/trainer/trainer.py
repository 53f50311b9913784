"""`VariantTrainer`: TRL's GRPOTrainer with the objective of a recipe.

TRL generates, scores rewards, shuffles, cuts and logs; what is replaced is the advantages (`Recipe.advantages`), the
loss (`Recipe.loss`), the reference, and the bookkeeping that makes both exact.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import get_config_model_id

from trl_variants.components.masked import masked_mean
from trl_variants.data import Batch, Totals
from trl_variants.describe import recipe_dict
from trl_variants.errors import VariantError
from trl_variants.trainer.batch import gather_rows, local_rows, step_totals
from trl_variants.trainer.compat import VISION_INPUTS
from trl_variants.trainer.config import VariantConfig
from trl_variants.trainer.monitor import Monitor, sampling_metrics
from trl_variants.trainer.reference import Reference
from trl_variants.trainer.scoring import build_rollout, check_engine, checked_reward, loss_mask, stop_tokens

__all__ = ["VariantTrainer"]

logger = get_logger(__name__)

_STATE_FILE = "variant_state.pt"


class VariantTrainer(GRPOTrainer):
    """Trainer for any variant: `trl.GRPOTrainer` with the same arguments, and a `VariantConfig` as ``args``.

    Example:

    ```python
    from trl_variants import VariantConfig, VariantTrainer

    trainer = VariantTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=reward,
        args=VariantConfig(output_dir="out", variant="dapo"),
        train_dataset=dataset,
    )
    trainer.train()
    ```
    """

    _tag_names = ["trl", "trl-variants"]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: VariantConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        if args is None:
            name = (model if isinstance(model, str) else get_config_model_id(model.config)).split("/")[-1]
            args = VariantConfig(f"{name}-GRPO")
        if not isinstance(args, VariantConfig):
            kind = "a GRPOConfig" if isinstance(args, GRPOConfig) else type(args).__name__
            raise VariantError(f"args must be a VariantConfig, not {kind}. Write VariantConfig(variant=..., ...).")
        self.recipe = args.recipe
        self._skip_scoring = False
        self._rewards_per_func: Tensor | None = None
        super().__init__(
            model=model,
            reward_funcs=list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self._name = self.recipe.variant.name
        self._paper = {}
        self.reward_funcs = [
            checked_reward(f, name) for f, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        # TRL cuts completions after, and counts as terminated with, the model's own stop tokens only.
        self.eos_token_ids = stop_tokens(self.eos_token_ids, args.generation_kwargs)
        self.reference = Reference(self, peft_config) if self.recipe.needs_reference else None
        self.ref_model = self.reference.model if self.reference else None
        check_engine(self)
        # The coefficient in force, and the one from the next rollout on.
        self.kl_coef = self._next_kl_coef = self.recipe.kl_coef()
        self._states: dict[str, dict[str, Any]] = {}
        self._monitors = {"train": Monitor(self.accelerator), "eval": Monitor(self.accelerator)}

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Write and log the resolved recipe, then train as `transformers.Trainer` does."""
        self._buffered_inputs = None  # a rollout of an earlier call belongs to another policy
        resolved = recipe_dict(self.recipe)
        if self.args.should_save:
            os.makedirs(self.args.output_dir, exist_ok=True)
            with open(os.path.join(self.args.output_dir, "variant.json"), "w") as file:
                json.dump(resolved, file, indent=2)
        logger.info("variant %s: %s", self.recipe.variant.name, json.dumps(resolved))
        return super().train(*args, **kwargs)

    # -- rollout phase ----------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        training = self.model.training
        if training and self._buffered_inputs is None:
            # At the start of a run, and of a resumed one: count on where the schedule of rollouts stands.
            self._step = self.state.global_step * self.args.gradient_accumulation_steps
        period = self.args.steps_per_generation * self.num_iterations
        fresh = training and (self._step % period == 0 or self._buffered_inputs is None)
        inputs = super()._prepare_inputs(generation_batch)
        if fresh:
            self._begin_learning()
        return inputs

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        for column, (function, name) in enumerate(zip(self.reward_funcs, self.reward_func_names, strict=True)):
            if isinstance(function, nn.Module) and not rewards[:, column].isfinite().all():
                raise VariantError(f"reward model '{name}' returned a value that is not finite.")
        self._rewards_per_func = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        mode = "train" if self.model.training else "eval"
        generations = self.num_generations if mode == "train" else self.num_generations_eval
        rows = len(inputs) * self.accelerator.num_processes
        if rows % generations:  # only an evaluation that the config did not plan
            raise VariantError(
                f"A batch of {rows} completions holds no whole number of groups of {generations}. Set "
                "num_generations_eval: 1, or make per_device_eval_batch_size x processes a multiple of it."
            )
        self._skip_scoring = True
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._skip_scoring = False
        size = self.args.per_device_train_batch_size if mode == "train" else self.args.per_device_eval_batch_size
        if self.reference:
            with self.reference.scored() as model:
                output["ref_per_token_logps"] = self._score(model, output, size)
        if self.recipe.needs_rollout_log_probs:
            output["rollout_log_probs"] = self._score(self.model, output, size)

        if mode == "train":
            self.kl_coef = self._next_kl_coef
        rollout = build_rollout(
            output,
            self._rewards_per_func,
            reward_weights=self.reward_weights,
            reward_names=self.reward_func_names,
            stop_ids=self.eos_token_ids,
            pad_id=self._tokenizer.pad_token_id,
            generations=generations,
            max_length=self.max_completion_length,
            gather=partial(gather_rows, accelerator=self.accelerator),
        )
        result = self.recipe.advantages(rollout, kl_coef=self.kl_coef, states=self._states)
        if mode == "train":  # evaluation changes no state
            self._states = dict(result.states)
            self._next_kl_coef = self.kl_coef if result.next_kl_coef is None else result.next_kl_coef
        self._log_rollout(mode, result, rollout.mask)

        own = loss_mask(output)
        for name in ("advantages", "rewards"):
            output[name] = local_rows(getattr(result, name), own, self.accelerator)
        if mode == "train":  # filters say what is trained on; an evaluation measures all
            own = own & local_rows(result.keep, own, self.accelerator)[:, None]
        output["loss_mask"] = own
        return output

    def _begin_learning(self) -> None:
        """Prepare the micro-batches of a new rollout: the totals of each optimizer step, and old log-probs.

        The first optimizer step needs none: the policy has not moved, so the current log-probs, detached, are the old
        ones, and the ratio is exactly 1 (a scoring pass of another shape would differ in the last bits).
        """
        size = self.args.gradient_accumulation_steps
        steps = [self._buffered_inputs[i : i + size] for i in range(0, len(self._buffered_inputs), size)]
        first = self._step // size % len(steps)
        for index, (batches, totals) in enumerate(zip(steps, self._totals(steps), strict=True)):
            for batch in batches:
                batch["totals"] = totals
                if index != first:
                    batch["old_per_token_logps"] = batch.get("rollout_log_probs")
                    if batch["old_per_token_logps"] is None:
                        batch["old_per_token_logps"] = self._score(self.model, batch, len(batch["loss_mask"]))

    def _totals(self, steps: list[list[dict[str, Any]]]) -> list[Totals]:
        return step_totals(steps, self.max_completion_length, self.accelerator)

    # -- learning phase ---------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mode = "train" if self.model.training else "eval"
        log_probs, entropies, aux_loss = self._forward(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        batch = Batch(
            log_probs=log_probs,
            entropies=entropies,
            mask=inputs["loss_mask"],
            advantages=inputs["advantages"],
            totals=inputs["totals"] if "totals" in inputs else self._totals([[inputs]])[0],
            old_log_probs=inputs.get("old_per_token_logps"),
            ref_log_probs=inputs.get("ref_per_token_logps"),
            sampling_log_probs=inputs.get("sampling_per_token_logps"),
            rewards=inputs["rewards"],
            step=self.state.global_step,
        )
        if mode == "train" and self.num_iterations > 1:
            inputs["old_per_token_logps"] = batch.old_log_probs  # for the later epochs over this rollout
        result = self.recipe.loss(batch, kl_coef=self.kl_coef, states=self._states, gather=self.accelerator.gather)
        if mode == "train":
            self._states = dict(result.states)
        loss = result.loss * self.accelerator.num_processes  # DDP averages gradients; the shares are to be summed
        if self.aux_loss_enabled:
            window = self.current_gradient_accumulation_steps if mode == "train" else 1
            loss = loss + self.router_aux_loss_coef * aux_loss / window
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather(aux_loss.detach()).mean().item())
        self._monitors[mode].add(result.metrics | sampling_metrics(batch, self.recipe))
        if mode == "eval" or self.accelerator.sync_gradients:
            self._log_metrics(mode, self._monitors[mode].flush())
        return loss

    # -- forwards ---------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        # While TRL generates, it would score the policy and hold the result as old log-probs; ours are made where they
        # are needed, and with the shape of the micro-batch they belong to.
        if self._skip_scoring:
            return None, None, None
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _forward(self, model: Any, inputs: dict[str, Any], **kwargs: Any) -> Any:
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            **{name: inputs[name] for name in VISION_INPUTS if inputs.get(name) is not None},
            **kwargs,
        )

    def _score(self, model: Any, inputs: dict[str, Any], size: int) -> Tensor:
        """(·, T) log-probs without gradient, ``size`` rows at a time."""
        kwargs = self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(self.model, kwargs):
            return self._forward(model, inputs, batch_size=size)[0]

    # -- logging and checkpoints ------------------------------------------------------------------------------------

    def _log_metrics(self, mode: str, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def _log_rollout(self, mode: str, result: Any, mask: Tensor) -> None:
        """Log the rollout; where TRL logged advantages and groups of its own, ours replace them."""
        metrics = {name: float(metric) for name, metric in result.metrics.items()}
        self._metrics[mode]["frac_reward_zero_std"][-1] = metrics.pop("frac_reward_zero_std")
        if self.recipe.kl:
            metrics["kl_coef"] = self.kl_coef
            if not self.recipe.kl.in_reward:  # the loss logs the KL that it trains; what steers a controller is apart
                metrics = {f"rollout/{n}" if n in ("kl", "kl/k3") else n: value for n, value in metrics.items()}
        self._log_metrics(mode, metrics)
        advantages = result.advantages if result.advantages.dim() == 1 else masked_mean(result.advantages, mask, dim=1)
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), len(advantages))):
            logged.pop()
        logged.extend(advantages.tolist())

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            state = {"kl_coef": self._next_kl_coef, "states": self._states, "recipe": str(recipe_dict(self.recipe))}
            torch.save(state, os.path.join(self._get_output_dir(trial=trial), folder, _STATE_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = os.path.join(checkpoint, _STATE_FILE) if checkpoint else ""
        if os.path.exists(path):
            state = torch.load(path, map_location="cpu", weights_only=True)
            self.kl_coef = self._next_kl_coef = state["kl_coef"]
            self._states = state["states"]
            if state["recipe"] != str(recipe_dict(self.recipe)):
                logger.warning(
                    "%s was written by another variant, or by other versions; this run goes on with '%s'. Compare the "
                    "variant.json of both.",
                    checkpoint,
                    self.recipe.variant.name,
                )
