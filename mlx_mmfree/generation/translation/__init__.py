"""Turns a text into another with a model that reads the one and writes the other."""

from .beam_search import beam_search as beam_search
from .search_settings import BeamSettings as BeamSettings
from .translate import translate as translate
from .translate import translate_tokens as translate_tokens
