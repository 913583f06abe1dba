"""Kernels of the first steps are compiled ahead, and no kernel runs for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import pytest

from kvasir.client import engine_process as process
from kvasir.config import EngineConfig
from kvasir.engine import engine
from kvasir.engine.start import build, rehearsal
from kvasir.engine.start.draft_models import EngineHost
from kvasir.speculation.router import load_drafter
from tests.engine.driver import Driver

pytest.importorskip("triton")
REHEARSE = """
import contextlib, importlib, json, os, pkgutil, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Hopper:  # compiles; has no way to load or launch anything
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = lambda self, *which: 0
    get_active_torch_device = lambda self: torch.device("cpu")
    is_active = lambda: True

class Launcher:
    def __init__(self, src, metadata):
        with open(sys.argv[2], "a") as file:
            print(src.name, os.getpid() == process, file=file)

process, Hopper.launcher_cls = os.getpid(), Launcher
driver.set_active(Hopper())
torch.cuda.is_available = lambda: True
import kvasir.kernels
from kvasir.kernels import _triton, compile_ahead
torch.cuda.is_available = lambda: False
from kvasir.layers import products, weight_format
from kvasir.layers.formats import plain
from kvasir.models import decoder
found = pkgutil.iter_modules(kvasir.kernels.__path__)
modules = [importlib.import_module("kvasir.kernels." + m.name) for m in found if not m.ispkg]
for module in (*modules, products, weight_format):
    for name in ("pdl", "by_hand", "use_triton", "streams", "multiprocessors"):
        here = 132 if name == "multiprocessors" else True
        if hasattr(module, name):
            setattr(module, name, lambda *_, here=here: here)
from kvasir.kernels.hopper_gemv import MEASURED, Ring
MEASURED[512, 64, False] = MEASURED[128, 64, True] = Ring(block_k=64)
MEASURED[64, 256, False] = Ring(block_k=64, splits=2)
dense = lambda *shape, place: torch.empty(shape, dtype=place.dtype)  # as on a GPU
products.matrix = plain.matrix = decoder.matrix = dense

from kvasir.attention.backend import AttentionBackend, Site
from kvasir.decoding.sampler import Sampler
from kvasir.engine.start import rehearsal
from kvasir.engine.start.rehearsal import rehearse
from kvasir.engine.ways.step_way import StepParts
from kvasir.kernels.norm import rms_norm
from kvasir.kv.codec import Codec
from kvasir.kv.pool import KVPool
from kvasir.layers.spec import DenseSpec, GQASpec, NormSpec, RopeSpec
from kvasir.layers.weights import Placement
from kvasir.models.spec import LayerSpec, ModelSpec
from kvasir.technique import load

LAYER = LayerSpec(GQASpec(4, 2, 64, 0.125, qk_norm=NormSpec()), DenseSpec(64), RopeSpec(1000.0, 64), NormSpec())
spec = ModelSpec(
    family="none", hidden_size=64, vocab_size=64, max_position=9000, layers=(LAYER,), final_norm=NormSpec()
)
model = decoder.Decoder(spec, Placement(torch.device("cpu"), torch.bfloat16))
codec, groups = load("kvasir.kv.codecs", sys.argv[1], Codec), spec.cache_groups()
pool = KVPool(groups, codec, [4], codec.page_slots, torch.device("cpu"), torch.bfloat16)
backend = load("kvasir.attention.backends", "triton", AttentionBackend)
backend.prepare(Site("cpu", torch.bfloat16, codec.kernel, codec.page_slots, (LAYER.mixer.attention(),)))
sampler = Sampler(64, 64, 16, torch.device("cpu"), ())
parts = StepParts(model, pool, backend, sampler, torch.device("cpu"), max_model_len=9000)
compiled, here = [], []

def listen(*, src, cache_hit, **_):
    compiled.append(src.name)
    here.extend([] if cache_hit else [src.name])

triton.knobs.compilation.listener = listen
os.sched_getaffinity = lambda process: range(4)
drafts, trees = int(os.environ.get("DRAFTS", 0)), "TREES" in os.environ
with compile_ahead.helping() if sys.argv[3:] else contextlib.nullcontext(), compile_ahead.compiling():
    rehearse(parts, drafts, trees)
first = sorted(compiled)
made = [line.split() for line in open(sys.argv[2])]
with compile_ahead.compiling():
    rehearse(parts, drafts, trees)
again = len(compiled) - len(first)
if trees or "NO_TREES" in os.environ:  # a draft model's trees, level by level
    with torch.inference_mode(), compile_ahead.compiling(), compile_ahead.rehearsing():
        for count in (1, 7, 20):
            for rows in (2, 5, 9, 25, 64):
                for start in (30, 300, 1000, 4000):
                    rehearsal._attend(parts, 0, [(start, rows)] * count, 1)
if "DRAFTS" in os.environ:  # drafted steps as they come later
    with torch.inference_mode(), compile_ahead.compiling(), compile_ahead.rehearsing():
        for rows in (24, 56, 100):
            for form in backend.together():
                rehearsal._attend(parts, 0, [(40, 1)] * rows, form)
        rehearsal._attend(parts, 0, [(9, 30), (40, 9), (70, 1)], 1)
        rehearsal._draw(parts, True)
later = len(compiled) - len(first) - again
try:
    rms_norm(torch.zeros(2, 64, dtype=torch.bfloat16), model.norm.weight, 1e-5)
    launched = True
