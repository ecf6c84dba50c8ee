"""Build the parts of a run from its config: photos, vocabulary, model and objective.

The result depends only on the config and its seed, so a resumed run builds the same parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from haav import distributed
from haav.config import Config, DataConfig, to_dict
from haav.data.annotations import load_dataset
from haav.data.dataset import Photo, ids_of
from haav.data.loader import StoredPhotos
from haav.data.mixture import Mixture, Source, load_mixture, parse_sources
from haav.data.toy import make_toy
from haav.errors import ConfigError
from haav.evaluate.reward import CiderReward
from haav.generate.build import build_rules
from haav.inference.novelty import Novelty, save_novelty
from haav.model.build import build_contrast, build_model, resolve
from haav.model.contrast import MomentumContrast
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.model.recompute import recompute
from haav.pretrained import find_model
from haav.store import Store
from haav.store.shards import ShardStore, open_store
from haav.text import Vocabulary
from haav.train.objectives import CrossEntropy, Learner, Objective, SelfCritical, Start
from haav.train.rehearsal import read_rehearsal, rehearse
from haav.train.start import start_from

ADDED: dict[str, dict[str, object]] = {
    "model": {"decoder": "transformer"},
    "train": {"distinct": 0, "xe_weight": 0, "epoch_steps": 0, "keep_weight": 0},
    "decode": {"no_doubles": False},
}
"""settings that version 0.2.0 did not have, and what it did; while they are so, runs of that version can be resumed"""
REHEARSAL = "rehearsal"
"""folder of a run: base data from the text database of the model to start from"""


@dataclass(frozen=True)
class Setup:
    config: Config
    """includes the views and the vocabulary size of the data"""
    vocabulary: Vocabulary
    learner: Learner
    labelled: StoredPhotos
    unlabelled: StoredPhotos | None
    base: StoredPhotos | None
    """photos that the model to start from knows: it is kept near that model on these"""
    val: Sequence[Photo]
    novelty: Novelty | None
    """of the model to start from; it depends on views only, and is saved with the trained one"""
    store: Store | ShardStore
    fingerprint: str
    """hash of settings, words and photos; a checkpoint with another fingerprint is refused"""

    @property
    def model(self) -> Haav | Ensemble:
        return self.learner.model

    def close(self) -> None:
        """Close the stores. A process that trains many times would otherwise run out of file handles."""
        further = [photos.store for photos in (self.unlabelled, self.base) if photos is not None]
        for store in (self.store, *further):
            if isinstance(store, Store):
                store.close()

    @property
    def saved_config(self) -> Config:
        """The config for a model directory, without paths of this machine"""
        return replace(self.config, data=DataConfig())


def prepare(
    config: Config,
    out: Path,
    init: str | Path | None = None,
    vocabulary: Vocabulary | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Setup:
    """`init` is a model directory to start from. `vocabulary` is that of a resumed run, whose config is complete.
    `say` gets lines about words that are new."""
    data = config.data
    if data.dataset == "toy":
        if distributed.rank() == 0:
            make_toy(out / "toy")
        distributed.wait()
        dataset_path, toy_store = make_toy(out / "toy")
        sources: tuple[Source, ...] = (Source(str(dataset_path)),)
        store_path = str(toy_store)
    elif not data.dataset or not data.store:
        raise ConfigError("training needs --data.dataset (captions and splits) and --data.store (their views).")
    else:
        sources, store_path = parse_sources(data.dataset), data.store
    mixture = load_mixture(sources, data.label_fraction, data.label_by, config.train.seed)
    if config.train.objective == "scst":
        mixture = mixture.with_references_only()
    if not mixture.train:
        raise ConfigError(f"{data.dataset} has no training photo with a caption that {config.train.objective} can use.")
    store = open_store(store_path)
    torch.manual_seed(config.train.seed)
    known_words = 0  # of a resumed run, it is in the checkpoint
    if vocabulary is not None:
        model = build_model(config.model)
    elif init is not None:
        if config.train.keep_weight and not mixture.base and not rehearse(init, out / REHEARSAL):
            say(
                f"nothing keeps the model from forgetting: {init} has no text database.\n"
                "  Start from a packed model (haav pack), or name data that it knows: --data.dataset MINE,KNOWN:base."
            )
            config = _without_start(config)
        model, config, vocabulary, known_words = start_from(init, config, mixture, store, say)
        config = _with_makers(config, store)
        _save_novelty(out, Novelty.load(find_model(init), _widths(config)))
    else:
        _save_novelty(out, None)
        vocabulary = Vocabulary.build(mixture.sentences, data.min_count)
        config = _without_start(_with_makers(_fit_to_data(config, store, vocabulary), store))
        model = build_model(config.model)
    views = tuple(config.model.views)
    longest = config.decode.max_words - 1
    base = _base(config, mixture, store, out, vocabulary)
    start = None if base is None else Start(model, known_words, config.train.keep_weight)
    learner = build_learner(config, model, _objective(config, vocabulary, mixture), start)
    further = _unlabelled(config, mixture, store, views)
    if further is not None and learner.contrast is None:
        raise ConfigError("photos without captions teach the contrastive loss only, and it is off: nothing to do.")
    labelled = StoredPhotos(store, views, mixture.train, vocabulary, longest, config.made_by, mixture.weights)
    return Setup(
        config,
        vocabulary,
        learner,
        labelled,
        further,
        base,
        mixture.val,
        Novelty.load(out, _widths(config)),
        store,
        _fingerprint(config, vocabulary, mixture, further, base),
    )


def build_learner(config: Config, model: Haav | Ensemble, objective: Objective, start: Start | None = None) -> Learner:
    """All that is trained: the model, and the contrastive head where the config asks for it"""
    contrast: MomentumContrast | None = None
    if config.contrast.enabled and config.train.contrast_weight and isinstance(model, Haav):
        contrast = build_contrast(model.encoding, config.model, config.contrast)
    if config.train.recompute:
        recompute(model)
    return Learner(model, contrast, objective, config.train.contrast_weight, start)


def _save_novelty(out: Path, novelty: Novelty | None) -> None:
    if distributed.rank() == 0:
        save_novelty(out, novelty)
    distributed.wait()


def _widths(config: Config) -> dict[str, int]:
    return {name: spec.dim for name, spec in config.model.views.items()}


def _fit_to_data(config: Config, store: Store | ShardStore, vocabulary: Vocabulary) -> Config:
    """Take the specs of the views from the store, and the vocabulary size from the captions."""
    names = [name for name in config.data.views.split(",") if name] or list(config.model.views)
    missing = [name for name in names if name not in store.views]
    if missing:
        raise ConfigError(
            f"view '{missing[0]}' is not in the store, which has {', '.join(sorted(store.views))}.\n"
            "  Choose among them with --data.views, or extract it: haav extract."
        )
    specs = {name: store.views[name].spec for name in names}
    model = replace(config.model, views=specs, vocabulary_size=len(vocabulary))
    config, problems = resolve(replace(config, model=model))
    if problems:
        raise ConfigError.of(problems)
    return config


def _with_makers(config: Config, store: Store | ShardStore) -> Config:
    """Record the extractors of the views in the config. Entries of the config take precedence over the store."""
    manifests = store.views
    made = {name: (manifests[name].made_by,) for name in config.model.views if name in manifests}
    return replace(config, made_by={name: config.made_by.get(name) or made[name] for name in made})


def _objective(config: Config, vocabulary: Vocabulary, mixture: Mixture) -> Objective:
    train = config.train
    if train.objective == "xe":
        return CrossEntropy(train.label_smoothing)
    reward = CiderReward(mixture.references, train.reward_end, train.reward_documents == "caption", train.distinct)
    rules = tuple(build_rules(config.decode, vocabulary))
    imitate = CrossEntropy(train.label_smoothing)
    return SelfCritical(
        reward, vocabulary, rules, train.hypotheses, train.explore, config.decode.max_words, imitate, train.xe_weight
    )


def _without_start(config: Config) -> Config:
    return replace(config, train=replace(config.train, keep_weight=0.0))


def _base(
    config: Config, mixture: Mixture, store: Store | ShardStore, out: Path, vocabulary: Vocabulary
) -> StoredPhotos | None:
    """Photos that the model to start from knows: those of the data sets, or captions of its text database"""
    longest = config.decode.max_words - 1
    if config.train.keep_weight and mixture.base:
        return StoredPhotos(store, tuple(config.model.views), mixture.base, vocabulary, longest, config.made_by)
    if mixture.base:
        raise ConfigError("base data keeps a model from forgetting: it needs --init and --train.keep_weight above 0.")
    return read_rehearsal(out / REHEARSAL, vocabulary, longest) if config.train.keep_weight else None


def _unlabelled(
    config: Config, mixture: Mixture, store: Store | ShardStore, views: tuple[str, ...]
) -> StoredPhotos | None:
    """Photos of another data set, or the training photos without captions"""
    if not config.train.unlabelled_batch:
        return None
    data = config.data
    if data.unlabelled:
        photos = load_dataset(data.unlabelled).split("train")
        store = open_store(data.unlabelled_store or data.store)
    else:
        photos = mixture.unlabelled
    if not photos:
        raise ConfigError(
            "train.unlabelled_batch asks for photos without captions, and there are none.\n"
            "  Name some with --data.unlabelled and --data.unlabelled_store, or lower --data.label_fraction."
        )
    return StoredPhotos(store, views, photos, vocabulary=None, made_by=config.made_by)


def _fingerprint(
    config: Config,
    vocabulary: Vocabulary,
    mixture: Mixture,
    further: StoredPhotos | None,
    base: StoredPhotos | None,
) -> str:
    """Hash of everything that must not change before a resume. Paths, the number of epochs and what changes no bits
    may change."""
    settings = to_dict(replace(config, data=DataConfig()))
    for section, defaults in ADDED.items():
        for name, value in defaults.items():
            if settings[section][name] == value:
                del settings[section][name]
    del settings["train"]["epochs"], settings["train"]["recompute"]
    del settings["made_by"]  # made_by is checked against the store, and old runs have none
    lists: list[Iterable[object]] = [vocabulary.words, ids_of(mixture.train), further.ids if further else ()]
    if mixture.weights is not None:
        lists.append(mixture.weights)
    if base is not None:
        lists.append(base.ids)
    digest = hashlib.sha256()
    for text in _json_of(settings, lists):
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def _json_of(settings: object, lists: Iterable[Iterable[object]]) -> Iterator[str]:
    """`json.dumps([settings, *lists])` in parts, so that no list has to be in memory"""
    yield "[" + json.dumps(settings)
    for items in lists:
        yield ", ["
        for index, item in enumerate(items):
            yield (", " if index else "") + json.dumps(item)
        yield "]"
    yield "]"
