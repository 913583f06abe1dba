"""Build a runner from settings: load the model, choose the techniques, measure a worst-case step, size the pool."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from kvasir import technique
from kvasir.attention.backend import Site
from kvasir.config import EngineConfig
from kvasir.decoding.sampler import Sampler
from kvasir.engine.pages.page_pool import pages_for
from kvasir.engine.schedule.step_time import Roofline
from kvasir.engine.start.attention_choice import choose_backend
from kvasir.engine.start.codec_choice import check_layout, choose_codec
from kvasir.engine.start.policy_choice import choose_policy
from kvasir.engine.start.product_choice import choose_products
from kvasir.engine.start.recurrence_choice import choose_recurrence
from kvasir.engine.start.rehearsal import rehearse
from kvasir.engine.start.sizing import PoolPlan, cpu_budget, gib, own_bytes, plan_pool, resolve_length
from kvasir.engine.start.worst_case import worst_case_step
from kvasir.engine.variants.variants import VariantSlots, make_slots
from kvasir.engine.ways.capture import Capture, CudaCapture, PieceCapture
from kvasir.engine.ways.chain_graphs import ChainGraphs
from kvasir.engine.ways.decode_tapes import DecodeTapes
from kvasir.engine.ways.eager_steps import EagerSteps
from kvasir.engine.ways.graphs import DecodeGraphs
from kvasir.engine.ways.mixed_steps import MixedSteps
from kvasir.engine.ways.native_decodes import NativeDecodes
from kvasir.engine.ways.native_steps import NativeSteps
from kvasir.engine.ways.runner import Runner
from kvasir.engine.ways.step_way import CapturingWay, StepParts, StepWay
from kvasir.engine.ways.watched_steps import WatchedSteps
from kvasir.errors import ConfigError
from kvasir.kernels import _triton
from kvasir.kernels.compile_ahead import compiling
from kvasir.kernels.hardware import rates
from kvasir.kv.policy import Stack
from kvasir.kv.pool import KVPool
from kvasir.logs import log
from kvasir.models import checkpoint, cost
from kvasir.models.decoder import Decoder
from kvasir.models.families import find_family
from kvasir.models.loader import start_loading
from kvasir.models.native_decoder import NativeDecoder, why_not
from kvasir.models.pooling import read_pooling
from kvasir.models.sidecar import read_sidecar
from kvasir.models.spec import ModelSpec
from kvasir.plain_files import refuse_special
from kvasir.types import CacheGroup, ModelInfo, Pooling

# Bytes that allocator fragmentation and lazily loaded libraries take after the start, by experience.
GPU_RESERVE = 256 << 20
# Rows of a step by default.
GPU_ROWS, CPU_ROWS = 2048, 256
# A GPU with at least so many bytes affords the activations of a step of so many rows, and is kept busy by it.
LARGE_GPU, LARGE_GPU_ROWS = 75 << 30, 8192


@dataclass(slots=True)
class Built:
    """Everything the engine needs of the device, ready to serve."""

    runner: Runner
    device: torch.device
    info: ModelInfo
    plan: PoolPlan
    max_rows: int
    max_num_seqs: int
    roofline: Roofline
    prefix_root: bytes | None
    tokenizer_file: Path | None
    startup: dict[str, float] = field(default_factory=dict)
    weight_bytes: int = 0
    variants: VariantSlots = field(default_factory=lambda: VariantSlots(None, None, {}))
    policy: Stack | None = None


def choose_device(config: EngineConfig) -> torch.device:
    wanted = config.model.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device=cuda, but torch sees no CUDA device. Use --device cpu, or check the driver with `kvasir doctor`."
        )
    return torch.device(
        "cuda" if wanted == "auto" and torch.cuda.is_available() else "cpu" if wanted == "auto" else wanted
    )


def choose_dtype(config: EngineConfig, device: torch.device, hf: dict) -> torch.dtype:
    """``auto``: the checkpoint's type on a GPU (fp32 becomes bf16 there), fp32 on a CPU, where it is the oracle."""
    wanted: str = config.model.dtype
    if wanted == "auto":
        stored = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        wanted = "float32" if device.type == "cpu" else stored if stored in ("bfloat16", "float16") else "bfloat16"
    return getattr(torch, wanted)


