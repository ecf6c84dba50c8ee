"""The training loop, shared by cross-entropy, self-critical and semi-supervised training.

New and resumed runs use the same loop. A resumed run is bit-identical to an uninterrupted one: its state is in the
checkpoint, and everything else follows from the config.
"""

from __future__ import annotations

import copy
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from haav import distributed
from haav.config import Config, override
from haav.cpu import check_bfloat16
from haav.data.loader import ShardedBatches, ShuffledBatches, StoredPhotos, build_loader, to_device
from haav.errors import CheckpointError, ConfigError, TrainingError
from haav.evaluate.scores import SLOW, evaluate
from haav.inference.captioner import Captioner
from haav.inference.predict import predict
from haav.model.check_views import check_views
from haav.plots import check_installed
from haav.text import PAD
from haav.train.checkpoint import Position, load_checkpoint, save_checkpoint
from haav.train.objectives import StepInput
from haav.train.run import RunFiles
from haav.train.schedule import build_schedule
from haav.train.setup import Setup, prepare
from haav.types import Batch

LOG_EVERY = 20


@dataclass(frozen=True)
class Status:
    """Progress of a run, for a progress bar."""

    step: int
    steps: int
    epoch: int
    losses: dict[str, float]
    captions_per_second: float
    best: float


@dataclass(frozen=True)
class TrainingResult:
    position: Position
    finished: bool
    """False if the run was asked to stop; it can be resumed"""


