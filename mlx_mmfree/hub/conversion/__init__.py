"""Writes checkpoints in other formats, and compares the result with the source."""
