"""Whether a model can compute a prompt once for several completions, and exactly so."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trl_variants.trainer.forward import RowForward
from trl_variants.trainer.prefill_reasons import rope_types

__all__ = ["attention_cost", "length_dependent", "obstacle"]

_FULL = "full_attention"


def obstacle(trainer: Any, backbone: Any) -> str | None:
    """Why a backbone cannot share prompts; None where it can.

    What the settings do not tell is tried on a few tokens: the states with and without sharing must be the same.
    """
    config = backbone.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [_FULL])
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    reasons = {
        "gradient checkpointing keeps no cache": trainer.args.gradient_checkpointing,
        "the model is sharded over processes": trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
        "experts are balanced over all tokens": trainer.aux_loss_enabled
        or getattr(config, "output_router_logits", False),
        "its layers are not all of full attention": kinds != {_FULL} or bool(sliding),
        "it has an encoder": config.is_encoder_decoder,
        "its positions depend on the length of a row": length_dependent(config),
        "dropout would be drawn once for a prompt": _has_dropout(backbone, config),
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    return _probe(backbone)


def length_dependent(config: Any) -> bool:
    """Whether a model's positions depend on the length of what is computed, padding included."""
    return bool(rope_types(config.get_text_config()) & {"dynamic", "longrope"})


def attention_cost(backbone: Any) -> float:
    """Cost of one query-key pair in all layers, in units of a token's cost in everything else.

    A pair costs two products of the hidden size, once for the score and once for the value, in each layer; everything
    else costs about 12 products of its square.
    """
    return 1 / (6 * float(backbone.config.get_text_config().hidden_size))


def _has_dropout(backbone: nn.Module, config: Any) -> bool:
    attention = getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0)
    return bool(attention) or any(isinstance(module, nn.Dropout) and module.p > 0 for module in backbone.modules())


def _probe(backbone: Any) -> str | None:
    """Compare states on two prompts of different lengths, one of them with two completions."""
    device = backbone.get_input_embeddings().weight.device
    inputs = {
        "prompt_ids": torch.tensor([[0, 1, 2], [0, 1, 2], [0, 0, 2]], device=device),
        "prompt_mask": torch.tensor([[1, 1, 1], [1, 1, 1], [0, 1, 1]], device=device),
        "completion_ids": torch.tensor([[1, 2], [2, 0], [0, 1]], device=device),
        "completion_mask": torch.tensor([[1, 1], [1, 0], [1, 1]], device=device),
    }
    training = backbone.training
    backbone.eval()
    try:
        with torch.no_grad():
            apart, together = (
                RowForward.of(inputs, shared=shared, last=True).states(backbone).last_hidden_state.float()
                for shared in (False, True)
            )
    except Exception as error:  # whatever a model raises that takes no cache
        return f"it takes no cache as others do ({type(error).__name__}: {error})"
    finally:
        backbone.train(training)
    weight = next(backbone.parameters())
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 5e-2
    if float((apart - together).abs().max()) > tolerance * float(apart.abs().max()):
        return "its states come out otherwise with a cache"
    return None
