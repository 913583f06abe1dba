"""The page of model families, made from what each family declares.

``python -m tests.family_page`` writes docs/families.md. ``tests/test_family_page.py`` holds the page to the code.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from kvasir import technique
from kvasir.models.families import FAMILIES, find_family

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
HEAD = """# Model families

Families are chosen by the `model_type` of config.json. Each one is compared with `transformers` in fp32, on small
random configs with its fields on and off (`tests/models/test_parity.py`), but those that start with `kvasir_`, which
are our own, and `mimo`, whose layers are compared as those of Qwen 2. A field that would change the result and is not
served is refused by name at start-up, and so is a stored tensor that nobody reads.

Of a multimodal checkpoint the text model is served: the tensors under "left out" are not read, and start-up logs their
bytes. A request with an image gets status 400. Most layers of a hybrid (Qwen 3.5 and later, Qwen3-Next,
Kimi Linear) keep [a state](methods/recurrent.md) instead of keys.

`python -m tests.family_page` writes this page. [How to add a family](adding-a-technique.md#a-model-family).

| `model_type` | models | what is special | left out |
|---|---|---|---|
"""


def row(name: str) -> str:
    family = find_family(name)
    models, _, quirks = " ".join(inspect.getdoc(family).split()).partition(". ")
    quirks = quirks.removeprefix("Quirks: ").removeprefix("Quirk: ").replace("``", "`").strip()
    left_out = ", ".join(f"`{prefix}`" for prefix in getattr(family, "LEFT_OUT", ()))
    if hasattr(family, "left_out"):  # prefixes that follow from the config
        left_out = "; ".join(filter(None, (left_out, (inspect.getdoc(family.left_out) or "see the file").strip("."))))
    return f"| `{name}` | {models.replace('``', '`').strip('.')} | {quirks} | {left_out or 'nothing'} |"


def page() -> str:
    return HEAD + "\n".join(row(name) for name in technique.own(FAMILIES)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
