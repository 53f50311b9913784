"""The critic on real runs: what it starts from, where it reads its values, what trains it and what does not."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2ForSequenceClassification,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from tests import tiny
from tests.trainer import runs
from tests.trainer.test_adapters import LORA, base_weights
from trl_variants import VariantError
from trl_variants.trainer.forward import backbone_of

SHARED = {"critic": "shared"}
KINDS = {"separate": {}, "shared": SHARED}
#: Two mini-batches on one rollout; the second moves on from the first.
TWO = {"num_generations": 1, "num_iterations": 1, "steps_per_generation": 4, "max_steps": 2}


def ppo(
    folder: Any, kind: str = "separate", *, overrides: dict[str, Any] | None = None, **settings: Any
) -> runs.Watched:
    merged = {**TWO, "variant_overrides": {**KINDS[kind], **(overrides or {})}, **settings}
    return runs.build(folder, "ppo", **merged)


# -- where V_t is read ---------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """A backbone whose state is the number of its position."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.config = like.config

    def forward(self, input_ids: Any, **_: Any) -> Any:
        place = torch.arange(input_ids.shape[1]).float()
        return SimpleNamespace(last_hidden_state=place[None, :, None].expand(*input_ids.shape, 16))

    gradient_checkpointing_enable = gradient_checkpointing_disable = lambda self, **_: None
    is_gradient_checkpointing = False


