"""The demo: a small model learns by RL in front of your eyes, with any registered variant.

`run_demo` is what ``trl-variants demo`` runs; it needs no network and no GPU with its default settings.
"""

from __future__ import annotations

from trl_variants.demo.runner import run_demo
from trl_variants.demo.settings import DemoResult, DemoSettings, Evaluation, Reporter, Sample

__all__ = ["DemoResult", "DemoSettings", "Evaluation", "Reporter", "Sample", "run_demo"]
