"""The command line: every setting is an option, and mistakes are answered with the fix. Needs no torch."""

import dataclasses
import subprocess
import sys

import pytest

from kvasir.api.offline.vllm_args import translated
from kvasir.api.offline.vllm_flags import vllm_flags
from kvasir.cli.arguments import model_and_settings
from kvasir.cli.options import build_settings
from kvasir.config import EngineConfig, Settings
from kvasir.errors import ConfigError

FIELDS = [
    (section.name, f) for section in dataclasses.fields(Settings) for f in dataclasses.fields(section.default_factory)
]
OURS = {
    f"--{name}"
    for _, f in FIELDS
    for name in (f.name.replace("_", "-"), *f.metadata["aliases"], f.metadata["off"])
    if name
}
BENCH = ["run", "offline", "serve", "trace", "startup", "ladder", "profile", "merge", "report"]
COMMANDS = [["serve"], ["chat"], ["generate"], ["doctor"], ["show"], *(["bench", c] for c in BENCH)]

TABLE = vllm_flags()


@pytest.fixture
def settings(kvasir, monkeypatch):
    """The settings that ``kvasir serve ...`` would start with."""
    import kvasir.cli.serve as serve

    def of(*args):
        seen = []
        monkeypatch.setattr(serve, "run", seen.append)
        done = kvasir("serve", *args)
        assert done.code == 0, done.err
        return seen[0]

    return of


@pytest.mark.parametrize("command", [[], ["bench"], *COMMANDS], ids=" ".join)
def test_help_is_whole(kvasir, command):
    done = kvasir(*command, "--help")
    assert done.code == 0 and "Usage: kvasir" in done.out
    assert "…" not in done.out, "a name is cut off"


def test_help_names_every_command(kvasir):
    done = kvasir("--help")
    for command in ("serve", "chat", "generate", "doctor", "show", "bench"):
        assert f"  {command} " in done.out
    bench = kvasir("bench", "--help").out
    assert all(f"  {c} " in bench for c in BENCH)


def test_serve_help_names_every_setting_by_section(kvasir):
    text = kvasir("serve", "--help").out
    for section, f in FIELDS:
        if f.name != "model":
            assert f"--{f.name.replace('_', '-')}" in text and f"{section.capitalize()}:" in text
    assert "[256]" in text and "vllm" not in text.lower(), "defaults are shown, vLLM's flags are not"


def test_no_arguments_show_the_help(kvasir):
    assert "Usage: kvasir" in "".join(dataclasses.astuple(kvasir())[1:])


def test_version(kvasir):
    from kvasir import __version__

    assert kvasir("--version").out.strip() == __version__


