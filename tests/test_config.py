"""Settings: one namespace over all sections, unknown names and wrong types refused with the fix."""

import dataclasses

import pytest

from kvasir.compose import compose
from kvasir.config import EngineConfig, Settings, read_toml
from kvasir.errors import ConfigError


def test_flat_names_reach_their_section():
    config = EngineConfig.of(model="m", max_num_seqs=8, gpu_memory_utilization=1)
    assert (config.model.model, config.scheduler.max_num_seqs, config.cache.gpu_memory_utilization) == ("m", 8, 1.0)
    assert config.replace(max_num_seqs=9).scheduler.max_num_seqs == 9
    assert config.replace(seed=1).scheduler.max_num_seqs == 8


def test_origins_are_what_browsers_send_and_vllm_lists_them_as_json():
    for given, origins in (
        (["*"], ("*",)),
        (['["*"]'], ("*",)),
        (['["https://a.b", "http://c:1"]', "null"], ("https://a.b", "http://c:1", "null")),
    ):
        assert compose(Settings, {"allowed_origins": given}).server.allowed_origins == origins
    for given in ("https://a.b/", "a.b", "[*]", "[1]", ""):
        with pytest.raises(ConfigError, match="no browser sends"):
            compose(Settings, {"allowed_origins": [given]})


def test_vllms_names_mean_the_same():
    config = EngineConfig.of(kv_cache_dtype="fp8", block_size=32, enforce_eager=True)
    assert (config.cache.kv_codec, config.cache.page_slots, config.runner.cuda_graphs) == ("fp8", 32, False)
    for options in ({"kv_codec": "int8", "kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8", "kv_codec": "int8"}):
        with pytest.raises(ConfigError, match=" and ".join(options) + " are the same setting"):
            EngineConfig.of(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_num_seq=8), "Did you mean 'max_num_seqs'"),
        (dict(max_num_seqs="8"), "expected int"),
        (dict(max_num_seqs=True), "expected int"),
        (dict(dtype="bf16"), "bfloat16"),
        (dict(fit="yes"), "expected bool"),
        (dict(enforce_eager="yes"), "cuda_graphs='yes': expected bool"),
    ],
)
def test_bad_settings_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of(**options)


def test_toml_takes_sections_and_flat_names(tmp_path):
    file = tmp_path / "kvasir.toml"
    file.write_text('port = 9\napi_key = ["a", "b"]\n[scheduler]\nmax_num_seqs = 3\n')
    settings = compose(Settings, read_toml(file))
    assert (settings.server.port, settings.server.api_key, settings.scheduler.max_num_seqs) == (9, ("a", "b"), 3)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[schedule]\nmax_num_seqs=1", r"Did you mean 'scheduler'"),
        ("[scheduler]\nport=1", "unknown setting 'port'"),
        ("port = ", "not valid TOML"),
    ],
)
def test_bad_toml_says_what_and_where(tmp_path, text, message):
    file = tmp_path / "kvasir.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_toml(file)


def test_missing_toml(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_toml(tmp_path / "none.toml")


def test_every_setting_has_a_help_line():
    for section in dataclasses.fields(Settings):
        for f in dataclasses.fields(section.default_factory):
            assert f.metadata["help"].endswith("."), f.name
