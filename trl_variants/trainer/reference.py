"""The reference: the policy as it was handed over, frozen."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.models.utils import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head, create_model_from_path, get_config_model_id, use_adapter

from trl_variants.errors import VariantError
from trl_variants.trainer.fsdp import shard

__all__ = ["Reference"]

_ADAPTER = "reference"


class Reference:
    """The model that KL is measured against, in the cheapest form that is exact.

    - A model that is trained whole: a frozen copy of it. (TRL loads it anew by path, which is wrong for a model object
      whose weights were changed, and fails for one without a path.)
    - A new LoRA adapter, which starts as zero: the model with the adapter switched off.
    - Any other adapter: a frozen copy of the adapter, never optimized and never saved.

    It is scored without dropout, whatever mode the policy is in.
    """

    def __init__(self, trainer: Any, peft_config: Any | None) -> None:
        self._trainer = trainer
        self.model: nn.Module | None = None
        self.adapter: str | None = None
        policy = trainer.model
        if not is_peft_model(policy):
            self.model = _prepared(trainer, _frozen_copy(trainer, policy))
            return
        _refuse_trained_base(policy)
        if getattr(peft_config, "init_lora_weights", None) not in (True, "gaussian"):
            self.adapter = _copy_adapter(policy)

    @contextmanager
    def scored(self) -> Iterator[nn.Module]:
        """The model to score with, while the context lasts."""
        if self.model is not None:
            yield self.model
            return
        policy = self._trainer.model
        training = policy.training
        trained = [p for p in policy.parameters() if p.requires_grad]
        with use_adapter(self._trainer.accelerator.unwrap_model(policy), adapter_name=self.adapter):
            for parameter in trained:  # FSDP2 takes what is trained, and its dtype, from the first forward there is
                parameter.requires_grad_(True)
            policy.eval()
            try:
                yield policy
            finally:
                policy.train(training)


def _frozen_copy(trainer: Any, policy: nn.Module) -> nn.Module:
    args = trainer.args
    if is_deepspeed_zero3_enabled():
        # Parameters are partitioned already, so there is no whole copy to take: load it as TRL does.
        kwargs = {"dtype": policy.dtype, "trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
        reference = create_model_from_path(get_config_model_id(policy.config), **{**kwargs, "device_map": None})
    else:
        reference = copy.deepcopy(policy)
        # The copy's forward still runs the policy: TRL patched it as a method of that instance.
        reference.__dict__.pop("forward", None)
    add_fused_lm_head(reference, temperature=trainer.temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32)
    return reference.requires_grad_(False).eval()


def _prepared(trainer: Any, reference: nn.Module) -> nn.Module:
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(reference, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        sharding = shard if trainer.accelerator.is_fsdp2 else prepare_fsdp
        return sharding(reference, trainer.accelerator)
    return trainer.accelerator.prepare_model(reference, evaluation_mode=True)


def _refuse_trained_base(policy: Any) -> None:
    """Raise a `VariantError` if weights are trained that policy and reference share: the reference would move along."""
    own = f".{policy.active_adapter}"
    shared = [name for name, p in policy.named_parameters() if p.requires_grad and own not in name]
    if shared:
        raise VariantError(
            f"The base model is the reference, and {len(shared)} of its own weights are trained beside the adapter "
            f"({shared[0]}, ...). Use bias='none' and modules_to_save in the PEFT config, or kl: none."
        )


def _copy_adapter(policy: Any) -> str:
    """Add a frozen copy of the active adapter, and keep it out of what is saved."""
    trained = policy.active_adapter
    copied = _ADAPTER
    while copied in policy.peft_config:  # an earlier trainer of the same model left its own behind
        copied += "_"
    config = copy.deepcopy(policy.peft_config[trained])
    if getattr(config, "init_lora_weights", None) is not None:
        config.init_lora_weights = False  # some ways to initialize would change the base weights once more
    policy.add_adapter(copied, config)
    twins = []
    for name, parameter in policy.named_parameters():
        if f".{trained}." in name or name.endswith(f".{trained}"):
            twin = policy.get_parameter(name.replace(f".{trained}", f".{copied}"))
            twin.data.copy_(parameter.data)
            twins.append(twin)
    policy.set_adapter(trained)
    for twin in twins:
        twin.requires_grad_(False)
    policy.save_pretrained = partial(policy.save_pretrained, selected_adapters=[trained])
    return copied
