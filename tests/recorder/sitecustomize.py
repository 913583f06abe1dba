"""Notes every function of kvasir that a process enters, for the test of the tour (tests/test_tour.py).

A process whose PYTHONPATH starts with this folder imports it before anything else. ``RECORD_ENTERED`` names a folder in
which each process keeps one file, with a line ``path function`` for each function at its first call. Lines are written
at once, since the engine process ends with ``os._exit``. Without the variable nothing is recorded.
"""

import os
import sys
import threading

FOLDER = os.environ.get("RECORD_ENTERED")
PACKAGE = f"{os.sep}kvasir{os.sep}"


def record(folder: str) -> None:
    """Start recording in this process and its future threads."""
    lines = os.open(os.path.join(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen = set()

    def note(frame, event, argument) -> None:
        code = frame.f_code
        if event == "call" and code not in seen:
            seen.add(code)
            _, package, path = code.co_filename.rpartition(PACKAGE)
            if package and "<" not in code.co_name:
                os.write(lines, f"{path} {code.co_qualname}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


if FOLDER:
    record(FOLDER)
