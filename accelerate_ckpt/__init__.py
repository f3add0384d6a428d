"""Accelerate adapter."""
