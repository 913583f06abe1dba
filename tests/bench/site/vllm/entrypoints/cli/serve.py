"""Stand-in for ``vllm serve``: it writes down what it was asked for, and ends."""

from vllm import note


class ServeSubcommand:
    @staticmethod
    def cmd(options):
        note(op="vllm serve", engines=options.data_parallel_size, checked=options.checked)
