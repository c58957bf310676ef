"""Measures servers with many clients, and what parked sessions take."""

import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, cast

from server_clients import (
    OWN,
    SHAPES,
    Answer,
    Question,
    Server,
    ask_all,
    check_program,
    checkpoint,
    get,
    prompt,
    serving,
)
from tqdm import tqdm

from mlx_mmfree.cli.parts.command import command
from mlx_mmfree.cli.parts.flags import positive
from mlx_mmfree.cli.parts.parser import CommandParser
from mlx_mmfree.cli.parts.terminal import aligned, markdown, size_text
from mlx_mmfree.cli.serve import check_serve_packages
from mlx_mmfree.errors import MeasurementError, UsageError
from mlx_mmfree.evaluation.benchmark import measure
from mlx_mmfree.hub.checkpoint.load import load_text_tokenizer
from mlx_mmfree.tokenizer.tokenizer import Tokenizer

_SPARE_TOKENS = 32
"""A text may become a few more tokens than those that it was made of."""

_FEW_TOKENS = 4
_BYTES = 256


@dataclass(frozen=True)
class ServeSettings:
    """How much is measured.

    Attributes:
        clients: Numbers of clients at the same time.
        requests: Requests of each client, one after the other.
        prompt_tokens: Lengths of the prompts, which clients send in turn; about as many in their words.
        tokens: Tokens of each answer.
        rounds: How often each server is measured, in turn with the others.
        rows: Rows of the scheduler without HTTP.
        parked: Sessions that are parked.
        parked_tokens: Tokens of a parked session that is restored.
        new_tokens: Tokens that a resumed session is sent.
        resumed: Sessions that are resumed.
        turns: Turns of a conversation, each with `new_tokens` more than the one before and its answer.
    """

    clients: tuple[int, ...] = (1, 4, 16, 64)
    requests: int = 4
    prompt_tokens: tuple[int, ...] = (16, 512)
    tokens: int = 64
    rounds: int = 3
    rows: int = 16
    parked: int = 1000
    parked_tokens: int = 8000
    new_tokens: int = 16
    resumed: int = 100
    turns: int = 10


QUICK = ServeSettings(
    clients=(1, 4),
    requests=2,
    prompt_tokens=(12, 32),
    tokens=8,
    rounds=1,
    rows=4,
    parked=20,
    parked_tokens=64,
    new_tokens=4,
    resumed=5,
    turns=3,
)
"""To try the command in a short time."""
SCHEDULER, BARE = "scheduler without HTTP", "scheduler without HTTP and sessions"


@dataclass(frozen=True)
class Spread:
    """Seconds that something took.

    Attributes:
        median: The median.
        late: The 95th percentile.
    """

    median: float
    late: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """The spread of some seconds."""
        late = quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
        return cls(median(seconds), late)


@dataclass(frozen=True)
class RateFigure:
    """The metrics of one program's clients.

    Attributes:
        program: A server, `SCHEDULER`, or `BARE`, which keeps no sessions.
        clients: How many ask at the same time.
        tokens_per_second: Of all clients together, in the median round.
        best: In the fastest round.
        first: Seconds up to the first chunk of text, over all rounds; `None` without HTTP.
        between: Seconds from one chunk of text to the next of the same answer.
    """

    program: str
    clients: int
    tokens_per_second: float
    best: float
    first: Spread | None
    between: Spread | None


@dataclass(frozen=True)
class TurnsFigure:
    """A conversation of one client: each turn sends all that was sent before and some more.

    Attributes:
        program: A server.
        turns: How many.
        prompt_tokens: Of the last turn.
        cached: The share of the last turn's prompt that was cached.
        first: Seconds up to the first chunk of text in the first turn.
        last: The same in the last turn, over all rounds.
    """

    program: str
    turns: int
    prompt_tokens: int
    cached: float
    first: Spread
    last: Spread


@dataclass(frozen=True)
class LeftOut:
    """A program that failed.

    Attributes:
        program: Another server.
        clients: With how many clients.
        reason: What it did.
    """

    program: str
    clients: int
    reason: str


@dataclass(frozen=True)
class ParkedFigure:
    """The memory and time of parked sessions.

    Attributes:
        name: The model.
        sessions: How many are parked.
        bytes: What they count in memory.
        tokens: Length of each.
        resident_bytes: By how much a process has grown that parks them; `None` where unknown.
        restore: Seconds to restore one from memory, in the median of those resumed.
        tokenize: Seconds to turn its whole text into tokens; `None` where there is no tokenizer.
        read: Seconds to read `new_tokens` more.
        new_tokens: How many were sent on resuming.
    """

    name: str
    sessions: int
    bytes: int
    tokens: int
    resident_bytes: int | None
    restore: float
    tokenize: float | None
    read: float
    new_tokens: int


