"""Decoders: every file of this folder registers one, with the encoder layer that belongs to it."""

from haav.model.decoders.base import Decoder, DecoderSizes, decoders
from haav.registry import import_siblings

import_siblings(__name__, __path__)

__all__ = ["Decoder", "DecoderSizes", "decoders"]
