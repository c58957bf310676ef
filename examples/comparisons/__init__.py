"""Shared parts of the examples that compare models."""
