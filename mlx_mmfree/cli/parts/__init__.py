"""The common parts of commands: flags, loading, prompts, tables and the console."""
