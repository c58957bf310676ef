"""Promises to newcomers, with the tests that show them."""
