"""Tiny runs of the trainer that can be watched, with completions that are drawn or given."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification, TrainerCallback

from tests import tiny
from trl_variants import VariantTrainer
from trl_variants.recipe import LossResult, Recipe

#: Plain SGD, unclipped: weights move by exactly the gradient.
SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}


class Spy:
    """A recipe that also remembers what it was given and what it returned."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.rollouts: list[tuple[Any, Any, dict[str, Any]]] = []
        self.batches: list[tuple[Any, LossResult, dict[str, Any]]] = []
        self.evaluated: list[tuple[Any, LossResult, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recipe, name)

    def advantages(self, rollout: Any, **kwargs: Any) -> Any:
        result = self._recipe.advantages(rollout, **kwargs)
        self.rollouts.append((rollout, result, kwargs))
        return result

    def loss(self, batch: Any, **kwargs: Any) -> LossResult:
        result = self._recipe.loss(batch, **kwargs)
        training = batch.log_probs.requires_grad or kwargs["critic_only"]
        (self.batches if training else self.evaluated).append((batch, result, kwargs))
        return result


class Watched(VariantTrainer):
    """The trainer with a spy for a recipe, and a record of gradients and of optimizer steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spy = self.recipe = Spy(self.recipe)
        self.gradients: list[Any] = []
        self.generated: list[dict[str, Any]] = []
        self.critic_gradients: list[Any] = []
        self.generations_before_step: list[int] = []
        self.add_callback(_Recorder(self))

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.generated.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in output.items()})
        return output

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.logs]

    @property
    def logs(self) -> list[dict[str, Any]]:
        return [entry for entry in self.state.log_history if "loss" in entry]


class _Recorder(TrainerCallback):
    def __init__(self, trainer: Watched) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trainer.generations_before_step.append(len(self.trainer.generated))
        self.trainer.gradients.append(_gradient(self.trainer.model))
        if self.trainer.critic:
            self.trainer.critic_gradients.append(_gradient(self.trainer.critic.model))


def _gradient(model: torch.nn.Module) -> Tensor | None:
    """All gradients of a model; None where it has none, as the policy while a critic warms up or after target_kl."""
    found = [whole(p.grad) for p in model.parameters() if p.requires_grad and p.grad is not None]
    return torch.cat(found) if found else None


def whole(tensor: Tensor) -> Tensor:
    """A parameter or gradient as a flat tensor, gathered where FSDP shards it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).flatten()


def build(
    folder: Any,
    variant: Any = "grpo",
    *,
    model: Any = None,
    rewards: Any = tiny.low_words,
    rows: int = 16,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Watched:
    """A trainer over the tiny model; ``settings`` go into the config, ``options`` into the trainer."""
    return Watched(
        model=tiny.model() if model is None else model,
        reward_funcs=rewards,
        args=tiny.config(folder, variant, **settings),
        **{"train_dataset": tiny.dataset(rows), "processing_class": tiny.tokenizer(), **(options or {})},
    )


def trained(*args: Any, **kwargs: Any) -> Watched:
    """The same, after training."""
    trainer = build(*args, **kwargs)
    trainer.train()
    return trainer


def completion(prompt: str, index: int, limit: int = 8) -> list[int]:
    """The tokens that a script gives to the index-th completion of a prompt; three in four end with <eos>."""
    draw = random.Random(f"{prompt}|{index}")
    tokens = [draw.randrange(3, 32) for _ in range(draw.randint(1, limit))]
    return [*tokens[:-1], 1] if draw.random() < 0.75 else tokens


def scripted(
    write: Callable[[str, int], list[int]] = completion, **fields: Callable[[str, int, list[int]], list[Any]]
) -> Callable[..., Any]:
    """A rollout function whose completions depend on the prompt and on the number within the group alone.

    Args:
        write: Gives the tokens.
        **fields: Further lists per token, such as ``logprobs`` and ``env_mask``.
    """

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        group = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        first = trainer.accelerator.process_index * len(prompts)
        keys = [(prompt, (first + i) % group) for i, prompt in enumerate(prompts)]
        written = [write(*key) for key in keys]
        return {
            "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": written,
            "logprobs": None,
            **{
                name: [make(*key, tokens) for key, tokens in zip(keys, written, strict=True)]
                for name, make in fields.items()
            },
        }

    return rollout


def weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([whole(p) for p in model.parameters()])


def digest(model: torch.nn.Module) -> str:
    """A hash of every parameter and buffer."""
    sums = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sums.update(name.encode() + tensor.detach().float().numpy().tobytes())
    return sums.hexdigest()


def distributions(model: torch.nn.Module, output: dict[str, Any], temperature: float = 1.0) -> Tensor:
    """(B, T, vocabulary) log-probs in float64, from the model's ordinary forward, written out."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    width = output["completion_ids"].shape[1]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits.double()[:, -width - 1 : -1] / temperature
    return logits.log_softmax(-1)


def log_probs(model: torch.nn.Module, output: dict[str, Any], temperature: float = 1.0) -> Tensor:
    """(B, T) log-probs of the completions, in float64."""
    return distributions(model, output, temperature).gather(-1, output["completion_ids"][..., None])[..., 0]


def entropies(model: torch.nn.Module, output: dict[str, Any], temperature: float = 1.0) -> Tensor:
    """(B, T) entropies in nats, in float64."""
    logs = distributions(model, output, temperature)
    return -(logs.exp() * logs).sum(-1)


def reward_model(seed: int = 5) -> Qwen2ForSequenceClassification:
    """A model that gives one number per text."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        num_labels=1,
    )
    config._name_or_path = "judge"
    return Qwen2ForSequenceClassification(config).eval()


def variation(**changes: Any) -> Qwen2ForCausalLM:
    """The tiny model with some settings of its config changed."""
    plain = tiny.model()
    config = copy.deepcopy(plain.config)
    for name, value in changes.items():
        setattr(config, name, value)
    built = Qwen2ForCausalLM(config)
    built.load_state_dict(plain.state_dict())
    return built
