"""Corpora: documents of files and of the Hub, token files made of them, and batches drawn from these."""
