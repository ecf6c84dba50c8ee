"""The API: settings, bodies, errors, health, metrics, key and CORS."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from haav.cli.main import main
from haav.errors import CheckpointError, ConfigError
from haav.inference.captioner import Captioner
from helpers import SAMPLES

pytest.importorskip("fastapi", reason="needs the web extra")
from fastapi.testclient import TestClient

from haav.web.server import build_app, check_origins
from haav.web.service import Limits

CAT, COFFEE = ((SAMPLES / name).read_bytes() for name in ("cat.jpg", "coffee.jpg"))
JPEG = {"Content-Type": "image/jpeg"}


UNREADABLE = (
    "the file is not a picture that can be read. JPEG, PNG, WebP, HEIC, AVIF, TIFF, JPEG 2000, GIF, BMP and PPM are."
)


def send(client: TestClient, query: str = "", **fields: Any) -> Any:
    return client.post(f"/v1/caption{query}", files={"image": ("cat.jpg", CAT)}, data=fields)


# Settings


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"nevr": "cat"}, "unknown field 'nevr'. Did you mean 'never'?\n  Available: beam, explain,"),
        ({"images": "x"}, "unknown field 'images'. Did you mean 'image'?"),
        ({"format": "xml"}, "unknown format 'xml'.\n  Available: events, html, json."),
        ({"method": "beem"}, "unknown method 'beem'. Did you mean 'beam'?"),
        ({"explain": "maybe"}, "explain must be true or false, not 'maybe'."),
        ({"beam": "99"}, "beam must be a whole number from 1 to 10, not '99'."),
        ({"seed": "-1"}, "seed must be a whole number from 0 to 4294967295, not '-1'."),
        ({"top_p": "nan"}, "top_p must be a number from 0 to 1, not 'nan'."),
        ({"must": "w4,w5,w6,w7,w8"}, "must must be a list of at most 4 texts"),
        ({"must": "w4x"}, "the model does not know the word 'w4x'. Did you mean 'w4'?"),
        ({"must": "w4", "never": "w4"}, "'w4' cannot be demanded and forbidden at once"),
        ({"temperature": "2"}, "temperature has no effect with method beam"),
        ({"seed": "5"}, "seed has no effect with method beam"),
        ({"beam": "2", "method": "sample"}, "beam has no effect with method sample"),
        ({"beam": ["2", "3"]}, "beam was given 2 times; give it once."),
    ],
)
def test_unknown_fields_and_values_are_refused_with_a_suggestion(
    client: TestClient, fields: dict[str, Any], reason: str
) -> None:
    answer = send(client, **fields)
    assert answer.status_code == 422
    assert reason in answer.json()["error"]
    assert answer.json().keys() == {"error"}


def test_the_query_is_checked_as_the_form_is(client: TestClient) -> None:
    assert "Did you mean 'never'?" in send(client, "?nevr=cat").json()["error"]
    assert send(client, "?beam=2", beam="2").json()["error"].startswith("beam was given in the query and in the body")
    assert send(client, "?n_best=2", beam="3").json() == send(client, n_best="2", beam="3").json()


def test_json_has_types(client: TestClient) -> None:
    photo = base64.b64encode(CAT).decode()
    for fields, reason in (
        ({"beam": "3"}, "beam must be a whole number from 1 to 10, not '3'"),
        ({"beam": True}, "beam must be a whole number"),
        ({"never": "cat"}, "never must be a list of at most 100 texts of at most 100 characters, not 'cat'."),
        ({"views": [5]}, "item 1 of views must be a text of at most 100 characters, not 5."),
        ({"views": ["cells", "x" * 101]}, "item 2 of views must be a text of at most 100 characters, not 'xxx"),
        ({"baem": 3}, "unknown field 'baem'. Did you mean 'beam'?"),
    ):
        answer = client.post("/v1/caption", json={"image": photo, **fields})
        assert (answer.status_code, answer.json()["error"].startswith(reason)) == (422, True)
    assert client.post("/v1/caption", json={"image": photo, "beam": None, "never": ["w4"]}).status_code == 200


def test_a_long_value_is_shown_in_part_with_its_length(client: TestClient) -> None:
    reason = send(client, views="x" * 5000).json()["error"]
    assert reason.endswith(f"not '{'x' * 99}… (5,000 characters).")


def test_words_are_demanded_and_forbidden_as_in_python(client: TestClient, captioner: Captioner) -> None:
    plain = send(client).json()
    banned = [word["word"] for word in plain["words"]]
    without = send(client, never=",".join(banned)).json()
    assert without["caption"] == captioner.caption(CAT, never=banned).text
    assert not set(banned) & set(without["caption"].split())
    repeated = send(client, never=banned).json()  # one form field per word
    assert repeated == without
    demanded = send(client, must="w9|w10").json()
    assert demanded["caption"] == captioner.caption(CAT, must=["w9|w10"]).text
    assert {"w9", "w10"} & set(demanded["caption"].split())


def test_a_caption_goes_on_from_its_prefix(client: TestClient) -> None:
    assert send(client, prefix="w6 w7").json()["caption"].startswith("w6 w7 ")
    assert send(client, prefix="w6 w7", never="w7").status_code == 422


def test_a_seed_draws_what_python_draws_and_other_photos_do_not_change_it(
    client: TestClient, captioner: Captioner
) -> None:
    settings = {"method": "sample", "samples": 3, "temperature": 1.5, "top_k": 9, "top_p": 0.9, "seed": 7, "n_best": 2}
    expected = captioner.caption(CAT, **settings).to_json()
    fields = {name: str(value) for name, value in settings.items()}
    assert send(client, **fields).json() == {"image": "cat.jpg", **expected}
    files = [("images", ("coffee.jpg", COFFEE)), ("images", ("cat.jpg", CAT))]
    several = client.post("/v1/captions", files=files, data=fields).json()
    assert several["photos"][1] == {"image": "cat.jpg", **expected}
    assert send(client, **(fields | {"seed": "8"})).json()["caption"] != expected["caption"]


# Bodies


def test_the_bytes_of_a_photo_are_a_body(client: TestClient, captioner: Captioner) -> None:
    answer = client.post("/v1/caption?beam=2&never=w4,w5", content=CAT, headers=JPEG)
    expected = captioner.caption(CAT, beam=2, never=["w4", "w5"]).to_json()
    assert answer.json() == {"image": "photo", **expected}
    broken = client.post("/v1/caption", content=b"no", headers=JPEG)
    assert (broken.status_code, broken.json()) == (422, {"error": UNREADABLE})


def test_several_photos_are_captioned_in_their_order_and_a_broken_one_stops_no_other(
    client: TestClient, captioner: Captioner
) -> None:
    photos = [("a.jpg", COFFEE), ("b.jpg", b"no picture"), ("c.jpg", CAT)]
    answer = client.post("/v1/captions", files=[("images", photo) for photo in photos], data={"beam": "2"})
    assert answer.status_code == 200
    first, second, third = answer.json()["photos"]
    assert first == {"image": "a.jpg", **captioner.caption(COFFEE, beam=2).to_json()}
    assert second == {"image": "b.jpg", "error": UNREADABLE}
    assert third == {"image": "c.jpg", **captioner.caption(CAT, beam=2).to_json()}
    encoded = [base64.b64encode(data).decode() for _, data in photos]
    again = client.post("/v1/captions", json={"images": encoded, "beam": 2}).json()
    assert [row.get("caption") for row in again["photos"]] == [first["caption"], None, third["caption"]]
    assert client.post("/v1/captions", json={"images": encoded[1:2]}).json()["photos"][0].keys() == {"image", "error"}
    explained = client.post("/v1/captions", json={"images": encoded, "beam": 2, "explain": True}).json()["photos"]
    assert [row.get("caption") for row in explained] == [first["caption"], None, third["caption"]]
    assert "without" in explained[2]


@pytest.mark.parametrize(
    ("path", "files", "reason"),
    [
        ("/v1/captions", [("images", CAT)] * 4, "'images' must be 1 to 3 photos, not 4."),
        ("/v1/captions", [("image", CAT)], "unknown field 'image'. Did you mean 'images'?"),
        ("/v1/caption", [("image", CAT)] * 2, "'image' must be one photo; /v1/captions takes several, not 2."),
        ("/v1/caption", [("beam", b"3")], "beam must be a whole number from 1 to 10, not 'a file'."),
    ],
)
def test_a_wrong_number_of_photos_is_refused(client: TestClient, path: str, files: Any, reason: str) -> None:
    answer = client.post(path, files=[(name, ("a.jpg", data)) for name, data in files])
    assert (answer.status_code, answer.json()["error"].startswith(reason)) == (422, True)


def test_the_refusal_of_a_photo_that_would_unpack_to_very_many_pixels_names_the_limit(client: TestClient) -> None:
    header = b"P5 30000 30000 255 "  # Pillow itself refuses it
    answer = client.post("/v1/caption", content=header, headers={"Content-Type": "image/x-portable-graymap"})
    assert answer.status_code == 422
    assert "2,000,000 pixels" in answer.json()["error"]


def send_form(client: TestClient, filename: bytes, charset: str = "utf-8", **fields: bytes) -> Any:
    """A form with the bytes of names and values as they are"""
    parts = [b'"image"; filename="%b"\r\n\r\n%b' % (filename, CAT)]
    parts += [b'"%b"\r\n\r\n%b' % (name.encode(), value) for name, value in fields.items()]
    body = b"".join(b"--x\r\nContent-Disposition: form-data; name=%b\r\n" % part for part in parts) + b"--x--\r\n"
    content_type = f"multipart/form-data; boundary=x; charset={charset}"
    return client.post("/v1/caption", content=body, headers={"Content-Type": content_type})


@pytest.mark.parametrize(
    ("filename", "name"),
    [(b"cat.jpg", "cat.jpg"), (b"photos/cat.jpg", "cat.jpg"), (b"/", "photo"), (b".", "photo"), (b"", "photo")],
)
def test_a_photo_is_named_by_the_last_part_of_its_path(client: TestClient, filename: bytes, name: str) -> None:
    assert send_form(client, filename).json()["image"] == name


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (r'"\ud800": 1', "unknown field '\ud800'."),
        (r'"method": "\ud800"', "unknown method '\ud800'."),
        (r'"format": "\udc00x"', "unknown format '\udc00x'."),
    ],
)
def test_half_a_surrogate_pair_in_json_comes_back_in_the_refusal(client: TestClient, field: str, reason: str) -> None:
    body = f'{{"image": "{base64.b64encode(CAT).decode()}", {field}}}'
    answer = client.post("/v1/caption", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["error"].startswith(reason)


def test_half_a_surrogate_pair_in_a_form_comes_back_in_the_answer(client: TestClient) -> None:
    for charset, filename in (("utf-7", b"+2AA-.jpg"), ("unicode_escape", rb"\ud800.jpg")):
        answer = send_form(client, filename, charset)
        assert (answer.status_code, answer.json()["image"]) == (200, "\ud800.jpg")
    page = send_form(client, rb"\ud800.jpg", "unicode_escape", format=b"html")
    assert page.status_code == 200
    assert r'"title": "\ud800.jpg"' in page.text
    refused = send_form(client, b"cat.jpg", "unicode_escape", method=rb"\ud800")
    assert refused.status_code == 422
    assert refused.json()["error"].startswith("unknown method '\ud800'.")


def test_the_name_of_a_model_may_have_bytes_that_are_no_text(captioner: Captioner) -> None:
    with TestClient(build_app(captioner, name="m\udcff")) as client:
        assert client.get("/v1/models").json()["models"][0]["name"] == "m\udcff"


# Errors, HEAD, health, metrics


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/x", 404), ("GET", "/v1/caption", 405), ("PUT", "/v1/health", 405)]
)
def test_every_error_has_the_same_body(client: TestClient, method: str, path: str, status: int) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert f"{method} {path}: " in answer.json()["error"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_fault_of_the_server_tells_clients_no_detail(
    client: TestClient, captioner: Captioner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: Exception) -> Any:
        def stream(*_: Any) -> Any:
            raise error

        return stream

    monkeypatch.setattr(captioner, "stream", fail(CheckpointError("the scores of /secret are not finite")))
    model = send(client)
    monkeypatch.setattr(captioner, "stream", fail(RuntimeError("a bug at /secret")))
    bug = send(client)
    for answer in (model, bug):
        assert (answer.status_code, answer.json().keys()) == (500, {"error"})
        assert "secret" not in answer.text
    assert "/secret are not finite" in caplog.text


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/static/app.js", "/v1/health", "/v1/models"])
def test_head_is_get_without_a_body(client: TestClient, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers == get.headers
    assert client.head("/v1/caption").status_code == 405


def test_a_request_that_failed_leaves_no_photos_in_the_queue(
    captioner: Captioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def stream(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            time.sleep(0.5)  # the first photo's failure is known before the third is begun
        raise ConfigError("this photo cannot have that word.")

    monkeypatch.setattr(captioner, "stream", stream)
    with TestClient(build_app(captioner)) as client:
        answer = client.post("/v1/captions", files=[("images", CAT)] * 3, data={"must": "w4"})
    assert (answer.status_code, answer.json()) == (422, {"error": "this photo cannot have that word."})
    assert calls <= 2


def test_a_server_that_cannot_take_a_photo_is_alive_and_not_ready(captioner: Captioner) -> None:
    app = build_app(captioner)
    with TestClient(app) as client:
        assert client.get("/v1/ready").json() == client.get("/v1/health").json() == {"status": "ok", "waiting": 0}
    ended = TestClient(app)  # the captioning thread has ended with the app
    assert ended.get("/v1/health").status_code == 200
    assert (ended.get("/v1/ready").status_code, ended.get("/v1/ready").json()) == (
        503,
        {"error": "the captioning thread has ended."},
    )


SAMPLE = re.compile(r'[a-z_]+(\{[a-z]+="[^"\\\n]*"(,[a-z]+="[^"\\\n]*")*\})? [0-9.e+-]+')


def test_metrics_are_in_the_format_of_prometheus_and_count_what_happened(captioner: Captioner) -> None:
    with TestClient(build_app(captioner)) as client:
        send(client)
        send(client, beam="0")
        client.post("/v1/captions", files=[("images", b"no picture")])
        client.get("/made/up/by/clients")
        answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    assert [line for line in lines if not line.startswith("# ") and not SAMPLE.fullmatch(line)] == []
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(set(typed)) == len(typed)
    for expected in (
        'haav_requests_total{path="/v1/caption",status="200"} 1',
        'haav_requests_total{path="/v1/caption",status="422"} 1',
        'haav_requests_total{path="other",status="404"} 1',
        'haav_request_seconds_bucket{path="/v1/caption",le="+Inf"} 2',
        'haav_request_seconds_count{path="/v1/caption"} 2',
        "haav_photos_total 1",
        "haav_batches_total 2",
        "haav_waiting 0",
        "haav_waiting_limit 32",
    ):
        assert expected in lines
    buckets = [
        int(line.split()[1]) for line in lines if line.startswith('haav_request_seconds_bucket{path="/v1/caption"')
    ]
    assert buckets == sorted(buckets)


# Key and CORS


@pytest.fixture(scope="module")
def locked(captioner: Captioner) -> Iterator[TestClient]:
    with TestClient(build_app(captioner, Limits(), api_key="a-key", cors=["https://example.org"])) as client:
        yield client


def test_a_key_guards_the_api_and_neither_the_page_nor_health(locked: TestClient) -> None:
    right, wrong = {"Authorization": "Bearer a-key"}, {"Authorization": "Bearer a-kex"}
    for path in ("/v1/models", "/metrics"):
        assert locked.get(path, headers=right).status_code == 200
        for headers in ({}, wrong, {"Authorization": "Basic a-key"}, {"Authorization": "Bearer ä"}):
            refused = locked.get(path, headers=[(name, value.encode()) for name, value in headers.items()])
            assert refused.status_code == 401
            assert refused.json() == {"error": "send the header 'Authorization: Bearer KEY'."}
            assert refused.headers["www-authenticate"] == "Bearer"
    assert locked.post("/v1/caption", content=CAT, headers=JPEG).status_code == 401
    assert locked.post("/v1/caption", content=CAT, headers=JPEG | right).status_code == 200
    for path in ("/", "/docs", "/openapi.json", "/v1/health", "/v1/ready", "/samples/cat.jpg"):
        assert locked.get(path).status_code == 200
    operation = locked.get("/openapi.json").json()["paths"]["/v1/caption"]["post"]
    assert operation["security"] == [{"HTTPBearer": []}]
    assert "401" in operation["responses"]


def test_cors_is_off_unless_asked_for(client: TestClient, locked: TestClient) -> None:
    ours, other = {"Origin": "https://example.org"}, {"Origin": "https://example.com"}
    allowed = "access-control-allow-origin"
    assert allowed not in client.get("/v1/health", headers=ours).headers
    assert locked.get("/v1/health", headers=ours).headers[allowed] == "https://example.org"
    assert allowed not in locked.get("/v1/health", headers=other).headers
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    assert locked.options("/v1/caption", headers=ours | asked).status_code == 200
    refusal = locked.options("/v1/caption", headers=other | asked)
    assert refusal.status_code == 400
    assert refusal.json() == {"error": "this server is not open to pages of other sites: Disallowed CORS origin."}
    assert client.options("/v1/caption", headers=ours | asked).status_code == 405


def test_origins_and_keys_that_cannot_work_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_origins(["*", "https://example.org:8443"]) == ["*", "https://example.org:8443"]
    for origin in ("example.org", "https://example.org/", "https://example.org/app"):
        with pytest.raises(ConfigError, match="is not an origin"):
            check_origins([origin])
    monkeypatch.setenv("HAAV_API_KEY", "")
    assert main(["serve"]) == 2
    assert main(["serve", "--api-key", "schlüssel"]) == 2
    assert capsys.readouterr().err.count("an API key has letters, digits and signs of ASCII") == 2


def test_events_are_the_caption_then_the_explanation(client: TestClient, captioner: Captioner) -> None:
    answer = send(client, format="events", n_best="2")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    assert [name for name, _ in events] == ["event: caption", "event: explanation"]
    caption, explanation = (json.loads(data.removeprefix("data: ")) for _, data in events)
    assert caption == send(client, n_best="2").json()
    assert explanation == send(client, n_best="2", explain="true").json()


def test_events_of_a_photo_that_cannot_be_read_are_an_ordinary_refusal(client: TestClient) -> None:
    answer = client.post("/v1/caption", files={"image": b"no picture"}, data={"format": "events"})
    assert answer.status_code == 422
    assert "is not a picture" in answer.json()["error"]


def test_an_explanation_that_comes_too_late_is_an_event_of_its_own(
    captioner: Captioner, explanation_gate: threading.Event
) -> None:
    with TestClient(build_app(captioner, Limits(seconds=2))) as client:
        send(client)  # loads the networks
        text = send(client, format="events").text
        explanation_gate.set()
    assert [line for line in text.split("\n") if line.startswith("event")] == ["event: caption", "event: problem"]
    assert "no caption within 2 s" in text


def test_a_preview_is_a_small_jpeg(client: TestClient) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (1600, 400), "red").save(buffer, "TIFF", compression="tiff_lzw")
    files = {"image": ("photo.tiff", buffer.getvalue(), "image/tiff")}
    answer = client.post("/v1/preview", files=files)
    assert answer.headers["content-type"] == "image/jpeg"
    with Image.open(io.BytesIO(answer.content)) as image:
        assert (image.format, image.size) == ("JPEG", (1024, 256))
    assert client.post("/v1/preview", files={"image": b"no"}).status_code == 422
    refused = client.post("/v1/preview", files=files, data={"beam": "3"})
    assert (refused.status_code, "unknown field 'beam'" in refused.json()["error"]) == (422, True)


def test_samples_have_the_captions_that_the_model_gives_them(client: TestClient, captioner: Captioner) -> None:
    photos = client.get("/v1/samples").json()["photos"]
    assert [photo["image"] for photo in photos] == client.get("/v1/models").json()["samples"]
    texts = [caption.text for caption in captioner.caption([SAMPLES / photo["image"] for photo in photos])]
    assert [photo["caption"] for photo in photos] == texts
    assert client.get("/v1/models").json()["models"][0]["titles"] == {
        "cells": "what the image encoder saw",
        "objects": "objects found",
    }
