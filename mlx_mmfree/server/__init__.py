"""Serves a model and its adapters over HTTP, in the format of OpenAI's interface."""
