"""Finds, fingerprints and loads models of the Hugging Face hub, for the views of the extra `haav[hub]`.

Weights are read from safetensors only. No code of a model's repository is ever run. Photos are prepared with Pillow and
torch as the model's `preprocessor_config.json` says. The processors of transformers are not used, because they need
torchvision, which breaks other parts of a CPU installation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from haav.errors import ViewError
from haav.files import json_of
from haav.weights.load_once import load_once

INSTALL = 'pip install "haav[hub]"'
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FILES = [CONFIG, "model*.safetensors", INDEX, "*processor_config.json", "*token*.json", "vocab.json", "merges.txt"]
TIMEOUT = 10
"""seconds to wait for the first response of the hub"""
BATCH = 32
"""pictures per forward pass of a network"""

REVISIONS = {
    # `main` has no safetensors; this is the commit of the hub's own conversion bot, on top of main
    "openai/clip-vit-base-patch32": "c237dc49a33fc61debc9276459120b7eac67e7ef",
    # `main` needs timm, and timm needs torchvision
    "facebook/detr-resnet-50": "no_timm",
    "facebook/detr-resnet-101": "no_timm",
}
"""models that are not read from `main`; `name@revision` selects any other revision"""


def transformers() -> Any:
    """The library, imported only when a hub view is used."""
    try:
        import transformers
    except ImportError as error:
        raise ViewError(f"this view needs transformers: {_first_line(error)}.\n  {INSTALL}") from None
    return transformers


@dataclass(frozen=True)
class HubModel:
    """A model whose files are on this machine."""

    name: str
    """as the user gave it: a hub name or a folder"""
    option: str
    """the option that selects the model"""
    folder: Path
    written: tuple[int, ...]
    """modification time of each file of weights: a folder whose weights were replaced is another model"""

    @property
    def config(self) -> dict[str, Any]:
        return _read_json(self.folder / CONFIG)

    @property
    def fingerprint(self) -> str:
        """Depends on the weight files only: a hub name and a folder with the same files have the same fingerprint."""
        digest = hashlib.sha256()
        for path, written in zip(weight_files(self.folder), self.written, strict=True):
            digest.update(f"{path.name} {path.stat().st_size} {_sha256(path, written)}\n".encode())
        return digest.hexdigest()[:16]


def find_hub_model(name: str | Path, option: str) -> HubModel:
    """`name`: a folder or a hub name (`owner/model`, `owner/model@revision`), which is downloaded once and cached."""
    transformers()
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if isinstance(name, Path) or name.startswith(("/", ".", "~")) or folder.exists():
            raise ViewError(f"{option}: there is no folder {folder}.\n  Give a folder with a model, or a hub name.")
        folder = _fetch(name, option)
    elif lacking := _lacking(folder):
        raise ViewError(
            f"{option}: folder {folder} holds no {lacking}.\n"
            "  Put there what the model's page on the hub lists; weights are read from safetensors only."
        )
    return HubModel(str(name), option, folder, tuple(path.stat().st_mtime_ns for path in weight_files(folder)))


def _fetch(source: str, option: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    name, _, revision = source.partition("@")
    repo: dict[str, Any] = {"repo_id": name, "revision": revision or REVISIONS.get(name)}
    cached = _cached(repo)
    # The hub is not asked about a cached model: a frozen network must not change by itself.
    if cached and _preprocessor_config(cached) is not None:
        return cached
    try:
        # A short request first: a download without a connection may retry for minutes.
        info = huggingface_hub.HfApi().model_info(timeout=TIMEOUT, **repo)
        if not {file.rfilename for file in info.siblings or ()} & {WEIGHTS, INDEX}:
            raise ViewError(
                f"{option}: '{source}' has no safetensors weights, and no others are read.\n"
                f"  Look for a revision that has them ({option}={name}@REVISION), or give a folder: {option}=FOLDER"
            )
        return Path(huggingface_hub.snapshot_download(allow_patterns=FILES, **repo))
    except ViewError:
        raise
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise ViewError(
            f"{option}: '{source}' is neither a folder nor a model of the hub that you may read "
            f"({_first_line(error)}).\n  Give owner/model, owner/model@revision or a folder."
        ) from None
    except Exception as error:  # any error of the connection, a proxy or the disk
        if cached:
            return cached
        raise ViewError(
            f"{option}: '{source}' cannot be fetched from the hub ({type(error).__name__}: {_first_line(error)}).\n"
            f"  Download it where there is a connection ({_command(**repo)}) and give its folder: {option}=FOLDER\n"
            "  Or use the embedded views, which need no hub: grid, objects, regions, text_whole."
        ) from None


def _command(repo_id: str, revision: str | None) -> str:
    return f"hf download {repo_id}" + (f" --revision {revision}" if revision else "")


def _cached(repo: Mapping[str, Any]) -> Path | None:
    """The folder of an earlier download, by haav or another program, if a model can be loaded from it."""
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(allow_patterns=FILES, local_files_only=True, **repo))
    except (OSError, ValueError):  # not cached, or not a hub name: the request to the hub reports it
        return None
    return None if _lacking(folder) else folder


def _lacking(folder: Path) -> str:
    """The name of the first required file that is missing, or an empty string."""
    if not (folder / CONFIG).is_file():
        return CONFIG
    if not ((folder / WEIGHTS).is_file() or (folder / INDEX).is_file()):
        return WEIGHTS
    return next((path.name for path in weight_files(folder) if not path.is_file()), "")


def weight_files(folder: Path) -> list[Path]:
    """The file of weights, or its parts as listed in the index."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    return [folder / name for name in sorted(set(_read_json(folder / INDEX).get("weight_map", {}).values()))]


