"""Sessions: states of a model under the tokens that led to them."""

from .sessions import Known as Known
from .sessions import Sessions as Sessions
from .sessions import SessionStats as SessionStats
