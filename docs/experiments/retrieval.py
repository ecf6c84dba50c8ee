"""Sentences for a photo: by the bridge, by the captions of similar photos, or both.

$ python docs/experiments/retrieval.py OUT        # the folder that eyes.sh filled

Prints for each way, over 1,000 val photos with 16 sentences each: the mean cosine of a sentence to the nearest of the
photo's own captions, CIDEr of the first sentence, and CIDEr of the sentence that agrees most with the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from haav.data.annotations import load_dataset
from haav.evaluate.scores import SLOW, evaluate
from haav.store import Store
from haav.views.retrieval.bridge import CrossFitted
from haav.views.retrieval.build import region_features
from haav.views.retrieval.sentences import MiniLM
from haav.views.retrieval.textdb import TextDatabase

SENTENCES, PICTURES = 16, 12


def main(out: Path) -> None:
    dataset, texts = load_dataset(out / "dataset.json.gz"), TextDatabase.load(out / "texts")
    bridge = CrossFitted.load(out / "bridge")
    train = [photo.id for photo in dataset.split("train") if texts.rows_of(photo.id)]
    val = [photo for photo in dataset.split("val") if photo.captions]
    with Store(out / "views") as store:
        known, asked = (region_features(store, bridge.view, ids)[:, 0].float() for ids in (train, [p.id for p in val]))
    captions = [texts.rows_of(photo) for photo in train]
    own = MiniLM().encode([text for photo in val for text in photo.captions]).float()
    own_of = own.split([len(photo.captions) for photo in val])
    references = {photo.id: photo.captions for photo in val}

    def show(name: str, rows: Sequence[Tensor]) -> None:
        vectors = [texts.vectors[each].float() for each in rows]
        near = [(each @ true.T).amax(dim=1).mean() for each, true in zip(vectors, own_of, strict=True)]
        agreed = [each[(one @ one.T).sum(dim=1).argmax()] for each, one in zip(rows, vectors, strict=True)]
        scores = []
        for chosen in ([each[0] for each in rows], agreed):
            said = {photo.id: texts.entries[int(row)].sentence for photo, row in zip(val, chosen, strict=True)}
            scores.append(100 * evaluate(said, references, skip=SLOW, resamples=1).scores["CIDEr"].value)
        print(f"| {name} | {torch.stack(near).mean():.3f} | {scores[0]:.1f} | {scores[1]:.1f} |", flush=True)

    with torch.no_grad():
        queries, served = bridge.bridges[0](asked), bridge.bridges[0](known)
    _, by_bridge = texts.search(queries, SENTENCES)
    print("| sentences | cosine | first, CIDEr | consensus, CIDEr |\n|---|---|---|---|")
    show("bridge", list(by_bridge))
    centre = known.mean(dim=0)
    spaces = {
        "CLIP's features": (F.normalize(known - centre, dim=1), F.normalize(asked - centre, dim=1)),
        "the bridge's space": (served, queries),
    }
    for name, (one, other) in spaces.items():
        similar = (other @ one.T).topk(PICTURES, dim=1).indices.tolist()
        pools = [torch.tensor([row for photo in photos for row in captions[photo]]) for photos in similar]
        pictures = [pool[:SENTENCES] for pool in pools]
        show(f"captions of similar photos, by {name}", pictures)
        both = [torch.stack([a, b], dim=1).flatten() for a, b in zip(by_bridge, pictures, strict=True)]
        show("both, in turn", [torch.tensor(list(dict.fromkeys(each.tolist()))[:SENTENCES]) for each in both])
        ranked = []
        for pool, query in zip(pools, queries, strict=True):
            order = (texts.vectors[pool].float() @ query).argsort(descending=True)
            ranked.append(pool[order[:SENTENCES]])
        show(f"captions of {PICTURES} similar photos, ranked by the bridge", ranked)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
