"""``trl-variants new-plugin``: a distribution of one's own, whose tests pass as it is written."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template

from trl_variants import __version__
from trl_variants.cli.output import load, print_raw
from trl_variants.errors import VariantError
from trl_variants.firstparty import FIRST_PARTY

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
    files = {Template(place).substitute(words): _filled(template, words) for template, place in _FILES.items()}
    try:
        if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
            raise VariantError(f"{folder} exists already. Choose another NAME, or --directory.")
        for place, text in files.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(text, encoding="utf-8")
    except OSError as error:
        raise VariantError(f"The plugin cannot be written into {folder}: {error}") from error
    places = "\n".join(f"  {folder / place}" for place in files)
    print_raw(
        f"{words['distribution']}: one component and one variant, with tests that pass.\n{places}\n\n"
        f"Next:\n  pip install --editable '{folder}[test]'\n  python -m pytest {folder}\n"
        f"  trl-variants show {words['plugin']}"
    )


def _words(name: str) -> dict[str, str]:
    """What the templates are filled with."""
    plain = re.sub(r"[-_.\s]+", "-", name.strip().lower()).removeprefix(_PREFIX).strip("-")
    plain = "" if plain == _PREFIX.strip("-") else plain  # nothing of its own
    plugin = plain.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", plugin) or keyword.iskeyword(plugin):
        near = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
        near = near if near[:1].isalpha() and not keyword.iskeyword(near) else f"my-{near}".strip("-")
        raise VariantError(
            f"'{name}' is no name of a plugin: letters, digits and dashes, a letter first. '{near}' is one."
        )
    words = {
        "distribution": f"{_PREFIX}{plain}",
        "module": f"trl_variants_{plugin}",
        "plugin": plugin,
        "title": plain.replace("-", " ").capitalize(),
        "requires": _compatible(__version__),
    }
    _require_free(words)
    return words


def _require_free(words: Mapping[str, str]) -> None:
    """Refuse what could not be loaded beside the built-ins, this project's plugins and what is installed."""
    plugin, distribution, registry = words["plugin"], words["distribution"], load(None)
    near = f"'my-{distribution.removeprefix(_PREFIX)}' is another name."
    for owner in registry.plugins[1:]:
        if owner.plugin == plugin or owner.distribution == distribution:
            raise VariantError(f"The plugin '{owner.plugin}' of {owner} is installed already. {near}")
    if distribution in FIRST_PARTY.values():
        raise VariantError(f"{distribution} is a plugin of this project. {near}")
    for kind, name, known in (
        ("variant", plugin, registry.variants),
        ("clip_rule", f"{plugin}_clip", registry.components("clip_rule")),
    ):
        if name in known or name in FIRST_PARTY:
            whose = registry.owner(kind, name) if name in known else FIRST_PARTY[name]
            raise VariantError(f"'{name}' is a name of {whose} already, and the plugin's {kind} would have it. {near}")


def _filled(template: str, words: Mapping[str, str]) -> str:
    text = (resources.files("trl_variants") / "templates" / f"{template}.txt").read_text(encoding="utf-8")
    return Template(text).substitute(words)


def _compatible(version: str) -> str:
    """The versions of trl-variants that a plugin written for this one takes.

    Example:
        >>> _compatible("0.1.3"), _compatible("2.4.0")
        ('>=0.1,<0.2', '>=2.4,<3')
    """
    major, minor = map(int, version.split(".")[:2])
    return f">={major}.{minor},<{major + 1 if major else f'0.{minor + 1}'}"
