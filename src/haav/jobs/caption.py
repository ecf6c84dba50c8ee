"""The job of captioning."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from haav.config import DecodeConfig
from haav.files import write_atomically
from haav.inference.caption_file import MadeWith
from haav.inference.captioner import Captioner
from haav.inference.options import CaptionOptions
from haav.jobs.folder import Folder
from haav.jobs.job import Job, Output, Writer
from haav.jobs.shipped_files import ShippedFiles
from haav.jobs.sinks import sinks
from haav.jobs.source import SourcePart


@dataclass(frozen=True)
class CaptionJob(Job):
    models: tuple[ShippedFiles, ...]
    decode: DecodeConfig
    options: CaptionOptions
    made_with: MadeWith
    out: str
    format: str = "jsonl"
    batch: int | None = None
    device: str = "cpu"
    precision: str | None = None
    backend: str = "auto"

    @property
    def ending(self) -> str:  # type: ignore[override]
        return sinks.get(self.format).ending

    def identity(self) -> dict[str, Any]:
        return {"output": self.format, "made_with": asdict(self.made_with)}

    def writer(self) -> Writer:
        loaded = [
            Captioner.from_pretrained(model.place(), self.device, self.precision, backend=self.backend)
            for model in self.models
        ]
        joined = Captioner.ensemble(loaded)
        captioner = joined.with_config(replace(joined.config, decode=self.decode))

        def write(part: SourcePart, file: BinaryIO) -> Output:
            output = Output()
            sink = sinks.get(self.format)(file, asdict(self.made_with))
            for photo in captioner.stream(part.items(), self.options, self.batch):
                sink.add(photo)
                output.add(photo.name, None if photo.error is None else str(photo.error))
            sink.close()
            return output

        return write

    def join(self, parts: int, out: Path) -> None:
        """Put all parts together into one file, in the order of the source."""
        folder, names = Folder(self.out), [self.file(index) for index in range(parts)]
        write_atomically(out, lambda file: sinks.get(self.format).join(folder, names, file))
