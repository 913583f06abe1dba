"""The page on what is built of each method names every technique, and only tests and results that exist."""

from __future__ import annotations

import copy
import re
import tomllib

import pytest

from tests import status


def test_the_page_is_what_its_source_says():
    assert status.PAGE.read_text() == status.page(), "write it again: python -m tests.status"


def test_every_technique_has_a_row_and_what_rows_name_exists():
    assert not status.faults(status.entries())


def change(rows, key, **fields):
    rows[key] |= fields


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda rows: rows.pop("drafters/suffix"), "drafters/suffix has no row"),
        (lambda rows: rows.update({"codecs/int3": rows["codecs/int4"]}), "codecs/int3 is no technique"),
        (lambda rows: rows.update({"parsers/x": rows["codecs/int4"]}), "there is no group parsers"),
        (lambda rows: change(rows, "codecs/int4", result=["h200/nothing"]), "there is no result h200/nothing"),
        (lambda rows: change(rows, "codecs/int4", exact=["kv/test_none.py"]), "there is no test kv/test_none.py"),
        (
            lambda rows: change(rows, "codecs/int4", exact=["kv/test_codecs.py::test_no"]),
            "there is no test kv/test_cod",
        ),
        (lambda rows: change(rows, "codecs/int4", exact=[]), "one test at least"),
        (lambda rows: rows["codecs/int4"].pop("when"), "codecs/int4 needs"),
    ],
)
def test_what_is_missing_is_seen(spoil, told):
    rows = copy.deepcopy(status.entries())
    spoil(rows)
    assert any(told in fault for fault in status.faults(rows))


def test_no_page_is_made_of_an_invalid_row(monkeypatch, tmp_path):
    rows = status.entries()
    del rows["codecs/int4"]["when"]
    monkeypatch.setattr(status, "entries", lambda: rows)
    monkeypatch.setattr(status, "PAGE", tmp_path / "status.md")
    with pytest.raises(SystemExit, match="codecs/int4 needs"):
        status.main()
    assert not status.PAGE.exists()


def test_the_row_on_the_page_for_authors_is_valid():
    page = (status.ROOT / "docs" / "adding-a-technique.md").read_text()
    row = tomllib.loads(re.search(r"```toml\n(\[\"codecs/e5m2\"\].*?)```", page, re.S)[1])
    assert status.faults(status.entries() | row) == ["codecs/e5m2 is no technique"], "its file is not in the package"
    del row["codecs/e5m2"]["when"]
    assert len(status.faults(status.entries() | row)) == 2
