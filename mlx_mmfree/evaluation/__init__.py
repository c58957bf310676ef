"""Measures of models: perplexity, likelihoods of continuations, tasks and speed."""

from .model_tree import count_trits as count_trits
from .perplexity import Perplexity as Perplexity
from .perplexity import Score as Score
from .perplexity import is_recurrent as is_recurrent
from .perplexity import measure_perplexity as measure_perplexity
from .perplexity import score_continuations as score_continuations
