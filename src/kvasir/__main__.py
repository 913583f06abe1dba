"""The command line as ``python -m kvasir`` and as the command ``kvasir``."""

import sys

INTERRUPTED = 130  # the exit code of a command that Ctrl-C ended, as shells have it


def run() -> None:
    """Run the command line. Its imports take half a second, and Ctrl-C may come then, too: it ends them without a
    traceback."""
    try:
        from kvasir.cli.main import main

        main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    run()
