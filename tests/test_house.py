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
LAB = ROOT / "packages" / "lab" / "src" / "kvasir_lab"
OURS = {"kvasir", "kvasir_lab"}
FILES = [*sorted(PACKAGE.rglob("*.py")), *sorted(LAB.rglob("*.py"))]

# A module may import from its own layer and from those before it. The last is the other distribution, as one room.
LAYERS = [
    ["types", "errors", "logs", "progress", "records", "compose", "fair_threads", "plain_files", "tables", "version"],
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
    ["bench"],
    ["cli"],
    ["__main__"],
    ["kvasir_lab"],
]
RANK = {room: i for i, rooms in enumerate(LAYERS) for room in rooms}
RANK[""] = RANK["__main__"]  # kvasir/__init__ names everything, lazily

# The same for the rooms inside a room. "": the files that stand in none and are not named.
INNER_LAYERS = {
    "engine": [["part"], ["pages"], ["schedule"], ["ways"], ["drafts", "variants"], ["start"], [""]],
    "api": [["calls"], ["text"], ["http", "offline"], ["protocols"], ["scaling", "admin"], [""]],
}


def room(module: str) -> str:
    parts = module.split(".")
    if parts[0] == "kvasir_lab":
        return parts[0]
    return parts[1] if len(parts) > 1 else ""


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(file: Path) -> list[str]:
    found = []
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] in OURS:
            if node.module == "kvasir":
                found += [f"kvasir.{a.name}" for a in node.names if a.name in RANK]
            else:
                found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in OURS]
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
    home = LAB if LAB in file.parents else PACKAGE
    return ".".join(file.relative_to(home.parent).with_suffix("").parts).removesuffix(".__init__")


# One test for all files, which lists those that fail: a test for each took a tenth of the suite's tests.
def test_imports_go_one_way():
    wrong = [
        f"{module_name(file)} imports {target}, which stands to its right"
        for file in FILES
        for target in set(imports(file)) - type_checking_only(file)
        if RANK[room(target)] > RANK[room(module_name(file))]
    ]
    assert not wrong, "\n".join(wrong)


def inner_room(module: str) -> str:
    """The room inside a room: "pages" for kvasir.engine.pages.prefix, "part" for the seam, "" for the loop."""
    outer, inner = [*module.split("."), ""][1:3]
    named = any([inner] == layer for layer in INNER_LAYERS[outer])
    return inner if named or (inner and (PACKAGE / outer / inner).is_dir()) else ""


