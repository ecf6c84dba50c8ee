"""Objects by a detection transformer of the hub."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from haav.types import PhotoView, ViewSpec
from haav.views.base import Extractor, PhotoBatch, extractors
from haav.views.embedded.objects import MAX_BOXES, MIN_SCORE
from haav.weights import hub

DETR_MODEL = "PekingU/rtdetr_r50vd"
"""RT-DETR with ResNet-50: its backbone is transformers' own (DETR's main revision asks for timm), its weights are
safetensors, and one fixed input size lets any photos share a batch without padding."""


@extractors.register("detr_objects")
class DetrObjectsExtractor(Extractor):
    """The detector's boxes, the surest first: the decoder's last state of the query, class probabilities, score.

    A box is one query, and queries are trained not to repeat each other: nothing is suppressed. Labels are class
    names. Takes the models of AutoModelForObjectDetection: DETR and its successors, YOLOS.
    """

    name = "detr_objects"
    licence = "Apache-2.0 (of the default model; another model's: see its page)"
    gives = ("boxes",)

    def __init__(self, detr_model: str | Path = DETR_MODEL, device: str = "cpu") -> None:
        super().__init__(device)
        self.model = hub.find_hub_model(detr_model, "detr_model")
        self.network = hub.load_network(self.model, "AutoModelForObjectDetection", device)
        self.prepare = hub.load_preparation(self.model, None)
        config = self.network.config
        self.names = tuple(config.id2label.get(number, str(number)) for number in range(config.num_labels))
        queries = getattr(config, "num_queries", MAX_BOXES)
        self.spec = ViewSpec(config.hidden_size + len(self.names) + 1, min(MAX_BOXES, queries), boxes=True)

    @property
    def fingerprint(self) -> str:
        return f"detr-{self.model.fingerprint}-{self.prepare.fingerprint}-1"

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        pictures = [self.prepare(image) for image in photos.images]
        # Photos of one size go together. Padding the others would change their numbers with their neighbours.
        together: dict[torch.Size, list[int]] = {}
        for number, picture in enumerate(pictures):
            together.setdefault(picture.shape, []).append(number)
        views: dict[int, PhotoView] = {}
        for numbers in together.values():
            found = self.network(torch.stack([pictures[number] for number in numbers]).to(self.device))
            # DETR's decoder has a state for each query; YOLOS has them behind those of its patches.
            states = found.last_hidden_state[:, -found.logits.shape[1] :]
            for number, *parts in zip(numbers, states, found.logits, found.pred_boxes, strict=True):
                views[number] = self._photo(*(part.cpu() for part in parts))
        return [views[number] for number in range(len(pictures))]

    def _photo(self, states: Tensor, logits: Tensor, boxes: Tensor) -> PhotoView:
        """states (Q, D), logits (Q, classes [+ 1]), boxes (Q, 4) as centre and size"""
        probabilities = self._probabilities(logits)
        scores, classes = probabilities.max(dim=1)
        kept = scores.argsort(descending=True, stable=True)
        kept = kept[scores[kept] >= MIN_SCORE][:MAX_BOXES]
        tokens = torch.cat([states[kept], probabilities[kept], scores[kept, None]], dim=1)
        centre, size = boxes[kept, :2], boxes[kept, 2:]
        corners = torch.cat([centre - size / 2, centre + size / 2], dim=1).clamp(0, 1)
        return PhotoView(tokens, boxes=corners, labels=tuple(self.names[number] for number in classes[kept].tolist()))

    def _probabilities(self, logits: Tensor) -> Tensor:
        """(Q, classes): DETR's softmax has "no object" behind the classes, its successors have independent classes"""
        if logits.shape[1] == len(self.names) + 1:
            return logits.softmax(dim=1)[:, :-1]
        return logits.sigmoid()
