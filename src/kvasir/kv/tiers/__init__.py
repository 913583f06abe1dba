"""Tiers below the device pool, one file each; see `kvasir.kv.tier`."""