def train(
    config: Config,
    out: str | Path,
    init: str | Path | None = None,
    report: Callable[[Status], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> TrainingResult:
    """Start a new run in the folder `out`. `init` is a model directory to start from. `say` gets lines about words."""
    files = RunFiles(Path(out))
    fabric = _connect(config)
    with closing(files):
        files.claim(fabric.device)
        with closing(prepare(config, files.folder, init, say=say)) as setup:
            run = _Run(setup, files, report, fabric)
            run.save()
            files.begin(setup.config, setup.vocabulary)
            return run.go()


def resume(
    out: str | Path, epochs: int | None = None, report: Callable[[Status], None] = lambda _: None
) -> TrainingResult:
    """Resume a run from its last checkpoint. `epochs` replaces the total number of epochs."""
    files = RunFiles(Path(out))
    config, vocabulary = files.read()
    if epochs is not None:
        config = override(config, "train", {"epochs": epochs})
    fabric = _connect(config)
    with closing(files):
        files.lock(fabric.device)
        with closing(prepare(config, files.folder, vocabulary=vocabulary)) as setup:
            run = _Run(setup, files, report, fabric)
            run.load()
            return run.go()


class _Run:
    def __init__(self, setup: Setup, files: RunFiles, report: Callable[[Status], None], fabric: Any) -> None:
        self.setup, self.files, self.report = setup, files, report
        self.config = setup.config.train
        self.fabric = fabric
        if distributed.count() > min(self.config.batch, len(setup.labelled)):
            raise ConfigError(f"{distributed.count()} processes cannot share a batch of {self.config.batch} photos.")
        groups = _groups(setup.learner, self.config.weight_decay, self.config.decay_all)
        optimizer = torch.optim.AdamW(groups, fused=True)
        self.learner, self.optimizer = self.fabric.setup(setup.learner, optimizer)
        self.ema = copy.deepcopy(setup.model).requires_grad_(False) if self.config.ema else None
        self.size = min(self.config.batch, len(setup.labelled))
        self.batches = setup.labelled.shuffled(self.size, self.config.seed, distributed.count())
        self.passes = math.ceil(max(1, self.config.epoch_steps) * self.config.accumulate / len(self.batches))
        self.per_epoch = len(self.batches) * self.passes // self.config.accumulate
        self.steps = self.per_epoch * self.config.epochs
        self.schedule = build_schedule(self.config.schedule, self.config.warmup_steps, self.steps, self.per_epoch)
        self.position = Position()
        self.bad_in_a_row = 0

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Modules whose state is saved in a checkpoint"""
        parts: dict[str, nn.Module] = {"learner": self.setup.learner}
        return parts | ({"ema": self.ema} if self.ema is not None else {})

    def save(self) -> None:
        draws = distributed.gather(torch.get_rng_state()[None])
        if distributed.rank() == 0:
            save_checkpoint(
                self.files.checkpoint, self.modules, self.optimizer, self.position, self.setup.fingerprint, draws
            )
        distributed.wait()

    def load(self) -> None:
        self.position = load_checkpoint(
            self.files.checkpoint, self.modules, self.optimizer, self.setup.fingerprint, distributed.rank()
        )
        self.files.rewind(self.position.step)

    def go(self) -> TrainingResult:
        with _stop_signals() as stop:
            while self.position.epoch < self.config.epochs:
                if not self._epoch(stop):
                    self.save()
                    return TrainingResult(self.position, finished=False)
                self.position.epoch, self.position.batch = self.position.epoch + 1, 0
                if self.position.epoch % self.config.evaluate_every == 0 or self.position.epoch == self.config.epochs:
                    self._evaluate()
                self.save()
                if self.config.patience and self.position.worse >= self.config.patience:
                    break
        return TrainingResult(self.position, finished=True)

    def _epoch(self, stop: threading.Event) -> bool:
        """Train the rest of the epoch. Returns False if asked to stop before its end."""
        order = _passes(self.batches, self.position.epoch, self.passes)
        labelled = _from_batch(self.setup.labelled, order, self.position.batch)
        further = self._endless(self.setup.unlabelled, self.config.unlabelled_batch)
        base = self._endless(self.setup.base, self.size)
        started, captions = time.perf_counter(), 0
        steps_left = self.per_epoch - self.position.batch // self.config.accumulate
        for _ in range(steps_left):
            losses, step_captions = self._step(labelled, further, base)
            captions += step_captions * distributed.count()
            self.position.step += 1
            self.position.batch += self.config.accumulate
            rate = captions / (time.perf_counter() - started)
            if losses and (self.position.step % LOG_EVERY == 0 or self.position.step == 1):
                lr = self.optimizer.param_groups[0]["lr"]
                row = {"step": self.position.step, "epoch": self.position.epoch, **losses, "lr": lr}
                self.files.log(row | {"captions_per_second": round(rate, 1)})
            self.report(Status(self.position.step, self.steps, self.position.epoch, losses, rate, self.position.best))
            if distributed.total(torch.tensor(float(stop.is_set()), device=self.fabric.device)):
                return False  # any of the processes was asked to stop
            if self.position.step % self.config.checkpoint_every == 0:
                self.save()
        return True

    def _step(
        self, labelled: Iterator[Batch], further: Iterator[Batch] | None, base: Iterator[Batch] | None
    ) -> tuple[dict[str, float], int]:
        """One optimizer step. Returns its losses (empty if the step was skipped) and its number of captions."""
        self.learner.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * self.schedule(self.position.step)
        self.optimizer.zero_grad(set_to_none=True)
        losses: dict[str, float] = {}
        keys: list[Tensor] = []
        captions = 0
        for part in range(self.config.accumulate):
            batches = [self._draw_captions(self._checked(next(labelled)), part)]
            captions += int((batches[0].captions[:, :, 0] != PAD).sum())  # type: ignore[index]
            if further is not None:
                batches.append(self._checked(next(further)))
            known = None if base is None else self._draw_captions(self._checked(next(base)), part)
            part_losses, new_keys = self.learner(StepInput(batches, known))
            self.fabric.backward(part_losses["loss"] / self.config.accumulate)
            keys += new_keys
            for name, value in part_losses.items():
                losses[name] = (
                    losses.get(name, 0.0)
                    + distributed.total(value).item() / distributed.count() / self.config.accumulate
                )
        norm = self.fabric.clip_gradients(
            self.learner, self.optimizer, max_norm=self.config.clip or math.inf, error_if_nonfinite=False
        )
        losses["gradient norm"] = float(norm) if isinstance(norm, Tensor) else math.nan
        if not all(map(math.isfinite, losses.values())):
            self._skip(losses)
            return {}, captions
        self.bad_in_a_row = 0
        self.optimizer.step()
        self._after_step(keys)
        return losses, captions

    @torch.no_grad()
    def _after_step(self, keys: list[Tensor]) -> None:
        self.setup.learner.after_step(keys)
        if self.ema is not None:
            for old, new in zip(self.ema.state_dict().values(), self.setup.model.state_dict().values(), strict=True):
                old.lerp_(new, 1 - self.config.ema) if old.is_floating_point() else old.copy_(new)

    def _skip(self, losses: dict[str, float]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.position.skipped += 1
        self.bad_in_a_row += 1
        if self.bad_in_a_row >= self.config.bad_steps:
            bad = [name for name, value in losses.items() if not math.isfinite(value)]
            raise TrainingError(
                f"{self.bad_in_a_row} steps in a row had no finite {', '.join(bad)} (step {self.position.step}, "
                f"learning rate {self.optimizer.param_groups[0]['lr']:.2g}).\n"
                f"  The last good checkpoint is safe in {self.files.checkpoint}. Lower train.lr, raise "
                "train.warmup_steps, or look for broken features: haav store verify."
            )

    def _checked(self, batch: Batch) -> Batch:
        """Check the views while they are still on the CPU, then move the batch to the device."""
        check_views(self.setup.model, batch.views)
        return to_device(batch, self.fabric.device)

    def _draw_captions(self, batch: Batch, part: int) -> Batch:
        """Draw at most `train.captions` captions per photo. The draw differs between epochs."""
        captions = batch.captions
        assert captions is not None
        if captions.shape[1] <= self.config.captions:
            return batch
        batch_index = self.position.step * self.config.accumulate + part
        generator = torch.Generator().manual_seed(1_000_003 * self.config.seed + batch_index)
        priority = torch.rand(captions.shape[:2], generator=generator).to(captions.device)
        priority = priority.masked_fill(captions[:, :, 0] == PAD, -1.0)
        chosen = priority.topk(self.config.captions, dim=1).indices
        kept = captions.gather(1, chosen[..., None].expand(-1, -1, captions.shape[2]))
        longest = int((kept != PAD).sum(dim=2).max())
        weights = None if batch.weights is None else batch.weights.gather(1, chosen)
        return Batch(batch.ids, batch.views, kept[:, :, :longest], weights)

    def _endless(self, photos: StoredPhotos | None, size: int) -> Iterator[Batch] | None:
        """Endless batches of further photos. The order depends only on the seed and the step."""
        if photos is None:
            return None
        start = self.position.step * self.config.accumulate
        return _round_and_round(photos, min(size, len(photos)), self.config.seed, start)

    def _evaluate(self) -> None:
        """Evaluate on val, never on test. Save the best model so far in `best/`, or the last if there is no val."""
        setup = self.setup
        model = self.ema if self.ema is not None else setup.model
        captioner = Captioner(model, setup.saved_config, setup.vocabulary, novelty=setup.novelty)
        if not setup.val:
            if distributed.rank() == 0:
                captioner.save_pretrained(self.files.best)
            model.train()
            return
        part = distributed.share(setup.val)
        try:
            predicted = predict(captioner, setup.store, part, seed=0) if part else ()
            part_captions = {photo: caption.text for photo, caption in predicted}
        except CheckpointError:
            raise TrainingError(
                f"training diverged: after step {self.position.step}, the scores of the model are not finite numbers "
                f"({self.position.skipped} steps were skipped, the last learning rate was "
                f"{self.optimizer.param_groups[0]['lr']:.2g}).\n"
                "  Lower train.lr or raise train.warmup_steps, and start a new run."
            ) from None
        captions = distributed.gather_texts(part_captions, self.fabric.device)
        model.train()
        scores = evaluate(captions, {photo.id: photo.captions for photo in setup.val}, skip=SLOW, resamples=1).scores
        row = {name: scores[name].value for name in ("CIDEr", "BLEU-4", "ROUGE-L")}
        self.files.log({"step": self.position.step, "epoch": self.position.epoch, **row})
        self.position.worse += 1
        if row["CIDEr"] > self.position.best:
            self.position.best, self.position.best_step, self.position.worse = row["CIDEr"], self.position.step, 0
            if distributed.rank() == 0:
                captioner.save_pretrained(self.files.best)
        self.files.draw()


def _groups(learner: nn.Module, weight_decay: float, decay_all: bool) -> list[dict[str, Any]]:
    """Parameter groups. Weight decay applies to matrices only, or to everything with `decay_all`."""
    trained = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    decays = [parameter for parameter in trained if decay_all or parameter.dim() > 1]
    rest = [parameter for parameter in trained if not decay_all and parameter.dim() <= 1]
    return [{"params": decays, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def _passes(batches: ShuffledBatches | ShardedBatches, epoch: int, passes: int) -> Iterator[list[int]]:
    """The batches of an epoch that goes through the photos `passes` times"""
    for number in range(epoch * passes, (epoch + 1) * passes):
        batches.epoch = number
        yield from batches


def _from_batch(photos: StoredPhotos, batches: Iterator[list[int]], start: int) -> Iterator[Batch]:
    """This process's share of the batches, beginning with batch `start`"""
    order = map(distributed.share, islice(batches, start, None))
    return iter(build_loader(photos, order, workers=0))  # type: ignore[arg-type]


def _round_and_round(photos: StoredPhotos, size: int, seed: int, start: int) -> Iterator[Batch]:
    batches = photos.shuffled(size, seed, distributed.count())
    epoch, place = divmod(start, len(batches))
    while True:
        yield from _from_batch(photos, _passes(batches, epoch, passes=1), place)
        epoch, place = epoch + 1, 0


def _connect(config: Config) -> Any:
    """The Fabric engine. Under torchrun it is connected to the other processes."""
    try:
        from lightning_fabric import Fabric
    except ImportError:
        raise TrainingError('training needs lightning-fabric.\n  pip install "haav[train]"') from None
    check_installed("the curves of a run")
    if config.train.precision == "bf16" and not torch.cuda.is_available():
        check_bfloat16()
    keep_memory()
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    fabric = Fabric(
        accelerator="auto",
        devices=local,
        num_nodes=max(1, world // local),
        strategy="ddp" if world > 1 else "auto",
        precision={"32": "32-true", "bf16": "bf16-mixed"}[config.train.precision],  # type: ignore[arg-type]
    )
    if world > 1:
        fabric.launch()
    return fabric


def keep_memory() -> None:
    """Stop glibc from returning large blocks to the system. Does nothing on other systems than Linux.

    Otherwise every step requests them again, page by page, which takes 8 % of its time.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event instead of ending the process. A second Ctrl-C ends the process."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    old = {signal_number: signal.getsignal(signal_number) for signal_number in (signal.SIGINT, signal.SIGTERM)}

    def ask(signal_number: int, frame: Any) -> None:
        stop.set()
        signal.signal(signal.SIGINT, old[signal.SIGINT])

    for signal_number in old:
        signal.signal(signal_number, ask)
    try:
        yield stop
    finally:
        for signal_number, handler in old.items():
            signal.signal(signal_number, handler)
