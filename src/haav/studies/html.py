"""Render self-contained HTML pages from the templates of this folder. They need no network."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from PIL import Image

from haav import palette
from haav.photos.images import data_uri

SIDE = 1024
"""longest side of a photo on a page, in pixels"""


_templates = Environment(
    loader=PackageLoader("haav.studies"), autoescape=True, trim_blocks=True, keep_trailing_newline=True
)


@cache
def part(name: str) -> str:
    """The text of a file in `templates`. The style sheet begins with the colours of views."""
    text = resources.files("haav.studies").joinpath("templates", name).read_text(encoding="utf-8")
    return palette.css() + text if name == "style.css" else text


def render_page(template: str, **values: object) -> str:
    """A page from a template, with the style sheet."""
    return _templates.get_template(template).render(style=Markup(part("style.css")), **values)


def render_explanation(title: str, image: Image.Image, explanation: dict[str, Any]) -> str:
    """The page of a photo. `explanation` is the result of `Explanation.to_json`. The page that `haav serve` lets users
    download is filled from the same template, by `save.js`."""
    data = json.dumps([{**explanation, "title": title, "image": data_uri(image, SIDE)}], ensure_ascii=False)
    return render_page(
        "explain.html",
        title=title,
        script=Markup(part("explain.js")),
        # A script ends at the first "</", even inside a string. Escaping stops a caption from ending the script.
        data=Markup(data.replace("<", "\\u003c")),
    )