def build(
    config: EngineConfig,
    drafter_bytes: Callable[[Decoder], int] = lambda model: 0,
    others: Iterable[technique.Technique] = (),
    guest_rank: int = 0,
    trees: bool = False,
    mtp: bool = False,
) -> Built:
    """Do the start-up in order, and time it. ``drafter_bytes`` gives the bytes of the device that a drafter will take,
    ``guest_rank`` is the rank of the adapter that computes its guests (0: none). ``others`` are the techniques above
    the runner, which must agree with those chosen here. ``trees``: the model will grow trees of drafts; ``mtp``: it is
    loaded with its MTP layer. Raises ConfigError (what is wrong, why, the fix)."""
    clock = Clock()
    if config.runner.num_threads:
        torch.set_num_threads(config.runner.num_threads)
    path = checkpoint.resolve(config.model.model, config.model.revision)
    hf = checkpoint.read_config(path)
    pooling = read_pooling(path, hf, config.model.task, config.model.model)
    if pooling is not None and config.speculation.drafter:
        raise ConfigError(
            f"drafter={config.speculation.drafter}, but this model pools (task {pooling.task}) and draws no tokens. "
            "Leave out --drafter."
        )
    device = choose_device(config)
    dtype = choose_dtype(config, device, hf)
    exact = config.runner.batch_invariant
    if exact and device.type == "cuda" and not _triton.AVAILABLE:
        raise ConfigError(
            "batch_invariant on a GPU needs Triton, which is not installed. Use --device cpu, or leave out "
            "--batch-invariant."
        )
    if exact and not config.runner.fused_kernels:
        raise ConfigError(
            "batch_invariant has norms and products of its own. Leave out --batch-invariant, or --no-fused-kernels."
        )
    free_before = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    clock.lap("config")

    model, loading = start_loading(
        path,
        hf,
        device=device,
        dtype=dtype,
        exact=exact,
        pooling=pooling,
        mtp=mtp,
        **_loading(config),
    )
    variants = make_slots(model, config, path, guest_rank)
    sidecar = model.sidecar = read_sidecar(path, model.spec.vocab_size)
    clock.lap("allocate")

    tokenizer_file = None if config.model.skip_tokenizer_init else _tokenizer_file(config, path)
    info = _info(config, path, hf, model, tokenizer_file, pooling)
    if sidecar.mask_id is not None and sidecar.mask_id < info.tokenizer_size:
        model.never_drawn = sidecar.mask_id
    codec = choose_codec(config.cache.kv_codec, dtype)
    codec.attach(model.cached_layers(), device, dtype, exact)
    page_slots = config.cache.page_slots or codec.page_slots
    groups = _groups(model.spec, config.cache.state_dtype, exact)
    check_layout(codec, {row for g in groups for row in g.rows}, dtype)
    max_rows = config.scheduler.max_num_batched_tokens or _default_rows(device)
    policy, groups = choose_policy(config.cache.kv_policy, codec, groups, max_rows, pooling)
    site = Site(
        device=device.type,
        dtype=dtype,
        codec_kernel=codec.kernel,
        page_slots=page_slots,
        exact=exact,
        specs=tuple(model.spec.attentions()),
    )
    choice = choose_backend(config.runner.attention_backend, site, codec)
    backend = choice.backend
    here = dict(device=device.type, dtype=dtype, exact=exact)
    recurrence, timed = choose_recurrence(config.runner.recurrence_backend, model, here, codec)
    used = [codec, backend, *others, *(policy.policies if policy is not None else ())]
    technique.check_conflicts(used)
    sampler = Sampler(info.vocab_size, info.tokenizer_size, config.scheduler.max_num_seqs, device, info.eos_ids)

    max_num_seqs = config.scheduler.max_num_seqs
    page_bytes = [KVPool.page_bytes_of(g, codec, page_slots, dtype) for g in groups]
    sizes = dict(page_slots=page_slots, max_rows=max_rows, max_num_seqs=max_num_seqs, max_model_len=info.max_model_len)
    prefix_root = _prefix_root(config, hf, model, used)
    products = choose_products(config.runner.product_backend, model, max_rows)

    def loaded() -> None:
        """Wait for the weights and hand them to whoever multiplies by them."""
        loading.wait()
        products.settle()

    interval = 0 if prefix_root is None else pages_for(config.cache.state_interval, page_slots) * page_slots
    pool_sizes = {**sizes, "state_interval": interval}

    def make_runner(num_pages: tuple[int, ...]) -> Runner:
        pool, length = KVPool(groups, codec, num_pages, page_slots, device, dtype), info.max_model_len
        parts = StepParts(model, pool, backend, sampler, device, policy, max_model_len=length, pooling=pooling)
        parts.have(variants.count, variants.hooks is not None)
        max_drafts = config.speculation.max_draft_tokens if config.speculation.drafter else 0
        rehearse(parts, max_drafts, trees)
        use_graphs = config.runner.cuda_graphs and device.type == "cuda" and backend.graphs
        capture = CudaCapture(device) if use_graphs else None
        pieces = capture if config.runner.fused_kernels else None
        return Runner(parts, ways_to_run(parts, capture, max_drafts, pieces, max_rows))

    step_bytes = 0
    if config.cache.num_pages:
        plan = plan_pool(groups, page_bytes, config.cache.num_pages * sum(page_bytes), **pool_sizes)
        explain = f"{config.cache.num_pages} pages of {page_slots} tokens, as set"
    elif device.type == "cuda":
        budget, explain, step_bytes = _gpu_budget(
            config, device, free_before, make_runner, sizes, groups, loaded, drafter_bytes(model)
        )
        plan = plan_pool(groups, page_bytes, budget, **pool_sizes)
    else:
        budget = cpu_budget(config.cache.cpu_cache_bytes, drafter_bytes(model))
        plan = plan_pool(groups, page_bytes, budget, **pool_sizes)
        explain = f"a budget of {gib(budget)} on the CPU (--cpu-cache-bytes)"
    clock.lap("profile")
    loaded()
    clocked = {"attention_backend": choice.timed and backend.name, "recurrence_backend": timed and recurrence}
    info.timed = {name: found for name, found in (clocked | {"product_backend": products.timed}).items() if found}
    if prefix_root is not None and products.chosen:
        prefix_root = hashlib.blake2b(prefix_root + repr(products.fingerprint()).encode(), digest_size=16).digest()
    clock.lap("weights")
    if loading.seconds:
        # The weights were filled in while other laps ran; "weights" is only what they did not hide.
        clock.laps["fill"] = round(loading.seconds, 4)
    info.max_model_len = resolve_length(info.max_model_len, plan, policy, fit=config.cache.fit, explain=explain)
    info.kv_capacity_tokens = plan.capacity if policy is None else max(plan.capacity, info.max_model_len)
    with compiling():
        runner = make_runner(plan.num_pages)
    for way in runner.ways:
        if isinstance(way, CapturingWay) and step_bytes:
            way.step_bytes = step_bytes
    clock.lap("pool")
    log.info(
        "%s: %s on %s, %s attention (%s), %s for %s tokens of KV (%s%s); context %d, %d sequences, %d rows a step",
        info.name,
        str(dtype).removeprefix("torch."),
        device.type,
        backend.name,
        choice.why,
        gib(plan.total_bytes),
        f"{plan.capacity:,}",
        explain,
        f"; {plan.states}" if plan.states else "",
        info.max_model_len,
        max_num_seqs,
        max_rows,
    )
    roofline = _roofline(model, device, dtype, _unbounded(groups, page_bytes) / page_slots)
    return Built(
        runner,
        device,
        info,
        plan,
        max_rows,
        max_num_seqs,
        roofline,
        prefix_root,
        tokenizer_file,
        clock.laps,
        loading.num_bytes,
        variants,
        policy,
    )


