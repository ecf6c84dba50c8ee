"""Render an explanation as one self-contained HTML file per photo. It needs no network."""

from __future__ import annotations

import base64
import io
import json
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from PIL import Image

SIDE = 900
"""longest side of a photo on a page, in pixels"""


_templates = Environment(loader=PackageLoader("haav.studies"), autoescape=True)


@cache
def part(name: str) -> str:
    """The text of a file in `templates`"""
    return resources.files("haav.studies").joinpath("templates", name).read_text(encoding="utf-8")


def render(title: str, image: Image.Image, explanation: dict[str, Any]) -> str:
    """The page of a photo. `explanation` is the result of `Explanation.to_json`."""
    data = json.dumps({"title": title, "image": data_uri(image), **explanation}, ensure_ascii=False)
    return _templates.get_template("explain.html").render(
        title=title,
        style=Markup(part("style.css")),
        script=Markup(part("explain.js")),
        # A script ends at the first "</", even inside a string. Escaping stops a caption from ending the script.
        data=Markup(data.replace("<", "\\u003c")),
    )


def data_uri(image: Image.Image) -> str:
    """The picture as a data URI"""
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
