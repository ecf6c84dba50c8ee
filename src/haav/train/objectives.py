"""Training objectives: named losses of a batch. All losses share one encoding of each photo."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haav import distributed
from haav.evaluate.reward import CiderReward
from haav.generate.beam import BeamSearch
from haav.generate.loop import generate
from haav.generate.rules import Rule
from haav.generate.sample import Sampling
from haav.model.contrast import MomentumContrast
from haav.model.ensemble import Ensemble, own_views
from haav.model.haav import Haav
from haav.model.losses import self_critical
from haav.text import BOS, EOS, PAD, Vocabulary
from haav.types import Batch, EncodedViews


class Objective(Protocol):
    """A loss that trains a model on captions."""

    def __call__(self, model: Haav, encoded: EncodedViews, batch: Batch) -> dict[str, Tensor]:
        """The first value is the loss; others are for the log."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of the words of the reference captions, weighted by caption."""

    label_smoothing: float = 0.0

    def __call__(self, model: Haav, encoded: EncodedViews, batch: Batch) -> dict[str, Tensor]:
        assert batch.captions is not None
        targets = batch.captions[:, :, 1:]
        real = targets != PAD
        logits = model.teacher_force(batch.captions[:, :, :-1], real, encoded)
        words = targets[real]
        losses = F.cross_entropy(logits.float(), words, label_smoothing=self.label_smoothing, reduction="none")
        if batch.weights is None:
            return {"xe": distributed.mean(losses.sum(), real.sum())}
        weights = batch.weights[:, :, None].expand_as(real)[real]
        return {"xe": distributed.mean((losses * weights).sum(), weights.sum())}


@dataclass(frozen=True)
class SelfCritical:
    """Self-critical sequence training (SCST): raise the probability of captions that earn more than the photo's others.

    Captions are generated without gradients, using the cache, and scored. One teacher-forced pass then computes their
    log-probabilities with gradients. This avoids a graph through every step of the search.
    """

    reward: CiderReward
    vocabulary: Vocabulary
    rules: tuple[Rule, ...]
    hypotheses: int
    explore: str
    max_words: int
    imitate: CrossEntropy = CrossEntropy()
    xe_weight: float = 0.0
    """of the cross-entropy on the reference captions, which keeps words that no reward asks for"""

    def __call__(self, model: Haav, encoded: EncodedViews, batch: Batch) -> dict[str, Tensor]:
        training = model.training
        model.eval()
        strategy = BeamSearch(self.hypotheses) if self.explore == "beam" else Sampling(self.hypotheses)
        generated = generate(model, encoded, strategy, self.rules, self.max_words)
        model.train(training)
        rewards = torch.from_numpy(self.score(batch.ids, generated.tokens)).to(generated.tokens.device, torch.float32)
        inputs = F.pad(generated.tokens[:, :, :-1], (1, 0), value=BOS)
        real = generated.tokens != PAD
        logits = model.teacher_force(inputs, real, encoded)
        word_logprobs = -F.cross_entropy(logits.float(), generated.tokens[real], reduction="none")
        logprobs = word_logprobs.new_zeros(real.shape).masked_scatter(real, word_logprobs).sum(dim=2)
        photos = torch.tensor(len(rewards), device=rewards.device)
        losses = {
            "scst": distributed.mean(self_critical(logprobs, rewards, generated.lengths) * photos, photos),
            "reward": distributed.mean(rewards.mean(dim=1).sum(), photos),
            "best reward": distributed.mean(rewards.amax(dim=1).sum(), photos),
        }
        if self.xe_weight:
            xe = self.imitate(model, encoded, batch)["xe"]
            return {"objective": losses["scst"] + self.xe_weight * xe, **losses, "xe": xe}
        return losses

    def score(self, photos: tuple[str, ...], tokens: Tensor) -> np.ndarray:
        """(B, K) CIDEr-D of captions as word ids (B, K, T)"""
        captions = [[" ".join(self.vocabulary.decode(words)) for words in photo] for photo in tokens.tolist()]
        ended = [[EOS in words for words in photo] for photo in tokens.tolist()]
        return self.reward(photos, captions, ended)


