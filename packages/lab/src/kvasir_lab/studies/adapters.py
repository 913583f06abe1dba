"""Measure adapters on a GPU.

    python -m kvasir_lab.studies adapters run OUT
        [--vllm SITE]    all of what follows, each result a file of the folder OUT
    python -m kvasir_lab.studies adapters write FOLDER             random adapters of the 8B shape, and FOLDER/case.toml
    kvasir bench run FOLDER/case.toml --json OUT.json
    python -m kvasir_lab.studies adapters load FOLDER OUT.json
        load time, and the longest pauses of 64 answers meanwhile

Adapters share one file of weights and differ in their scale, so that each is another one to the engines. ``run`` takes
some three minutes on an H100, and as long again with vLLM, whose packages are in the folder SITE. The case compares no
adapters, adapters that no request names, 8 and 64 resident ones, and with ``--turns`` 64 over 16 slots.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvasir import LLM, LoRARequest, SamplingParams
from kvasir.bench.result import arm, finish, result, spread
from kvasir.bench.workloads import SHAPES, shape_folder
from kvasir.layers.linear import Linear
from kvasir.layers.weights import Placement
from kvasir.models.decoder import Decoder
from kvasir.models.families import build_spec, find_family
from kvasir.models.stored import view_of

RANK = 16
COUNT = 64
# Answers that run while an adapter is loaded, and tokens of their prompts and of a new adapter's.
ANSWERS, PROMPT, FIRST_PROMPT = 64, 1024, 64
LOADS = 6
STEPS = 20  # steps that are watched after a prompt was sent
SETTINGS = {"max_model_len": 16384, "max_num_seqs": 256, "gpu_memory_utilization": 0.85}
WORKLOADS = """
[workloads.decode1]
batch = 1
prompt = 128
output = 128
measure = ["decode"]

[workloads.decode64]
batch = 64
prompt = 1024
output = 128
measure = ["decode"]

[workloads.prefill8k]
batch = 2
prompt = 8192
output = 2
measure = ["prefill"]
"""
TARGETS = """
[targets]
"decode1.decode_tok_s adapters8/none" = 0.89
"decode64.decode_tok_s adapters8/none" = 0.91
"decode64.decode_tok_s adapters64/none" = 0.87
"prefill8k.prefill_tok_s adapters8/none" = 0.94
"decode64.decode_tok_s unused/none" = 0.995
"decode64.decode_tok_s adapters8/vllm" = 1.15
"decode64.decode_tok_s adapters64/vllm_64" = 1.15
"""


def matrices(shape: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the matrices that adapters change, by stored module name."""
    config = SHAPES[shape]
    spec = build_spec(config)
    decoder = Decoder(spec, Placement(torch.device("meta"), torch.float32), num_positions=1)
    family, found = find_family(config["model_type"]), {}
    for i, block in enumerate(decoder.blocks):
        for room, layer in (("mixer", block.mixer), ("ffn", block.ffn)):
            for product in vars(layer).values():
                if isinstance(product, Linear):
                    for part, width in product.widths.items():
                        name = view_of(family.stored(f"layers.{i}.{room}.{part}.weight", spec)).name
                        found[name.removesuffix(".weight")] = width, product.num_inputs
    return found


