"""Writes checkpoints in other forms, and compares the result with the source."""