def test_a_value_is_read_at_the_position_that_predicts_its_token(tmp_path: Any) -> None:
    trainer = ppo(tmp_path, options={"rollout_func": runs.scripted()}, max_steps=1, share_prompts="never")
    critic = trainer.critic.model
    critic.backbone = Positions(critic.backbone)
    with torch.no_grad():
        critic.head.weight.zero_()[0, 0] = 1.0
    trainer.train()
    output = trainer.generated[0]
    # A prompt has two tokens, at the positions 0 and 1: the first completion token is predicted at 1, the next at 2 ...
    for values, final, mask in zip(
        output["old_values"], output["final_values"], output["completion_mask"], strict=True
    ):
        length = int(mask.sum())
        assert values[:length].tolist() == [1.0 + t for t in range(length)]
        assert final == 1 + length
    assert len({int(mask.sum()) for mask in output["completion_mask"]}) > 3
    rollout = trainer.spy.rollouts[0][0]
    assert torch.equal(rollout.final_values, output["final_values"])
    batch = trainer.spy.batches[0][0]
    assert torch.equal(batch.values, batch.old_values)


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_a_shared_critic_reads_the_states_of_the_policys_own_forward(checkpointing: Any, tmp_path: Any) -> None:
    """Values and gradients equal those of a second forward written out, and there is none."""
    extra: dict[str, Any] = {"gradient_checkpointing": False}
    if checkpointing is not None:
        extra = {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing},
        }
    trainer = ppo(tmp_path, "shared", options={"rollout_func": runs.scripted()}, max_steps=1, **runs.SGD, **extra)
    head = trainer.critic.model
    torch.manual_seed(1)
    with torch.no_grad():
        head.weight.normal_()
        head.bias.fill_(0.5)
    start = copy.deepcopy(trainer.model)
    start.__dict__.pop("forward", None)
    forwards = []
    trainer._passes.may_share(trainer.model.base_model)
    trainer.model.base_model.register_forward_hook(lambda *_: forwards.append(1))
    loss = trainer.spy.loss
    counts: list[int] = []

    def counting(batch: Any, **kwargs: Any) -> Any:
        counts.append(len(forwards))
        return loss(batch, **kwargs)

    trainer.spy.loss = counting
    trainer.train()
    assert counts[1] - counts[0] == 1  # one forward of the backbone for a micro-batch
    output = trainer.generated[0]
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    with torch.no_grad():
        states = start.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    # The head has moved by now: at the rollout it was what was set above.
    torch.manual_seed(1)
    weight = torch.empty_like(head.weight).normal_()
    expected = (states @ weight.T)[..., 0] + 0.5
    width, start_of = output["completion_ids"].shape[1], output["prompt_ids"].shape[1] - 1
    torch.testing.assert_close(
        output["old_values"][output["loss_mask"]], expected[:, start_of : start_of + width][output["loss_mask"]]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_temperature_is_not_the_values(kind: str, tmp_path: Any) -> None:
    def values(temperature: float) -> torch.Tensor:
        trainer = ppo(tmp_path, kind, options={"rollout_func": runs.scripted()}, temperature=temperature, max_steps=1)
        head = trainer.critic.model if kind == "shared" else trainer.critic.model.head
        with torch.no_grad():
            head.weight.fill_(0.1)
        trainer.train()
        output = trainer.generated[0]
        return output["old_values"][output["loss_mask"]]

    assert torch.equal(values(1.0), values(0.5)) and float(values(1.0).abs().min()) > 0


# -- the gradient --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_critics_gradient_is_the_same_however_the_step_is_cut(kind: str, tmp_path: Any) -> None:  # pains A08
    def gradients(per_device: int, accumulation: int) -> tuple[Any, Any]:
        trainer = ppo(
            tmp_path,
            kind,
            options={"rollout_func": runs.scripted()},
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=accumulation,
            max_steps=2,
            **runs.SGD,
        )
        trainer.train()
        return trainer.critic_gradients, trainer.gradients

    (whole, policy), (cut, cut_policy) = gradients(8, 1), gradients(2, 4)
    # In the second step a shared head is no longer 0, so that the policy's gradient holds the critic's part as well.
    for mine, theirs in zip([*whole, *policy], [*cut, *cut_policy], strict=True):
        assert float(mine.norm()) > 1e-4
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * float(mine.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_with_lambda_1_and_value_0_the_gradient_is_reinforces(kind: str, tmp_path: Any) -> None:
    # A_t = r_t + ... + r_T - 0 = the reward, for gamma = lambda = 1; a new head gives V = 0 (document 001).
    same = {"kl": "none", "loss_aggregator": "token_mean", "advantage_normalizer": "none"}
    settings = {
        **{"num_generations": 1, "num_iterations": 1, "max_steps": 1, **runs.SGD},
        "options": {"rollout_func": runs.scripted()},
    }
    ours = runs.trained(
        tmp_path,
        "ppo",
        variant_overrides={**same, **KINDS[kind], "advantage_estimator": {"gamma": 1.0, "lam": 1.0}},
        **settings,
    )
    plain = runs.trained(tmp_path, "reinforce", variant_overrides=same, **settings)
    torch.testing.assert_close(ours.gradients[0], plain.gradients[0], rtol=1e-5, atol=1e-7)
    assert float(plain.gradients[0].norm()) > 0.1


def test_a2c_is_ppo_with_one_update_per_rollout(tmp_path: Any) -> None:
    settings = {"num_generations": 1, "max_steps": 2, "options": {"rollout_func": runs.scripted()}, **runs.SGD}
    a2c = runs.trained(tmp_path, "a2c", **settings)
    one = runs.trained(tmp_path, "ppo", num_iterations=1, **settings)
    for mine, theirs in zip(
        [*a2c.gradients, *a2c.critic_gradients], [*one.gradients, *one.critic_gradients], strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    with pytest.raises(VariantError, match=r"allows 1 update\(s\) per rollout"):
        tiny.config(tmp_path, "a2c", num_iterations=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_without_a_reward_teaches_the_critic_nothing(kind: str, tmp_path: Any) -> None:
    def reward(number: list[int], **_: Any) -> list[float | None]:
        return [None if n % 2 else 1.0 for n in number]

    trainer = ppo(tmp_path, kind, rewards=reward, options={"rollout_func": runs.scripted()}, max_steps=1)
    loss, seen = trainer.spy.loss, []

    def checking(batch: Any, **kwargs: Any) -> Any:
        result = loss(batch, **kwargs)
        (got,) = torch.autograd.grad(result.loss, batch.values, retain_graph=True)
        seen.append((batch.scored, got.abs().sum(1)))
        return result

    trainer.spy.loss = checking
    trainer.train()
    scored, gradient = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert 0 < int(scored.sum()) < len(scored)
    assert torch.equal(gradient > 0, scored)


# -- what it starts from -------------------------------------------------------------------------------------------


def test_a_separate_critic_starts_from_the_policy_and_the_policy_never_from_it(tmp_path: Any) -> None:
    trainer = ppo(tmp_path)
    policy, critic = backbone_of(trainer.model), trainer.critic.model.backbone
    assert runs.digest(policy) == runs.digest(critic)
    assert not {id(p) for p in policy.parameters()} & {id(p) for p in critic.parameters()}
    before = runs.digest(critic)
    trainer.train()
    assert runs.digest(critic) != before and runs.digest(critic) != runs.digest(policy)


def judged(folder: Any, theirs: Any = None, **settings: Any) -> runs.Watched:
    tokenizers = {"reward_processing_classes": [tiny.tokenizer() if theirs is None else theirs]}
    return ppo(folder, rewards=[runs.reward_model()], options=tokenizers, **settings)


def test_it_starts_from_the_reward_model_which_stays_as_it_is(tmp_path: Any) -> None:
    trainer = judged(tmp_path)
    judge, critic = trainer.reward_funcs[0], trainer.critic.model
    reference = trainer.ref_model
    assert runs.digest(judge.model) == runs.digest(critic.backbone)
    assert torch.equal(critic.head.weight, judge.score.weight) and not critic.head.bias.any()
    before = runs.digest(judge), runs.digest(reference), runs.digest(trainer.model), runs.digest(critic)
    trainer.train()
    after = runs.digest(judge), runs.digest(reference), runs.digest(trainer.model), runs.digest(critic)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, False]


def other_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"x{i}": i + 3 for i in range(29)}}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def test_a_reward_model_with_another_tokenizer_is_no_start(tmp_path: Any) -> None:
    with pytest.raises(VariantError) as error:
        judged(tmp_path, other_tokenizer())
    assert str(error.value) == (
        "The critic would start from the reward model judge, whose tokenizer is not the policy's: it would read other "
        "tokens than the policy writes. Set critic_model to a model with the policy's tokenizer, such as the policy's "
        "own."
    )
    # What the message says works: the reward model scores with its own tokenizer all the same.
    path = tiny.saved(tmp_path / "policy")
    trainer = judged(tmp_path, other_tokenizer(), critic_model=path)
    assert runs.digest(trainer.critic.model.backbone) == runs.digest(backbone_of(trainer.model))
    trainer.train()
    # A shared critic has no such question.
    judged(tmp_path, other_tokenizer(), overrides=SHARED)


@pytest.mark.parametrize("given", ["object", "path", "config"])
def test_critic_model_wins_over_the_reward_model(given: str, tmp_path: Any) -> None:
    start = runs.reward_model(seed=9)
    start.save_pretrained(tmp_path / "critic")
    tiny.tokenizer().save_pretrained(tmp_path / "critic")
    options: dict[str, Any] = {"reward_processing_classes": [tiny.tokenizer()]}
    settings: dict[str, Any] = {}
    if given == "config":
        settings["critic_model"] = str(tmp_path / "critic")
    else:
        options["critic_model"] = start if given == "object" else str(tmp_path / "critic")
    trainer = ppo(tmp_path / "out", rewards=[runs.reward_model()], options=options, **settings)
    critic = trainer.critic.model
    assert torch.equal(critic.head.weight, start.score.weight)
    assert runs.digest(critic.backbone) == runs.digest(start.model)
    trainer.train()


def test_the_reward_model_given_as_critic_model_is_copied(tmp_path: Any) -> None:
    judge = runs.reward_model()
    trainer = ppo(
        tmp_path,
        rewards=[judge],
        options={"reward_processing_classes": [tiny.tokenizer()], "critic_model": judge},
    )
    before = runs.digest(judge)
    trainer.train()
    assert runs.digest(judge) == before


def labelled(labels: int) -> Any:
    config = runs.reward_model().config
    config.num_labels = labels
    return Qwen2ForSequenceClassification(config)


def bert() -> Any:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=1, **small))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: labelled(2), "has 2 numbers for a head"),
        (bert, "reads later tokens too"),
    ],
)
def test_a_model_that_cannot_be_a_critic_is_refused(model: Any, message: str, tmp_path: Any) -> None:
    with pytest.raises(VariantError, match=message):
        ppo(tmp_path, options={"critic_model": model()})


