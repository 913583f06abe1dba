"""A pipe, a socket or a device in place of any file that is read from a folder of a stranger: an error that names it.

Reading a pipe waits for a writer. So each reading runs in a thread, and the test opens the other end when it waits.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvasir.errors import ConfigError
from kvasir.hooks.hook import CARD, read_set
from kvasir.kv.codecs.lowrank import DESCRIPTION, _describe
from kvasir.models import checkpoint
from kvasir.models.loader import load_model
from kvasir.models.peft import PeftFolder
from kvasir.models.pooling import read_pooling
from kvasir.models.sidecar import read_sidecar
from kvasir.models.tokenizer import Tokenizer
from kvasir.speculation.drafters.idlm import read_folder
from kvasir.speculation.heads import made

MODEL = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja", "kvasir.json"),
    *("hf_quant_config.json", "model.safetensors", "model.safetensors.packed", "model.safetensors.index.json"),
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"),
]


def load(folder: Path) -> None:
    """Read a model's folder as a start does, and what other checkpoints than this one have."""
    path = checkpoint.resolve(str(folder))
    Tokenizer.load(path)
    config = checkpoint.read_config(path)
    checkpoint.read_generation_config(path)
    read_sidecar(path, 100)
    read_pooling(path, config, "embed" if (path / "modules.json").exists() else "auto")
    load_model(path, config, device="cpu", dtype=torch.float32)


def model(folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint.resolve("nano"), folder / "model"))


def ended(read: Callable[[], object], pipe: Path) -> BaseException | None:
    """What a reading ends with. One that waits for the pipe fails the test."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            read()
            found.append(None)
        except BaseException as e:
            found.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive():
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
        pytest.fail(f"{pipe.name} was opened")
    return found[0]


@pytest.mark.parametrize("name", MODEL)
def test_a_pipe_in_a_model(tmp_path, name):
    folder = model(tmp_path)
    pipe = folder / name
    pipe.parent.mkdir(exist_ok=True)
    if pipe.parent != folder:
        (folder / "modules.json").write_text(
            json.dumps([{"type": f"sentence_transformers.models.{kind}", "path": kind and path}
                        for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"))])
        )  # fmt: skip
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    error = ended(lambda: load(folder), pipe)
    assert isinstance(error, ConfigError) and str(pipe) in str(error), error


def test_every_file_that_a_start_opens_is_among_them(tmp_path):
    """Negative control of the list above."""
    folder, opened = model(tmp_path), set()
    watching = True

    def watch(event: str, args: tuple) -> None:  # a hook of Python stays for ever, and is inert after this test
        if watching and event == "open" and isinstance(args[0], str) and args[0].startswith(str(folder)):
            opened.add(args[0].removeprefix(f"{folder}/"))

    sys.addaudithook(watch)
    load(folder)
    watching = False
    assert {"config.json", "model.safetensors.packed"} <= opened <= set(MODEL)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_other_kinds(tmp_path, kind, monkeypatch):
    folder = model(tmp_path)
    file = folder / "chat_template.json"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        monkeypatch.chdir(folder)  # names of sockets are short
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(file.name)
    with pytest.raises(ConfigError, match=f"{file} is a pipe"):
        load(folder)


@pytest.mark.parametrize("named", ["the file", "its folder"])
def test_a_pipe_as_a_gguf_file(tmp_path, named):
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    given = pipe if named == "the file" else tmp_path
    error = ended(lambda: checkpoint.resolve(str(given)), pipe)
    assert isinstance(error, ConfigError) and str(pipe) in str(error), error


OTHERS: dict[str, tuple[list[str], Callable[[Path], object]]] = {
    "adapter": (["adapter_config.json", "adapter_model.safetensors"], PeftFolder),
    "hooks": ([CARD, "hooks.safetensors"], lambda folder: read_set("x", folder)),
    "codec": ([DESCRIPTION], lambda folder: _describe(str(folder))),
    "idlm": (["config.json", "model.safetensors"], read_folder),
    "head": (["config.json", "model.safetensors"], lambda folder: made("medusa", folder)),
    "template": (["own.jinja"], lambda folder: Tokenizer.load(checkpoint.resolve("nano"), str(folder / "own.jinja"))),
}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, (names, _) in OTHERS.items() for name in names])
def test_a_pipe_in_another_folder(tmp_path, kind, name):
    pipe = tmp_path / name
    os.mkfifo(pipe)
    error = ended(lambda: OTHERS[kind][1](tmp_path), pipe)
    assert isinstance(error, ConfigError) and name in str(error), error


def test_a_folder_or_bytes_in_place_of_a_text(tmp_path):
    folder = model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").mkdir()
    with pytest.raises(ConfigError, match="chat_template.jinja is not a file"):
        Tokenizer.load(folder)
    (folder / "chat_template.jinja").rmdir()
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="chat_template.jinja is not text"):
        Tokenizer.load(folder)
