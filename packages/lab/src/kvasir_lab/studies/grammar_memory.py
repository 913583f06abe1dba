"""Measure memory and start of the processes that try grammars, with a large vocabulary.

    python -m kvasir_lab.studies grammar_memory RESULT.json [--vocabulary 151669] [--tokenizer FILE]

The vocabulary is synthetic, unless a tokenizer.json is given: byte-level BPE in which pieces are joined at random from
a seed. Arm ``forked``: one host and three processes that it forks, as the engine has them. Arm ``apart``: three hosts
with one process each, which share nothing. Every process has tried two grammars before its memory is read.

``mb`` is the memory that all of them take together (proportional set size: a page that n processes share counts 1/n in
each). ``host_mb`` and ``process_mb`` are the shares of one. ``first_s`` is the time from the first start to the first
verdict, ``next_ms`` the least time to the first verdict of a later process.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvasir.decoding.grammar_process import GrammarHost, GrammarProcess
from kvasir.types import Grammar
from kvasir_lab.study import Arms, Report, study

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer", "maximum": 99}}}
TRIED = (Grammar("json_schema", json.dumps(SCHEMA)), Grammar("regex", "[a-z ]{4,100}"))
NUM_PROCESSES = 3
LONGEST_PIECE = 12


def synthetic(size: int, file: Path) -> None:
    """Write a tokenizer.json of ``size`` tokens."""
    rng, pieces = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = {piece: i for i, piece in enumerate(pieces)}, []
    while len(vocab) < size:
        left, right = rng.choice(pieces), rng.choice(pieces)
        if len(left + right) <= LONGEST_PIECE and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
            pieces.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(file))


def memory_mb(pid: int) -> float:
    """Proportional set size of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def tried(process: GrammarProcess) -> float:
    """Seconds until a new process has tried its first grammar. It tries them all."""
    began = time.perf_counter()
    process.try_out(TRIED[0])
    first = time.perf_counter() - began
    for grammar in TRIED[1:]:
        process.try_out(grammar)
    return first


def measured(file: Path, size: int, num_hosts: int) -> dict[str, Any]:
    """The metrics of one arm."""
    hosts, processes, times, began = [], [], [], time.perf_counter()
    first = 0.0
    for i in range(NUM_PROCESSES):
        if i < num_hosts:
            hosts.append(GrammarHost(file, size, (0,), 600.0))
        processes.append(hosts[-1].open())
        times.append(tried(processes[-1]))
        first = first or time.perf_counter() - began
    in_hosts, in_processes = ([memory_mb(one.pid) for one in found] for found in (hosts, processes))
    for host in hosts:
        host.close()
    return {
        "mb": round(sum(in_hosts) + sum(in_processes), 1),
        "host_mb": round(max(in_hosts), 1),
        "process_mb": round(max(in_processes), 1),
        "first_s": round(first, 3),
        "next_ms": round(1e3 * min(times[1:]), 1),
    }


@study("grammar-memory")
def main(report: Report, *, vocabulary: int = 151_669, tokenizer: Path | None = None) -> Arms:
    with tempfile.TemporaryDirectory() as folder:
        file = tokenizer or Path(folder) / "tokenizer.json"
        if tokenizer is None:
            synthetic(vocabulary, file)
        size = Tokenizer.from_file(str(file)).get_vocab_size()
        for name, num_hosts in (("forked", 1), ("apart", NUM_PROCESSES)):
            settings = {"vocabulary": size, "processes": NUM_PROCESSES, "hosts": num_hosts}
            yield name, settings, measured(file, size, num_hosts)