def test_a_critic_that_knows_too_few_tokens_is_refused(tmp_path: Any) -> None:
    small = runs.reward_model()
    small.resize_token_embeddings(8)
    with pytest.raises(VariantError, match="knows 8 tokens; the policy's tokenizer has 32"):
        ppo(tmp_path, options={"critic_model": small})


def test_a_model_without_weights_on_this_process_is_refused(tmp_path: Any) -> None:
    with pytest.raises(VariantError, match="Set fsdp_cpu_ram_efficient_loading: false"):
        ppo(tmp_path, options={"critic_model": runs.reward_model().model.to("meta")})


def test_a_critic_model_that_is_part_of_another_model_is_copied(tmp_path: Any) -> None:
    policy, judge = tiny.model(), runs.reward_model()
    inside = ppo(tmp_path, model=policy, options={"critic_model": policy.model})
    assert inside.critic.model.backbone is not policy.model
    options = {"reward_processing_classes": [tiny.tokenizer()], "critic_model": judge.model}
    before = runs.digest(judge)
    ppo(tmp_path, rewards=[judge], options=options).train()
    assert runs.digest(judge) == before


def test_a_mixture_of_experts_is_no_model_that_reads_later_tokens(tmp_path: Any) -> None:
    # The third token changes how many rows an expert multiplies, and so the last bits of the first two.
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 64, "num_experts": 8}
    config = Qwen2MoeConfig(
        vocab_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        shared_expert_intermediate_size=64,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **sizes,
    )
    ppo(tmp_path, model=Qwen2MoeForCausalLM(config)).train()


