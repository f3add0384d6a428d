"""Checkpoints for the Hugging Face Trainer, which never calls `save_state`."""
