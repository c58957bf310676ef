"""Writes out conversations by chat templates, which run in a sandbox."""
