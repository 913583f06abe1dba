"""Values that are composed with each other, and the page on what works with what, made from what the code declares.

``python -m tests.composition`` writes docs/methods/composition.md. ``tests/test_composition.py`` holds the page to the
code, and every pair of values to the plain engine's tokens or to a refusal with a reason.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import torch

from kvasir.api.text.processing import Processing
from kvasir.attention.backend import BACKENDS, AttentionBackend, AttentionSpec, LatentHeads, Site
from kvasir.client.admission import admit
from kvasir.config import EngineConfig, SpeculationConfig
from kvasir.engine.schedule.policy import POLICIES
from kvasir.engine.start.attention_choice import choose_backend
from kvasir.errors import ConfigError, RequestError
from kvasir.kv.codec import CODECS, Codec, planes_of
from kvasir.kv.policy import load as load_policies
from kvasir.kv.tier import TIERS, Tier
from kvasir.layers.product_backend import BACKENDS as PRODUCT_BACKENDS
from kvasir.layers.product_backend import OWN, ProductBackend
from kvasir.layers.weights import Placement
from kvasir.scaling.endpoint import Caps
from kvasir.scaling.engine_endpoint import EngineEndpoint
from kvasir.scaling.pool import PoolEndpoint
from kvasir.scaling.strategy import STRATEGIES, load_strategy
from kvasir.speculation.drafter import DRAFTERS, Drafter
from kvasir.speculation.router import load_drafter
from kvasir.technique import Technique, check_conflicts, find, load, own
from kvasir.types import CacheRow, Grammar, ModelInfo, SamplingParams

PAGE = Path(__file__).parents[1] / "docs" / "methods" / "composition.md"
# Tokens in the vocabulary of the smallest shipped tokenizer.
VOCAB = 2048
SHAPE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=VOCAB,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    eos_token_id=0,
)
# The config.json of each model.
MODELS = {
    "full attention": SHAPE | {"model_type": "qwen3"},
    "sliding window": {
        **SHAPE,
        "model_type": "gemma3_text",
        "sliding_window": 8,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "experts": {
        **SHAPE,
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}
# Drafters that need a folder of weights, and what it holds: made for the model that they draft for.
NEEDS_FOLDER = {
    "draft_model": "a smaller model",
    "medusa": "heads",
    "eagle": "a head",
    "dflash": "a published drafter",
    "ppd": "prompt tokens",
    "idlm": "an adapter, or a model trained as a whole",
}
# The same for codecs.
CODEC_FOLDERS = {"lowrank": "latents"}
FACTORS: dict[str, list[Any]] = {
    "drafter": ["none", *own(DRAFTERS), "suffix+token_recycling+layer_skip"],
    "codec": own(CODECS),
    "policy": own(POLICIES),
    "control": list(get_args(get_type_hints(SpeculationConfig)["draft_control"])),
    "model": list(MODELS),
    "chunked prefill": [True, False],
    "prefix cache": [True, False],
    "preemption": [True, False],
    "overlap": [True, False],
    "decode over static buffers": [True, False],  # the steps that CUDA graphs capture
    "few rows": [True, False],  # few sequences at a time, so that they come and go
    "hooks": [True, False],  # three sets of hooks, and requests with none, in one batch
}
# Formats of weights with what they are composed with: a covering array of its own, since each case needs a plain engine
# to compare with.
WEIGHTS: dict[str, list[Any]] = {
    "weights": ["plain", "f8", "i8", "u4:group=0", "u4:group=0,zeros=true", "nvfp4"],
    "codec": ["plain", "int8", "int4_bdr"],
    "drafter": ["none", "suffix", "layer_skip", "token_recycling"],
    "model": list(MODELS),
    "adapters": [True, False],
    "hooks": [True, False],
    "prefix cache": [True, False],
    "preemption": [True, False],
}
# KV policies, with the numbers of very short requests, and what they are composed with: an array of its own, too, since
# each policy has tokens of its own.
FORGETTING: dict[str, list[Any]] = {
    "kv policy": [
        "sink_window:sinks=2,window=8,slack=4",
        "snapkv:budget=12,window=4,pool=3",
        "h2o:heavy=0.2,recent=0.2,slack=4,least=4",
        "h2o:heavy=0.2,recent=0.2,slack=4,least=4,noise=true",
        "lazy_eviction:budget=14,window=2,alpha=0.02",
        "r_kv:budget=12,buffer=4,rows=2",
        "pyramidkv:budget=12,window=4",
        "cake:budget=12,window=4",
        "snapkv:budget=12,window=4+r_kv:budget=13,buffer=2,rows=2",
    ],
    "drafter": ["none", "suffix", "layer_skip", "token_recycling", "replay"],
    "codec": ["plain", "int8"],
    "model": list(MODELS),
    "chunked prefill": [True, False],
    "prefix cache": [True, False],
    "preemption": [True, False],
    "overlap": [True, False],
    "decode over static buffers": [True, False],
    "few rows": [True, False],
    "hooks": [True, False],
}
# The requests of every run, all of them at once.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0.0),
    "T = 1": dict(),
    "n > 1": dict(n=2),
    "grammar": dict(grammar=Grammar("regex", "(ab|ba|c)*")),
    "penalties": dict(presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.3),
    "filters, bias": dict(top_k=20, top_p=0.9, min_p=0.01, logit_bias={311: 2.0}),
    "bans, stops": dict(
        bad_words=("ab",),
        min_tokens=4,
        stop_token_ids=(312,),
        ignore_eos=False,
        allowed_token_ids=(310, 311, 312, 313),
    ),
    "logprobs": dict(logprobs=3, logprobs_mode="processed"),
    "prompt logprobs": dict(prompt_logprobs=1),
    "score, confidence": dict(score_from=3, confidence=5),
    "processors": dict(processors=("constant:value=-2,ids=310|312", "tip:alpha=3,beta=3,ids=311|313|315")),
}
SYSTEM = ["chunked prefill", "prefix cache", "preemption", "overlap", "sliding window", "experts"]
INFO = ModelInfo(name="any", max_model_len=256, vocab_size=VOCAB, tokenizer_size=VOCAB)


# Processors of a model without a tokenizer and without thinking.
PROCESSING = Processing(None, None)


def encode(text: str) -> list[int]:
    return [300 + ord(letter) for letter in text]


# ----------------------------------------------------------------------------------------------- what the code declares


def class_of(package: str, name: str, base: type[Technique]) -> type[Technique]:
    return find(package, name, base)[0]


# DeepSeek's: a latent of 512 elements and a rotary key of 64.
LATENT = CacheRow(1, 576, 0, latent=512)


def latents_on_gpu(rank: int = 512, rope: int = 64) -> Site:
    heads = LatentHeads(128, 128)
    spec = AttentionSpec(16, 1, rank + rope, (128 + rope) ** -0.5, value_dim=rank, latent=heads)
    return Site("cuda", torch.bfloat16, "plain", 16, (spec,))


def head_spec(dim: int) -> AttentionSpec:
    return AttentionSpec(8, 2, dim, dim**-0.5)


def gpu(codec: Codec, exact: bool = False, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> Site:
    return Site("cuda", dtype, codec.kernel, codec.page_slots, (head_spec(dim),), exact)


def reasons(backend: AttentionBackend, site: Site) -> list[str]:
    """Reasons why the backend cannot serve the site on any machine: a package that is missing here is none."""
    return [r for r in backend.why_not(site) if "not installed" not in r]


def hears(drafter: type[Drafter]) -> str:
    """What the engine tells the drafter in each step."""
    found = ["hidden states"] * (drafter.ingest is not Drafter.ingest) + ["runners-up"] * bool(drafter.top_tokens)
    found += ["its guests"] * (drafter.answer is not Drafter.answer)
    return ", ".join(found) or "text"


def refusal(attempt: Callable[[], Any]) -> str | None:
    """Message with which ``attempt`` is refused, or None if it is not."""
    try:
        attempt()
    except (ConfigError, RequestError) as refused:
        return " ".join(str(refused).split())
    return None


def admitted(**params: Any) -> Callable[[], Any]:
    """An admission of a request with these parameters."""
    return lambda: admit(
        [1] * 8, SamplingParams(**params), INFO, id="r", arrival=0.0, encode=encode, processing=PROCESSING
    )


def without_tokenizer() -> Any:
    return admit([1] * 8, SamplingParams(bad_words=("ab",)), INFO, id="r", arrival=0.0, encode=None)


def backend_of(name: str, codec: str, exact: bool) -> Callable[[], Any]:
    def attempt() -> None:
        if found := reasons(load(BACKENDS, name, AttentionBackend), gpu(load(CODECS, codec, Codec), exact)):
            reason = f"cannot serve this model here: {'; '.join(found)}"
            raise ConfigError(f"attention backend '{name}' {reason}. Use --attention-backend auto.")

    return attempt


def products_with(**mode: Any) -> Callable[[], Any]:
    """The choice of humming with such a placement; what the machine lacks is left out."""

    def attempt() -> None:
        backend = load(PRODUCT_BACKENDS, "humming", ProductBackend)
        place = Placement(torch.device("cpu"), torch.bfloat16)
        here = backend.why_not(place)
        if found := [reason for reason in backend.why_not(replace(place, **mode)) if reason not in here]:
            reason = f"cannot serve this model here: {'; '.join(found)}"
            raise ConfigError(f"product backend 'humming' {reason}. Use --product-backend {OWN}.")

    return attempt


def checked(strategy: str, caps: Caps) -> Callable[[], Any]:
    """A check of the strategy with its default options, on two models of one vocabulary."""
    small, large = (SimpleNamespace(name=name, caps=caps, vocabulary="one") for name in ("small", "large"))
    return lambda: load_strategy(strategy).check([small, large], SimpleNamespace(most=64))  # type: ignore[list-item]


ENDPOINTS = {
    "our engine": EngineEndpoint.caps,
    "HTTP with log-probabilities": Caps(logprobs=True, choose=True),
    "HTTP without": Caps(),
    "a pool of replies": PoolEndpoint.caps,
}


def engine(**options: Any) -> Callable[[], Any]:
    """A whole start-up with these settings."""
    from kvasir.engine.engine import Engine

    return lambda: Engine(
        EngineConfig.of(model="nano", device="cpu", num_pages=16, max_model_len=128, **options)
    ).close()


def disk_on_a_gpu() -> None:
    place = SimpleNamespace(device=torch.device("cuda"), above=None)
    load(TIERS, "disk:path=pages,bytes=1", Tier).open(place)  # type: ignore[arg-type]


def disk_in_a_cluster() -> None:
    from kvasir.engine.engine import Engine

    with TemporaryDirectory() as folder:
        settings = dict(model="nano", device="cpu", num_pages=16, max_model_len=128)
        engine = Engine(EngineConfig.of(**settings, kv_disk=f"{folder},bytes={1 << 22}"))
        try:
            engine.join(b"secret")
        finally:
            engine.close()


# Combinations that must not start or not be admitted: (what, with what) -> the attempt that is refused. The page quotes
# the message of the code.
REFUSED: dict[tuple[str, str], Callable[[], Any]] = {
    ("`--drafter suffix`", "itself"): lambda: load_drafter("suffix+suffix"),
    ("`--drafter draft_model`", "no model"): lambda: load_drafter("draft_model"),
    ("`--drafter layer_skip:exits=a`", "any model"): lambda: load_drafter("layer_skip:exits=a"),
    ("`--drafter layer_skip:exits=99`", "a model of 4 layers"): engine(drafter="layer_skip:exits=99"),
    ("`--drafter draft_model:max_accept=true`", "`--batch-invariant`"): engine(
        drafter="draft_model:model=nano,max_accept=true", batch_invariant=True
    ),
    ("`--drafter draft_model:max_accept=true`", "another drafter"): engine(
        drafter="draft_model:model=nano,max_accept=true+suffix"
    ),
    ("`--kv-codec bfloat16`", "a model in float32"): engine(kv_codec="bfloat16"),
    ("`--kv-host-bytes`", "`--no-enable-prefix-caching`"): engine(kv_host_bytes=1 << 20, enable_prefix_caching=False),
    ("`--kv-disk`", "a GPU with `--kv-host-bytes 0`"): disk_on_a_gpu,
    ("`--kv-disk`", "`--replicas`, `--cluster` or `--kv-events-config`"): disk_in_a_cluster,
    ("`--kv-disk-key`", "no `--kv-disk`"): engine(kv_disk_key="secret"),
    ("`--kv-policy snapkv+h2o`", "itself"): lambda: load_policies("snapkv+h2o"),
    ("`--kv-policy snapkv`", "`--kv-codec int4_bdr`"): engine(kv_policy="snapkv", kv_codec="int4_bdr"),
    ("`--kv-policy snapkv`", "`--max-num-batched-tokens 32`"): engine(kv_policy="snapkv", max_num_batched_tokens=32),
    ("`--kv-policy snapkv`", "`--drafter mtp`"): lambda: check_conflicts(
        [load_drafter("mtp"), load_policies("snapkv").policies[0]]
    ),
    ("`--kv-policy pyramidkv`", "a policy of the answer"): engine(kv_policy="pyramidkv+r_kv"),
    ("`--weights u4:group=48`", "any model"): engine(weights="u4:group=48"),
    ("`--weights mxfp4:scale=block`", "any model"): engine(weights="mxfp4:scale=block"),
    ("`--product-backend humming`", "`--batch-invariant`"): products_with(exact=True),
    ("`--product-backend humming`", "`--activation-dtype fp8`"): products_with(activations="fp8"),
    ("`--product-backend humming`", "`--dtype float32`"): products_with(dtype=torch.float32),
    ("`--product-backend humming`", "`--no-fused-kernels`"): products_with(fused=False),
    ("`--activation-dtype fp8`", "a CPU"): engine(activation_dtype="fp8"),
    ("`--token-rounding nearest`", "a model without experts"): engine(token_rounding="nearest"),
    ("`--token-rounding nearest`", "`--batch-invariant`"): engine(token_rounding="nearest", batch_invariant=True),
    ("`--no-fused-kernels`", "`--batch-invariant`"): engine(batch_invariant=True, fused_kernels=False),
    ("request: `drafter`", "a server without it"): admitted(drafter="suffix"),
    ("request: `confidence=1`", "any model"): admitted(confidence=1),
    ("request: `confidence`", "`logprobs_mode=processed`"): admitted(
        confidence=5, logprobs=1, logprobs_mode="processed"
    ),
    ("request: `confidence_window`", "no confidence"): admitted(confidence_window=4),
    ("request: `score_from`", "`prompt_logprobs`"): admitted(score_from=2, prompt_logprobs=1),
    ("request: `stop`", "`detokenize=False`"): admitted(stop=("x",), detokenize=False),
    ("request: `bad_words`", "no tokenizer"): without_tokenizer,
    ("request: `processors`", "no tokenizer"): admitted(processors=("tip",)),
    ("request: `thinking_token_budget`", "a model that does not think"): admitted(thinking_token_budget=8),
    ("request: `finish_after` above `n`", "any model"): admitted(n=2, finish_after=3),
    ("codec `nvfp4`", "heads of 80"): lambda: load(CODECS, "nvfp4", Codec).planes(CacheRow(1, 80, 80), torch.bfloat16),
    ("codec `int4_bdr:order=64`", "heads of 80"): lambda: load(CODECS, "int4_bdr:order=64", Codec).planes(
        CacheRow(1, 80, 80), torch.bfloat16
    ),
    ("codec `int4`", "latents"): lambda: planes_of(load(CODECS, "int4", Codec), LATENT, torch.bfloat16),
    ("`--attention-backend flash_attn`", "latents"): lambda: choose_backend(
        "flash_attn", latents_on_gpu(), load(CODECS, "plain", Codec)
    ),
    ("`--attention-backend triton`", "latents of odd widths"): lambda: choose_backend(
        "triton", latents_on_gpu(rank=100, rope=10), load(CODECS, "plain", Codec)
    ),
    ("codec `int4`", "heads of 33"): lambda: load(CODECS, "int4", Codec).planes(CacheRow(1, 33, 33), torch.bfloat16),
    **{
        (f"`--attention-backend {name}`", f"codec `{codec}`" + (", exact mode" if exact else "")): backend_of(
            name, codec, exact
        )
        for name in own(BACKENDS)
        for exact in (False, True)
        for codec in own(CODECS)
        if refusal(backend_of(name, codec, exact)) and not (exact and refusal(backend_of(name, codec, False)))
    },
    **{
        (f"strategy `{name}`", where): checked(name, caps)
        for name in own(STRATEGIES)
        for where, caps in ENDPOINTS.items()
        if refusal(checked(name, caps))
    },
}


def started(drafter: str = "none", codec: str = "plain", policy: str = "fcfs", **params: Any) -> None:
    """Go through the checks of a start-up and of an admission that need no weights, and raise what they raise."""
    spec = "" if drafter in ("none", *NEEDS_FOLDER) else drafter
    config = EngineConfig.of(drafter=spec, kv_codec=codec, scheduling_policy=policy)
    used: list[Technique] = [
        load(CODECS, config.cache.kv_codec, Codec),
        load(POLICIES, policy, class_of(POLICIES, policy, Technique)),
    ]
    check_conflicts(used + ([load_drafter(spec)] if spec else []))
    used[0].planes(CacheRow(1, SHAPE["head_dim"], SHAPE["head_dim"]), torch.float32)  # type: ignore[attr-defined]
    admitted(**params)()


# ------------------------------------------------------------------------------------------------------------- the page


def text(block: str) -> str:
    """Paragraphs and lists, wrapped as on the other pages, with an empty line before and after."""
    paragraphs = [re.split(r"\n\s*(?=- )", paragraph.strip()) for paragraph in re.split(r"\n\s*\n", block)]
    return "\n" + "\n\n".join("\n".join(map(wrapped, items)) for items in paragraphs) + "\n"


def wrapped(item: str) -> str:
    indent = "  " if item.startswith("- ") else ""
    words = " ".join(item.split())
    return textwrap.fill(words, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def system_marks(exact: bool, affects_kv: bool | None) -> list[str]:
    return ["off" if what == "prefix cache" and affects_kv is None else "=" if exact else "≈" for what in SYSTEM]


def mark(exact: bool, attempt: Callable[[], Any]) -> str:
    return "refused" if refusal(attempt) else "=" if exact else "≈"


def drafter_rows() -> Iterable[list[str]]:
    for name in own(DRAFTERS):
        cls = class_of(DRAFTERS, name, Drafter)
        marks = [
            mark(cls.exact, lambda name=name, params=params: started(name, **params)) for params in REQUESTS.values()
        ]
        codecs = [mark(cls.exact, lambda name=name, codec=codec: started(name, codec)) for codec in own(CODECS)]
        yield [f"`{name}`", *system_marks(cls.exact, cls.affects_kv), *marks, *codecs]


def codec_rows() -> Iterable[list[str]]:
    for name in own(CODECS):
        codec = load(CODECS, name, Codec)
        marks = [
            mark(codec.exact, lambda name=name, params=params: started(codec=name, **params))
            for params in REQUESTS.values()
        ]
        yield [f"`{name}`", *system_marks(codec.exact, codec.affects_kv), *marks]


def backend_rows() -> Iterable[list[str]]:
    for name in sorted(own(BACKENDS), key=lambda n: -class_of(BACKENDS, n, AttentionBackend).rank):
        cells = []
        for codec in own(CODECS):
            for exact in (False, True):
                backend, site = load(BACKENDS, name, AttentionBackend), gpu(load(CODECS, codec, Codec), exact)
                if reasons(backend, site):
                    cells.append("refused")
                    continue
                backend.prepare(site)
                cells.append("graphs" if backend.graphs else "eager")
        yield [f"`{name}`", *(a if a == b else f"{a}; exact: {b}" for a, b in zip(cells[::2], cells[1::2]))]


def strategy_rows() -> Iterable[list[str]]:
    for name in own(STRATEGIES):
        cells = ["refused" if refusal(checked(name, caps)) else "yes" for caps in ENDPOINTS.values()]
        yield [f"`{name}`", ", ".join(load_strategy(name).needs) or "nothing", *cells]


def named(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def page() -> str:
    """The whole page as Markdown."""
    asked = list(REQUESTS)
    dims = (33, 64, 80, 96, 128, 256)
    parts = [
        "# What works with what",
        text("""
            Drafters, KV codecs, scheduling policies and features of a request combine freely; the exceptions are
            under [Refused](#refused). `python -m tests.composition` writes this page from what the code declares,
            and `tests/test_composition.py` holds it to that. A cell is one of:

            - `=`: the tokens and log-probabilities of the plain engine, bit for bit (CPU, exact mode). In other
              modes the tokens are the same up to ties.
            - `≈`: the codec is lossy; the tokens are those of the plain engine with that codec.
            - `off`: the prefix cache is off.
            - `refused`: at start-up or when the request arrives, with the reason and the alternative.

            `make test` runs every pair of values in a covering array whose runs carry all request features at once.
            `make test-all` runs the product of drafters, codecs, models and whatever else changes a step.

            Two kinds of speculation are not on this page, because they have no `=`: rejection (`max_accept`, which
            keeps the distribution and not the tokens) and "typical" acceptance. Nor is
            [token rounding](experts.md#token-rounding) of experts, which is lossy and depends on the other prompts of a
            step.
            """),
        "## Drafters\n",
        table(["drafter", *SYSTEM, *asked, *(f"codec `{c}`" for c in own(CODECS))], drafter_rows()),
        text(f"""
            Controls ({named(FACTORS["control"])}) and scheduling policies ({named(FACTORS["policy"])}) combine with
            all of them. They change no token in exact mode; elsewhere only ties may end differently. Several drafters
            may be joined by `+`, each once. Two drafters with guest rows are refused.
            """),
        table(
            ["drafter", "exact", "in the prefix key", "proposes", "hears", "runs on", "needs"],
            (
                [
                    f"`{n}`",
                    "yes" if c.exact else "no",
                    {True: "yes", False: "no", None: "no caching"}[c.affects_kv],
                    c.topology,
                    hears(c),
                    c.place.replace("_", " "),
                    NEEDS_FOLDER.get(n, "nothing"),
                ]
                for n in own(DRAFTERS)
                for c in [class_of(DRAFTERS, n, Drafter)]
            ),
        ),
        text("""
            A step that verifies drafts is planned after the one before it was read, so the two do not overlap.
            Penalties, bad words and grammars have the same effect without a drafter. Steps of decodes, chains,
            trees and guests run in CUDA graphs ([which](speculation/engine.md#cuda-graphs)).
            """),
        "## Codecs\n",
        table(["codec", *SYSTEM, *asked], codec_rows()),
        "",
        table(
            [
                "codec",
                "exact",
                "in the prefix key",
                "one kernel for norm, RoPE and write",
                *(f"heads of {d}" for d in dims),
                "latents",
            ],
            (
                [
                    f"`{n}`",
                    "yes" if c.exact else "no",
                    "yes" if c.affects_kv else "no",
                    "yes" if c.fuses else "no",
                    *(
                        "refused" if refusal(lambda c=c, d=d: c.planes(CacheRow(1, d, d), torch.bfloat16)) else "yes"
                        for d in dims
                    ),
                    "refused" if refusal(lambda c=c: planes_of(c, LATENT, torch.bfloat16)) else "yes",
                ]
                for n in own(CODECS)
                for c in [load(CODECS, n, Codec)]
            ),
        ),
        text("""
            Sliding windows free their pages with any codec. Scales are planes of a page, so copies and forks carry
            them. Latents: those of [multi-head latent attention](mla.md); everything else of this page holds for them
            as for heads, except for adapters of the layers with latents, which are refused.
            """),
        "## Attention backends on a GPU",
        text("""
            Backends stand in the order of their rank, which decides where times do not; bf16, heads of 128.
            `graphs`: decode steps are captured. `eager`: they are launched kernel by kernel. On a CPU there is
            `torch`.
            """),
        table(["backend", *(f"`{c}`" for c in own(CODECS))], backend_rows()),
        "\n## Strategies and endpoints",
        text("""
            Each strategy runs on two models of one vocabulary, with its default options (`best_of_n` needs what its
            score needs; `compute_optimal` needs a table and a reward model, and `prm=` of others one, too). A strategy
            is refused before the first call. Any drafter, codec and policy may run below an endpoint.
            """),
        table(["strategy", "needs", *ENDPOINTS], strategy_rows()),
        text("A pool serves strategies that ask nothing but the problem's own prompt."),
        "## Refused",
        text("The messages are the code's own."),
        table(
            ["what", "with", "says"],
            ([what, other, refusal(attempt).replace("|", "\\|")] for (what, other), attempt in REFUSED.items()),
        ),
        "",
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")
