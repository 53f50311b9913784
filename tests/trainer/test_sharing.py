"""Prompts computed once, and micro-batches cut by length: the same numbers come out, for every variant and model."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from tests import tiny
from tests.trainer import runs
from tests.trainer.test_adapters import LORA, adapted
from tests.trainer.test_config import refused
from tests.trainer.variants import RECIPES, VARIANTS
from trl_variants.trainer import sharing
from trl_variants.trainer.forward import RowForward, backbone_of

STOCK = {"share_prompts": "never", "cut_micro_batches": False}
SHARED = {"share_prompts": "always"}


def gradients(folder: Any, variant: str = "grpo", *, model: Any = None, **settings: Any) -> tuple[Any, ...]:
    """Losses, gradients of policy and critic, and how often prompts were shared."""
    critic = bool(RECIPES[variant].variant.critic) if variant in RECIPES else False
    merged = {"max_steps": 2, "num_generations": 4, **runs.SGD, **settings}
    options = {"rollout_func": runs.scripted(), **merged.pop("options", {})}
    trainer = runs.build(folder, variant, model=model, options=options, **merged)
    if critic:
        head = trainer.critic.model if trainer.critic.shared else trainer.critic.model.head
        with torch.no_grad():
            head.weight.copy_(torch.linspace(-0.3, 0.3, head.weight.shape[1])[None])
    trainer.train()
    shared = [bool(batch.get("shared")) for batch in trainer._buffered_inputs]
    return trainer.losses, [*trainer.gradients, *trainer.critic_gradients], shared, trainer


def assert_same(stock: Any, ours: Any, rtol: float = 1e-4) -> None:
    assert ours[0] == pytest.approx(stock[0], rel=rtol, abs=rtol / 100)
    for a, b in zip(stock[1], ours[1], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol / 10 * float(a.abs().max()) + 1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_and_unshared_gradients_are_equal_for_every_variant(variant: str, tmp_path: Any) -> None:
    stock = gradients(tmp_path, variant, **STOCK)
    shared = gradients(tmp_path, variant, **SHARED)
    cut = gradients(tmp_path, variant, share_prompts="never")
    assert not any(stock[2]) and all(shared[2]) and not any(cut[2])
    assert_same(stock, shared)
    assert_same(stock, cut)
    assert max(float(g.norm()) for g in stock[1]) > 1e-3


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_with_a_critic_of_either_kind(kind: str, tmp_path: Any) -> None:
    settings = {"variant_overrides": {"critic": kind}, "num_iterations": 2}
    assert_same(gradients(tmp_path, "ppo", **STOCK, **settings), gradients(tmp_path, "ppo", **SHARED, **settings))


def gpt2() -> Any:
    """Learned positions: a row's padding must not move them."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, pad_token_id=0, eos_token_id=1, bos_token_id=1, **sizes, **dropout)
    )


def grouped_heads() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **sizes,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Any] = {
    "eager": lambda: runs.variation(_attn_implementation="eager"),
    "float64": lambda: tiny.model(dtype=torch.float64),
    "gpt2": gpt2,
    "grouped heads": grouped_heads,
    "adapter": adapted,
}


@pytest.mark.parametrize("name", MODELS)
def test_for_models_of_other_kinds(name: str, tmp_path: Any) -> None:
    stock, shared = (gradients(tmp_path, model=MODELS[name](), **s) for s in (STOCK, SHARED))
    assert all(shared[2])
    assert_same(stock, shared)


def test_with_a_new_adapter(tmp_path: Any) -> None:
    def settings() -> dict[str, Any]:
        return {"options": {"peft_config": LoraConfig(**LORA)}, "variant_overrides": {"kl": {"coef": 1.0}}}

    stock, shared = (gradients(tmp_path, model=tiny.model(), **settings(), **s) for s in (STOCK, SHARED))
    assert all(shared[2])
    assert_same(stock, shared)


@pytest.mark.parametrize("how", ["autocast", "model"])
def test_in_bfloat16_up_to_its_rounding(how: str, tmp_path: Any) -> None:
    extra = {"bf16": True} if how == "autocast" else {}
    made = [
        gradients(tmp_path, model=tiny.model(dtype=torch.bfloat16) if how == "model" else None, **extra, **s)
        for s in (STOCK, SHARED)
    ]
    assert all(made[1][2])
    for a, b in zip(made[0][1], made[1][1], strict=True):  # bfloat16 has 8 bits: 2^-8 = .004 a rounding
        assert torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=0) > 0.999


