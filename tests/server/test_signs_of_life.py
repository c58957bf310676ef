"""Streams that have nothing to tell yet: their head and signs of life come all the same."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Dictated

pytestmark = pytest.mark.serve

USER = [{"role": "user", "content": "What?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "What?", "max_tokens": 2},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": "What?", "max_output_tokens": 2, "store": False},
}


def signs_of(path: str, text: str) -> int:
    """How many signs of life a stream has before it ends, beside the one that it begins with."""
    if path == "/v1/messages":
        return text.count("event: ping\n") - 1
    if path == "/v1/responses":
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return [event["type"] for event in events].count("response.in_progress") - 1
    return text.count(": waiting\n\n")


class Signs:
    """Makes signs of life due soon, and counts those that are written."""

    def __init__(self, patch: pytest.MonkeyPatch):
        from mlx_mmfree.server import answers, messages, responses, service

        self._count = 0
        patch.setattr(service, "QUIET_SECONDS", 0.05)
        for kind in (answers.Answer, messages.MessagesAnswer, responses.ResponsesAnswer):
            patch.setattr(kind, "waiting", self._counted(kind.waiting))

    def _counted(self, waiting: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def write(answer: Any) -> Any:
            self._count += 1
            return waiting(answer)

        return write

    def wait(self) -> None:
        """Waits for two signs beside the one that a stream may begin with."""
        until = time.monotonic() + 60
        while self._count < 3:
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("slow", ["submit", "step"])
def test_a_stream_that_waits_or_reads_tells_of_it(
    dictated: Dictated, monkeypatch: pytest.MonkeyPatch, path: str, slow: str
) -> None:
    from mlx_mmfree.generation.scheduling import Scheduler

    work = getattr(Scheduler, slow)

    with monkeypatch.context() as patch:
        signs = Signs(patch)

        def slowly(*args: Any) -> Any:
            # loads weights, waits for its turn, or reads a long prompt
            signs.wait()
            return work(*args)

        patch.setattr(Scheduler, slow, slowly)
        response = dictated.post(path, "Yes" * 9, stream=True, **BODIES[path])
    dictated.texts.clear()
    assert response.status_code == 200
    assert signs_of(path, response.text) >= 2
    # at the usual pace there are none
    quick = dictated.post(path, "Yes" * 9, stream=True, **BODIES[path])
    dictated.texts.clear()
    assert signs_of(path, quick.text) == 0


@pytest.mark.parametrize("path", BODIES)
def test_what_fails_after_the_head_is_an_event(
    dictated: Dictated, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    from mlx_mmfree.generation.scheduling import Scheduler

    signs: list[Signs] = []

    def fails(*args: Any) -> Any:
        for each in signs:
            each.wait()
        raise RuntimeError("a secret path")

    def asked() -> Any:
        response = dictated.post(path, "Yes", stream=True, **BODIES[path])
        dictated.texts.clear()
        assert "secret" not in response.text
        return response

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "submit", fails)
        # before the head is sent it has a status of its own
        assert asked().status_code == 500
        signs.append(Signs(patch))
        late = asked()
    assert late.status_code == 200
    last = json.loads(late.text.strip().splitlines()[-1].removeprefix("data: "))
    if path == "/v1/responses":
        assert last["type"] == "response.failed" and last["response"]["error"]["message"]
    else:
        assert last["error"]["message"]
