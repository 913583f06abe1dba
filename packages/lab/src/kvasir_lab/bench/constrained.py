"""``kvasir bench constrained``: what a JSON schema costs, measured through servers, ours and a peer's.

Weights are random, so text means nothing, but every token obeys its schema. Four loads:

- time per token with a schema of free text (``text``) and one of records (``records``), over that without a schema;
- time to first token of a schema that the server has not seen;
- output tokens a second of 64 requests with 64 schemas, over that with one schema;
- records with long keys, whose text is mostly forced: tokens a forward (ours) and time per token.

A shape has no tokenizer of its own. One of its size is trained at the start on the Python sources of this machine, so
that masks are computed over a real vocabulary; both servers read it.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvasir.bench.client import Call, Reply, send
from kvasir.bench.provenance import peer_version
from kvasir.bench.result import arm, finish, ratios_of, result, save
from kvasir.bench.servers import SHARED, Server, flags_of, serving
from kvasir.bench.worker import check_peer
from kvasir.bench.workloads import SHAPES, shape_folder
from kvasir.config import EngineConfig
from kvasir.logs import log
from kvasir.models import checkpoint

BATCHES = (1, 16, 64)
NUM_NEW = 16  # schemas whose first token is timed, one after the other
NUM_SCHEMAS = 64
PROMPT, OUTPUT = 128, 128
# Bytes of Python sources that the tokenizer is trained on, and the ids that no word gets.
TRAINED_BYTES, RESERVED = 32 << 20, 256
COUNTERS = ("generation_tokens", "forwards", "forced_tokens")


def schema(kind: str, salt: int = 0) -> dict[str, Any]:
    """A schema whose outputs do not end within a load. ``salt`` makes another one of the same kind."""
    if kind == "text":
        items: dict[str, Any] = {"type": "string", "minLength": 40 + salt}
    else:
        stem = "k" if kind == "records" else "a_key_that_says_in_many_words_what_its_value_means_to_readers"
        names = [f"{stem}_{salt}_{name}" for name in ("name", "count", "kind", "done")]
        values = (
            {"type": "string", "maxLength": 16},
            {"type": "integer", "minimum": 0, "maximum": 9999},
            {"enum": ["small", "large"]},
            {"type": "boolean"},
        )
        items = {
            "type": "object",
            "properties": dict(zip(names, values)),
            "required": names,
            "additionalProperties": False,
        }
    return {"type": "array", "items": items, "minItems": 60}


def constraint(kind: str, salt: int = 0) -> dict[str, Any]:
    """Further parameters of a request under a schema; none for ``plain``."""
    if kind == "plain":
        return {}
    return {"structured_outputs": {"json": schema(kind, salt)}, "ignore_eos": False}


@contextlib.contextmanager
def folder_of(shape: str) -> Iterator[str]:
    """Yield a folder with the shape's config and a trained tokenizer of its size."""
    with shape_folder(shape) as folder:
        train_tokenizer(Path(folder), SHAPES[shape]["vocab_size"] - RESERVED)
        yield folder


