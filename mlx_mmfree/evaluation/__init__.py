"""Measures of models: perplexity."""

from .perplexity import Perplexity as Perplexity
from .perplexity import measure_perplexity as measure_perplexity
