"""``kvasir generate``: text and JSON lines in and out, and every kind of bad line among good ones."""

import json
import signal

import pytest

from kvasir.models import checkpoint

EXACT = ("--temperature", "0", "--max-tokens", "6")


def rows(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_prompt(kvasir):
    done = kvasir("generate", "-p", "Once upon a time", *EXACT)
    assert done.code == 0 and done.out.strip()
    assert kvasir("generate", "--prompt", "Once upon a time", *EXACT).out == done.out


PROBLEM = ("-p", "Compute modulo 97: start 12; +45; *3; -7; *2; +30.", "--temperature", "0")


def test_chat_template_and_default_length(kvasir):
    done = kvasir("generate", *PROBLEM)
    assert done.code == 0 and "Answer: 67" in done.out, "an answer of usual length is not cut off"
    assert kvasir("generate", "--chat", *PROBLEM).out == done.out


def test_raw_continues_the_text(kvasir):
    raw = kvasir("generate", "--raw", *PROBLEM, "--max-tokens", "40")
    assert raw.code == 0 and "Answer: 67" not in raw.out
    line = json.dumps({"prompt": PROBLEM[1], "temperature": 0, "max_tokens": 40})
    assert rows(kvasir("generate", "-i", "-", "--jsonl", stdin=line).out)[0]["outputs"][0]["text"] + "\n" == raw.out


def test_a_model_without_a_template_continues_the_text(kvasir, tmp_path):
    for file in (checkpoint.resolve("nano")).iterdir():
        if not file.name.startswith("chat_template"):
            (tmp_path / file.name).symlink_to(file)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    plain = kvasir("generate", tmp_path, "-p", "Once upon a time", *EXACT)
    assert plain.code == 0 and plain.out == kvasir("generate", "nano", "--raw", "-p", "Once upon a time", *EXACT).out
    wanted = kvasir("generate", tmp_path, "--chat", "-p", "Once upon a time", *EXACT)
    assert wanted.code == 3 and "no chat template" in wanted.err


@pytest.mark.parametrize("flag", ["--chat", "--raw"])
def test_lines_of_json_say_themselves_what_they_are(kvasir, flag):
    done = kvasir("generate", flag, "-i", "-", "--jsonl", stdin='{"prompt": "x"}')
    assert done.code == 2 and "a line of JSON says it itself" in done.err


def test_text_from_a_file_and_from_stdin(kvasir, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Once upon a time")
    direct = kvasir("generate", "-p", "Once upon a time", *EXACT).out
    assert kvasir("generate", "-i", file, *EXACT).out == direct
    assert kvasir("generate", "-i", "-", *EXACT, stdin="Once upon a time").out == direct


def test_several_branches_and_other_parameters(kvasir):
    done = kvasir(
        "generate",
        "-p",
        "Once",
        "--params",
        '{"n": 2, "seed": 7, "logit_bias": {"20": -5}}',
        "--max-tokens",
        "3",
        "-o",
        "/dev/stdout",
    )
    assert done.code == 0, done.err


BAD = [
    ("not json", "not a JSON object"),
    ("[1]", "got list"),
    ('{"prompt": 5}', "must be text"),
    ('{"messages": 5}', "must be a list"),
    ('{"messages": [5]}', "messages[0]"),
    ('{"messages": [{"role": "user"}]}', "messages[0].content"),
    ('{"prompt_token_ids": "abc"}', "must be a list"),
    ('{"prompt_token_ids": [99999999]}', "out of range"),
    ('{"prompt_token_ids": ["a"]}', "prompt"),
    ('{"prompt": "a", "messages": []}', "exactly one of"),
    ("{}", "exactly one of"),
    ('{"error": "a"}', "exactly one of"),
    ('{"prompt": "a", "temprature": 1}', "Did you mean 'temperature'?"),
    ('{"prompt": "a", "grammar": {}}', "grammar"),
    ('{"prompt": "a", "temperature": "hot"}', "temperature"),
    ('{"prompt": "a", "temperature": NaN}', "temperature"),
    ('{"prompt": "a", "stop": 5}', "sampling"),
    ('{"prompt": "a", "logit_bias": {"x": 1}}', "sampling"),
    ('{"prompt": "a", "logit_bias": [1]}', "sampling"),
    ('{"prompt": "a", "max_tokens": 0}', "max_tokens"),
    (r'{"prompt": "a", "\ud800": 1}', "unknown parameter"),
    ('{"prompt": "a", "max_tokens": 100000}', "max_tokens"),
    ('{"prompt": "a", "n": true}', "n"),
    ("[" * 100_000, "not a JSON object"),
]


def test_json_lines_keep_their_order_and_bad_ones_stop_nothing(kvasir, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = [
        '{"prompt": "Once upon"}',
        '{"messages": [{"role": "user", "content": "hello\u2028you"}]}',
        '{"prompt_token_ids": [300, 301], "max_tokens": 2}',
        '{"prompt": "the king", "logit_bias": {"5": 1.0}, "n": 2}',
    ]
    lines = [good[0], "", *(line for line, _ in BAD), *good[1:]]
    source.write_text("\n".join(lines))
    done = kvasir("generate", "-i", source, "-o", output, *EXACT)
    assert done.code == 3 and done.out == ""
    assert f"{len(BAD)} of {len(BAD) + len(good)} requests were refused" in done.err
    found = rows(output.read_text())
    assert [r["index"] for r in found] == list(range(len(lines) - 1))
    for row, (line, message) in zip(found[1:-3], BAD):
        assert message in row["error"]["message"], (line[:60], row)
    for row, count in zip([found[0], *found[-3:]], (6, 6, 2, 6)):
        assert all(len(o["token_ids"]) <= count and o["finish_reason"] in ("length", "stop") for o in row["outputs"])
    assert len(found[-1]["outputs"]) == 2 and found[-2]["prompt_tokens"] == 2


@pytest.mark.parametrize("to_file", [True, False])
def test_what_is_done_survives_an_interrupt(kvasir, tmp_path, monkeypatch, to_file):
    """Lines are written while others run; one that waits for an earlier line is written when the engine stops."""
    from kvasir.cli.generate import Answers
    from kvasir.engine.engine import Engine

    output, step, put = tmp_path / "out.jsonl", Engine.step, Answers.put
    line, ended, seen = {"prompt": "Once", "ignore_eos": True}, [], []
    asked = [
        line | {"max_tokens": 2},
        line | {"max_tokens": 60},
        {},
        line | {"max_tokens": 5},
        line | {"max_tokens": 60},
    ]

    def interrupted(engine):
        if len(ended) == 3:  # 2 is refused at once, 0 and 3 have ended, 1 and 4 run on
            seen.append(output.read_text() if to_file else "")
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Answers, "put", lambda self, index, **row: (ended.append(index), put(self, index, **row)))
    monkeypatch.setattr(Engine, "step", interrupted)
    where = ("-o", output) if to_file else ()
    done = kvasir(
        "generate", "-i", "-", "--jsonl", *where, "--temperature", "0", stdin="\n".join(map(json.dumps, asked))
    )
    assert done.code == 130 and f"3 of 5 lines were written to {output if to_file else 'stdout'}" in done.err
    assert len(seen) == 1 and (not to_file or [r["index"] for r in rows(seen[0])] == [0])
    assert [r["index"] for r in rows(output.read_text() if to_file else done.out)] == [0, 2, 3]


def test_a_model_that_cannot_start_leaves_an_earlier_output(kvasir, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("earlier")
    assert kvasir("generate", "/no/such/model", "-p", "a", "-o", output).code == 2 and output.read_text() == "earlier"


def test_json_lines_through_a_pipe(kvasir):
    line = json.dumps({"prompt": "Once upon a time"})
    done = kvasir("generate", "--input", "-", "--jsonl", *EXACT, stdin=f"{line}\n{line}\n")
    assert done.code == 0
    first, second = rows(done.out)
    assert first["outputs"] == second["outputs"]


def test_a_long_prompt_gets_what_room_there_is(kvasir):
    done = kvasir(
        "generate", "--max-model-len", "64", "-i", "-", "--jsonl", stdin=json.dumps({"prompt_token_ids": [300] * 60})
    )
    assert done.code == 0 and len(rows(done.out)[0]["outputs"][0]["token_ids"]) <= 4


def test_fit_says_what_it_chose_and_which_flag_overrides_it(kvasir):
    small = ("generate", "-p", "a", "--max-tokens", "2", "--cpu-cache-bytes", "1000000")
    done = kvasir(*small)
    assert done.code == 2 and "pass --fit" in done.err and "--max-model-len" in done.err
    done = kvasir(*small, "--fit")
    assert (
        done.code == 0
        and "The context is shortened to" in done.err
        and "--max-model-len" in done.err
        and "--cpu-cache-bytes" in done.err
    )
    done = kvasir("generate", "-p", "a", "--cpu-cache-bytes", "1000", "--fit")
    assert done.code == 2 and "--cpu-cache-bytes" in done.err


@pytest.mark.parametrize(
    "args, code, message",
    [
        ([], 2, "--prompt"),
        (["-p", "a", "-i", "b"], 2, "--prompt"),
        (["-i", "/no/such/file"], 2, "cannot read /no/such/file: No such file"),
        (["-i", "/"], 2, "cannot read /"),
        (["-p", "a", "-o", "/no/such/folder/x"], 2, "cannot write"),
        (["-p", "a", "--params", "{"], 2, "--params is not JSON"),
        (["-p", "a", "--params", "[]"], 2, "must be a JSON object"),
        (["-p", "a", "--params", '{"temprature": 1}'], 2, "Did you mean 'temperature'?"),
        (["/no/such/model", "-p", "a"], 2, "no such folder"),
        (["-p", "a", "--kv-codec", "zip"], 2, "no codecs named 'zip'; there are"),
        (["-p", "a", "--params", '{"temperature": -1}'], 3, "temperature=-1 is out of range"),
        (["-p", "a", "--skip-tokenizer-init"], 3, "only prompt_token_ids"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else "",
)
def test_mistakes(kvasir, args, code, message):
    done = kvasir("generate", *args)
    assert (done.code, done.out) == (code, "") and message in done.err


def test_results_do_not_overwrite_their_requests(kvasir, tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "a"}\n')
    done = kvasir("generate", "-i", lines, "-o", tmp_path / "." / "lines.jsonl")
    assert done.code == 2 and "overwrite" in done.err and lines.read_text() == '{"prompt": "a"}\n'


def test_input_that_is_no_text(kvasir):
    done = kvasir("generate", "-i", "-", stdin=b"\xff\xfe\x00")
    assert done.code == 2 and "not UTF-8" in done.err


def test_a_progress_bar_in_a_terminal_only(kvasir, monkeypatch):
    from kvasir.cli import generate

    seen = []
    monkeypatch.setattr(
        generate, "complete", lambda *_, progress: seen.append(progress) or [{"index": 0, "outputs": []}]
    )
    for terminal in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr.isatty", lambda answer=terminal: answer, raising=False)
            kvasir("generate", "-i", "-", "--jsonl", stdin="{}\n{}\n")
    assert seen == [True, False]