@dataclass(frozen=True)
class ResumedFigure:
    """Sessions of a server that went on after all of them were parked.

    Attributes:
        sessions: How many the server kept.
        bytes: What they count in its memory.
        asked: Seconds up to the first chunk of text when they began.
        resumed: The same when they went on.
        cached: The share of the tokens of a resumed prompt that were cached.
    """

    sessions: int
    bytes: int
    asked: Spread
    resumed: Spread
    cached: float


@dataclass(frozen=True)
class ServeReport:
    """All that was measured.

    Attributes:
        settings: How much.
        rates: What clients get.
        turns: Conversations of several turns.
        left_out: What could not be measured of them.
        resumed: Sessions of the server.
        parked: Sessions without HTTP, of one model after the other.
        loads: The load average of one minute after each measurement.
        processors: Of this machine.
    """

    settings: ServeSettings
    rates: list[RateFigure]
    turns: list[TurnsFigure]
    left_out: list[LeftOut]
    resumed: ResumedFigure
    parked: list[ParkedFigure]
    loads: list[float]
    processors: int


Run = list[Answer] | dict[str, Any]
"""The answers that the clients of a server got, or the report of the scheduler without HTTP."""


def step_count(programs: Sequence[str], configs: Collection[str], settings: ServeSettings) -> int:
    """How many steps `measure_serving` makes."""
    rates = settings.rounds * (len(programs) * (len(settings.clients) + 1) + 2)
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
        programs: The servers, this library's first.
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
        rates, turns, left_out = measure_rates(served, programs, settings, note)
        resumed = measure_resumed(served, settings)
        note()
        parked = []
        of_models: dict[str, str | Mapping[str, Any]] = {
            model or "bundled model": served,
            **configs,
        }
        for name, each in of_models.items():
            parked.append(_measure_parked(name, each, settings))
            note()
    processors = os.cpu_count() or 1
    return ServeReport(settings, rates, turns, left_out, resumed, parked, loads, processors)


def measure_rates(
    model: str, programs: Sequence[str], settings: ServeSettings, advance: Callable[[], object]
) -> tuple[list[RateFigure], list[TurnsFigure], list[LeftOut]]:
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
    turns: dict[tuple[str, int], list[Run]] = {}
    context = max(settings.prompt_tokens) + settings.tokens + _SPARE_TOKENS
    context += settings.turns * (settings.new_tokens + settings.tokens)

    def attempt(
        server: Server,
        clients: int,
        found: dict[tuple[str, int], list[Run]],
        asks: Callable[[], list[Answer]],
    ) -> None:
        key = server.program, clients
        if key not in left_out:
            try:
                found.setdefault(key, []).append(asks())
            except MeasurementError as error:
                if server.program == OWN:
                    raise
                left_out[key] = str(error)
        advance()

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
                    attempt(server, clients, runs, partial(ask_all, server, asked))
            for server in servers:
                talk = partial(_converse, server, tokenizer, settings, f"{number}")
                attempt(server, 1, turns, talk)
            for name in (SCHEDULER, BARE):
                run = _measure_scheduler(name, model, tokenizer, settings, f"{number}")
                runs.setdefault((name, settings.rows), []).append(run)
                advance()
    order = [*programs, SCHEDULER, BARE]
    measured = runs.keys() - left_out.keys()
    in_order = sorted(measured, key=lambda key: (order.index(key[0]), key[1]))
    metrics = [rate_figure(*key, runs[key]) for key in in_order]
    conversations = [
        turns_figure(name, cast(list[list[Answer]], answers))
        for (name, clients), answers in turns.items()
        if (name, clients) not in left_out
    ]
    return metrics, conversations, [LeftOut(*each, why) for each, why in left_out.items()]


def _converse(
    server: Server, tokenizer: Tokenizer, settings: ServeSettings, seed: str
) -> list[Answer]:
    """The answers to one client that sends all that was sent before with each of its turns.

    Letters alone are forbidden, since they become other tokens when the next turn sends them.
    """
    letters = [n for n in range(_BYTES) if len(tokenizer.decode([n]).strip()) < 2]
    end = (*tokenizer.eos_token_ids, *letters)
    text, answers = prompt(tokenizer, settings.prompt_tokens[0], f"turns {seed}"), []
    for turn in range(settings.turns):
        [answer] = ask_all(server, [[Question(text, settings.tokens, end)]])
        answers.append(answer)
        text += f"{answer.text} {prompt(tokenizer, settings.new_tokens, f'turn {seed} {turn}')}"
    return answers


