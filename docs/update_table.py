"""Write the variant table, as `trl-variants table --markdown` prints it, between its markers in the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BETWEEN = re.compile(r"(<!-- variants: [^\n]*-->\n).*?(<!-- /variants -->)", re.DOTALL)


def table() -> str:
    """The table of the built-in variants."""
    command = [sys.executable, "-m", "trl_variants", "table", "--markdown"]
    environment = {"TRL_VARIANTS_PLUGINS": "none", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment}).stdout


def updated(text: str) -> str:
    """The README's text with the table in it; the variants that are TRL's own defaults are folded away."""
    header, rule, *rows = table().strip().splitlines()
    own = [row for row in rows if not row.startswith("| trl_")]
    trl = [row for row in rows if row.startswith("| trl_")]
    folded = ["", "<details><summary>TRL's own defaults</summary>", "", header, rule, *trl, "", "</details>"]
    lines = "\n".join([header, rule, *own, *folded])
    return BETWEEN.sub(lambda match: f"{match[1]}{lines}\n{match[2]}", text)


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
