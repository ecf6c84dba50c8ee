"""Objects detected by a detection transformer of the hub."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from haav.types import PhotoView, ViewSpec
from haav.views.base import Extractor, PhotoBatch, extractors
from haav.views.embedded.objects import MAX_BOXES, MIN_SCORE
from haav.weights import hub

DETR_MODEL = "PekingU/rtdetr_r50vd"
"""RT-DETR with ResNet-50. Its backbone is part of transformers (DETR's main revision needs timm). Its weights are
safetensors. Its input size is fixed, so any photos can share a batch without padding."""


@extractors.register("detr_objects")
class DetrObjectsExtractor(Extractor):
    """The detector's boxes, the highest score first: the query's last decoder state, class probabilities, score.

    Each box is one query. Queries are trained not to repeat each other, so there is no suppression. Labels are class
    names. Models of AutoModelForObjectDetection are supported: DETR and its successors, YOLOS.
    """

    name = "detr_objects"
    title = "objects found"
    licence = "Apache-2.0 (of the default model; another model's: see its page)"
    gives = ("boxes",)

    def __init__(self, detr_model: str | Path = DETR_MODEL, device: str = "cpu") -> None:
        super().__init__(device)
        self.model = hub.find_hub_model(detr_model, "detr_model")
        self.network = hub.load_network(self.model, "AutoModelForObjectDetection", device)
        self.prepare = hub.load_preparation(self.model, None)
        config = self.network.config
        self.names = tuple(config.id2label.get(index, str(index)) for index in range(config.num_labels))
        queries = getattr(config, "num_queries", MAX_BOXES)
        self.spec = ViewSpec(config.hidden_size + len(self.names) + 1, min(MAX_BOXES, queries), boxes=True)

    @property
    def fingerprint(self) -> str:
        return f"detr-{self.model.fingerprint}-{self.prepare.fingerprint}-1"

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        pictures = [self.prepare(image) for image in photos.images]
        # Only photos of the same size share a batch. With padding, tokens would depend on the rest of the batch.
        by_shape: dict[torch.Size, list[int]] = {}
        for index, picture in enumerate(pictures):
            by_shape.setdefault(picture.shape, []).append(index)
        views: dict[int, PhotoView] = {}
        for indices in by_shape.values():
            output = self.network(torch.stack([pictures[index] for index in indices]).to(self.device))
            # DETR's decoder has one state per query. In YOLOS they follow the states of the patches.
            states = output.last_hidden_state[:, -output.logits.shape[1] :]
            for index, *parts in zip(indices, states, output.logits, output.pred_boxes, strict=True):
                views[index] = self._photo(*(part.cpu() for part in parts))
        return [views[index] for index in range(len(pictures))]

    def _photo(self, states: Tensor, logits: Tensor, boxes: Tensor) -> PhotoView:
        """states (Q, D), logits (Q, classes [+ 1]), boxes (Q, 4) as centre and size"""
        probabilities = self._probabilities(logits)
        scores, classes = probabilities.max(dim=1)
        kept = scores.argsort(descending=True, stable=True)
        kept = kept[scores[kept] >= MIN_SCORE][:MAX_BOXES]
        tokens = torch.cat([states[kept], probabilities[kept], scores[kept, None]], dim=1)
        centre, size = boxes[kept, :2], boxes[kept, 2:]
        corners = torch.cat([centre - size / 2, centre + size / 2], dim=1).clamp(0, 1)
        return PhotoView(tokens, boxes=corners, labels=tuple(self.names[index] for index in classes[kept].tolist()))

    def _probabilities(self, logits: Tensor) -> Tensor:
        """(Q, classes): DETR's softmax has "no object" after the classes; its successors have independent classes"""
        if logits.shape[1] == len(self.names) + 1:
            return logits.softmax(dim=1)[:, :-1]
        return logits.sigmoid()
