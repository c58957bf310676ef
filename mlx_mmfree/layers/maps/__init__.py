"""Layers of maps, arrays of shape (B, H, W, D)."""
