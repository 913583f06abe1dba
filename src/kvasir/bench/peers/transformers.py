"""The ``transformers`` library as a driver: the same checkpoint through ``generate``, eager, with its defaults."""

from __future__ import annotations

from typing import Any

from kvasir.bench.offline import transformers_engine
from kvasir.bench.peers import channel
from kvasir.config import EngineConfig


def main() -> None:
    def start(model: str, options: dict[str, Any]) -> tuple[channel.Generate, dict[str, Any]]:
        import transformers

        threads = options.pop("num_threads", None)
        if threads:
            import torch

            torch.set_num_threads(threads)
        return transformers_engine(EngineConfig.of(model=model, **options)), {"version": transformers.__version__}

    channel.serve(start)


if __name__ == "__main__":
    main()
