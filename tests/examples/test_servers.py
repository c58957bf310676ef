"""The benchmark of servers: what it prints, makes of answers, and does where a server fails."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import server_clients
import servers
from server_clients import (
    LLAMA_CPP,
    MLX_LM,
    OWN,
    Answer,
    Question,
    Server,
    ask_all,
    get,
    prompt,
    serving,
)
from server_sessions import park
from servers import BARE, SCHEDULER, LeftOut, RateFigure, ServeSettings, Spread, main, rate_figure

from mlx_mmfree import demo
from mlx_mmfree.cli import serve
from mlx_mmfree.errors import MeasurementError, UnsupportedModelError, UsageError
from mlx_mmfree.hub import load_tokenizer, save_model
from tests.hub.checkpoints import GOLDENS, tiny_transformer

Captured = pytest.CaptureFixture[str]
SMALL = ["--clients", "1", "2", "--rows", "2", "--parked", "3", "--parked-tokens", "20", "--config"]


def _answer(sent: float, *chunks: float, tokens: int = 4) -> Answer:
    return Answer(sent, chunks, chunks[-1] + 1, "text", 8, 0, tokens)


def test_a_rate_is_that_of_all_clients() -> None:
    # from 0 to 10 seconds
    run = [_answer(0, 1, 3), _answer(2, 5, 9, tokens=6)]
    figure = rate_figure(OWN, 2, [run])
    assert figure.tokens_per_second == figure.best == 1.0
    assert figure.first == Spread.of([1, 3])
    assert figure.between == Spread.of([2, 4])


def test_rounds_are_merged() -> None:
    figure = rate_figure(SCHEDULER, 16, [{"tokens": n, "seconds": 2} for n in (10, 20, 60)])
    assert figure == RateFigure(SCHEDULER, 16, 10.0, 30.0, None, None)


def test_a_spread_has_the_95th_percentile() -> None:
    assert Spread.of([float(n) for n in range(101)]) == Spread(50.0, 95.0)
    assert Spread.of([3.0]) == Spread(3.0, 3.0)


def test_prompts_have_their_length_and_differ() -> None:
    tokenizer = load_tokenizer(demo.path())
    texts = [prompt(tokenizer, 40, str(seed)) for seed in range(20)]
    for text in texts:
        assert abs(len(tokenizer.encode(text)) - 40) <= 4
    assert len({text[:60] for text in texts}) == 20
    assert prompt(tokenizer, 40, "0") == texts[0]


def test_parked_sessions_are_counted_and_found() -> None:
    found = park(str(demo.path()), None, parked=30, tokens=50, new_tokens=2, resumed=3)
    one = park(str(demo.path()), None, parked=1, tokens=50, new_tokens=2, resumed=1)
    assert found["bytes"] == 30 * one["bytes"] > 30 * 4 * 256 * 4
    assert min(found[name] for name in ("restore", "read", "tokenize")) > 0


@contextmanager
def _stand_in(status: int, *events: Any) -> Iterator[Server]:
    """A server that gives every question the same answer."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer((server_clients.HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Server("stand-in", server.server_port, "model", os.getpid())
        finally:
            server.shutdown()
            thread.join()


_CHUNK = {"choices": [{"text": "a"}]}
_USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}


def test_answers_are_read() -> None:
    with _stand_in(200, _CHUNK, {"choices": [{"text": ""}]}, _CHUNK, _USAGE) as server:
        answers = ask_all(server, [2 * [Question("once", 2, (0,))], [Question("upon", 2, ())]])
    assert [answer.text for answer in answers] == ["aa", "aa", "aa"]
    for answer in answers:
        assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (5, 0, 2)
        assert answer.sent < answer.chunks[0] <= answer.chunks[1] <= answer.ended


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("status", "events", "words"),
    [
        (429, [_CHUNK], "refused a request with status 429: data"),
        (200, [_CHUNK], "broke off an answer"),
        (200, [_USAGE], "broke off an answer"),
        (200, [_CHUNK, {"error": {"message": "no space"}}], "failed: .*no space"),
    ],
)
def test_a_bad_answer_is_no_measurement(status: int, events: list[Any], words: str) -> None:
    with _stand_in(status, *events) as server, pytest.raises(MeasurementError, match=words):
        ask_all(server, [[Question("once", 2, ())]])


@pytest.mark.serve
def test_a_server_that_ends_is_reported() -> None:
    with (
        pytest.raises(MeasurementError, match=r"server of mlx_mmfree ended with status .*nowhere"),
        serving(OWN, "nowhere", 1, 64),
    ):
        raise AssertionError("it has started")


