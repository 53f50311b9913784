"""``trl-variants new-plugin``: a distribution of one's own, whose tests pass as it is written."""

from __future__ import annotations

import keyword
import re
from importlib import resources
from pathlib import Path
from string import Template

from trl_variants import __version__
from trl_variants.cli.output import print_raw
from trl_variants.errors import VariantError
from trl_variants.registry import load_registry

__all__ = ["run"]

_PREFIX = "trl-variants-"
#: Where each template goes; names may hold what templates may.
_FILES = {
    "pyproject.toml": "pyproject.toml",
    "module.py": "$module.py",
    "config.yaml": "configs/$plugin.yaml",
    "test.py": "tests/test_$plugin.py",
    "README.md": "README.md",
    "gitignore": ".gitignore",
}


def run(name: str, directory: Path | None) -> None:
    """Write the distribution, and say what to do with it.

    Args:
        name: ``mine`` or ``trl-variants-mine``.
        directory: Where; a folder of the distribution's name here by default.
    """
    words = _words(name)
    folder = directory or Path(words["distribution"])
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise VariantError(f"{folder} exists already. Choose another NAME, or --directory.")
    for template, place in _FILES.items():
        path = folder / Template(place).substitute(words)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (resources.files("trl_variants") / "templates" / f"{template}.txt").read_text(encoding="utf-8")
        path.write_text(Template(text).substitute(words), encoding="utf-8")
    places = "\n".join(f"  {folder / Template(place).substitute(words)}" for place in _FILES.values())
    print_raw(
        f"{words['distribution']}: one component and one variant, with tests that pass.\n{places}\n\n"
        f"Next:\n  pip install --editable '{folder}[test]'\n  python -m pytest {folder}\n"
        f"  trl-variants show {words['plugin']}"
    )


def _words(name: str) -> dict[str, str]:
    """What the templates are filled with."""
    plain = re.sub(r"[-_.\s]+", "-", name.strip().lower()).removeprefix(_PREFIX).strip("-")
    plugin = plain.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", plugin) or keyword.iskeyword(plugin):
        near = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
        near = near if near[:1].isalpha() and not keyword.iskeyword(near) else f"my-{near}".strip("-")
        raise VariantError(
            f"'{name}' is no name of a plugin: letters, digits and dashes, a letter first. '{near}' is one."
        )
    registry = load_registry("none")
    if plugin in registry.variants:
        raise VariantError(
            f"There is a variant '{plugin}' already, and the plugin's would have its name. Choose another."
        )
    return {
        "distribution": f"{_PREFIX}{plain}",
        "module": f"trl_variants_{plugin}",
        "plugin": plugin,
        "title": plain.replace("-", " ").capitalize(),
        "version": __version__,
    }
