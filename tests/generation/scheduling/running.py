"""Runs schedulers and returns the results of the requests."""

import random
from collections.abc import Sequence

from mlx_mmfree.generation.scheduling import Event, Request, Scheduler
from mlx_mmfree.models import Decoder


def run(scheduler: Scheduler, requests: Sequence[Request]) -> list[list[Event]]:
    """The events of each request, all of them submitted at once, beside what there was."""
    events: dict[int, list[Event]] = {scheduler.submit(request): [] for request in requests}
    while scheduler.has_work:
        for event in scheduler.step():
            if event.request in events:
                events[event.request].append(event)
    return list(events.values())


def tokens_of(events: Sequence[Event]) -> list[int | None]:
    return [event.token for event in events]


def random_prompt(numbers: random.Random, model: Decoder, longest: int = 40) -> list[int]:
    count = numbers.choice([1, 2, numbers.randint(3, 9), numbers.randint(10, longest)])
    return [numbers.randrange(model.vocab_size) for _ in range(count)]


class Characters:
    """A tokenizer for models without one: each token is a letter."""

    eos_token_ids = ()

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def detokenizer(self, after: object = ()) -> "Characters":
        return self

    def add(self, token: int) -> str:
        return chr(ord("a") + token)

    def finalize(self) -> str:
        return ""