def test_prompts_of_different_lengths_and_equal_ones_apart(tmp_path: Any) -> None:
    # Rows of one prompt need not stand side by side, and shorter prompts are padded on the left.
    inputs = {
        "prompt_ids": torch.tensor([[0, 5, 6], [4, 5, 6], [0, 5, 6], [4, 5, 6], [0, 0, 6]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1], [0, 0, 1]]),
        "completion_ids": torch.tensor([[7, 8, 1], [9, 1, 0], [3, 0, 0], [7, 8, 9], [1, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]]),
    }
    backbone = tiny.model(dtype=torch.float64).model.eval()
    for shared in (False, True):
        layout = RowForward.of(inputs, shared=shared, last=True)
        states = layout.states(backbone).last_hidden_state[0]
        place = 0
        for row in range(5):
            prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
            completion = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]
            alone = backbone(input_ids=torch.cat([prompt, completion])[None]).last_hidden_state[0]
            n = len(completion)
            torch.testing.assert_close(states[place : place + n], alone[len(prompt) - 1 : -1])
            torch.testing.assert_close(states[-5 + row], alone[-1])
            place += n
        assert place + 5 == states.shape[0]
        values = torch.arange(place + 5.0)
        assert layout.scatter(values)[inputs["completion_mask"].bool()].tolist() == list(range(place))
        assert layout.last(values).tolist() == [place + row for row in range(5)]


# -- what is computed ----------------------------------------------------------------------------------------------


