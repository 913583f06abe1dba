"""Stand-in for llama-cpp-python's low-level API: a "model" whose next token depends on everything in its sequence.

Memory is laid out like llama.cpp's, so tests notice a driver that writes past a batch or mixes sequences up.
"""

import ctypes
import json
import time
from types import SimpleNamespace

__version__ = "0.0.fake"
VOCAB = 2048
# Rows of a batch: few, so that prompts take several batches.
ROWS = 24
GGML_TYPE_F32, GGML_TYPE_F16 = 0, 1
llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
int32, int8 = ctypes.c_int32, ctypes.c_int8


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", int32),
        ("token", ctypes.POINTER(int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(int32)),
        ("n_seq_id", ctypes.POINTER(int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(int32))),
        ("logits", ctypes.POINTER(int8)),
    ]


def llama_log_set(callback, data):
    callback(4, b"a word of warning\n", None)


def llama_print_system_info():
    return b"CPU : NONE = 1 | "


def llama_model_default_params():
    return SimpleNamespace(use_extra_bufts=True)


def llama_context_default_params():
    return SimpleNamespace()


def llama_model_load_from_file(path, params):
    with open(path) as f:
        return json.load(f)["tensors"]


def llama_init_from_model(model, params):
    return None if params.n_threads == 13 else SimpleNamespace(params=params, memory={}, logits=None)


def llama_model_get_vocab(model):
    return model


def llama_vocab_n_tokens(vocab):
    return VOCAB


def llama_n_batch(context):
    return ROWS


def llama_batch_init(rows, embd, owners):
    batch = Batch(0, (int32 * rows)(), None, (int32 * rows)(), (int32 * rows)(), None, (int8 * rows)())
    batch.seq_id = (ctypes.POINTER(int32) * (rows + 1))(*[(int32 * owners)() for _ in range(rows)])
    return batch


def llama_get_memory(context):
    return context.memory


def llama_memory_clear(memory, data):
    memory.clear()


def next_token(tokens):
    return sum((i + 1) * t for i, t in enumerate(tokens)) % VOCAB


def llama_decode(context, batch):
    # A step takes time, so that more tokens take longer on a busy machine too.
    time.sleep(0.002)
    found = []
    for row in range(batch.n_tokens):
        if batch.n_seq_id[row] != 1 or not 0 <= batch.seq_id[row][0] < context.params.n_seq_max:
            return -1
        tokens = context.memory.setdefault(batch.seq_id[row][0], [])
        if batch.pos[row] != len(tokens):
            return -1
        if len(tokens) == context.params.n_ctx // context.params.n_seq_max:
            return 1
        tokens.append(batch.token[row])
        if batch.logits[row]:
            found.append(next_token(tokens))
    context.logits = (ctypes.c_float * (VOCAB * max(1, len(found))))()
    for i, token in enumerate(found):
        context.logits[i * VOCAB + token] = 1.0
    return 0


def llama_get_logits(context):
    return ctypes.cast(context.logits, ctypes.POINTER(ctypes.c_float))
