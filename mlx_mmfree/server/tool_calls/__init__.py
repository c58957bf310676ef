"""Calls of tools in what models write: formats, readers, and grammars that hold a text to them."""