_LLAMA_SERVER = """#!{python}
import http.server, json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        with open(flags["--model"], "rb") as file:
            magic = file.read(4).decode()
        self.wfile.write(json.dumps(flags | {{"magic": magic}}).encode())
http.server.HTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def llama_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name, which tells its flags under every address."""
    program = tmp_path / "llama-server"
    program.write_text(_LLAMA_SERVER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("llama_server")
def test_llama_server_gets_a_file_and_capacity_for_all(tmp_path: Path) -> None:
    sizes = {"vocab_size": 520, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = tiny_transformer("llama", num_hidden_layers=1, **sizes)
    model.set_dtype(mx.bfloat16)
    save_model(tmp_path / "model", model, GOLDENS / "tokenizer_bpe")
    server_clients.check_program(LLAMA_CPP)
    with serving(LLAMA_CPP, str(tmp_path / "model"), 4, 100) as server:
        flags = get(server, "/v1/models")
    assert flags["magic"] == "GGUF"
    assert (flags["--parallel"], flags["--ctx-size"]) == ("4", "400")


@pytest.mark.usefixtures("llama_server")
def test_llama_server_runs_no_matmul_free_model() -> None:
    with (
        pytest.raises(UnsupportedModelError, match="hgrn_bit"),
        serving(LLAMA_CPP, str(demo.path()), 1, 64),
    ):
        raise AssertionError("it has started")


def test_a_program_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(server_clients, "find_spec", lambda _: None)
    for program, words in ((MLX_LM, "mlx-lm"), (LLAMA_CPP, "llama-server")):
        with pytest.raises(UsageError, match=rf"'compare' needs .*{words}"):
            server_clients.check_program(program)


def test_another_server_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def started(program: str, *_: object) -> Iterator[Server]:
        yield Server(program, 0, None, 0)

    def ask(server: Server, clients: list[Any]) -> list[Answer]:
        if server.program == MLX_LM and len(clients) == 2:
            raise MeasurementError("reset by peer")
        return [_answer(0, 1, 3)]

    monkeypatch.setattr(servers, "serving", started)
    monkeypatch.setattr(servers, "ask_all", ask)
    monkeypatch.setattr(servers, "measure", lambda *_: {"tokens": 8, "seconds": 2})
    settings = ServeSettings(clients=(1, 2), prompt_tokens=(4,), requests=1, rows=2)
    steps: list[None] = []
    programs_asked = [OWN, MLX_LM]
    metrics, turns, left_out = servers.measure_rates(
        str(demo.path()), programs_asked, settings, lambda: steps.append(None)
    )
    measured = [(figure.program, figure.clients) for figure in metrics]
    assert measured == [(OWN, 1), (OWN, 2), (MLX_LM, 1), (SCHEDULER, 2), (BARE, 2)]
    assert left_out == [LeftOut(MLX_LM, 2, "reset by peer")]
    assert [(each.program, each.turns, each.prompt_tokens) for each in turns] == [
        (OWN, 10, 8),
        (MLX_LM, 10, 8),
    ]
    # the rates are all steps but the rates of resumed sessions and of parked ones
    assert len(steps) == servers.step_count(programs_asked, [], settings) - 2


@pytest.mark.serve
def test_servers_are_measured(capsys: Captured) -> None:
    assert main(["--quick", "--json", *SMALL]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert shown["settings"]["clients"] == [1, 2]
    own = [each["clients"] for each in shown["rates"] if each["program"] == "mlx_mmfree"]
    others = [each["program"] for each in shown["rates"] if each["first"] is None]
    assert own == [1, 2]
    assert others == ["scheduler without HTTP", "scheduler without HTTP and sessions"]
    for each in shown["rates"]:
        assert 0 < each["tokens_per_second"] <= each["best"]
    [turns] = shown["turns"]
    assert (turns["program"], turns["turns"]) == ("mlx_mmfree", 3) and turns["cached"] > 0.5
    resumed = shown["resumed"]
    # each has two states, one of its prompt and one of what was written
    assert resumed["sessions"] >= 6 and 0.5 < resumed["cached"] < 1
    [parked] = shown["parked"]
    assert (parked["name"], parked["sessions"], parked["tokens"]) == ("bundled model", 3, 20)


def test_a_configuration_that_is_not_known_is_refused(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_PACKAGES", ())
    assert main(["--config", "nothing"]) == 2
    assert "--config must be of" in capsys.readouterr().err


def test_the_extra_is_named_where_it_is_not_installed(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_PACKAGES", ("no_package_of_that_name",))
    assert main([]) == 2
    assert "pip install '.[serve]'" in capsys.readouterr().err
