"""The bridge from frozen image features to frozen sentence vectors (a "locked" dual encoder).

CLIP's text tower is not available without the hub, so the bridge is learned from training captions. A bridge retrieves
too well for photos that it was trained on, even if their captions are left out of the search. A captioner trained on
such views trusts them too much. Training photos are therefore split into folds, and each fold is served by a bridge
trained on the other folds (cross-fitting). All other photos are served by a bridge trained on all folds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from haav.errors import DataError
from haav.files import json_of, require_files, write_atomically
from haav.types import Progress, quiet

FORMAT = "haav-bridge-1"
WEIGHTS, MANIFEST = "bridge.safetensors", "manifest.json"
FEATURES = "patch_regions"
"""the view that bridges are trained on by default"""
FIRST_FEATURES = "regions"
"""the view of a bridge whose manifest names none: those of version 0.1"""


@dataclass(frozen=True)
class BridgeConfig:
    features: int
    """width of the image features"""
    vectors: int
    """width of the sentence vectors"""
    hidden: int = 1024
    folds: int = 5
    epochs: int = 30
    batch: int = 512
    lr: float = 1e-3
    weight_decay: float = 0.05
    dropout: float = 0.3
    temperature: float = 0.05
    seed: int = 0


class Bridge(nn.Module):
    """Image features → unit vectors in the space of the sentences: a linear map plus a small nonlinear correction."""

    def __init__(self, config: BridgeConfig, mean: Tensor | None = None, std: Tensor | None = None) -> None:
        super().__init__()
        # The features join networks of different scale, so each channel is scaled to unit variance.
        self.register_buffer("mean", torch.zeros(config.features) if mean is None else mean)
        self.register_buffer("std", torch.ones(config.features) if std is None else std)
        self.linear = nn.Linear(config.features, config.vectors)
        self.inner = nn.Linear(config.features, config.hidden)
        self.outer = nn.Linear(config.hidden, config.vectors)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor) -> Tensor:
        """(..., features) → (..., vectors), unit length"""
        x = (features.float() - self.get_buffer("mean")) / self.get_buffer("std")
        x = self.dropout(x)
        correction = self.outer(self.dropout(F.gelu(self.inner(x))))
        return F.normalize(self.linear(x) + correction, dim=-1)


class CrossFitted:
    """A bridge trained on all folds, and for each fold a bridge that was not trained on it."""

    def __init__(
        self,
        config: BridgeConfig,
        bridges: Sequence[Bridge],
        folds: Mapping[str, int],
        encoder: str,
        view: str = FEATURES,
        made_by: Sequence[str] = (),
        origin: str = "",
    ) -> None:
        """`bridges[0]` is trained on all folds, `bridges[1 + k]` on all but fold k"""
        self.config = config
        self.bridges = [bridge.eval().requires_grad_(False) for bridge in bridges]
        self.folds = dict(folds)
        self.encoder = encoder
        """the network that made the sentence vectors"""
        self.view = view
        """the view that it was trained on; its tokens are the whole photo, five crops, nine crops"""
        self.made_by = tuple(made_by)
        """fingerprints of the extractors of that view that it accepts; empty: any"""
        self._origin = origin

    @property
    def origin(self) -> str:
        """The fingerprint before `compact`, which models trained with it know."""
        return self._origin or self.fingerprint

    def serves(self, photo: str) -> int:
        """Index of the bridge that serves a photo. It was never trained on that photo."""
        return 1 + self.folds[photo] if photo in self.folds else 0

    @torch.no_grad()
    def __call__(self, features: Tensor, photos: Sequence[str]) -> Tensor:
        """features (B, regions, D) of the named photos → (B, regions, vectors)"""
        out = torch.empty(*features.shape[:-1], self.config.vectors)
        serving = torch.tensor([self.serves(photo) for photo in photos])
        for index in serving.unique().tolist():
            rows = serving == index
            out[rows] = self.bridges[index](features[rows])
        return out

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps([asdict(self.config), self.folds, self.encoder]).encode())
        for bridge in self.bridges:
            for tensor in bridge.state_dict().values():
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:16]

    def compact(self) -> CrossFitted:
        """A copy to distribute: only the bridge trained on all folds, with weights rounded to half precision."""
        config = replace(self.config, folds=0)
        bridge = Bridge(config)
        bridge.load_state_dict({name: value.half().float() for name, value in self.bridges[0].state_dict().items()})
        return CrossFitted(config, [bridge], {}, self.encoder, self.view, self.made_by, self.origin)

    def save(self, directory: str | Path, report: Mapping[str, Any] | None = None, half: bool = False) -> None:
        """`half`: save weights in half precision, which is lossless for a bridge made by `compact`"""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{index}.{name}": (tensor.half() if half else tensor).contiguous()
            for index, bridge in enumerate(self.bridges)
            for name, tensor in bridge.state_dict().items()
        }
        manifest = {
            "format": FORMAT,
            "config": asdict(self.config),
            "encoder": self.encoder,
            "view": self.view,
            "made_by": list(self.made_by),
            "fingerprint": self.fingerprint,
            "origin": self.origin,
            "report": dict(report or {}),
            "folds": self.folds,
        }
        write_atomically(directory / WEIGHTS, lambda path: save_file(tensors, path))
        write_atomically(directory / MANIFEST, lambda path: path.write_text(json.dumps(manifest), encoding="utf-8"))

    @classmethod
    def load(cls, directory: str | Path) -> CrossFitted:
        directory = Path(directory)
        require_files(directory, (MANIFEST, WEIGHTS), "Make a bridge with: haav bridge")
        try:
            manifest = json_of((directory / MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise ValueError(f"its format is {manifest['format']!r}")
            config = BridgeConfig(**manifest["config"])
            tensors = load_file(directory / WEIGHTS)
            bridges = []
            for index in range(1 + config.folds):
                bridge = Bridge(config)
                state = {key.partition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{index}.")}
                bridge.load_state_dict(state)
                bridges.append(bridge)
            folds, encoder = manifest["folds"], manifest["encoder"]
            view = str(manifest.get("view", FIRST_FEATURES))
            made_by = [str(name) for name in manifest.get("made_by", ())]
            cross_fitted = cls(config, bridges, folds, encoder, view, made_by, str(manifest.get("origin", "")))
            if cross_fitted.fingerprint != manifest["fingerprint"]:
                raise ValueError("its fingerprint does not match")
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, SafetensorError) as error:
            raise DataError(f"bridge {directory} is damaged: {error}.") from None
        return cross_fitted


@dataclass(frozen=True)
class Pairs:
    """Photos with the features of their regions and the vectors of their captions."""

    photos: tuple[str, ...]
    features: Tensor
    """(N, regions, D); region 0 is the whole photo"""
    vectors: Tensor
    """(captions, vectors), unit rows"""
    rows: tuple[tuple[int, ...], ...]
    """for each photo, the rows of its captions"""


def train_bridge(
    pairs: Pairs,
    encoder: str,
    config: BridgeConfig,
    progress: Progress = quiet,
    view: str = FEATURES,
    made_by: Sequence[str] = (),
) -> CrossFitted:
    """Trains one bridge on all photos, and one per fold on the photos outside the fold."""
    generator = torch.Generator().manual_seed(config.seed)
    fold_of = torch.randperm(len(pairs.photos), generator=generator) % max(config.folds, 1)
    steps = (1 + config.folds) * config.epochs
    bridges = []
    for index in range(1 + config.folds):
        chosen = (fold_of != index - 1).nonzero().flatten() if index else torch.arange(len(pairs.photos))
        done = index * config.epochs

        def after_epoch(epoch: int, done: int = done) -> None:
            progress(done + epoch, steps)

        bridges.append(_train_one(pairs, chosen, config, generator, after_epoch))
    folds = dict(zip(pairs.photos, fold_of.tolist(), strict=True)) if config.folds else {}
    return CrossFitted(config, bridges, folds, encoder, view, made_by)


def _train_one(
    pairs: Pairs, chosen: Tensor, config: BridgeConfig, generator: torch.Generator, progress: Callable[[int], None]
) -> Bridge:
    whole = pairs.features[chosen, 0].float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        bridge = Bridge(config, whole.mean(dim=0), whole.std(dim=0) + 1e-3).train()
        optimizer = torch.optim.AdamW(bridge.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        batches = max(1, len(chosen) // config.batch)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, config.lr, total_steps=config.epochs * batches, pct_start=0.1
        )
        for epoch in range(config.epochs):
            order = chosen[torch.randperm(len(chosen), generator=generator)]
            for batch in order.chunk(batches):
                loss = _loss(bridge, pairs, batch, config, generator)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            progress(epoch + 1)
    return bridge.eval()


def _loss(bridge: Bridge, pairs: Pairs, batch: Tensor, config: BridgeConfig, generator: torch.Generator) -> Tensor:
    """Symmetric InfoNCE between photos and one random caption each.

    With probability 0.25, a random region stands for the photo.
    """
    regions = pairs.features.shape[1]
    cropped = torch.rand(len(batch), generator=generator) < 0.25
    region = torch.where(cropped, torch.randint(0, regions, (len(batch),), generator=generator), 0)
    images = bridge(pairs.features[batch, region])
    draws = torch.rand(len(batch), generator=generator).tolist()
    rows = [
        pairs.rows[photo][int(draw * len(pairs.rows[photo]))] for photo, draw in zip(batch.tolist(), draws, strict=True)
    ]
    scores = images @ pairs.vectors[rows].float().T / config.temperature
    targets = torch.arange(len(batch))
    return (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2


@torch.no_grad()
def recall(
    queries: Tensor, vectors: Tensor, rows: Sequence[Sequence[int]], ranks: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """Percentage of photos with one of their own captions among the k nearest of `vectors`, for each k in `ranks`."""
    best = (queries.float() @ vectors.float().T).topk(min(max(ranks), len(vectors)), dim=1).indices
    hits = torch.stack([torch.isin(best[query], torch.tensor(captions)) for query, captions in enumerate(rows)])
    return {f"recall@{k}": round(100 * hits[:, :k].any(dim=1).float().mean().item(), 1) for k in ranks}
