"""Learned weights while serving: `eagle`, which keeps keys of its own, changes versions under load, and the last
accepted ones lie in ``--learn-out`` as a drafter's folder; and where the trainer runs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from kvasir.engine.drafts.learning import device_of
from kvasir.errors import ConfigError
from kvasir.speculation import heads
from tests.learn.helpers import candidate, learner, offer, staged, weights_of
from tests.speculation.helpers import outputs, plain, requests


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eagle_changes_versions_every_seven_steps_and_no_token(temperature, monkeypatch, tmp_path):
    """Keys that an old version has written stay in the lanes."""
    d = learner(monkeypatch, "eagle:model=new", max_draft_tokens=4)
    learning, real, count = d.engine.learning, d.step, [0]

    def step(preempt: bool = False) -> None:
        real(preempt)
        count[0] += 1
        if count[0] % 7 == 0:
            learning._gate = None
            learning._versions.refuse()
            kind = "random" if count[0] % 2 else "same"
            offer(d, candidate(d, tmp_path / str(count[0]), count[0], weights_of(d, kind)))
            staged(d)
            assert learning._versions.serving == count[0]

    d.step = step
    d.run(requests(d, temperature, 2, max_tokens=24), gap=2, preempt_every=5)
    assert outputs(d) == plain(temperature, 2, max_tokens=24) and learning._stats.swaps >= 4
    d.close()


def test_the_last_accepted_weights_lie_in_the_folder_that_was_named(monkeypatch, tmp_path, caplog):
    """They are weights alone, and a drafter starts from them. What is learned from all is said in the log."""
    out = tmp_path / "deep" / "learned"
    d = learner(monkeypatch, learn_out=str(out))
    assert "may tell one tenant what others wrote" in caplog.text
    learning = d.engine.learning
    assert not out.exists(), "nothing was learned yet"
    for number, kind in enumerate(("same", "random"), 1):
        weights = weights_of(d, kind)
        offer(d, candidate(d, tmp_path / str(number), number, weights))
        staged(d)
        learning._decide(True)
        learning._threads.submit(lambda: None).result(10)
    head, target = heads.read("medusa", out)
    found = dict(head.named_parameters())
    assert all(torch.equal(found[name], weights[name].to(torch.bfloat16).float()) for name in weights)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in out.parent.iterdir()] == ["learned"], "no half-written folders stay"
    assert heads.check_target(out, "medusa", target, heads.facts_of(d.engine.runner.model))
    d.close()


def test_a_full_disk_keeps_the_weights_that_were_there_and_the_next_are_kept(monkeypatch, tmp_path, caplog):
    out = tmp_path / "learned"
    d = learner(monkeypatch, learn_out=str(out))
    learning, weights = d.engine.learning, weights_of(d)
    learning._keep(weights)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    write, rename = Path.write_bytes, Path.rename

    def full(self, data):
        write(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    def read_only(self, target):
        if self.name.endswith(".part"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return rename(self, target)

    for name, fault in (("write_bytes", full), ("rename", read_only)):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, fault)
            caplog.clear()
            learning._keep(weights_of(d, "random"))
        assert [r.getMessage()[:39] for r in caplog.records] == ["the learned weights cannot be kept: [Er"]
        assert {file.name: file.read_bytes() for file in out.iterdir()} == before
        for folder in (tmp_path, learning._folder):
            assert not [path for path in folder.iterdir() if path.suffix in (".part", ".old")], "no half is left"
    learning._keep(weights_of(d, "random"))
    assert {file.name: file.read_bytes() for file in out.iterdir()} != before
    d.close()


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--learn-out: no file can be made in .*file: File exists. Name a folder"):
        learner(monkeypatch, learn_out=str(tmp_path / "file" / "learned"))


@pytest.mark.parametrize(
    "wanted, count, own, device",
    [
        ("auto", 2, 0, "cuda:1"),
        ("auto", 2, 1, "cuda:0"),
        ("auto", 1, 0, "same"),
        ("cuda:0", 2, 0, "same"),
        ("cuda:1", 2, 0, "cuda:1"),
        ("same", 2, 0, "same"),
        ("cpu", 2, 0, "cpu"),
    ],
)
def test_the_trainer_takes_a_second_gpu_or_shares_the_first(wanted, count, own, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: own)
    assert device_of(wanted, torch.device("cuda")) == device_of(wanted, torch.device("cuda", own)) == device
