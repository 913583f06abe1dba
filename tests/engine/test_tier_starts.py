"""Starts with tiers: sizes and refusals, a disk that is found again after a restart or a kill, and weights that
change."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvasir.config import EngineConfig
from kvasir.engine.start import tier_choice
from kvasir.engine.start.tier_choice import free_host_memory, host_bytes
from kvasir.errors import ConfigError
from tests.engine.driver import Driver, Output

PROMPT = [300 + (7 * i) % 1000 for i in range(70)]
DISK_BYTES = 8 << 20


def disk(folder: Path) -> dict:
    return {"kv_disk": f"{folder},bytes={DISK_BYTES}"}


def answer(driver: Driver, name: str, tenant: str = "", prompt: list[int] = PROMPT) -> Output:
    request = driver.request(name, prompt, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, logprobs=0)
    request.tenant = tenant
    driver.run([request])
    return driver.outputs[name, 0]


# ------------------------------------------------------------------------------------------------------------- sizes


def test_a_container_limits_host_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tier_choice, "available_memory", lambda: 1000)
    assert free_host_memory(tmp_path) == 1000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert free_host_memory(tmp_path) == 1000
    (tmp_path / "memory.max").write_text("700\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert free_host_memory(tmp_path) == 400
    (tmp_path / "memory.current").write_text("800\n")
    assert free_host_memory(tmp_path) == 0


def test_the_host_tier_is_off_unless_files_need_it_on_a_gpu(monkeypatch):
    monkeypatch.setattr(tier_choice, "free_host_memory", lambda: 1000)
    config, gpu = EngineConfig.of(kv_disk="pages,bytes=9"), torch.device("cuda")
    assert host_bytes(EngineConfig(), gpu, 100) == 0
    assert host_bytes(config, torch.device("cpu"), 100) == 0
    assert host_bytes(config, gpu, 100) == 250 and host_bytes(config, gpu, 10) == 80
    assert host_bytes(config.replace(kv_host_bytes=0), gpu, 100) == 0
    with pytest.raises(ConfigError, match="than this machine or its container has left .* Give 250 or less"):
        host_bytes(config.replace(kv_host_bytes=1001), gpu, 100)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(kv_disk="/tmp/pages"), "is not PATH,bytes=N"),
        (dict(kv_disk=",bytes=100"), "is not PATH,bytes=N"),
        (dict(kv_disk_key="k"), "add --kv-disk PATH,bytes=N"),
        (dict(kv_host_bytes=1 << 20, enable_prefix_caching=False), "prefix cache, which is off here. Leave out"),
        (dict(kv_host_bytes=100), "Give --kv-host-bytes"),
        (dict(kv_tier=("hosts",)), "Did you mean 'host'"),
    ],
)
def test_what_cannot_work_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        Driver(num_pages=16, max_model_len=112, **options)


def test_a_cluster_and_a_disk_are_refused(tmp_path):
    driver = Driver(num_pages=16, max_model_len=112, **disk(tmp_path))
    with pytest.raises(ConfigError, match="use --kv-host-bytes, or run one server"):
        driver.engine.join(b"k" * 32)
    driver.close()
    driver = Driver(num_pages=16, max_model_len=112, kv_host_bytes=1 << 20)
    assert driver.engine.join(b"k" * 32) is not None
    driver.close()


def test_a_tier_of_ones_own(tmp_path):
    """A tier in a file of the user's, below the device: it stores pages in a list."""
    file = tmp_path / "shoebox.py"
    file.write_text(
        '"""Pages in a Python dict, to show the seam. Exact."""\n'
        "from kvasir.kv.tier import Tier\n\n\n"
        "class Shoebox(Tier):\n"
        "    def open(self, place):\n"
        "        self.num_slots, self.kept = place.slots_in(1 << 20), {}\n"
        "        return []\n\n"
        "    def write(self, group, rows, moves):\n"
        "        self.kept |= {(group, m.slot): rows[m.row].clone() for m in moves}\n"
        "        return [True] * len(moves)\n\n"
        "    def read(self, group, rows, moves):\n"
        "        for m in moves:\n"
        "            rows[m.row] = self.kept[group, m.slot]\n"
        "        return [True] * len(moves)\n"
    )
    driver = Driver(num_pages=8, max_model_len=112, kv_tier=(str(file),))
    first = answer(driver, "a")
    answer(driver, "b", prompt=[n + 1 for n in PROMPT])
    again = answer(driver, "c")
    assert again.num_cached == 64 and (again.tokens, again.logprobs) == (first.tokens, first.logprobs)
    assert driver.engine.stats().tiers["shoebox"]["hit_tokens"] > 0
    driver.close()