@cache
def _sha256(path: Path, written: int) -> str:
    """`written` is part of the cache key: a replaced file is read again."""
    return file_digest(path)


def file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@load_once
def load_network(model: HubModel, class_name: str, device: str = "cpu") -> Any:
    """The transformers class `class_name` with the model's weights, frozen.

    Weights are float32, since half precision is slow on a CPU. None of them requires a gradient, so torch keeps nothing
    for a backward pass.
    """
    library = transformers()
    try:
        with _quiet(library):
            network, report = getattr(library, class_name).from_pretrained(
                str(model.folder),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except ImportError as error:
        raise ViewError(
            f"{model.option}: '{model.name}' needs a library that haav does without: {_first_line(error)}\n"
            "  Choose a model with a backbone of transformers' own, such as PekingU/rtdetr_r50vd."
        ) from None
    except Exception as error:  # damaged files, or files of another type of model
        raise ViewError(
            f"{model.option}: '{model.name}' cannot be loaded as {class_name} ({_first_line(error)}).\n"
            f"  Check the files in {model.folder}."
        ) from None
    # transformers initialises missing weights at random and only warns. A count of training batches is not a weight.
    if missing := sorted(key for key in report["missing_keys"] if not key.endswith("num_batches_tracked")):
        raise ViewError(
            f"{model.option}: '{model.name}' lacks {len(missing)} weights of {class_name} (first: {missing[0]}).\n"
            "  Give a complete model."
        )
    return network.eval().requires_grad_(False).float().to(device)


@load_once
def load_tokenizer(model: HubModel) -> Any:
    try:
        return transformers().AutoTokenizer.from_pretrained(
            str(model.folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ViewError(
            f"{model.option}: '{model.name}' has no tokenizer that can be read ({_first_line(error)}).\n"
            f"  tokenizer.json, or vocab.json and merges.txt, belong in {model.folder} (of the hub: hf download NAME)."
        ) from None


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Silences the report of unused weights: loading one tower of two is intended."""
    logging = library.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class Preparation:
    """Prepares a photo as the input of a network. Gives the same numbers as the processors of transformers."""

    short: int | None
    """length of the shorter side, with the other in proportion; None: see `exact`"""
    long: int | None
    """limit of the longer side; if needed, the shorter side shrinks in proportion"""
    exact: tuple[int, int] | None
    """height and width, whatever the photo's proportions"""
    crop: tuple[int, int] | None
    """height and width of the centre crop"""
    resample: int
    """number of the Pillow filter"""
    scale: float
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:8]

    def __call__(self, image: Image.Image) -> Tensor:
        """(3, height, width) float32"""
        if self.crop and not self.long:
            image = _trim(image)
        height, width = self._size(image)
        image = image.resize((width, height), Image.Resampling(self.resample))
        if self.crop:
            top, left = (height - self.crop[0]) // 2, (width - self.crop[1]) // 2
            image = image.crop((left, top, left + self.crop[1], top + self.crop[0]))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() * self.scale
        if self.mean is None or self.std is None:
            return pixels
        return (pixels - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]

    def _size(self, image: Image.Image) -> tuple[int, int]:
        if self.exact:
            return self.exact
        assert self.short
        small, large = sorted(image.size)
        short = float(self.short)
        if self.long and large / small * short > self.long:
            short = self.long * small / large
        if small == round(short):
            return image.height, image.width
        new_small, new_large = max(1, round(short)), max(1, int(short * large / small))
        return (new_small, new_large) if image.width >= image.height else (new_large, new_small)


def _trim(image: Image.Image) -> Image.Image:
    """The middle of a very long picture: 2 × 9000 pixels would otherwise be resized to 224 × a million."""
    limit = 64 * min(image.size)
    left, top = (max(0, side - limit) // 2 for side in image.size)
    return image.crop((left, top, image.width - left, image.height - top)) if left or top else image


def load_preparation(model: HubModel, defaults: Mapping[str, Any] | None) -> Preparation:
    """From the files in the model's folder. `defaults` fill in missing settings; with None, the file is required."""
    config = _preprocessor_config(model.folder)
    if config is None and defaults is None:
        raise ViewError(
            f"{model.option}: '{model.name}' has no preprocessor_config.json, which says how to prepare photos.\n"
            f"  Copy it from the model's page on the hub into {model.folder}."
        )
    settings = {**(defaults or {}), **(config or {})}
    try:
        size, crop = settings["size"], settings.get("crop_size") if settings.get("do_center_crop") else None
        # Old files give a single number: the shorter side, or the side of the crop.
        size = size if isinstance(size, Mapping) else {"shortest_edge": size, "longest_edge": settings.get("max_size")}
        crop = crop if isinstance(crop, Mapping) or crop is None else {"height": crop, "width": crop}
        normalize = settings.get("do_normalize", True)
        exact = (int(size["height"]), int(size["width"])) if "height" in size else None
        return Preparation(
            short=None if exact else int(size["shortest_edge"]),
            long=int(size["longest_edge"]) if size.get("longest_edge") else None,
            exact=exact,
            crop=(int(crop["height"]), int(crop["width"])) if crop else None,
            resample=int(settings.get("resample", Image.Resampling.BILINEAR)),
            scale=float(settings.get("rescale_factor", 1 / 255)) if settings.get("do_rescale", True) else 1.0,
            mean=tuple(settings["image_mean"]) if normalize else None,
            std=tuple(settings["image_std"]) if normalize else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ViewError(
            f"{model.option}: the preprocessor_config.json of '{model.name}' cannot be understood "
            f"({type(error).__name__}: {error}).\n  It must give size, image_mean and image_std."
        ) from None


def _preprocessor_config(folder: Path) -> dict[str, Any] | None:
    if (folder / "preprocessor_config.json").is_file():
        return _read_json(folder / "preprocessor_config.json")
    if (folder / "processor_config.json").is_file():  # where transformers 5 saves it
        return _read_json(folder / "processor_config.json").get("image_processor")
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ViewError(f"cannot read {path}: {error}.") from None
    if not isinstance(data, dict):
        raise ViewError(f"cannot read {path}: it holds no settings.")
    return data


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
