"""Start from a trained model: keep what it can do, and add words that it does not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from haav.config import Config
from haav.data.loader import ShuffledBatches, StoredPhotos
from haav.data.mixture import Mixture
from haav.errors import ConfigError
from haav.model.build import resolve
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.pretrained import load_pretrained
from haav.store import Store
from haav.store.shards import ShardStore
from haav.text import SPECIAL, UNK, Vocabulary, tokenize

SHOWN = 12
"""words that a message names"""


def start_from(
    init: str | Path, config: Config, mixture: Mixture, store: Store | ShardStore, say: Callable[[str], None]
) -> tuple[Haav | Ensemble, Config, Vocabulary, int]:
    """The model of the directory `init` with the new words of the captions, the config with its settings, all words,
    and how many of them the model knew. `say` gets lines about the others."""
    model, known, vocabulary = load_pretrained(init)
    wanted = [name for name in config.data.views.split(",") if name]
    if wanted and set(wanted) != set(known.model.views):
        raise ConfigError(
            f"{init} reads {', '.join(known.model.views)}, and training it further cannot change that to "
            f"{', '.join(wanted)}.\n  Use --data.views {','.join(known.model.views)}, or leave --init out."
        )
    extended = vocabulary.extended(mixture.sentences, config.data.min_count)
    new = extended.words[len(vocabulary) :]
    rare = extended.unknown(mixture.sentences)
    if rare:
        say(
            f"{_named([word for word, _ in rare.most_common()])} will not be learnt: the model does not know "
            f"{'it' if len(rare) == 1 else 'them'}, and captions need a new word {config.data.min_count} times.\n"
            "  Caption more photos with it, write it another way, or lower --data.min_count."
        )
    if new:
        say(f"{_named(new)} will be learnt.")
        with_new = [photo for photo in mixture.train if set(new) & set(tokenize(" ".join(photo.captions)))]
        views, longest = tuple(known.model.views), config.decode.max_words - 1
        photos = StoredPhotos(store, views, with_new, extended, longest, known.made_by)
        shares = predicted_instead(model, photos, vocabulary)
        for member in model.members:
            member.decoder.add_words(shares)
    model.requires_grad_(True)
    settings = replace(known.model, vocabulary_size=len(extended))
    joined = replace(config, model=settings, made_by=known.made_by | config.made_by)
    able, _ = resolve(replace(joined, contrast=replace(config.contrast, enabled=None)))
    # The config was resolved for another model, perhaps for one with views to contrast.
    contrast = replace(config.contrast, enabled=bool(config.contrast.enabled and able.contrast.enabled))
    return model, replace(joined, contrast=contrast), extended, len(vocabulary)


@torch.no_grad()
def predicted_instead(model: Haav | Ensemble, photos: StoredPhotos, known: Vocabulary) -> Tensor:
    """What the model predicts where a new word stands: probabilities (new words, known words), each row sums to 1.

    Function words are left out: in front of a name, the model expects an article.
    """
    assert photos.vocabulary is not None
    # Tiny and not 0: a word that stands only behind the longest caption is the mean of all words.
    sums = torch.full((len(photos.vocabulary) - len(known), len(known)), 1e-9)
    for rows in ShuffledBatches(len(photos), batch=8, shuffle=False):
        batch = photos[rows]
        assert batch.captions is not None
        inputs = batch.captions[:, :, :-1].masked_fill(batch.captions[:, :, :-1] >= len(known), UNK)
        targets = batch.captions[:, :, 1:]
        places = targets >= len(known)
        probabilities = model(batch.views, inputs).logprobs[places].exp()
        sums.index_add_(0, targets[places] - len(known), probabilities)
    sums[:, [*range(len(SPECIAL)), *known.dangling]] = 0
    return sums / sums.sum(dim=1, keepdim=True)


def _named(words: Sequence[str]) -> str:
    """'bello', 'mimi' and 3 more words"""
    shown = [f"'{word}'" for word in words[:SHOWN]]
    if len(words) > SHOWN:
        return f"{', '.join(shown)} and {len(words) - SHOWN:,} more words"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
