"""Extract the embedded views of photos with numpy and onnxruntime, as `haav.views` does with torch.

One exported graph contains both networks, the pooling under fixed boxes and the bridge. The selection of boxes and the
search for sentences depend on the photo and are done here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors import SafetensorError
from safetensors.numpy import load_file

from haav.errors import CheckpointError, ConfigError
from haav.files import json_of

SMALL, LARGE = "pixels.small", "pixels.large"
"""inputs: square pictures for EfficientNet and for YOLO"""
BOXES, SCORES, DEEP, FINE = DETECTIONS = (".boxes", ".scores", ".deep", ".fine")
"""suffixes of outputs of a view of detected objects: the inputs of the selection of boxes"""
SUPPRESS = "suppress"
"""key of such a view in `portable.json`: the parameters of the selection"""
QUERY = ".query"
"""suffix of the output of a text view: the query for its sentences"""
SENTENCES = "sentences"
"""key of a view of one photo: the texts of its tokens"""


def session(path: Path, threads: int) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise ConfigError("onnxruntime is not installed.\n  pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a dozen exception types without a common base
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


class PortableEyes:
    def __init__(self, graph: Path, texts: Path, views: Mapping[str, Any], threads: int) -> None:
        self.views = dict(views)
        self.session = session(graph, threads)
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.sides = {value.name: value.shape[2] for value in self.session.get_inputs()}
        self.texts = Texts(texts) if any(name + QUERY in self.outputs for name in views) else None

    def __call__(self, images: Sequence[Image.Image]) -> dict[str, list[dict[str, np.ndarray]]]:
        resampling = {SMALL: Image.Resampling.BICUBIC, LARGE: Image.Resampling.BILINEAR}
        feed = {name: _pixels(images, side, resampling[name]) for name, side in self.sides.items()}
        outputs = dict(zip(self.outputs, self.session.run(None, feed), strict=True))
        return {name: [self._view(name, outputs, photo) for photo in range(len(images))] for name in self.views}

    def _view(self, name: str, outputs: Mapping[str, np.ndarray], photo: int) -> dict[str, np.ndarray]:
        about = self.views[name]
        if SUPPRESS in about:
            return objects({part: outputs[name + part][photo] for part in DETECTIONS}, **about[SUPPRESS])
        if name + QUERY in outputs:
            assert self.texts is not None
            rows = self.texts.nearest(outputs[name + QUERY][photo], about["indices"]["rank"])
            tokens, more = self.texts.vectors[rows], {SENTENCES: self.texts.sentences[rows]}
        else:
            tokens, more = outputs[name][photo], {}
        # Tokens are in row-major order: the first index varies slowest.
        (_, (inner, size)) = about["indices"].items()
        places = np.arange(len(tokens))
        outer = next(iter(about["indices"]))
        return {"tokens": tokens, outer: places // size, inner: places % size, **more}


class Texts:
    """Sentences and their vectors."""

    def __init__(self, folder: Path) -> None:
        try:
            tensors = load_file(folder / "vectors.safetensors")
            lines = (folder / "entries.jsonl").read_text(encoding="utf-8").splitlines()
            self.sentences = np.array([str(json_of(line)[0]) for line in lines])
            self.vectors = tensors["vectors"].astype(np.float32)
            if "scales" in tensors:
                self.vectors *= tensors["scales"]
        except (OSError, ValueError, KeyError, TypeError, IndexError, SafetensorError) as error:
            raise CheckpointError(f"text database {folder} is damaged: {error}.") from None

    def nearest(self, queries: np.ndarray, count: int) -> np.ndarray:
        """queries (crops, D) → rows (crops × count) of the nearest sentences, crop by crop, nearest first"""
        scores = queries @ self.vectors.T
        some = np.argpartition(-scores, count, axis=1)[:, :count]
        order = np.argsort(-np.take_along_axis(scores, some, axis=1), axis=1, kind="stable")
        return np.take_along_axis(some, order, axis=1).ravel()


def objects(
    detections: Mapping[str, np.ndarray], min_score: float, max_overlap: float, max_boxes: int
) -> dict[str, np.ndarray]:
    """Boxes of one photo after non-maximum suppression per class, highest score first, with pooled features"""
    scores = detections[SCORES]
    best, classes = scores.max(axis=1), scores.argmax(axis=1)
    order = np.argsort(-best, kind="stable")
    order = order[best[order] >= np.float32(min_score)][:500]
    boxes = detections[BOXES][order]
    alive = np.ones(len(order), bool)
    for row in range(len(order)):
        if alive[row]:
            rest = slice(row + 1, None)
            same = classes[order[rest]] == classes[order[row]]
            alive[rest] &= ~(same & (overlaps(boxes[row], boxes[rest]) > np.float32(max_overlap)))
    kept = order[alive][:max_boxes]
    boxes = detections[BOXES][kept].clip(0, 1)
    pooled = [pool(detections[name], boxes) for name in (DEEP, FINE)]
    tokens = np.concatenate([*pooled, scores[kept], best[kept, None]], axis=1).astype(np.float32)
    return {"tokens": tokens, "boxes": boxes}


def overlaps(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of a box with each of the others"""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    shared = (high - low).clip(min=0).prod(axis=1)
    areas = (others[:, 2:] - others[:, :2]).prod(axis=1)
    union = (box[2:] - box[:2]).prod() + areas - shared
    ratios: np.ndarray = shared / union.clip(min=1e-9)
    return ratios


def pool(features: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """features (D, H, W), boxes (N, 4) as fractions → (N, D): the area-weighted mean under each box"""
    _, height, width = features.shape
    boxes = boxes.astype(np.float64)
    across, down = _cover(boxes[:, 0], boxes[:, 2], width), _cover(boxes[:, 1], boxes[:, 3], height)
    pooled: np.ndarray = np.einsum("dhw,nh,nw->nd", features.astype(np.float64), down, across, optimize=True)
    return pooled


def _cover(low: np.ndarray, high: np.ndarray, cells: int) -> np.ndarray:
    """(N, cells): share of each span in each cell. A span is at least a hundredth of a cell wide."""
    start = (low * cells).clip(0, cells - 0.01)
    stop = np.maximum((high * cells).clip(0, cells), start + 0.01)
    edges = np.arange(cells)
    inside = (np.minimum(stop[:, None], edges + 1) - np.maximum(start[:, None], edges)).clip(min=0)
    covered: np.ndarray = inside / (stop - start)[:, None]
    return covered


def _pixels(images: Sequence[Image.Image], side: int, resample: Image.Resampling) -> np.ndarray:
    """(B, 3, side, side) uint8 RGB, the whole photo squeezed into a square"""
    arrays = np.stack([np.asarray(image.resize((side, side), resample)) for image in images])
    return np.ascontiguousarray(arrays.transpose(0, 3, 1, 2))
