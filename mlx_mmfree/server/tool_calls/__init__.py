"""Calls of tools in what models write: forms, readers, and grammars that hold a text to them."""
