"""Run the checks of one file against a server and print what failed, as JSON. Runs in the clients' own environment.

    python run.py checks/openai_python.py http://127.0.0.1:8000

A check is a function whose name begins with ``check_``; it takes the server's URL.
"""

import json
import runpy
import sys
import traceback


def main(file: str, url: str) -> None:
    found = runpy.run_path(file)
    results = {}
    for name, check in found.items():
        if name.startswith("check_"):
            try:
                check(url)
                results[name] = None
            except Exception:
                results[name] = traceback.format_exc(limit=-6)
    print("RESULTS " + json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
