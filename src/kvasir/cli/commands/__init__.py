"""The commands of ``kvasir``, one module each, named as they are called."""
