"""What a user would run instead: BLIP-base and GIT-base through transformers, on the same photos.

Their weights are random, since no hub is needed to time them: what a network costs does not depend on its values.
Eleven words are forced, as captions have them. Nothing here says anything about the quality of their captions.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
import torch

import haav
from haav.photos.images import load_image
from haav.studies.bench import seconds

BEAM, WORDS = 3, 11


def others() -> dict[str, Any]:
    """Seconds a photo, batch 1, beam 3"""
    from transformers import BlipConfig, BlipForConditionalGeneration, GitConfig, GitForCausalLM

    torch.manual_seed(0)
    samples = resources.files("haav").joinpath("samples")
    image = load_image(samples.joinpath("cat.jpg").read_bytes())
    captioner = haav.load()
    ours = seconds(lambda: captioner.caption(image, beam=BEAM))
    blip = BlipForConditionalGeneration(BlipConfig()).eval()
    git = GitForCausalLM(GitConfig()).eval()
    options: dict[str, Any] = {"num_beams": BEAM, "max_new_tokens": WORDS, "min_new_tokens": WORDS, "do_sample": False}
    found = {
        "what": f"one photo, beam {BEAM}, {WORDS} words; BLIP and GIT with random weights",
        "words of our caption": len(captioner.caption(image, beam=BEAM).words),
        "haav, pixels to caption, ms": 1000 * ours,
    }
    runs = {
        "BLIP-base at 384 px, float32": (blip, 384, {}),
        "GIT-base at 224 px, float32": (git, 224, {"input_ids": torch.tensor([[101]])}),
    }
    for name, (model, side, more) in runs.items():

        def caption(model: Any = model, side: int = side, more: Any = more) -> None:
            pixels = torch.from_numpy(np.array(image.resize((side, side)))).permute(2, 0, 1)[None].float() / 127.5 - 1
            with torch.no_grad():
                model.generate(pixel_values=pixels, **more, **options)

        took = seconds(caption, times=2)
        found[f"{name}, ms"] = 1000 * took
        found[f"{name}, parameters, M"] = sum(part.numel() for part in model.parameters()) / 1e6
        found[f"{name}, times as long as haav"] = took / ours
    return found
