"""``kvasir lab show`` and ``kvasir lab tasks``, as a user runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvasir.technique import names
from kvasir_lab.forms import FORMS
from kvasir_lab.lookup import load_task


def test_all_tasks_are_listed_with_their_dials(kvasir, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = kvasir("lab", "tasks")
    assert done.code == 0 and "think=mixed" in done.out and "max_steps=16" in done.out
    assert all(name in done.out for name in (*names("kvasir_lab.tasks"), *FORMS))


@pytest.mark.parametrize("name", names("kvasir_lab.tasks"))
def test_samples_of_every_task_are_shown(kvasir, name):
    done = kvasir("lab", "show", name, "-n", "2", "--seed", "5", "--full")
    assert done.code == 0 and done.err == ""
    for problem in load_task(name).problems("test", 5, 2):
        assert problem.messages[-1]["content"] in done.out and problem.solution in done.out
    assert done.out.count("tokens · reply") == 2


@pytest.mark.parametrize("form", [f for f in FORMS if f != "solve"])
def test_samples_of_every_form_are_shown(kvasir, form):
    done = kvasir("lab", "show", "chain:max_steps=4", "--form", form, "--split", "validation", "-n", "1")
    assert (
        done.code == 0 and load_task(f"{form}/chain:max_steps=4").problems("validation", 7, 1)[0].solution in done.out
    )
    assert (
        "candidates " in done.out
        and done.out == kvasir("lab", "show", f"{form}/chain:max_steps=4", "--split", "validation", "-n", "1").out
    )


def test_labels_and_entropies_are_shown_and_long_texts_cut(kvasir):
    assert "linear · " in kvasir("lab", "show", "reflect").out
    assert "bits a sentence" in kvasir("lab", "show", "template").out
    cut = kvasir("lab", "show", "needle:min_length=4000,length=4000", "-n", "1").out
    assert "characters ..." in cut and len(cut) < 3000


@pytest.mark.parametrize(
    "args, named",
    [
        (["chian"], "Did you mean 'chain'"),
        (["chain", "--form", "agregate"], "Did you mean 'aggregate'"),
        (["chain", "--split", "tset"], "Did you mean 'test'"),
        (["chain:max_step=3"], "Did you mean 'max_steps'"),
        (["judge_one/chain", "--form", "refine"], "leave out --form"),
        (["story", "--form", "refine"], "no prompt forms"),
        (["chain", "-n", "0"], "-n"),
        ([], "TASK"),
        (["chain", "--seed", "-1"], "seed"),
    ],
)
def test_what_is_wrong_is_named(kvasir, args, named):
    done = kvasir("lab", "show", *args)
    assert done.code == 2 and named in done.err


@pytest.mark.parametrize("command", [("train", "drafter", "medusa", "--target", "nano"), ("lab", "train", "smoke")])
def test_a_place_that_cannot_be_written_is_told_before_the_work(kvasir, tmp_path, command):
    (tmp_path / "file").write_text("")
    done = kvasir(*command, "--out", tmp_path / "file" / "below", "--steps", 1)
    assert done.code == 2 and "cannot write" in done.err


def test_the_page_counts_the_tasks(kvasir):
    page = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()
    [count] = re.findall(r"(\d+) tasks, and two models", page)
    listed = names("kvasir_lab.tasks")
    assert int(count) == len(listed) and all(f"`{name}" in page for name in listed)


def test_a_conversion_prints_the_bytes_that_it_wrote(kvasir, tmp_path):
    out = tmp_path / "packed"
    done = kvasir("convert", "pack", "nano", out)
    assert done.code == 0, done.err
    stored = sum(file.stat().st_size for file in out.glob("*.safetensors*") if file.suffix != ".json")
    assert done.out.startswith(f"{out}: {stored / 2**20:,.1f} MiB, ")
    assert done.out.startswith(f"{out}: ") and stored < 0.8 * 2 * 2_400_000, "packed files are smaller than plain ones"
