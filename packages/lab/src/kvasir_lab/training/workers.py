"""Processes that make things ahead of their use, in order.

They are processes because Python's lock lets only one thread run at a time. They are forked, so they share what is
already in memory without a copy. They run numpy and the tokenizer only, never torch: a forked process must not touch
its parent's GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from kvasir.errors import ConfigError

T = TypeVar("T")


def ahead(make: Callable[[int], T], start: int, workers: int) -> Iterator[T]:
    """Yield ``make(start)``, ``make(start + 1)``, ...: each worker makes every ``workers``-th item, one ahead of use.

    With 0 workers each item is made when asked for. Exceptions of ``make`` are raised here. Close the iterator to end
    the processes.
    """
    if workers == 0:
        while True:
            yield make(start)
            start += 1
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    processes = []
    try:
        for i in range(workers):
            mine, theirs = context.Pipe(duplex=False)
            ends.append(mine)
            processes.append(
                context.Process(target=_produce, args=(make, start + i, workers, theirs, tuple(ends)), daemon=True)
            )
            processes[-1].start()
            theirs.close()
        number = 0
        while True:
            yield _receive(ends[number % workers])
            number += 1
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        for end in ends:
            end.close()


def all_of(make: Callable[[T], Any], items: Sequence[T], workers: int) -> list[Any]:
    """``make`` of every item, in order, computed by forked workers."""
    stream = ahead(lambda i: make(items[i]) if i < len(items) else None, 0, min(workers, len(items)))
    try:
        return [next(stream) for _ in items]
    finally:
        stream.close()  # type: ignore[attr-defined]


def _receive(end: Connection) -> Any:
    try:
        value = end.recv()
    except EOFError as e:
        raise ConfigError("a data worker died (out of memory?): use fewer --workers") from e
    if isinstance(value, Exception):
        raise value
    return value


def _produce(
    make: Callable[[int], Any], number: int, stride: int, out: Connection, inherited: tuple[Connection, ...]
) -> None:
    for end in inherited:  # otherwise a worker whose parent was killed would wait for a reader for ever
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The tokenizer's threads did not survive the fork, and a worker has one core only.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        while True:
            try:
                value = make(number)
            except Exception as e:  # noqa: BLE001 (raised by the parent)
                value = e
            out.send(value)
            number += stride
    except BrokenPipeError:
        os._exit(0)
