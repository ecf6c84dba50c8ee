"""The API's page, written from its OpenAPI schema: plain HTML, no script, nothing from elsewhere."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader

_templates = Environment(loader=PackageLoader("haav.web"), autoescape=True, trim_blocks=True)


def api_page(schema: dict[str, Any], address: str) -> str:
    """`address`: of the server, as its client knows it"""
    template = _templates.get_template("api.html")
    return template.render(info=schema["info"], paths=schema["paths"], address=address, meaning=_meaning)


def _meaning(name: str, bodies: dict[str, Any]) -> str:
    """What a field may be, as each kind of body has it"""
    return "; ".join(dict.fromkeys(_in_words(body["schema"]["properties"][name]) for body in bodies.values()))


def _in_words(field: dict[str, Any]) -> str:
    formats = {"binary": "a file", "byte": "base64"}
    (kind,) = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
    text = " or ".join(kind["enum"]) if "enum" in kind else formats.get(kind.get("format", ""), str(kind["type"]))
    if "minimum" in kind:
        text += f" from {kind['minimum']:g} to {kind['maximum']:g}"
    return f"{text}: {field['description']}" if "description" in field else text
