"""Commands that verify, protect, mark and prune checkpoints."""
