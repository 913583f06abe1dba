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

import kvasir
import kvasir_lab

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "kvasir"
LAB = ROOT / "packages" / "lab" / "src" / "kvasir_lab"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LAB_PROJECT = tomllib.loads((ROOT / "packages" / "lab" / "pyproject.toml").read_text())
PROJECTS = {PACKAGE: PROJECT, LAB: LAB_PROJECT}
MODEL = ("config.json", "tokenizer.json", "chat_template.jinja")
NEEDED = [
    *(f"assets/base/{name}" for name in MODEL),
    "assets/base/model.safetensors.index.json",
    "assets/base/model-00002-of-00002.safetensors.packed",
    "api/playground/index.html",
    "api/playground/vendor/README.md",
]
NEEDED_OF_LAB = [
    *(f"assets/nano/{name}" for name in MODEL),
    "assets/nano/model.safetensors.packed",
    "text/alice-in-wonderland.txt.bz2",
]
# Most bytes of the wheel, which holds the default model of 21 MiB.
WHEEL = 24 << 20

both = pytest.mark.parametrize("package", PROJECTS, ids=lambda folder: folder.name)


def data_files(package):
    """Files of a package that are neither modules nor leftovers."""
    return [
        str(f.relative_to(package))
        for f in package.rglob("*")
        if f.is_file() and f.suffix not in (".py", ".pyc") and not f.name.startswith(".")
    ]


def test_the_files_are_there():
    assert all((PACKAGE / name).is_file() for name in NEEDED)
    assert all((LAB / name).is_file() for name in NEEDED_OF_LAB)


@both
def test_every_data_file_goes_into_the_package(package):
    globs = PROJECTS[package]["tool"]["setuptools"]["package-data"][package.name]
    # As setuptools does: one star does not go into folders.
    taken = {f for pattern in globs for f in glob.glob(pattern, root_dir=package, recursive=True)}
    left = [f for f in data_files(package) if f not in taken]
    assert not left, f"no glob of package-data takes {left}"


@both
def test_every_folder_with_modules_is_a_package(package):
    """setuptools finds packages by their __init__.py and silently leaves out folders without one."""
    missing = {f.parent for f in package.rglob("*.py") if not (f.parent / "__init__.py").exists()}
    assert not missing


@both
def test_the_package_pins_nothing_and_wants_no_cuda(package):
    for need in PROJECTS[package]["project"]["dependencies"]:
        assert "==" not in need and "nvidia" not in need and "cuda" not in need
        assert not need.startswith("triton"), "torch for CUDA brings its own; the constraints bring it to development"
    assert "torch>=2.11" in PROJECTS[package]["project"]["dependencies"]


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def declared(project):
    return {re.split(r"[<>=\[; ]", need)[0].replace("-", "_") for need in project["project"]["dependencies"]}


# Asked for by name where they are missing.
OPTIONAL = {
    PACKAGE: {
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
    },
    # Kernel benches and studies run in a checkout: they compare with what is installed, and check as its tests do.
    LAB: {
        "matplotlib",
        "PIL",
        "flash_attn",
        "flash_attn_interface",
        "flashinfer",
        "psutil",
        "tests",
        "tools",
        "xgrammar",
    },
}
COMES_WITH = {"pydantic_core": "pydantic"}


@both
def test_what_the_package_imports_is_declared(package):
    """The lab's code also imports kvasir, whose name on the package index is somebody else's."""
    known = declared(PROJECTS[package]) | OPTIONAL[package] | {"kvasir", package.name}
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in package.rglob("*.py")
        for module in imported(file)
        if module not in sys.stdlib_module_names and COMES_WITH.get(module, module) not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_what_is_declared_is_imported():
    """A dependency of kvasir-lab that nothing imports would be installed for nothing."""
    used = {module for file in LAB.rglob("*.py") for module in imported(file)}
    assert declared(LAB_PROJECT) <= used
    assert not {"kvasir", "kvasir_lab"} & declared(LAB_PROJECT), "pip would fetch a stranger's package of this name"


def test_both_have_the_same_version_and_bounds():
    assert kvasir.__version__ == kvasir_lab.__version__
    assert set(LAB_PROJECT["project"]["dependencies"]) <= {
        need.split("  #")[0] for need in PROJECT["project"]["dependencies"]
    }
    ours, extras = (p["project"]["optional-dependencies"]["plots"] for p in (PROJECT, LAB_PROJECT))
    assert ours == extras


def test_make_targets_are_the_documented_ones():
    text = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "test-all"):
        assert re.search(rf"^{target}:", text, re.M)
    assert os.access(ROOT / "tools" / "install.sh", os.X_OK) and os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
def test_installed_wheels_work_on_their_own(tmp_path):
    """Build the wheels from a copy, unpack them elsewhere, and complete a prompt without the source tree: with kvasir
    alone, where a command of the lab says what is missing, and with both."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    copy = tmp_path / "copy"
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing += ["pyproject.toml", "README.md", "LICENSE*", "src", "packages"]
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
    build = [*pip, "wheel", "-q", "--no-deps", *(["--no-build-isolation"] if have.returncode == 0 else [])]
    site = tmp_path / "site"
    for package, project, needed in ((PACKAGE, copy, NEEDED), (LAB, copy / "packages" / "lab", NEEDED_OF_LAB)):
        subprocess.run([*build, "-w", tmp_path, project], check=True)
        (wheel,) = tmp_path.glob(f"{package.name}-*.whl")
        assert wheel.name.endswith("-py3-none-any.whl"), "nothing is compiled"
        assert wheel.stat().st_size <= WHEEL
        inside = {n.removeprefix(f"{package.name}/") for n in zipfile.ZipFile(wheel).namelist()}
        modules = {str(f.relative_to(package)) for f in package.rglob("*.py")}
        assert (modules | set(data_files(package)) | set(needed)) <= inside
        assert not any(n.startswith("tests") for n in inside)
        subprocess.run([*pip, "install", "-q", "--no-deps", "--target", site, wheel], check=True)
        done = run(site, "generate", "-p", "Once upon a time", "--max-tokens", "8")
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
        done = run(site, "lab", "tasks")
        if package == PACKAGE:
            assert done.returncode == 2 and done.stderr.count("\n") == 1 and "packages/lab" in done.stderr
        else:
            assert done.returncode == 0 and "countdown" in done.stdout


def run(site, *words):
    """Run a command with the packages in ``site`` alone, and those of this environment that are not ours."""
    code = (
        "import sys; site = sys.argv[1]\n"
        "sys.path[:] = [site, *(p for p in sys.path if not p.endswith(('/src', '/packages/lab/src')))]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        "import importlib.metadata as known; found = known.entry_points\n"
        "own = lambda e: not e.value.startswith('kvasir_lab') or str(e.dist.locate_file('')).startswith(site)\n"
        "known.entry_points = lambda **wanted: known.EntryPoints(filter(own, found(**wanted)))\n"
        "import kvasir.cli.main as m; assert m.__file__.startswith(site), m.__file__\n"
        "sys.argv[:] = ['kvasir', *sys.argv[2:]]; m.main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(site), *words],
        cwd=site,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
    )
