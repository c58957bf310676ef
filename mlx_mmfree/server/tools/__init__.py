"""Finds in what a model writes the calls of tools that it asks for."""
