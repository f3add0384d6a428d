"""Measurements: every claim of speed comes from here, side by side with the alternative in one run."""
