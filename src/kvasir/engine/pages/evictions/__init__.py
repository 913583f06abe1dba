"""Orders of eviction, one file each (see ``kvasir.engine.pages.eviction``)."""
