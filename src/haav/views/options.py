"""Options of extractors: typed, frozen, and passed on whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from haav.views.retrieval.bridge import CrossFitted
    from haav.views.retrieval.textdb import TextDatabase

PluginOption = str | int | float | bool | Path


@dataclass(frozen=True)
class ExtractorOptions:
    """Options of all extractors. Each extractor takes those that its `__init__` names; None means its own default.

    >>> ExtractorOptions(precision="int8", plugin={"bins": 16}).given()
    {'device': 'cpu', 'precision': 'int8', 'bins': 16}
    """

    device: str = "cpu"
    """device of the networks, such as "cuda"; views are returned on the CPU"""
    precision: str | None = None
    """of the networks of patch views: auto, float32, bfloat16 or int8"""
    bridge: str | Path | CrossFitted | None = None
    """of text views: a directory that `haav bridge` wrote"""
    textdb: str | Path | TextDatabase | None = None
    """of text views: a directory that `haav textdb` wrote"""
    clip_source: str | Path | None = None
    """weights of CLIP ViT-B/16 for patch views: a hub name, a folder or a safetensors file"""
    clip_model: str | Path | None = None
    """of clip_grid: a hub name or a folder"""
    clip_text_model: str | Path | None = None
    """of clip_text views: a hub name or a folder"""
    detr_model: str | Path | None = None
    """of detr_objects: a hub name or a folder"""
    plugin: Mapping[str, PluginOption] = field(default_factory=dict)
    """options of third-party views, by the names of their parameters"""

    def given(self) -> dict[str, object]:
        """The options that are not None, by name, with those of plug-ins."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "plugin"}
        return {name: value for name, value in own.items() if value is not None} | dict(self.plugin)
