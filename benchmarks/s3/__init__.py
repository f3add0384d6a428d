"""A small, fast server of the S3 protocol for measurements: objects in memory, in a process of its own."""

from benchmarks.s3.process import BUCKET, Server, serving

__all__ = ["BUCKET", "Server", "serving"]
