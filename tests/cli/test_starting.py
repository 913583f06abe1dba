"""A start is not silent, and who talks to the packaged model is told so."""

from __future__ import annotations

from kvasir.cli.starting import loading, packaged


def test_the_packaged_model_is_named(tmp_path):
    assert "'base' answers" in packaged("", "kvasir serve") and "kvasir serve PATH" in packaged("", "kvasir serve")
    assert "'nano' answers" in packaged("nano", "kvasir chat")
    assert packaged(str(tmp_path), "kvasir serve") == "" and packaged("org/model", "kvasir serve") == ""


def test_loading_is_said_where_there_is_no_terminal(capsys):
    with loading("org/model"):
        assert capsys.readouterr().err == "loading org/model\n"
    done = capsys.readouterr()
    assert done.err.startswith("loaded after ") and not done.out


def test_a_chat_says_what_answers_before_the_first_message(kvasir, monkeypatch):
    monkeypatch.setattr("kvasir.cli.chat._in_process", lambda config, stack: lambda messages, sampling: iter(()))
    done = kvasir("chat")
    assert "packaged model 'base' answers" in done.out and "loading the packaged model" in done.err
