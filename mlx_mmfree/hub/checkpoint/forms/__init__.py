"""The forms in which checkpoints store weights, one file for each."""
