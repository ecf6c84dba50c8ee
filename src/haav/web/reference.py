"""The API's page, written from its OpenAPI schema: plain HTML, no script, nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: the API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/static/style.css">
</head>
<body>
<main>
<h1>{title} {version} <span class="soft">– the API</span></h1>
<p><a href="/">The page</a> · <a href="/openapi.json">the schema for programs</a></p>
<pre>curl -F image=@photo.jpg -F n_best=3 {address}v1/caption</pre>
{operations}
</main>
</body>
</html>
"""


def api_page(schema: dict[str, Any], address: str) -> str:
    """`address`: of the server, as its client knows it"""
    operations = [
        _operation(method, path, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    info = schema["info"]
    return _PAGE.format(
        title=escape(info["title"]),
        version=escape(info["version"]),
        address=escape(address),
        operations="\n".join(operations),
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = [f"<h2><code>{method.upper()} {escape(path)}</code></h2>", f"<p>{escape(operation['description'])}</p>"]
    bodies = operation.get("requestBody", {}).get("content", {})
    if bodies:
        kinds = " or ".join(f"<code>{escape(kind)}</code>" for kind in bodies)
        parts.append(f"<p>Takes {kinds}:</p>")
        fields: dict[str, list[Any]] = {}
        for body in bodies.values():
            for name, field in body["schema"]["properties"].items():
                fields.setdefault(name, []).append(field)
        parts.append(_table(("field", "what it may be"), [(name, _meaning(kinds)) for name, kinds in fields.items()]))
    answers = [(status, answer["description"]) for status, answer in operation["responses"].items()]
    return "\n".join([*parts, _table(("status", "answer"), answers)])


def _meaning(kinds: list[dict[str, Any]]) -> str:
    """One field, as each kind of body has it"""
    formats = {"binary": "a file", "byte": "base64"}
    found = []
    for kind in kinds:
        text = " or ".join(kind["enum"]) if "enum" in kind else formats.get(kind.get("format", ""), kind["type"])
        if "minimum" in kind:
            text += f" from {kind['minimum']:g} to {kind['maximum']:g}"
        if "description" in kind:
            text += f": {kind['description']}"
        found.append(text)
    return "; ".join(dict.fromkeys(found))


def _table(heads: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
