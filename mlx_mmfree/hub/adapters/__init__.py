"""Reads and writes LoRA adapters, and puts them on models."""
