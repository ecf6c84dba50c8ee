"""Recipes that ship with the package: each file's head says what it reproduces and how to run it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from haav.errors import ConfigError, unknown


def recipe_names() -> list[str]:
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def find_recipe(name: str) -> Path:
    """A file of the user's, or a recipe by name, with or without `.yaml`"""
    if Path(name).is_file():
        return Path(name)
    short = name.removesuffix(".yaml")
    if short not in recipe_names():
        raise ConfigError(unknown("recipe", name, recipe_names()) + "\n  Or give the path of a YAML file.")
    return Path(str(resources.files(__name__).joinpath(f"{short}.yaml")))
