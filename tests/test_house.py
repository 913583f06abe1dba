"""The house rules that a program can check: imports, sizes, and what no file may hold."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "kvasir"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import from its own layer and from those before it.
LAYERS = [
    ["types", "errors", "logs", "progress", "records", "compose", "fair_threads", "plain_files"],
    ["config", "technique", "tuned_entry", "tuned"],
    ["client"],
    ["cluster"],
    ["kernels"],
    ["hooks"],
    ["layers", "attention", "kv"],
    ["models"],
    ["decoding", "speculation"],
    ["learn"],
    ["engine", "convert"],
    ["scaling"],
    ["api"],
    ["lab", "bench"],
    ["cli"],
    ["__main__"],
]
RANK = {room: i for i, rooms in enumerate(LAYERS) for room in rooms}
RANK[""] = len(LAYERS)  # kvasir/__init__ names everything, lazily


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(file: Path) -> list[str]:
    found = []
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "kvasir":
            if node.module == "kvasir":
                found += [f"kvasir.{a.name}" for a in node.names if a.name != "__version__"]
            else:
                found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] == "kvasir"]
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{file}: relative imports hide the room"
    return found


def type_checking_only(file: Path) -> set[str]:
    """Modules imported for annotations only: they never run."""
    found = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            found |= {n.module for n in ast.walk(node) if isinstance(n, ast.ImportFrom) and n.module}
    return found


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


# One test for all files, which lists those that fail: a test for each took a tenth of the suite's tests.
def test_imports_go_one_way():
    wrong = [
        f"{module_name(file)} imports {target}, which stands to its right"
        for file in FILES
        for target in set(imports(file)) - type_checking_only(file)
        if RANK[room(target)] > RANK[room(module_name(file))]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_import_check_can_fail(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from kvasir.api.server import serve\n")
    assert imports(bad) == ["kvasir.api.server"] and RANK[room("kvasir.api.server")] > RANK["kv"]


def test_no_module_stands_on_itself():
    """Imports for annotations and those inside functions included: a reader meets every module after what it stands
    on."""
    modules = {module_name(f) for f in FILES}
    stands_on = {module_name(f): set() for f in FILES}
    for file in FILES:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ImportFrom) and node.module:
                named = {m if (m := f"{node.module}.{a.name}") in modules else node.module for a in node.names}
                stands_on[module_name(file)] |= named & modules
    TopologicalSorter(stands_on).prepare()  # raises CycleError with the circle


def test_types_import_no_other_room():
    assert {room(name) for file in (PACKAGE / "types").glob("*.py") for name in imports(file)} == {"types"}


TECHNIQUES = [
    "kv/codecs",
    "layers/formats",
    "layers/product_backends",
    "attention/backends",
    "layers/recurrences",
    "engine/schedulers",
    "models/families",
    "models/readers",
    "convert/converters",
    "hooks/ops",
    "scaling/strategies",
    "speculation/drafters",
    "speculation/head_kinds",
    "decoding/processors",
    "lab/trained_drafters",
    "lab/trained_models",
    "api/tool_parsers",
    "api/reasoning_parsers",
    "cluster/routers",
]


@pytest.mark.parametrize("family", TECHNIQUES)
def test_a_technique_imports_no_sibling(family):
    package = "kvasir." + family.replace("/", ".")
    for file in (PACKAGE / family).glob("*.py"):
        for target in imports(file):
            assert not target.startswith(package + "."), (
                f"{file.name} imports {target}: shared code moves up to the seam"
            )


# Names of techniques that a core file may hold, and why. Benchmarks, the lab and their commands measure techniques by
# name.
NAMED = {
    "config.py": {"plain", "fcfs", "cost", "fp8"},  # defaults of settings, and a type of activations
    "errors.py": {"humming", "fla", "gguf"},  # extras of pyproject.toml
    "models/gguf_file.py": {"gguf"},  # an extra
    "layers/codes.py": {"compressed_tensors", "int8"},  # whose config.json a converter writes; a type of inputs
    "models/compressed_codes.py": {"i8", "u4", "nvfp4"},  # the formats that keep its codes
    "kernels/nibble_gemv.py": {"u4", "mxfp4", "nvfp4"},  # layouts of codes
    "kernels/codes_gemv.py": {"i8", "u4", "mxfp4", "nvfp4", "fp6", "q4_k", "q6_k"},  # layouts of codes
    "kernels/codes_moe.py": {"i8", "u4", "mxfp4", "nvfp4"},  # likewise
    "kernels/weight_codes.py": {"i8", "u4", "fp6"},  # likewise
    "models/gguf_folder.py": {"gguf", "llama", "qwen2", "qwen3"},  # its reader, and its architectures
    "models/gguf_tokenizer.py": {"llama"},  # a kind of its tokenizers
    "models/gguf_words.py": {"qwen2", "deepseek_v3"},  # names of its pre-tokenizers
    "models/growth.py": {"suffix"},  # a field of a tokenizer's steps
    "api/vllm_flags.py": {"mistral", "awq", "gptq", "modelopt"},  # a mode of tokenizers, and values of --quantization
    "api/vllm_args.py": {"ngram", "suffix", "draft_model"},  # methods of speculation that vLLM has, too
    "api/json_scan.py": {"u4"},  # the fourth digit of an escape
    "engine/codec_choice.py": {"plain", "fp8"},  # what vLLM's words for cache types mean
    "models/quantisation.py": {"fp8"},  # a type of activations
    "models/loader.py": {"fp8"},  # likewise
    "layers/weights.py": {"fp8"},  # likewise
    "layers/weight_format.py": {"plain"},  # the format of a weight that nobody quantised
    "layers/product_backend.py": {"triton"},  # the products that formats bring themselves
    "convert/calibrate.py": {"plain", "torch"},  # the reference that a layer alone runs on
    "layers/spec.py": {"mla"},  # a kind of mixer
    "attention/backend.py": {"plain"},  # a layout of pages, as in ``Codec.kernel``
    "tuned.py": {"int4", "u4"},  # layouts
    "kernels/native/program.py": {"plain", "int4", "int8", "fp8", "add"},  # layouts, and a call
    "kernels/decode_attention.py": {"budget"},  # an argument: tiles that a program may read
    "kernels/paged_attention.py": {"budget"},  # likewise
    "kernels/quantized_attention.py": {"int4", "budget"},  # a layout, and likewise
    "kernels/quantized_decode.py": {"int4", "budget"},  # likewise
    "kernels/quantized_qkv.py": {"int4", "int8", "fp8"},  # layouts
    "kernels/latent_decode.py": {"plain", "int8", "fp8", "budget"},  # layouts, and an argument
    "kernels/lowrank_decode.py": {"budget"},  # likewise
    "kernels/latent_rows.py": {"plain", "int8"},  # layouts
    "kernels/latent_prompt.py": {"plain", "int8"},  # layouts
    "kernels/_triton.py": {"triton"},  # the Python package
    "attention/paged.py": {"triton"},  # whose kernels a cached plan is for
    "cli/doctor.py": {"torch", "triton"},  # the Python packages
    "cli/solve.py": {"budget"},  # the tokens of a run
    "cli/solve_job.py": {"budget"},  # likewise
    "scaling/solve.py": {"budget"},  # likewise
    "scaling/engine_endpoint.py": {"budget"},  # forces the end of a part of a reply
    "scaling/report.py": {"cost"},  # the price of a run
    "api/scaling.py": {"cost"},  # likewise
    "api/routes_scaling.py": {"cost"},  # likewise
    "cli/eval.py": {"majority"},  # a column of the lab's scores
    "api/processing.py": {"budget"},  # vLLM's thinking_token_budget
    "api/service.py": {"priority"},  # the request's parameter
    "client/admission.py": {"priority"},  # likewise
    "client/crash_dump.py": {"priority"},  # likewise
    "api/responses_journal.py": {"record"},  # a field of a line
    "api/routes_responses.py": {"record"},  # likewise
    "models/checkpoint.py": {"modelopt"},  # whose older files have a file of their own for it
    "models/advice.py": {"merge_lora", "gguf"},  # the command that helps with an adapter's folder, and a package
}
MEASURE = ("bench/", "lab/", "cli/solve_ablation.py")


def technique_names() -> set[str]:
    return {file.stem for family in TECHNIQUES for file in (PACKAGE / family).glob("*.py") if file.stem[0] != "_"}


def is_technique(file: Path) -> bool:
    return any(str(file.relative_to(PACKAGE)).startswith(family + "/") for family in TECHNIQUES)


def techniques_in(text: str, names: set[str]) -> tuple[set[str], set[str]]:
    """The technique modules that a source imports, and the techniques that its string literals name, with options or
    without."""
    imported, named = set(), set()
    packages = tuple("kvasir." + family.replace("/", ".") + "." for family in TECHNIQUES)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        else:
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        imported |= {m for m in modules if m.startswith(packages) and m.rpartition(".")[2] in names}
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named |= {node.value.partition(":")[0].replace("-", "_")} & names
    return imported, named


def test_the_core_knows_no_technique():
    """It asks the seam for traits. What a technique is called is for settings and for the technique's own file."""
    names, wrong = technique_names(), []
    for file in FILES:
        if is_technique(file):
            continue
        where = str(file.relative_to(PACKAGE))
        imported, named = techniques_in(file.read_text(), names)
        if imported:
            wrong.append(f"{where} imports {', '.join(imported)}: ask the seam, or load it by name")
        if not where.startswith(MEASURE) and named != NAMED.get(where, set()):
            wrong.append(f"{where} names {', '.join(named) or 'none'}: see NAMED")
    assert not wrong, "\n".join(wrong)


