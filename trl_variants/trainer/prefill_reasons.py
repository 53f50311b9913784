"""Where prefill once steps aside, and why: each function gives the reason in words, or None."""

from __future__ import annotations

import copy
import inspect
import os
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation.utils import GenerationMode

__all__ = [
    "cache_name",
    "config_reason",
    "dropout_reason",
    "engine_reason",
    "generation_reason",
    "inner_model",
    "model_reason",
    "other_layers",
    "sharding_reason",
]

#: Adapters that are layers inside the model. (Prompt learning puts a cache of its own in front of the prompt.)
_ADAPTERS = {"LORA", "ADALORA", "LOHA", "LOKR", "OFT", "BOFT", "VERA", "IA3", "HRA", "LN_TUNING", "FOURIERFT"}


def config_reason(args: Any) -> str | None:
    """Why a config rules prefill once out, whatever the model; None where it does not.

    Args:
        args: A `VariantConfig`.
    """
    settings = {"do_sample": True, "cache_implementation": args.cache_implementation, **(args.generation_kwargs or {})}
    return engine_reason(args) or _settings_reason(GenerationConfig(**settings))


def engine_reason(args: Any) -> str | None:
    if args.use_vllm:
        return "vLLM generates (use_vllm), and has a prefix cache of its own"
    if args.use_transformers_continuous_batching:
        return "generation is batched continuously (use_transformers_continuous_batching)"
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return "FSDP shards the model"
    zero = getattr(args, "hf_deepspeed_config", None)
    return "DeepSpeed ZeRO-3 shards the model" if zero is not None and zero.is_zero3() else None


def sharding_reason(accelerator: Any) -> str | None:
    """Ranks would run different numbers of forwards, each of which gathers the parameters from all ranks."""
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        return "FSDP shards the model"
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return "DeepSpeed ZeRO-3 shards the model" if plugin is not None and plugin.zero_stage == 3 else None


def inner_model(model: Any) -> tuple[Any, str | None]:
    """The transformers model whose forward `generate` calls, and what speaks against an adapter around it."""
    if isinstance(model, PreTrainedModel):
        return model, None
    config = getattr(model, "active_peft_config", None)
    if config is None:
        return model, f"{type(model).__name__} is neither a transformers model nor one with a single adapter"
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning or kind not in _ADAPTERS:
        return model, f"the adapter ({kind}) is not made of layers inside the model"
    if getattr(config, "alora_invocation_tokens", None) is not None:
        return model, "the adapter (aLoRA) begins at a token of the prompt"
    return model.get_base_model(), None


def model_reason(base: PreTrainedModel) -> str | None:
    config = base.config
    if config.is_encoder_decoder:
        return "an encoder-decoder model has no prompt in its decoder"
    text = config.get_text_config(decoder=True)
    if text is not config:
        return f"{type(base).__name__} is multimodal"
    if cache_name(base) not in inspect.signature(base.forward).parameters:
        return f"{type(base).__name__} takes no key-value cache"
    other = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention"})
    other = other or sorted({type(layer).__name__ for layer in other_layers(DynamicCache(config=text))})
    if other:
        return f"{type(base).__name__} has layers that do not keep every token ({', '.join(other)})"
    scaled = rope_types(text) & {"dynamic", "longrope"}
    return f"rotary positions ({scaled.pop()}) depend on the length of what was run" if scaled else None


def other_layers(cache: DynamicCache) -> list[Any]:
    return [layer for layer in cache.layers if type(layer) is not DynamicLayer]


def rope_types(config: Any) -> set[str]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    levels = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # by kind of layer, in some models
    return {str(level.get("rope_type", level.get("type"))) for level in levels}


def generation_reason(given: GenerationConfig, base: PreTrainedModel) -> str | None:
    """As `_settings_reason`, with what is left open filled in from the model, as generate does it."""
    merged = copy.deepcopy(given)
    for name, value in base.generation_config.to_dict().items():
        if getattr(merged, name, None) is None:
            setattr(merged, name, value)
    return _settings_reason(merged)


def _settings_reason(config: GenerationConfig) -> str | None:
    if config.cache_implementation is not None:
        return f"cache_implementation is {config.cache_implementation}"
    if config.use_cache is False:
        return "use_cache is false"
    if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"generation is by {config.get_generation_mode().value}, neither sampling nor greedy"
    if (config.num_return_sequences or 1) > 1:
        return "num_return_sequences is above 1"
    for name in ("prefill_chunk_size", "return_dict_in_generate", "token_healing"):
        if getattr(config, name, None):
            return f"{name} is set"
    return None


def dropout_reason(model: nn.Module) -> str | None:
    """Dropout draws anew for every row, and stock generation lets it: rows of one prompt then have unlike caches."""
    for module in model.modules():
        if module.training and (
            (isinstance(module, _DropoutNd) and module.p > 0)
            or any("dropout" in name and isinstance(p, float) and p > 0 for name, p in vars(module).items())
        ):
            return "dropout is on while the policy generates (disable_dropout: true switches it off)"
    return None


def cache_name(base: PreTrainedModel) -> str:
    """What forward calls its key-value cache: ``past_key_values`` until transformers 5.23, then ``cache``."""
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
