"""PyTorch's checkpoint files, read without running what they hold."""
