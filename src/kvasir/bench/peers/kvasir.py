"""Our own engine as a driver: one arm of a case. The process ends with it, and so does its hold on the GPU."""

from __future__ import annotations

import contextlib
from typing import Any

from kvasir import __version__
from kvasir.bench.offline import own_engine
from kvasir.bench.peers import channel
from kvasir.config import EngineConfig
from kvasir.logs import setup


def main() -> None:
    setup()
    with contextlib.ExitStack() as stack:

        def start(model: str, options: dict[str, Any]) -> tuple[channel.Generate, dict[str, Any]]:
            generate, llm = own_engine(EngineConfig.of(model=model, **options), stack)
            return generate, {"vocab_size": llm.info.tokenizer_size, "max_model_len": llm.info.max_model_len, "version": __version__,
                              "kv_bytes_per_token": llm.engine.runner.pool.bytes_per_token(), "kv_capacity_tokens": llm.info.kv_capacity_tokens}

        channel.serve(start)


if __name__ == "__main__":
    main()
