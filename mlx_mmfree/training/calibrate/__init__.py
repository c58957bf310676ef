"""Makes a dense model ternary window by window, with only a few layers in memory at a time."""
