"""CLIP's views as in the paper: the grid of ViT-B/32, and texts that ViT-L/14 retrieves for a photo and its crops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from haav.errors import ViewError
from haav.types import PhotoView, Progress, ViewSpec, quiet
from haav.views.base import Extractor, PhotoBatch, extractors
from haav.views.embedded.regions import CROPS, crops
from haav.views.retrieval.sentences import encode_by_length
from haav.views.retrieval.text import load_textdb, nearest_texts, text_spec
from haav.views.retrieval.textdb import TextDatabase
from haav.weights import hub

GRID_MODEL = "openai/clip-vit-base-patch32"
TEXT_MODEL = "openai/clip-vit-large-patch14"
LICENCE = "MIT (OpenAI's weights; another model's: see its page)"


@extractors.register("clip_grid")
class ClipGridExtractor(Extractor):
    """The last hidden state of CLIP's vision tower: the class token, then the patches row by row."""

    name = "clip_grid"
    title = "what the image encoder saw"
    licence = LICENCE

    def __init__(self, clip_model: str | Path = GRID_MODEL, device: str = "cpu") -> None:
        super().__init__(device)
        self.model = _find_clip(clip_model, "clip_model")
        self.tower = hub.load_network(self.model, "CLIPVisionModel", device)
        self.prepare = _preparation(self.model, self.tower)
        config = self.tower.config
        self.spec = ViewSpec(config.hidden_size, 1 + (config.image_size // config.patch_size) ** 2)

    @property
    def fingerprint(self) -> str:
        return f"clip-grid-{self.model.fingerprint}-{self.prepare.fingerprint}-1"

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        pixels = torch.stack([self.prepare(image) for image in photos.images]).to(self.device)
        return [PhotoView(tokens) for tokens in self.tower(pixels).last_hidden_state.cpu()]


class ClipTextExtractor(Extractor):
    """Tokens are the vectors of the texts nearest to each crop, by cosine. Labels are the texts.

    Unlike in the embedded views, every crop is cut out of the photo and encoded by itself. A photo never gets its own
    captions.
    """

    title = "captions of similar photos"
    licence = f"{LICENCE}; of the texts in the text database"
    needs, gives = ("textdb",), ("sentences",)
    crops: str
    per_crop: int

    def __init__(
        self,
        clip_text_model: str | Path = TEXT_MODEL,
        textdb: str | Path | TextDatabase | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(device)
        if textdb is None:
            raise ViewError(
                f"view '{self.name}' needs a text database made with CLIP.\n"
                "  Make one with: haav textdb; then give --textdb DIR."
            )
        self.model = _find_clip(clip_text_model, "clip_text_model")
        self.textdb = textdb if isinstance(textdb, TextDatabase) else load_textdb(str(textdb))
        if self.textdb.encoder != text_encoder_name(self.model):
            raise ViewError(
                f"photos would be compared by {text_encoder_name(self.model)} ('{self.model.name}'), but the text "
                f"database holds vectors of {self.textdb.encoder}.\n"
                "  Build it with the same model, or give the one that it was built with: clip_text_model=…"
            )
        if len(self.textdb) < self.per_crop:
            raise ViewError(
                f"view '{self.name}' takes {self.per_crop} texts a crop; the text database has {len(self.textdb)}."
            )
        self.tower = hub.load_network(self.model, "CLIPVisionModelWithProjection", device)
        self.prepare = _preparation(self.model, self.tower)
        self.boxes = self.crop_boxes().tolist()
        self.spec = text_spec(self.textdb, self.crops, self.per_crop)

    @classmethod
    def crop_boxes(cls) -> Tensor:
        return crops()[CROPS[cls.crops]]

    @property
    def fingerprint(self) -> str:
        return self._fingerprint(self.textdb.fingerprint)

    @property
    def origin(self) -> str:
        return self._fingerprint(self.textdb.origin)

    def _fingerprint(self, textdb: str) -> str:
        image = f"clip-text-{self.model.fingerprint}-{self.prepare.fingerprint}"
        return f"{image}-textdb-{textdb}-{self.crops}-{self.per_crop}-1"

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        pieces = [cut(image, box) for image in photos.images for box in self.boxes]
        queries = self.embed(pieces).view(len(photos), len(self.boxes), -1)
        return nearest_texts(self.textdb, queries, photos.ids, self.per_crop)

    def embed(self, images: Sequence[Image.Image]) -> Tensor:
        """(N, D) unit rows in the space that CLIP shares between images and texts"""
        batches = (images[start : start + hub.BATCH] for start in range(0, len(images), hub.BATCH))
        outputs = [
            self.tower(torch.stack([self.prepare(image) for image in batch]).to(self.device)) for batch in batches
        ]
        return F.normalize(torch.cat([output.image_embeds for output in outputs]).cpu(), dim=1)


@extractors.register("clip_text_whole")
class ClipTextWholeExtractor(ClipTextExtractor):
    name, crops, per_crop = "clip_text_whole", "whole", 64


@extractors.register("clip_text_five")
class ClipTextFiveExtractor(ClipTextExtractor):
    name, crops, per_crop = "clip_text_five", "five", 16


@extractors.register("clip_text_nine")
class ClipTextNineExtractor(ClipTextExtractor):
    name, crops, per_crop = "clip_text_nine", "nine", 8


def cut(image: Image.Image, box: Sequence[float]) -> Image.Image:
    """The part of a photo under a box of fractions, rounded to whole pixels, at least one pixel wide and high."""
    x1, x2 = _span(box[0], box[2], image.width)
    y1, y2 = _span(box[1], box[3], image.height)
    return image.crop((x1, y1, x2, y2))


def _span(low: float, high: float, size: int) -> tuple[int, int]:
    start = min(round(low * size), size - 1)
    return start, max(round(high * size), start + 1)


class ClipTextEncoder:
    """Encodes sentences with CLIP's text tower. Text databases for the `clip_text_…` views are built with it."""

    def __init__(self, model: str | Path = TEXT_MODEL) -> None:
        self.model = _find_clip(model, "clip_text_model")
        self.tower = hub.load_network(self.model, "CLIPTextModelWithProjection")
        self.tokenizer = hub.load_tokenizer(self.model)

    @property
    def fingerprint(self) -> str:
        """The encoder name that a text database records."""
        return text_encoder_name(self.model)

    @torch.no_grad()
    def encode(self, sentences: Sequence[str], progress: Progress = quiet) -> Tensor:
        """(N, D) float16 unit rows. Long texts are truncated."""
        config = self.tower.config

        def embed(texts: list[str]) -> Tensor:
            length = config.max_position_embeddings
            tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
            vectors = self.tower(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).text_embeds
            assert isinstance(vectors, Tensor)
            return vectors

        return encode_by_length(sentences, config.projection_dim, embed, progress)


def text_encoder_name(model: hub.HubModel) -> str:
    """Both towers are in one file, so its fingerprint identifies the image encoder and the text encoder together."""
    return f"clip-text-{model.fingerprint}"


def _find_clip(name: str | Path, option: str) -> hub.HubModel:
    model = hub.find_hub_model(name, option)
    model_type = model.config.get("model_type")
    if model_type not in ("clip", "clip_vision_model", "clip_text_model"):
        raise ViewError(
            f"{option}: '{model.name}' is a model of type '{model_type}'; this view takes CLIP.\n"
            f"  Take {GRID_MODEL}, {TEXT_MODEL} or another with model_type 'clip'."
        )
    return model


def _preparation(model: hub.HubModel, tower: Any) -> hub.Preparation:
    """CLIP's preparation: a bicubic resize of the shorter side to the input size, then a centre crop.

    The ends of a long photo are cut off. Resizing to a square would distort it in a way that the network was not
    trained on.
    """
    defaults = {
        "size": tower.config.image_size,
        "crop_size": tower.config.image_size,
        "do_center_crop": True,
        "resample": int(Image.Resampling.BICUBIC),
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
    }
    return hub.load_preparation(model, defaults)
