"""A dead engine process leaves a dump with its last steps, and nothing that a client wrote."""

from __future__ import annotations

import json
import os
import signal
import stat

import pytest

from kvasir.client import crash_dump
from kvasir.types import Grammar
from tests.client.helpers import Reader, engine, request, run, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
# Numbers that stand for what a client wrote: token ids, texts and names.
TOKEN, TEXT = 123_454_321, "the client's own words"


def dumps(folder) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{crash_dump.PREFIX}*"))]


def secret(number: int, **more):
    wanted = request(
        number,
        stop=[TEXT],
        stop_token_ids=[TOKEN],
        bad_words=[TEXT],
        logit_bias={TOKEN: 1.0},
        seed=TOKEN,
        grammar=Grammar("choice", json.dumps([TEXT])),
        **more,
    )
    wanted.prompt_ids = [TOKEN] * 5
    return wanted


@pytest.mark.parametrize("fault", ["raise", "kill", "hang"])
def test_a_dump_holds_the_last_steps_and_no_prompt(tmp_path, fault):
    async def body():
        async with engine("SlowCore", crash_dumps=str(tmp_path), watchdog=2.0) as it:
            marker = tmp_path / "once"
            reader = Reader(it, secret(1, max_tokens=20, faults=f"{fault}@8!{marker}"))
            other = Reader(it, secret(2, max_tokens=40))
            (await reader.task).check()
            (await other.task).check()

    run(body())
    [file] = tmp_path.glob(f"{crash_dump.PREFIX}*")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    assert str(TOKEN) not in text and TEXT not in text and "client's" not in text
    dump = json.loads(text)
    assert [step["step"] for step in dump["steps"]] == list(range(len(dump["steps"]))) and len(dump["steps"]) >= 8
    times = [step["before_end"] for step in dump["steps"]]
    assert times == sorted(times, reverse=True) and 0 <= times[-1] < times[0] < 60
    by_ticket = {r["ticket"]: r for r in dump["requests"]}
    assert by_ticket[1]["at_work"] and by_ticket[1]["prompt_tokens"] == 5 and by_ticket[1]["max_tokens"] == 20
    assert by_ticket[1]["output_tokens"][0] <= 8 and by_ticket[1]["grammar"] == "choice"
    assert by_ticket[1]["others"] == ["bad_words", "logit_bias", "seed", "stop", "stop_token_ids"]
    if fault == "raise":
        assert dump["exception"]["type"] == "ZeroDivisionError" and "fake_core.py" in dump["exception"]["frames"][-1]
        assert "a bug in the engine" not in text, "a message may quote a request"
    else:
        assert dump["exception"] is None and "SIGKILL" in dump["end"]
        assert ("no progress for" in dump["why"]) == (fault == "hang")
    assert dump["settings"]["service"]["crash_dumps"] == str(tmp_path) and dump["statistics"]["num_pages"] >= 0


def test_the_check_for_prompts_can_fail(tmp_path, monkeypatch):
    """Negative control: a dump that kept the request itself would be found out."""
    real = crash_dump._request
    monkeypatch.setattr(crash_dump, "_request", lambda entry, at_work: {"prompt": entry.request.prompt_ids})
    with pytest.raises(AssertionError):
        test_a_dump_holds_the_last_steps_and_no_prompt(tmp_path, "kill")
    monkeypatch.setattr(crash_dump, "_request", real)


def test_no_dump_where_none_is_wanted_or_possible(tmp_path, caplog):
    async def body(folder):
        async with engine("SlowCore", crash_dumps=folder) as it:
            os.kill(it.replica.child.pid, signal.SIGKILL)
            await until(lambda: not it.health().ready)
            (await Reader(it, request(1, max_tokens=5)).task).check()

    run(body(""))
    run(body(str(tmp_path / "missing")))
    assert "could not be written" in caplog.text and not dumps(tmp_path)


def test_a_server_that_crashes_again_and_again_writes_few(tmp_path, monkeypatch):
    monkeypatch.setattr(crash_dump, "MAX_DUMPS", 1)

    async def body():
        async with engine("SlowCore", crash_dumps=str(tmp_path)) as it:
            for life in (1, 2):
                os.kill(it.replica.child.pid, signal.SIGKILL)
                await until(lambda: it.num_restarts == life and it.health().ready)  # noqa: B023
                (await Reader(it, request(life, max_tokens=5)).task).check()

    run(body())
    assert len(dumps(tmp_path)) == 1
