"""Fabric: `fabric.save` and `fabric.load` through the core."""
