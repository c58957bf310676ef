"""Serves a model and its adapters over HTTP, in the form of OpenAI's interface."""
