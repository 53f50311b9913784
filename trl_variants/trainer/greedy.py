"""The greedy completion of each prompt of a rollout, as a baseline: generated and scored besides, and logged apart."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_variants.errors import VariantError
from trl_variants.trainer.surplus import IMAGES

__all__ = ["GreedyPass", "refuse_greedy"]

#: What makes a sampling configuration of transformers take the likeliest token; the rest are its neutral values.
_GREEDY = {"do_sample": False, "num_beams": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None}


def refuse_greedy(recipe: Any, dataset: Any, *, rollout_func: Any, tools: Any, environment_factory: Any) -> None:
    """Raise a `VariantError` where the recipe needs greedy completions and the run cannot have them."""
    if not recipe.needs("greedy_rewards"):
        return
    for what, present in (
        ("a rollout_func, which generates as it likes", rollout_func is not None),
        ("an environment_factory", environment_factory is not None),
        ("tools", bool(tools)),
        ("images", any(name in IMAGES for name in getattr(dataset, "column_names", None) or ())),
    ):
        if present:
            raise _unsupported(recipe, what)


class GreedyPass:
    """The greedy completions of one batch of prompts.

    Every process generates and scores an own share of the distinct prompts; a process whose prompts are all another's,
    or that has fewer, repeats one, since generating and scoring are collective.

    Args:
        trainer: The trainer.
        inputs: This process's rows; copied, since TRL and reward functions write into them.
    """

    def __init__(self, trainer: Any, inputs: Sequence[dict[str, Any]]) -> None:
        if any(name in row for row in inputs for name in IMAGES):
            raise _unsupported(trainer.recipe, "images")
        self._trainer = trainer
        accelerator = trainer.accelerator
        self._keys = [_key(row) for row in inputs]
        every = gather_object(self._keys) if accelerator.num_processes > 1 else self._keys
        owner: dict[str, int] = {}
        for index, key in enumerate(every):
            owner.setdefault(key, index // len(inputs))
        #: The distinct rows of each process, in order.
        self._shares = [[k for k, r in owner.items() if r == rank] for rank in range(accelerator.num_processes)]
        mine = self._shares[accelerator.process_index] or self._keys[:1]
        rows = dict(zip(reversed(self._keys), reversed(inputs), strict=True))
        self._size = max(map(len, self._shares))
        self._rows = [copy.deepcopy(rows[key]) for key in (mine + mine[-1:] * self._size)[: self._size]]

    def rewards(self) -> Tensor:
        """(rows,) each row's greedy reward: the weighted sum of the reward functions, NaN where all returned None."""
        trainer = self._trainer
        with _aside(trainer):
            generated = self._generate()
            prompts = [row["prompt"] for row in self._rows]
            ids, completions = map(list, zip(*(generated[_key(prompt)] for prompt in prompts), strict=True))
            per_func = trainer._calculate_rewards(self._rows, prompts, completions, ids)
        weights = trainer.reward_weights.to(per_func)
        total = (per_func * weights).nansum(1).masked_fill(per_func.isnan().all(1), torch.nan)
        found = {
            key: total[rank * self._size + place]
            for rank, share in enumerate(self._shares)
            for place, key in enumerate(share)
        }
        return torch.stack([found[key] for key in self._keys])

    def _generate(self) -> dict[str, tuple[list[int], Any]]:
        """Token ids and completion of each distinct prompt of this process's share, as many on every process."""
        prompts = {_key(row["prompt"]): row["prompt"] for row in self._rows}
        counts = gather_object([len(prompts)]) if self._trainer.accelerator.num_processes > 1 else [len(prompts)]
        asked = list(prompts.values())
        asked += asked[-1:] * (max(counts) - len(asked))
        _, ids, _, completions, *_ = self._trainer._generate(asked)
        return dict(zip(prompts, zip(ids, completions, strict=True), strict=False))


def _key(value: Any) -> str:
    """A text that is equal for equal prompts or rows; of what JSON cannot hold, arrays in full and else its repr."""
    return json.dumps(value, default=lambda item: item.tolist() if hasattr(item, "tolist") else repr(item))


@contextmanager
def _aside(trainer: Any) -> Iterator[None]:
    """Greedy generation, one completion per prompt, that leaves metrics, counters and random numbers as they are."""
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    before = {name: list(values) for name, values in metrics.items()}
    device = trainer.accelerator.device
    changes: list[tuple[Any, str, Any]] = [
        (trainer, "num_generations", 1),
        (trainer, "num_generations_eval", 1),
        (trainer, "_rewards_per_func", trainer._rewards_per_func),
        (trainer.state, "num_input_tokens_seen", trainer.state.num_input_tokens_seen),
    ]
    if trainer.use_vllm:
        engine = trainer.vllm_generation
        changes += [
            (engine, "temperature", 0.0),
            (engine, "generation_kwargs", {**engine.generation_kwargs, "temperature": 0.0}),
        ]
    else:
        config = copy.deepcopy(trainer.generation_config)
        config.update(**_GREEDY)
        changes += [
            (trainer, "generation_config", config),
            (trainer, "generation_kwargs", {**trainer.generation_kwargs, **_GREEDY}),
        ]
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        try:
            yield
        finally:
            metrics.clear()
            metrics.update(before)
            # What reward functions logged here; TRL has taken what they logged of the rollout.
            trainer._pending_metrics.clear()
            trainer._pending_extra_logs.clear()


def _unsupported(recipe: Any, what: str) -> VariantError:
    reader = next(bound for bound in recipe.components if bound.info.needs("greedy_rewards"))
    return VariantError(
        f"{reader.slot} '{reader.name}' needs greedy_rewards, a greedy completion of each prompt, which does not work "
        f"with {what} in this release."
    )
