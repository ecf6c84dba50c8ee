"""The server: answers, limits and failures."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from haav.inference.captioner import Captioner
from haav.photos.images import load_image
from haav.web.batcher import Batcher, Busy
from helpers import SAMPLES

pytest.importorskip("fastapi", reason="needs the web extra")
import httpx
from fastapi.testclient import TestClient

from haav.web import service

CAT = (SAMPLES / "cat.jpg").read_bytes()


def send(client: TestClient, data: bytes = CAT, **fields: str) -> Any:
    return client.post("/v1/caption", files={"image": ("cat.jpg", data, "image/jpeg")}, data=fields)


def test_a_form_and_json_get_what_the_command_prints(client: TestClient, captioner: Captioner) -> None:
    expected = {"image": "cat.jpg", **captioner.caption(CAT, n_best=2, beam=3).to_json()}
    assert send(client, n_best="2", beam="3").json() == expected
    encoded = base64.b64encode(CAT).decode()
    body = client.post("/v1/caption", json={"image": encoded, "n_best": 2, "beam": 3}).json()
    assert body == expected | {"image": "photo"}
    assert client.post("/v1/caption", json={"image": f"data:image/jpeg;base64,{encoded}"}).status_code == 200


def test_views_can_be_switched_off(client: TestClient) -> None:
    answer = send(client, views="cells").json()
    assert all(word["views"]["objects"] == 0 for word in answer["words"])
    explained = send(client, views="cells", explain="true").json()
    assert set(explained["views"]) == {"cells"}


def test_an_explanation_can_be_downloaded_as_a_page(client: TestClient) -> None:
    answer = send(client, format="html")
    assert answer.headers["content-disposition"].startswith("attachment")
    assert "explainer(" in answer.text
    assert "https://" not in answer.text


def bomb() -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (3000, 3000)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("fields", "data", "status", "reason"),
    [
        ({}, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 422, "is not a picture"),
        ({}, b"not a picture", 422, "is not a picture"),
        ({}, b"", 422, "is empty"),
        ({}, CAT[:4000], 422, "damaged"),
        ({}, bomb(), 422, "at most 2,000,000"),
        ({}, CAT * 20, 413, "at most 300,000 bytes"),
        ({"beam": "0"}, CAT, 422, "beam must be a whole number from 1 to 10"),
        ({"beam": "many"}, CAT, 422, "beam must be a whole number"),
        ({"n_best": "11"}, CAT, 422, "n_best"),
        ({"views": "grid"}, CAT, 422, "unknown view 'grid'.\n  Available: cells, objects."),
    ],
)
def test_a_refusal_states_its_reason(
    client: TestClient, fields: dict[str, str], data: bytes, status: int, reason: str
) -> None:
    answer = send(client, data, **fields)
    assert answer.status_code == status
    assert reason in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b'{"image": "http://example.com/cat.jpg"}', "application/json", 422),
        (b'{"image": "/etc/passwd"}', "application/json", 422),
        (b'{"image": 5}', "application/json", 422),
        (b"[" * 100_000, "application/json", 422),
        (b"{", "application/json", 422),
        (json.dumps({"image": base64.b64encode(CAT).decode(), "views": 5}).encode(), "application/json", 422),
        (b'{"beam": 1e999, "image": "' + base64.b64encode(CAT) + b'"}', "application/json", 422),
        (b'{"beam": 0, "image": "' + base64.b64encode(CAT) + b'"}', "application/json", 422),
        (b"image=cat", "application/x-www-form-urlencoded", 415),
        (b"--x\r\nbroken", "multipart/form-data; boundary=x", 422),
        (b"anything", "multipart/form-data", 422),
        (
            b'--x\r\nContent-Disposition: form-data; name="image"\r\n\r\ntext\r\n--x--',
            "multipart/form-data; boundary=x",
            422,
        ),
        (b"", "", 415),
    ],
)
def test_no_address_and_no_malformed_body_gets_further(
    client: TestClient, body: bytes, content_type: str, status: int
) -> None:
    answer = client.post("/v1/caption", content=body, headers={"content-type": content_type})
    assert answer.status_code == status
    assert answer.json()["error"]


@pytest.mark.parametrize(
    "path", ["/samples/../server.py", "/samples/%2e%2e%2fserver.py", "/static/..%2fserver.py", "/x"]
)
def test_paths_lead_nowhere(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_health_models_schema_and_headers(client: TestClient, captioner: Captioner) -> None:
    assert client.get("/v1/health").json() == {"status": "ok", "waiting": 0}
    models = client.get("/v1/models").json()
    assert models["models"][0]["views"] == list(captioner.views)
    assert "cat.jpg" in models["samples"]
    assert "/v1/caption" in client.get("/openapi.json").json()["paths"]
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert client.get("/samples/cat.jpg").content == CAT


def test_the_api_page_has_every_call_field_and_answer_of_the_schema(client: TestClient) -> None:
    shown = client.get("/docs").text
    schema = client.get("/openapi.json").json()
    for path, methods in schema["paths"].items():
        assert f"<code>{next(iter(methods)).upper()} {path}</code>" in shown
    caption = schema["paths"]["/v1/caption"]["post"]
    fields = caption["requestBody"]["content"]["application/json"]["schema"]["properties"]
    for name in (*fields, *caption["responses"]):
        assert f"<td><code>{name}</code></td>" in shown
    assert "a whole number from 1 to 10" in shown
    assert "a file; base64" in shown
    assert "script" not in shown
    assert "//" not in shown.replace("http://testserver/", "")


def test_equal_requests_are_answered_together_and_others_apart() -> None:
    calls: list[tuple[list[int], str]] = []
    gate = threading.Event()

    def work(items: Sequence[int], options: str) -> list[int]:
        gate.wait(10)
        calls.append((list(items), options))
        return [10 * item for item in items]

    batcher = Batcher(work, batch=3, waiting=20)
    [first] = batcher.submit([0], "a")
    time.sleep(0.2)  # it is being worked on; the rest wait
    answers = [*batcher.submit([1, 2], "a"), *batcher.submit([3, 4], "b"), *batcher.submit([5], "a")]
    alone = batcher.submit([6, 7], "a", together=False)
    answers[1].cancel()
    gate.set()
    assert [answer.result(10) for answer in (first, answers[0], *answers[2:], *alone)] == [0, 10, 30, 40, 50, 60, 70]
    assert calls == [([0], "a"), ([1], "a"), ([3, 4], "b"), ([5], "a"), ([6], "a"), ([7], "a")]
    batcher.close()
    assert (batcher.done, batcher.batches) == (7, 6)


def test_an_item_that_cannot_join_the_batch_in_work_still_waits() -> None:
    begun, gate = threading.Semaphore(0), threading.Semaphore(0)

    def work(items: Sequence[int], options: str) -> Sequence[int]:
        begun.release()
        gate.acquire(timeout=10)
        return items

    batcher = Batcher(work, batch=3, waiting=2)
    batcher.submit([1], "a")
    assert begun.acquire(timeout=10)
    answers = [*batcher.submit([2], "a"), *batcher.submit([3], "b")]
    gate.release()
    assert begun.acquire(timeout=10)
    assert batcher.queue.qsize() == 1, "the third item, while the second is in work"
    gate.release(2)
    assert [answer.result(10) for answer in answers] == [2, 3]
    batcher.close()


def test_a_full_queue_refuses_and_a_failure_reaches_its_callers() -> None:
    gate = threading.Event()

    def work(items: Sequence[int], options: str) -> list[int]:
        gate.wait(10)
        raise ValueError("broken")

    batcher = Batcher(work, batch=1, waiting=2)
    [first] = batcher.submit([1], "")
    time.sleep(0.2)
    assert batcher.fault(seconds=60) == ""
    with pytest.raises(Busy, match="too many requests"):
        batcher.submit([2, 3, 4], "")  # all or none
    batcher.submit([2, 3], "")
    with pytest.raises(Busy, match="too many requests"):
        batcher.submit([4], "")
    assert batcher.fault(seconds=60) == "the queue is full."
    assert batcher.fault(seconds=0.1) == "a batch has been in work for more than 0.1 s."
    gate.set()
    with pytest.raises(ValueError, match="broken"):
        first.result(10)
    batcher.close()
    assert batcher.fault(seconds=60) == "the captioning thread has ended."


def test_many_clients_get_an_answer_or_a_time_to_come_back(address: str) -> None:
    def post(_: int) -> httpx.Response:
        return httpx.post(f"{address}/v1/caption", files={"image": ("cat.jpg", CAT)}, timeout=60)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(post, range(24)))
    codes = {answer.status_code for answer in answers}
    assert codes <= {200, 429}
    assert 200 in codes
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
    assert len({answer.json()["caption"] for answer in answers if answer.status_code == 200}) == 1


class SlowDecoder:
    """Stands for `load_image`: pictures are decoded when `gate` is set, not before"""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.calls = 0

    def __call__(self, data: bytes, most: int) -> Image.Image:
        self.calls += 1
        self.gate.wait(30)
        return load_image(data, most)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDecoder]:
    slow = SlowDecoder()
    monkeypatch.setattr(service, "load_image", slow)
    yield slow
    slow.gate.set()


def post_photos(address: str, photos: int = 1) -> httpx.Response:
    return httpx.post(f"{address}/v1/captions", files=[("images", CAT)] * photos, timeout=60)


def wait_until_waiting(address: str, photos: int) -> None:
    deadline = time.monotonic() + 20
    while httpx.get(f"{address}/v1/health").json()["waiting"] != photos:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_photos_that_are_not_decoded_yet_count_as_waiting_and_have_a_time_limit(
    start_server: Callable[..., str], decoder: SlowDecoder
) -> None:
    address = start_server(service.Limits(seconds=1, waiting=4, batch=4))
    with ThreadPoolExecutor(12) as pool:
        codes = Counter(answer.status_code for answer in pool.map(lambda _: post_photos(address, 4), range(12)))
    assert codes.keys() == {429, 504}, "no photo was decoded, so none has a caption"
    assert codes[504] <= 2, "4 photos in work and 4 that wait"
    decoder.gate.set()
    wait_until_waiting(address, 0)
    assert decoder.calls <= 4, "photos of a request that is over are not decoded"
    deadline = time.monotonic() + 30
    while post_photos(address).status_code != 200:
        assert time.monotonic() < deadline


def test_the_batch_in_work_does_not_count_as_waiting(start_server: Callable[..., str], decoder: SlowDecoder) -> None:
    address = start_server(service.Limits(waiting=2, batch=1))
    with ThreadPoolExecutor(2) as pool:
        in_work = pool.submit(post_photos, address)
        while not decoder.calls:
            time.sleep(0.02)
        wait_until_waiting(address, 0)
        waiting = pool.submit(post_photos, address, 2)
        wait_until_waiting(address, 2)
        assert post_photos(address).status_code == 429
        assert httpx.get(f"{address}/v1/ready").json() == {"error": "the queue is full."}
        metrics = httpx.get(f"{address}/metrics").text.splitlines()
        assert {"haav_waiting 2", "haav_waiting_limit 2"} <= set(metrics)
        decoder.gate.set()
        assert (in_work.result().status_code, waiting.result().status_code) == (200, 200)
    wait_until_waiting(address, 0)
