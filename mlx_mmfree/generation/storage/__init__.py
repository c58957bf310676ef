"""The storage of sessions: keys of texts, recent ones in memory, files and folders."""
