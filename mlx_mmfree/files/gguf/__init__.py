"""GGUF files: headers, tensor types, parts, writing."""
