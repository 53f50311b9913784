"""The critic in training: its values, its optimizer, its checkpoints. It steps where the policy steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, get_scheduler
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import disable_dropout_in_model

from trl_variants.errors import VariantError
from trl_variants.trainer.critic_model import WEIGHTS, ValueHead, build_separate, captured_states, check_backbone
from trl_variants.trainer.forward import RowForward, backbone_of
from trl_variants.trainer.fsdp import gathered, load_named_state, named_state, placed, reshard, shard

__all__ = ["Critic", "make_critic"]

_FOLDER = "critic"


class Critic:
    """Values of every token, and how they are learned.

    A module of its own beside the policy, wrapped by accelerate like it, with its own optimizer, schedule and clipping:
    a head outside of every wrapper would get other gradients on each rank, and one inside the policy would be exported
    with it.

    Args:
        trainer: The trainer, whose policy and arguments are there.
        critic_model: Where a separate critic starts from; see `build_separate`.
        peft_config: The policy's.
    """

    def __init__(self, trainer: Any, critic_model: Any, peft_config: Any) -> None:
        args = trainer.args
        self._args = args
        # The reentrant kind passes no gradient to adapters below frozen embeddings.
        self._checkpointing = {**(args.gradient_checkpointing_kwargs or {}), "use_reentrant": False}
        self._accelerator = trainer.accelerator
        self._trainer = trainer
        self.shared = trainer.recipe.variant.critic == "shared"
        policy = trainer.accelerator.unwrap_model(trainer.model)
        self._backbone = backbone_of(policy)
        if self.shared:
            width = check_backbone(self._backbone, len(trainer._tokenizer), "the policy")
            self.model: nn.Module = ValueHead(width)
        else:
            separate = build_separate(trainer, critic_model, peft_config)
            if args.disable_dropout:
                disable_dropout_in_model(separate)
            if args.gradient_checkpointing:
                separate.backbone.gradient_checkpointing_enable(self._checkpointing)  # type: ignore[operator]
            self.model = separate
        #: What reduces gradients over the ranks, and what is called.
        self._parts, self._wrapped = self._prepared()
        self._optimizer: torch.optim.Optimizer | None = None
        self._names: list[str] = []  # of the optimizer's parameters, in its order
        self._scheduler: Any = None

    def _prepared(self) -> tuple[list[nn.Module], nn.Module]:
        if not self._trainer.is_fsdp_enabled:
            wrapped = self._accelerator.prepare_model(self.model)
            return [wrapped], wrapped
        # The head is a unit of its own: values are float32 under mixed precision too.
        parts = [self.model] if self.shared else [self.model.backbone, self.model.head]
        for part in parts:
            shard(part, self._accelerator)
        return parts, self.model

    # -- values -----------------------------------------------------------------------------------------------------

    def watching(self) -> AbstractContextManager[list[Tensor]]:
        """Collect, while the context lasts, what a shared critic needs of the policy's forward."""
        return captured_states(self._backbone) if self.shared else nullcontext([])

    def values(self, layout: RowForward, states: list[Tensor]) -> Tensor:
        """(B, T) values now, with gradient.

        Args:
            layout: The rows of a micro-batch.
            states: What `watching` collected.
        """
        self.model.train(self._trainer.model.training)
        return layout.scatter(self._forward(layout, states))

    def score(self, layout: RowForward, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        """(B, T) values and the (B,) value after the last token, without gradient and without dropout.

        Args:
            layout: Rows of a rollout, the states after their last tokens included.
            states: What `watching` collected.
        """
        self.model.eval()
        with torch.no_grad(), self._no_checkpointing():
            values = self._forward(layout, states)
        return layout.scatter(values), layout.last(values)

    def _forward(self, layout: RowForward, states: list[Tensor]) -> Tensor:
        with self._accelerator.autocast():
            values: Tensor = self._wrapped(states[-1] if self.shared else layout)
        return values

    def _no_checkpointing(self) -> AbstractContextManager[Any]:
        if self.shared:
            return nullcontext()
        return disable_gradient_checkpointing(self.model.backbone, self._checkpointing)

    # -- learning ---------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """A forward and a backward. As with the policy, gradients stay local until the last micro-batch of a step."""
        accelerator = self._accelerator
        each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        with ExitStack() as stack:
            if not (accelerator.sync_gradients or each):
                for part in self._parts:
                    stack.enter_context(accelerator.no_sync(part))
            yield

    def create_optimizer(self) -> None:
        """An optimizer of the policy's kind, with the critic's learning rate."""
        if self._optimizer is not None:
            return
        args, trainer = self._args, self._trainer
        reshard(self.model)
        cls, kwargs = trainer.get_optimizer_cls_and_kwargs(args, self.model)
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)) or {"params", "model"} & set(kwargs):
            raise VariantError(
                f"optim {args.optim.value} makes no second optimizer for the critic. Use optim: adamw_torch."
            )
        decayed = set(trainer.get_decay_parameter_names(self.model))
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        parts = [[(n, p) for n, p in named if n in decayed], [(n, p) for n, p in named if n not in decayed]]
        self._names = [name for part in parts for name, _ in part]
        groups = [
            {"params": [p for _, p in part], "weight_decay": decay}
            for part, decay in zip(parts, (args.weight_decay, 0.0), strict=True)
        ]
        rate = args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate
        self._optimizer = cls(groups, **{**kwargs, "lr": rate})

    def create_scheduler(self, steps: int) -> None:
        """A schedule of the policy's kind, over as many steps.

        Raises:
            VariantError: The critic's warm-up is as long as the run.
        """
        assert self._optimizer is not None
        warmup = self._args.critic_warmup_steps or 0
        if warmup >= steps:
            raise VariantError(f"critic_warmup_steps ({warmup}) leaves none of the {steps} steps for the policy.")
        self._scheduler = get_scheduler(
            self._args.lr_scheduler_type,
            optimizer=self._optimizer,
            num_warmup_steps=self._args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=self._args.lr_scheduler_kwargs,
        )

    def step(self) -> dict[str, float]:
        """Clip, step and forget the gradients; the schedule goes on also where there are none.

        Returns:
            Numbers to log.
        """
        assert self._optimizer is not None
        metrics = {"critic/learning_rate": self._scheduler.get_last_lr()[0]}
        trained = [p for p in self.model.parameters() if p.grad is not None]
        if trained:
            args = self._args
            largest = args.max_grad_norm if args.critic_max_grad_norm is None else args.critic_max_grad_norm
            # 0 is no clipping, as it is for the policy.
            norm = nn.utils.clip_grad_norm_(trained, largest or float("inf"))
            metrics["critic/grad_norm"] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._scheduler.step()
        return metrics

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, checkpoint: str, *, optimizer: bool) -> None:
        """Write the trained weights, and the state of optimizer and schedule, into a folder of a checkpoint.

        Every rank must call it, since shards are gathered; those that save write.
        """
        keep, folder = self._args.should_save, Path(checkpoint) / _FOLDER
        reshard(self.model)
        weights = gathered(((name, p.detach()) for name, p in self._saved()), keep=keep)
        state = named_state(self._optimizer, self._names, keep=keep) if optimizer else None
        if not keep:
            return
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / WEIGHTS)
        if not self.shared:
            self.model.backbone.config.save_pretrained(folder)  # type: ignore[union-attr]
            self._trainer._tokenizer.save_pretrained(folder)
        if state is not None:
            torch.save({"optimizer": state, "scheduler": self._scheduler.state_dict()}, folder / "optimizer.pt")

    def _saved(self) -> list[tuple[str, nn.Parameter]]:
        """The weights that a checkpoint holds: all of them, or the trained ones where the rest is a frozen base."""
        named = list(self.model.named_parameters())
        adapted = any(".lora_" in name or not p.requires_grad for name, p in named)
        return [(name, p) for name, p in named if p.requires_grad or not adapted]

    def forget_gradients(self) -> None:
        """Drop what a run that ended within a step has left."""
        self.model.zero_grad()

    def load(self, checkpoint: str, *, optimizer: bool = True) -> None:
        """Go on from a checkpoint.

        Args:
            checkpoint: Its folder.
            optimizer: Whether optimizer and schedule go on too.

        Raises:
            VariantError: It has no critic, or another kind of critic.
        """
        folder = Path(checkpoint) / _FOLDER
        if not (folder / WEIGHTS).is_file():
            raise VariantError(f"{checkpoint} has no critic, so the run cannot go on from it with one.")
        other = VariantError(
            f"The critic in {checkpoint} is of another kind than this run's: it was written with other settings of "
            "critic, critic_model or PEFT."
        )
        reshard(self.model)
        with safe_open(folder / WEIGHTS, "pt") as weights, torch.no_grad():
            shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
            if shapes != {name: list(p.shape) for name, p in self._saved()}:
                raise other
            for name, p in self._saved():
                p.copy_(placed(weights.get_tensor(name), p))
        if optimizer and (folder / "optimizer.pt").is_file() and self._optimizer is not None:
            state = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True, mmap=True)
            if not load_named_state(self._optimizer, self._names, state["optimizer"]):
                raise other
            self._scheduler.load_state_dict(state["scheduler"])


def make_critic(trainer: Any, critic_model: Any, peft_config: Any) -> Critic | None:
    """The critic of a trainer's variant, stepped where its policy is; None where the variant has none.

    Raises:
        VariantError: ``critic_model`` is given twice, or to a variant that has no separate critic.
    """
    kind = trainer.recipe.variant.critic
    if critic_model is not None and kind != "separate":
        raise VariantError(f"critic_model is given, and the critic of this variant is {kind or 'none'}.")
    if critic_model is not None and trainer.args.critic_model is not None:
        raise VariantError("critic_model is given twice, to the trainer and in its config.")
    if kind is None:
        return None
    trainer.add_callback(StepCritic(trainer))
    return Critic(trainer, trainer.args.critic_model if critic_model is None else critic_model, peft_config)


class StepCritic(TrainerCallback):  # type: ignore[misc]
    """Steps the critic where the policy's optimizer steps."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Step, and log."""
        self._trainer._log_metrics("train", self._trainer.critic.step())
