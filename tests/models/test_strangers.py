"""Templates, adapters and checkpoints from strangers: each bad one is an error in seconds, and takes little memory."""

import json
import os
import resource

import pytest
import torch

from kvasir.errors import ConfigError, RequestError
from kvasir.models.chat_template import ChatTemplate
from kvasir.models.checkpoint import embedded, read_config, read_json
from kvasir.models.fields import Fields
from kvasir.models.growth import check_growth
from kvasir.models.loader import load_model
from kvasir.models.patterns import ModuleList, Patterns, safe_pattern
from kvasir.models.quantisation import reader_of
from kvasir.plain_files import refuse_special

MESSAGES = [{"role": "system", "content": "  be brief "}, {"role": "user", "content": "hi <b>"}]
HUGE = [
    "{{ 'x'|center(3000000000) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>3000000000}'.format(1) }}",
    "{{ 'x'.ljust(3000000000) }}",
    "{{ '1'.zfill(3000000000) }}",
    "{{ 'a\t'.expandtabs(2000000000) }}",
    "{{ ('x' * 30000000)|replace('', 'y' * 30000000) }}",
    "{{ ('x' * 300000).replace('x', 'y' * 300000) }}",
    "{{ 'x\ny'|indent(2000000000) }}",
    "{{ range(99999)|join('y' * 1000000) }}",
    "{{ ('y' * 1000000).join(['a'] * 1000000) }}",
    "{{ [[1]]|tojson(indent=2000000000) }}",
    "{{ ([1] * 30000000 + [1] * 30000000)|list }}",
    "{{ 'a'.translate({97: 'b' * 30000000}) * 100 }}",
    "{% set a = ['x', messages] %}" + "{% set a = [a, a] %}" * 60 + "{{ a }}",
    "{% set a = (1, messages) %}" + "{% set a = (a, a) %}" * 60 + "{{ {a: 1} }}",
    "{% set a = 'xxxxxxxx' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 40 + "{{ a }}",
    "{% set a = 'xxxxxxxx' %}" + "{% set a = a ~ a %}" * 60 + "{{ a }}",
    "{% set a = 99999999999999999999 %}" + "{% set a = a * a %}" * 60 + "{{ a }}",
]
# Small templates with the constructs of published ones, and what they give.
PUBLISHED = {
    "qwen3": (
        "{% set ns = namespace(last=messages|length - 1, multi=true) %}{% for m in messages[::-1] %}"
        "{% set i = (messages|length - 1) - loop.index0 %}{% if ns.multi and m.role == 'user' and not "
        "(m.content.startswith('<tool>') and m.content.endswith('</tool>')) %}{% set ns.multi = false %}"
        "{% set ns.last = i %}{% endif %}{% endfor %}{{ ns.last }}{{ '<|im_start|>' + messages[0].role + '\\n' "
        "+ messages[1].content.split('</think>')[-1].lstrip('\\n') }}{{ messages[0] | tojson }}",
        '1<|im_start|>system\nhi <b>{"role": "system", "content": "  be brief "}',
    ),
    "llama3": (
        "{% set system = messages[0]['content']|trim %}{% set messages = messages[1:] %}{{ system }}"
        "{% for m in messages %}{{ '<|' ~ m['role'] ~ '|>' ~ m['content'] | trim }}{{ m | tojson(indent=4) }}"
        "{% endfor %}",
        'be brief<|user|>hi <b>{\n    "role": "user",\n    "content": "hi <b>"\n}',
    ),
    "mistral": (
        "{% set rest = messages|selectattr('role', 'equalto', 'user')|list %}{{ rest|length }}"
        "{% if messages[0]['role'] in ['system', 'user'] and rest is defined %}"
        "{{ rest[0].content|replace('hi', 'ho') }}"
        "{% endif %}",
        "1ho <b>",
    ),
    "gpt-oss": (
        "{% macro kind(spec, depth=0) %}{% if spec is mapping %}{{ spec.items()|list|length }}{{ kind(spec.role, 1) }}"
        "{% else %}{{ spec|upper }}{{ ['a', 'b']|join('|') }}{% endif %}{% endmacro %}{{ kind(messages[0]) }}"
        "{% for k, v in messages[1].items() %}{{ k + ': ' }}{% endfor %}",
        "2SYSTEMa|brole: content: ",
    ),
}


@pytest.mark.parametrize("source", HUGE)
def test_no_template_fills_this_process(source):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((RequestError, ConfigError)):
        ChatTemplate(source).render({"messages": MESSAGES})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # KiB


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_constructs_stay_in_this_process(name):
    source, text = PUBLISHED[name]
    template = ChatTemplate(source)
    assert template.render({"messages": MESSAGES}) == text
    assert not template.apart


def test_the_packaged_template_stays_in_this_process():
    template = ChatTemplate((embedded() / "chat_template.jinja").read_text())
    assert template.render({"messages": MESSAGES, "tools": None, "add_generation_prompt": True}) and not template.apart


def test_a_template_that_needs_more_is_rendered_apart():
    template = ChatTemplate("{{ messages[1].content | center(20) }}|{{ '%s-%d' | format('a', 1) }}")
    for _ in range(2):
        assert template.render({"messages": MESSAGES}) == "       hi <b>       |a-1"
    assert template.apart
    first = template._worker._process.pid
    assert template.render({"messages": MESSAGES}) and template._worker._process.pid == first  # kept alive
    template._worker._process.kill()
    template._worker._process.wait()
    assert template.render({"messages": MESSAGES})  # and replaced


