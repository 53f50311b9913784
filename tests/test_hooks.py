"""Every hook, through a plugin: what it registers acts in a recipe. One test a hook, and a test that there is one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.components.common import close
from trl_variants import ClipResult, Variant, component, hookimpl, hookspecs, load_registry, resolve
from trl_variants.registry import Owner, Registry
from trl_variants.testing import make_batch, make_rollout, train_config

ROOT = Path(__file__).parent.parent


def plugin(hook: str, *items: Any) -> Registry:
    """A registry with the built-ins and one plugin that implements one hook."""

    def register() -> list[Any]:
        return list(items)

    register.__name__ = hook
    registry = load_registry("none")
    registry.add(SimpleNamespace(__name__="mine", **{hook: hookimpl(register)}), Owner("mine", "mine", "1.0"))
    return registry


def overridden(registry: Registry, variant: str = "dr_grpo", **overrides: Any) -> Any:
    return resolve(variant, overrides, registry)


def test_every_hook_has_a_test() -> None:
    hooks = {name for name in vars(hookspecs) if name.startswith("register_")}
    assert {name.removeprefix("test_hook_") for name in globals() if name.startswith("test_hook_")} == hooks


def test_hook_register_sample_filters() -> None:
    @component
    def even(lengths):
        return lengths % 2 == 0

    recipe = overridden(plugin("register_sample_filters", even), sample_filter="even")
    assert recipe.keep(make_rollout([1.0, 0.0], lengths=[1, 2])).tolist() == [False, True]


def test_hook_register_reward_shapers() -> None:
    @component
    def per_token(lengths):
        return -0.5 * lengths

    recipe = overridden(plugin("register_reward_shapers", per_token), "reinforce", reward_shaper="per_token")
    close(recipe.advantages(make_rollout([1.0, 1.0], lengths=[1, 2])).advantages, [0.5, 0.0])


def test_hook_register_kl_estimators() -> None:
    @component
    def twice(log_probs, ref_log_probs):
        return 2 * (log_probs - ref_log_probs)

    kl = {"estimator": "twice", "placement": "sequence_reward", "coef": 0.5}
    recipe = overridden(plugin("register_kl_estimators", twice), "reinforce", kl=kl)
    rollout = make_rollout([1.0], log_probs=[[-1.0]], ref_log_probs=[[-1.25]])
    close(recipe.advantages(rollout).advantages, [1 - 0.5 * 0.5])


def test_hook_register_kl_placements() -> None:
    @component
    def added(rewards, kl, kl_coef):
        return rewards + kl_coef * kl.sum(1)

    kl = {"estimator": "k1", "placement": "added", "coef": 0.5}
    recipe = overridden(plugin("register_kl_placements", added), "reinforce", kl=kl)
    rollout = make_rollout([1.0], log_probs=[[-1.0]], ref_log_probs=[[-1.5]])
    close(recipe.advantages(rollout).advantages, [1.25])


def test_hook_register_kl_controllers() -> None:
    @component
    def halving(kl_coef):
        return kl_coef / 2

    recipe = overridden(plugin("register_kl_controllers", halving), "grpo", kl={"controller": "halving"})
    assert recipe.advantages(make_rollout([1.0, 0.0])).next_kl_coef == 0.02


def test_hook_register_advantage_estimators() -> None:
    @component
    def negated(rewards):
        return -rewards

    recipe = overridden(plugin("register_advantage_estimators", negated), advantage_estimator="negated")
    close(recipe.advantages(make_rollout([1.0, 0.5])).advantages, [-1.0, -0.5])


def test_hook_register_advantage_normalizers() -> None:
    @component
    def doubled(advantages):
        return 2 * advantages

    recipe = overridden(plugin("register_advantage_normalizers", doubled), advantage_normalizer="doubled")
    close(recipe.advantages(make_rollout([1.0, 0.0])).advantages, [1.0, -1.0])


def test_hook_register_importance_ratios() -> None:
    @component
    def squared(log_probs, old_log_probs):
        return 2 * (log_probs - old_log_probs)

    recipe = overridden(plugin("register_importance_ratios", squared), importance_ratio="squared", token_weight="none")
    log_probs = torch.tensor([[1.1]]).double().log()  # the ratio 1.1 counts as 1.21, and is clipped at 1.2
    batch = make_batch(advantages=[1.0], log_probs=log_probs, old_log_probs=[[0.0]], max_length=1)
    close(recipe.loss(batch).loss, -1.2)


def test_hook_register_clip_rules() -> None:
    @component
    def linear(log_ratio, advantages):
        return ClipResult(loss=-(1 + log_ratio) * advantages)

    recipe = overridden(plugin("register_clip_rules", linear), clip_rule="linear")
    batch = make_batch(advantages=[2.0], log_probs=[[-1.0]], old_log_probs=[[-1.5]], max_length=1)
    close(recipe.loss(batch).loss, -3.0)


def test_hook_register_token_weights() -> None:
    @component
    def tenth(log_probs):
        return torch.full_like(log_probs, 0.1)

    recipe = overridden(plugin("register_token_weights", tenth), token_weight="tenth")
    close(recipe.loss(make_batch(advantages=[1.0], max_length=1)).loss, -0.1)


def test_hook_register_regularizers() -> None:
    @component
    def one(log_probs):
        return torch.ones_like(log_probs)

    recipe = overridden(plugin("register_regularizers", one), regularizer={"name": "one", "coef": 0.25})
    close(recipe.loss(make_batch(advantages=[1.0], max_length=1)).loss, -1.0 + 0.25)


def test_hook_register_loss_aggregators() -> None:
    @component
    def plain_sum(per_token_loss, mask):
        return (per_token_loss * mask).sum()

    recipe = overridden(plugin("register_loss_aggregators", plain_sum), loss_aggregator="plain_sum")
    close(recipe.loss(make_batch(advantages=[1.0, 1.0], lengths=[1, 3])).loss, -4.0)


def test_hook_register_reward_functions(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from trl_variants import hookimpl\n\n\n"
        "def first_token(completion_ids, **kwargs):\n    return [float(ids[0]) for ids in completion_ids]\n\n\n"
        "@hookimpl\ndef register_reward_functions():\n    return [first_token]\n"
    )
    plugins, rewards = [str(tmp_path / "mine.py")], {"reward_funcs": "first_token"}
    log = train_config(ROOT / "configs" / "reinforce.yaml", tmp_path / "run", steps=1, plugins=plugins, **rewards)
    # Ids of tokens, which no other reward gives, under the name by which the config asked for it.
    assert 1 < log[0]["reward"] <= 31 and log[0]["rewards/first_token/mean"] == log[0]["reward"]


def test_hook_register_variants() -> None:
    registry = plugin("register_variants", Variant(name="bare", extends="reinforce", advantage_normalizer="batch_std"))
    assert [bound.name for bound in resolve("bare", registry=registry).advantage_normalizers] == ["batch_std"]


@pytest.mark.parametrize("hook", [name for name in vars(hookspecs) if name.startswith("register_")])
def test_a_hook_that_returns_no_list_is_refused(hook: str) -> None:
    def register() -> None:
        return None

    with pytest.raises(Exception, match=f"mine 1.0: {hook} returned NoneType; it must return a list."):
        load_registry("none").add(
            SimpleNamespace(__name__="mine", **{hook: hookimpl(register)}), Owner("mine", "mine", "1.0")
        )