class StepInput:
    """Wraps the batches of a step, so that the engine passes them on without searching them for tensors."""

    def __init__(self, batches: list[Batch], base: Batch | None = None) -> None:
        """`base`: photos that the model to start from knows"""
        self.batches, self.base = batches, base


class Start(nn.Module):
    """The model that training starts from, frozen. What it would say is kept on base data (learning without
    forgetting, Li and Hoiem 2016)."""

    def __init__(self, model: Haav | Ensemble, known_words: int, weight: float) -> None:
        """`known_words`: the words behind them are new, and the start does not say them; `weight`: of the loss"""
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.register_buffer("known", torch.arange(len(model.members[0].decoder.words.weight)) < known_words)
        self.weight = weight

    def train(self, mode: bool = True) -> Start:
        return super().train(False)  # without dropout, whatever the learner does

    def forward(self, model: Haav | Ensemble, batch: Batch) -> Tensor:
        """How far the words of a model are from those of the start: the mean Kullback–Leibler divergence"""
        assert batch.captions is not None
        inputs, real = batch.captions[:, :, :-1], batch.captions[:, :, 1:] != PAD
        distances = []
        for member, start in zip(model.members, self.model.members, strict=True):
            views = own_views(member, batch.views)
            with torch.no_grad():
                logits = start.teacher_force(inputs, real, start.encode(views)).float()
                wanted = logits.masked_fill(~self.get_buffer("known"), -torch.inf).softmax(dim=-1)
            found = member.teacher_force(inputs, real, member.encode(views)).float()
            divergence = F.cross_entropy(found, wanted, reduction="sum") - torch.special.entr(wanted).sum()
            distances.append(distributed.mean(divergence, real.sum()))
        return torch.stack(distances).sum()


class Learner(nn.Module):
    """All trained modules in one. Its forward computes the losses of one step, so that an engine can wrap it."""

    def __init__(
        self,
        model: Haav | Ensemble,
        contrast: MomentumContrast | None,
        objective: Objective,
        contrast_weight: float,
        start: Start | None = None,
    ) -> None:
        super().__init__()
        self.model, self.contrast, self.start = model, contrast, start
        self.objective, self.contrast_weight = objective, contrast_weight

    def forward(self, step: StepInput) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Losses by name, and keys (N, D) to enqueue after the step. "loss" is the sum to minimise.

        A batch without captions has the contrastive loss only. Members of an ensemble are trained independently.
        """
        total: list[Tensor] = []
        named: dict[str, list[Tensor]] = {}
        keys: list[Tensor] = []
        for batch in step.batches:
            for member in self.model.members:
                views = own_views(member, batch.views)
                encoded = member.encode(views)
                losses: dict[str, Tensor] = {}
                if batch.captions is not None:
                    losses |= self.objective(member, encoded, batch)
                    total.append(next(iter(losses.values())))
                if self.contrast is not None:
                    contrast = self.contrast(views, encoded)
                    losses["contrast"] = contrast.loss
                    total.append(self.contrast_weight * contrast.loss)
                    keys.append(contrast.keys[contrast.mask])
                for name, value in losses.items():
                    named.setdefault(name, []).append(value.detach())
        if self.start is not None and step.base is not None:
            distance = self.start(self.model, step.base)
            total.append(self.start.weight * distance)
            named["distance"] = [distance.detach()]
        means = {name: torch.stack(values).mean() for name, values in named.items()}
        return {"loss": torch.stack(total).sum(), **means}, keys

    @torch.no_grad()
    def after_step(self, keys: list[Tensor]) -> None:
        """Enqueue the keys of all processes, and let the momentum encoder follow."""
        if self.contrast is None:
            return
        for part in keys:
            self.contrast.enqueue(distributed.gather(part))
        self.contrast.follow(self.model.encoding)  # type: ignore[arg-type]