# ---------------------------------------------------------------------------------------------------------- restarts


def test_a_restart_finds_the_pages_of_each_tenant(tmp_path):
    driver = Driver(num_pages=16, max_model_len=112, **disk(tmp_path))
    first = answer(driver, "a", "one")
    driver.close()
    driver = Driver(num_pages=16, max_model_len=112, **disk(tmp_path))
    assert answer(driver, "b", "two").num_cached == 0, "tenants stay apart"
    again = answer(driver, "c", "one")
    assert again.num_cached == 64 and (again.tokens, again.logprobs) == (first.tokens, first.logprobs)
    driver.close()


@pytest.mark.parametrize("change", [dict(kv_codec="int8"), dict(batch_invariant=False), dict(kv_disk_key="k")], ids=str)
def test_other_settings_find_nothing(change, tmp_path):
    options = dict(num_pages=16, max_model_len=112, page_slots=16)
    driver = Driver(**options, **disk(tmp_path))
    answer(driver, "a")
    driver.close()
    driver = Driver(**options, **disk(tmp_path), **change)
    assert answer(driver, "b").num_cached == 0
    driver.close()


KILLED = """
import sys
from tests.engine.test_tier_starts import Driver, PROMPT, answer, disk
driver = Driver(num_pages=16, max_model_len=112, **disk(sys.argv[1]))
answer(driver, "a")
print("stored", flush=True)
while True:
    answer(driver, "b", prompt=[n + 2 for n in PROMPT])
    driver.outputs.clear()
"""


def test_a_killed_engine_loses_only_what_was_on_the_device(tmp_path):
    """The first prompt was on the disk when the process was killed in the middle of other work."""
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "stored\n"
        with pytest.raises(ConfigError, match="in use by another process"):
            Driver(num_pages=16, max_model_len=112, **disk(tmp_path))
        process.send_signal(signal.SIGKILL)
    alone = Driver(num_pages=16, max_model_len=112)
    expected = answer(alone, "a")
    alone.close()
    driver = Driver(num_pages=16, max_model_len=112, **disk(tmp_path))
    found = answer(driver, "c")
    assert found.num_cached == 64 and (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)
    assert not driver.engine.stats().tiers["disk"]["broken_pages"]
    driver.close()


def test_a_changed_file_costs_time_and_no_token(tmp_path):
    driver = Driver(num_pages=16, max_model_len=112, **disk(tmp_path))
    expected = answer(driver, "a")
    driver.close()
    file = tmp_path / "0.pages"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    driver = Driver(num_pages=16, max_model_len=112, **disk(tmp_path))
    found = answer(driver, "b")
    assert found.num_cached < 64 and (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)
    assert driver.engine.stats().tiers["disk"]["broken_pages"] == 1
    assert answer(driver, "c").num_cached == 64, "the page was computed again"
    driver.close()


# ------------------------------------------------------------------------------------------------------------ weights


def test_other_weights_find_no_page_of_the_old_ones(tmp_path):
    options = dict(num_pages=8, max_model_len=112, kv_host_bytes=1 << 20)
    driver = Driver(**options, **disk(tmp_path))
    answer(driver, "a")
    assert driver.engine.stats().tier_used["host"] and driver.engine.stats().tier_used["disk"]
    driver.engine.weights_changed()
    assert driver.engine.stats().tier_used == {"host": 0}
    assert answer(driver, "b").num_cached == 0
    answer(driver, "c", prompt=[n + 1 for n in PROMPT])
    assert answer(driver, "d").num_cached == 64 and driver.engine.stats().tiers["host"]["hit_tokens"]
    driver.close()
    driver = Driver(**options, **disk(tmp_path))
    assert answer(driver, "e").num_cached == 64, "the weights of the start are the same"
    driver.close()
