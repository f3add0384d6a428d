"""The mutations and readers of `python -m benchmarks.fuzz`."""
