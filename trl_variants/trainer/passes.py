"""Forward passes over rows: how they are laid out, and what policy, reference and critic make of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing

from trl_variants.trainer.compat import VISION_INPUTS
from trl_variants.trainer.forward import RowForward, backbone_of, row_states
from trl_variants.trainer.microbatches import Cut, best_cut, plain_cut
from trl_variants.trainer.rows import put, take, trim
from trl_variants.trainer.sharing import attention_cost, length_dependent, obstacle

__all__ = ["Passes", "Scored", "prompt_keys"]

logger = get_logger(__name__)


@dataclass(frozen=True)
class Scored:
    """What a forward gives.

    Attributes:
        log_probs: (B, T), 0 where nothing counts.
        entropies: (B, T) in nats, or None.
        aux_loss: The load-balancing loss of a mixture of experts, or None.
        layout: How the rows were laid out; None where TRL's own forward did it.
    """

    log_probs: Tensor
    entropies: Tensor | None
    aux_loss: Tensor | None
    layout: RowForward | None


class Passes:
    """Lays rows out, and runs models over them.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._obstacles: dict[int, str | None] = {}

    def by_trl(self, inputs: dict[str, Any]) -> bool:
        """Whether TRL's own forward takes the rows, because ours cannot lay them out or would change the numbers."""
        if self._trainer.args.torch_compile:  # whose forward is fixed
            return True
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        if getattr(getattr(policy, "active_peft_config", None), "is_prompt_learning", False):
            return True
        if length_dependent(policy.config) and self._trainer.critic is None:  # TRL's widths give TRL's numbers
            return True
        return any(inputs.get(name) is not None for name in VISION_INPUTS)

    # -- the cut ----------------------------------------------------------------------------------------------------

    def cut(self, inputs: dict[str, Any], parts: int, size: int) -> Cut:
        """Cut rows into micro-batches, and decide whether prompts are shared.

        Args:
            inputs: Rows of this process.
            parts: Number of micro-batches.
            size: Rows of the longest length that a micro-batch may hold at most, in tokens.
        """
        args = self._trainer.args
        prompts, completions = (inputs[name].sum(1).tolist() for name in ("prompt_mask", "completion_mask"))
        longest = max(p + c for p, c in zip(prompts, completions, strict=True))
        backbone = backbone_of(self._trainer.accelerator.unwrap_model(self._trainer.model))
        sharing = args.share_prompts != "never" and self.may_share(backbone)
        critic = self._trainer.critic
        if critic and not critic.shared:  # which computes the same micro-batches
            sharing = sharing and self.may_share(critic.model.backbone)
        if not args.cut_micro_batches or self._depends_on_the_cut:
            rows = range(len(prompts))
            even = tuple(tuple(rows[i : i + size]) for i in range(0, len(rows), size))
            whole = plain_cut(prompts, completions, 1, largest=longest * len(rows))
            return Cut(even, sharing and args.share_prompts == "always", whole.tokens, whole.cost)
        return best_cut(
            prompts,
            completions,
            prompt_keys(inputs),
            parts,
            largest=size * longest,
            attention=attention_cost(backbone),
            sharing=sharing,
            always=args.share_prompts == "always",
        )

    @property
    def _depends_on_the_cut(self) -> bool:
        """Whether a loss is a mean over a micro-batch by definition; then TRL's micro-batches are kept."""
        by_definition = any(bound.info.batch_statistic for bound in self._trainer.recipe.components)
        return by_definition or bool(self._trainer.aux_loss_enabled)

    def may_share(self, backbone: nn.Module) -> bool:
        """Whether a backbone can compute a prompt once for several completions; says why not, once."""
        if id(backbone) not in self._obstacles:
            reason = self._obstacles[id(backbone)] = obstacle(self._trainer, backbone)
            if reason:
                several = self._trainer.num_generations > 1
                logger.log(
                    logging.WARNING if several else logging.INFO,
                    "%s computes every prompt with each of its rows: %s",
                    type(backbone).__name__,
                    reason,
                )
        return self._obstacles[id(backbone)] is None

    # -- forwards ---------------------------------------------------------------------------------------------------

    def forward(self, model: Any, inputs: dict[str, Any], *, entropy: bool = True, last: bool = False) -> Scored:
        """Score the rows of a micro-batch, with gradient where it is on.

        Args:
            model: The policy or the reference, wrapped or not.
            inputs: The micro-batch; ``shared`` in it says whether prompts are shared.
            entropy: Whether entropies are wanted.
            last: Whether the states after the last tokens are wanted too.
        """
        trainer, aux = self._trainer, self._trainer.aux_loss_enabled and entropy
        if self.by_trl(inputs):
            return Scored(*trainer.forward_by_trl(model, inputs, entropy, aux), layout=None)
        layout = RowForward.of(
            inputs,
            shared=inputs.get("shared", False),
            every_row=aux,
            last=last,
            pad_to=trainer.pad_to_multiple_of,
        )
        options = {"output_router_logits": True} if aux else {}
        backbone = backbone_of(trainer.accelerator.unwrap_model(model))
        with trainer.accelerator.autocast(), row_states(backbone, layout):
            output = model(
                input_ids=layout.ids,
                attention_mask=layout.mask,
                shift_labels=layout.labels[None],
                fused_lm_head=True,
                **options,
            )
        rows = len(inputs["completion_ids"])
        trainer.meter.computed(layout, rows * inputs.get("stock_width", layout.ids.shape[1]))
        return Scored(
            log_probs=layout.scatter(output.log_probs),
            entropies=layout.scatter(output.entropy) if entropy and output.entropy is not None else None,
            aux_loss=output.aux_loss if aux else None,
            layout=layout,
        )

    def score(self, model: Any, inputs: dict[str, Any], size: int, *, critic: Any = None) -> dict[str, Tensor]:
        """Score rows without gradient and without dropout, a part at a time.

        Args:
            model: The policy or the reference.
            inputs: Rows of this process.
            size: Rows of a part.
            critic: The critic, if its values are wanted.

        Returns:
            ``log_probs`` (N, T); with a critic also ``values`` (N, T) and ``final_values`` (N,).
        """
        trainer = self._trainer
        kwargs = trainer.args.gradient_checkpointing_kwargs
        rows, width = inputs["completion_ids"].shape
        found: dict[str, Tensor] = {}
        with torch.no_grad(), disable_gradient_checkpointing(trainer.model, kwargs), _evaluating(model):
            if self.by_trl(inputs):
                return {"log_probs": trainer.forward_by_trl(model, inputs, False, False, size)[0]}
            cut = self.cut(inputs, -(-rows // size), size)
            for part in cut.parts:
                batch = {**trim(take(inputs, part)), "shared": cut.shared}
                with critic.watching() if critic else nullcontext([]) as states:
                    made = self.forward(model, batch, entropy=False, last=critic is not None)
                new = {"log_probs": made.log_probs}
                if critic:
                    new["values"], new["final_values"] = critic.score(made.layout, states)
                for name, value in new.items():
                    if name not in found:
                        found[name] = value.new_zeros((rows, width) if value.dim() == 2 else (rows,))
                    put(found[name], part, value)
        return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def prompt_keys(inputs: dict[str, Any]) -> list[int]:
    """Equal for rows of one prompt."""
    ids = inputs["prompt_ids"].masked_fill(~inputs["prompt_mask"].bool(), -1)
    keys: list[int] = torch.unique(ids, dim=0, return_inverse=True)[1].tolist()
    return keys
