"""Reads files from untrusted sources, and writes files that appear only when they are complete."""
