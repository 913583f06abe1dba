"""The seam to prompts that come from elsewhere. This package holds none; kvasir-lab adds the module ``problems``."""
