"""``python -m kvasir``: the command line."""

from kvasir.cli.main import main

main()
