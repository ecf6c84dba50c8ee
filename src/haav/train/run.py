"""The files of a run: config, vocabulary, log, checkpoint, best model, plot of curves, TensorBoard events."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
import yaml

from haav import distributed
from haav.config import Config, to_dict
from haav.errors import CheckpointError, ConfigError
from haav.files import json_of, write_atomically, write_together
from haav.locks import try_lock
from haav.model.build import load_config
from haav.plots import new_figure
from haav.text import Vocabulary

CONFIG, WORDS, METRICS = "config.yaml", "vocabulary.json", "metrics.jsonl"
CHECKPOINT, BEST, CURVES, BOARD, LOCK = "checkpoint.safetensors", "best", "curves.png", "tensorboard", ".lock"


class RunFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint, self.best = folder / CHECKPOINT, folder / BEST
        self._board: Any = None
        self._lock: IO[bytes] | None = None

    def lock(self, device: torch.device) -> None:
        """Keep other commands from training in this folder until `close`, or until this process ends."""
        taken = False
        if distributed.rank() == 0:
            with suppress(OSError):  # a file system without locks
                self._lock = open(self.folder / LOCK, "ab")  # noqa: SIM115
                taken = not try_lock(self._lock)
        if distributed.total(torch.tensor(float(taken), device=device)):  # every process raises
            raise ConfigError(
                f"another command is training in {self.folder}.\n"
                "  Wait until it ends, or stop it: both would write the same files."
            )

    def claim(self, device: torch.device) -> None:
        """Create the folder and lock it. Raises ConfigError if it already holds a run."""
        taken = (self.folder / CONFIG).exists()
        distributed.wait()  # until every process has looked
        if taken:
            raise ConfigError(
                f"{self.folder} holds a run already.\n"
                f"  Go on with it: haav train --resume {self.folder}, or name another folder with --out."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock(device)

    def begin(self, config: Config, vocabulary: Vocabulary) -> None:
        """Write config and vocabulary. Call it after the first checkpoint: a folder with a config can be resumed."""
        if distributed.rank():
            return  # only the first process writes files
        text = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
        words = json.dumps(vocabulary.to_json(), ensure_ascii=False)
        write_together(
            {
                self.folder / WORDS: lambda path: path.write_text(words, encoding="utf-8"),
                self.folder / CONFIG: lambda path: path.write_text(text, encoding="utf-8"),
            }
        )

    def read(self) -> tuple[Config, Vocabulary]:
        """The config and vocabulary that the run began with"""
        if not (self.folder / CONFIG).exists():
            raise CheckpointError(f"{self.folder} is not a training run: it has no {CONFIG}.")
        try:
            words = json_of((self.folder / WORDS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {self.folder / WORDS}: {error}.") from None
        return load_config(file=self.folder / CONFIG), Vocabulary.from_json(words)

    def rewind(self, step: int) -> None:
        """Remove log rows after the step that the run resumes from."""
        if distributed.rank():
            return
        kept = [row for row in self.metrics() if row["step"] <= step]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        write_atomically(self.folder / METRICS, lambda path: path.write_text(text, encoding="utf-8"))

    def log(self, row: dict[str, Any]) -> None:
        if distributed.rank():
            return
        with open(self.folder / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        board = self._tensorboard()
        for name, value in row.items() if board else ():
            if name not in ("step", "epoch") and isinstance(value, (int, float)):
                board.add_scalar(name, value, row["step"])

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of the log. Truncated and invalid lines are left out."""
        if not (self.folder / METRICS).exists():
            return []
        rows = []
        for line in (self.folder / METRICS).read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json_of(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
        return rows

    def draw(self) -> None:
        """Plot losses and scores by step."""
        if distributed.rank():
            return
        rows = self.metrics()
        figure = new_figure(10, 3.6)
        left, right = figure.subplots(1, 2)
        for name in ("xe", "scst", "contrast", "reward"):
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                left.plot(*zip(*points, strict=True), label=name, linewidth=1)
        for name in ("CIDEr", "BLEU-4"):
            points = [(row["step"], 100 * row[name]) for row in rows if name in row]
            if points:
                right.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"val {name}")
        for axes in (left, right):
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend(frameon=False)
        write_atomically(self.folder / CURVES, lambda path: figure.savefig(path, format="png", dpi=110))

    def close(self) -> None:
        if self._board:
            self._board.close()
            self._board = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _tensorboard(self) -> Any:
        """The TensorBoard writer, or None if TensorBoard is not installed"""
        if self._board is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self._board = False
            else:
                self._board = SummaryWriter(str(self.folder / BOARD))
        return self._board or None
