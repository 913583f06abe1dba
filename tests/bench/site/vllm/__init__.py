"""Stand-in for vLLM's offline API that records its calls, so that the benchmark's driver is tested without a GPU."""

import hashlib
import json
import os
import time
from types import SimpleNamespace

__version__ = "0.0.fake"


def note(**what):
    if log := os.environ.get("FAKE_VLLM_LOG"):
        with open(log, "a") as f:
            f.write(json.dumps({"time": time.monotonic(), **what}) + "\n")


class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize, stop_token_ids=()):
        assert temperature == 0.0 and ignore_eos and not detokenize
        self.max_tokens, self.stop = max_tokens, stop_token_ids


class LLM:
    def __init__(self, model, skip_tokenizer_init, seed, **options):
        assert skip_tokenizer_init
        print("vLLM prints on stdout, too")
        if options.get("max_model_len") == 13:
            raise ValueError("no such length")
        if options.get("max_model_len") == 14:
            os._exit(7)
        note(op="start", config=os.path.exists(os.path.join(model, "config.json")), options=options)
        self.drafts = 0 if options.get("speculative_config") and options.get("disable_log_stats") is False else None

    def generate(self, prompts, params, use_tqdm):
        ids = [p["prompt_token_ids"] for p in prompts]
        note(op="generate", prompts=hashlib.sha256(json.dumps(ids).encode()).hexdigest(), count=params.max_tokens)
        time.sleep(0.002 * params.max_tokens)
        ends = list(params.stop[:1])
        self.drafts = None if self.drafts is None else self.drafts + len(ids)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=([1] * params.max_tokens)[len(ends) :] + ends)])
            for _ in ids
        ]

    def get_metrics(self):
        """Counts of drafts: each time four tokens were drafted and three accepted."""
        assert self.drafts is not None, "its statistics are off"
        return [
            SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=float(times * self.drafts))
            for name, times in (("drafts", 1), ("draft_tokens", 4), ("accepted_tokens", 3))
        ] + [SimpleNamespace(name="vllm:other", values=[1])]