def turns_figure(program: str, rounds: Sequence[Sequence[Answer]]) -> TurnsFigure:
    """The metrics of some rounds of a conversation together."""
    last = [answers[-1] for answers in rounds]
    cached = sum(a.cached_tokens for a in last) / sum(a.prompt_tokens for a in last)
    return TurnsFigure(
        program,
        turns=len(rounds[0]),
        prompt_tokens=last[0].prompt_tokens,
        cached=cached,
        first=_first_chunks([answers[0] for answers in rounds]),
        last=_first_chunks(last),
    )


def _texts(tokenizer: Tokenizer, settings: ServeSettings, seed: str, client: int) -> list[str]:
    """The prompts of one client: long and short ones in turn, every second client the other way."""
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
    found: dict[str, Any] = measure("server_sessions:write_answers", arguments)
    return found


def rate_figure(program: str, clients: int, runs: Sequence[Run]) -> RateFigure:
    """The metrics of some rounds of the same measurement together."""
    rates = [_rate(run) for run in runs]
    answers = [answer for run in runs if isinstance(run, list) for answer in run]
    between = [later - one for answer in answers for one, later in pairwise(answer.chunks)]
    return RateFigure(
        program,
        clients,
        tokens_per_second=median(rates),
        best=max(rates),
        first=_first_chunks(answers) if answers else None,
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
        tokens=settings.parked_tokens,
        new_tokens=settings.new_tokens,
        **measure("server_sessions:park", arguments),
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
        sessions = get(server, "/health")["sessions"]
        step = max(1, settings.parked // settings.resumed)
        longer = [
            f"{text}{answer.text} and then they all went home"
            for text, answer in list(zip(texts, began, strict=True))[::step]
        ]
        resumed = _ask(server, longer, end)
    cached = sum(a.cached_tokens for a in resumed) / sum(a.prompt_tokens for a in resumed)
    return ResumedFigure(
        sessions["states"], sessions["bytes"], _first_chunks(began), _first_chunks(resumed), cached
    )


def _first_chunks(answers: Sequence[Answer]) -> Spread:
    return Spread.of([answer.chunks[0] - answer.sent for answer in answers])


def _ask(server: Server, texts: Sequence[str], end: tuple[int, ...]) -> list[Answer]:
    """Answers of a few tokens, one after the other."""
    return ask_all(server, [[Question(text, _FEW_TOKENS, end) for text in texts]])


_AMOUNTS: Mapping[str, tuple[str, bool]] = {
    "clients": ("numbers of clients at the same time (1 4 16 64)", True),
    "prompt_tokens": ("lengths of the prompts, which clients send in turn (16 512)", True),
    "tokens": ("tokens of each answer (64)", False),
    "requests": ("requests of each client, one after the other (4)", False),
    "turns": ("turns of a conversation of one client (10)", False),
    "rounds": ("how often each server is measured, in turn with the others (3)", False),
    "rows": ("rows of the scheduler without HTTP (16)", False),
    "parked": ("sessions that are parked, if a quarter of the memory holds them (1000)", False),
    "parked_tokens": ("tokens of a parked session that is restored (8000)", False),
}
_COMPARE = ("mlx-lm", "llama.cpp")


def build_parser() -> CommandParser:
    parser = CommandParser(prog="servers.py", description=__doc__)
    parser.add_argument(
        "--model",
        help="folder or Hub repository of the model to serve, or a name as for --config, which gets "
        "random weights (the bundled model)",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        choices=_COMPARE,
        default=[],
        help="also measure the servers of these with the same model; llama.cpp runs no MatMul-free "
        "model",
    )
    parser.add_argument(
        "--config",
        nargs="*",
        default=["mmfreelm-370m"],
        help="also park sessions of models with random weights: names of published shapes; "
        " none leaves this out (mmfreelm-370m)",
    )
    for name, (text, is_several) in _AMOUNTS.items():
        nargs = "+" if is_several else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, nargs=nargs, help=text)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="try the command in a short time; its numbers say nothing about speed",
    )
    format = parser.add_mutually_exclusive_group()
    format.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    format.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    check_serve_packages("bench")
    configs = _configs(args.config)
    for program in args.compare:
        check_program(program)
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in _AMOUNTS
        if (value := getattr(args, name)) is not None
    }
    settings = replace(QUICK if args.quick else ServeSettings(), **given)
    programs = [OWN, *args.compare]
    count = step_count(programs, configs, settings)
    with tqdm(total=count, unit="figure", disable=None, dynamic_ncols=True) as bar:
        report = measure_serving(args.model, programs, configs, settings, bar.update)
    if args.json:
        print(json.dumps(asdict(report)))
    else:
        print("\n".join(serve_lines(report, args.markdown)))
    return 0


