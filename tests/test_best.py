"""`make best` rebuilds a small edition of the shipped model from photos, and goes on where it was cut off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import ROOT, SAMPLES, SHARED

SMALL = (
    *("--model.d_model", "32", "--model.d_ff", "64", "--model.heads", "2"),
    *("--model.encoder_layers", "1", "--model.decoder_layers", "1"),
    *("--train.epochs", "1", "--train.batch", "16", "--train.warmup_steps", "2", "--decode.beam", "2"),
)


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "coco").is_dir(), reason="needs the COCO photos of ../shared/data")
def test_make_best_builds_a_model_that_captions_and_can_be_cut_off(tmp_path: Path) -> None:
    haav = Path(sys.executable).with_name("haav")
    command = [ROOT / "docs/experiments/best.sh", SHARED, tmp_path / "out", "80", *SMALL]
    log = tmp_path / "log.txt"
    with open(log, "w") as file:
        run = subprocess.Popen(
            command, env=os.environ | {"HAAV": str(haav)}, stdout=file, stderr=file, start_new_session=True
        )
        while run.poll() is None and not (tmp_path / "out/xe/config.yaml").exists():
            time.sleep(0.2)
        os.killpg(run.pid, 9)
        run.wait()
    assert run.returncode == -9, log.read_text()[-2000:]
    again = subprocess.run(command, env=os.environ | {"HAAV": str(haav)}, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-2000:]
    scores = json.loads((tmp_path / "out/scst-scores.json").read_text())
    assert scores["photos"] == 20
    sample = SAMPLES / "cat.jpg"
    captioned = subprocess.run(
        [haav, "caption", "--model", tmp_path / "out/best", "--json", sample], capture_output=True, text=True
    )
    assert captioned.returncode == 0, captioned.stderr
    caption = json.loads(captioned.stdout.splitlines()[0])
    assert caption["caption"]
    assert set(caption["words"][0]["views"]) == {"patches", "text_whole"}
