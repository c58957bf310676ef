"""Asks a server for hours at random, and sees that it answers all and that its memory stays flat.

`python -m tests.soak.run --minutes 60` has 16 clients, which send requests of all sizes, go on with and
fork conversations, and leave many answers early. A model with a chat template is asked in all dialects.
"""

import argparse
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from mlx_mmfree import demo
from tests.soak.client import ask, converse, draw_body
from tests.soak.report import Report, growth, is_flat

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))
from server_clients import HOST, OWN, serving

_SHOWN_S = 10.0
_MEASURED_S = 1.0
_QUIET_S = 60.0
_TIMEOUT_S = 120.0
_CHATS = 0.8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="how long")
    parser.add_argument("--clients", type=int, default=16, help="clients at the same time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    parser.add_argument("--model", default=str(demo.path()), help="what is served")
    parser.add_argument("--session-memory", default="2MB", help="less than the states of all texts")
    parser.add_argument(
        "--pause", type=float, default=0, help="mean seconds that a client waits after a request"
    )
    arguments = parser.parse_args()
    report = Report()
    # the sessions' limit is reached soon, so that old ones go all the time
    flags = ["--session-memory", arguments.session_memory]
    with serving(OWN, arguments.model, arguments.clients, 0, flags) as server:
        address = f"http://{HOST}:{server.port}"
        with _clients(address, arguments, report):
            _watch(server.pid, report, time.monotonic() + 60 * arguments.minutes)
        _wait_until_quiet(address, report)
    print(report)
    for fault in report.faults:
        print(f"fault: {fault}")
    added, flat = growth(report.memory), is_flat(report.memory)
    print(
        f"The last third of the time took {added / 1e6:+.1f} MB more than the second: memory "
        f"{'stays flat' if flat else 'GROWS'}."
    )
    return int(bool(report.faults) or not flat)


@contextmanager
def _clients(address: str, arguments: argparse.Namespace, report: Report) -> Iterator[None]:
    """Clients that ask until the block ends; each then finishes its request."""
    is_over = threading.Event()
    known: list[str] = []
    kept: list[str] = []
    (model,) = httpx2.get(f"{address}/v1/models").json()["data"]

    def end(client: httpx2.Client, draw: random.Random, body: dict[str, Any] | None) -> str:
        return converse(client, draw, kept) if body is None else ask(client, body, draw)

    def run(number: int) -> None:
        draw = random.Random(f"{arguments.seed} {number}")
        with httpx2.Client(base_url=address, timeout=_TIMEOUT_S) as client:
            while not is_over.is_set():
                is_chat = model["chat_template"] and draw.random() < _CHATS
                body = None if is_chat else draw_body(draw, known)
                try:
                    report.ends[end(client, draw, body)] += 1
                except (AssertionError, httpx2.HTTPError) as error:
                    report.faults.append(f"{error!r} after {str(body)[:300]}")
                if arguments.pause:
                    is_over.wait(draw.expovariate(1 / arguments.pause))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(arguments.clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _watch(pid: int, report: Report, until: float) -> None:
    """Measures memory until a moment, and tells how it goes."""
    shown = time.monotonic()
    while time.monotonic() < until:
        report.memory.append(_resident_bytes(pid))
        if time.monotonic() - shown >= _SHOWN_S:
            shown = time.monotonic()
            print(report, flush=True)
        time.sleep(_MEASURED_S)


def _resident_bytes(pid: int) -> int:
    shown = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True
    )
    return 1024 * int(shown.stdout)


def _wait_until_quiet(address: str, report: Report) -> None:
    """Sees that nothing goes on once all clients have gone."""
    deadline = time.monotonic() + _QUIET_S
    while (
        active := httpx2.get(f"{address}/health").json()["active"]
    ) and time.monotonic() < deadline:
        time.sleep(_MEASURED_S)
    if active:
        report.faults.append(f"{active} texts go on without a client")


if __name__ == "__main__":
    sys.exit(main())
