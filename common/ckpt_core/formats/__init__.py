"""File formats and their checks, without torch.

Checksums, chunk tables, plain values, pickles, zips.
"""
