"""A compiler for the process that tries grammars: by its text, a grammar never ends, ends the process, or is hungry."""

import os
import signal
import time

from kvasir.decoding.grammar import GrammarCompiler


class SlowCompiler(GrammarCompiler):
    def compile(self, grammar):
        if grammar.text.startswith("slow"):
            time.sleep(600)
        if grammar.text == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if grammar.text == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if grammar.text == "hungry":
            return bytes(1 << 30)
        return super().compile(grammar)
