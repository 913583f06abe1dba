"""A pipe or a device in place of any file that an option names: an error that names it, and no wait for a writer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir import technique
from kvasir.api.protocols.responses_journal import ResponseJournal
from kvasir.api.scaling.scaling_store import RunStore
from kvasir.bench import case, merge, traces
from kvasir.cli import generate
from kvasir.config import read_toml
from kvasir.convert.calibrate import read_texts
from kvasir.errors import ConfigError, of_a_file
from kvasir.hooks.hook import read_set
from kvasir.models import advice, checkpoint
from kvasir.models.tokenizer import Tokenizer
from kvasir.scaling.journal import Journal
from kvasir.scaling.policy_table import PolicyTable
from kvasir.scaling.pool import Pool
from kvasir.speculation.drafter import Drafter
from kvasir_lab import export
from kvasir_lab.bench import pages
from kvasir_lab.drafters.data import load_texts
from kvasir_lab.healing.data import file_corpus
from tests.models.test_special_files import ended

# Option or argument -> name of the file, and how a command reads it.
OPTIONS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "--config": ("settings.toml", read_toml),
    "--input": ("prompts.jsonl", generate._read),
    "--chat-template": (
        "own.jinja",
        lambda file: Tokenizer.load(checkpoint.resolve("nano"), str(file)),
    ),
    "--drafter": ("own.py", lambda file: technique.find("kvasir.speculation.drafters", str(file), Drafter)),
    "serve --journal": ("journal", lambda file: ResponseJournal(str(file))),
    "--scaling-runs": (".lock", lambda file: RunStore(file.parent)),
    "solve --journal": ("journal", Journal),
    "solve --pool": ("pool.jsonl.gz", lambda file: Pool.load(file, {})),
    "policy table": ("table.json", PolicyTable.load),
    "bench case": ("case.toml", case.read),
    "bench trace": ("trace.csv", traces.read),
    "bench merge": ("result.json", merge.load),
    "bench pages": ("table.toml", lambda file: pages.definitions(file.parent)),
    "convert texts": ("texts.txt", lambda file: read_texts(file, checkpoint.resolve("nano"))),
    "convert --texts": ("texts.txt", lambda file: file_corpus(file, checkpoint.resolve("nano"))),
    "train --samples": ("samples.safetensors", lambda file: load_texts(file, "weights")),
    "train --target": ("config.json", lambda file: export.load(file.parent)),
    "an adapter as a model": ("adapter_config.json", lambda file: advice.merge_adapter(file.parent)),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_pipe(option, tmp_path):
    name, read = OPTIONS[option]
    pipe = tmp_path / name
    os.mkfifo(pipe)
    error = ended(lambda: read(pipe), pipe)
    assert isinstance(error, ConfigError) and str(pipe) in str(error), error


@pytest.mark.parametrize("option", [o for o in OPTIONS if o != "--scaling-runs"])
def test_a_device(option, tmp_path):
    """A read of it never ends either, and it fills the memory."""
    name, read = OPTIONS[option]
    device = tmp_path / name
    device.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=name):
        read(device)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_path_that_cannot_be_looked_at(option, tmp_path):
    """A name too long for the file system stands for every error of a path: to ask whether it exists raises, too."""
    name, read = OPTIONS[option]
    file = tmp_path / ("x" * 300) / name
    try:
        read(file)
    except ConfigError as e:
        assert str(file.parent) in str(e)
    except OSError as e:
        message = of_a_file(e)
        assert message is not None and str(file.parent) in message
    else:
        pytest.fail("no error")


@pytest.mark.parametrize("args", [["--hook", "x=@"], ["--enable-lora", "--lora-modules", "x=@"], ["--journal", "@"]])
def test_a_path_that_cannot_be_opened_is_one_message(args, tmp_path, kvasir):
    """The engine process meets some of them. A traceback of it is for faults of ours."""
    path = str(tmp_path / ("x" * 300))
    told = kvasir("serve", "nano", *[arg.replace("@", path) for arg in args])
    assert told.code == 2 and path in told.err and "Traceback" not in told.err, told.err


def test_files_may_begin_with_a_byte_order_mark(tmp_path):
    """Editors and shells of Windows write one."""
    settings = tmp_path / "settings.toml"
    settings.write_text("port = 1\n", encoding="utf-8-sig")
    assert read_toml(settings) == {"port": 1}
    assert generate._read(settings) == "port = 1\n"
    config = tmp_path / "config.json"
    config.write_text("{}", encoding="utf-8-sig")
    assert checkpoint.read_json(config) == {}


def test_the_option_is_named(tmp_path):
    pipe = tmp_path / "set.toml"
    os.mkfifo(pipe)
    for option, read in (("--config", read_toml), ("--hook x", lambda folder: read_set("x", folder))):
        with pytest.raises(ConfigError, match=f"{option}: {pipe} is a pipe"):
            read(pipe)


@pytest.mark.parametrize("place", ["/dev/full", "/dev/null", "a pipe", "a folder"])
def test_a_journal_that_keeps_nothing_is_refused_at_the_start(place, tmp_path, kvasir):
    where = Path(place) if place.startswith("/") else tmp_path / "journal"
    if place == "a pipe":
        os.mkfifo(where)
    elif place == "a folder":
        where.mkdir()
    told = kvasir("serve", "nano", "--journal", where)
    assert told.code == 2 and str(where) in told.err and "Name a file in a folder" in " ".join(told.err.split())
