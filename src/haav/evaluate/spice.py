"""SPICE (Anderson et al. 2016), computed by its own jar. It needs Java and the models of the parser.

The wheel of pycocoevalcap contains the jar, but not the two jars of CoreNLP 3.6.0 that it needs. The models are
340 MB.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from haav.errors import DataError

NEEDED = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
MINUTES = 60


def missing() -> str | None:
    """Why SPICE cannot run here, or None if it can."""
    spec = find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        return 'pycocoevalcap not found: pip install "haav[coco]"'
    if shutil.which("java") is None:
        return "java not found"
    folder = _folder()
    lacking = [name for name in NEEDED if not (folder / "lib" / name).is_file()]
    return f"CoreNLP models not found: put {' and '.join(lacking)} into {folder / 'lib'}" if lacking else None


def spice(captions: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """F-score of the scene graph of each caption. NaN from the parser counts as 0, as in COCO's tools."""
    reason = missing()
    if reason:
        raise DataError(f"SPICE cannot run: {reason}.")
    entries = [
        {"image_id": index, "test": text, "refs": list(texts)}
        for index, (text, texts) in enumerate(zip(captions, references, strict=True))
    ]
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch, "in.json"), Path(scratch, "out.json")
        source.write_text(json.dumps(entries))
        command = ["java", "-jar", "-Xmx8G", "spice-1.0.jar", str(source), "-out", str(target), "-subset", "-silent"]
        try:
            run = subprocess.run(
                command, cwd=_folder(), capture_output=True, text=True, timeout=MINUTES * 60, check=False
            )
        except subprocess.TimeoutExpired:
            raise DataError(f"SPICE's jar took more than {MINUTES} minutes.") from None
        if run.returncode or not target.exists():
            raise DataError(f"SPICE's jar failed: {run.stderr.strip()[-300:]}")
        scores = {entry["image_id"]: entry["scores"]["All"]["f"] for entry in json.loads(target.read_text())}
    return [float(scores[index] or 0) if scores[index] == scores[index] else 0.0 for index in range(len(entries))]


def _folder() -> Path:
    spec = find_spec("pycocoevalcap")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "spice"