class Tokens:
    """Counts the tokens that go through the layers of a model while its gradient is on."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        model.model.layers[0].register_forward_hook(self._add)

    def _add(self, _: Any, args: Any, __: Any) -> None:
        if torch.is_grad_enabled():
            self.count += args[0].shape[0] * args[0].shape[1]


def computed(folder: Any, variant: str = "dr_grpo", **settings: Any) -> int:
    trainer = runs.build(
        folder, variant, options={"rollout_func": runs.scripted()}, max_steps=1, num_generations=4, **settings
    )
    tokens = Tokens(trainer.model)
    trainer.train()
    return tokens.count


def test_fewer_tokens_are_computed(tmp_path: Any) -> None:
    stock, cut, shared = (computed(tmp_path, **s) for s in (STOCK, {"share_prompts": "never"}, SHARED))
    assert cut < stock and shared < stock


def test_the_speed_of_each_phase_is_logged(tmp_path: Any) -> None:
    logs = runs.trained(tmp_path, "grpo", num_iterations=2, max_steps=4, options={"rollout_func": runs.scripted()}).logs
    assert not any(name.startswith("speed/") for name in logs[0]) and "speed/padding_share" in logs[1]
    shares = [logs[1][f"speed/{phase}_time_share"] for phase in ("generation", "scoring", "learning")]
    assert sum(shares) == pytest.approx(1.0, abs=1e-3) and min(shares) > 0
    assert all(logs[1][f"speed/{phase}_tokens_per_second"] > 0 for phase in ("generation", "scoring", "learning"))
    stock = runs.trained(tmp_path, "grpo", max_steps=1, options={"rollout_func": runs.scripted()}, **STOCK).logs[0]
    # Both compute the same tokens; the cut drops padding, and stock rows are padded on one side only here.
    assert 0 <= logs[1]["speed/padding_share"] < stock["speed/padding_share"] < 1
    assert logs[1]["speed/tokens_vs_stock"] < stock["speed/tokens_vs_stock"] <= 1


def test_rows_that_a_filter_dropped_are_not_computed(tmp_path: Any) -> None:
    # With equal rewards no row counts: of each micro-batch one row runs, the shortest.
    nothing = computed(
        tmp_path, "dapo", variant_overrides={"sampling": "mask"}, rewards=lambda completions, **_: [1.0] * 8
    )
    assert 0 < nothing < computed(tmp_path, "dapo", variant_overrides={"sampling": "mask"}, rewards=tiny.low_words) / 2


def test_groups_may_be_kept_in_one_mini_batch(tmp_path: Any) -> None:
    # 16 rows of 4 prompts in 4 mini-batches of 4 rows.
    settings = {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "max_steps": 4}
    apart, together = (runs.trained(tmp_path, "grpo", shuffle=kind, **settings) for kind in ("rows", "groups"))

    def prompts(trainer: Any) -> list[int]:
        return [len(torch.unique(batch["prompt_ids"], dim=0)) for batch in trainer._buffered_inputs]

    assert prompts(together) == [1, 1, 1, 1] and max(prompts(apart)) > 1
    assert sorted(len(batch["prompt_ids"]) for batch in together._buffered_inputs) == [4, 4, 4, 4]


# -- where it steps aside ------------------------------------------------------------------------------------------


def mistral() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MistralConfig(
        vocab_size=32,
        num_key_value_heads=2,
        sliding_window=4,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **sizes,
    )
    return MistralForCausalLM(config)


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        (tiny.model, {"gradient_checkpointing": True}, "gradient checkpointing keeps no cache"),
        (mistral, {}, "its layers are not all of full attention"),
        (lambda: runs.variation(attention_dropout=0.1), {}, "dropout would be drawn once for a prompt"),
    ],
)
def test_it_steps_aside_where_it_would_not_be_exact_and_says_so_once(
    model: Any, settings: Any, reason: str, tmp_path: Any, caplog: Any
) -> None:
    with caplog.at_level(logging.INFO):
        how = {} if "gradient_checkpointing" in settings else SHARED  # which the config refuses together
        shared = gradients(tmp_path, model=model(), **how, **settings)[2]
    assert not any(shared)
    said = [record.getMessage() for record in caplog.records if "computes every prompt" in record.getMessage()]
    assert len(said) == 1 and reason in said[0]


def test_a_model_that_ignores_its_cache_or_takes_none_is_found_out(tmp_path: Any, monkeypatch: Any) -> None:
    trainer = runs.build(tmp_path, "grpo")
    backbone = backbone_of(trainer.model)
    assert sharing.obstacle(trainer, backbone) is None
    forward = backbone.forward
    monkeypatch.setattr(backbone, "forward", lambda input_ids, **_: forward(input_ids))
    assert sharing.obstacle(trainer, backbone) == "its states come out otherwise with a cache"
    monkeypatch.setattr(backbone, "forward", lambda input_ids, attention_mask=None, use_cache=None: forward(input_ids))
    assert "it takes no cache as others do (TypeError" in str(sharing.obstacle(trainer, backbone))


def test_a_critic_that_cannot_share_keeps_the_policy_from_it(tmp_path: Any) -> None:
    # Both compute the same micro-batches, and those of shared prompts may hold many more rows.
    critic = runs.variation(attention_dropout=0.1)
    trainer = runs.build(tmp_path, "ppo", options={"critic_model": critic}, max_steps=1, num_generations=4, **SHARED)
    trainer.train()
    assert not any(batch["shared"] for batch in trainer._buffered_inputs)


def test_a_later_epoch_shuffles_the_same_rows_whatever_the_cut(tmp_path: Any) -> None:
    settings = {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 4}
    stock, cut = (gradients(tmp_path, "ppo", **settings, **s) for s in (STOCK, {"share_prompts": "never"}))
    assert_same(stock, cut)


def test_where_positions_depend_on_the_length_trls_own_forward_is_used(tmp_path: Any) -> None:
    def model() -> Any:
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        return runs.variation(rope_parameters=rope, max_position_embeddings=6)

    stock, default = (gradients(tmp_path, model=model(), **s) for s in (STOCK, SHARED))
    assert not any(default[2])
    for a, b in zip(stock[1], default[1], strict=True):
        assert torch.equal(a, b)


def test_the_speed_of_an_evaluation_is_not_counted(tmp_path: Any) -> None:
    def tokens(**evaluation: Any) -> list[float]:
        options = {"rollout_func": runs.scripted(), "eval_dataset": tiny.dataset(8)}
        trainer = runs.build(tmp_path, "grpo", options=options, max_steps=2, num_generations_eval=1, **evaluation)
        seen: list[float] = []
        flush = trainer.meter.flush

        def flushing() -> Any:
            seen.extend(trainer.meter._tokens.values())
            return flush()

        trainer.meter.flush = flushing
        trainer.train()
        return seen

    assert tokens() == tokens(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)


def test_the_probe_draws_no_random_number(tmp_path: Any) -> None:
    trainer = runs.build(tmp_path, "grpo")
    before = torch.get_rng_state()
    assert sharing.obstacle(trainer, backbone_of(trainer.model)) is None
    assert torch.equal(before, torch.get_rng_state())


def test_nothing_stays_on_the_model(tmp_path: Any) -> None:
    trainer = runs.trained(tmp_path, "grpo", max_steps=1, **SHARED)
    assert "forward" not in trainer.model.model.__dict__ and not trainer.model.model._forward_hooks


def test_a_loss_that_depends_on_the_cut_keeps_trls_micro_batches(tmp_path: Any) -> None:
    trainer = runs.trained(tmp_path, "trl_bnpo", max_steps=1, options={"rollout_func": runs.scripted()})
    assert [len(batch["loss_mask"]) for batch in trainer._buffered_inputs] == [4, 4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shuffle": "group"}, "shuffle must be rows, groups, not 'group'. Did you mean 'groups'?"),
        ({"share_prompts": True}, "share_prompts must be auto, always, never, not True."),
        ({"cut_micro_batches": "false"}, "cut_micro_batches must be true or false, not 'false'."),
        ({"prefill_once": "never"}, "prefill_once must be true, false or null, not 'never'."),
        (
            {"share_prompts": "always", "gradient_checkpointing": True},
            "share_prompts is always, and gradient checkpointing keeps no cache",
        ),
    ],
)
def test_misspelt_switches_are_refused(settings: dict[str, Any], message: str, tmp_path: Any) -> None:
    assert refused(tmp_path, "grpo", **settings).startswith(message)
