"""Checkpoints for the Hugging Face Trainer.

It uses neither Accelerate's `save_state` nor its hooks.
"""
