"""The formats in which checkpoints store weights, one file for each."""
