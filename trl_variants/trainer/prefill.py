"""Prefill once: each distinct prompt of a generation batch goes through the model once, not once per completion.

TRL hands every prompt to transformers' `generate` as often as it wants completions of it. While TRL generates, the
policy's `generate` is wrapped: the distinct prompts, all but their last token, are run into a key-value cache, whose
rows are then repeated (with room for what follows, see `kv_cache`), and the ordinary `generate` goes on from there.
Sampling, stop tokens and logits processors stay transformers' own. Where the result could differ by more than rounding,
the wrapper steps aside and says why.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from trl_variants.trainer.kv_cache import repeat_rows
from trl_variants.trainer.prefill_reasons import (
    cache_name,
    dropout_reason,
    engine_reason,
    generation_reason,
    inner_model,
    model_reason,
    other_layers,
    sharding_reason,
)

__all__ = ["PrefillOnce"]

logger = get_logger(__name__)

#: What generate may be given for its prompts to be repeated safely; anything else belongs to single rows, or to a mode.
_INPUTS = {"input_ids", "attention_mask", "generation_config"}

#: Settings of a trial that draws no random numbers, with those of sampling at what generate takes as unset.
_ONE_GREEDY_TOKEN = {
    "max_new_tokens": 1,
    "min_new_tokens": None,
    "do_sample": False,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "min_p": None,
    "return_dict_in_generate": True,
    "output_logits": True,
}


class PrefillOnce:
    """Prefill once for the generations of one trainer.

    Args:
        trainer: Its ``args.prefill_once`` switches this off (False), or makes it a warning where the model cannot have
            it (True) instead of a line of the log (None).
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._said: set[str] = set()
        self._tried: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """While this lasts, the policy's `generate` prefills each distinct prompt once; afterwards it is as before."""
        trainer = self._trainer
        if trainer.args.prefill_once is False:
            yield
            return
        reason = engine_reason(trainer.args) or sharding_reason(trainer.accelerator)
        if reason:
            self._say(reason)
            yield
            return
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)  # what TRL generates with
        before, original = vars(model).get("generate"), model.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs, **({} if args else self._prefilled(model, original, kwargs)))

        model.generate = generate
        try:
            yield
        finally:
            del model.generate
            if before is not None:
                model.generate = before

    def _prefilled(self, model: nn.Module, generate: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The filled cache of all rows as one more argument of generate, or nothing."""
        ids, mask, given = (kwargs.get(name) for name in ("input_ids", "attention_mask", "generation_config"))
        if "past_key_values" in kwargs or "cache" in kwargs:
            return {}
        if ids is None or mask is None or given is None or kwargs.keys() - _INPUTS:
            extra = ", ".join(sorted(kwargs.keys() - _INPUTS)) or "no token ids with a mask and a generation_config"
            return self._aside(f"generate is given {extra}")
        firsts, rows = _distinct(ids, mask)
        if len(firsts) == len(rows) or ids.shape[1] < 2:
            return {}  # nothing to save, and nothing to tell
        base, reason = inner_model(model)
        reason = reason or model_reason(base) or generation_reason(given, base) or dropout_reason(model)
        if reason:
            return self._aside(reason)
        if model not in self._tried:
            self._tried[model] = _try_out(base, generate, given, ids.device)
        if self._tried[model]:
            return self._aside(self._tried[model])
        cache = _prefill(base, ids[firsts], mask[firsts])
        repeat_rows(cache, torch.tensor(rows, device=ids.device))
        return {cache_name(base): cache}

    def _aside(self, reason: str) -> dict[str, Any]:
        self._say(reason)
        return {}

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log = logger.warning if self._trainer.args.prefill_once else logger.info
            log("prefill_once steps aside: %s", reason)


def _distinct(ids: Tensor, mask: Tensor) -> tuple[list[int], list[int]]:
    """The first row of each distinct prompt, and for every row which of these it equals."""
    found: dict[tuple[int, ...], int] = {}
    firsts: list[int] = []
    rows: list[int] = []
    for index, row in enumerate(torch.cat([ids, mask.to(ids.dtype)], dim=1).tolist()):
        number = found.setdefault(tuple(row), len(found))
        if number == len(firsts):
            firsts.append(index)
        rows.append(number)
    return firsts, rows


def _prefill(base: PreTrainedModel, ids: Tensor, mask: Tensor) -> DynamicCache:
    """The cache of all tokens of left-padded prompts but the last, which generate runs itself.

    Through the model's own forward, not its backbone, since that is where mixed precision is switched on.

    Args:
        base: The model.
        ids: (D, P).
        mask: (D, P), 0 where a prompt is padded.
    """
    accepted = inspect.signature(base.forward).parameters
    cache = DynamicCache(config=base.config.get_text_config(decoder=True))
    inputs = {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1], cache_name(base): cache, "use_cache": True}
    if "position_ids" in accepted:
        inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, :-1]
    if "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = 1
    with torch.no_grad():
        base(**inputs)
    return cache


def _try_out(base: PreTrainedModel, generate: Any, given: GenerationConfig, device: torch.device) -> str | None:
    """What is wrong with prefilling this model once, on a tiny input: None if its logits are those of generate alone.

    Two prompts, one of them padded, in rows that are not adjacent. No global random numbers are used up.
    """
    config = copy.deepcopy(given)
    for name, value in _ONE_GREEDY_TOKEN.items():
        setattr(config, name, value)
    try:
        ids = torch.arange(10, device=device).reshape(2, 5) * 7 % base.get_input_embeddings().num_embeddings
        mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], device=device)
        rows = torch.tensor([1, 0, 1], device=device)
        inputs = {"input_ids": ids[rows], "attention_mask": mask[rows], "generation_config": config}
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            expected = generate(**inputs).logits[0].double()
            cache = _prefill(base, ids, mask)
            if cache.get_seq_length() != ids.shape[1] - 1 or other_layers(cache):
                return f"{type(base).__name__} does not fill a plain DynamicCache"
            first = cache.layers[0]  # under autocast, rotated keys may be float32 where values are not
            eps = max(torch.finfo(states.dtype).eps for states in (first.keys, first.values))
            repeat_rows(cache, rows)
            logits = generate(**inputs, **{cache_name(base): cache}).logits[0].double()
    except Exception as error:  # whatever a model does not support, stock generation remains
        return f"trying it on {type(base).__name__} raised {type(error).__name__}: {error}"
    if device.type != "cpu":
        eps = max(eps, 2.0**-10)  # float32 may be multiplied as TF32
    # A wrong mask or position moves logits by their own size, rounding through many layers by some hundred eps.
    if not (logits - expected).norm() <= eps**0.5 * expected.norm():
        return f"the logits of {type(base).__name__} come out different from those of a plain generate"
    return None
