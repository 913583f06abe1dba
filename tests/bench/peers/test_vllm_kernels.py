"""A copy of vLLM without CUTLASS's headers takes other kernels, and results say so."""

import os

import pytest

from kvasir.bench.peers import vllm_kernels
from kvasir.bench.provenance import peer_version


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with FlashInfer and no headers, first on the path."""
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in vllm_kernels.OFF:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_kernels_that_cannot_be_compiled_are_off(site, monkeypatch):
    monkeypatch.setenv(vllm_kernels.OFF[0], "1")
    options = vllm_kernels.turn_off({"additional_config": {"other": 1}})
    assert options == {"additional_config": {"gdn_prefill_backend": "triton", "other": 1}}
    assert [os.environ.get(name) for name in vllm_kernels.OFF] == ["1", "0"]
    assert peer_version("vllm", str(site)) == {"kernels": vllm_kernels.SAID}
    monkeypatch.delenv(vllm_kernels.OFF[1])


def test_nothing_changes_with_headers_or_without_flashinfer(site):
    header = site / "flashinfer" / vllm_kernels.HEADER
    header.parent.mkdir(parents=True)
    header.touch()
    assert vllm_kernels.turn_off({"x": 1}) == {"x": 1} and peer_version("vllm", str(site)) == {}
    assert not vllm_kernels.lacks_headers(str(site / "nowhere"))
