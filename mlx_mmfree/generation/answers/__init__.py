"""An answer as it grows: its text, what ends it, its reasoning and its parts."""
