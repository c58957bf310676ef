"""The parts of architectures."""
