"""A component and a variant of one's own, in one file that nothing has to install.

trl-variants show  smooth_dapo --plugins examples/inline_component.py
trl-variants demo  --variant smooth_dapo --plugins examples/inline_component.py
trl-variants train --config my.yaml      # with  variant: smooth_dapo
                                         #       variant_plugins: [examples/inline_component.py]
"""

from __future__ import annotations

from trl_variants import ClipResult, Variant, component, hookimpl, use


@component(
    formula=r"-{width} \tanh\left( (\rho_{i,t} - 1) / {width} \right) \hat A_{i,t}",
    check=lambda p: p.width > 0 or "width must be above 0",
)
def smooth_clip(log_ratio, advantages, *, width: float = 0.2) -> ClipResult:
    """A clip without corners: the incentive to move away from the old policy fades instead of stopping."""
    moved = log_ratio.exp() - 1
    return ClipResult(loss=-width * (moved / width).tanh() * advantages)


@hookimpl
def register_clip_rules():
    return [smooth_clip]


@hookimpl
def register_variants():
    return [Variant(name="smooth_dapo", extends="dapo", clip_rule=use("smooth_clip", width=0.3))]


if __name__ == "__main__":
    from trl_variants.demo import DemoSettings, run_demo

    result = run_demo(DemoSettings(variant="smooth_dapo", plugins=[__file__]))
    print(f"greedy accuracy {result.before.greedy:.2f} -> {result.after.greedy:.2f}")
