"""Every setting, typed and frozen; read from layers of YAML and flags, all problems reported at once.

A setting is declared once, below, with its meaning and its range. `parse` merges sources
(preset, file, flags; later ones win), remembers where each value was written, and spells a
problem the way the user spelled the setting.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any, TypeVar, Union

from haav.errors import ConfigError, did_you_mean
from haav.types import ViewSpec

T = TypeVar("T")


def setting(
    default: Any,
    doc: str,
    low: float | None = None,
    below: float | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """A dataclass field with its meaning and range: low <= value < below, or one of `choices`."""
    metadata = {"doc": doc, "low": low, "below": below, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    """The network that is saved and that inference runs."""

    views: dict[str, ViewSpec] = field(default_factory=dict, metadata={"doc": "the views it reads, by name"})
    vocabulary_size: int = setting(10199, "words it can say, special ones included", low=5)
    encoding: str = setting("shared", "how views are encoded")
    aggregator: str = setting("auto", "how a word draws on the encoded views; auto: what suits the encoding")
    encoder_outputs: str = setting("last", "encoder layers the decoder sees", choices=("last", "all"))
    cls: str = setting(
        "learned", "[CLS] of a view: a learned token, or the mean of its tokens", choices=("learned", "mean")
    )
    d_model: int = setting(256, "width of every token", low=2)
    d_ff: int = setting(1024, "width inside the feed-forward blocks", low=1)
    heads: int = setting(8, "attention heads", low=1)
    encoder_layers: int = setting(3, "encoder layers (paper: N)", low=1)
    decoder_layers: int = setting(3, "decoder layers (paper: M)", low=1)
    memory_slots: int = setting(40, "learned key/value slots in each encoder self-attention", low=0)
    max_words: int = setting(54, "longest caption that has positions, end token included", low=1)
    dropout: float = setting(0.1, "dropout inside attention and feed-forward blocks", low=0, below=1)
    channel_dropout: float = setting(0.1, "share of a view's channels dropped (paper: p_c)", low=0, below=1)
    channel_dropout_unit: str = setting(
        "channel", "drop a channel across views and tokens, or single elements", choices=("channel", "element")
    )
    token_dropout: float = setting(0.1, "share of a view's tokens dropped (paper: p_s)", low=0, below=1)
    token_dropout_leaves: str = setting(
        "zero", "a dropped token becomes a zero vector, or padding", choices=("zero", "padding")
    )
    view_dropout: float = setting(0.1, "share of encoded views hidden from the decoder (paper: p_v)", low=0, below=1)
    view_dropout_draw: str = setting("photo", "drawn per photo, or once for the batch", choices=("photo", "batch"))


@dataclass(frozen=True)
class ContrastConfig:
    """The MoCo-v2 part: training state, never part of a saved model."""

    enabled: bool | None = setting(None, "train with it; null: wherever the encoding keeps two views apart")
    temperature: float = setting(0.06, "softmax temperature (paper: tau)", low=1e-6)
    momentum: float = setting(0.999, "how much of the momentum copy survives a step", low=0, below=1)
    queue_size: int = setting(8000, "keys of past photos kept as negatives (paper: K)", low=0)
    positives: str = setting(
        "others", "keys that count as positive: the photo's other views, or all of them", choices=("others", "all")
    )
    hidden: int = setting(1024, "width inside the projection head", low=1)


@dataclass(frozen=True)
class DecodeConfig:
    """How captions are written."""

    method: str = setting("beam", "search for the most probable caption, or draw one", choices=("beam", "sample"))
    beam: int = setting(5, "captions kept in the search; 1: greedy", low=1)
    keep_greedy: bool = setting(True, "the greedy caption keeps a place, so that the search never finds a worse one")
    length_penalty: float = setting(0.0, "captions compete by log-probability / words ** this", low=0, below=10)
    groups: int = setting(1, "groups of a diverse beam search; they divide the beam", low=1)
    diversity: float = setting(0.5, "what a word costs a group for each time a group before has chosen it", low=0)
    samples: int = setting(1, "captions to draw", low=1)
    temperature: float = setting(1.0, "sampling: below 1, nearer to the most probable word", low=1e-3)
    top_k: int = setting(0, "sampling: among so many most probable words; 0: all", low=0)
    top_p: float = setting(1.0, "sampling: among the most probable words that make up this much", low=0, below=1.000001)
    max_words: int = setting(20, "longest caption to write, end token included", low=1)
    min_words: int = setting(0, "least words of a caption", low=0)
    no_repeat: int = setting(3, "so many words in a row are not said twice; 0: they may be", low=0)
    allow_unk: bool = setting(False, "<unk> may be said")
    allow_cut: bool = setting(False, 'captions may stop short, at max_words or after a word like "with"')
    collapse_repeats: bool = setting(False, "a word that follows itself is shown once")
    consensus: float = setting(0.0, "what full agreement with the photo's retrieved sentences adds to a caption", low=0)
    consensus_of: int = setting(8, "retrieved sentences that are asked, the nearest", low=1)


@dataclass(frozen=True)
class ConfidenceConfig:
    """How sure a word's probability makes us that people would use the word; `haav calibrate` fits it."""

    offset: float = setting(0.0, "confidence = sigmoid(offset + slope · logit(probability))")
    slope: float = setting(1.0, "1 and offset 0: the model's own probability")