def _loading(config: EngineConfig) -> dict[str, Any]:
    """Options of loading that the settings give."""
    model = config.model
    return dict(
        load_format=model.load_format,
        fused=config.runner.fused_kernels,
        seed=model.seed,
        num_positions=model.max_model_len,
        weights=model.weights,
        activations=model.activation_dtype,
        token_rounding=model.token_rounding,
    )


def ways_to_run(
    parts: StepParts,
    capture: Capture | None = None,
    max_drafts: int = 0,
    pieces: PieceCapture | None = None,
    max_rows: int = 0,
) -> list[StepWay]:
    """The ways to run a step, from the cheapest launch to the one that takes every step. A new way is one more line
    here.

    ``capture`` captures decode steps, with up to ``max_drafts`` drafts for each sequence, and with forced chains;
    ``pieces`` captures steps of up to ``max_rows`` rows that mix prompts with decodes. None: such steps are not
    captured. A model that pools has prompts alone, and needs the hidden states of steps, not their logits."""
    kinds = (False, True)[: 1 + (parts.num_variants > 0)]  # steps with variants have graphs of their own
    if not all(mixer.captured for mixer in parts.recurrent()):
        capture = pieces = None
    if parts.pooler is not None:
        return [*([MixedSteps(parts, pieces, max_rows)] if pieces is not None else []), EagerSteps(parts)]
    native = _native_decoder(parts)
    ways = (
        WatchedSteps.of(parts),
        NativeDecodes(parts, native) if native is not None else None,
        *(DecodeGraphs(parts, capture, max_drafts, varied) for varied in kinds if capture is not None),
        *(ChainGraphs(parts, capture, varied) for varied in kinds if capture is not None and not max_drafts),
        *(MixedSteps(parts, pieces, max_rows, varied, max_drafts) for varied in kinds if pieces is not None),
        NativeSteps(parts, native) if native is not None else None,
        DecodeTapes(parts) if DecodeTapes.can_serve(parts) else None,
        EagerSteps(parts),
    )
    return [way for way in ways if way is not None]


