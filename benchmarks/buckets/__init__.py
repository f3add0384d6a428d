"""Saves to an object store and loads from it, side by side: time, CPU and memory of the client."""
