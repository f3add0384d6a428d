"""Checkpoints written in the formats of others, and of others in ours.

A sink is a function that lays out the files of a format as `OutFile`s; one engine fills them.
"""

from ckpt_core.convert._files import OutFile, Wanted

__all__ = ["OutFile", "Wanted"]
