"""Writes a checkpoint in another form, and compares the two."""