# --------------------------------------------------------------------------------------------- patterns and checkpoints


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|aa)*b", "(.*)*x", "a?a?a?a?a?aaaaa", "(a)\\1", "(?:(?=a)a)*", "(", "x" * 2000]
)
def test_slow_patterns_are_refused(pattern):
    with pytest.raises(ConfigError, match="here"):
        safe_pattern(pattern, "here")


@pytest.mark.parametrize(
    "pattern",
    ["q_proj", r".*\.mlp\.gate$", r"layers\.[0-9]+\.(q|k)_proj", "^model.layers.3.q_proj", r"^(?!.*\.experts\.).*"],
)
def test_usual_patterns_are_accepted(pattern):
    safe_pattern(pattern, "here")


EVIL = "(a+)+b"
QUANTISED = {
    "awq": lambda names: {"bits": 4, "modules_to_not_convert": names},
    "gptq": lambda names: {"bits": 4, "modules_to_not_convert": names},
    "fp8": lambda names: {"ignored_layers": names},
    "fp6": lambda names: {"modules_to_not_convert": names},
    "modelopt": lambda names: {"quant_algo": "NVFP4", "exclude_modules": names},
    "compressed-tensors": lambda names: {"config_groups": GROUPS, "ignore": names},
    "compressed-tensors targets": lambda names: {"config_groups": {"group_0": {**GROUPS["group_0"], "targets": names}}},
}
GROUPS = {
    "group_0": {
        "format": "float-quantized",
        "targets": ["Linear"],
        "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
    }
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_lists_of_modules_hold_no_slow_patterns(kind):
    def config(names):
        method = kind.partition(" ")[0]
        return {"quantization_config": {"quant_method": method, **QUANTISED[kind](names)}}

    reader = reader_of(config(["re:.*mlp.*", "model.layers.7", "lm_head"]))
    assert reader.format_of("model.layers.1.self_attn.q_proj") != reader.format_of("model.layers.1.mlp.up_proj")
    for names in (["re:" + EVIL], ["re:("], [5], "lm_head"):
        with pytest.raises(ConfigError, match="config.json: quantization_config"):
            reader_of(config(names))


def test_wildcards_of_modules():
    modules = ModuleList(["*.mlp.gate", "model.visual*", "*[b"], "here", globs=True)
    assert "model.layers.3.mlp.gate" in modules and "model.visual.merger" in modules
    assert "model.layers.3.mlp.gate_proj" not in modules
    assert "a" * 120 not in ModuleList(["*a" * 100 + "b"], "here", globs=True)
    with pytest.raises(ConfigError, match="here"):
        ModuleList(["*a" * 1000], "here", globs=True)


def test_all_matching_of_a_field_is_bounded(monkeypatch):
    slow = Patterns([".*.*.*.*x" + str(i) for i in range(4096)], "here")
    with pytest.raises(ConfigError, match="here: a name of 300 characters"):
        slow.first("a" * 300)
    with pytest.raises(ConfigError, match="here: matching takes more than"):
        for _ in range(1000):
            slow.first("a" * 100)
    usual = Patterns([r".*\.self_attn\..*", r".*mlp\.(gate|up|down)_proj$", ".*lm_head"] * 7, "here")
    monkeypatch.setattr(usual, "_left", 1.0)
    for i in range(20_000):
        assert usual.first(f"model.layers.{i}.mlp.experts.7.gate_up") is None


def test_a_context_beyond_the_model_is_refused_before_its_tables_are_made():
    folder = embedded()
    with pytest.raises(ConfigError, match="max_model_len=100000000 is more than the [0-9]+ positions of this model"):
        load_model(folder, read_config(folder), device="cpu", dtype=torch.float32, num_positions=10**8)


def test_counts_of_layers_are_bounded():
    assert Fields({"num_hidden_layers": 128}).integer("num_hidden_layers") == 128
    with pytest.raises(ConfigError, match="num_hidden_layers is 1000000000"):
        Fields({"num_hidden_layers": 1_000_000_000}).integer("num_hidden_layers")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "adapter_config.json", "model.safetensors", "x.jinja"]
)
def test_a_pipe_is_named_and_not_read(tmp_path, name):
    refuse_special(tmp_path)
    os.mkfifo(tmp_path / name)
    for read in (refuse_special, read_config, lambda path: read_json(path / name)):
        with pytest.raises(ConfigError, match=name):
            read(tmp_path)


@pytest.mark.parametrize(
    "field, step, grows",
    [
        ("normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}, True),
        ("normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "_"}, False),
        ("normalizer", {"type": "Prepend", "prepend": "x"}, False),
        ("decoder", {"type": "Replace", "pattern": {"Regex": ""}, "content": "xxxxxxxx"}, True),
    ],
)
def test_steps_that_multiply_text_are_refused(tmp_path, field, step, grows):
    file = tmp_path / "tokenizer.json"
    steps = "normalizers" if field == "normalizer" else "decoders"
    file.write_text(json.dumps({field: {"type": "Sequence", steps: [step] * 4}}))
    if grows:
        with pytest.raises(ConfigError, match=f"tokenizer.json: {field}"):
            check_growth(file)
    else:
        check_growth(file)
