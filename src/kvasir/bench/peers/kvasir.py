"""Our own engine as a driver, for one arm of a case. When the process ends, its hold on the GPU ends, too."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from kvasir import __version__
from kvasir.bench.offline import own_engine
from kvasir.bench.peers import channel
from kvasir.config import EngineConfig
from kvasir.logs import setup

if TYPE_CHECKING:
    from kvasir.api.offline.llm import LLM


def main() -> None:
    setup()
    with contextlib.ExitStack() as stack:
        llms: list[LLM] = []

        def start(model: str, options: dict[str, Any]) -> tuple[channel.Generate, dict[str, Any]]:
            generate, llm = own_engine(EngineConfig.of(model=model, **options), stack)
            llms.append(llm)
            return generate, {
                "vocab_size": llm.info.tokenizer_size,
                "max_model_len": llm.info.max_model_len,
                "version": __version__,
                "kv_bytes_per_token": llm.engine.runner.pool.bytes_per_token(),
                "kv_capacity_tokens": llm.info.kv_capacity_tokens,
                "state_share": llm.engine.runner.pool.state_share(),
            }

        def rest() -> None:
            for llm in llms:
                while llm.engine.idle():  # capture graphs
                    pass

        channel.serve(start, rest)


if __name__ == "__main__":
    main()
