"""Tiny runs that are watched while they generate greedily."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests import tiny
from tests.trainer import runs
from trl_variants import Variant, component


@component
def minus_greedy(rewards: Tensor, greedy_rewards: Tensor, scored: Tensor) -> Tensor:
    """r - the reward of the greedy completion."""
    return torch.where(scored, rewards - greedy_rewards, 0.0)


@component
def centre_only(rewards: Tensor, scored: Tensor) -> Tensor:
    """r: the same run without greedy completions."""
    return torch.where(scored, rewards, 0.0)


PLAIN: dict[str, Any] = {
    "advantage_normalizer": None,
    "importance_ratio": "token",
    "clip_rule": "ppo_clip",
    "loss_aggregator": "token_mean",
}
GREEDY = Variant(name="minus_greedy", advantage_estimator=minus_greedy, **PLAIN)
WITHOUT = Variant(name="without", advantage_estimator=centre_only, **PLAIN)
RESAMPLED = {"sampling": "resample", "sample_filter": "zero_variance"}


class Greedy(runs.Watched):
    """Also remembers what was generated greedily."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.asked: list[list[str]] = []
        self.greedy: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def _generate(self, prompts: list[Any]) -> Any:
        output = super()._generate(prompts)
        if not self._sampling():
            self.asked.append(list(prompts))
            self.greedy.append(dict(zip(prompts, output[1], strict=True)))
        return output

    def _sampling(self) -> bool:
        return bool(self.generation_config.do_sample)


def built(folder: Any, variant: Any = GREEDY, **settings: Any) -> Greedy:
    options = {"train_dataset": tiny.dataset(settings.pop("rows", 16)), **settings.pop("options", {})}
    return Greedy(
        model=settings.pop("model", None) or tiny.model(),
        reward_funcs=settings.pop("rewards", tiny.low_words),
        args=tiny.config(folder, variant, **settings),
        processing_class=tiny.tokenizer(),
        **options,
    )


def trained(*args: Any, **settings: Any) -> Greedy:
    trainer = built(*args, **settings)
    trainer.train()
    return trainer


def texts(output: dict[str, Any]) -> list[str]:
    """The prompt of each row."""
    pairs = zip(output["prompt_ids"], output["prompt_mask"], strict=True)
    return [" ".join(tiny.WORDS[i - 3] for i in ids[mask.bool()].tolist()) for ids, mask in pairs]


def greedy_tokens(model: Any, prompt: str, limit: int = 8) -> list[int]:
    """What generate(do_sample=False) gives, cut after the stop token."""
    ids = torch.tensor([tiny.tokenizer()(prompt)["input_ids"]])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit)
    tokens = out[0, ids.shape[1] :].tolist()
    return tokens[: tokens.index(1) + 1] if 1 in tokens else tokens


def timeless(entry: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in entry.items() if n not in ("step_time", "greedy/reward") and not n.startswith("speed/")}