def test_it_is_a_module_too():
    done = subprocess.run(
        [sys.executable, "-m", "kvasir", "--version"], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip()


def test_help_needs_no_torch():
    code = (
        "import sys; sys.argv = ['kvasir', 'serve', '--help']\nfrom kvasir.cli.main import main\ntry: main()\nexcept "
        "SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("section, field", FIELDS, ids=[f.name for _, f in FIELDS])
def test_every_setting_is_settable(settings, section, field):
    values = {
        "bool": (not field.default, None),
        "int": (7, "7"),
        "float": (0.5, "0.5"),
        "str": ("http://x", "http://x"),  # a URL, a name and a path
        "tuple[str, ...]": (("x", "y"), None),
    }
    kind = str(field.type).removesuffix(" | None")
    flag = f"--{field.name.replace('_', '-')}"
    if field.name == "model":
        want, args = "x", ["x"]
    elif kind.startswith("Literal"):
        want = kind[8:-1].split(",")[-1].strip().strip("\"'")
        args = [flag, want]
    elif kind == "bool":
        want, args = values[kind][0], [flag if values[kind][0] else "--no-" + flag[2:]]
    elif kind.startswith("tuple"):
        want, args = ("http://x", "http://y"), [flag, "http://x", flag, "http://y"]  # such as an origin is
    else:
        want, args = values[kind][0], [flag, values[kind][1]]
    assert getattr(getattr(settings(*args), section), field.name) == want


@pytest.mark.parametrize(
    "ours, vllms",
    [
        ("kv_codec", "--kv-cache-dtype"),
        ("page_slots", "--block-size"),
        ("num_pages", "--num-gpu-blocks-override"),
    ],
)
def test_vllm_spellings(settings, ours, vllms):
    value = "plain" if ours == "kv_codec" else 32
    assert getattr(settings(vllms, value).cache, ours) == value


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "args, message",
    [
        (["serve", "--max-num-seq", "3"], "no option --max-num-seq. Did you mean '--max-num-seqs'?"),
        (["serve", "--gpu-memory-utilisation=0.5"], "Did you mean '--gpu-memory-utilization'?"),
        (["generate", "--promt", "x"], "Did you mean '--prompt'?"),
        (["show", "--jason"], "Did you mean '--json'?"),
        (["serve", "--zzzz"], "no option --zzzz. kvasir serve --help lists all."),
        (["serv"], "serv"),
        (["serve", "a", "b"], "unexpected extra argument"),
        (["serve", "--max-num-seqs", "many"], "--max-num-seqs"),
        (["serve", "--dtype", "bf16"], "bfloat16"),
        (["serve", "--max-num-seqs"], "requires an argument"),
        (["serve", "--port", "70000"], "port=70000 is out of range: from 0 to 65535"),
        (["serve", "--max-num-seqs", "0"], "max_num_seqs=0 is out of range: at least 1"),
        (["serve", "--max-model-len", "-5"], "max_model_len=-5 is out of range"),
        (["serve", "--gpu-memory-utilization", "nan"], "out of range"),
        (["serve", "--watchdog", "0"], "watchdog=0.0 is out of range"),
        (["generate", "-p", "x", "--num-threads", "-2"], "num_threads=-2 is out of range"),
        (["serve", "--config", "/no/such.toml"], "cannot read the settings file"),
        (["bench", "serve", "-n", "0"], "num-requests"),
        (["bench", "offline", "--repeats", "0"], "repeats"),
        (
            ["bench", "trace", "f.csv", "--rate", "1", "--url", "http://127.0.0.1:1", "--max-num-seqs", "8"],
            "max_num_seqs is for a server that is started",
        ),
        (["show", "--memory", "-1"], "memory"),
    ],
    ids=lambda a: " ".join(map(str, a)) if isinstance(a, list) else "",
)
def test_mistakes_are_answered_with_the_fix(kvasir, args, message):
    done = kvasir(*args)
    assert done.code == 2 and done.out == ""
    assert message in done.err


def test_benchmarks_know_what_is_given_and_which_model(tmp_path):
    """Settings given at our defaults count, too, because a peer's defaults may differ. A model from the file is not a
    flag."""
    (file := tmp_path / "s.toml").write_text('model = "nano"\nmax_model_len = 128\n[scheduler]\nmax_num_seqs = 256\n')
    assert model_and_settings("", {"config": str(file), "dtype": "auto", "kv_codec": None}) == (
        "nano",
        {"max_model_len": 128, "max_num_seqs": 256, "dtype": "auto"},
    )
    assert model_and_settings("other", {"config": str(file)})[0] == "other" and model_and_settings(
        "", {"dtype": None}
    ) == ("", {})


@pytest.mark.parametrize("flag", TABLE.unserved)
def test_vllm_flags_we_do_not_serve_are_refused_by_name(kvasir, flag):
    done = kvasir("serve", "model", flag, "1")
    assert done.code == 2
    assert f"kvasir does not serve vLLM's {flag}: " in done.err and len(done.err) > len(flag) + 50


@pytest.mark.parametrize(
    "command", [["chat"], ["generate"], ["bench", "offline"], ["bench", "startup"], ["bench", "profile"]], ids=" ".join
)
def test_every_command_with_settings_knows_vllms_flags(kvasir, command):
    assert "stay on the device" in kvasir(*command, "--cpu-offload-gb=4").err
    assert "changes nothing here" in kvasir(*command, "--swap-space=4", "--cpu-offload-gb=4").err


def test_vllm_flags_that_hold_anyway_are_taken(settings):
    args = [*TABLE.satisfied]
    for flags, values in TABLE.only_at.items():
        args += [f"{flags[0]}={values[0]}"]
    assert settings(*args) == settings()
    assert settings("-tp", "1", "-pp", "1") == settings()


@pytest.mark.parametrize("flags", TABLE.only_at, ids=lambda f: f[0])
def test_and_refused_at_another_value(kvasir, flags):
    for flag in flags:
        done = kvasir("serve", flag, "3")
        assert done.code == 2 and f"{flags[0]} 3 is not served yet" in done.err


def test_the_tables_of_vllm_flags_agree():
    only_at = {name for names in TABLE.only_at for name in names}
    tables = [
        set(TABLE.satisfied),
        only_at,
        set(TABLE.unserved),
        set(TABLE.switches),
        set(TABLE.values),
        OURS - {"--model"},
    ]
    assert sum(map(len, tables)) == len(set().union(*tables)), "a flag stands in two tables"
    assert all(flag.startswith("-") and reason and not reason.endswith(".") for flag, reason in TABLE.unserved.items())


def test_adapters_are_named_as_for_vllm(settings, kvasir):
    many = '{"name": "c", "path": "z", "base_model_name": "m"}'
    for given in (["a=x", "b=y", many], ["a=x", "--lora-modules", "b=y", "--lora-modules", many]):
        found = settings("m", "--enable-lora", "--lora-modules", *given, "--max-loras", "4").adapters
        assert found.modules() == {"a": "x", "b": "y", "c": "z"} and found.max_loras == 4
    done = kvasir("serve", "--enable-lora", "--max-loras", "40")
    assert done.code == 2 and "--max-cpu-loras" in done.err
    for wrong, why in (("a", "neither NAME=FOLDER"), ("{", "not valid JSON")):
        adapters = settings("m", "--enable-lora", "--lora-modules", wrong).adapters
        with pytest.raises(ConfigError, match=why):
            adapters.modules()
    with pytest.raises(ConfigError, match="two adapters"):
        settings("m", "--enable-lora", "--lora-modules", "a=x", "a=y").adapters.modules()


def test_vllms_eager_mode_turns_the_graphs_off(settings):
    assert settings().runner.cuda_graphs and settings("--cuda-graphs") == settings()
    assert not settings("--enforce-eager").runner.cuda_graphs and settings("--no-cuda-graphs") == settings(
        "--enforce-eager"
    )


def test_overlap_is_on_off_or_left_to_the_device(settings):
    assert [settings(*args).runner.overlap for args in ([], ["--overlap"], ["--no-overlap"])] == [None, True, False]


def test_a_prompt_may_look_like_a_flag(kvasir, monkeypatch):
    import kvasir.cli.generate as command

    seen = {}
    monkeypatch.setattr(command, "run", lambda config, **options: seen.update(options))
    assert kvasir("generate", "--prompt", "--quantization").code == 0
    assert seen["prompt"] == "--quantization"


# ----------------------------------------------------------------------------------------------------- files and keys


def test_the_command_line_goes_before_the_file(settings, tmp_path):
    file = tmp_path / "kvasir.toml"
    file.write_text('model = "from-file"\nport = 9\n[scheduler]\nmax_num_seqs = 3\n')
    assert settings("--config", file).model.model == "from-file"
    found = settings("other", "--config", file, "--port", "10")
    assert (found.model.model, found.server.port, found.scheduler.max_num_seqs) == ("other", 10, 3)


def test_a_servers_file_serves_the_other_commands(tmp_path):
    file = tmp_path / "kvasir.toml"
    file.write_text("port = 9\nmax_num_seqs = 3\n")
    assert build_settings({"config": file}, EngineConfig).scheduler.max_num_seqs == 3


@pytest.mark.parametrize(
    "text, message",
    [
        (b"max_num_seqs = = 3", "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        (b'max_num_seqs = "x"', "expected int"),
        (b"[scheduler]\nmax_num_seq = 3", "Did you mean 'max_num_seqs'"),
        (b"port = -1", "out of range"),
        (b"api_key = 'k'", "expected tuple"),
    ],
)
def test_bad_files(kvasir, tmp_path, text, message):
    file = tmp_path / "kvasir.toml"
    file.write_bytes(text)
    done = kvasir("serve", "--config", file)
    assert done.code == 2 and message in done.err


def test_the_key_comes_from_the_environment_for_servers_only(monkeypatch):
    monkeypatch.setenv("KVASIR_API_KEY", "secret")
    assert build_settings({}).server.api_key == ("secret",)
    assert build_settings({"api_key": ["mine"]}).server.api_key == ("mine",)
    assert build_settings({}, EngineConfig) == EngineConfig()


def test_unknown_names_are_refused_in_python_too():
    with pytest.raises(ConfigError, match="Did you mean 'page_slots'"):
        build_settings({"page_slot": 3}, EngineConfig)


def test_every_default_is_in_its_range():
    for _, f in FIELDS:
        low, high = f.metadata["low"], f.metadata["high"]
        if f.default is not None:
            assert (low is None or f.default >= low) and (high is None or f.default <= high), f.name


def test_the_log_of_the_load_is_switched_by_vllms_flag(settings):
    assert settings().server.log_stats and settings().server.log_stats_interval == 10
    assert not settings("--disable-log-stats").server.log_stats
    assert settings("--no-log-stats") == settings("--disable-log-stats")


def test_vllm_flags_that_change_nothing_are_taken_with_a_line(kvasir):
    for flag in TABLE.noted:
        values = ["x"] if flag in TABLE.values else []
        assert translated(["m", flag, *values, "--port", "1"])[0] == ["m", "--port", "1"], flag
    forms = [
        ["--compilation-config", '{"level": 3}'],
        ["--compilation-config={}"],
        ["--compilation-config.pass_config.fuse_norm_quant", "true"],
        ["--limit-mm-per-prompt.video", "0"],
        ["-O3"],
        ["-O", "3"],
        ["-O.cudagraph_mode=NONE"],
        ["--no-enable-expert-parallel"],
        ["--trust_remote_code"],
    ]
    for form in forms:
        left, lines = translated(["m", *form, "--seed", "1"])
        assert left == ["m", "--seed", "1"] and len(lines) == 1 and "changes nothing here" in lines[0], form
    assert translated(["--no-async-scheduling"])[1] == [], "this would change something"
    assert translated(["--", "--trust-remote-code"])[1] == []
    done = kvasir("serve", "model", "--language-model-only", "--mm-encoder-tp-mode", "data", "--ssl-keyfile", "k")
    assert "vLLM's --language-model-only changes nothing here: " in done.err and "--ssl-keyfile" in done.err