@pytest.mark.parametrize("target", ["all-linear", r"model\.layers\.\d+\.self_attn\.(q|v)_proj"])
def test_adapters_find_their_places_in_a_critic_from_elsewhere(target: str, tmp_path: Any) -> None:
    lora = LoraConfig(r=2, target_modules=target, task_type="CAUSAL_LM")
    trainer = ppo(tmp_path, options={"critic_model": runs.reward_model(), "peft_config": lora})
    names = [name for name, p in trainer.critic.model.named_parameters() if p.requires_grad]
    assert sum(".lora_A." in name for name in names) == (7 if target == "all-linear" else 2)
    assert sum("head." in name for name in names) == 2
    trainer.train()


def test_a_frozen_part_of_the_policy_is_trained_and_saved_in_the_critic(tmp_path: Any) -> None:
    model = tiny.model()
    model.model.embed_tokens.requires_grad_(False)
    trainer = ppo(tmp_path, model=model, save_strategy="steps", save_steps=2)
    trainer.train()
    again = ppo(tmp_path / "b", critic_model=str(tmp_path / "checkpoint-2" / "critic"))
    assert torch.equal(runs.weights(again.critic.model), runs.weights(trainer.critic.model))


def test_critic_model_without_a_separate_critic_or_twice_is_refused(tmp_path: Any) -> None:
    options = {"critic_model": runs.reward_model()}
    with pytest.raises(VariantError, match="the critic of this variant is shared"):
        ppo(tmp_path, "shared", options=options)
    with pytest.raises(VariantError, match="the critic of this variant is none"):
        runs.build(tmp_path, "grpo", options=options)
    with pytest.raises(VariantError, match="given twice"):
        ppo(tmp_path, options=options, critic_model="somewhere")


