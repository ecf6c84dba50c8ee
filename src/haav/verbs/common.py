"""What several verbs need."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from haav.errors import ConfigError

if TYPE_CHECKING:
    from haav.captioner import Captioner

Overrides = list[tuple[str, str]]
"""dotted flags as they were typed, with their values"""


def load_captioner(paths: str, overrides: Overrides | None, device: str = "cpu") -> Captioner:
    from haav.captioner import Captioner
    from haav.config import override
    from haav.presets import flags_from

    captioner = Captioner.ensemble([Captioner.from_pretrained(path, device) for path in listed(paths)])
    decode = {}
    for (section, *rest), given in flags_from(overrides or []).items():
        if section != "decode":
            raise ConfigError(f"'{given.spelling}' cannot be changed once a model is trained; --decode.… can.")
        decode[".".join(rest)] = given.value
    if decode:
        captioner = captioner.with_config(override(captioner.config, "decode", decode))
    return captioner


def listed(value: str) -> list[str]:
    return [part for part in value.split(",") if part]


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))
