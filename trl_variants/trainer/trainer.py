"""`VariantTrainer`: TRL's GRPOTrainer with the objective of a recipe.

TRL generates, scores rewards, shuffles and logs; what is replaced is the advantages (`Recipe.advantages`), the loss
(`Recipe.loss`), the reference, the cut into micro-batches, and the bookkeeping that makes all of it exact.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import get_config_model_id

from trl_variants.data import Batch
from trl_variants.errors import VariantError
from trl_variants.trainer.batch import gather_ragged
from trl_variants.trainer.checkpoint import load_state, save_state, write_recipe
from trl_variants.trainer.compat import VISION_INPUTS
from trl_variants.trainer.config import VariantConfig
from trl_variants.trainer.critic import make_critic
from trl_variants.trainer.epochs import LearningPhase
from trl_variants.trainer.fsdp import exact_outputs
from trl_variants.trainer.greedy import GreedyPass, refuse_greedy
from trl_variants.trainer.meter import Meter
from trl_variants.trainer.monitor import Monitor, sampling_metrics
from trl_variants.trainer.passes import Passes
from trl_variants.trainer.prefill import PrefillOnce
from trl_variants.trainer.reference import Reference
from trl_variants.trainer.rollout import finish_rollout
from trl_variants.trainer.rows import old_log_probs
from trl_variants.trainer.sampling import Resampler
from trl_variants.trainer.scoring import check_engine, check_groups, check_prompts, checked_rewards, stop_tokens
from trl_variants.trainer.surplus import refuse_unsupported

__all__ = ["VariantTrainer"]


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
    run_settings: dict[str, Any] | None = None  # what `trl-variants train` was given

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
        critic_model: Any = None,
    ) -> None:
        if args is None:
            name = (model if isinstance(model, str) else get_config_model_id(model.config)).split("/")[-1]
            args = VariantConfig(f"{name}-GRPO")
        if not isinstance(args, VariantConfig):
            kind = "a GRPOConfig" if isinstance(args, GRPOConfig) else type(args).__name__
            raise VariantError(f"args must be a VariantConfig, not {kind}. Write VariantConfig(variant=..., ...).")
        self.recipe = args.recipe
        refuse_unsupported(self.recipe, train_dataset, environment_factory)
        elsewhere = {"rollout_func": rollout_func, "tools": tools, "environment_factory": environment_factory}
        refuse_greedy(self.recipe, train_dataset, **elsewhere)
        self._skip_scoring = False
        self._prefill_once = PrefillOnce(self)
        self._rewards_per_func: Tensor | None = None
        self._passes = Passes(self)
        self.meter = Meter()
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
        exact_outputs(self.accelerator)
        self._name = self.recipe.variant.name
        self._paper = {}
        self.reward_funcs, self.reward_func_names = checked_rewards(self.reward_funcs, self.reward_func_names)
        # TRL cuts completions after, and counts as terminated with, the model's own stop tokens only.
        self.eos_token_ids = stop_tokens(self.eos_token_ids, args.generation_kwargs)
        self.critic = make_critic(self, critic_model, peft_config)
        self.reference = Reference(self, peft_config) if self.recipe.needs_reference else None
        self.ref_model = self.reference.model if self.reference else None
        check_engine(self)
        # The coefficient in force, and the one from the next rollout on.
        self.kl_coef = self._next_kl_coef = self.recipe.kl_coef()
        self._states: dict[str, dict[str, Any]] = {}
        self.resampler = Resampler(self) if self.recipe.variant.sampling == "resample" else None
        self._phase = LearningPhase(self)
        self._gather = partial(gather_ragged, accelerator=self.accelerator)
        self._monitors = {"train": Monitor(self.accelerator), "eval": Monitor(self.accelerator)}

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Write and log the resolved recipe, then train as `transformers.Trainer` does."""
        check_prompts(self)
        # What an earlier call has left belongs to another policy, or to a step that was cut off.
        self._buffered_inputs = None
        self._monitors = {"train": Monitor(self.accelerator), "eval": Monitor(self.accelerator)}
        self.meter.reset()
        if self.critic:
            self.critic.forget_gradients()
        if self.resampler:
            self.resampler.begin()
        write_recipe(self)
        return super().train(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the policy's optimizer, and the critic's."""
        if self.critic:
            self.critic.create_optimizer()
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Create the policy's schedule, and the critic's."""
        if self.critic:
            self.critic.create_scheduler(num_training_steps)
        return super().create_scheduler(num_training_steps, *args, **kwargs)

    # -- rollout phase ----------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        training = self.model.training
        if training and self._buffered_inputs is None:
            # At the start of a run, and of a resumed one: count on where the schedule of rollouts stands.
            self._step = self.state.global_step * self.args.gradient_accumulation_steps
        period = self.args.steps_per_generation * self.num_iterations
        fresh = training and (self._step % period == 0 or self._buffered_inputs is None)
        if training and not fresh and self._step % self.args.steps_per_generation == 0:
            self._phase.begin_epoch()
        inputs = super()._prepare_inputs(generation_batch)
        if fresh:
            self._phase = LearningPhase(self)
            with self.meter.timing("scoring"):
                self._phase.begin()
        return self._buffered_inputs[self._step % self.args.steps_per_generation] if training else inputs

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
        selection = None
        if mode == "train" and self.resampler:  # the loader's batch only keeps the pace
            with self.meter.timing("generation", mode):
                output, selection = self.resampler.rollout()
        else:
            check_groups(len(inputs) * self.accelerator.num_processes, generations)
            output = self._generate_round(inputs)
        with self.meter.timing("scoring", mode):
            return finish_rollout(self, output, mode, generations, selection)

    def _generate_round(self, inputs: Any) -> dict[str, Any]:
        """TRL's generation and rewards, of completions that nothing has judged or scored yet."""
        self._skip_scoring, mode = True, "train" if self.model.training else "eval"
        greedy = GreedyPass(self, inputs) if self.recipe.needs("greedy_rewards") else None
        try:
            with self.meter.timing("generation", mode):
                output: dict[str, Any] = super()._generate_and_score_completions(inputs)
                if greedy:
                    output["greedy_rewards"] = greedy.rewards()
        finally:
            self._skip_scoring = False
        self.meter.generated(output, mode)
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One micro-batch; generation and scoring are timed apart."""
        with self.meter.timing("learning"), self.critic.micro_batch() if self.critic else nullcontext():
            return super().training_step(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self._prefill_once.generating():
            return super()._generate_single_turn(*args, **kwargs)

    # -- learning phase ---------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mode = "train" if self.model.training else "eval"
        if mode == "train" and self._phase.stopped:
            if self.accelerator.sync_gradients:
                self._log_metrics(mode, self._phase.end_step(None))
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)  # no forward, no gradient
        warming = mode == "train" and self.state.global_step < (self.args.critic_warmup_steps or 0)
        with (
            torch.set_grad_enabled(torch.is_grad_enabled() and not warming),
            self.critic.watching() if self.critic else nullcontext([]) as states,
        ):
            scored = self._passes.forward(model, inputs)
        batch = Batch(
            log_probs=scored.log_probs,
            entropies=scored.entropies,
            mask=inputs["loss_mask"],
            advantages=inputs["advantages"],
            totals=inputs["totals"] if "totals" in inputs else self._phase.totals([[inputs]])[0],
            old_log_probs=old_log_probs(inputs, scored.log_probs.detach()),
            ref_log_probs=inputs.get("ref_per_token_logps"),
            sampling_log_probs=inputs.get("sampling_per_token_logps"),
            values=self.critic.values(scored.layout, states) if self.critic else None,
            old_values=inputs.get("old_values"),
            returns=inputs.get("returns"),
            rewards=inputs["rewards"],
            scored=inputs["scored"],
            step=self.state.global_step,
            clean=scored.layout is not None,
        )
        if mode == "train" and self.args.updates_per_rollout > 1:
            inputs["old_per_token_logps"] = batch.old_log_probs  # for the later epochs over this rollout
        result = self.recipe.loss(
            batch, kl_coef=self.kl_coef, states=self._states, gather=self._gather, critic_only=warming
        )
        if mode == "train":
            self._states = dict(result.states)
        loss = result.loss * self.accelerator.num_processes  # gradients are averaged; the shares are to be summed
        if self.aux_loss_enabled and not warming:
            window = self.current_gradient_accumulation_steps if mode == "train" else 1
            loss = loss + self.router_aux_loss_coef * scored.aux_loss / window
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather(scored.aux_loss.detach()).mean().item())
        self._monitors[mode].add(result.observed, sampling_metrics(batch, self.recipe))
        if mode == "eval":
            self._log_metrics(mode, self._monitors[mode].flush())
        elif self.accelerator.sync_gradients:
            metrics = self._monitors[mode].flush()
            self._log_metrics(mode, metrics | self._phase.end_step(metrics["approx_kl"]))
        return loss

    # -- forwards ---------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        # While TRL generates, it would score the policy and hold the result as old log-probs; ours are made where they
        # are needed, and with the shape of the micro-batch they belong to.
        if self._skip_scoring:
            return None, None, None
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def forward_by_trl(
        self, model: Any, inputs: dict[str, Any], entropy: bool, aux: bool, size: int | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's own scoring forward, for the rows of `Passes.by_trl`."""
        scored: tuple[Tensor, Tensor | None, Tensor | None] = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            batch_size=size,
            compute_entropy=entropy,
            compute_aux_loss=aux,
            **{name: inputs[name] for name in VISION_INPUTS if inputs.get(name) is not None},
        )
        return scored

    # -- logging and checkpoints ------------------------------------------------------------------------------------

    def _log_metrics(self, mode: str, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy; into a checkpoint also what goes on from it (before the checkpoint is pushed to the hub)."""
        super().save_model(output_dir, _internal_call)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if _internal_call and output_dir and os.path.basename(output_dir) == name:
            save_state(self, output_dir)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.critic:
            self.critic.load(self.state.best_model_checkpoint, optimizer=False)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint:
            load_state(self, checkpoint)
