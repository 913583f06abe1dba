"""Processes that make things ahead of their use, in order. Python's lock lets threads do one thing at a time; forked processes share what is
already in memory and need no copy of it.

They run numpy and the tokenizer only, never torch: a forked process must not touch the GPU of its parent.
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
    """``make(start)``, ``make(start + 1)``, ...: each worker makes every ``workers``-th one, and one more than was asked for.

    With 0 workers each is made when asked for. What ``make`` raises is raised here. Close the iterator to end the processes.
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
    """``make`` of every item, in order, shared among forked workers."""
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
    for end in inherited:  # else a worker whose parent was killed would wait for a reader for ever
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # its threads did not survive the fork, and one core is all a worker has
    )
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
