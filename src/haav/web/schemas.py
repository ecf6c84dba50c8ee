"""Request and response schemas of the API, validated and documented by FastAPI."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

MOST = 10
"""maximum number of captions searched or returned per photo"""


class CaptionRequest(BaseModel):
    """The settings of a request, beside its image. Empty form fields are as good as none."""

    beam: int | None = Field(None, ge=1, le=MOST, description="captions searched at once; default: the model's own")
    n_best: int = Field(1, ge=1, le=MOST, description="captions returned, the best first")
    views: list[str] = Field([], description="only these views: a list, or a text with commas; default: all")
    explain: bool = Field(False, description="where each word came from")
    format: Literal["json", "html"] = Field("json", description="html: the explanation as a page to keep")

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, fields: Any) -> Any:
        return {name: value for name, value in fields.items() if value != ""} if isinstance(fields, dict) else fields

    @field_validator("views", mode="before")
    @classmethod
    def _split(cls, views: Any) -> Any:
        return views.split(",") if isinstance(views, str) else views


class WordResponse(BaseModel):
    word: str
    probability: float
    confidence: float
    views: dict[str, float] | None = Field(None, description="weight of each view; they sum to 1")


class Candidate(BaseModel):
    caption: str
    confidence: float
    words: list[WordResponse]


class CaptionResponse(Candidate):
    image: str = Field(description="the file's name")
    n_best: list[Candidate] = Field([], description="further captions, if they were asked for")


class ErrorResponse(BaseModel):
    error: str = Field(description="what was wrong and what is allowed")


def first_problem(error: ValidationError) -> str:
    """The first problem of a request, as a sentence that states what is allowed"""
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0]) if problem["loc"] else "the request"
    if name in ("beam", "n_best"):
        return f"{name} must be a whole number from 1 to {MOST}."
    return f"{name}: {problem['msg'].lower()}."


def request_body() -> dict[str, Any]:
    """OpenAPI's description of both kinds of body: a form with a file, or JSON with the image in base64"""
    schema = CaptionRequest.model_json_schema()

    def body(image: dict[str, str]) -> dict[str, Any]:
        properties = {"image": image, **schema["properties"]}
        return {"schema": {"type": "object", "required": ["image"], "properties": properties}}

    return {
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": body({"type": "string", "format": "binary"}),
                "application/json": body({"type": "string", "format": "byte"}),
            },
        }
    }
