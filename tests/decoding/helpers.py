"""Fakes that the sampler's tests compare with: a model that is a table, a scheduler that is a loop, and a slow sampler
written with scalars.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from kvasir.decoding.sampler import Sampler
from kvasir.types import Request, SamplingParams, Sequence, Span, SpanResult

EOS = 1


def sequence(
    row: int, prompt=(3, 4), *, seed: int = 7, branch: int = 0, bad_words=(), emitted=(), matcher=None, **params
) -> Sequence:
    params = SamplingParams(**params)
    request = Request(
        id=f"r{row}",
        prompt_ids=list(prompt),
        params=params,
        seed=seed,
        max_tokens=params.max_tokens or 16,
        bad_words=[list(w) for w in bad_words],
    )
    seq = Sequence(request, branch)
    seq.tokens.extend(emitted)
    seq.seat = row
    if matcher is not None:
        seq.state["grammar"] = matcher
    return seq


def decode_span(seq: Sequence, parents: list[int] | None = None) -> Span:
    """Return a span of the last known token and the whole draft, with every row sampled."""
    length = 1 + len(seq.draft)
    return Span(seq, seq.num_tokens - 1, length, want={"sample": range(length)}, commit="walk", parents=parents)


class TableModel:
    """A model whose logits are a fixed random function of the whole history."""

    def __init__(self, vocab_size: int, seed: int = 0, scale: float = 2.0) -> None:
        self.vocab_size, self.seed, self.scale = vocab_size, seed, scale

    def row(self, history: list[int]) -> torch.Tensor:
        state = np.random.RandomState([self.seed, len(history), *history[-3:]])
        return torch.from_numpy((state.randn(self.vocab_size) * self.scale).astype(np.float32))

    def logits(self, spans: list[Span]) -> torch.Tensor:
        """Return the logits [M, V] of all rows that want something, in plan order."""
        rows = []
        for span in spans:
            tokens, wanted = span.tokens(), sorted({i for r in span.want.values() for i in r})
            for i in wanted:
                path, at = [], i
                while at >= 0:
                    path.append(tokens[at])
                    at = span.parents[at] if span.parents else at - 1
                rows.append(self.row(span.seq.tokens[: span.start] + path[::-1]))
        return torch.stack(rows)


def step(sampler: Sampler, model: TableModel, spans: list[Span]) -> list[SpanResult]:
    return sampler.sample(model.logits(spans), sampler.pack(spans)).read()


def commit(sampler: Sampler, seq: Sequence, result: SpanResult, room: int) -> bool:
    """Apply a result to its sequence, as a scheduler does. Returns whether the sequence goes on."""
    params, going = seq.request.params, True
    tokens = []
    for token in result.tokens[:room]:
        tokens.append(token)
        if seq.num_output + len(tokens) >= params.min_tokens and (
            token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        ):
            going = False
            break
    seq.tokens.extend(tokens)
    seq.draft = []
    sampler.accepted(seq, tokens)
    return going and len(tokens) < room


def decode(
    sampler: Sampler, model: TableModel, seq: Sequence, length: int, draft=None, reopen_every: int = 0
) -> tuple[list[int], str | None, int]:
    """Run one sequence alone for at most ``length`` tokens. Returns the output, the error and the number of steps.

    ``draft(seq) -> (tokens, parents)`` proposes."""
    sampler.open(seq)
    steps = 0
    while seq.num_output < length:
        steps += 1
        if reopen_every and steps % reopen_every == 0:
            sampler.close(seq.seat)
            sampler.open(seq)
        seq.draft, parents = draft(seq) if draft else ([], None)
        [result] = step(sampler, model, [decode_span(seq, parents)])
        if result.error:
            return seq.output, result.error, steps
        assert result.tokens
        if not commit(sampler, seq, result, length - seq.num_output):
            break
    sampler.close(seq.seat)
    return seq.output, None, steps


# ------------------------------------------------------------------------------------------- the slow, scalar sampler


def philox_scalar(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


def gumbel_scalar(stream: int, position: int, token: int) -> float:
    word = philox_scalar([token // 4, position, 0, 0], [stream % (1 << 32), stream >> 32])[token % 4]
    return -math.log(-math.log1p(-min((word + 0.5) / 2**32, 1 - 2**-24)))


def processed_scalar(
    logits: list[float], seq: Sequence, path: list[int], eos_ids: tuple[int, ...], tokenizer_size: int
) -> tuple[list[float], bool]:
    """Return the log-weights after stage 9 (after 5 when greedy), and whether a value came so close to a threshold that
    rounding decides."""
    p, close = seq.request.params, False
    x = [float(v) for v in logits[:tokenizer_size]]
    output, prompt = seq.output + path, seq.request.prompt_ids
    for token, value in p.logit_bias.items():
        x[token] += value
    if p.allowed_token_ids is not None:
        x = [v if i in p.allowed_token_ids else -math.inf for i, v in enumerate(x)]
    for word in seq.request.bad_words:
        if (output[len(output) - len(word) + 1 :] if len(word) > 1 else []) == word[:-1] and len(output) >= len(
            word
        ) - 1:
            x[word[-1]] = -math.inf
    if len(output) < p.min_tokens:
        for token in {*p.stop_token_ids, *(() if p.ignore_eos else eos_ids)}:
            x[token] = -math.inf
    for token in range(tokenizer_size):
        times = output.count(token)
        if times or token in prompt:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        if times:
            x[token] -= p.frequency_penalty * times + p.presence_penalty
    if p.temperature < 1e-5 or max(x) == -math.inf:
        return x, False
    top = max(x)
    x = [(v - top) / p.temperature for v in x]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.top_k > 0:
        order = order[: p.top_k]
    total, kept, mass = sum(math.exp(x[i]) for i in order), [], 0.0
    for i in order:
        close |= abs(mass / total - p.top_p) < 1e-5
        if mass >= p.top_p * total and p.top_p < 1:
            break
        kept.append(i)
        mass += math.exp(x[i])
    if p.min_p > 0:
        close |= any(abs(x[i] - math.log(p.min_p)) < 1e-5 for i in kept)
        kept = [i for i in kept if x[i] >= math.log(p.min_p)]
    return [v if i in kept else -math.inf for i, v in enumerate(x)], close


def sample_scalar(weights: list[float], seq: Sequence, position: int) -> tuple[int, float]:
    """Return the drawn token, and its lead over the second."""
    if seq.request.params.temperature >= 1e-5:
        weights = [w + gumbel_scalar(seq.stream, position, i) for i, w in enumerate(weights)]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    return order[0], weights[order[0]] - weights[order[1]] if len(order) > 1 else math.inf


def log_softmax_scalar(x: list[float]) -> list[float]:
    top = max(x)
    total = math.log(sum(math.exp(v - top) for v in x))
    return [v - top - total for v in x]


# --------------------------------------------------------------------------------------------------- a byte tokenizer

WORDS = ['{"', '":', '", "', "true", "false", "null", "abc", "12", "},", "  ", "[[", "]]", "</think>"]


def byte_tokenizer(folder: Path) -> tuple[Path, dict[str, int], int]:
    """Write a tokenizer.json with the 256 bytes, EOS = 1 among the specials and some longer tokens. Returns file, ids
    by text and size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<eos>": EOS, "<eot>": 2}
    for text in [*alphabet, *(w.replace(" ", "Ġ") for w in WORDS)]:
        vocab[text] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<eot>"])
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return file, vocab, len(vocab)


def decode_bytes(ids: list[int], vocab: dict[str, int]) -> bytes:
    from tokenizers.pre_tokenizers import ByteLevel

    characters = sorted(ByteLevel.alphabet())
    # GPT-2's table: printable bytes stand for themselves, the others for 256 + n in order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    table.update({chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in printable)})
    assert sorted(table) == characters
    text = {i: t for t, i in vocab.items()}
    return b"".join(bytes(table[c] for c in text[i]) for i in ids if i > 2)
