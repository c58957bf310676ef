"""Clients that send requests to a server and note when each piece of an answer comes."""

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ...errors import MeasurementError
from .programs import HOST, Server

_TIMEOUT_SECONDS = 600.0
_NEVER = -100


@dataclass(frozen=True)
class Answer:
    """One answer as a client saw it.

    Attributes:
        sent: When the request was sent, in seconds of `time.perf_counter`.
        pieces: When each piece of text came.
        ended: When the answer had ended.
        text: Its text.
        prompt_tokens, cached_tokens, completion_tokens: As the server counts them.
    """

    sent: float
    pieces: tuple[float, ...]
    ended: float
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Question:
    """What is asked of a server.

    Attributes:
        prompt: The text to continue.
        tokens: Length of the answer.
        end: Tokens that would end it before, which are forbidden.
    """

    prompt: str
    tokens: int
    end: tuple[int, ...]


def ask_all(server: Server, clients: Sequence[Sequence[Question]]) -> list[Answer]:
    """The answers to clients that ask at the same time, each one question after the other.

    Raises:
        MeasurementError: A request was refused, or its answer is not whole.
    """
    model = server.model or get(server, "/v1/models")["data"][0]["id"]

    def ask_in_turn(questions: Sequence[Question]) -> list[Answer]:
        return [ask(server, model, question) for question in questions]

    with ThreadPoolExecutor(len(clients)) as pool:
        return [answer for found in pool.map(ask_in_turn, clients) for answer in found]


def get(server: Server, path: str) -> Any:
    """What a server gives under a path, as JSON."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        return json.load(connection.getresponse())
    finally:
        connection.close()


def ask(server: Server, model: str, question: Question) -> Answer:
    """One greedy answer, streamed."""
    body = {
        "model": model,
        "prompt": question.prompt,
        "max_tokens": question.tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {str(token): _NEVER for token in question.end},
    }
    connection = http.client.HTTPConnection(HOST, server.port, timeout=_TIMEOUT_SECONDS)
    sent = time.perf_counter()
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return _read(server.program, connection.getresponse(), sent)
    except (OSError, http.client.HTTPException) as error:
        raise MeasurementError(f"[bench] the server of {server.program} failed: {error}") from error
    finally:
        connection.close()


def _read(program: str, response: http.client.HTTPResponse, sent: float) -> Answer:
    if response.status != http.HTTPStatus.OK:
        told = response.read().decode(errors="replace")[:500]
        raise MeasurementError(
            f"[bench] the server of {program} refused a request with status {response.status}: {told}"
        )
    pieces, texts = [], []
    usage: Mapping[str, Any] | None = None
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise MeasurementError(f"[bench] the server of {program} failed: {event['error']}")
        if text := "".join(choice["text"] for choice in event["choices"]):
            pieces.append(time.perf_counter())
            texts.append(text)
        usage = event.get("usage") or usage
    if usage is None or not pieces:
        raise MeasurementError(f"[bench] the server of {program} broke off an answer.")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        sent,
        tuple(pieces),
        time.perf_counter(),
        "".join(texts),
        usage["prompt_tokens"],
        details.get("cached_tokens", 0),
        usage["completion_tokens"],
    )
