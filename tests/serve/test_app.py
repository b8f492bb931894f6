"""The service answers each with its own, and refuses with a JSON line; a stand-in translates."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi")

import httpx
from stand_in import Upper, served

from keras_aiayn.serve.app import Limits
from keras_aiayn.serve.grid import Grid

pytestmark = pytest.mark.backend_free

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def service():
    with served(Upper()) as (_, port), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        yield client


def error_of(answer):
    assert list(answer.json()) == ["error"] and "\n" not in answer.json()["error"]
    return answer.json()["error"]


def test_one_text_or_many(service):
    answer = service.post("/translate", json={"texts": "a dog"})
    assert answer.status_code == 200
    assert answer.json() == {
        "translations": [[{"text": "A DOG", "score": -1.0, "hit_limit": False, "alignment": None}]]
    }
    many = service.post("/translate", json={"texts": ["a", "b", ""], "n_best": 2,
                                            "alignments": True}).json()  # fmt: skip
    assert [[one["text"] for one in each] for each in many["translations"]] == [
        ["A", "other"], ["B", "other"], ["", "other"],
    ]  # fmt: skip
    assert many["translations"][0][0]["alignment"] == [[0, 0]]
    assert service.post("/translate", json={"texts": []}).json() == {"translations": []}


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({}, 422, "texts"),
        ({"texts": 3}, 422, "texts"),
        ({"texts": ["a"], "beam": 2}, 422, "beam"),
        ({"texts": "a", "n_best": 0}, 422, "n_best"),
        ({"texts": "a", "n_best": "1"}, 422, "n_best"),
        ({"texts": "a", "alignments": "yes"}, 422, "alignments"),
        ({"texts": "a", "two\nlines": 1}, 422, "two lines"),
        ({"texts": "a", "\ud800": 1}, 422, "unicode"),
        ({"texts": "a", "n_best": 9}, 422, "at most 3"),
        ({"texts": ["a"] * 9}, 413, "at most 8"),
        ({"texts": "a " * 50}, 413, "51 tokens; at most 40"),
        ({"texts": "x" * 400}, 413, "400 characters; at most 300"),
        ({"texts": "x" * 6_000}, 413, "5,000 bytes"),
        ({"texts": "\ud800"}, 422, "surrogate"),
        ({"texts": "fail"}, 500, "the log says why"),
    ],
)
def test_what_cannot_be_is_refused_in_json(service, body, status, word):
    answer = service.post("/translate", content=json.dumps(body), headers=JSON)
    assert answer.status_code == status and word in error_of(answer)
    assert service.post("/translate", json={"texts": "still here"}).status_code == 200


def test_what_is_no_json_and_no_path_is_refused_in_json(service):
    assert service.post("/translate", content=b"{", headers=JSON).status_code == 422
    assert service.post("/translate", content=b'{"texts": "\xff"}', headers=JSON).status_code == 400
    deep = service.post("/translate", content=b'{"texts": ' + b"[" * 4_000, headers=JSON)
    assert deep.status_code in (400, 422) and error_of(deep)
    assert error_of(service.get("/nothing")) == "Not Found"
    assert service.get("/translate").status_code == 405


def test_a_body_without_a_length_is_counted_as_it_comes(service):
    answer = service.post("/translate", content=(b" " * 1_000 for _ in range(9)))
    assert answer.status_code == 413 and "5,000 bytes" in error_of(answer)


def test_health_metrics_and_the_interface(service):
    assert service.get("/health").json() == {"status": "ok"}
    text = service.get("/metrics").text
    for name in ("requests_total", "request_seconds", "batch_texts", "source_tokens_total",
                 "busy_seconds_total", "waiting_tokens"):  # fmt: skip
        assert f"aiayn_{name}" in text
    assert 'aiayn_requests_total{path="/translate",status="200"}' in text
    paths = service.get("/openapi.json").json()["paths"]
    assert set(paths) == {"/translate", "/attention", "/health", "/metrics"}


def test_the_interface_tells_the_limits_and_a_key_where_there_is_one(service):
    told = service.get("/openapi.json").json()
    body = told["components"]["schemas"]["Body"]["properties"]
    text = {"type": "string", "maxLength": 300}
    assert body["texts"]["anyOf"] == [text, {"type": "array", "items": text, "maxItems": 8}]
    assert body["n_best"]["maximum"] == 3
    assert "401" not in told["paths"]["/translate"]["post"]["responses"]
    with served(Upper(), api_key="secret") as (_, port):
        told = httpx.get(f"http://127.0.0.1:{port}/openapi.json").json()
    for path in ("/translate", "/attention"):
        assert "401" in told["paths"][path]["post"]["responses"]


def test_what_no_one_foresaw_is_json_too():
    def broken(text):
        raise ValueError("no one foresaw it")

    with served(Upper(), count_tokens=broken) as (_, port):
        answer = httpx.post(f"http://127.0.0.1:{port}/translate", json={"texts": "a"})
        assert answer.status_code == 500 and "the log says why" in error_of(answer)


def test_a_key_is_asked_for():
    with served(Upper(), api_key="secret") as (_, port):
        url = f"http://127.0.0.1:{port}/translate"
        for key, status in ((None, 401), ("wrong", 401), ("secret", 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = httpx.post(url, json={"texts": "a"}, headers=headers)
            assert answer.status_code == status
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


def test_too_many_are_refused_with_429_and_no_answer_is_mixed_up():
    upper = Upper(seconds=0.05)

    async def all_at_once(port):
        async with httpx.AsyncClient(timeout=30) as client:
            url = f"http://127.0.0.1:{port}/translate"

            async def one(number):
                text = " ".join([f"w{number}"] * (1 + number % 30))
                answer = await client.post(url, json={"texts": text})
                if answer.status_code == 200:
                    assert answer.json()["translations"][0][0]["text"] == text.upper()
                else:
                    assert answer.headers["retry-after"] and error_of(answer)
                return answer.status_code

            return await asyncio.gather(*map(one, range(80)))

    with served(upper, grid=Grid(40, 64), tokens_waiting=256) as (_, port):
        statuses = asyncio.run(all_at_once(port))
    assert set(statuses) == {200, 429}


def test_time_is_over():
    with served(Upper(seconds=0.4), limits=Limits(seconds=0.2)) as (_, port):
        answer = httpx.post(f"http://127.0.0.1:{port}/translate", json={"texts": "a"})
        assert answer.status_code == 504 and "0.2 seconds" in error_of(answer)


HALF = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n%s\r\n{"


def answer_to(connection):
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())["error"]


def test_a_client_that_hangs_up_or_dawdles_harms_no_one():
    with served(Upper(), limits=Limits(seconds=0.5)) as (_, port):
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(HALF % b"")
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.sendall(HALF % b"")
            status, error = answer_to(slow)
            assert status == 408 and "in time" in error
        url = f"http://127.0.0.1:{port}/translate"
        assert httpx.post(url, json={"texts": "a"}).status_code == 200


def test_bad_clients_among_others_harm_no_one():
    head = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = b'{"texts": "gone"}'
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with_length = head + b"Content-Length: 10000000\r\n\r\n" + b" " * 10_000_000
    in_chunks = head + b"Transfer-Encoding: chunked\r\n\r\n"
    in_chunks += (b"f4240\r\n" + b" " * 1_000_000 + b"\r\n") * 10 + b"0\r\n\r\n"

    def send(content):  # and hang up
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as bad,
            contextlib.suppress(OSError),
        ):
            bad.sendall(content)

    with served(Upper(seconds=0.01), limits=Limits(seconds=5)) as (_, port):
        kinds = [whole, whole[:-5], with_length, in_chunks]
        threads = [threading.Thread(target=send, args=(kind,)) for kind in kinds * 3]
        for thread in threads:
            thread.start()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            for number in range(20):
                answer = client.post("/translate", json={"texts": f"text {number}"})
                assert answer.json()["translations"][0][0]["text"] == f"TEXT {number}"
            for thread in threads:
                thread.join()
            deadline = time.monotonic() + 5  # the last of them may still be read
            while 'status="413"} 6.0' not in (numbers := client.get("/metrics").text):
                assert time.monotonic() < deadline, numbers
    assert 'status="500"' not in numbers and "aiayn_waiting_tokens 0.0" in numbers


def test_a_body_that_trickles_in_has_no_more_time_than_another():
    with served(Upper(), limits=Limits(seconds=0.5)) as (_, port):
        with socket.create_connection(("127.0.0.1", port), timeout=0.1) as slow:
            slow.sendall(HALF % b"")
            began = time.monotonic()
            received = b""
            while b"in time" not in received:
                assert time.monotonic() - began < 5
                slow.sendall(b" ")
                with contextlib.suppress(TimeoutError):
                    received += slow.recv(10_000)
            assert received.startswith(b"HTTP/1.1 408")
            slow.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert slow.recv(10_000) == b""  # and it is not waited for any more


def test_the_key_is_asked_for_before_the_body_is_read():
    with served(Upper(), api_key="secret") as (_, port):
        with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
            stranger.sendall(HALF % b"")
            assert answer_to(stranger) == (401, "the API key is missing or wrong")
        with socket.create_connection(("127.0.0.1", port), timeout=5) as friend:
            friend.sendall(HALF % b"Authorization: Bearer secret\r\n")
            assert answer_to(friend)[0] == 408


def test_what_a_client_that_hangs_up_asked_for_is_not_translated():
    upper = Upper()
    upper.gate.clear()
    body = json.dumps({"texts": ["gone"] * 8}).encode()
    head = f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"

    with served(upper, grid=Grid(40, 4), limits=Limits(seconds=60)) as (_, port):
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

        def wait_for(line):
            deadline = time.monotonic() + 10
            while line not in client.get("/metrics").text:
                assert time.monotonic() < deadline
                time.sleep(0.01)

        first = threading.Thread(target=client.post, args=("/translate",),
                                 kwargs={"json": {"texts": "first"}})  # fmt: skip
        first.start()
        while not upper.began:
            time.sleep(0.01)
        try:
            with socket.create_connection(("127.0.0.1", port)) as gone:
                gone.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
                wait_for("aiayn_waiting_tokens 16.0")
            wait_for("aiayn_waiting_tokens 0.0")  # while the first one is still being translated
            wait_for('aiayn_requests_total{path="/translate",status="499"} 1.0')
        finally:
            upper.gate.set()
            first.join()
        assert client.post("/translate", json={"texts": "next"}).status_code == 200
        client.close()
    assert upper.texts == ["first", "next"]


def test_a_request_that_could_never_wait_is_refused_for_good():
    with served(Upper(), tokens_waiting=20) as (_, port):
        url = f"http://127.0.0.1:{port}/translate"
        answer = httpx.post(url, json={"texts": ["a b c"] * 6})
        assert answer.status_code == 413
        assert error_of(answer) == "24 tokens in all; at most 20 a request"
        assert httpx.post(url, json={"texts": ["a b c"] * 5}).status_code == 200


def test_counting_a_long_request_leaves_a_turn_to_the_others():
    def slowly(text):
        time.sleep(0.1)
        return 1

    with served(Upper(), count_tokens=slowly) as (_, port):
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url) as client:
            client.get("/health")
            thread = threading.Thread(
                target=httpx.post, args=(f"{url}/translate",), kwargs={"json": {"texts": ["a"] * 8}}
            )
            thread.start()
            time.sleep(0.15)
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            assert time.monotonic() - began < 0.4
            thread.join()


def test_a_service_whose_workers_are_gone_says_so():
    def dead(new, asked):
        raise ChildProcessError("it has died")

    ended = threading.Event()
    with served(dead, on_end=ended.set) as (_, port):
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/health").status_code == 200
        answer = httpx.post(f"{url}/translate", json={"texts": "a"})
        assert answer.status_code == 503 and error_of(answer)
        assert httpx.get(f"{url}/health").status_code == 503 and ended.wait(5)
        assert httpx.post(f"{url}/translate", json={"texts": "a"}).status_code == 503


def test_a_stop_finishes_what_was_taken():
    upper = Upper(seconds=0.3)
    found = []
    with served(upper) as (server, port):

        def ask():
            answer = httpx.post(f"http://127.0.0.1:{port}/translate", json={"texts": "last"})
            found.append(answer.json()["translations"][0][0]["text"])

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.15)
        server.should_exit = True
        thread.join()
    assert found == ["LAST"]
