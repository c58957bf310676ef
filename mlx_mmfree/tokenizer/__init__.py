"""Text to tokens and back, from the files of a model folder."""
