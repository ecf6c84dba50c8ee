"""Errors that a user can act on. They state what was given, what is allowed and what to do next."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence


class HaavError(Exception):
    """Base of all errors that are caused by inputs, not by bugs of haav."""


class ConfigError(HaavError):
    """A setting, flag or combination of them that cannot work."""

    @classmethod
    def of(cls, problems: Sequence[str]) -> ConfigError:
        """One error for all problems, so that a user can fix them at once."""
        if len(problems) == 1:
            return cls(problems[0])
        listed = "\n".join(f"  {index}. {text}" for index, text in enumerate(problems, 1))
        return cls(f"{len(problems)} problems:\n{listed}")


class ViewError(HaavError):
    """Views that do not fit the model they were given to."""


class ImageError(HaavError):
    """A picture that cannot be read."""


class StoreError(HaavError):
    """A view store that is missing, broken, or made by other extractors."""


class DataError(HaavError):
    """A data set or a file of features that cannot be read or contradicts itself."""


class TrainingError(HaavError):
    """A training run that cannot continue."""


class CheckpointError(HaavError):
    """A model directory or weights file that cannot be read or does not fit."""


class WeightsError(HaavError):
    """Frozen weights that are not on this machine and cannot be fetched, or are not what they should be."""


def printable(text: str, lines: bool = False) -> str:
    """Text that is safe in a terminal: characters that control it are shown as escapes, such as \\x1b and \\u202e.

    The names of files and photos may hold any character, also line ends and marks that reverse the writing direction.
    With `lines`, line ends are kept: messages have several lines.
    """
    return "".join(
        _escape(character) if _controls(character) and not (lines and character == "\n") else character
        for character in text
    )


def _controls(character: str) -> bool:
    """Joiners are invisible too, but Persian, Hindi and emoji are written with them."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\u200c\u200d"


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or an empty string if no allowed name is close."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def unknown(what: str, name: str, allowed: Iterable[str]) -> str:
    """The message for an unknown name, the same everywhere."""
    names = sorted(allowed)
    return f"unknown {what} '{name}'.{did_you_mean(name, names)}\n  Available: {', '.join(names)}."


EXTRAS = {
    "faiss": "faiss",
    "fastapi": "web",
    "fsspec": "remote",
    "h11": "web",
    "h5py": "hdf5",
    "huggingface_hub": "hub",
    "lightning_fabric": "train",
    "matplotlib": "plots",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "pillow_heif": "heif",
    "pycocoevalcap": "coco",
    "pyarrow": "remote",
    "pydantic": "web",
    "python_multipart": "web",
    "ray": "ray",
    "s3fs": "remote",
    "starlette": "web",
    "tensorboard": "train",
    "transformers": "hub",
    "uvicorn": "web",
}
"""modules that only an extra of haav installs"""
PACKAGES = {"PIL": "pillow", "yaml": "pyyaml"}
"""modules whose package has another name"""


def needs_package(module: str) -> str:
    """`needs X, which is not installed`, with the command that installs it."""
    name = module.partition(".")[0]
    package = f'"haav[{EXTRAS[name]}]"' if name in EXTRAS else PACKAGES.get(name, name)
    return f"needs {name}, which is not installed.\n  pip install {package}"
