"""The only place where config meets modules: builders flatten settings into arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

from haav.config import Config, ContrastConfig, Given, ModelConfig, SettingPath
from haav.config.load import read_settings
from haav.errors import ConfigError, unknown
from haav.model.aggregators import Aggregator, aggregators
from haav.model.contrast import MomentumContrast, Projector
from haav.model.decoders import DecoderSizes, decoders
from haav.model.embed import ViewEmbeddings
from haav.model.encodings import Encoding, encodings
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.model.layers import Encoder, EncoderLayer

NO_AGGREGATOR = "unused"
"""stands in the settings of a model whose decoder has none"""


def load_config(
    preset: str | None = None,
    file: str | Path | None = None,
    flags: Mapping[SettingPath, Given] | None = None,
    init: Config | None = None,
) -> Config:
    """A checked config with nothing left open, or a ConfigError that names every problem.

    `preset` starts (default: the file's own, else best), `file` overrides it, `flags` override both. `init`: the config
    of a model to start from, whose decode settings and confidence replace those of the preset.
    """
    config, problems = read_settings(preset, file, flags, init)
    config, more = resolve(config)
    if problems or more:
        raise ConfigError.of([*problems, *more])
    return config


def resolve(config: Config) -> tuple[Config, list[str]]:
    """Fill in what is left to the encoding ("auto"), and say why a combination cannot work.

    Asks each part for what it can do, never for its name.
    """
    model, problems = config.model, []
    if not model.views:
        problems.append("no view is left: model.views needs at least one, e.g. --model.views.grid.dim 768.")
    for name in model.views:
        if hasattr(nn.ModuleDict(), name):
            problems.append(f"a view cannot be called '{name}': PyTorch uses that name itself.")
    if model.encoding not in encodings:
        problems.append(unknown("encoding", model.encoding, encodings))
    if model.decoder not in decoders:
        problems.append(unknown("decoder", model.decoder, decoders))
    aggregates = model.decoder not in decoders or decoders.get(model.decoder).uses_aggregator
    if not aggregates and model.aggregator not in ("auto", NO_AGGREGATOR):
        problems.append(
            f"decoder '{model.decoder}' has no aggregator, so '{model.aggregator}' would change nothing.\n"
            f"  Use --model.aggregator {NO_AGGREGATOR}."
        )
    elif aggregates and model.aggregator != "auto" and model.aggregator not in aggregators:
        problems.append(unknown("aggregator", model.aggregator, [*aggregators, "auto"]))
    if model.encoding not in encodings or model.decoder not in decoders:
        return config, problems

    encoding, decoder = encodings.get(model.encoding), decoders.get(model.decoder)
    if not decoder.uses_aggregator:
        model = replace(model, aggregator=NO_AGGREGATOR)
    elif model.aggregator == "auto":
        model = replace(model, aggregator=encoding.default_aggregator)
    if model.aggregator in aggregators and aggregators.get(model.aggregator).needs_views and not encoding.keeps_views:
        problems.append(
            f"aggregator '{model.aggregator}' weighs views against each other, but encoding '{model.encoding}' "
            f"does not keep them apart.\n  Use --aggregator {encoding.default_aggregator}, or an encoding that keeps "
            f"views: {', '.join(name for name in encodings if encodings.get(name).keeps_views)}."
        )
    views = [name for name in config.data.views.split(",") if name] or list(model.views)  # those of the data win
    contrast, reason = config.contrast, ""
    if not encoding.keeps_views:
        reason = f"encoding '{model.encoding}' does not keep views apart"
    elif decoder.encoder_layer is None:
        reason = f"decoder '{model.decoder}' has no encoder"
    elif len(views) < 2:
        reason = "this model has one view"
    if contrast.enabled is None:
        contrast = replace(contrast, enabled=not reason)
    elif contrast.enabled and reason:
        problems.append(
            f"the contrastive loss pulls the views of a photo together, but {reason}: there is nothing to contrast.\n"
            "  Use --contrastive false."
        )
    return replace(config, model=model, contrast=contrast), problems


def build_model(config: ModelConfig) -> Haav | Ensemble:
    """The network of a resolved config; several whole models come back as one ensemble."""
    parts = encodings.get(config.encoding).split(tuple(config.views))
    models = [_build_haav(replace(config, views={name: config.views[name] for name in part})) for part in parts]
    return models[0] if len(models) == 1 else Ensemble(models)


def _build_haav(config: ModelConfig) -> Haav:
    embed = ViewEmbeddings(
        config.views,
        d_model=config.d_model,
        learned_cls=config.cls == "learned",
        channel_dropout=config.channel_dropout,
        whole_channels=config.channel_dropout_unit == "channel",
        token_dropout=config.token_dropout,
        dropped_is_padding=config.token_dropout_leaves == "padding",
    )

    decoder = decoders.get(config.decoder)

    def new_encoder() -> Encoder:
        return Encoder(
            config.d_model,
            config.heads,
            config.d_ff,
            layers=config.encoder_layers if decoder.encoder_layer else 0,
            slots=config.memory_slots,
            dropout=config.dropout,
            keep_all=config.encoder_outputs == "all",
            layer=decoder.encoder_layer or EncoderLayer,
        )

    encoding = encodings.get(config.encoding)(
        embed, new_encoder, view_dropout=config.view_dropout, view_dropout_draw=config.view_dropout_draw
    )

    def new_aggregator() -> Aggregator:
        return aggregators.get(config.aggregator)(
            encoding.names,
            layers=config.encoder_layers if config.encoder_outputs == "all" else 1,
            d_model=config.d_model,
            heads=config.heads,
            dropout=config.dropout,
        )

    return Haav(encoding, decoder(new_aggregator, decoder_sizes(config)))


def decoder_sizes(config: ModelConfig) -> DecoderSizes:
    return DecoderSizes(
        layers=config.decoder_layers,
        d_model=config.d_model,
        heads=config.heads,
        d_ff=config.d_ff,
        dropout=config.dropout,
        vocabulary_size=config.vocabulary_size,
        max_words=config.max_words,
    )


def build_contrast(encoding: Encoding, model: ModelConfig, contrast: ContrastConfig) -> MomentumContrast:
    """The contrastive part beside a model's encoding: training state, never saved with the model."""
    layers = model.encoder_layers if model.encoder_outputs == "all" else 1
    projector = Projector(model.d_model, contrast.hidden, model.heads, layers, model.dropout)
    return MomentumContrast(
        encoding,
        projector,
        model.d_model,
        queue_size=contrast.queue_size,
        temperature=contrast.temperature,
        momentum=contrast.momentum,
        positives=contrast.positives,
    )
