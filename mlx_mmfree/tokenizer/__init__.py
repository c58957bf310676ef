"""Turns text into tokens and back, as the files of a checkpoint say."""
