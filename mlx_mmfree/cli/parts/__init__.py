"""What several commands share: flags, loading, prompts, tables and the console."""
