"""The version, in a file of its own, which a build reads without imports."""

__version__ = "0.1.0"
