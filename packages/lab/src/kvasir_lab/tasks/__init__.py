"""Tasks: each generates seeded problems and checks the answers exactly. One file, one task."""
