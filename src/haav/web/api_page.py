"""Documentation page of the API, rendered from its OpenAPI schema: plain HTML without scripts or external files."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader

from haav.web.schemas import in_words

_templates = Environment(loader=PackageLoader("haav.web"), autoescape=True, trim_blocks=True)


def api_page(schema: dict[str, Any], address: str) -> str:
    """`address` is the URL of the server as the client sees it."""
    template = _templates.get_template("api.html")
    return template.render(info=schema["info"], paths=schema["paths"], address=address, fields=_fields)


def _fields(bodies: dict[str, Any]) -> dict[str, str]:
    """The fields of a request and their meaning, for each kind of body"""
    per_body = [body["schema"]["properties"] for body in bodies.values() if "properties" in body["schema"]]
    return {name: "; ".join(dict.fromkeys(_meaning(fields[name]) for fields in per_body)) for name in per_body[0]}


def _meaning(field: dict[str, Any]) -> str:
    return f"{in_words(field)}: {field['description']}" if "description" in field else in_words(field)
