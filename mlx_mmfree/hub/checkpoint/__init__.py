"""Reads checkpoints into models and writes models as checkpoints."""
