"""Write what is generated in the author's guide between its markers.

That is the list of plugins, what each hook's components may name, and the contract.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from trl_variants.conformance import PROPERTIES
from trl_variants.slots import SLOTS, Slot

GUIDE = Path(__file__).parent.parent / "plugins" / "README.md"


def inputs(slot: Slot) -> str:
    """The inputs of a slot with their shapes, as a table."""
    rows = [f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |" for name, meaning in slot.meanings.items()]
    return "\n".join(["| it may name | |", "|---|---|", *rows])


def plugins() -> str:
    """The plugins of this repository, each with its description."""
    rows = []
    for path in sorted(GUIDE.parent.glob("*/pyproject.toml")):
        found = re.search(r'^description = "(.*)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
        assert found, path
        about = re.sub(",? for trl-variants", "", found[1])
        rows.append(f"| [{path.parent.name}]({path.parent.name}) | {about} |")
    return "\n".join(["| plugins of this repository | |", "|---|---|", *rows])


def contract() -> str:
    """The properties, with the first line of what each says of itself."""
    lines = ((check.__name__, (inspect.getdoc(check) or "").partition("\n")[0]) for check in PROPERTIES)
    return "\n".join(f"- `{name}`: {said}" for name, said in lines)


def updated(text: str) -> str:
    """The guide with everything that is generated in it."""
    parts = {f"inputs: {slot.name}": inputs(slot) for slot in SLOTS.values()} | {
        "plugins": plugins(),
        "properties": contract(),
    }
    for name, part in parts.items():
        end = name.partition(":")[0]
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{end} -->)", re.DOTALL)
        text = between.sub(lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text, count=1)
    return text


if __name__ == "__main__":
    GUIDE.write_text(updated(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
