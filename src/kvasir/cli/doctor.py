"""``kvasir doctor``: the abilities of this machine and installation, the fallbacks, and the reasons."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from typing import Any

# Kinds of methods that have no line of their own, and the package of each.
OTHER_METHODS = {
    "converters": "kvasir.convert.converters",
    "hook_operations": "kvasir.hooks.ops",
    "tool_parsers": "kvasir.api.calls.tool_parsers",
    "reasoning_parsers": "kvasir.api.calls.reasoning_parsers",
    "processors": "kvasir.decoding.processors",
    "kv_policies": "kvasir.kv.policies",
    "kv_tiers": "kvasir.kv.tiers",
    "checkpoint_readers": "kvasir.models.readers",
    "model_families": "kvasir.models.families",
}
# Entry points by which an installed package has its own kinds of methods listed.
KINDS = "kvasir.cli.doctor"
# Optional packages and their use.
OPTIONAL = {
    "triton": "GPU kernels; without it attention falls back to plain torch",
    "matplotlib": "plots of benchmark reports",
    "transformers": "the peer of `kvasir bench offline --peer transformers`",
}


def other_methods() -> dict[str, str]:
    """The kinds of methods without a line of their own, those of installed packages included, and their packages."""
    return OTHER_METHODS | {e.name: e.value for e in importlib.metadata.entry_points(group=KINDS)}


def examine() -> dict[str, Any]:
    """The facts about machine and installation, with verdicts, as plain data."""
    import torch

    from kvasir import __version__
    from kvasir.attention.backend import BACKENDS, AttentionBackend, AttentionSpec, Site
    from kvasir.cluster.router import ROUTERS
    from kvasir.config import CacheConfig
    from kvasir.engine.pages.eviction import EVICTIONS
    from kvasir.engine.schedule.policy import POLICIES
    from kvasir.engine.start.attention_choice import choose_backend
    from kvasir.kernels.native.library import native
    from kvasir.kv.codec import CODECS, Codec
    from kvasir.layers.product_backend import BACKENDS as PRODUCTS
    from kvasir.layers.product_backend import ProductBackend
    from kvasir.layers.recurrence_backend import RECURRENCES, RecurrenceBackend, RecurrenceSite
    from kvasir.layers.weight_format import PACKAGE as FORMATS
    from kvasir.layers.weights import Placement
    from kvasir.scaling.strategy import STRATEGIES
    from kvasir.speculation.drafter import DRAFTERS
    from kvasir.technique import load, names, of_all

    facts: dict[str, Any] = {
        "kvasir": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "cpu": {
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "isa": torch.backends.cpu.get_cpu_capability(),
        },
        "disk_free_gib": round(shutil.disk_usage(".").free / 2**30, 1),
        "gpus": [],
        "packages": {},
        "attention": {},
        "native_kernels": {"ready": native().library is not None, "reason": native().reason},
        "codecs": names(CODECS),
        "weight_formats": names(FORMATS),
        "scheduling_policies": names(POLICIES),
        "prefix_evictions": names(EVICTIONS),
        "drafters": names(DRAFTERS),
        "strategies": names(STRATEGIES),
        "routers": names(ROUTERS),
        **{kind: names(package) for kind, package in other_methods().items()},
        "advice": [],
    }
    for package, why in OPTIONAL.items():
        found = importlib.util.find_spec(package) is not None
        facts["packages"][package] = importlib.metadata.version(package) if found else f"not installed: {why}"
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        major, minor = torch.cuda.get_device_capability(i)
        facts["gpus"].append(
            {
                "name": torch.cuda.get_device_name(i),
                "capability": f"{major}.{minor}",
                "free_gib": round(free / 2**30, 1),
                "total_gib": round(total / 2**30, 1),
            }
        )
    device = "cuda" if facts["gpus"] else "cpu"
    codec = load(CODECS, CacheConfig().kv_codec, Codec)
    site = Site(
        device=device,
        dtype=torch.bfloat16 if facts["gpus"] else torch.float32,
        codec_kernel=codec.kernel,
        page_slots=Codec.page_slots,
        specs=(AttentionSpec(32, 8, 128, 128**-0.5),),
    )
    ranked = sorted(of_all(BACKENDS, lambda name: load(BACKENDS, name, AttentionBackend)), key=lambda b: -b.rank)
    place = Placement(torch.device(device), site.dtype)
    facts["products"] = {name: load(PRODUCTS, name, ProductBackend).why_not(place) for name in names(PRODUCTS)}
    facts["products_note"] = {}
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        facts["products_note"]["triton"] = "without Triton, products run in plain torch"
    elif device == "cpu":
        facts["products_note"]["triton"] = "on a CPU it means C kernels and torch"
    facts["attention"] = {backend.name: backend.why_not(site) for backend in ranked}
    facts["attention_exact"] = {
        backend.name: backend.why_not(dataclasses.replace(site, exact=True)) for backend in ranked
    }
    facts["attention_only_named"] = {backend.name: backend.why_only_named() for backend in ranked}
    heads = RecurrenceSite(device, site.dtype, ((32, 128, 128),))
    facts["recurrence"] = dict(
        of_all(RECURRENCES, lambda name: (name, load(RECURRENCES, name, RecurrenceBackend).why_not(heads)))
    )
    choice = choose_backend("auto", site, codec)
    facts["attention_chosen"] = choice.backend.name
    facts["attention_why"] = choice.why + (", with 32 query and 8 KV heads of 128" if choice.timed else "")
    if not facts["gpus"]:
        facts["advice"].append(
            "torch sees no GPU: everything runs on the CPU, in float32"
            + ("" if torch.version.cuda else "; this torch is a CPU build, which cannot see a GPU")
        )
    return facts


def _attention(facts: dict[str, Any], name: str) -> str:
    """Verdict on one attention backend: the reasons against it, or whether it is chosen and why."""
    if reasons := facts["attention"][name]:
        return f"no: {'; '.join(reasons)}"
    chosen = f" (chosen), {facts['attention_why']}; with several ready, a start times each with its model's shapes"
    only = facts["attention_only_named"][name]
    return (
        "ready"
        + (chosen if name == facts["attention_chosen"] else f", only when named: {only}" if only else "")
        + ("; not for batch_invariant" if facts["attention_exact"][name] else "")
    )


def run(as_json: bool) -> None:
    """Print what ``examine`` finds, as a table or as JSON."""
    facts = examine()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name in ("kvasir", "python", "torch", "system"):
        table.add_row(name, str(facts[name]))
    table.add_row(
        "cpu", f"{facts['cpu']['cores']} cores, {facts['cpu']['torch_threads']} threads, {facts['cpu']['isa']}"
    )
    ready, reason = facts["native_kernels"].values()
    table.add_row(
        "cpu kernels",
        f"ready: {reason}" if ready else f"no: {reason}; small steps run in plain torch, up to three times slower",
    )
    for gpu in facts["gpus"]:
        table.add_row(
            "gpu", f"{gpu['name']}, {gpu['free_gib']} of {gpu['total_gib']} GiB free, capability {gpu['capability']}"
        )
    if not facts["gpus"]:
        table.add_row("gpu", "none")
    for package, state in facts["packages"].items():
        table.add_row(package, state)
    for name in facts["attention"]:
        table.add_row(f"attention {name}", _attention(facts, name))
    for kind in ("products", "recurrence"):
        for name, reasons in facts[kind].items():
            note = facts["products_note"].get(name, "ready") if kind == "products" else "ready"
            table.add_row(f"{kind} {name}", escape(f"no: {'; '.join(reasons)}") if reasons else note)
    table.add_row("kv codecs", ", ".join(facts["codecs"]))
    table.add_row("weight formats", ", ".join(facts["weight_formats"]))
    table.add_row("drafters", ", ".join(facts["drafters"]))
    table.add_row("scheduling", ", ".join(facts["scheduling_policies"]))
    table.add_row("strategies", ", ".join(facts["strategies"]))
    table.add_row("routers", ", ".join(facts["routers"]))
    for kind in other_methods():
        table.add_row(kind.replace("_", " "), ", ".join(facts[kind]))
    console = Console()
    console.print(table)
    for line in facts["advice"]:
        console.print(f"[yellow]note[/yellow] {line}")
