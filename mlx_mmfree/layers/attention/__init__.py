"""Attention: options, positions, keys and values, and the mixer that they make up."""
