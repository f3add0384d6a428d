"""Formats of files and their checks, without torch: checksums, chunk tables, plain values, pickles, zips."""
