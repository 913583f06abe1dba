"""Techniques outside the package, in files and installed packages: they are found, checked, refused and run like our
own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvasir import technique
from kvasir.api.calls import tools
from kvasir.attention.backend import BACKENDS, AttentionBackend
from kvasir.cli.main import app
from kvasir.engine.schedule.policy import POLICIES, SchedulerPolicy
from kvasir.errors import ConfigError
from kvasir.kv.codec import CODECS, Codec
from kvasir.kv.quantized import QuantizedCodec
from kvasir.models.families import FAMILIES, find_family
from kvasir.speculation.drafter import DRAFTERS, Drafter
from kvasir.speculation.router import load_drafter
from kvasir_lab.lookup import load_task
from kvasir_lab.task import Task
from tests.engine.driver import Driver
from tests.models.small_tokenizers import make

PAGE = Path(__file__).parents[1] / "docs" / "adding-a-technique.md"
POLICY = '''"""Last come, first served. Exact."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
from kvasir.engine.schedule.policy import SchedulerPolicy

@dataclass(frozen=True)
class Config:
    weight: float = 1.0
    ways: Literal[1, 2] = 1

class Lifo(SchedulerPolicy):
    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())

    def order_waiting(self, seqs, now):
        return sorted(seqs, key=lambda s: -s.request.arrival)
