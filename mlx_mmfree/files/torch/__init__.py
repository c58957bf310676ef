"""Reads PyTorch's checkpoint files without running the code that they hold."""
