"""Loads side by side: everybody loads the same values into live tensors that are there already."""
