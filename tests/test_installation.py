"""How pages and messages say that kvasir is installed: never by its name from a package index, where the name belongs
to somebody else. And the bounds of its dependencies: those that `python -m tools.oldest` has passed with."""

from __future__ import annotations

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from kvasir.errors import EXTRAS, install
from tools import oldest

ROOT = Path(__file__).parent.parent
TEXT = {".md", ".py", ".toml", ".txt", ".sh", ".yaml", ".yml", ".html", ".js", ".json", ".cff", ""}
ROOMS = [f for room in ("docs", "deploy", "packages", "src", "tools") for f in sorted((ROOT / room).rglob("*"))]
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


# ------------------------------------------------------------------------------------------------------------- bounds


def test_every_dependency_has_a_bound_and_tests_or_a_reason():
    found = oldest.bounds()
    assert len(found) > 20 and set(found) == set(oldest.TESTS) | set(oldest.UNTESTED)
    assert not set(oldest.TESTS) & set(oldest.UNTESTED)
    missing = [file for files in oldest.TESTS.values() for file in files if not (ROOT / file).is_file()]
    assert not missing


def test_the_oldest_versions_have_passed():
    """The record of the last run is of the bounds that stand in pyproject.toml."""
    told = json.loads(oldest.RECORD.read_text())
    tested = {name: version for name, version in oldest.bounds().items() if name not in oldest.UNTESTED}
    assert told["passed with"] == tested, "run `make oldest`"


def test_a_dependency_without_a_bound_is_found(tmp_path):
    project = tmp_path / "project.toml"
    project.write_text('[project]\ndependencies = ["numpy>=1.26", "rich"]\noptional-dependencies = {dev = ["x"]}\n')
    with pytest.raises(ValueError, match="rich needs one lower bound"):
        oldest.bounds(project)
    project.write_text("[project]\ndependencies = [\"A_b>=1,<3; python_version > '3'\"]\noptional-dependencies = {}\n")
    assert oldest.bounds(project) == {"a-b": "1"}


def test_development_and_this_environment_keep_to_the_bounds():
    known = oldest.constraints()
    for name, least in oldest.bounds().items():
        if name in known:
            assert Version(known[name]) >= Version(least), name
        try:
            assert Version(metadata.version(name)) >= Version(least), name
        except metadata.PackageNotFoundError:
            continue


def test_versions_that_are_known_to_fail_are_refused():
    """What each lacks stands beside it. All were tried except jinja2 (CVE-2025-27516) and fla-core (its wheel)."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = [*needs["dependencies"], *(n for extra in needs["optional-dependencies"].values() for n in extra)]
    allowed = {r.name: r.specifier for r in map(Requirement, every) if r.specifier}
    for name, version in {
        "llguidance": "1.6.1",  # no keyword "overrides", so that every grammar is a TypeError
        "tokenizers": "0.15.0",  # cannot read merges as pairs
        "typer": "0.25.1",  # with the newest click the help of arguments is lost
        "huggingface-hub": "0.23.0",  # no huggingface_hub.errors.RepositoryNotFoundError
        "pydantic": "2.6.0",  # a request of completions is a KeyError
        "msgspec": "0.18.0",  # FrozenInstanceError while a dataclass is decoded
        "matplotlib": "3.6.0",  # no place "outside right upper" for a legend
        "jinja2": "3.1.5",  # templates leave the sandbox through |attr
        "fla-core": "0.5.2",  # no fla.backends
    }.items():
        assert version not in allowed[name], name
    assert "1.7.6" not in allowed["llguidance"], "its limit of white space is ignored"
