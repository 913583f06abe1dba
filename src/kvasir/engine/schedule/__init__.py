"""Which spans run in the next step: who waits, who gives way, and how long a step may be."""
