"""Chooses, launches, checks and differentiates the implementations of an operation."""