def _native_decoder(parts: StepParts) -> NativeDecoder | None:
    """The model as the C kernels run it; None: they cannot."""
    serves = parts.model.place.fused and why_not(parts.model, parts.caches, parts.backend) is None
    return NativeDecoder(parts.model, parts.caches) if serves else None


def _unbounded(groups: tuple[CacheGroup, ...], page_bytes: list[int]) -> int:
    """Bytes of a page of all groups whose tokens have no window."""
    return sum(size for group, size in zip(groups, page_bytes) if group.window is None and group.kind == "pages")


def _roofline(model: Decoder, device: torch.device, dtype: torch.dtype, token_bytes: float) -> Roofline:
    """The cost of a step on this device. ``token_bytes`` is the size of one token's keys and values in groups without a
    window. A window bounds what a row looks at, so its keys count as part of the row."""
    spec, item = model.spec, model.weight_bytes
    bandwidth, flops = rates(device, dtype)
    active = cost.active_params(spec)
    pairs = sum(layer.mixer.pair_flops() for layer in spec.layers if layer.mixer.window is None)
    return Roofline(
        bandwidth,
        flops,
        cost.touched_params(spec, math.inf) * item,
        2.0 * (active - spec.vocab_size * spec.hidden_size),
        pairs,
        token_bytes,
        cost.routed_bytes(spec, item),
    )


def _default_rows(device: torch.device) -> int:
    """Rows of a step where none are set."""
    if device.type != "cuda":
        return CPU_ROWS
    return LARGE_GPU_ROWS if torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU else GPU_ROWS


