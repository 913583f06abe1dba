"""vLLM as a driver, through its public offline API. Options are ``vllm.LLM`` keywords and reach it as they are."""

from __future__ import annotations

from typing import Any

from kvasir.bench.peers import channel


def main() -> None:
    def start(model: str, options: dict[str, Any]) -> tuple[channel.Generate, dict[str, Any]]:
        import vllm

        llm = vllm.LLM(model=model, skip_tokenizer_init=True, seed=0, **options)

        def generate(prompts: list[list[int]], num_tokens: int) -> None:
            params = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            assert all(len(o.outputs[0].token_ids) == num_tokens for o in outs), "vLLM ended a request early"

        return generate, {"version": vllm.__version__}

    channel.serve(start)


if __name__ == "__main__":  # vLLM starts its engine process by importing this module again
    main()
