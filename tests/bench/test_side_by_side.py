"""Studies side by side: each ends by its time, and the list of what a GPU has to measure fits its minutes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from kvasir.errors import ConfigError
from tools import side_by_side

LIST = Path(side_by_side.__file__).parent / "audit_gpu.toml"
STUDIES = """
[[together]]
name = "short"
seconds = 9
command = "echo told > OUT/short.txt"
[[together]]
name = "long"
seconds = 0.3
command = "echo part > OUT/long.txt; sleep 30; echo whole > OUT/long.txt"
[[together]]
name = "wrong"
seconds = 9
command = "exit 3"
[[alone]]
name = "first"
seconds = 9
command = "cat OUT/short.txt"
"""


def test_studies_end_by_their_time_and_keep_what_they_wrote(tmp_path):
    file, out = tmp_path / "list.toml", tmp_path / "out"
    file.write_text(STUDIES)
    assert side_by_side.main([str(file), str(out), "--part", "together"]) == 1
    told = {one["name"]: one for one in json.loads((out / "together.status.json").read_text())}
    assert {name: one["how"] for name, one in told.items()} == {"short": "done", "long": "cut off", "wrong": "failed"}
    assert told["wrong"]["status"] == 3
    assert (out / "long.txt").read_text() == "part\n"
    assert side_by_side.main([str(file), str(out), "--part", "alone"]) == 0
    assert (out / "first.log").read_text() == "told\n"
    assert side_by_side.main([str(file), str(out), "--part", "alone", "--seconds", "0"]) == 0
    assert [one["how"] for one in json.loads((out / "alone.status.json").read_text())] == ["no time left"]
    with pytest.raises(ConfigError, match="--only second: .* has first in alone"):
        side_by_side.main([str(file), str(out), "--part", "alone", "--only", "second"])


def test_every_study_of_the_list_ends_within_ten_minutes():
    told = tomllib.loads(LIST.read_text())
    assert set(told) == set(side_by_side.PARTS)
    for part in side_by_side.PARTS:
        studies = side_by_side.read(LIST, part, "")
        assert len({study.name for study in studies}) == len(studies)
        assert all(study.seconds <= 570 for study in studies)
        writes = [study for study in studies if not study.name.startswith("tests-")]
        assert all("OUT/" in study.command or "OUT " in study.command for study in writes)
