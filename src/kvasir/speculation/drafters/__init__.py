"""Drafters: each proposes tokens that the target model verifies. One file, one drafter."""
