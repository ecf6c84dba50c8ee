"""Base data for a model that comes without photos: captions of its text database, with their neighbours as text views.

A model that is trained on a few new photos forgets others, and says new words everywhere. The text database holds
captions of many other photos. Each stands for a photo of which the model sees the text views only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from haav import distributed
from haav.data.annotations import load_dataset
from haav.data.loader import StoredPhotos
from haav.files import write_atomically
from haav.pretrained import find_model, read_config
from haav.store import Store, ViewManifest
from haav.text import Vocabulary
from haav.types import ViewSpec
from haav.views import views_that_give
from haav.views.live import TEXTDB, own_texts
from haav.views.retrieval.text import load_textdb, text_view
from haav.views.retrieval.textdb import Entry, TextDatabase, sample_entries

CAPTIONS, STORE = "captions.jsonl", "store"
SIZE = 1000
"""captions that are taken from a database"""


def rehearse(init: str | Path, folder: Path) -> bool:
    """Make base data in `folder` from the text database of a packed model. False if it has none."""
    specs, paths = read_config(init).model.views, own_texts(find_model(init))
    if TEXTDB not in paths or not views_that_give("sentences", specs):
        return False
    if distributed.rank() == 0:
        write_rehearsal(folder, load_textdb(paths[TEXTDB]), specs)
    distributed.wait()
    return True


def write_rehearsal(folder: Path, textdb: TextDatabase, specs: Mapping[str, ViewSpec], size: int = SIZE) -> None:
    """A data set and a view store of `size` captions. A caption is never among its own neighbours."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before it began
    # Each caption owns itself: a search leaves out the captions of the asking photo.
    owned = TextDatabase([Entry(text, (text,)) for text in textdb.sentences], textdb.vectors, textdb.manifest)
    captions = [entry.sentence for entry in sample_entries(owned.entries, size)]
    vectors = torch.stack([textdb.vectors[owned.rows_of(caption)[0]] for caption in captions])
    names = [f"caption {number}" for number in range(len(captions))]
    views = {view: specs[view] for view in views_that_give("sentences", specs)}
    _, nearest = owned.search(vectors, max(spec.indices["rank"] for spec in views.values()), exclude_owner=captions)
    with Store(folder / STORE, write=True) as store:
        for view, spec in views.items():
            crops, per_crop = spec.indices["crop"], spec.indices["rank"]
            records = [text_view(textdb, rows[:per_crop].expand(crops, -1)) for rows in nearest]
            store.add_view(view, ViewManifest(spec, textdb.origin))
            store.put(view, dict(zip(names, records, strict=True)))
    rows = [{"image": name, "caption": caption} for name, caption in zip(names, captions, strict=True)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_atomically(folder / CAPTIONS, lambda path: path.write_text(text, encoding="utf-8"))


def read_rehearsal(folder: Path, vocabulary: Vocabulary, max_words: int) -> StoredPhotos:
    store = Store(folder / STORE)
    return StoredPhotos(store, sorted(store.views), load_dataset(folder / CAPTIONS).photos, vocabulary, max_words)
