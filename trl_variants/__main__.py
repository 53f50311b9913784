"""``python -m trl_variants``: the same as the command ``trl-variants``."""

from __future__ import annotations

from trl_variants.cli.main import app

if __name__ == "__main__":
    app(prog_name="trl-variants")
