"""Qwen3.5 as the Hub publishes it, with a vision model beside the text model, which alone is read."""

from dataclasses import replace

from . import qwen3_5_text

ARCHITECTURE = replace(qwen3_5_text.ARCHITECTURE, name="qwen3_5", gguf={}, published={})
