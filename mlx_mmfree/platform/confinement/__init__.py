"""Runs code on strangers' files in a process of its own, with limits on time and memory."""