def test_the_check_for_techniques_can_fail():
    names = technique_names()
    assert {"plain", "torch", "fcfs", "suffix", "medusa"} <= names
    assert techniques_in("from kvasir.kv.codecs.plain import PlainCodec", names)[0] == {"kvasir.kv.codecs.plain"}
    assert techniques_in("def f():\n    from kvasir.kv.codecs import plain", names)[0] == {"kvasir.kv.codecs.plain"}
    assert techniques_in("load(DRAFTERS, 'token-recycling:width=2')", names)[1] == {"token_recycling"}
    assert techniques_in("from kvasir.models.families import find_family\nx = 'a plain text'", names) == (set(), set())


def test_files_stay_readable():
    counts = {file: len(file.read_text().splitlines()) for file in FILES}
    wrong = [
        f"{module_name(file)} has {count} lines; split it by job"
        for file, count in counts.items()
        if count > (700 if "kernels" in file.parts else 500)
    ]
    assert not wrong, "\n".join(wrong)


def test_files_of_tests_stay_readable():
    for file in sorted((ROOT / "tests").rglob("*.py")):
        count = len(file.read_text().splitlines())
        assert count <= 600, f"{file.relative_to(ROOT)} has {count} lines; split it by subject"


def test_every_module_says_what_it_is():
    """Packages too: the docstring of ``__init__.py`` says what the room is for, in a first line that is a whole
    sentence."""
    for file in FILES:
        doc = ast.get_docstring(tree(file))
        assert doc, f"{file} has no module docstring"
        if file.name == "__init__.py":
            assert doc.split("\n")[0].endswith("."), f"the docstring of {file} must open with one sentence on one line"


