"""The limits of a connection before anybody knows who calls: how much it may send, and for how long.

uvicorn has no settings for the size, the number and the time of headers, for requests that are sent
ahead and for answers that nobody reads, and its `limit_concurrency` refuses newcomers in place of idle
connections. So these limits are set in a subclass of its protocol. Everything else of uvicorn is used
through its settings.
"""

import logging
import re
from typing import Any

import httptools
from uvicorn.protocols.http import httptools_impl

from . import settings
from .errors import RequestError

_log = logging.getLogger(__name__)
# the parser keeps what it has of a header, so that it gets little at a time
_CHUNK = 16_384
_HEADER_END = len(b": \r\n")


class Connection(httptools_impl.HttpToolsProtocol):
    """A connection whose requests have limits of bytes, time and number.

    Where there are too many connections, the one that has waited longest for its client is closed.

    Args:
        opened: All connections that are open.
        most: The most that may be.
        arguments: The arguments of uvicorn.
    """

    def __init__(self, *, opened: "set[Connection]", most: int, **arguments: Any):
        super().__init__(**arguments)
        self._opened = opened
        self._most = most
        # uvicorn has one from the first request on
        self.url = b""
        # no request has come yet
        self._is_new = True
        # the request line and headers come, or the trailers of a body
        self._is_head = True
        self._has_begun = False
        self._head_bytes = self._header_count = 0
        # bytes since the parser has last given out something
        self._unknown_bytes = 0
        self._refusal: RequestError | None = None
        # nothing that comes is read any more
        self._is_over = False
        self._since = self.loop.time()
        self._unread_since: float | None = None
        # the request that is answered, while `cycle` is the last one that has come
        self._answered: httptools_impl.RequestResponseCycle | None = None

    @property
    def is_waiting(self) -> bool:
        """True if it waits for a request or for the rest of one."""
        return self.is_answered or not self._is_head

    @property
    def is_answered(self) -> bool:
        """True if no request waits for its answer."""
        return self._is_new or self.cycle.response_complete or self.cycle.disconnected

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._opened.add(self)
        if len(self._opened) <= self._most:
            return
        others = [other for other in self._opened if not other.transport.is_closing()]
        if len(others) <= self._most:
            return
        waiting = [other for other in others if other.is_waiting and other is not self]
        if waiting:
            # those whose body is still to come are the last ones
            min(waiting, key=lambda other: (not other.is_answered, other._since)).abort()
        else:
            self._refuse(
                RequestError(
                    f"[server] at most {self._most:,} connections must be open but more are, and all of "
                    "them wait for answers. Try again later.",
                    503,
                    code="too_many_connections",
                    retry_after_s=1,
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._opened.discard(self)
        self._tell_of_end(self._answered)

    def abort(self) -> None:
        """Ends it at once."""
        self._is_over = True
        self._tell_of_end(self._answered)
        if not self._is_new:
            self._tell_of_end(self.cycle)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if not self._has_begun:
            self._has_begun = True
            if not self._is_new:
                self._since = self.loop.time()
        for start in range(0, len(data), _CHUNK):
            if not self._is_over:
                self._feed(data[start : start + _CHUNK])

    def _feed(self, chunk: bytes) -> None:
        self._unknown_bytes += len(chunk)
        try:
            self.parser.feed_data(chunk)
        except httptools.HttpParserUpgrade:
            # the request is answered as if it had not asked for another protocol
            self._end_after_answers()
        except httptools.HttpParserError as error:
            reason = "" if isinstance(error, httptools.HttpParserCallbackError) else f": {error}"
            self._refuse(
                self._refusal
                or RequestError(f"[server] the request must follow HTTP/1.1 but does not{reason}.")
            )
        else:
            if self._unknown_bytes > settings.MOST_HEAD_BYTES:
                self._refuse(_too_many_bytes())

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= settings.MOST_PIPELINED:
            self._fail(
                RequestError(
                    f"[server] at most {settings.MOST_PIPELINED} requests must be sent ahead but "
                    "more are.",
                    429,
                )
            )
        self._has_begun = True
        self._unknown_bytes = self._head_bytes = self._header_count = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._unknown_bytes = 0
        super().on_url(url)
        if len(self.url) > settings.MOST_ADDRESS_BYTES:
            self._fail(
                RequestError(
                    f"[server] the address must have at most {settings.MOST_ADDRESS_BYTES:,} bytes "
                    "but has more.",
                    414,
                )
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        self._unknown_bytes = 0
        self._head_bytes += len(name) + len(value) + _HEADER_END
        self._header_count += 1
        if self._head_bytes > settings.MOST_HEAD_BYTES:
            self._fail(_too_many_bytes())
        if self._header_count > settings.MOST_HEADERS:
            self._fail(
                RequestError(
                    f"[server] a request must have at most {settings.MOST_HEADERS} headers but has "
                    "more.",
                    431,
                )
            )
        if self._is_head and name.lower() == b"transfer-encoding" and not self._is_chunked(value):
            self._fail(
                RequestError(
                    f"[server] 'Transfer-Encoding' must be chunked, once, but is {value!r:.60}.",
                    501,
                )
            )
        if self._is_head:
            super().on_header(name, value)

    def _is_chunked(self, value: bytes) -> bool:
        is_first = all(name != b"transfer-encoding" for name, _ in self.headers)
        return is_first and value.strip().lower() == b"chunked"

    def on_headers_complete(self) -> None:
        self._unknown_bytes = 0
        scheme, mark, rest = self.url.partition(b"://")
        if mark and b"/" not in scheme:
            # the address names the server too, which goes before the header
            named = re.split(rb"[/?#]", rest, maxsplit=1)[0].lower()
            if [value.lower() for name, value in self.headers if name == b"host"] != [named]:
                self._fail(
                    RequestError(
                        f"[server] 'Host' must equal the address's, {named!r:.80}, but is another."
                    )
                )
        super().on_headers_complete()
        self._is_head = self._is_new = False
        if not self.pipeline:
            self._answered = self.cycle

    def on_body(self, body: bytes) -> None:
        self._unknown_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_head = True
        self._has_begun = False
        self._since = self.loop.time()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        self._since = self.loop.time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = None

    def end_if_late(self) -> None:
        """Ends it if something has not come, or was not read, in time."""
        now = self.loop.time()
        if self.transport.is_closing():
            return
        if self._unread_since is not None and now - self._unread_since > settings.UNREAD_SECONDS:
            self.abort()
        elif self._is_over or self.flow.read_paused or now - self._since <= settings.HEAD_SECONDS:
            return
        elif not self._is_head:
            # the rest of a body that nobody waits for
            if self.is_answered:
                self.transport.close()
        elif self._has_begun:
            self._refuse(
                RequestError(
                    f"[server] the headers must come within {settings.HEAD_SECONDS:g} s but did not.",
                    408,
                )
            )
        elif self._is_new:
            self.transport.close()

    def _fail(self, error: RequestError) -> None:
        """Ends the parser, which calls this class."""
        self._refusal = error
        raise error

    def _refuse(self, error: RequestError) -> None:
        """Answers with an error, and ends the connection."""
        _log.info("a connection ends: %s", error)
        if self._is_head and not self.is_answered:
            # what was asked before is answered first
            self._end_after_answers()
        elif not self._is_head and (self.cycle.response_started or self.pipeline):
            self.abort()
        else:
            self._answer(error)

    def _end_after_answers(self) -> None:
        self._is_over = True
        if self.is_answered:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def _tell_of_end(self, cycle: httptools_impl.RequestResponseCycle | None) -> None:
        """Lets what answers a request know that nobody waits for it."""
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def _answer(self, error: RequestError) -> None:
        self._is_over = True
        if not self._is_head:
            self._tell_of_end(self.cycle)
        # the format of the address, as far as that has come
        answer = error.response(self.url.decode("latin-1"))
        headers = [*self.server_state.default_headers, *answer.raw_headers]
        lines = [name + b": " + value for name, value in [*headers, (b"connection", b"close")]]
        head = httptools_impl.STATUS_LINE[error.status] + b"\r\n".join([*lines, b"", b""])
        self.transport.write(head + bytes(answer.body))
        # a connection that is closed while data comes would take the answer from the client
        self.transport.write_eof()
        self.loop.call_later(settings.LINGER_SECONDS, self.transport.close)


def _too_many_bytes() -> RequestError:
    return RequestError(
        f"[server] the headers must have at most {settings.MOST_HEAD_BYTES:,} bytes in all but have "
        "more.",
        431,
    )