def _configs(names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The configurations of these names."""
    for name in names:
        if name not in SHAPES:
            raise UsageError(
                f"[bench] 'config' must be of {', '.join(sorted(SHAPES))} but got {name!r}."
            )
    return {name: SHAPES[name] for name in names}


def serve_lines(report: ServeReport, is_markdown: bool) -> list[str]:
    """All tables, and what was left out."""
    table = markdown if is_markdown else aligned
    loads = report.loads
    lines = [
        f"load average while measuring: {min(loads):.1f} to {max(loads):.1f} on {report.processors} "
        "processors"
    ]
    for rows in (
        _rate_rows(report.rates),
        _turns_rows(report.turns),
        _resumed_rows(report.resumed),
        _parked_rows(report.parked),
    ):
        lines += ["", *table(rows)]
    for each in report.left_out:
        lines += ["", f"{each.program} with {each.clients} clients was not measured: {each.reason}"]
    return lines


def _rate_rows(metrics: Sequence[RateFigure]) -> list[list[str]]:
    """A row for each program and number of clients."""
    heading = ["server", "clients", "tokens/s", "best", "of one client", "of the scheduler"]
    heading += [
        f"{kind}, {which}"
        for kind in ("first chunk", "between chunks")
        for which in ("median", "95 %")
    ]
    one = {each.program: each.best for each in metrics if each.clients == 1}
    # the one that keeps sessions, as the server does
    scheduler = next(each for each in metrics if each.first is None)
    own = metrics[0].program
    rows = [heading]
    for figure in metrics:
        row = [figure.program, str(figure.clients)]
        row += [f"{figure.tokens_per_second:.0f}", f"{figure.best:.0f}"]
        alone = one.get(figure.program)
        row.append(f"{figure.best / alone:.2f}" if alone else "")
        is_alike = figure.clients == scheduler.clients and figure.program == own
        row.append(f"{figure.best / scheduler.best:.0%}" if is_alike else "")
        rows.append([*row, *_spread(figure.first), *_spread(figure.between)])
    return rows


def _turns_rows(metrics: Sequence[TurnsFigure]) -> list[list[str]]:
    heading = ["server", "turns", "tokens of the last prompt", "cached"]
    heading += [f"{turn} turn, {kind}" for turn in ("first", "last") for kind in ("median", "95 %")]
    return [
        heading,
        *(
            [
                each.program,
                str(each.turns),
                str(each.prompt_tokens),
                f"{each.cached:.0%}",
                *_spread(each.first),
                *_spread(each.last),
            ]
            for each in metrics
        ),
    ]


def _spread(spread: Spread | None) -> list[str]:
    return ["", ""] if spread is None else [_ms(spread.median), _ms(spread.late)]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _resumed_rows(figure: ResumedFigure) -> list[list[str]]:
    heading = ["sessions of the server", "bytes", "prompt known"]
    heading += [f"{kind}, {which}" for kind in ("begun", "resumed") for which in ("median", "95 %")]
    row = [str(figure.sessions), size_text(figure.bytes), f"{figure.cached:.0%}"]
    return [heading, [*row, *_spread(figure.asked), *_spread(figure.resumed)]]


def _parked_rows(metrics: Sequence[ParkedFigure]) -> list[list[str]]:
    heading = ["parked", "sessions", "tokens each", "bytes", "resident", "tokenize", "restore"]
    rows = [[*heading, "read new tokens"]]
    for figure in metrics:
        resident = figure.resident_bytes
        rows.append(
            [
                figure.name,
                str(figure.sessions),
                str(figure.tokens),
                size_text(figure.bytes),
                "" if resident is None else size_text(resident),
                _ms(figure.tokenize),
                _ms(figure.restore),
                f"{figure.new_tokens} in {_ms(figure.read)}",
            ]
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
