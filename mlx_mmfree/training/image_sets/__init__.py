"""Labelled images in files, which may come from strangers."""
