"""Extract the views of photos with numpy and onnxruntime.

The extractors are an exported graph. What is left to do is to resize photos and to look up sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from haav.errors import CheckpointError, ConfigError
from haav.files import json_of
from haav.photos.images import square_pixels

Arrays = dict[str, np.ndarray]
"""a view of one photo: `tokens`, positions by name, `boxes`, `sentences`"""

EXTRACTORS = "extractors.onnx"
ROWS, SENTENCES = "rows", "sentences"
"""of a text view: which sentences its tokens are, as the graph says; the sentences themselves"""


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


class PortableExtractors:
    def __init__(self, folder: Path, about: Mapping[str, Mapping[str, str]], threads: int) -> None:
        """`about`: the resampling of each input of the graph, and the file with the sentences of each text view"""
        self.session = session(folder / EXTRACTORS, threads)
        self.outputs = [output.name.rpartition(".") for output in self.session.get_outputs()]
        self.sizes = {
            value.name: (value.shape[2], Image.Resampling[about["inputs"][value.name]])
            for value in self.session.get_inputs()
        }
        files = {
            name: np.array(json_of((folder / name).read_text(encoding="utf-8")))
            for name in set(about["sentences"].values())
        }
        self.sentences = {view: files[name] for view, name in about["sentences"].items()}

    def __call__(self, images: Sequence[Image.Image]) -> dict[str, list[Arrays]]:
        photos = [self._views(image) for image in images]
        return {view: [photo[view] for photo in photos] for view, _, _ in self.outputs}

    def _views(self, image: Image.Image) -> dict[str, Arrays]:
        feed = {name: square_pixels([image], *size) for name, size in self.sizes.items()}
        views: dict[str, Arrays] = {}
        for (view, _, part), value in zip(self.outputs, self.session.run(None, feed), strict=True):
            views.setdefault(view, {})[part] = value
        for view, sentences in self.sentences.items():
            views[view][SENTENCES] = sentences[views[view].pop(ROWS)]
        return views
