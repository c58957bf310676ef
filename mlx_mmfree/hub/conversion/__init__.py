"""Writes checkpoints in other variants, and compares the result with the source."""
