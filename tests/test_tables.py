"""The TOML tables of the package: what does not fit their schema is refused with file and field, and nothing reads one
before it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvasir.api.http import metric_definitions
from kvasir.api.offline import vllm_flags
from kvasir.errors import ConfigError
from kvasir.tables import Row, load

TABLES = {vllm_flags.FILE: vllm_flags.Table, metric_definitions.FILE: metric_definitions.Table}


class Part(Row):
    name: str
    sizes: tuple[int, ...] = ()


class Whole(Row):
    parts: tuple[Part, ...]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[parts]]\nname = 5\n", "Expected `str`, got `int` - at `$.parts[0].name`"),
        ('[[parts]]\nname = "a"\n[[parts]]\nname = "b"\nsize = 1\n', "unknown field `size` - at `$.parts[1]`"),
        ("[[parts]]\nsizes = [1]\n", "missing required field `name` - at `$.parts[0]`"),
        ('[[parts]]\nname = "a"\nsizes = [1, "2"]\n', "Expected `int`, got `str` - at `$.parts[0].sizes[1]`"),
        ('[[parts]]\nname = "a"\nsizes = [1.5]\n', "Expected `int`, got `float` - at `$.parts[0].sizes[0]`"),
        ("more = 1\nparts = []\n", "unknown field `more`"),
        ("parts = [", "Invalid value (at end of document)"),
    ],
)
def test_what_does_not_fit_is_refused_with_file_and_field(text, said, tmp_path):
    file = tmp_path / "table.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(file, Whole)
    assert str(file) in str(refused.value) and said in str(refused.value)


def test_a_missing_table_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="none.toml"):
        load(tmp_path / "none.toml", Whole)
    (tmp_path / "latin.toml").write_bytes(b'a = "\xe9"')
    with pytest.raises(ConfigError, match="latin.toml"):
        load(tmp_path / "latin.toml", Whole)


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.name)
def test_each_table_refuses_another_field_in_every_row(file, tmp_path):
    found = msgspec.toml.decode(file.read_bytes())
    load(file, TABLES[file])
    for name, rows in found.items():
        for at in (0, len(rows) - 1) if isinstance(rows, list) and isinstance(rows[0], dict) else ():
            changed = [dict(row) for row in rows]
            changed[at]["colour"] = "red"
            copy = tmp_path / file.name
            copy.write_text(_toml({**found, name: changed}))
            with pytest.raises(ConfigError, match=rf"colour` - at `\$\.{name}\[{at}\]"):
                load(copy, TABLES[file])


def _toml(tables: dict) -> str:
    """TOML in which each value is written inline, without the library that writes TOML."""
    return "".join(f"{key} = {_inline(value)}\n" for key, value in tables.items())


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_inline(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return msgspec.json.encode(value).decode()


METRIC = '[buckets]\nshort = [1]\n[[metrics]]\nname = "a"\nkind = "{kind}"\nsection = "Load"\ntext = "t"\n{more}\n'


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("gauge", 'reads = "num_runing"', "nothing is called reads = 'num_runing'"),
        ("gauge", 'buckets = "short"', "a histogram, and nothing else, has buckets, which are one of short"),
        ("histogram", "", "a histogram, and nothing else, has buckets"),
        ("histogram", 'buckets = "long"', "which are one of short"),
        ("dial", "", "Invalid enum value 'dial' - at `$.metrics[0].kind`"),
    ],
)
def test_a_metric_that_cannot_be_measured_is_refused(kind, more, said, tmp_path):
    file = tmp_path / "metrics.toml"
    file.write_text(METRIC.format(kind=kind, more=more))
    with pytest.raises(ConfigError) as refused:
        metric_definitions.read_definitions(file)
    assert str(file) in str(refused.value) and "$.metrics[0]" in str(refused.value) and said in str(refused.value)


def test_a_metric_is_measured_as_the_table_says(tmp_path):
    file = tmp_path / "metrics.toml"
    file.write_text(METRIC.format(kind="histogram", more='buckets = "short"'))
    assert metric_definitions.read_definitions(file)[0].buckets == (1.0,)


def test_every_function_is_read_by_a_metric():
    text = metric_definitions.FILE.read_text()
    assert not [name for name in metric_definitions.READS if f'reads = "{name}"' not in text]


def test_the_package_reads_no_table_when_it_is_imported():
    code = "import sys, kvasir; sys.exit('kvasir.tables' in sys.modules or 'tomllib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0