# -- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["policy", "reward model", "shared"])
def test_with_an_adapter_the_head_trains_and_the_base_does_not(start: str, tmp_path: Any) -> None:  # pains E11
    options: dict[str, Any] = {"peft_config": LoraConfig(**LORA)}
    settings: dict[str, Any] = {}
    if start == "reward model":
        options["reward_processing_classes"] = [tiny.tokenizer()]
        settings["rewards"] = [runs.reward_model()]
    trainer = ppo(tmp_path, "shared" if start == "shared" else "separate", options=options, **settings)
    critic = trainer.critic.model
    before = {name: p.detach().clone() for name, p in critic.named_parameters()}
    base = base_weights(trainer.model)
    trainer.train()
    moved = {name for name, p in critic.named_parameters() if not torch.equal(p, before[name])}
    heads = {"weight", "bias"} if start == "shared" else {"head.weight", "head.bias"}
    assert heads <= moved and all(".lora_" in name for name in moved - heads)
    assert start == "shared" or len(moved) > 2
    after = base_weights(trainer.model)
    assert all(torch.equal(base[name], after[name]) for name in base)
    assert trainer.ref_model is None and trainer.reference is not None


# -- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["autocast", "model"])
def test_values_are_float32_whatever_the_model_is(kind: str, how: str, tmp_path: Any) -> None:  # pains F12
    extra = {"bf16": True} if how == "autocast" else {"model": tiny.model(dtype=torch.bfloat16)}
    trainer = ppo(tmp_path, kind, **extra)
    trainer.train()
    batch = trainer.spy.batches[-1][0]
    assert batch.values.dtype == batch.old_values.dtype == batch.returns.dtype == torch.float32
    assert trainer.critic.model.state_dict()[("" if kind == "shared" else "head.") + "weight"].dtype == torch.float32
    assert all(gradient.isfinite().all() for gradient in trainer.critic_gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_moves_neither_values_nor_kl_of_the_rollout(kind: str, tmp_path: Any) -> None:
    model = runs.variation(attention_dropout=0.5)
    trainer = ppo(
        tmp_path, kind, model=model, options={"rollout_func": runs.scripted()}, max_steps=1, learning_rate=0.0
    )
    head = trainer.critic.model if kind == "shared" else trainer.critic.model.head
    with torch.no_grad():
        head.weight.fill_(0.3)
    trainer.train()
    assert trainer.critic.model.training and trainer.model.training
    batch, output = trainer.spy.batches[0][0], trainer.generated[0]
    assert not torch.equal(batch.values, batch.old_values)  # learned with dropout, as the policy is
    trainer.model.eval()
    again = trainer._passes.score(trainer.model, output, 4, critic=trainer.critic)
    torch.testing.assert_close(again["values"], output["old_values"])
    assert trainer.logs[0]["kl"] == pytest.approx(0.0, abs=1e-6)


# -- evaluation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_has_values_and_changes_nothing(kind: str, tmp_path: Any) -> None:
    trainer = ppo(tmp_path, kind, options={"eval_dataset": tiny.dataset(5)}, num_generations_eval=1)
    trainer.train()
    before = runs.digest(trainer.critic.model), runs.digest(trainer.model)
    metrics = trainer.evaluate()
    assert (runs.digest(trainer.critic.model), runs.digest(trainer.model)) == before
    assert "eval_explained_variance" in metrics and "eval_value_loss" in metrics
    assert all(p.grad is None for p in trainer.critic.model.parameters())
