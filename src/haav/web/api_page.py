"""Documentation page of the API, rendered from its OpenAPI schema: plain HTML without scripts or external files."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader

_templates = Environment(loader=PackageLoader("haav.web"), autoescape=True, trim_blocks=True)


def api_page(schema: dict[str, Any], address: str) -> str:
    """`address` is the URL of the server as the client sees it."""
    template = _templates.get_template("api.html")
    return template.render(info=schema["info"], paths=schema["paths"], address=address, meaning=_meaning)


def _meaning(name: str, bodies: dict[str, Any]) -> str:
    """Description of a field, for each kind of body"""
    return "; ".join(dict.fromkeys(_in_words(body["schema"]["properties"][name]) for body in bodies.values()))


def _in_words(field: dict[str, Any]) -> str:
    formats = {"binary": "a file", "byte": "base64"}
    (variant,) = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
    text = (
        " or ".join(variant["enum"])
        if "enum" in variant
        else formats.get(variant.get("format", ""), str(variant["type"]))
    )
    if "minimum" in variant:
        text += f" from {variant['minimum']:g} to {variant['maximum']:g}"
    return f"{text}: {field['description']}" if "description" in field else text
