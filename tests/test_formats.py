"""Models and stores that version 0.1 wrote still load, and give the captions that they gave then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from haav import Captioner
from haav.data.collate import collate
from haav.store import Store

OLD = Path(__file__).parent / "golden" / "version-0.1"


def test_a_model_and_a_store_of_version_0_1_give_the_same_captions(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "old")  # LMDB writes a lock beside the data
    with Store(tmp_path / "old" / "store") as store:
        photos = store.ids("grid")
        extracted = {name: store.get_many(name, photos) for name in store.views}
    captioner = Captioner.from_pretrained(tmp_path / "old" / "model")
    captions = captioner.caption_views(collate(photos, extracted).views, min_words=5)
    for caption, old in zip(captions, json.loads((OLD / "captions.json").read_text()), strict=True):
        assert caption.text == old["text"]
        assert caption.logprob == pytest.approx(old["logprob"], abs=1e-5)
        for word, weights in zip(caption.words, old["views"], strict=True):
            assert word.views == pytest.approx(weights, abs=1e-6)
