"""The endpoint's HTTP: what clients send is read exactly, what is not HTTP is refused, and an answer that was not read is known."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
import tracemalloc
import urllib.request
from http import HTTPStatus
from http.client import HTTPConnection

import pytest

from fivefold.rollout import http
from fivefold.rollout.http import LARGEST_BODY, HttpError, HttpServer


class Served:
    """A server that answers a request with what it read; `/events` with three events, `/large` with 32 MiB."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.whole, self.reset, self.go = [], threading.Event(), threading.Event()
        self.server = HttpServer(self.admit, self.handle)
        self.port = asyncio.run_coroutine_threadsafe(self.server.open("127.0.0.1", 0), self.loop).result()

    def admit(self, head):
        if head.headers.get("authorization") == "Bearer wrong":
            raise HttpError(HTTPStatus.UNAUTHORIZED, "the key is wrong")

    async def handle(self, head, body, answer):
        answer.on_reset = self.reset.set
        if head.path == "/events":
            answer.begin_events()
            for number in range(3):
                answer.event({"number": number})
            answer.comment()
            self.whole.append(await answer.end_events("[DONE]"))
        elif head.path == "/large":
            self.whole.append(await answer.send("x" * (32 << 20)))
        elif head.path == "/late":
            await asyncio.to_thread(self.go.wait, 10)
            self.whole.append(await answer.send({}))
        elif head.path == "/busy":
            # The loop sees nothing of the connection meanwhile.
            self.go.wait(10)
            self.whole.append(await answer.send({}))
        else:
            self.whole.append(await answer.send({"method": head.method, "path": head.path, "length": len(body),
                                                 "text": body[:20].decode(), "x": head.headers.get("x")}))  # fmt: skip

    def wait_for_answers(self, count: int) -> None:
        """Until the server's side has said of so many answers whether they were taken: a client may be done before that."""
        deadline = time.monotonic() + 60
        while len(self.whole) < count:
            assert time.monotonic() < deadline, self.whole
            time.sleep(0.01)

    def close(self):
        self.loop.call_soon_threadsafe(self.server.close)

    def raw(self, *parts: bytes) -> bytes:
        """All that the server sends until it closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            for part in parts:
                connection.sendall(part)
            received = b""
            while data := connection.recv(1 << 16):
                received += data
        return received


@pytest.fixture(scope="module")
def served():
    server = Served()
    with pytest.MonkeyPatch.context() as patch:
        # Clients of these tests read until the server closes, which gives them this time to close first.
        patch.setattr(http, "_LINGER_SECONDS", 0.1)
        yield server
    server.close()


HOST = b"Host: a\r\n"


def test_requests_follow_each_other_on_one_connection(served):
    connection = HTTPConnection("127.0.0.1", served.port, 10)
    for number in range(3):
        connection.request("POST", f"/{number}", b"a" * number, {"X": f"value {number}"})
        answer = json.loads(connection.getresponse().read())
        assert answer == {
            "method": "POST",
            "path": f"/{number}",
            "length": number,
            "text": "a" * number,
            "x": f"value {number}",
        }


def test_a_request_in_pieces_and_two_in_one_piece_are_read_exactly(served):
    text = b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\nabc"
    last = b"GET /b HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    received = served.raw(*[bytes([byte]) for byte in text], last)
    assert received.count(b"HTTP/1.1 200 OK") == 2 and b'"path": "/a", "length": 3, "text": "abc"' in received
    assert b'"path": "/b"' in served.raw(text + last)


def test_a_body_in_chunks_is_joined(served):
    received = served.raw(
        b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n",
        b"3\r\nabc\r\nA;name=x\r\n0123456789\r\n0\r\nTrailer: y\r\n\r\n",
    )
    assert b'"length": 13, "text": "abc0123456789"' in received


def test_a_body_in_thousands_of_chunks_takes_the_memory_of_its_bytes(served):
    """A list of them took twenty times that."""
    chunks = b"2\r\nab\r\n" * 30_000
    head = b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n"
    tracemalloc.start()
    try:
        for key, status in ((b"right", b"200"), (b"wrong", b"401")):
            received = served.raw(head + b"Authorization: Bearer " + key + b"\r\n\r\n", chunks, b"0\r\n\r\n")
            assert received.startswith(b"HTTP/1.1 " + status)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_connections_without_a_key_are_closed_and_do_not_keep_others_out(served, monkeypatch):
    """Each one holds a file of the rank, and a rank that can open no file ends."""
    monkeypatch.setattr(http, "_MOST_STRANGERS", 20)
    monkeypatch.setattr(http, "_STRANGER_SECONDS", 0.2)
    known = HTTPConnection("127.0.0.1", served.port, 10)
    known.request("POST", "/a", b"a")
    assert known.getresponse().read()
    strangers = []
    for _ in range(3):
        strangers += [socket.create_connection(("127.0.0.1", served.port), 10) for _ in range(40)]
        for number, stranger in enumerate(strangers[-40:]):
            stranger.sendall(b"POST /a HTTP/1.1\r\nX: " + b"slow" * number)
        time.sleep(0.3)
    known.request("POST", "/b", b"b")
    assert b"/b" in known.getresponse().read(), "a connection with a key stays"
    late = HTTPConnection("127.0.0.1", served.port, 10)
    late.request("POST", "/c", b"c")
    assert b"/c" in late.getresponse().read()
    assert len(served.server._strangers) < 60
    for stranger in strangers:
        stranger.close()


def test_a_connection_that_sends_nothing_is_closed_unless_a_key_was_shown(served, monkeypatch):
    monkeypatch.setattr(http, "_HEAD_SECONDS", 0.2)
    assert served.raw() == b""
    assert served.raw(b"POST /a HTTP/1.1\r\n" + HOST + b"Authorization: Bearer wrong\r\n\r\n").startswith(b"HTTP/1.1 401")
    with socket.create_connection(("127.0.0.1", served.port), 1) as connection:
        connection.sendall(b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_a_client_that_waits_for_continue_gets_it(served):
    with socket.create_connection(("127.0.0.1", served.port), 10) as connection:
        connection.sendall(b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"ab")
        assert b'"length": 2' in connection.recv(1000)


def test_the_largest_body_is_taken_and_one_byte_more_is_not(served):
    request = urllib.request.Request(f"http://127.0.0.1:{served.port}/a", b"a" * LARGEST_BODY)
    assert json.loads(urllib.request.urlopen(request, timeout=60).read())["length"] == LARGEST_BODY
    head = b"POST /a HTTP/1.1\r\n" + HOST
    assert b" 413 " in served.raw(head + b"Content-Length: %d\r\n\r\n" % (LARGEST_BODY + 1), b"a" * (1 << 20))
    assert b" 413 " in served.raw(head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % (LARGEST_BODY + 1), b"a" * (1 << 20))


def test_events_arrive_as_they_are_sent(served):
    answer = urllib.request.urlopen(f"http://127.0.0.1:{served.port}/events", timeout=10)
    assert answer.headers["content-type"] == "text/event-stream"
    lines = [line for line in answer.read().decode().splitlines() if line]
    assert lines == ['data: {"number": 0}', 'data: {"number": 1}', 'data: {"number": 2}', ": waiting", "data: [DONE]"]


def test_a_client_of_http_1_0_gets_no_chunks(served):
    head, _, body = served.raw(b"GET /events HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert b"chunked" not in head and body.startswith(b'data: {"number": 0}\n\n')


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        (b"GET /a\r\n\r\n", 400),
        (b"GET  /a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET http://a/b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 400),
        (b"GET /a HTTP/2.0\r\n" + HOST + b"\r\n", 505),
        (b"GET /a HTTP/1.1\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"Na me: x\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"Name : x\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"Name: a\r\n folded\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"Name: a\nOther: b\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"Name: a\x00b\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"A: " + b"b" * 70000, 431),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"Authorization: Bearer wrong\r\nConnection: close\r\n\r\n", 401),
    ],
)  # fmt: skip
def test_what_is_not_a_request_is_refused_with_its_status(served, request_, status):
    received = served.raw(request_)
    assert received.startswith(b"HTTP/1.1 %d " % status), received
    assert "message" in json.loads(received.partition(b"\r\n\r\n")[2])["error"]


def test_a_refused_key_costs_no_memory_and_the_connection_stays(served):
    connection = HTTPConnection("127.0.0.1", served.port, 30)
    for _ in range(2):
        connection.request("POST", "/a", b"a" * (8 << 20), {"Authorization": "Bearer wrong"})
        assert connection.getresponse().read() and connection.sock is not None


def test_an_answer_counts_as_sent_only_once_the_connection_has_taken_all_of_it(served):
    served.whole.clear()
    with socket.create_connection(("127.0.0.1", served.port), 10) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\n" + HOST + b"\r\n")
        connection.recv(1000)
        assert not served.whole
    served.wait_for_answers(1)
    assert served.whole == [False]
    assert len(urllib.request.urlopen(f"http://127.0.0.1:{served.port}/large", timeout=10).read()) == (32 << 20) + 2
    served.wait_for_answers(2)
    assert served.whole == [False, True]


@pytest.mark.parametrize("path", [b"/late", b"/busy"])
def test_a_client_that_left_before_its_answer_did_not_read_it(served, path):
    served.whole.clear()
    served.go.clear()
    connection = socket.create_connection(("127.0.0.1", served.port), 10)
    connection.sendall(b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"\r\n")
    time.sleep(0.1)
    connection.close()
    time.sleep(0.1)
    served.go.set()
    served.wait_for_answers(1)
    assert served.whole == [False]


def test_a_connection_dropped_with_unread_bytes_is_reported(served):
    served.reset.clear()
    served.whole.clear()
    connection = socket.create_connection(("127.0.0.1", served.port), 10)
    connection.sendall(b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n")
    assert connection.recv(1)
    served.wait_for_answers(1)
    assert served.whole == [True]
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    assert served.reset.wait(10)
