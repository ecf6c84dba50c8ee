"""Does the bridge know which of a model's captions fits the photo best?

    python rerank.py MODEL STORE DATASET OUT.json [words]

MODEL: packed, with its bridge; STORE: with its views and patch_regions of the val photos of DATASET. The captions of
the beam are ranked by log-probability + consensus · agreement + bridge · cosine, where the cosine is that of the
caption's sentence vector (MiniLM) and the photo's vector through the bridge. With `words`, the sentence vector is a sum
of word vectors, fitted to the text database of the model. The weights are chosen on the first half of the photos and
scored on the second. OUT.json has the captions with the chosen weights, of all photos.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import haav
from haav.data.annotations import load_dataset
from haav.data.loader import ShuffledBatches, StoredPhotos, build_loader
from haav.evaluate.scores import SLOW, evaluate
from haav.generate.consensus import Consensus
from haav.pretrained import find_model
from haav.store import open_store
from haav.text import Vocabulary, tokenize
from haav.views.retrieval.bridge import CrossFitted
from haav.views.retrieval.sentences import MiniLM
from haav.views.retrieval.textdb import TextDatabase

CONSENSUS, BRIDGE = (0, 100, 200, 400), (0, 10, 20, 40, 80)


class WordSums:
    """Sentence vectors as sums of word vectors: ridge regression on the sentences of a text database"""

    def __init__(self, model: str, vocabulary: Vocabulary) -> None:
        texts = TextDatabase.load(find_model(model) / "textdb")
        self.ids = vocabulary.ids
        counts = torch.zeros(len(texts), len(vocabulary))
        for row, sentence in enumerate(texts.sentences):
            for word in self._words(sentence):
                counts[row, word] += 1
        gram = counts.T @ counts + torch.eye(len(vocabulary))
        self.vectors = torch.linalg.solve(gram, counts.T @ texts.vectors.float())

    def __call__(self, sentences: Sequence[str]) -> Tensor:
        return F.normalize(torch.stack([self.vectors[self._words(text)].sum(dim=0) for text in sentences]), dim=1)

    def _words(self, sentence: str) -> list[int]:
        return [self.ids[word] for word in tokenize(sentence) if word in self.ids]


@torch.no_grad()
def main(model: str, store_path: str, dataset: str, out: str, encoder: str = "minilm") -> None:
    captioner, store = haav.load(model), open_store(store_path)
    photos = load_dataset(dataset).split("val")
    references = {photo.id: photo.captions for photo in photos}
    stored = StoredPhotos(store, captioner.views, photos, vocabulary=None)
    agree, beams, sentences = Consensus(captioner.vocabulary), {}, {}
    for batch in build_loader(stored, ShuffledBatches(len(stored), 50, shuffle=False), workers=0):
        found = captioner.caption_views(batch.views, n_best=5)
        for photo, texts, caption in zip(batch.ids, batch.views["text_whole"].labels, found, strict=True):
            beams[photo], sentences[photo] = (caption, *caption.n_best), texts[:16]
        print(f"{len(beams):,} photos", file=sys.stderr)
    every_text = sorted({caption.text for captions in beams.values() for caption in captions})
    encode = MiniLM().encode if encoder == "minilm" else WordSums(model, captioner.vocabulary)
    vectors = dict(zip(every_text, encode(every_text).float(), strict=True))
    bridge = CrossFitted.load(find_model(model) / "bridge")
    ids = [photo.id for photo in photos]
    regions = torch.stack([view.tokens[:1] for view in store.get_many("patch_regions", ids)]).float()
    queries = dict(zip(ids, bridge(regions, ids)[:, 0], strict=True))
    features = {
        photo: np.array(
            [
                [caption.logprob for caption in captions],
                agree([tokenize(caption.text) for caption in captions], sentences[photo]),
                [float(vectors[caption.text] @ queries[photo]) for caption in captions],
            ]
        )
        for photo, captions in beams.items()
    }

    def chosen(weights: tuple[float, float], some: list[str]) -> dict[str, str]:
        mix = np.array([1.0, *weights])
        return {photo: beams[photo][int((mix @ features[photo]).argmax())].text for photo in some}

    def cider(weights: tuple[float, float], some: list[str]) -> float:
        scores = evaluate(chosen(weights, some), {p: references[p] for p in some}, skip=SLOW, resamples=1).scores
        return 100 * scores["CIDEr"].value

    half = len(ids) // 2
    first = {weights: cider(weights, ids[:half]) for weights in product(CONSENSUS, BRIDGE)}
    for weights, score in first.items():
        print(f"consensus {weights[0]}, bridge {weights[1]}: {score:.1f} on the first half")
    best = max(first, key=lambda weights: first[weights])
    plain = max((weights for weights in first if not weights[1]), key=lambda weights: first[weights])
    for name, weights in (("with the bridge", best), ("without", plain)):
        print(f"{name} {weights}: second half {cider(weights, ids[half:]):.1f}, all {cider(weights, ids):.1f}")
    rows = [{"image_id": photo, "caption": text} for photo, text in chosen(best, ids).items()]
    Path(out).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