def test_every_folder_of_modules_is_a_package():
    for folder in {f.parent for f in FILES}:
        assert (folder / "__init__.py").exists(), f"{folder} has modules but no __init__.py that says what it is for"


# A docstring that starts with one of these words has no subject: "Of ``memory``." says less than it seems to.
BARE = re.compile(
    r"(Of|By|Whose|Who|What|Where|From|In|Beside|But|With|For|To|As|At|On|How|So|Since|Until|Over|Behind|Else|And)\b"
)


def bare_docstrings(module: ast.AST) -> list[str]:
    """First lines of docstrings that start with a bare preposition or relative."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [ast.get_docstring(node) or "" for node in ast.walk(module) if isinstance(node, documented)]
    return [doc.splitlines()[0] for doc in docs if BARE.match(doc)]


def test_docstrings_start_with_a_noun_or_a_verb():
    wrong = [f"{module_name(file)}: {doc}" for file in FILES for doc in bare_docstrings(tree(file))]
    assert not wrong, "\n".join(wrong)


def test_the_check_of_docstrings_can_fail():
    assert bare_docstrings(ast.parse('def f():\n    """Of ``memory``."""')) == ["Of ``memory``."]
    assert not bare_docstrings(ast.parse('def f():\n    """Number of int64 elements that ``memory`` must hold."""'))


def test_no_bare_except_and_no_pickle():
    for file in FILES:
        for node in ast.walk(tree(file)):
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{file}:{node.lineno}: bare except"
        assert not re.search(r"^\s*(import|from) pickle", file.read_text(), re.M), f"{file} imports pickle"


# -------------------------------------------------------------------------------------------------------------- imports


def test_importing_kvasir_needs_no_torch_and_is_quick():
    """Front ends start in their own process: nothing they import may pull torch in."""
    code = (
        "import sys, kvasir, kvasir.config, kvasir.types, kvasir.cli.main, kvasir.api.server;"
        "import kvasir.client.engine_client, kvasir.client.admission, kvasir.cluster.cluster_client;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", "import kvasir"], capture_output=True, text=True)
    total = next(int(line.split("|")[1]) for line in reversed(done.stderr.splitlines()) if line.endswith(" kvasir"))
    assert total < 1_000_000, f"import kvasir takes {total} us"


def test_no_machine_paths_in_the_tree():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for name in tracked:
        file = ROOT / name
        if (
            file.suffix in (".py", ".md", ".toml", ".sh", ".json", ".txt", "")
            and file.is_file()
            and file.stat().st_size < 2_000_000
        ):
            if file == Path(__file__):
                continue
            text = file.read_text(errors="ignore")
            for word in ("/work/", "/tmp/briefs"):
                assert word not in text, f"{name} names {word}"


# Most MiB of each part of the tree; together they are the limit of 45 MiB, with one to spare.
BUDGETS = {"assets": 26, "results": 4, "text": 2, "pictures": 2, "vendor": 1, "code": 11}


def part_of(name: str) -> str:
    """Which part of the tree a tracked file counts to."""
    if name.startswith("src/kvasir/assets/"):
        return "assets"
    if name.startswith(("bench/results/", "bench/traces/")):
        return "results"
    if name.startswith("src/kvasir/lab/text/"):
        return "text"
    if "/vendor/" in name:
        return "vendor"
    return "pictures" if name.endswith((".png", ".svg", ".gif", ".jpg")) else "code"


def test_the_tree_stays_small():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    sizes = {name: (ROOT / name).stat().st_size for name in tracked if (ROOT / name).is_file()}
    parts = dict.fromkeys(BUDGETS, 0)
    for name, size in sizes.items():
        parts[part_of(name)] += size
    for part, size in parts.items():
        assert size < BUDGETS[part] << 20, f"{part}: {size / 2**20:.1f} MiB of {BUDGETS[part]}"
    assert sum(sizes.values()) < 45 << 20
    assert max(sizes.values(), default=0) < 15 << 20
