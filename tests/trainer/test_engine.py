"""A vLLM server whose log-probs are not those that were sampled from is warned about, as TRL does."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from trl_variants import resolve
from trl_variants.trainer.scoring import check_engine


def trainer(mode: str, **changes: Any) -> Any:
    """What `check_engine` looks at of a trainer that talks to a server; vLLM itself is not needed."""
    client = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": mode}})
    overrides = changes.pop("overrides", None)
    return SimpleNamespace(
        args=SimpleNamespace(**{"use_vllm": True, "vllm_mode": "server", **changes}),
        recipe=resolve("grpo", overrides),
        accelerator=SimpleNamespace(is_main_process=True),
        vllm_generation=SimpleNamespace(vllm_client=client),
    )


WARNED = "The vLLM server runs with --logprobs-mode raw_logprobs"


@pytest.mark.parametrize(
    ("mode", "changes", "warned"),
    [
        ("raw_logprobs", {}, True),
        ("processed_logprobs", {}, False),
        ("raw_logprobs", {"vllm_mode": "colocate"}, False),
        ("raw_logprobs", {"use_vllm": False}, False),
        ("raw_logprobs", {"overrides": {"token_weight": "none"}}, False),
    ],
)
def test_only_a_server_whose_log_probs_are_read_and_raw_is_warned_about(
    mode: str, changes: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from accelerate import PartialState

    PartialState()  # accelerate's logger asks which process it is in
    with caplog.at_level(logging.WARNING):
        check_engine(trainer(mode, **changes))
    assert (WARNED in caplog.text) == warned
