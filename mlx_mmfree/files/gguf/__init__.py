"""Reads and writes GGUF files: headers, tensor types, and models in several parts."""
