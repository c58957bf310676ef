"""Fetches repositories of the Hub."""
