"""Settings: `schema` declares them, `parse` checks them, `load` reads presets, recipes and files."""

from haav.config.parse import Given, SettingPath, changed_settings, flatten, override, parse, to_dict
from haav.config.schema import (
    MAX_CAPTIONS,
    ConfidenceConfig,
    Config,
    ContrastConfig,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    TrainConfig,
)

__all__ = [
    "MAX_CAPTIONS",
    "ConfidenceConfig",
    "Config",
    "ContrastConfig",
    "DataConfig",
    "DecodeConfig",
    "Given",
    "ModelConfig",
    "SettingPath",
    "TrainConfig",
    "changed_settings",
    "flatten",
    "override",
    "parse",
    "to_dict",
]
