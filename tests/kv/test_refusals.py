"""A codec refuses what it cannot do at start-up, with the reason and the nearest choice that works."""

from __future__ import annotations

import logging

import pytest
import torch

from kvasir.attention.backend import AttentionSpec, Site
from kvasir.engine.start import attention_choice
from kvasir.engine.start.codec_choice import choose_codec
from kvasir.errors import ConfigError
from kvasir.kernels import _triton
from kvasir.kv.codec import Codec
from kvasir.kv.codecs.plain import PlainCodec
from kvasir.technique import load
from kvasir.types import CacheRow

HEADS = AttentionSpec(4, 2, 64, 0.125)


def choose_backend(name, site):
    return attention_choice.choose_backend(name, site, PlainCodec()).backend


@pytest.mark.parametrize(
    "spec, dim, why, fix",
    [
        ("int4_bdr:order=64", 80, "order 64 does not fit heads of 80", "such as 16"),
        ("int4_bdr:order=48", 96, "order 48 does not fit heads of 96", "such as 32"),
        ("int4_bdr:order=256", 128, "order 256 does not fit heads of 128", "such as 128"),
        ("nvfp4", 80, "a multiple of 32, not 80", "Use --kv-codec int4_bdr"),
        ("nvfp4:order=64", 96, "order 64 does not fit heads of 96", "such as 32"),
        ("int4", 33, "needs an even head dim, not 33", "Use --kv-codec plain"),
        ("int8", 33, "needs an even head dim, not 33", "Use --kv-codec plain"),
        ("int4_bdr", 33, "such as|power of two|even head dim", ""),
    ],
)
def test_head_dims(spec, dim, why, fix):
    with pytest.raises(ConfigError, match=why) as refused:
        load("kvasir.kv.codecs", spec, Codec).planes(CacheRow(1, dim, dim), torch.float32)
    assert fix in str(refused.value)


@pytest.mark.parametrize(
    "spec, why",
    [
        ("int5", "there are .*int4.*Did you mean"),
        ("int4_bdr:ordr=64", "no option 'ordr'.*Did you mean 'order'"),
        ("int4:order=64", "takes no options"),
        ("int4_bdr:order=big", "expected int"),
        ("nvfp4:unit=0", "must be positive"),
    ],
)
def test_names_and_options(spec, why):
    with pytest.raises(ConfigError, match=why):
        load("kvasir.kv.codecs", spec, Codec)


@pytest.mark.parametrize(
    "name, ours",
    [
        ("auto", "plain"),
        ("bf16", "plain"),
        ("bfloat16", "plain"),
        ("fp8_e4m3", "fp8"),
        ("fp8", "fp8"),
        ("int4_bdr:order=64", "int4_bdr"),
    ],
)
def test_vllms_names_of_types(name, ours):
    assert choose_codec(name, torch.bfloat16).name == ours


def test_an_uncompressed_cache_has_the_models_type():
    with pytest.raises(ConfigError, match="runs in float32.*--kv-codec plain, or --dtype bfloat16"):
        choose_codec("bfloat16", torch.float32)


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4", "nvfp4"])
@pytest.mark.parametrize("backend", ["flash_attn", "flashinfer"])
def test_backends_of_packages_read_plain_pages_only(backend, codec):
    with pytest.raises(ConfigError, match=f"plain, not '{codec}'.*--attention-backend auto"):
        choose_backend(backend, Site("cuda", torch.bfloat16, codec, 64, (HEADS,)))


@pytest.mark.parametrize(
    "site, why",
    [
        (Site("cuda", torch.bfloat16, "nvfp4", 32, (HEADS,)), "not 'nvfp4'"),
        (Site("cuda", torch.bfloat16, "int4", 48, (HEADS,)), "pages of 16, 32, 64"),
        (Site("cuda", torch.bfloat16, "int4", 64, (AttentionSpec(4, 2, 66, 0.125),)), "multiples of 4"),
    ],
)
def test_a_gpu_without_kernels_for_it_is_told(site, why, caplog, monkeypatch):
    """It works, by the reference, and the log says why it is slow."""
    monkeypatch.setattr(_triton, "AVAILABLE", True)
    with pytest.raises(ConfigError, match=why):
        choose_backend("triton", site)
    with caplog.at_level(logging.WARNING, logger="kvasir"):
        assert choose_backend("auto", site).name == "torch"
    assert "slow" in caplog.text and why.split(", ")[0] in caplog.text


def test_fp8_on_an_older_gpu(monkeypatch):
    monkeypatch.setattr(_triton, "AVAILABLE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(ConfigError, match="capability 8.9.*--kv-codec int8"):
        choose_backend("triton", Site("cuda", torch.bfloat16, "fp8", 32, (HEADS,)))
    choose_backend("triton", Site("cuda", torch.bfloat16, "int8", 32, (HEADS,)))


def test_what_the_reference_may_serve_is_no_news_on_a_cpu(caplog):
    with caplog.at_level(logging.WARNING, logger="kvasir"):
        assert choose_backend("auto", Site("cpu", torch.float32, "nvfp4", 32, (HEADS,))).name == "torch"
    assert not caplog.text
