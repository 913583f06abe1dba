"""The wheel that `pip install .` makes: modules, and the other files without which nothing starts."""

import ast
import glob
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "kvasir"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEEDED = [
    *(
        f"assets/{model}/{name}"
        for model in ("base", "nano")
        for name in ("config.json", "tokenizer.json", "chat_template.jinja")
    ),
    "assets/base/model.safetensors.index.json",
    "assets/base/model-00002-of-00002.safetensors.packed",
    "assets/nano/model.safetensors.packed",
    "api/playground/index.html",
    "api/playground/vendor/README.md",
    "lab/text/alice-in-wonderland.txt.bz2",
]


def data_files():
    """Files of the package that are neither modules nor leftovers."""
    return [
        str(f.relative_to(PACKAGE))
        for f in PACKAGE.rglob("*")
        if f.is_file() and f.suffix not in (".py", ".pyc") and not f.name.startswith(".")
    ]


@pytest.mark.parametrize("name", NEEDED)
def test_the_files_are_there(name):
    assert (PACKAGE / name).is_file()


def test_every_data_file_goes_into_the_package():
    globs = PROJECT["tool"]["setuptools"]["package-data"]["kvasir"]
    # As setuptools does: one star does not go into folders.
    taken = {f for pattern in globs for f in glob.glob(pattern, root_dir=PACKAGE, recursive=True)}
    left = [f for f in data_files() if f not in taken]
    assert not left, f"no glob of package-data takes {left}"


def test_every_folder_with_modules_is_a_package():
    """setuptools finds packages by their __init__.py and silently leaves out folders without one."""
    missing = {f.parent for f in PACKAGE.rglob("*.py") if not (f.parent / "__init__.py").exists()}
    assert not missing


def test_the_package_pins_nothing_and_wants_no_cuda():
    for need in PROJECT["project"]["dependencies"]:
        assert "==" not in need and "nvidia" not in need and "cuda" not in need
        assert not need.startswith("triton"), "torch for CUDA brings its own; the constraints bring it to development"
    assert "torch>=2.11" in PROJECT["project"]["dependencies"]


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def test_what_the_package_imports_is_declared():
    declared = {re.split(r"[<>=\[; ]", d)[0].replace("-", "_") for d in PROJECT["project"]["dependencies"]}
    optional = {
        "triton",
        "matplotlib",
        "PIL",
        "transformers",
        "httpx",
        "vllm",
        "gguf",
        "llama_cpp",
        "opentelemetry",
        "zmq",
        "ray",
        "cryptography",
    }  # each asked for by name where it is missing
    comes_with = {"pydantic_core": "pydantic"}
    for file in PACKAGE.rglob("*.py"):
        for module in imported(file):
            if module in sys.stdlib_module_names or module == "kvasir" or module in optional:
                continue
            assert comes_with.get(module, module) in declared, f"{file.relative_to(ROOT)} imports {module}"


def test_make_targets_are_the_documented_ones():
    text = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "test-all"):
        assert re.search(rf"^{target}:", text, re.M)
    assert os.access(ROOT / "tools" / "install.sh", os.X_OK) and os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
def test_an_installed_wheel_works_on_its_own(tmp_path):
    """Build the wheel from a copy, unpack it elsewhere, and complete a prompt without the source tree."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    copy = tmp_path / "copy"
    listing = [
        "git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "pyproject.toml",
        "README.md",
        "LICENSE*",
        "src",
    ]
    tracked = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    # Like --no-build-isolation, when this environment has the build back end; else pip fetches it.
    have = subprocess.run(
        [sys.executable, "-c", "import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77"],
        capture_output=True,
    )
    subprocess.run(
        [
            *pip,
            "wheel",
            "-q",
            "--no-deps",
            *(["--no-build-isolation"] if have.returncode == 0 else []),
            "-w",
            tmp_path,
            copy,
        ],
        check=True,
    )
    (wheel,) = tmp_path.glob("kvasir-*.whl")
    assert wheel.name.endswith("-py3-none-any.whl"), "nothing is compiled"
    inside = {n.removeprefix("kvasir/") for n in zipfile.ZipFile(wheel).namelist()}
    modules = {str(f.relative_to(PACKAGE)) for f in PACKAGE.rglob("*.py")}
    assert (modules | set(data_files()) | set(NEEDED)) <= inside
    assert not any(n.startswith("tests") for n in inside)
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    code = (
        "import sys, kvasir, kvasir.cli.main as m; assert kvasir.__file__.startswith(sys.argv[1]), kvasir.__file__; "
        "sys.argv[:] = "
        "['kvasir', 'generate', '-p', 'Once upon a time', '--max-tokens', '8']; m.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
