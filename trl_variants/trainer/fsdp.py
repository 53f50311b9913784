"""FSDP2: models beside the policy sharded as accelerate shards it, and tensors of which no rank holds all."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

__all__ = ["exact_outputs", "gathered", "load_named_state", "named_state", "placed", "reshard", "shard"]


def exact_outputs(accelerator: Any) -> None:
    """Let FSDP2 hand out what models compute as it is; call it before one is sharded.

    Under mixed precision accelerate has it rounded to the lower precision: log-probs to 8 bits, a ratio of two to 3%.
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin and plugin.mixed_precision_policy:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)


def shard(module: nn.Module, accelerator: Any) -> nn.Module:
    """Shard a module in place over the ranks, layer by layer, by the settings for the policy.

    Its layers are its own kind's: accelerate keeps those of the first model it meets, which a critic need not share. A
    module that is no model of transformers stays out of mixed precision.

    Args:
        module: The module, whole and equal on every rank.
        accelerator: The trainer's.
    """
    from accelerate.utils import fsdp2_prepare_model

    state = accelerator.state
    policys = state.fsdp_plugin
    state.fsdp_plugin = plugin = copy.copy(policys)
    plugin.transformer_cls_names_to_wrap = None
    if not isinstance(module, PreTrainedModel):
        plugin.mixed_precision_policy = None
        plugin.cpu_ram_efficient_loading = False  # which accelerate does for models of transformers only
    try:
        sharded: nn.Module = fsdp2_prepare_model(accelerator, module)
    finally:
        state.fsdp_plugin = policys
    return sharded


def reshard(module: nn.Module) -> None:
    """Give up the gathered weights that a forward without a backward has left, so that the parameters are shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def gathered(tensors: Iterable[tuple[str, Any]], *, keep: bool) -> dict[str, Any]:
    """Whole tensors on the CPU, by name; every rank must take part.

    Args:
        tensors: Names and tensors, sharded or not; anything else is kept as it is.
        keep: Whether this rank wants them.
    """
    found = {}
    for name, value in tensors:  # one at a time, so that no more than one is whole on a device
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            found[name] = whole.detach().cpu().contiguous() if isinstance(whole, Tensor) else whole
    return found


def placed(value: Any, like: Tensor) -> Any:
    """A whole tensor, sharded where ``like`` is and has its shape; every rank must take part."""
    if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value


# -- optimizers -----------------------------------------------------------------------------------------------------
# torch.distributed.checkpoint has this too, but steps an optimizer that has no state yet, and fails on plain SGD.


def named_state(optimizer: Optimizer, names: list[str], *, keep: bool) -> dict[str, Any]:
    """An optimizer's state by the names of its parameters, whole, so that it fits any number of ranks.

    Every rank must take part.

    Args:
        optimizer: The optimizer.
        names: Of its parameters, in its order.
        keep: Whether this rank wants the tensors.
    """
    state = optimizer.state_dict()
    return {
        "state": {names[i]: gathered(state["state"][i].items(), keep=keep) for i in sorted(state["state"])},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]],
    }


def load_named_state(optimizer: Optimizer, names: list[str], state: dict[str, Any]) -> bool:
    """Take over what `named_state` gave, and return True; False where it is of other parameters."""
    groups = state["param_groups"]
    if [name for group in groups for name in group["params"]] != names:
        return False
    numbers = {name: i for i, name in enumerate(names)}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = {
        numbers[name]: {key: placed(value, parameters[numbers[name]]) for key, value in values.items()}
        for name, values in state["state"].items()
    }
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    optimizer.load_state_dict({"state": own, "param_groups": groups})
    return True
