"""Commands that look at roots and checkpoints, and change nothing."""
