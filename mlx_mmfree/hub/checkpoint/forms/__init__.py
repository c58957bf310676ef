"""The forms in which weights are stored, one file each."""