def write(folder: Path, shape: str, turns: bool = False) -> None:
    """Write the adapters and the case."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for module, (outputs, inputs) in matrices(shape).items():
        a, b = (torch.randn(*size, generator=generator) for size in ((RANK, inputs), (outputs, RANK)))
        tensors[f"base_model.model.{module}.lora_A.weight"] = (a * inputs**-0.5).bfloat16()
        tensors[f"base_model.model.{module}.lora_B.weight"] = (b * 0.01).bfloat16()
    names = sorted({module.rsplit(".", 1)[-1] for module in matrices(shape)})
    weights = folder / "adapter_model.safetensors"
    save_file(tensors, weights)
    for i in range(COUNT):
        own = folder / f"{i:02d}"
        own.mkdir(exist_ok=True)
        (own / weights.name).unlink(missing_ok=True)
        os.link(weights, own / weights.name)
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK + i / 8, "bias": "none"}
        config |= {"target_modules": names, "base_model_name_or_path": shape, "init_lora_weights": True}
        (own / "adapter_config.json").write_text(json.dumps(config))
    (folder / "case.toml").write_text(case(folder, shape, turns))


def case(folder: Path, shape: str, turns: bool) -> str:
    """The case: no adapters, adapters that no request names, 8 and 64 resident ones; ``turns``: 64 over 16 slots."""

    def modules(count: int) -> str:
        return json.dumps([f"a{i}={folder.resolve() / f'{i:02d}'}" for i in range(count)])

    def arm_of(name: str, slots: int, count: int) -> str:
        lora = f"enable_lora = true\nmax_loras = {slots}\nmax_cpu_loras = {COUNT}\n"
        return f"\n[arms.{name}]\n{lora}" + (f"lora_modules = {modules(count)}\n" if count else "")

    settings = ", ".join(f"{key} = {value}" for key, value in SETTINGS.items())
    lora = f"enable_lora = true, max_lora_rank = {RANK}, max_cpu_loras = {COUNT}"
    peer = f"options = {{ {settings}, {lora}, max_loras = 8, lora_modules = {modules(8)} }}\n"
    return (
        f'title = "{shape} shape: LoRA adapters of rank {RANK} in all matrices"\nshape = "{shape}"\nrepeats = 1\n'
        f"rounds = 2\nsettings = {{ {settings} }}\n\n[arms.none]\n"
        + arm_of("unused", 8, 0)
        + arm_of("adapters8", 8, 8)
        + arm_of("adapters64", 64, 64)
        + (arm_of("turns64", 16, 64) if turns else "")
        + f'\n[peer]\nname = "vllm"\nrepeats = [2, 0]\n{peer}'
        + f"variants.vllm_64 = {{ max_loras = 64, lora_modules = {modules(64)} }}\n"
        + WORKLOADS
        + TARGETS
    )


def run(out: Path, shape: str, site: Path | None, turns: bool) -> int:
    """Measure everything. A part that fails leaves the results of the others."""
    out.mkdir(parents=True, exist_ok=True)
    peer = ["--no-peer"] if site is None else ["--peer-python-path", str(site)]
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        write(folder, shape, turns)
        commands = {
            f"adapters-load-{shape}": ["kvasir_lab.studies", "adapters", "load", home],
            f"adapters-{shape}": ["kvasir.cli.main", "bench", "run", str(folder / "case.toml"), *peer, "--json"],
        }
        codes = []
        for name, command in commands.items():
            last = ["--shape", shape] if "load" in name else []
            codes.append(subprocess.run([sys.executable, "-m", *command, str(out / f"{name}.json"), *last]).returncode)
    return max(codes)


def load(folder: Path, shape: str, output: Path) -> None:
    """Time loading while answers run: the reading, the filling of the slot, and the first prompt. That prompt also
    comes with a resident adapter, which shows what the prompt alone makes others wait."""
    with shape_folder(shape) as model:
        llm = LLM(model=model, load_format="dummy", skip_tokenizer_init=True, enable_lora=True, max_loras=8, **SETTINGS)
    with llm:
        engine, params = llm.engine, SamplingParams(max_tokens=2048, ignore_eos=True, detokenize=False, temperature=0)
        vocabulary = llm.info.tokenizer_size
        prompts = torch.randint(
            0, vocabulary, (ANSWERS + 1, PROMPT), generator=torch.Generator().manual_seed(0)
        ).tolist()
        first = LoRARequest("first", 1, str(folder / "00"))
        requests = [llm._request({"prompt_token_ids": ids}, params, first) for ids in prompts[:ANSWERS]]
        for request in requests:
            engine.submit(request)

        def prompted(i: int, adapter: LoRARequest) -> str:
            """Send a prompt that this adapter has not seen."""
            ids = prompts[-1][FIRST_PROMPT * i : FIRST_PROMPT * (i + 1)]
            late = llm._request({"prompt_token_ids": ids}, params, adapter)
            engine.submit(late)
            return late.id

        calm = steps(engine, 200)[50:]
        seconds, fills, pauses = [], [], {"reading": [], "filling": [], "first_prompt": [], "known_prompt": []}
        for i in range(1, 1 + LOADS):
            began = time.perf_counter()
            engine.adapters.start_loading(f"a{i}", str(folder / f"{i:02d}"))
            while not engine.adapters.loaded():
                pauses["reading"] += steps(engine, 1)
            seconds.append(time.perf_counter() - began)
            known = prompted(i, first)
            pauses["known_prompt"] += steps(engine, STEPS)
            engine.cancel(known)
            steps(engine, STEPS)
            filled, began = engine.adapters.filled, time.perf_counter()
            late = prompted(i, LoRARequest(f"a{i}"))
            while engine.adapters.filled == filled:
                pauses["filling"] += steps(engine, 1)
            fills.append(time.perf_counter() - began)
            pauses["first_prompt"] += pauses["filling"][-1:] + steps(engine, STEPS)
            engine.cancel(late)
    metrics = {
        "load_ms": spread([1e3 * s for s in seconds]),
        "fill_ms": spread([1e3 * s for s in fills]),
        "step_ms": spread([1e3 * s for s in calm]),
        "longest_calm_ms": 1e3 * max(calm),
        **{f"longest_{name}_ms": 1e3 * max(found) for name, found in pauses.items()},
        "longest_pause_ms": 1e3 * max(max(pauses[name]) for name in ("reading", "filling", "first_prompt")),
    }
    finish(result(f"adapters-load-{shape}", [arm("kvasir", {"shape": shape, "rank": RANK}, metrics)]), output, None)


def steps(engine, count: int) -> list[float]:
    """Seconds of each of ``count`` steps."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - began)
    return found


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "write", "load"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--shape", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--vllm", type=Path, metavar="SITE", help="folder of vLLM's packages, measured beside")
    parser.add_argument("--turns", action="store_true", help="also 64 adapters over 16 slots")
    options = parser.parse_args(given)
    if options.what == "run":
        return run(options.folder, options.shape, options.vllm, options.turns)
    if options.what == "write":
        write(options.folder, options.shape, options.turns)
    else:
        assert options.output is not None, "load needs the file of its result"
        load(options.folder, options.shape, options.output)
    return 0
