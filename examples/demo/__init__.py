"""Kill a training in the middle of a save, resume it, and compare the results."""
