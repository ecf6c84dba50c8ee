"""Every setting, declared once with its type, meaning and range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from haav.types import ViewSpec

MAX_CAPTIONS = 50
"""most captions of a photo that are searched, sampled or returned; time and memory grow with their number"""


def setting(
    default: Any,
    doc: str,
    low: float | None = None,
    below: float | None = None,
    most: float | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """A dataclass field with its meaning and range: low <= value < below, value <= most, or one of `choices`."""
    metadata = {"doc": doc, "low": low, "below": below, "most": most, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    """The network that is saved and that inference runs."""

    views: dict[str, ViewSpec] = field(default_factory=dict, metadata={"doc": "views that the model reads, by name"})
    vocabulary_size: int = setting(10199, "number of words, special tokens included", low=5)
    encoding: str = setting("shared", "encoding of the views")
    decoder: str = setting("transformer", "decoder of the words: HAAV's transformer, or that of a compared system")
    aggregator: str = setting(
        "auto", "aggregation of the encoded views; auto: the default of the encoding, or unused if the decoder has none"
    )
    encoder_outputs: str = setting("last", "encoder layers that the decoder attends to", choices=("last", "all"))
    cls: str = setting(
        "learned", "[CLS] of a view: a learned token, or the mean of its tokens", choices=("learned", "mean")
    )
    d_model: int = setting(256, "width of every token", low=2)
    d_ff: int = setting(1024, "width inside the feed-forward blocks", low=1)
    heads: int = setting(8, "attention heads", low=1)
    encoder_layers: int = setting(3, "encoder layers (paper: N)", low=1)
    decoder_layers: int = setting(3, "decoder layers (paper: M)", low=1)
    memory_slots: int = setting(40, "learned key/value slots in each encoder self-attention", low=0)
    max_words: int = setting(54, "number of positions: the longest caption, end token included", low=1)
    dropout: float = setting(0.1, "dropout inside attention and feed-forward blocks", low=0, below=1)
    channel_dropout: float = setting(0.1, "share of a view's channels dropped (paper: p_c)", low=0, below=1)
    channel_dropout_unit: str = setting(
        "channel",
        "what is dropped: a channel across views and tokens, or single elements",
        choices=("channel", "element"),
    )
    token_dropout: float = setting(0.1, "share of a view's tokens dropped (paper: p_s)", low=0, below=1)
    token_dropout_leaves: str = setting(
        "zero", "what replaces a dropped token: a zero vector or padding", choices=("zero", "padding")
    )
    view_dropout: float = setting(0.1, "share of encoded views hidden from the decoder (paper: p_v)", low=0, below=1)
    view_dropout_draw: str = setting(
        "photo", "whether dropped views are drawn per photo or per batch", choices=("photo", "batch")
    )


@dataclass(frozen=True)
class ContrastConfig:
    """The MoCo-v2 part: training state, never part of a saved model."""

    enabled: bool | None = setting(
        None, "whether to use the contrastive loss; null: if the encoding keeps at least two views separate"
    )
    temperature: float = setting(0.06, "softmax temperature (paper: tau)", low=1e-6)
    momentum: float = setting(0.999, "share of the momentum copy that is kept per step", low=0, below=1)
    queue_size: int = setting(8000, "number of keys of past photos used as negatives (paper: K)", low=0)
    positives: str = setting(
        "others", "positive keys: the other views of the photo, or all its views", choices=("others", "all")
    )
    hidden: int = setting(1024, "width inside the projection head", low=1)


@dataclass(frozen=True)
class DecodeConfig:
    """How captions are decoded."""

    method: str = setting("beam", "beam search, or sampling", choices=("beam", "sample"))
    beam: int = setting(5, "beam width; 1: greedy decoding", low=1, most=MAX_CAPTIONS)
    keep_greedy: bool = setting(True, "keep the greedy caption in the beam, so that the result is never less probable")
    length_penalty: float = setting(0.0, "exponent p of the score log-probability / words ** p", low=0, below=10)
    groups: int = setting(1, "groups of diverse beam search; must divide the beam", low=1)
    diversity: float = setting(0.5, "diverse beam search: penalty of a word per use in an earlier group", low=0)
    samples: int = setting(1, "number of sampled captions", low=1, most=MAX_CAPTIONS)
    temperature: float = setting(1.0, "sampling: softmax temperature; below 1 favours probable words", low=1e-3)
    top_k: int = setting(0, "sampling: number of most probable words to draw from; 0: all", low=0)
    top_p: float = setting(1.0, "sampling: total probability of the words to draw from", low=0, most=1)
    max_words: int = setting(20, "maximum length of a caption, end token included", low=1)
    min_words: int = setting(0, "minimum number of words", low=0)
    no_repeat: int = setting(3, "length of word sequences that must not repeat; 0: no limit", low=0)
    no_doubles: bool = setting(
        False, 'forbid words that were said before, in singular or plural, after words like "a" and "and"'
    )
    allow_unk: bool = setting(False, "allow <unk> in captions")
    allow_cut: bool = setting(False, 'allow captions that are cut off at max_words or end in a word like "with"')
    collapse_repeats: bool = setting(False, "show a repeated word once")
    consensus: float = setting(
        0.0, "weight of the agreement with the retrieved sentences in the ranking of captions", low=0
    )
    consensus_of: int = setting(8, "number of nearest retrieved sentences to compare with", low=1)


@dataclass(frozen=True)
class ConfidenceConfig:
    """Maps what is known about a caption to the chance that people would use its words. `haav calibrate` fits it."""

    offset: float = setting(0.0, "confidence of a word = sigmoid(offset + slope · logit(probability))")
    slope: float = setting(1.0, "slope of that line; 1 with offset 0 gives the model's probability")
    caption_offset: float = setting(
        0.0,
        "confidence of a caption = sigmoid(caption_offset + caption_slope · logit(mean confidence of its words) + "
        "agreement · (agreement with the retrieved sentences - typical_agreement) + "
        "novelty · max(0, novelty of the photo - unfamiliar_above))",
    )
    caption_slope: float = setting(1.0, "see caption_offset; with the defaults, the mean confidence of the words")
    agreement: float = setting(0.0, "see caption_offset")
    typical_agreement: float = setting(0.0, "mean agreement on val; stands in where no sentences are retrieved")
    novelty: float = setting(0.0, "see caption_offset")
    unfamiliar_above: float = setting(
        0.0, "novelty above which a picture is unlike those that the model was trained on; 0: none is", low=0
    )


@dataclass(frozen=True)
class DataConfig:
    """The data that a model is trained on. Not part of saved models, since it names local files."""

    dataset: str = setting(
        "",
        "files of captions and splits: PATH[:ROLE[:WEIGHT]], comma-separated; roles: human, machine, photos "
        '(docs/how-to/training.md); "toy": generated data',
    )
    store: str = setting("", "view store with the views of the photos")
    views: str = setting("", "views to train on, comma-separated; empty: those of the model")
    unlabelled: str = setting("", "data set of further photos, used without captions; empty: none")
    unlabelled_store: str = setting("", "view store of the further photos")
    label_fraction: float = setting(1.0, "share of the training photos or captions that are labelled", low=0)
    label_by: str = setting("photo", "unit of label_fraction", choices=("photo", "caption"))
    min_count: int = setting(5, "words with fewer occurrences become <unk>", low=1)


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained."""

    objective: str = setting("xe", "cross-entropy, or self-critical training on CIDEr", choices=("xe", "scst"))
    epochs: int = setting(20, "epochs over the labelled photos", low=1)
    epoch_steps: int = setting(0, "fewest steps per epoch: a small set is gone through several times per epoch", low=0)
    batch: int = setting(50, "labelled photos per step", low=1)
    unlabelled_batch: int = setting(0, "further photos per step, for the contrastive loss only", low=0)
    captions: int = setting(5, "captions per photo and step, drawn anew each epoch", low=1)
    lr: float = setting(2e-5, "learning rate", low=0)
    schedule: str = setting(
        "constant", "learning rate schedule after warm-up", choices=("constant", "cosine", "cyclic")
    )
    warmup_steps: int = setting(10000, "steps of linear warm-up of the learning rate", low=0)
    weight_decay: float = setting(0.05, "weight decay of AdamW", low=0)
    decay_all: bool = setting(False, "apply weight decay to norms and biases too")
    clip: float = setting(1.0, "maximum gradient norm; 0: no clipping", low=0)
    accumulate: int = setting(1, "batches accumulated per step", low=1)
    label_smoothing: float = setting(0.0, "label smoothing of the cross-entropy", low=0, below=1)
    ema: float = setting(
        0.0, "decay of the moving average of weights, which is evaluated and saved; 0: none", low=0, below=1
    )
    keep_weight: float = setting(
        0.0, "weight of the distance from the word probabilities of the model to start from, on base data", low=0
    )
    contrast_weight: float = setting(0.05, "weight of the contrastive loss", low=0)
    precision: str = setting(
        "32", "float32, or bfloat16 autocast on machines with native bfloat16", choices=("32", "bf16")
    )
    recompute: bool = setting(
        False, "compute what layers do a second time for the gradient instead of keeping it: less memory, more time"
    )
    hypotheses: int = setting(5, "scst: captions per photo that are compared", low=2)
    explore: str = setting("beam", "scst: source of these captions", choices=("beam", "sample"))
    reward_end: bool = setting(True, "scst: count the end token as a word")
    distinct: float = setting(
        0.0, "scst: share of the CIDEr for similar photos that is subtracted from the reward", low=0
    )
    xe_weight: float = setting(0.0, "scst: weight of the cross-entropy on the captions by people", low=0)
    reward_documents: str = setting(
        "photo", "scst: documents of CIDEr's document frequencies", choices=("photo", "caption")
    )
    select_on: str = setting("val", "split that selects the best model", choices=("val",))
    patience: int = setting(0, "evaluations without a better CIDEr before training stops; 0: never stop", low=0)
    evaluate_every: int = setting(1, "epochs between evaluations", low=1)
    checkpoint_every: int = setting(200, "steps between checkpoints", low=1)
    bad_steps: int = setting(20, "consecutive steps with a loss that is not finite before training stops", low=1)
    seed: int = setting(0, "random seed")


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
        metadata={"doc": "view → fingerprints of accepted extractors; training adds those of the store"},
    )
