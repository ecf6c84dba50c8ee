"""Request and response schemas of the API, validated by pydantic and documented in OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from haav.errors import unknown
from haav.generate.build import MOST_DEMANDS

MOST = 10
"""maximum number of captions searched, drawn or returned per photo"""
MOST_FORBIDDEN = 100

Name = Annotated[str, Field(max_length=100)]


class NoSettings(BaseModel):
    """Of a request that has a photo and nothing else."""

    model_config = ConfigDict(extra="forbid")


class Settings(NoSettings):
    """The settings of a request, beside its photos. They mean what they mean in Python."""

    n_best: int = Field(1, ge=1, le=MOST, description="captions returned, the best first")
    views: list[Name] = Field([], max_length=50, description="use only these views; default: all")
    must: list[Name] = Field(
        [], max_length=MOST_DEMANDS, description="words that captions must contain; dog|puppy: one of them"
    )
    never: list[Name] = Field([], max_length=MOST_FORBIDDEN, description="words that captions must not contain")
    prefix: str = Field("", max_length=200, description="words that captions begin with")
    method: Literal["beam", "sample"] | None = Field(None, description="default: the model's own")
    beam: int | None = Field(None, ge=1, le=MOST, description="captions searched at once; default: the model's own")
    samples: int | None = Field(None, ge=1, le=MOST, description="with method sample: captions drawn")
    temperature: float | None = Field(
        None, ge=0.01, le=100, allow_inf_nan=False, description="with method sample: below 1 favours probable words"
    )
    top_k: int | None = Field(
        None, ge=0, le=100_000, description="with method sample: draw among this many words; 0: all"
    )
    top_p: float | None = Field(
        None, ge=0, le=1, allow_inf_nan=False, description="with method sample: draw among words of this probability"
    )
    seed: int | None = Field(None, ge=0, le=2**32 - 1, description="with method sample: equal seeds, equal captions")
    explain: bool = Field(False, description="where each word came from")


class CaptionSettings(Settings):
    format: Literal["json", "html", "events"] = Field(
        "json",
        description="html: the explanation as a page to keep; "
        "events: the caption as soon as it is there, then the explanation, as server-sent events",
    )


LISTS = frozenset(name for name, field in CaptionSettings.model_fields.items() if field.default == [])
"""settings that are lists; a text has commas between their items"""


class WordResponse(BaseModel):
    word: str
    probability: float
    confidence: float
    views: dict[str, float] | None = Field(None, description="weight of each view; they sum to 1")


class Candidate(BaseModel):
    caption: str
    confidence: float
    unfamiliar: bool = Field(False, description="whether the picture is unlike those that the model was trained on")
    words: list[WordResponse]


class CaptionResponse(Candidate):
    image: str = Field(description="the file's name")
    n_best: list[Candidate] = Field([], description="further captions, if they were asked for")


class FailedPhoto(BaseModel):
    image: str = Field(description="the file's name")
    error: str = Field(description="why it could not be read")


class CaptionsResponse(BaseModel):
    photos: list[CaptionResponse | FailedPhoto] = Field(description="one entry per photo, in their order")


class HealthResponse(BaseModel):
    status: Literal["ok"]
    waiting: int = Field(description="photos that wait for their batch")


class ModelResponse(BaseModel):
    name: str
    views: list[str]
    titles: dict[str, str] = Field(description="view → what it is, in plain words")
    beam: int


class LimitsResponse(BaseModel):
    upload: int = Field(description="bytes of a request")
    pixels: int = Field(description="of a photo")
    photos: int = Field(description="of a request")
    seconds: float = Field(description="for a request, and for its upload")


class ModelsResponse(BaseModel):
    models: list[ModelResponse]
    samples: list[str]
    limits: LimitsResponse


class SamplesResponse(BaseModel):
    photos: list[CaptionResponse] = Field(description="the files are at /samples/IMAGE")


class ErrorResponse(BaseModel):
    error: str = Field(description="what was wrong and what is allowed")


def first_problem(error: ValidationError, settings: type[NoSettings], photo_field: str) -> str:
    """The first problem of a request: what was given, and what is allowed"""
    problem = error.errors(include_url=False)[0]
    location, value = problem["loc"], problem["input"]
    name = str(location[0] if location else value)  # pydantic gives a name that is no Unicode text as the input
    if problem["type"] == "extra_forbidden" or not location:
        return unknown("field", name[:100], [*settings.model_fields, photo_field])
    allowed = _variant(settings.model_json_schema()["properties"][name])
    if "enum" in allowed and isinstance(value, str):
        return unknown(name, value[:100], allowed["enum"])
    if len(location) > 1:
        return f"item {int(location[1]) + 1} of {name} must be {in_words(allowed['items'])}, not {_shown(value)}."
    return f"{name} must be {in_words(allowed)}, not {_shown(value)}."


def _shown(value: object) -> str:
    text = repr(value)
    if len(text) <= 100:
        return text
    return f"{text[:100]}…" + (f" ({len(value):,} characters)" if isinstance(value, str) else "")


def in_words(field: dict[str, Any]) -> str:
    """What a field may be, from its JSON schema"""
    variant = _variant(field)
    if "enum" in variant:
        return " or ".join(variant["enum"])
    if variant["type"] == "array":
        items = variant["items"]
        texts = {"binary": "files", "byte": "texts in base64"}.get(items.get("format", ""))
        return f"a list of at most {variant['maxItems']} {texts or 'texts' + in_words(items).removeprefix('a text')}"
    if "maxLength" in variant:
        return f"a text of at most {variant['maxLength']} characters"
    text = {
        "binary": "a file",
        "byte": "base64",
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
    }[variant.get("format", variant["type"])]
    return f"{text} from {variant['minimum']:g} to {variant['maximum']:.10g}" if "minimum" in variant else text


def query_parameters(settings: type[Settings]) -> list[dict[str, Any]]:
    """OpenAPI's description of the settings in the query; lists have commas"""
    return [
        {
            "name": name,
            "in": "query",
            "description": field["description"],
            "schema": _variant(field),
            **({"explode": False} if name in LISTS else {}),
        }
        for name, field in settings.model_json_schema()["properties"].items()
    ]


def request_body(settings: type[NoSettings], photos: int = 0) -> dict[str, Any]:
    """OpenAPI's description of the bodies: a form with files, JSON with base64, and for one photo its bytes.

    `photos` is the maximum number of photos in a list; 0: one photo, no list.
    """
    properties = settings.model_json_schema().get("properties", {})

    def body(encoding: str, fields: dict[str, Any]) -> dict[str, Any]:
        photo: dict[str, Any] = {"type": "string", "format": encoding}
        if photos:
            photo = {"type": "array", "items": photo, "minItems": 1, "maxItems": photos}
        name = photo_field(photos)
        schema = {"type": "object", "required": [name], "properties": {name: photo, **fields}}
        return {"schema": {**schema, "additionalProperties": False}}

    as_texts = {name: _variant(field) | {"description": field["description"]} for name, field in properties.items()}
    content = {"multipart/form-data": body("binary", as_texts), "application/json": body("byte", properties)}
    if not photos:
        content["image/*"] = {"schema": {"type": "string", "format": "binary"}}
    return {"required": True, "content": content}


def photo_field(photos: int) -> str:
    return "images" if photos else "image"


def _variant(field: dict[str, Any]) -> dict[str, Any]:
    """A field without null, which neither a query nor a form can hold"""
    [variant] = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
    return {key: value for key, value in variant.items() if key not in ("title", "description", "default")}
