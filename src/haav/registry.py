"""A typed table of named variants; a new variant is a new file that registers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from haav.errors import ConfigError, unknown

T = TypeVar("T")


class Registry(Generic[T]):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        def add(entry: type[T]) -> type[T]:
            assert name not in self._entries, f"{self.kind} '{name}' is registered twice"
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> type[T]:
        if name not in self._entries:
            raise ConfigError(unknown(self.kind, name, self._entries))
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
