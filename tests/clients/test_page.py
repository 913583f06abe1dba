"""The page about clients names the versions that are tested."""

import json
import re

from tests.clients.environment import FOLDER


def test_the_page_names_the_pinned_versions():
    pins = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", (FOLDER / "requirements.txt").read_text(), re.MULTILINE))
    pins["openai (npm)"] = json.loads((FOLDER / "package.json").read_text())["dependencies"]["openai"]
    page = (FOLDER.parents[1] / "docs" / "clients.md").read_text()
    clients = ("anthropic", "instructor", "langchain-anthropic", "langchain-openai", "litellm", "lm-eval", "openai")
    for name in (*clients, "openai (npm)"):
        assert re.search(rf"\b{re.escape(pins[name])}\b", page), f"{name} {pins[name]}"
