"""The parts of `benchmarks.crash`: who is killed or broken where, and what a fresh process then finds."""