@dataclass(frozen=True)
class DataConfig:
    """What a model is trained on. Left out of saved models: it names files of one machine."""

    dataset: str = setting("", 'captions and splits (docs/views.md); "toy": made up on the spot')
    store: str = setting("", "view store with the photos' views")
    views: str = setting("", "views to train on, with commas; empty: the model's own")
    unlabelled: str = setting("", "further photos, whose captions are not looked at: a data set; empty: none")
    unlabelled_store: str = setting("", "view store of the further photos")
    label_fraction: float = setting(1.0, "share of the training photos or captions that keep their labels", low=0)
    label_by: str = setting("photo", "what the share is of", choices=("photo", "caption"))
    min_count: int = setting(5, "words seen less often are <unk>", low=1)


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained."""

    objective: str = setting("xe", "imitate captions, or earn CIDEr (self-critical)", choices=("xe", "scst"))
    epochs: int = setting(20, "passes over the labelled photos", low=1)
    batch: int = setting(50, "labelled photos a step", low=1)
    unlabelled_batch: int = setting(0, "further photos a step, for the contrastive loss only", low=0)
    captions: int = setting(5, "captions of a photo used in a step, drawn anew each epoch", low=1)
    lr: float = setting(2e-5, "learning rate", low=0)
    schedule: str = setting("constant", "of the learning rate after warm-up", choices=("constant", "cosine", "cyclic"))
    warmup_steps: int = setting(10000, "steps over which it rises from 0", low=0)
    weight_decay: float = setting(0.05, "AdamW's", low=0)
    decay_all: bool = setting(False, "decay norms and biases too")
    clip: float = setting(1.0, "largest gradient norm; 0: any", low=0)
    accumulate: int = setting(1, "batches a step", low=1)
    label_smoothing: float = setting(0.0, "share of probability spread over all words", low=0, below=1)
    ema: float = setting(
        0.0, "decay of an average of the weights that is evaluated and saved instead; 0: none", low=0, below=1
    )
    contrast_weight: float = setting(0.05, "weight of the contrastive loss", low=0)
    precision: str = setting(
        "32", "bf16: bfloat16 autocast, where the machine has units for it", choices=("32", "bf16")
    )
    hypotheses: int = setting(5, "scst: captions of a photo that are compared", low=2)
    explore: str = setting("beam", "scst: where they come from", choices=("beam", "sample"))
    reward_end: bool = setting(True, "scst: the end of a caption counts as a word of it")
    reward_documents: str = setting("photo", "scst: documents of CIDEr's frequencies", choices=("photo", "caption"))
    select_on: str = setting("val", "split that chooses the best model: val, never test", choices=("val",))
    patience: int = setting(0, "stop after so many evaluations without a better CIDEr; 0: never", low=0)
    evaluate_every: int = setting(1, "epochs between evaluations", low=1)
    checkpoint_every: int = setting(200, "steps between checkpoints", low=1)
    bad_steps: int = setting(20, "stop after so many steps in a row whose loss is not finite", low=1)
    seed: int = setting(0, "of everything random")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    contrast: ContrastConfig = field(default_factory=ContrastConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    confidence: ConfidenceConfig = field(default_factory=ConfidenceConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    made_by: dict[str, tuple[str, ...]] = field(
        default_factory=dict,
        metadata={"doc": "view → fingerprints of the extractors it accepts; training adds the store's"},
    )


@dataclass(frozen=True)
class Given:
    """A value as somebody wrote it, and how they spelled the setting."""

    value: Any
    spelling: str


Path = tuple[str, ...]


def parse(sources: Sequence[Mapping[Path, Given]]) -> tuple[Config, list[str]]:
    """Merge the sources and read a Config; problems come back as sentences, defaults stand in for them."""
    problems: list[str] = []
    config = _read(Config, _nest(sources), (), problems)
    assert isinstance(config, Config)
    _check_relations(config, problems)
    return config, problems


def flatten(tree: Mapping[str, Any], origin: str = "", path: Path = ()) -> dict[Path, Given]:
    """Nested mapping → {path: Given}, spelled as the dotted path behind `origin`."""
    flat: dict[Path, Given] = {}
    for key, value in tree.items():
        here = (*path, str(key))
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, origin, here)
        else:
            flat[here] = Given(value, origin + ".".join(here))
    return flat


def override(config: Config, section: str, settings: Mapping[str, Any]) -> Config:
    """Another config with some settings of a section replaced, checked like any other."""
    given: dict[Path, Given] = {(section, name): Given(value, name) for name, value in settings.items()}
    changed, problems = parse([flatten(to_dict(config)), given])
    if problems:
        raise ConfigError.of(problems)
    return changed


def to_dict(config: Any) -> dict[str, Any]:
    """Plain nested dict, ready for JSON or YAML."""
    return dataclasses.asdict(config)


def _nest(sources: Sequence[Mapping[Path, Given]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for source in sources:
        for path, given in source.items():
            node = tree
            for key in path[:-1]:
                if not isinstance(node.get(key), dict):
                    node[key] = {}
                node = node[key]
            node[path[-1]] = given
    return tree


def _read(kind: Any, node: Any, path: Path, problems: list[str]) -> Any:
    """`node` (nested dicts with Given leaves) as an instance of `kind`."""
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, node, path, problems)
    if typing.get_origin(kind) is dict:
        return _read_table(typing.get_args(kind)[1], node, path, problems)
    if isinstance(node, dict):
        first = _first_leaf(node)
        raise _Problem(f"'{first.spelling}' goes too deep: '{'.'.join(path)}' takes {_kind_name(kind)}.")
    return _coerce(kind, node)


class _Problem(Exception):
    pass


def _read_dataclass(kind: Any, node: Any, path: Path, problems: list[str]) -> Any:
    if isinstance(node, Given):
        if node.value not in (None, {}):
            problems.append(f"'{node.spelling}' takes settings of its own, not {node.value!r}.")
        node = {}
    hints = typing.get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for key in sorted(node.keys() - fields.keys()):
        leaf = _first_leaf(node[key])
        problems.append(_unknown_setting(leaf.spelling, key, fields))
    values: dict[str, Any] = {}
    for name, item in fields.items():
        here = (*path, name)
        if name not in node:
            if item.default is MISSING and item.default_factory is MISSING:
                problems.append(f"'{'.'.join(here)}' is missing: {item.metadata['doc']}.")
                values[name] = 1
            elif dataclasses.is_dataclass(hints[name]):
                values[name] = _read(hints[name], {}, here, problems)
            continue
        try:
            value = _read(hints[name], node[name], here, problems)
            _check_range(value, item.metadata, node[name])
            values[name] = value
        except _Problem as problem:
            problems.append(str(problem))
            if item.default is MISSING and item.default_factory is MISSING:
                values[name] = 1
    return kind(**values)


def _read_table(kind: Any, node: Any, path: Path, problems: list[str]) -> dict[str, Any]:
    """A dict of named entries; an entry set to null is taken out."""
    if isinstance(node, Given):
        if node.value not in (None, {}):
            raise _Problem(f"'{node.spelling}' takes named entries, not {node.value!r}.")
        return {}
    table: dict[str, Any] = {}
    for name, entry in node.items():
        if isinstance(entry, Given) and entry.value is None:
            continue
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            problems.append(
                f"'{_first_leaf(entry).spelling}': '{name}' is not a name. "
                "Use small letters, digits and '_', a letter first."
            )
            continue
        try:
            table[name] = _read(kind, entry, (*path, name), problems)
        except _Problem as problem:
            problems.append(str(problem))
    return table


def _coerce(kind: Any, given: Given) -> Any:
    """YAML and flags blur numbers, words and truth values; the declared type decides."""
    value = given.value
    if typing.get_origin(kind) in (Union, types.UnionType):
        options = typing.get_args(kind)
        if type(None) in options and value in (None, "null", "none", "auto"):
            return None
        (kind,) = [option for option in options if option is not type(None)]
    if kind is bool:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if isinstance(value, bool):
            return value
    elif kind is str:
        if isinstance(value, str):
            return value
    elif kind == tuple[str, ...]:
        words = value.split(",") if isinstance(value, str) else value
        if isinstance(words, (list, tuple)) and all(isinstance(word, str) and word for word in words):
            return tuple(words)
    elif isinstance(value, bool):
        pass
    elif kind is int:
        if isinstance(value, int):
            return value
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value):
            return int(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif kind is float and isinstance(value, (int, float, str)):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = float("nan")
        if number == number and abs(number) != float("inf"):
            return number
    raise _Problem(f"'{given.spelling}' takes {_kind_name(kind)}, not {value!r}.")


def _check_range(value: Any, metadata: Mapping[str, Any], node: Any) -> None:
    """Declared bounds apply to a number and to each number of a table."""
    low, below, choices = metadata.get("low"), metadata.get("below"), metadata.get("choices")
    entries = value.items() if isinstance(value, dict) else [(None, value)]
    for name, entry in entries:
        given = node if name is None else node[name]
        if not isinstance(given, Given):
            continue
        if choices and entry not in choices:
            close = did_you_mean(str(entry), choices)
            raise _Problem(f"'{given.spelling}' is one of {', '.join(choices)}, not '{entry}'.{close}")
        if low is not None and entry < low:
            raise _Problem(f"'{given.spelling}' must be at least {low}, not {entry}.")
        if below is not None and entry >= below:
            raise _Problem(f"'{given.spelling}' must be below {below}, not {entry}.")


def _check_relations(config: Config, problems: list[str]) -> None:
    """What no single setting can be blamed for."""
    model = config.model
    if model.d_model % model.heads:
        problems.append(f"d_model {model.d_model} does not divide into {model.heads} heads.")
    if model.d_model % 2:
        problems.append(f"d_model {model.d_model} must be even: positions are pairs of sine and cosine.")
    if config.decode.beam % config.decode.groups:
        problems.append(f"decode.beam {config.decode.beam} does not divide into decode.groups {config.decode.groups}.")
    if config.decode.min_words >= config.decode.max_words:
        problems.append(
            f"decode.min_words {config.decode.min_words} and an end token do not fit "
            f"decode.max_words {config.decode.max_words}."
        )
    if config.decode.max_words > model.max_words:
        problems.append(
            f"decode.max_words {config.decode.max_words} is more than model.max_words {model.max_words}: "
            "lower the first or raise the second."
        )


def _unknown_setting(spelling: str, key: str, allowed: Mapping[str, Any]) -> str:
    """Suggest within the user's own spelling: --model.d_modle → --model.d_model."""
    close = did_you_mean(key, allowed)
    if not close:
        return f"unknown setting '{spelling}'. Available here: {', '.join(sorted(allowed))}."
    before, _, after = spelling.rpartition(key)
    better = before + close.split("'")[1] + after
    return f"unknown setting '{spelling}'. Did you mean '{better}'?"


def _first_leaf(node: Any) -> Given:
    while isinstance(node, dict):
        node = next(iter(node.values()))
    assert isinstance(node, Given)
    return node


def _kind_name(kind: Any) -> str:
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    names[tuple[str, ...]] = "a list of words"
    return names.get(kind, str(kind))
