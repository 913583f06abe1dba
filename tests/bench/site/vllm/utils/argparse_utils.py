"""Stand-in for vLLM's parser."""

from argparse import ArgumentParser as FlexibleArgumentParser  # noqa: F401
