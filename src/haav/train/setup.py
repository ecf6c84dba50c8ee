"""Build the parts of a run from its config: photos, vocabulary, model and objective.

The result depends only on the config and its seed, so a resumed run builds the same parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from haav import distributed
from haav.config import Config, DataConfig, to_dict
from haav.data.annotations import Photo, load_dataset
from haav.data.loader import StoredPhotos
from haav.data.mixture import Mixture, Source, load_mixture, parse_sources
from haav.data.toy import make_toy
from haav.errors import ConfigError
from haav.evaluate.reward import CiderReward
from haav.generate.build import build_rules
from haav.model.build import build_contrast, build_model, resolve
from haav.model.contrast import MomentumContrast
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.pretrained import load_pretrained
from haav.store import Store
from haav.store.shards import ShardStore, open_store
from haav.text import Vocabulary
from haav.train.objectives import CrossEntropy, Learner, Objective, SelfCritical


@dataclass(frozen=True)
class Setup:
    config: Config
    """includes the views and the vocabulary size of the data"""
    vocabulary: Vocabulary
    learner: Learner
    labelled: StoredPhotos
    unlabelled: StoredPhotos | None
    val: tuple[Photo, ...]
    store: Store | ShardStore
    fingerprint: str
    """hash of settings, words and photos; a checkpoint with another fingerprint is refused"""

    @property
    def model(self) -> Haav | Ensemble:
        return self.learner.model

    def close(self) -> None:
        """Close the stores. A process that trains many times would otherwise run out of file handles."""
        for store in (self.store, *([self.unlabelled.store] if self.unlabelled is not None else [])):
            if isinstance(store, Store):
                store.close()

    @property
    def saved_config(self) -> Config:
        """The config for a model directory, without paths of this machine"""
        return replace(self.config, data=DataConfig())


def prepare(config: Config, out: Path, init: str | Path | None = None, vocabulary: Vocabulary | None = None) -> Setup:
    """`init` is a model directory to start from. `vocabulary` is that of a resumed run, whose config is complete."""
    data = config.data
    if data.dataset == "toy":
        if distributed.rank() == 0:
            make_toy(out / "toy")
        distributed.wait()
        dataset_path, store_path = make_toy(out / "toy")
        sources: tuple[Source, ...] = (Source(str(dataset_path)),)
    elif not data.dataset or not data.store:
        raise ConfigError("training needs --data.dataset (captions and splits) and --data.store (their views).")
    else:
        sources, store_path = parse_sources(data.dataset), Path(data.store)
    mixture = load_mixture(sources, data.label_fraction, data.label_by, config.train.seed)
    if config.train.objective == "scst":
        mixture = mixture.with_references_only()
    if not mixture.train:
        raise ConfigError(f"{data.dataset} has no training photo with a caption that {config.train.objective} can use.")
    store = open_store(store_path)
    torch.manual_seed(config.train.seed)
    if vocabulary is not None:
        model = build_model(config.model)
    elif init is not None:
        model, known, vocabulary = load_pretrained(init)
        wanted = [name for name in data.views.split(",") if name]
        if wanted and set(wanted) != set(known.model.views):
            raise ConfigError(
                f"{init} reads {', '.join(known.model.views)}, and training it further cannot change that to "
                f"{', '.join(wanted)}.\n  Use --data.views {','.join(known.model.views)}, or leave --init out."
            )
        config = _with_makers(replace(config, model=known.model, made_by=known.made_by | config.made_by), store)
        model.requires_grad_(True)
    else:
        vocabulary = Vocabulary.build(mixture.sentences, data.min_count)
        config = _with_makers(_fit_to_data(config, store, vocabulary), store)
        model = build_model(config.model)
    contrast: MomentumContrast | None = None
    if config.contrast.enabled and config.train.contrast_weight and isinstance(model, Haav):
        contrast = build_contrast(model.encoding, config.model, config.contrast)
    objective = _objective(config, vocabulary, mixture.references)
    learner = Learner(model, contrast, objective, config.train.contrast_weight)
    views = tuple(config.model.views)
    further = _unlabelled(config, mixture, store, views)
    if further is not None and contrast is None:
        raise ConfigError("photos without captions teach the contrastive loss only, and it is off: nothing to do.")
    return Setup(
        config,
        vocabulary,
        learner,
        StoredPhotos(
            store, views, mixture.train, vocabulary, config.decode.max_words - 1, config.made_by, mixture.weights
        ),
        further,
        mixture.val,
        store,
        _fingerprint(config, vocabulary, mixture, further),
    )


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


def _objective(config: Config, vocabulary: Vocabulary, references: Mapping[str, tuple[str, ...]]) -> Objective:
    train = config.train
    if train.objective == "xe":
        return CrossEntropy(train.label_smoothing)
    reward = CiderReward(references, train.reward_end, train.reward_documents == "caption", train.distinct)
    rules = tuple(build_rules(config.decode, vocabulary))
    imitate = CrossEntropy(train.label_smoothing)
    return SelfCritical(
        reward, vocabulary, rules, train.hypotheses, train.explore, config.decode.max_words, imitate, train.xe_weight
    )


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


def _fingerprint(config: Config, vocabulary: Vocabulary, mixture: Mixture, further: StoredPhotos | None) -> str:
    """Hash of everything that must not change before a resume. Paths and the number of epochs may change."""
    settings = to_dict(replace(config, data=DataConfig()))
    del settings["train"]["epochs"], settings["made_by"]  # made_by is checked against the store, and old runs have none
    facts: list[object] = [
        settings,
        vocabulary.words,
        [photo.id for photo in mixture.train],
        further.ids if further else (),
    ]
    if mixture.weights is not None:
        facts.append(mixture.weights)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