'''
_, DRAFTER, EXACTNESS, CODEC, ROUND_TRIP = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def written(folder: Path, name: str, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return str(folder / name)


def install(folder: Path, package: str, *lines: str, **modules: str) -> None:
    """Write a package as pip installs it: modules, and ``entry_points.txt``."""
    for name, text in modules.items():
        written(folder / package, f"{name}.py", text)
    written(folder / f"{package}-1.0.dist-info", "METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    written(folder / f"{package}-1.0.dist-info", "entry_points.txt", "\n".join(lines))


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_file_is_configured_like_any_other(tmp_path, monkeypatch):
    file = written(tmp_path / "my-methods", "last-first.py", POLICY)
    policy = technique.load(POLICIES, f"{file}:weight=2,ways=2", SchedulerPolicy)
    assert policy.name == "last_first" and (policy.config.weight, policy.config.ways) == (2.0, 2)
    assert type(technique.load(POLICIES, file, SchedulerPolicy)) is type(policy), "the file runs once"
    monkeypatch.chdir(tmp_path)
    assert type(technique.load(POLICIES, "my-methods/last-first.py", SchedulerPolicy)) is type(policy)
    for option, why in (
        ("wieght=1", "no option 'wieght'.*Did you mean 'weight'"),
        ("ways=3", "expected one of 1, 2"),
        ("weight=x", "expected float"),
    ):
        with pytest.raises(ConfigError, match=why):
            technique.load(POLICIES, f"{file}:{option}", SchedulerPolicy)


@pytest.mark.parametrize(
    "name, text, why",
    [
        ("gone.py", None, "there is no file .*gone.py"),
        ("fcfs.py", POLICY, "kvasir's own schedulers have a 'fcfs' already.*Rename the file"),
        (
            "empty.py",
            "x = 1\n",
            "exactly one subclass of kvasir.engine.schedule.policy.SchedulerPolicy, and defines none",
        ),
        ("two.py", POLICY + "class Other(Lifo): ...\n", "defines Lifo, Other"),
        ("thawed.py", POLICY.replace("frozen=True", ""), "must be a frozen dataclass"),
        ("bare.py", POLICY.replace("weight: float = 1.0", "weight: float"), "weight has no default"),
        (
            "lists.py",
            POLICY.replace("weight: float = 1.0", "weight: tuple[int, ...] = ()"),
            "which a string can set; weight is",
        ),
    ],
)
def test_a_file_that_is_no_technique_is_told_why(tmp_path, name, text, why):
    file = str(tmp_path / name) if text is None else written(tmp_path, name, text)
    with pytest.raises(ConfigError, match=why):
        technique.load(POLICIES, file, SchedulerPolicy)


@pytest.mark.parametrize(
    "package, base, lacks",
    [
        (DRAFTERS, Drafter, "propose"),
        (CODECS, QuantizedCodec, "decode, encode, side"),
        (POLICIES, SchedulerPolicy, "order_waiting"),
        (BACKENDS, AttentionBackend, "run"),
        (tools.PACKAGE, tools.ToolParser, "feed, finish, grammar"),
        ("kvasir_lab.tasks", Task, "draw"),
    ],
)
def test_what_it_does_not_define_is_named(tmp_path, package, base, lacks):
    text = f"from {base.__module__} import {base.__name__}\nclass Empty({base.__name__}):\n    pass\n"
    with pytest.raises(ConfigError, match=f"empty.py: Empty must define {lacks} .abstract in"):
        technique.find(package, written(tmp_path, "empty.py", text), base)


def test_a_fault_of_its_own_is_shown_as_it_is(tmp_path):
    file = written(tmp_path, "broken.py", "import no_such_module\n")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            technique.load(POLICIES, file, SchedulerPolicy)


def test_files_join_others(tmp_path):
    one, two = written(tmp_path, "one.py", DRAFTER), written(tmp_path, "two.py", DRAFTER)
    for spec in (f"{one}+ngram:min_match=1+{two}", f"{one}+ngram+{two}", f"ngram+{two}+{one}"):
        assert set(load_drafter(spec).names) == {"one", "two", "ngram"}
    with pytest.raises(ConfigError, match="names one drafter twice"):
        load_drafter(f"{one}+{one}")


def test_a_task_in_a_file(tmp_path):
    file = written(
        tmp_path / "tasks",
        "echo.py",
        '"""Say it again."""\nfrom kvasir_lab.task import Task\n'
        "class Echo(Task):\n    def draw(self, rng, split): ...\n",
    )
    assert load_task(file).name == "echo"
    with pytest.raises(ConfigError, match="'echo' has no prompt forms"):
        load_task(f"judge_pair/{file}")


# ------------------------------------------------------------------------------------------------------------ installed


def test_an_installed_package_brings_names(tmp_path, monkeypatch):
    install(
        tmp_path,
        "some_lab",
        f"[{DRAFTERS}]",
        "pairs = some_lab.drafts",
        "suffix = some_lab.drafts",
        f"[{FAMILIES}]",
        "mine = some_lab.family",
        drafts=DRAFTER,
        family="ARCHITECTURES, build, stored = ('Mine',), None, None\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "pairs" in technique.names(DRAFTERS) and "pairs" not in technique.own(DRAFTERS)
    assert load_drafter("pairs").name == "pairs" and set(load_drafter("ngram+pairs").names) == {"ngram", "pairs"}
    assert technique.find(DRAFTERS, "suffix", Drafter)[0].__module__ == "kvasir.speculation.drafters.suffix", (
        "kvasir's own go first"
    )
    with pytest.raises(ConfigError, match="Did you mean 'pairs'"):
        load_drafter("pair")
    assert find_family("mine").ARCHITECTURES == ("Mine",)
    install(tmp_path, "other_lab", f"[{DRAFTERS}]", "pairs = other_lab.drafts", drafts=DRAFTER)
    with pytest.raises(ConfigError, match="several installed packages .other_lab.drafts, some_lab.drafts.: uninstall"):
        load_drafter("pairs")


def test_a_package_that_cannot_be_imported_stops_nobody_else(tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(tmp_path))
    groups = (BACKENDS, CODECS, "kvasir_lab.tasks", "kvasir.api.calls.tool_parsers", DRAFTERS)
    install(tmp_path, "their_lab", *(f"[{group}]\ngone = their_lab.gone" for group in groups))
    assert outputs()[0]
    for command in ("doctor", "show nano", "lab tasks"):
        assert CliRunner().invoke(app, command.split()).exit_code == 0
    tools.choose("auto", make("byte_level"))
    assert (
        "'gone' (kvasir.attention.backends) is left out: ModuleNotFoundError" in caplog.text
        and "repair or uninstall the package" in caplog.text
    )
    with pytest.raises(ModuleNotFoundError) as fault:
        load_drafter("gone")
    assert "an installed package offers their_lab.gone as 'gone'" in fault.value.__notes__[0]


def test_a_family_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "half_lab", f"[{FAMILIES}]\nhalf = half_lab.half", half='ARCHITECTURES = ("A",)\n')
    with pytest.raises(ConfigError, match="half.py is no model family: it lacks build, stored"):
        find_family("half")


def test_a_checkpoint_runs_no_file(tmp_path):
    file = written(tmp_path, "family.py", "raise AssertionError('it ran')\n")
    with pytest.raises(ConfigError, match="is not served"):
        find_family(file)


# -------------------------------------------------------------------------------------------------------- in the engine


def outputs(**options) -> tuple[dict, int, bool]:
    """Tokens by request, how many were drafted, and whether prefixes are cached."""
    d = Driver(num_pages=64, **options)
    text = [310 + (3 * i) % 7 for i in range(30)]
    d.run([d.request(str(t), text, max_tokens=16, temperature=float(t), seed=3, ignore_eos=True) for t in (0, 1)])
    assert not d.errors
    found = (
        {key: out.tokens for key, out in d.outputs.items()},
        d.engine.stats().drafted_tokens,
        d.engine.pages.index is not None,
    )
    d.close()
    return found


def test_the_engine_keeps_its_tokens(tmp_path):
    plain, _, _ = outputs()
    drafter, policy = written(tmp_path, "pairs.py", DRAFTER), written(tmp_path, "lifo.py", POLICY)
    drafted, number, _ = outputs(drafter=drafter, draft_control="fixed", scheduling_policy=policy)
    assert drafted == plain and number


@pytest.mark.parametrize(
    "proposal",
    [
        "DraftTree.chain([10**6])",
        "DraftTree.chain([-3])",
        "DraftTree.chain([5] * 60)",
        "None",
        "DraftTree.chain([5], 2.0)",
        "1 / 0",
        "DraftTree([5], [3], [.5], [0])",
        "DraftTree([5, 6], [-1], [.5], [0])",
        "DraftTree([5.5], [-1], [.5], [0])",
        "DraftTree([5, 6], [-1, 0], [.5, .5], [0, 0])",
        "DraftTree(guests={-1: ((0,),)})",
        "DraftTree([5], [-1], [.5], [0], guests={1: ()})",
    ],
)
def test_what_a_drafter_does_wrong_costs_no_request(tmp_path, proposal, caplog):
    """A draft token outside the vocabulary would fail its step; the request must not notice."""
    bad = (
        "from kvasir.speculation.drafter import Drafter\nfrom kvasir.speculation.tree import DraftTree\nclass "
        "Bad(Drafter):\n"
        f"    def propose(self, asks):\n        return [{proposal} for _ in asks]\n"
    )
    tokens, number, _ = outputs(drafter=written(tmp_path, "bad.py", bad), draft_control="fixed")
    assert tokens == outputs()[0] and not number and "drafter bad failed (8 times in a row)" in caplog.text


def test_a_drafter_that_cannot_open_a_sequence_costs_no_request(tmp_path, caplog):
    bad = DRAFTER + "\n    def open(self, seq):\n        raise KeyError('boom')\n"
    tokens, number, _ = outputs(drafter=written(tmp_path, "shut.py", bad), draft_control="fixed")
    assert tokens == outputs()[0] and number and "drafter shut failed" in caplog.text


def test_a_drafter_that_cannot_learn_is_off_in_the_end(tmp_path, caplog):
    """A drafter that raises in every step is switched off, so that tracebacks do not fill the log."""
    bad = (
        "from kvasir.speculation.drafter import Drafter\nfrom kvasir.speculation.tree import DraftTree\nclass "
        "Deaf(Drafter):\n"
        "    def propose(self, asks):\n        return [DraftTree.chain([5]) for _ in asks]\n    def observe(self, "
        "*what):\n        1 / 0\n"
    )
    tokens, number, _ = outputs(drafter=written(tmp_path, "deaf.py", bad), draft_control="fixed")
    assert tokens == outputs()[0] and number and 8 <= caplog.text.count("drafter deaf failed") < 16
    assert "(8 times in a row): it is off until a restart" in caplog.text


@pytest.mark.parametrize(
    "order, says",
    [
        *(
            (order, "it must return a list of all 2 sequences, each once")
            for order in ("list(seqs).sort(key=id)", "list(seqs)[:1]", "list(seqs) * 2")
        ),
        ("seqs.pop() and seqs", "of all 2 sequences"),
        ("sorted(seqs, key=lambda s: s.request.deadline)", "no attribute 'deadline'"),
    ],
)
def test_what_a_policy_does_wrong_costs_no_request(tmp_path, order, says, caplog):
    text = POLICY.replace("sorted(seqs, key=lambda s: -s.request.arrival)", order).replace(
        "def order", "static = False\n    def order"
    )
    assert outputs(scheduling_policy=written(tmp_path, "odd.py", text)) == outputs()
    assert caplog.text.count("scheduling policy 'odd' failed and is off") == 1 and says in caplog.text


CONFLICT = """
    def conflicts(self, others):
        return [f"'lifo' cannot run with {o.name}. Leave it out." for o in others if o.name in ("pairs", "ngram")]
"""


def test_every_technique_is_heard_before_the_model_is_there(tmp_path):
    """A policy gets the drafters in ``conflicts`` one by one, and they get the policy."""
    drafter, policy = written(tmp_path, "pairs.py", DRAFTER), written(tmp_path, "lifo.py", POLICY + CONFLICT)
    with pytest.raises(
        ConfigError, match="not supported:\n.*cannot run with pairs. Leave it out.\n.*cannot run with ngram"
    ):
        outputs(drafter=f"{drafter}+ngram", scheduling_policy=policy)
    outputs(scheduling_policy=policy)


def test_what_does_not_say_whether_it_changes_the_cache_turns_prefixes_off(tmp_path):
    silent = written(
        tmp_path, "silent.py", POLICY.replace("(SchedulerPolicy):\n", "(SchedulerPolicy):\n    affects_kv = None\n")
    )
    file = written(tmp_path, "lifo.py", POLICY)
    assert outputs(scheduling_policy=file)[2] and not outputs(scheduling_policy=silent)[2]


def test_a_codec_in_a_file(tmp_path):
    """The plain codec under another name gives the same tokens through the reference attention."""
    file = written(
        tmp_path,
        "copy.py",
        '"""As they are. Exact."""\nfrom kvasir.kv.codecs.plain import PlainCodec\n\n\n'
        'class Copy(PlainCodec):\n    kernel = "copy"\n    fuses = False\n',
    )
    assert technique.load(CODECS, file, Codec).name == "copy"
    assert outputs(kv_codec=file)[0] == outputs()[0]


def test_a_codec_that_takes_a_kernels_name_must_store_its_planes(tmp_path):
    """A codec with other planes must not use the kernels of that name, which would read noise."""
    head = (
        '"""Integers."""\nfrom kvasir.kv.quantized import IntegerCodec\n\n\n'
        'class Mine(IntegerCodec):\n    kernel = "int8"\n    bits = '
    )
    same = written(tmp_path, "same.py", head + "8\n")
    assert outputs(kv_codec=same)[0] == outputs(kv_codec="int8")[0]
    with pytest.raises(
        ConfigError, match=r"'other' says kernel = 'int8'.* k: \d+ x uint8.* stores k: .*such as kernel = 'other'"
    ):
        outputs(kv_codec=written(tmp_path, "other.py", head + "4\n"))
    outputs(kv_codec=written(tmp_path, "own.py", head.replace('"int8"', '"own"') + "4\n"))


def test_the_page_holds_what_it_shows(tmp_path):
    """The page's example is a drafter, and its check of exactness passes in a process of its own, as readers would run
    it."""
    written(tmp_path, "bigram.py", DRAFTER)
    done = subprocess.run(
        [sys.executable, written(tmp_path, "check.py", EXACTNESS)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_the_codec_on_the_page_runs_as_written_and_keeps_the_rule(tmp_path):
    written(tmp_path, "e5m2.py", CODEC)
    done = subprocess.run(
        [sys.executable, written(tmp_path, "check.py", ROUND_TRIP)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and "the same as with the plain cache" in done.stdout, done.stderr


def test_a_codec_that_breaks_the_rule_is_noticed(tmp_path):
    """A row that is encoded together with its neighbours depends on the chunk."""
    written(tmp_path, "e5m2.py", CODEC.replace("x.clamp(", "(x - x.mean(0, keepdim=True)).clamp("))
    done = subprocess.run(
        [sys.executable, written(tmp_path, "check.py", ROUND_TRIP)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode and "AssertionError" in done.stderr
