"""Write explanations of photos into a folder."""

from __future__ import annotations

import json
from pathlib import Path

from haav.files import make_folder, write_atomically
from haav.inference.captioner import Captioner
from haav.inference.options import CaptionOptions
from haav.inference.stream import CaptionedPhoto
from haav.plots import check_installed
from haav.studies.explain import explain
from haav.studies.explain_figure import draw
from haav.studies.html import render_explanation


class Pages:
    """A folder of explanations, with a page, a figure and a data file for each photo."""

    def __init__(self, folder: Path) -> None:
        check_installed("explanations")
        self.folder = make_folder(folder)
        self.taken: set[str] = set()

    def add(self, captioner: Captioner, photo: CaptionedPhoto, options: CaptionOptions | None = None) -> Path:
        """Explain a photo that `Captioner.stream` captioned with these options. Returns the path of its page."""
        (explanation,) = explain(captioner, [photo], options)
        name, image, data = photo.name, photo.image, explanation.to_json()
        assert image is not None
        base = self._free("photo" if name == "-" else Path(name).stem[:100])
        page = self.folder / f"{base}.html"
        text = json.dumps({"image": name, **data}, ensure_ascii=False, indent=1)
        write_atomically(self.folder / f"{base}.json", lambda file: file.write_text(text, encoding="utf-8"))
        write_atomically(self.folder / f"{base}.png", lambda file: draw(file, image, explanation))
        html = render_explanation(Path(name).name, image, data)
        write_atomically(page, lambda file: file.write_text(html, encoding="utf-8"))
        return page

    def _free(self, stem: str) -> str:
        """A file stem that is not in use. Photos of different folders may share a name."""
        base, suffix = stem, 1
        while base in self.taken:
            suffix += 1
            base = f"{stem}-{suffix}"
        self.taken.add(base)
        return base
