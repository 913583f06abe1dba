"""How pages and messages say that kvasir is installed: never by its name from a package index, where the name belongs
to somebody else."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kvasir.errors import EXTRAS, install

ROOT = Path(__file__).parent.parent
TEXT = {".md", ".py", ".toml", ".txt", ".sh", ".yaml", ".yml", ".html", ".js", ".json", ".cff", ""}
ROOMS = [f for room in ("docs", "deploy", "src", "tools") for f in sorted((ROOT / room).rglob("*"))]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
FILES = [
    f for f in [*PAGES, *ROOMS] if f.is_file() and f.suffix in TEXT and ".egg-info" not in f.parent.name
]  # a build writes egg-info
INSTALLER = r"(?:pip3?|pipx|uv|uvx|conda|mamba|poetry|pdm|easy_install)"
OPTIONS = r"(?:\s+(?:-\S+|pip|tool))*"
COMMAND = re.compile(rf"\b(?:{INSTALLER}{OPTIONS}\s+(?:install|add|run|inject)|uvx)\b([^\n`]*)")
REQUIREMENT = r"kvasir(?:\[[\w, -]*\])?(?:\s*[=<>~!]=?[^\s'\"]*)?"
EXTRA = re.compile(r"\bkvasir\[[a-z][\w, -]*\](?!\s*@)")


def by_name(text: str) -> list[str]:
    """Places of ``text`` that install kvasir by its name from an index."""
    found = [m.group() for m in EXTRA.finditer(text)]
    for command in COMMAND.finditer(text):
        if re.search(rf"(?:^|[\s'\"]){REQUIREMENT}(?=$|[\s'\"),.;:](?!\s*@))(?!\s*@)", command.group(1).split("#")[0]):
            found.append(command.group())
    return found


@pytest.mark.parametrize(
    "text",
    [
        "pip install kvasir",
        "python -m pip install -q kvasir",
        "pip install -U 'kvasir'",
        'pip install "kvasir[gguf]"',
        "needs kvasir[gguf]",
        "uv pip install kvasir==1.0",
        "uv add kvasir",
        "uvx kvasir serve",
        "pipx run kvasir",
        "Install it: pip install torch kvasir.",
    ],
)
def test_an_installation_by_name_is_found(text):
    assert by_name(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install .",
        "pip install '.[gguf]'  # kvasir",
        "pip install kvasir-0.1.0-py3-none-any.whl",
        "pip install dist/kvasir-0.1.0-py3-none-any.whl",
        "pip install 'kvasir @ git+https://example.org/kvasir'",
        "pip install 'kvasir[gguf] @ https://example.org/kvasir.whl'",
        "kvasir['metrics'] and kvasir[0]",
        "podman run kvasir",
    ],
)
def test_other_installations_are_left_alone(text):
    assert not by_name(text)


def test_nothing_says_to_install_by_a_name_that_is_not_ours():
    found = {str(f.relative_to(ROOT)): places for f in FILES if (places := by_name(f.read_text(errors="replace")))}
    assert not found, "name the package that is missing, the checkout, a wheel or a URL"


def test_messages_name_the_packages_of_their_extra():
    """Each extra of the package but that of developers, with the names that ``pip install`` takes."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {
        name: [re.match(r"[\w-]+", requirement).group() for requirement in needs]
        for name, needs in extras.items()
        if name != "dev"
    }
    assert {name: packages.split() for name, packages in EXTRAS.items()} == wanted
    assert install("gguf") == "pip install gguf"
