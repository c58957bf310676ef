"""Losses: of next tokens, of a teacher and of rewarded answers."""
