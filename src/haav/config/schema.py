"""Every setting, declared once with its type, meaning and range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from haav.types import ViewSpec


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

    dataset: str = setting(
        "",
        "captions and splits: PATH[:ROLE[:WEIGHT]], several with commas; roles: human, machine, photos "
        '(docs/how-to/training.md); "toy": generated',
    )
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
    batch: int = setting(50, "labelled photos per step", low=1)
    unlabelled_batch: int = setting(0, "further photos per step, for the contrastive loss only", low=0)
    captions: int = setting(5, "captions of a photo used in a step, drawn anew each epoch", low=1)
    lr: float = setting(2e-5, "learning rate", low=0)
    schedule: str = setting("constant", "of the learning rate after warm-up", choices=("constant", "cosine", "cyclic"))
    warmup_steps: int = setting(10000, "steps over which it rises from 0", low=0)
    weight_decay: float = setting(0.05, "AdamW's", low=0)
    decay_all: bool = setting(False, "decay norms and biases too")
    clip: float = setting(1.0, "largest gradient norm; 0: any", low=0)
    accumulate: int = setting(1, "batches per step", low=1)
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
    distinct: float = setting(
        0.0, "scst: share of the CIDEr for similar photos that is subtracted from the reward", low=0
    )
    xe_weight: float = setting(0.0, "scst: weight of the cross-entropy on the captions by people", low=0)
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
