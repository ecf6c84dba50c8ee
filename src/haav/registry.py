"""A typed registry of named variants. A new variant is a new file that registers itself."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Generic, TypeVar

from haav.errors import ConfigError, unknown

T = TypeVar("T")


class Registry(Generic[T]):
    def __init__(self, role: str) -> None:
        self.role = role
        self._entries: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        def add(entry: type[T]) -> type[T]:
            assert name not in self._entries, f"{self.role} '{name}' is registered twice"
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> type[T]:
        if name not in self._entries:
            raise ConfigError(unknown(self.role, name, self._entries))
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))


def import_siblings(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, so that adding a variant changes no other file."""
    for module in pkgutil.iter_modules(path):
        import_module(f"{package}.{module.name}")
