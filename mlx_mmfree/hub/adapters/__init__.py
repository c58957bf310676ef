"""Reads, writes and merges LoRA adapters."""
