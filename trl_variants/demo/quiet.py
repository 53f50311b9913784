"""Keeping libraries from talking over the demo: no progress bars and no advice, but every error."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_telemetry", "quiet"]

_LOGGERS = ("transformers", "trl", "accelerate", "datasets", "huggingface_hub", "torch", "trl_variants")


def no_telemetry() -> None:
    """TRL reports the start of every run to its makers unless told otherwise; a demo has nothing to report."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_TELEMETRY = True  # the variable is read once, at the first import


@contextmanager
def quiet() -> Iterator[None]:
    """Show only errors while this is in force, then restore what was shown before."""
    import datasets
    from transformers.utils import logging as transformers_logging

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    transformers_bars = transformers_logging.is_progress_bar_enabled()
    datasets_bars = not datasets.are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if transformers_bars:
            transformers_logging.enable_progress_bar()
        if datasets_bars:
            datasets.enable_progress_bars()
