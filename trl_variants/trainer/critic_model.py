"""The critic's modules: a value per token from a model of its own, or from a head on the policy's backbone.

V_t is read at the state that predicts token t, which has seen the tokens before t and not t itself. The state after the
last token gives one more value, from which a completion that was cut may bootstrap.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from trl.trainer.utils import get_config_model_id

from trl_variants.errors import VariantError
from trl_variants.trainer.forward import RowForward, backbone_of

__all__ = ["WEIGHTS", "SeparateCritic", "ValueHead", "build_separate", "captured_states", "check_backbone"]

#: Models whose head gives values: reward models, and the value models of other trainers.
_VALUED = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}
#: The trained weights of a critic, in a folder of a checkpoint.
WEIGHTS = "critic.safetensors"


class ValueHead(nn.Module):
    """V = w h + b, in float32 whatever the states' dtype is; a new head gives 0 everywhere."""

    def __init__(self, hidden_size: int, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            if weight is not None:
                self.weight.copy_(weight)
            if bias is not None:
                self.bias.copy_(bias)

    def forward(self, states: Tensor) -> Tensor:
        """(·, H) states to (·) values."""
        with torch.autocast(states.device.type, enabled=False):
            # The sum of one number drops its dimension; FSDP wants no view.
            return nn.functional.linear(states.float(), self.weight, self.bias).sum(-1)


class SeparateCritic(nn.Module):
    """A transformer of its own with a value head."""

    def __init__(self, backbone: nn.Module, head: ValueHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, layout: RowForward) -> Tensor:
        """(1, n) values at the states of a layout."""
        values: Tensor = self.head(layout.states(self.backbone).last_hidden_state)
        return values


@contextmanager
def captured_states(backbone: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the (1, n, H) states of every forward of the backbone, with their gradient.

    A hook on the backbone as a whole fires once per forward, also under gradient checkpointing: that recomputes layers.
    """
    states: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        states.append(output.last_hidden_state)

    handle = backbone.register_forward_hook(keep)
    try:
        yield states
    finally:
        handle.remove()


# -- where a separate critic starts from ----------------------------------------------------------------------------


def build_separate(trainer: Any, critic_model: str | PreTrainedModel | None, peft_config: Any) -> SeparateCritic:
    """Make the critic from ``critic_model``, else from the reward model, else from the policy.

    Args:
        trainer: Has the policy, the reward functions and the tokenizers.
        critic_model: A model, a folder or an id; a classifier with one label keeps its head.
        peft_config: The policy's; a critic from elsewhere gets adapters of the same kind.

    Raises:
        VariantError: The model has another tokenizer, sees later tokens or gives several numbers.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    tokenizer = trainer._tokenizer
    rewards = zip(trainer.reward_funcs, trainer.reward_processing_classes, strict=True)
    reward_models = [(model, theirs) for model, theirs in rewards if isinstance(model, nn.Module)]
    if isinstance(critic_model, str):
        where = f"critic_model {critic_model}"
        backbone, head = _from_path(critic_model, policy, trainer.args)
        _require_same_tokenizer(tokenizer, _tokenizer_at(critic_model, trainer.args), where)
    elif critic_model is not None:
        where = "critic_model"
        taken = {id(p) for model in (policy, *(model for model, _ in reward_models)) for p in model.parameters()}
        shared = any(id(p) in taken for p in critic_model.parameters())
        backbone, head = _parts(copy.deepcopy(critic_model) if shared else critic_model)
    elif reward_models:
        model, theirs = reward_models[0]
        where = f"the reward model {get_config_model_id(model.config) or type(model).__name__}"
        _require_same_tokenizer(tokenizer, theirs, where)
        backbone, head = _parts(copy.deepcopy(trainer.accelerator.unwrap_model(model)))
    else:
        where = "the policy"
        backbone, head = copy.deepcopy(backbone_of(policy)), None
    width = check_backbone(backbone, len(tokenizer), where)
    if not hasattr(policy, "peft_config"):
        backbone.requires_grad_(True)
    elif where != "the policy":
        backbone.requires_grad_(True)
        prefix = policy.get_base_model().base_model_prefix
        _add_adapter(backbone, peft_config or policy.peft_config[policy.active_adapter], prefix)
    return SeparateCritic(backbone, head or ValueHead(width))


def _from_path(path: str, policy: Any, args: Any) -> tuple[nn.Module, ValueHead | None]:
    options = {"trust_remote_code": args.trust_remote_code}
    weights = Path(path) / WEIGHTS
    if weights.is_file() and not (Path(path) / "config.json").is_file():
        raise VariantError(f"critic_model {path} holds the head of a shared critic, not a whole one.")
    config = AutoConfig.from_pretrained(path, **options)
    options |= {"dtype": policy.dtype, "attn_implementation": policy.config._attn_implementation}
    if weights.is_file():  # the critic of a checkpoint
        backbone = AutoModel.from_config(config, **options)
        saved = load_file(weights)
        critic = SeparateCritic(backbone, ValueHead(saved["head.weight"].shape[1]))
        try:
            critic.load_state_dict(saved)
        except RuntimeError as error:
            raise VariantError(f"critic_model {path} holds adapters only, not a whole critic.") from error
        return critic.backbone, critic.head
    architectures = config.architectures or ()
    for kind, auto in _VALUED.items():
        if any(name.endswith(kind) for name in architectures):
            return _parts(auto.from_pretrained(path, **options))
    return AutoModel.from_pretrained(path, **options), None


def _parts(model: Any) -> tuple[nn.Module, ValueHead | None]:
    """Backbone and head of a model; None for a head where it has none that gives values."""
    if hasattr(model, "peft_config"):
        raise VariantError("critic_model has adapters of its own. Merge them first: model.merge_and_unload().")
    if not type(model).__name__.endswith(tuple(_VALUED)):
        return model.base_model, None
    layer = getattr(model, "score", None) or getattr(model, "classifier", None)
    if not isinstance(layer, nn.Linear) or layer.out_features != 1:
        given = f"{layer.out_features} numbers" if isinstance(layer, nn.Linear) else "no single linear layer"
        raise VariantError(
            f"A critic starts from a classifier with one label; {type(model).__name__} has {given} for a "
            "head. Give critic_model: another model, or the policy's own."
        )
    return model.base_model, ValueHead(layer.in_features, layer.weight, layer.bias)


def _tokenizer_at(path: str, args: Any) -> Any | None:
    """The tokenizer of a folder or an id; None for a folder without one, where there is nothing to compare."""
    if Path(path).is_dir() and not any(Path(path).glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code)


def _require_same_tokenizer(ours: Any, theirs: Any | None, where: str) -> None:
    if theirs is not None and ours.get_vocab() != theirs.get_vocab():
        raise VariantError(
            f"The critic would start from {where}, whose tokenizer is not the policy's: it would read other tokens "
            "than the policy writes. Set critic_model to a model with the policy's tokenizer, such as the policy's "
            "own."
        )


def check_backbone(backbone: Any, vocabulary: int, where: str) -> int:
    """Return the width of a backbone's states; raise a `VariantError` if a critic cannot read it.

    A state must not depend on the tokens after it. Rounding may: experts are computed together for all tokens.
    """
    rows = backbone.get_input_embeddings().num_embeddings
    if rows < vocabulary:
        raise VariantError(
            f"The critic would start from {where}, which knows {rows} tokens; the policy's tokenizer has {vocabulary}."
        )
    device = backbone.get_input_embeddings().weight.device
    if device.type == "meta":
        raise VariantError(
            f"The critic would start from {where}, whose weights are on one process only. Set "
            "fsdp_cpu_ram_efficient_loading: false in the config of accelerate launch, or cpu_ram_efficient_loading in "
            "fsdp_config."
        )
    training = backbone.training
    backbone.eval()
    with torch.no_grad():
        first, second = (
            backbone(input_ids=torch.tensor([[0, 1, last]], device=device)).last_hidden_state[:, :2].float()
            for last in (0, 1)
        )
    backbone.train(training)
    if float((first - second).abs().max()) > 1e-3 * float(first.abs().max()):
        raise VariantError(
            f"The critic would start from {where}, which reads later tokens too. A value must not know what follows: "
            "give critic_model: a causal (decoder-only) model."
        )
    return int(first.shape[-1])


def _add_adapter(backbone: nn.Module, peft_config: Any, prefix: str) -> None:
    """Adapters of the same kind as the policy's; the rest is frozen."""
    from peft import inject_adapter_in_model

    config = copy.deepcopy(peft_config)
    config.modules_to_save = None
    config.inference_mode = False
    # What the config targets is named as inside the policy, whose backbone stands under a prefix.
    inside = nn.Module()
    inside.config = backbone.config
    inside.add_module(prefix, backbone)
    try:
        inject_adapter_in_model(config, inside)
    except ValueError as error:
        raise VariantError(
            f"The PEFT config finds nothing to adapt in the critic, a {type(backbone).__name__}: {error} Give "
            "critic_model: a model of the policy's kind."
        ) from error
