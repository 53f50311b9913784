"""Critics of less common kinds: backbones whose states are not as wide as their layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from tests.trainer import runs
from tests.trainer.test_critic import KINDS, ppo


def narrow() -> OPTForCausalLM:
    """Layers of 16 numbers, and states of 8: as OPT-350m, which projects them down before its head."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=32,
        hidden_size=16,
        word_embed_proj_dim=8,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        dropout=0.0,
        do_layer_norm_before=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return OPTForCausalLM(config)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_as_wide_as_the_states_and_not_as_the_layers(kind: str, tmp_path: Any) -> None:
    settings = {"model": narrow(), "options": {"rollout_func": runs.scripted()}, "save_strategy": "steps"}
    trainer = ppo(tmp_path, kind, save_steps=2, **settings)
    head = trainer.critic.model if kind == "shared" else trainer.critic.model.head
    assert head.weight.shape == (1, 8)
    trainer.train()
    assert head.weight.abs().min() > 0
    # Values are the head's of the backbone's own states: of a prompt of two tokens, from its second one on.
    output = trainer.generated[0]
    scored = trainer._passes.score(trainer.model, output, 4, critic=trainer.critic)
    backbone = trainer.model.base_model if kind == "shared" else trainer.critic.model.backbone
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    with torch.no_grad():
        states = backbone(input_ids=ids, attention_mask=mask).last_hidden_state[:, 1:-1]
    counts = output["loss_mask"].bool()
    torch.testing.assert_close(scored["values"][counts], head(states)[counts], rtol=1e-4, atol=1e-6)
    # A critic of a checkpoint is one of this kind too.
    if kind == "separate":
        again = ppo(tmp_path / "b", critic_model=str(tmp_path / "checkpoint-2" / "critic"))
        assert torch.equal(runs.weights(again.critic.model), runs.weights(trainer.critic.model))