def train_tokenizer(folder: Path, size: int, most_bytes: int = TRAINED_BYTES, marks: tuple[str, ...] = ()) -> None:
    """Write a byte-level BPE of up to ``size`` words, trained on the Python sources of this machine, with ``</s>`` as
    id 2 and ``marks`` behind it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts, left = [], most_bytes
    for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for file in sorted(Path(root).rglob("*.py")):
            if left <= 0:
                break
            text = file.read_text(encoding="utf-8", errors="ignore")[:left]
            texts.append(text)
            left -= len(text)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special, alphabet = ["<unk>", "<s>", "</s>", *marks], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=alphabet,
        min_frequency=1,
        max_token_length=48,  # the grammar library reads no token of more than 255 bytes
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    log.info("the tokenizer has %d words of %d", backend.get_vocab_size(), size)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class Loads:
    """The loads of one server. ``repeats``: how often each counts, after a round that does not."""

    def __init__(self, server: Server, model: str, repeats: int, batches: tuple[int, ...]) -> None:
        self.server, self.model, self.repeats, self.batches = server, model, repeats, batches
        self._seed = 0

    def run(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        for batch in self.batches:
            found = {kind: self._token_ms(batch, kind) for kind in ("plain", "text", "records", "long_keys")}
            for kind, (token_ms, counted) in found.items():
                metrics[f"{kind}{batch}.token_ms"] = token_ms
                if kind != "plain":
                    metrics[f"{kind}{batch}.over_plain"] = round(token_ms / found["plain"][0], 4)
                    metrics |= {f"{kind}{batch}.{name}": value for name, value in counted.items()}
        metrics |= self._first_token()
        return metrics | self._many_schemas()

    def send(self, extras: list[dict[str, Any]], output: int = OUTPUT) -> list[Reply]:
        """Send requests with these parameters at once. Raises ConfigError where one fails."""
        self._seed += 1
        draw = random.Random(self._seed)
        calls = [Call(0.0, [draw.randrange(300, 1500) for _ in range(PROMPT)], output, extra) for extra in extras]
        return send(self.server.url, self.server.name, self.model, calls)

    def counters(self) -> dict[str, float]:
        if self.server.name != "kvasir":
            return {}
        return self.server.counters(COUNTERS)

    def _token_ms(self, batch: int, kind: str) -> tuple[float, dict[str, float]]:
        """Median milliseconds per token after the first, and what our server counted."""
        self.send([constraint(kind)] * batch)
        before, values = self.counters(), []
        for _ in range(self.repeats):
            for reply in self.send([constraint(kind)] * batch):
                if reply.completion > 1:
                    values.append(1e3 * (reply.events[-1] - reply.events[0]) / (reply.completion - 1))
        counted = {name: count - before[name] for name, count in self.counters().items()}
        if counted.get("forwards"):
            tokens = counted["generation_tokens"]
            counted = {
                "tokens_a_forward": round(tokens / counted["forwards"], 3),
                "forced_share": round(counted["forced_tokens"] / tokens, 3),
            }
        return round(statistics.median(values), 4), counted

    def _first_token(self) -> dict[str, float]:
        """Median milliseconds to the first token without a schema, with one that is new, and with one that is not."""
        kinds = {
            "plain": [constraint("plain")] * NUM_NEW,
            "new_schema": [constraint("records", 1000 + i) for i in range(NUM_NEW)],
            "same_schema": [constraint("records", 1000)] * NUM_NEW,
        }
        found = {}
        for name, extras in kinds.items():
            replies = [self.send([extra], 2)[0] for extra in extras]
            found[f"{name}.ttft_ms"] = round(1e3 * statistics.median(r.events[0] - r.due for r in replies), 3)
        return found

    def _many_schemas(self) -> dict[str, float]:
        """Output tokens a second of as many requests as schemas, with one schema and with one for each."""
        found = {}
        for name, salts in {"one_schema": [2000] * NUM_SCHEMAS, "64_schemas": range(3000, 3000 + NUM_SCHEMAS)}.items():
            rates = []
            for _ in range(self.repeats):
                replies = self.send([constraint("records", salt) for salt in salts])
                seconds = max(r.ended for r in replies) - min(r.sent for r in replies)
                rates.append(sum(r.completion for r in replies) / seconds)
            found[f"{name}.output_tok_s"] = round(statistics.median(rates), 1)
        found["64_schemas.over_one"] = round(found["64_schemas.output_tok_s"] / found["one_schema.output_tok_s"], 4)
        return found


def run(
    config: EngineConfig,
    options: dict[str, Any],
    *,
    shape: str | None,
    repeats: int,
    batches: list[int] | None,
    output: Path | None,
    peer: str | None = None,
    site: str | None = None,
    commit: str | None = None,
) -> None:
    """Measure our server, then the peer's, and show the result."""
    if peer:
        check_peer(peer, site)
    flags = flags_of(options)
    own, theirs = list(flags), flags_of({k: v for k, v in options.items() if k in SHARED})
    with contextlib.ExitStack() as stack:
        model = config.model.model
        if shape:
            model = stack.enter_context(folder_of(shape))
            served = ["--load-format", "dummy", "--served-model-name", shape]
            own, theirs = own + served, theirs + served
        elif peer:
            from kvasir.convert.checkpoint import plain_folder

            model = str(plain_folder(checkpoint.resolve(model)))
        entries: list[dict[str, Any]] = []

        def outcome() -> dict[str, Any]:
            ratios = ratios_of(entries, [("kvasir", peer)] if len(entries) > 1 else [])
            return result(f"constrained-{shape or config.model.model or 'embedded'}", entries, ratios=ratios)

        for name in ("kvasir", peer) if peer else ("kvasir",):
            used = own if name == "kvasir" else theirs
            with serving(name, model, used, site) as server:
                server.wait()
                served_name = shape or _served(server)
                metrics = Loads(server, served_name, repeats, tuple(batches or BATCHES)).run()
            settings = {"flags": used, "shape": shape} | ({} if name == "kvasir" else peer_version(name, site))
            entries.append(arm(name, settings, metrics))
            save(outcome(), output, commit)  # a run that is cut off keeps what it has
    finish(outcome(), output, commit)


def _served(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=30) as reply:
        return json.load(reply)["data"][0]["id"]
