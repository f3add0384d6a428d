"""Own your training checkpoints: asynchronous, sharded, committed, exact."""