except Exception as error:
    launched = type(error).__name__
print(json.dumps({"first": first, "again": again, "later": later, "launched": launched, "here": here,
                  "launchers": sorted(name for name, mine in made if mine == "True"),
                  "elsewhere": sorted(name for name, mine in made if mine == "False"),
                  "named": triton.runtime.cache.triton_key is compile_ahead.fingerprint}))
"""


PLAIN = {"_decode_attention", "_paged_attention", "_hopper_attention", "_gather_pages", "_fused_qkv"}
CODES = {"_quantized_decode", "_quantized_attention", "_gather_codes", "_quantized_qkv"}


def rehearsed(codec, tmp_path, *helping, **extra):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | extra
    run = subprocess.run(
        [sys.executable, "-c", REHEARSE, codec, tmp_path / "launchers", *helping],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "compiled ahead" not in run.stderr, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("codec", "attention"), [("plain", PLAIN), pytest.param("int8", CODES, marks=pytest.mark.slow)]
)
def test_the_first_steps_are_compiled_once_and_never_run(codec, attention, tmp_path):
    """The driver here cannot launch: a kernel that ran would raise, and the log would warn of it."""
    found = rehearsed(codec, tmp_path)
    assert attention | {
        "_one_row",
        "_stream_rows",
        "_join",
        "_add_rms_norm",
        "_gated",
        "_chunk_tops",
        "_cut",
        "_draw",
        "_chunk_parts",
        "_merge_parts",
        "_open_rows",
        "_close_rows",
        "_gumbel_kernel",
    } <= set(found["first"])
    assert found["named"] and found["again"] == 0, "what is compiled once is known"
    assert found["launchers"] == found["first"], "each has its launcher made beside it"
    assert found["launched"] is not True, "outside a rehearsal kernels are launched"


@pytest.mark.parametrize("codec", [pytest.param("plain", marks=pytest.mark.slow), "int8"])
def test_drafted_steps_are_compiled_ahead_with_a_drafter(codec, tmp_path):
    """Steps that verify drafts, and trees beside prompts, meet no kernel that was not compiled. Negative control:
    without a drafter they are not gone through, and the first drafted steps compile."""
    found = {drafts: rehearsed(codec, tmp_path, DRAFTS=str(drafts)) for drafts in (8, 0)}
    assert not found[8]["later"] and not found[8]["again"] and "_merge_tiles" in found[8]["first"]
    assert found[0]["later"] > 5 and "_merge_tiles" not in found[0]["first"]


@pytest.mark.parametrize("codec", ["plain", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_draft_model_meets_no_kernel_for_its_trees(codec, tmp_path):
    """A model that grows trees verifies no drafts of its own. Negative control: a chain's model compiles for a tree."""
    found = {name: rehearsed(codec, tmp_path, **{name: "1"}) for name in ("TREES", "NO_TREES")}
    assert not found["TREES"]["later"] and not found["TREES"]["again"]
    assert found["NO_TREES"]["later"] > 2


@pytest.mark.parametrize(("tree", "trees"), [("dyspec", True), ("fixed", True), ("chain", False)])
def test_only_a_draft_model_that_grows_trees_goes_through_them(tree, trees, monkeypatch):
    met = []
    monkeypatch.setattr(build, "rehearse", lambda parts, max_drafts, trees: met.append((max_drafts, trees)))
    drafter = load_drafter(f"draft_model:model=nano,tree={tree}")
    drafter.prepare(EngineHost(EngineConfig.of(model="nano", device="cpu")))
    assert met == [(0, trees)]


@pytest.mark.slow  # a minute of compiling, twice
def test_other_processes_compile_all_of_it(tmp_path):
    found = rehearsed("plain", tmp_path, "helping", TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert not found["here"] and found["elsewhere"] == found["first"] == found["launchers"], (
        "it finds kernels and launchers made"
    )
    (tmp_path / "launchers").unlink()
    again = rehearsed("plain", tmp_path, "helping", TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert not again["here"] and not again["elsewhere"] and again["first"] == found["first"], (
        "what is cached is not asked for"
    )


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
def test_an_engine_with_a_process_of_its_own_is_helped(monkeypatch, device):
    met = []

    @contextmanager
    def helping():
        met.append("helped")
        yield
        met.append("done")

    monkeypatch.setattr(engine, "helping", helping)
    monkeypatch.setattr(engine, "Engine", lambda config: met.append(config.model.device) or config)
    config = EngineConfig().replace(device=device)
    assert process._factory(process.ENGINE)(config) is config
    assert met == (["cpu"] if device == "cpu" else ["helped", device, "done"])


def test_what_fails_ends_nothing(monkeypatch, caplog):
    monkeypatch.setattr(rehearsal, "use_triton", lambda tensor: True)
    monkeypatch.setattr(rehearsal, "rehearsing", nullcontext)
    met = []

    def forward(runner, rows):
        met.append(rows)
        if rows == 8:
            raise RuntimeError("this kernel does not compile")

    monkeypatch.setattr(rehearsal, "_forward", forward)
    monkeypatch.setattr(rehearsal, "_draw", lambda runner: met.append("draw"))
    driver = Driver()
    try:
        assert met[: len(rehearsal.ROWS) + 1] == ["draw", *rehearsal.ROWS]
        assert caplog.text.count("not compiled ahead") == 1 and "(8,)" in caplog.text
    finally:
        driver.close()
