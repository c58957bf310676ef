"""Loads checkpoints into models, and saves models as checkpoints."""
