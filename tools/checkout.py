"""Let a checkout that nobody installed have the commands of kvasir-lab: `python -m tools.checkout`.

Commands of an installed package are found by its entry points, which are in its metadata. A machine with a GPU often
has the repository and its dependencies, and no installed kvasir: there this writes the metadata beside the package,
where `pip install -e packages/lab` would. PYTHONPATH=src:packages/lab/src:. then finds everything.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / "packages" / "lab"
# Folders of a checkout that PYTHONPATH names.
PATHS = tuple(map(str, (ROOT / "src", LAB / "src", ROOT)))


def python_path(*first: str) -> str:
    """PYTHONPATH of a process that runs this checkout: ``first``, its folders, and those of this process."""
    return os.pathsep.join(filter(None, (*first, *PATHS, os.environ.get("PYTHONPATH"))))


def entry_points(project: Path = LAB / "pyproject.toml") -> str:
    """The text of entry_points.txt."""
    groups = tomllib.loads(project.read_text())["project"]["entry-points"]
    return "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in sorted(named.items()))
        for group, named in sorted(groups.items())
    )


def write(folder: Path = LAB / "src" / "kvasir_lab.egg-info") -> None:
    """Write the metadata, unless what is there has the entry points already."""
    file, text = folder / "entry_points.txt", entry_points()
    if file.is_file() and file.read_text().split() == text.split():
        return
    folder.mkdir(exist_ok=True)
    for name, content in (("PKG-INFO", "Metadata-Version: 2.1\nName: kvasir-lab\nVersion: 0\n"), (file.name, text)):
        new = folder / f"{name}.{os.getpid()}"
        new.write_text(content)
        new.replace(folder / name)  # whole, since the workers of a test run write it at once


if __name__ == "__main__":
    write()
