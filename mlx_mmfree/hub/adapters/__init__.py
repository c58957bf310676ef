"""Reads, writes and fuses LoRA adapters."""
