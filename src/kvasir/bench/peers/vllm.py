"""vLLM as a driver, through its public offline API. Options are ``vllm.LLM`` keywords and are passed on unchanged.

``lora_modules`` (``NAME=FOLDER``) are adapters that the prompts take turns with, as with ours. With a
``speculative_config`` vLLM's own statistics are on, since the counts of drafts come from them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from kvasir.bench.peers import channel
from kvasir.bench.peers.vllm_kernels import turn_off

COUNTERS = {
    "vllm:spec_decode_num_drafts": "verified",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def _adapters(modules: Sequence[str]) -> list[Any]:
    """The adapters of ``NAME=FOLDER`` as vLLM takes them."""
    if not modules:
        return []
    from vllm.lora.request import LoRARequest

    named = [module.split("=", 1) for module in modules]
    return [LoRARequest(name, number, path) for number, (name, path) in enumerate(named, 1)]


def main() -> None:
    def start(model: str, options: dict[str, Any]) -> tuple[channel.Generate, dict[str, Any]]:
        options = turn_off(options)
        import vllm

        adapters = _adapters(options.pop("lora_modules", ()))
        drafts = options.get("speculative_config") or {}
        if drafts.get("method") == "ngram" and importlib.util.find_spec("numba") is None:
            raise RuntimeError("vLLM's ngram needs numba: pip install numba to where vLLM's packages are")
        llm = vllm.LLM(
            model=model, skip_tokenizer_init=True, seed=0, **({"disable_log_stats": False} if drafts else {}), **options
        )

        def counts() -> dict[str, int]:
            found = dict.fromkeys(COUNTERS.values(), 0) if drafts else {}
            for metric in llm.get_metrics() if drafts else ():
                if metric.name in COUNTERS:
                    found[COUNTERS[metric.name]] += int(metric.value)
            return found

        def generate(prompts: list[list[int]], num_tokens: int, stop: list[int] | None = None) -> dict[str, Any]:
            params = vllm.SamplingParams(
                temperature=0.0,
                max_tokens=num_tokens,
                ignore_eos=True,
                detokenize=False,
                **({"stop_token_ids": stop} if stop else {}),
            )
            before = counts()
            turns = {"lora_request": [adapters[i % len(adapters)] for i in range(len(prompts))]} if adapters else {}
            outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False, **turns)
            outputs = [list(o.outputs[0].token_ids) for o in outs]
            assert stop or all(len(ids) == num_tokens for ids in outputs), "vLLM ended a request early"
            found: dict[str, Any] = {name: count - before[name] for name, count in counts().items()}
            found["cached"] = sum(getattr(o, "num_cached_tokens", None) or 0 for o in outs)
            return found if stop is None else found | {"outputs": outputs}

        return generate, {"version": vllm.__version__}

    channel.serve(start)


if __name__ == "__main__":  # vLLM starts its engine process by importing this module again
    main()
