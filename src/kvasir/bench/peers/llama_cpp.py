"""llama.cpp on a CPU as a driver, through the low-level API of llama-cpp-python. A step is one ``llama_decode`` over
all sequences.

Options: ``file_type`` of the weights (``gguf.write``), ``num_threads``, ``max_num_seqs``, ``max_model_len`` (tokens of
one sequence), ``kv_type`` (f16, the default, or f32), ``extra_buffers`` (false: do not rearrange weights for special
instructions like AMX). Everything else is llama.cpp's default.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.bench import gguf
from kvasir.bench.peers import channel

# ggml's log level for errors. Lower levels print too much.
ERROR = 4


class LlamaCpp:
    """Greedy completion of up to ``max_num_seqs`` prompts at once. Model and memory live as long as the process."""

    def __init__(
        self,
        file: Path,
        *,
        num_threads: int,
        max_num_seqs: int,
        max_model_len: int,
        kv_type: str = "f16",
        extra_buffers: bool = True,
    ) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.log = llama_cpp.llama_log_callback(_errors_only)  # llama.cpp keeps calling it, so it must not be freed
        llama_cpp.llama_log_set(self.log, None)
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = extra_buffers
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_ctx = max_num_seqs, max_num_seqs * max_model_len
        params.n_threads = params.n_threads_batch = num_threads
        params.type_k = params.type_v = {"f16": llama_cpp.GGML_TYPE_F16, "f32": llama_cpp.GGML_TYPE_F32}[kv_type]
        self.context = self.model and llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise ValueError("llama.cpp could not load the model; its last output is above")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.rows = llama_cpp.llama_n_batch(self.context)
        self.batch = llama_cpp.llama_batch_init(self.rows, 0, 1)
        view = np.ctypeslib.as_array  # views of the batch's own memory
        fields = (self.batch.token, self.batch.pos, self.batch.n_seq_id, self.batch.logits)
        self.token, self.position, self.num_seqs, self.wanted = (view(f, (self.rows,)) for f in fields)
        owners = ctypes.cast(self.batch.seq_id, ctypes.POINTER(ctypes.c_void_p))
        self.owner = [view(ctypes.cast(owners[row], ctypes.POINTER(ctypes.c_int32)), (1,)) for row in range(self.rows)]
        self.num_seqs[:] = 1

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """The greedy continuation of each prompt by ``num_tokens`` ids; nothing is kept from earlier calls."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)
        latest = self._read(prompts)
        found, lengths = [latest], np.array([len(p) for p in prompts], np.int32)
        self.wanted[: len(prompts)] = 1
        for row in range(len(prompts)):
            self.owner[row][0] = row
        for ahead in range(num_tokens - 1):
            self.token[: len(prompts)] = latest
            self.position[: len(prompts)] = lengths + ahead
            latest = self._decode(len(prompts))
            found.append(latest)
        return np.stack(found, 1).tolist()

    def _read(self, prompts: list[list[int]]) -> np.ndarray:
        """Compute the prompts, in batches as large as llama.cpp allows. Returns the first id of each answer, int64
        [prompts]."""
        rows = [(i, at, token) for i, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        first = []
        for begin in range(0, len(rows), self.rows):
            part = rows[begin : begin + self.rows]
            for row, (i, at, token) in enumerate(part):
                self.owner[row][0] = i
                self.token[row], self.position[row], self.wanted[row] = token, at, at == len(prompts[i]) - 1
            first.append(self._decode(len(part)))
        return np.concatenate(first)

    def _decode(self, num_rows: int) -> np.ndarray:
        """Run one step. Returns the most likely id of every row with logits, in order."""
        self.batch.n_tokens = num_rows
        if status := self.api.llama_decode(self.context, self.batch):
            raise ValueError(f"llama_decode answered {status}")
        count = int(self.wanted[:num_rows].sum())
        if not count:
            return np.zeros(0, np.int64)
        return np.ctypeslib.as_array(self.api.llama_get_logits(self.context), (count, self.vocab_size)).argmax(1)


def _errors_only(level: int, text: bytes, _: Any) -> None:
    if level == ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


def main() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvasir-gguf-")))

        def start(model: str, options: dict[str, Any]) -> tuple[channel.Generate, dict[str, Any]]:
            import llama_cpp

            file, file_type = folder / "model.gguf", options.pop("file_type", "f32")
            gguf.write(Path(model), file, file_type)
            engine = LlamaCpp(file, **options)

            def generate(prompts: list[list[int]], num_tokens: int) -> None:
                assert all(len(ids) == num_tokens for ids in engine.generate(prompts, num_tokens))

            built_for = llama_cpp.llama_print_system_info().decode().strip(" |")
            return generate, {"version": llama_cpp.__version__, "built_for": built_for}

        channel.serve(start)


if __name__ == "__main__":
    main()
