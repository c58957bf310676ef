"""Measures servers with many clients, the scheduler without HTTP, and parked sessions."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Any

from ...errors import MeasurementError
from ...hub.checkpoint.load import load_text_tokenizer
from ...tokenizer.tokenizer import Tokenizer
from . import tasks
from .checkpoint import checkpoint
from .figures import (
    BARE,
    SCHEDULER,
    LeftOut,
    ParkedFigure,
    RateFigure,
    ResumedFigure,
    ServeReport,
    Spread,
)
from .load import Answer, Question, ask_all, get
from .programs import OWN, Server, serving
from .prompts import prompt
from .settings import ServeSettings

Run = list[Answer] | dict[str, Any]
"""What the clients of a server saw, or what the scheduler without HTTP has done."""


def step_count(programs: Sequence[str], configs: Collection[str], settings: ServeSettings) -> int:
    """How many steps `measure_serving` makes."""
    rates = settings.rounds * (len(programs) * len(settings.clients) + 2)
    return rates + 1 + 1 + len(configs)


def measure_serving(
    model: str | None,
    programs: Sequence[str],
    configs: Mapping[str, Mapping[str, Any]],
    settings: ServeSettings,
    advance: Callable[[], object],
) -> ServeReport:
    """Measures servers, the scheduler without HTTP, and parked sessions.

    Args:
        model: As for `checkpoint`.
        programs: The servers, that of this library first.
        configs: Models of random weights whose sessions are parked too, by name.
        settings: How much is measured.
        advance: Called after each step.

    Raises:
        MeasurementError: The server of this library failed, or another one did not start.
        UnsupportedModelError: A program cannot run the model.
    """
    loads: list[float] = []

    def note() -> None:
        loads.append(os.getloadavg()[0])
        advance()

    with checkpoint(model) as served:
        rates, left_out = measure_rates(served, programs, settings, note)
        resumed = measure_resumed(served, settings)
        note()
        parked = []
        of_models: dict[str, str | Mapping[str, Any]] = {
            model or "packaged model": served,
            **configs,
        }
        for name, each in of_models.items():
            parked.append(_measure_parked(name, each, settings))
            note()
    processors = os.cpu_count() or 1
    return ServeReport(settings, rates, left_out, resumed, parked, loads, processors)


def measure_rates(
    model: str, programs: Sequence[str], settings: ServeSettings, advance: Callable[[], object]
) -> tuple[list[RateFigure], list[LeftOut]]:
    """Measures the programs in turn, round by round, and the scheduler of this library beside them.

    Args:
        model: The checkpoint that all serve.
        programs: The servers.
        settings: How much is measured.
        advance: Called after each measurement.

    Raises:
        MeasurementError: The server of this library failed, or another one did not start.
        UnsupportedModelError: A program cannot run the model.
    """
    tokenizer = load_text_tokenizer(model)
    runs: dict[tuple[str, int], list[Run]] = {}
    left_out: dict[tuple[str, int], str] = {}
    context = max(settings.prompt_tokens) + settings.tokens + _SPARE_TOKENS
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(name, model, max(settings.clients), context))
            for name in programs
        ]
        for server in servers:
            ask_all(server, [_questions(tokenizer, settings, "warm up", 0)])
        for number in range(settings.rounds):
            for clients in settings.clients:
                seed = f"{number} {clients}"
                asked = [_questions(tokenizer, settings, seed, c) for c in range(clients)]
                for server in servers:
                    place = server.program, clients
                    if place not in left_out:
                        try:
                            runs.setdefault(place, []).append(ask_all(server, asked))
                        except MeasurementError as error:
                            if server.program == OWN:
                                raise
                            left_out[place] = str(error)
                    advance()
            for name in (SCHEDULER, BARE):
                run = _measure_scheduler(name, model, tokenizer, settings, f"{number}")
                runs.setdefault((name, settings.rows), []).append(run)
                advance()
    order = [*programs, SCHEDULER, BARE]
    measured = runs.keys() - left_out.keys()
    places = sorted(measured, key=lambda place: (order.index(place[0]), place[1]))
    figures = [rate_figure(*place, runs[place]) for place in places]
    return figures, [LeftOut(*place, reason) for place, reason in left_out.items()]


_SPARE_TOKENS = 32
"""A text may become a few more tokens than those that it was made of."""


def _texts(tokenizer: Tokenizer, settings: ServeSettings, seed: str, client: int) -> list[str]:
    """What one client asks: long and short prompts in turn, one client the other way than the next."""
    lengths = settings.prompt_tokens
    return [
        prompt(tokenizer, lengths[(client + n) % len(lengths)], f"{seed} {client} {n}")
        for n in range(max(settings.requests, len(lengths)))
    ]


def _questions(
    tokenizer: Tokenizer, settings: ServeSettings, seed: str, client: int
) -> list[Question]:
    texts = _texts(tokenizer, settings, seed, client)
    return [Question(text, settings.tokens, tuple(tokenizer.eos_token_ids)) for text in texts]


def _measure_scheduler(
    name: str, model: str, tokenizer: Tokenizer, settings: ServeSettings, seed: str
) -> dict[str, Any]:
    arguments = {
        "model": model,
        "warm_up": _texts(tokenizer, settings, "warm up", 0),
        "clients": [_texts(tokenizer, settings, seed, c) for c in range(settings.rows)],
        "tokens": settings.tokens,
        "keeps_sessions": name == SCHEDULER,
    }
    found: dict[str, Any] = tasks.measure(tasks.DIRECT, arguments)
    return found


def rate_figure(program: str, clients: int, runs: Sequence[Run]) -> RateFigure:
    """What some rounds of the same measurement give together."""
    rates = [_rate(run) for run in runs]
    answers = [answer for run in runs if isinstance(run, list) for answer in run]
    between = [later - one for answer in answers for one, later in pairwise(answer.pieces)]
    return RateFigure(
        program,
        clients,
        tokens_per_second=median(rates),
        best=max(rates),
        first=_first_pieces(answers) if answers else None,
        between=Spread.of(between) if between else None,
    )


def _rate(run: Run) -> float:
    """Tokens a second of a run: from when the first is asked to when the last has ended."""
    if isinstance(run, dict):
        return float(run["tokens"] / run["seconds"])
    seconds = max(answer.ended for answer in run) - min(answer.sent for answer in run)
    return sum(answer.completion_tokens for answer in run) / seconds


def _measure_parked(
    name: str, model: str | Mapping[str, Any], settings: ServeSettings
) -> ParkedFigure:
    """Parks sessions of a checkpoint or a configuration in a fresh process."""
    arguments = {
        "model": model if isinstance(model, str) else None,
        "config": None if isinstance(model, str) else dict(model),
        "parked": settings.parked,
        "tokens": settings.parked_tokens,
        "new_tokens": settings.new_tokens,
        "resumed": settings.resumed,
    }
    return ParkedFigure(
        name,
        sessions=settings.parked,
        tokens=settings.parked_tokens,
        new_tokens=settings.new_tokens,
        **tasks.measure(tasks.PARKED, arguments),
    )


def measure_resumed(model: str, settings: ServeSettings) -> ResumedFigure:
    """Parks short conversations in this library's server, and goes on with some of them.

    Raises:
        MeasurementError: The server failed.
    """
    tokenizer = load_text_tokenizer(model)
    texts = [
        prompt(tokenizer, settings.prompt_tokens[0], f"parked {n}") for n in range(settings.parked)
    ]
    with serving(OWN, model, settings.rows, 0) as server:
        ask_all(server, [_questions(tokenizer, settings, "warm up", 0)])
        end = tuple(tokenizer.eos_token_ids)
        began = _ask(server, texts, end)
        kept = get(server, "/health")["sessions"]
        step = max(1, settings.parked // settings.resumed)
        longer = [
            f"{text}{answer.text} and then they all went home"
            for text, answer in list(zip(texts, began, strict=True))[::step]
        ]
        resumed = _ask(server, longer, end)
    cached = sum(a.cached_tokens for a in resumed) / sum(a.prompt_tokens for a in resumed)
    return ResumedFigure(
        kept["states"], kept["bytes"], _first_pieces(began), _first_pieces(resumed), cached
    )


def _first_pieces(answers: Sequence[Answer]) -> Spread:
    return Spread.of([answer.pieces[0] - answer.sent for answer in answers])


def _ask(server: Server, texts: Sequence[str], end: tuple[int, ...]) -> list[Answer]:
    """Answers of a few tokens, one after the other."""
    return ask_all(server, [[Question(text, _FEW_TOKENS, end) for text in texts]])


_FEW_TOKENS = 4
