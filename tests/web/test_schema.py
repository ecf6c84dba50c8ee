"""Requests drawn from the OpenAPI schema by schemathesis: no answer outside of the schema, and none with status 500.

HAAV_SCHEMA_CASES is the number of cases, 5,000 by default.
"""

from __future__ import annotations

import base64
import io
import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from haav.inference.captioner import Captioner

pytest.importorskip("fastapi", reason="needs the web extra")
pytest.importorskip("schemathesis", reason="needs the dev extra")
import schemathesis
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks

from haav.web.server import build_app
from haav.web.service import Limits

CASES = int(os.environ.get("HAAV_SCHEMA_CASES", "5000"))
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
]


def small_photo() -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((48, 32)).save(buffer, "JPEG")
    return buffer.getvalue()


PHOTO = small_photo()
TEXT = base64.b64encode(PHOTO).decode()


def with_photos(body: Any) -> Any:
    """The body of a request, with a photo wherever schemathesis drew chance bytes"""
    if isinstance(body, bytes):
        return PHOTO
    if not isinstance(body, dict):
        return body
    photos = {"image": body.get("image"), "images": body.get("images")}
    if isinstance(photos["image"], (bytes, str)):
        photos["image"] = PHOTO if isinstance(photos["image"], bytes) else TEXT
    if isinstance(photos["images"], list):
        photos["images"] = [PHOTO if isinstance(one, bytes) else TEXT for one in photos["images"]]
    return body | {name: value for name, value in photos.items() if name in body}


@pytest.mark.slow
def test_no_answer_is_outside_of_the_schema(captioner: Captioner) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", build_app(captioner, Limits(seconds=600)))
    statuses: Counter[int] = Counter()

    def check(case: Any, real_photos: bool) -> None:
        if real_photos:
            case.body = with_photos(case.body)
        response = case.call(timeout=600)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    for path in ("/v1/health", "/v1/ready", "/v1/models", "/metrics"):
        check(schema[path]["GET"].Case(), False)
    for path in ("/v1/caption", "/v1/captions"):
        drawn = [schema[path]["POST"].as_strategy(generation_mode=mode) for mode in GenerationMode]
        run = given(case=st.one_of(drawn), real_photos=st.booleans())(check)
        settings(max_examples=CASES // 2, deadline=None, suppress_health_check=list(HealthCheck), database=None)(run)()
    print(dict(statuses))
    assert statuses.total() >= CASES
    assert statuses[200] > CASES / 100
    assert statuses[422] > CASES / 100
