"""The record of GPU tests: what makes a file due again."""

import json
from types import SimpleNamespace

import pytest

from tools.gpu_tests import MARK, Recorder, due, gpu_test_files, hash_of, store

TEST = "tests/test_a.py"


@pytest.fixture
def house(tmp_path):
    """A small repository: a test that imports one module inside a function, and that module another one."""
    files = {
        "tests/__init__.py": "",
        "tests/conftest.py": "",
        "tests/test_a.py": f"# pytest.{MARK}\ndef test():\n    from kvasir.one import f\n",
        "tests/test_plain.py": "def test(): pass\n",
        "src/kvasir/__init__.py": "",
        "src/kvasir/one.py": "import kvasir.two\ndef f():\n    import kvasir.late\n",
        "src/kvasir/two.py": "",
        "src/kvasir/late.py": "",
        "src/kvasir/other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def passed(house):
    return {TEST: {"passed": 2, "failed": 0, "hash": hash_of(TEST, house), "commit": "abc"}}


def test_files_are_found_by_their_mark(house):
    assert gpu_test_files(house) == [TEST]
    assert "tests/learn/test_slices_gpu.py" in gpu_test_files()


# Each case reads the folder anew, since what a file needs is kept for the life of a process.
@pytest.mark.parametrize("changed", [TEST, "tests/conftest.py", "src/kvasir/one.py", "src/kvasir/two.py"])
def test_a_change_of_what_is_imported_makes_a_file_due(house, changed):
    record = passed(house)
    assert due(record, [TEST], house) == []
    (house / changed).write_text((house / changed).read_text() + "x = 1\n")
    assert due(record, [TEST], house) == [(TEST, "changed since abc")]


@pytest.mark.parametrize("changed", ["src/kvasir/other.py", "src/kvasir/late.py", "tests/test_plain.py"])
def test_other_changes_do_not(house, changed):
    record = passed(house)
    (house / changed).write_text("x = 1\n")
    assert due(record, [TEST], house) == []


def test_files_that_failed_or_never_ran_are_due(house):
    assert due({}, [TEST], house) == [(TEST, "was never run")]
    for counts in ({"failed": 1}, {"passed": 0}):
        assert due({TEST: passed(house)[TEST] | counts}, [TEST], house)


def test_counts_by_file():
    recorder = Recorder()
    for when, failed in [("setup", False), ("call", False), ("teardown", False), ("call", True)]:
        report = SimpleNamespace(nodeid=f"{TEST}::test", when=when, failed=failed, passed=not failed, duration=0.5)
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_collectreport(SimpleNamespace(nodeid="tests/test_b.py", failed=True))
    assert recorder.files[TEST] == {"passed": 1, "failed": 1, "seconds": 2.0}
    assert recorder.files["tests/test_b.py"]["failed"] == 1


def test_a_record_replaces_the_files_that_it_names_and_drops_those_that_are_gone(tmp_path):
    stored, record = tmp_path / "stored.json", tmp_path / "record.json"
    here = gpu_test_files()[:2]
    stored.write_text(json.dumps({here[0]: {"commit": "old"}, here[1]: {"commit": "old"}, "tests/gone.py": {}}))
    record.write_text(json.dumps({here[1]: {"commit": "new"}}))
    store(record, stored)
    assert json.loads(stored.read_text()) == {here[0]: {"commit": "old"}, here[1]: {"commit": "new"}}