class Clock:
    """Laps of the start-up, in seconds."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self._last, 4)
        self._last = now


def _tokenizer_file(config: EngineConfig, path: Path) -> Path | None:
    file = (checkpoint.resolve(config.model.tokenizer) if config.model.tokenizer else path) / "tokenizer.json"
    refuse_special(file)
    return file if file.exists() else None


def _info(
    config: EngineConfig, path: Path, hf: dict, model: Decoder, tokenizer_file: Path | None, pooling: Pooling | None
) -> ModelInfo:
    defaults = checkpoint.read_generation_config(path)
    if "eos_token_id" in defaults:
        eos_ids = checkpoint.end_ids(defaults, "generation_config.json")
    else:
        assumed = {} if defaults else {"eos_token_id": getattr(find_family(model.spec.family), "EOS_ID", None)}
        eos_ids = checkpoint.end_ids({**assumed, **hf}, "config.json")
    vocab = size = model.spec.vocab_size
    if tokenizer_file:
        # A model that was trained to chat often has its base model's end in config.json. The tokenizer's ends an
        # answer, too.
        size, own = _tokenizer_facts(tokenizer_file)
        eos_ids = [*eos_ids, *own]
    return ModelInfo(
        name=config.model.served_model_name or config.model.model or "embedded",
        max_model_len=config.model.max_model_len or model.spec.max_position,
        vocab_size=vocab,
        tokenizer_size=min(vocab, size),
        eos_ids=tuple(i for i in dict.fromkeys(eos_ids) if 0 <= i < vocab),
        config=hf,
        packaged=checkpoint.is_packaged(path),
        generation_defaults=defaults if config.model.generation_config == "auto" else {},
        pooling=pooling,
    )


def _tokenizer_facts(file: Path) -> tuple[int, tuple[int, ...]]:
    """The number of ids of a tokenizer, and those that end an answer."""
    from kvasir.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(file.parent)
    return tokenizer.size, tokenizer.eos_ids


def _groups(spec: ModelSpec, state_dtype: Literal["float32", "bfloat16"], exact: bool) -> tuple[CacheGroup, ...]:
    """The model's cache groups, with states of this type. Raises ConfigError where there are none, and for rounded ones
    in exact mode."""
    groups = spec.cache_groups()
    if state_dtype == "float32":
        return groups
    if not any(group.kind == "state" for group in groups):
        raise ConfigError(f"state_dtype={state_dtype}: this model has no recurrent layers. Leave the option out")
    if exact:
        raise ConfigError(
            f"state_dtype={state_dtype} rounds states where steps end, so a request's tokens would depend on the other "
            "requests. Use float32 with --batch-invariant"
        )
    log.warning("states are kept in %s, which rounds them when they are written: answers may differ", state_dtype)
    return tuple(replace(g, state_dtype=state_dtype) if g.kind == "state" else g for g in groups)


def _prefix_root(config: EngineConfig, hf: dict, model: Decoder, techniques: list[technique.Technique]) -> bytes | None:
    """The part of every prefix key that is fixed at the start: everything that decides keys and values, except the
    weights: an index lives and ends with them, and one that is shared names their content. None: no prefix caching."""
    used = technique.prefix_fingerprint(techniques)
    if used is None or not config.cache.enable_prefix_caching:
        return None
    parts = (
        sorted(map(str, hf.items())),
        str(model.place.dtype),
        config.model.weights,
        model.place.activations,
        model.place.rounding,
        config.runner.batch_invariant,
        config.cache.state_dtype,
        used,
        *(["further layer"] if model.mtp is not None else []),  # its rows lie in the same pages
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def _gpu_budget(
    config: EngineConfig,
    device: torch.device,
    free_before: int,
    make_runner,
    sizes: dict,
    groups: tuple[CacheGroup, ...],
    loaded: Callable[[], None],
    drafter_bytes: int,
) -> tuple[int, str, int]:
    """Bytes for the pool, an explanation, and the bytes of the largest graph.

    The pool gets the share of what was free, minus the weights, the peak of a measured worst-case step, and CUDA
    graphs, which have memory of their own. The step compiles the kernels; its numbers mean nothing, so the weights may
    still be loading."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with compiling():
        runner = worst_case_step(make_runner, sizes, groups)
    loaded()  # before anything is captured: a capture must not meet another thread's calls
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    longest, backend = sizes["max_model_len"], runner.backend
    # The prompt of that step had no context to gather.
    peak += backend.scratch_bytes(longest) - backend.scratch_bytes(min(sizes["max_rows"], longest))
    measured = [way.measure() for way in runner.ways if isinstance(way, CapturingWay)]
    step_bytes, graphs = max((step for step, _ in measured), default=0), sum(whole for _, whole in measured)
    del runner
    torch.cuda.empty_cache()
    free_now = torch.cuda.mem_get_info(device)[0]
    used, others = own_bytes(free_before, free_now, torch.cuda.memory_reserved(device))
    if others:
        log.warning("another process took %s of this GPU while this one started", gib(others))
    share = int(config.cache.gpu_memory_utilization * free_before) - used
    budget = min(share, free_now) - peak - graphs - drafter_bytes - GPU_RESERVE
    explain = (
        f"{config.cache.gpu_memory_utilization:.0%} of {gib(free_before)} free, less {gib(used)} weights and context, "
        f"{gib(peak)} measured step peak, {gib(graphs)} CUDA graphs, {gib(GPU_RESERVE)} reserve"
        + (f", {gib(drafter_bytes)} drafter" if drafter_bytes else "")
    )
    if budget <= 0:
        raise ConfigError(
            f"no memory is left for the KV pool: {explain}. Raise --gpu-memory-utilization or lower "
            "--max-num-batched-tokens."
        )
    return budget, explain, step_bytes