@pytest.mark.parametrize("outer", INNER_LAYERS)
def test_imports_inside_a_room_go_one_way(outer):
    rank = {inner: i for i, inners in enumerate(INNER_LAYERS[outer]) for inner in inners}
    files = sorted((PACKAGE / outer).rglob("*.py"))
    assert {inner_room(module_name(f)) for f in files if f.parent != PACKAGE} >= set(rank) - {""}
    assert all(inner_room(module_name(f)) in rank for f in files)
    wrong = [
        f"{module_name(file)} imports {target}, which stands to its right"
        for file in files
        for target in set(imports(file))
        if room(target) == outer and target.count(".") > 1
        if rank[here := inner_room(module_name(file))] < rank[there := inner_room(target)]
        or (rank[here] == rank[there] and here != there)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_import_check_can_fail(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from kvasir.api.server import serve\n")
    assert imports(bad) == ["kvasir.api.server"] and RANK[room("kvasir.api.server")] > RANK["kv"]
    other = tmp_path / "other.py"
    other.write_text("from kvasir_lab.lookup import load_task\n")
    assert imports(other) == ["kvasir_lab.lookup"] and RANK[room("kvasir_lab.lookup")] > RANK["cli"]


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
    "engine/pages/evictions",
    "engine/schedule/schedulers",
    "models/families",
    "models/readers",
    "convert/converters",
    "hooks/ops",
    "scaling/strategies",
    "speculation/drafters",
    "speculation/head_kinds",
    "speculation/published/layouts",
    "decoding/processors",
    "kvasir_lab/trained_drafters",
    "kvasir_lab/trained_models",
    "api/calls/tool_parsers",
    "api/calls/reasoning_parsers",
    "cluster/routers",
]


def folder_of(family: str) -> Path:
    return (LAB.parent if family.startswith("kvasir_lab/") else PACKAGE) / family


def package_of(family: str) -> str:
    return ("" if family.startswith("kvasir_lab/") else "kvasir.") + family.replace("/", ".")


@pytest.mark.parametrize("family", TECHNIQUES)
def test_a_technique_imports_no_sibling(family):
    package = package_of(family)
    for file in folder_of(family).glob("*.py"):
        for target in imports(file):
            assert not target.startswith(package + "."), (
                f"{file.name} imports {target}: shared code moves up to the seam"
            )


# Names of techniques that a core file may hold, and why. Benchmarks and the lab measure techniques by name.
NAMED = {
    "config.py": {"plain", "fcfs", "expected_loss", "cost", "fp8"},  # defaults of settings, and a type of activations
    "cli/main.py": {"torch"},  # the library that is slow to import
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
    # methods of speculation that vLLM has, too
    "api/offline/vllm_speculation.py": {"ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp", "dflash"},
    "api/calls/json_scan.py": {"u4"},  # the fourth digit of an escape
    "engine/start/codec_choice.py": {"plain", "fp8"},  # what vLLM's words for cache types mean
    "models/quantisation.py": {"fp8"},  # a type of activations
    "models/loader.py": {"fp8"},  # likewise
    "layers/weights.py": {"fp8"},  # likewise
    "layers/weight_format.py": {"plain"},  # the format of a weight that nobody quantised
    "layers/product_backend.py": {"triton"},  # the products that formats bring themselves
    "convert/calibrate.py": {"plain", "torch"},  # the reference that a layer alone runs on
    "layers/spec.py": {"mla"},  # a kind of mixer
    "attention/backend.py": {"plain"},  # a layout of pages, as in ``Codec.kernel``
    "tuned.py": {"int4", "u4", "nvfp4"},  # layouts
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
    "kv/prompt_window.py": {"budget"},  # a parameter that requests may change: tokens that stay
    "kv/policies/lazy_eviction.py": {"budget"},  # likewise
    "kv/policies/r_kv.py": {"budget"},  # likewise
    "kernels/_triton.py": {"triton"},  # the Python package
    "attention/paged.py": {"triton"},  # whose kernels a cached plan is for
    "cli/doctor.py": {"torch", "triton"},  # the Python packages
    "scaling/solve.py": {"budget"},  # likewise
    "scaling/engine_endpoint.py": {"budget"},  # forces the end of a part of a reply
    "scaling/report.py": {"cost"},  # the price of a run
    "api/scaling/scaling.py": {"cost"},  # likewise
    "api/scaling/routes_scaling.py": {"cost"},  # likewise
    "api/text/processing.py": {"budget"},  # vLLM's thinking_token_budget
    "api/http/service.py": {"priority"},  # the request's parameter
    "client/admission.py": {"priority"},  # likewise
    "client/crash_dump.py": {"priority"},  # likewise
    "api/protocols/responses_journal.py": {"record"},  # a field of a line
    "api/protocols/routes_responses.py": {"record"},  # likewise
    "models/checkpoint.py": {"modelopt"},  # whose older files have a file of their own for it
    "models/advice.py": {"merge_lora", "gguf"},  # the command that helps with an adapter's folder, and a package
}
# These compare methods by hand, outside an engine.
BY_HAND = ("kvasir_lab/kernels/", "kvasir_lab/studies/", "kvasir_lab/ssa_attention.py")
MEASURE = ("bench/", "kvasir_lab/")


def technique_names() -> set[str]:
    return {file.stem for family in TECHNIQUES for file in folder_of(family).glob("*.py") if file.stem[0] != "_"}


def is_technique(file: Path) -> bool:
    return any(folder_of(family) in file.parents for family in TECHNIQUES)


def techniques_in(text: str, names: set[str]) -> tuple[set[str], set[str]]:
    """The technique modules that a source imports, and the techniques that its string literals name, with options or
    without."""
    imported, named = set(), set()
    packages = tuple(package_of(family) + "." for family in TECHNIQUES)
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
        where = str(file.relative_to(LAB.parent if LAB in file.parents else PACKAGE))
        imported, named = techniques_in(file.read_text(), names)
        if imported and not where.startswith(BY_HAND):
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
    if name.startswith(("src/kvasir/assets/", "packages/lab/src/kvasir_lab/assets/")):
        return "assets"
    if name.startswith(("bench/results/", "bench/traces/")):
        return "results"
    if name.startswith("packages/lab/src/kvasir_lab/text/"):
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
