"""The text database: sentences with their vectors and owners.

It is a directory with `entries.jsonl` (one sentence and its owners per line), `vectors.safetensors` and `manifest.json`
(the sources of the sentences). Owners are the training photos that a sentence is a caption of. A photo never retrieves
its own captions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from haav.errors import DataError
from haav.files import json_of, require_files, write_atomically
from haav.weights.hub import file_digest

FORMAT = "haav-textdb-1"
ENTRIES, VECTORS, MANIFEST = "entries.jsonl", "vectors.safetensors", "manifest.json"
FAISS_ABOVE = 1_000_000
CHUNK = 4096
"""queries scored at once"""


@dataclass(frozen=True)
class Entry:
    sentence: str
    owners: tuple[str, ...] = ()
    """photos that it is a caption of"""


class EntryLines(Sequence[Entry]):
    """Entries as they are in a file, each parsed when it is asked for: a caption reads a few of tens of thousands"""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, row: int) -> Entry: ...
    @overload
    def __getitem__(self, row: slice) -> EntryLines: ...
    def __getitem__(self, row: int | slice) -> Entry | EntryLines:
        if isinstance(row, slice):
            return EntryLines(self._lines[row])
        sentence, owners = json_of(self._lines[row])
        return Entry(sentence, tuple(owners))

    def perhaps_owned(self) -> Iterator[int]:
        """Rows of the entries that may have owners, found without parsing. In a packed model, no entry has any."""
        return (row for row, line in enumerate(self._lines) if not line.endswith("[]]"))


@dataclass(frozen=True)
class Manifest:
    encoder: str
    """the network that made the vectors"""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """file, kind, split, sentences and excluded photos of each source"""
    format: str = FORMAT
    origin: str = ""
    """for a compact database, the fingerprint of the database that it was made from"""


class TextDatabase:
    def __init__(self, entries: Sequence[Entry], vectors: Tensor, manifest: Manifest) -> None:
        assert len(entries) == len(vectors)
        self.entries = entries if isinstance(entries, EntryLines) else tuple(entries)
        self.vectors = vectors
        self.manifest = manifest

    @property
    def sentences(self) -> list[str]:
        return [entry.sentence for entry in self.entries]

    @property
    def encoder(self) -> str:
        return self.manifest.encoder

    @cached_property
    def fingerprint(self) -> str:
        """Changes with any sentence, owner or vector."""
        digest = hashlib.sha256(self.vectors.numpy().tobytes())
        for entry in self.entries:
            digest.update(json.dumps([entry.sentence, entry.owners]).encode())
        return digest.hexdigest()[:16]

    @property
    def origin(self) -> str:
        """The fingerprint before `compact`, which models trained with it know."""
        return self.manifest.origin or self.fingerprint

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def _owned(self) -> dict[str, list[int]]:
        owned: dict[str, list[int]] = {}
        for row in self.entries.perhaps_owned() if isinstance(self.entries, EntryLines) else range(len(self)):
            for owner in self.entries[row].owners:
                owned.setdefault(owner, []).append(row)
        return owned

    def rows_of(self, photo: str) -> list[int]:
        """Rows of the entries that are captions of a photo."""
        return self._owned.get(photo, [])

    def search(
        self, queries: Tensor, top: int, exclude_owner: Sequence[str | None] | None = None, backend: str = "auto"
    ) -> tuple[Tensor, Tensor]:
        """The `top` nearest sentences of each query: scores and rows, (Q, top), best first.

        `exclude_owner[q]`: the photo of query q; none of its own captions is returned.
        `backend`: torch, faiss, or auto (faiss above a million sentences where it is installed).
        """
        banned = [self.rows_of(owner) if owner else [] for owner in exclude_owner or [None] * len(queries)]
        if top + max(map(len, banned), default=0) > len(self):
            raise DataError(
                f"{top} sentences were asked for; the text database has {len(self)}, its askers' own included."
            )
        if backend == "faiss" or (backend == "auto" and len(self) > FAISS_ABOVE and _faiss() is not None):
            return self._search_faiss(queries, top, banned)
        scores, rows = [], []
        for start in range(0, len(queries), CHUNK):
            similarity = F.linear(queries[start : start + CHUNK].float(), self._searchable)
            for query, captions in enumerate(banned[start : start + CHUNK]):
                if captions:
                    similarity[query, captions] = -torch.inf
            best = similarity.topk(top, dim=1)
            scores.append(best.values)
            rows.append(best.indices)
        return torch.cat(scores), torch.cat(rows)

    @cached_property
    def _searchable(self) -> Tensor:
        return self.vectors.float()

    def _search_faiss(self, queries: Tensor, top: int, banned: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Searches an exact index. It returns `extra` more rows, as many as may have to be left out."""
        index = self._faiss_index
        extra = max(map(len, banned), default=0)
        all_scores, all_rows = (torch.from_numpy(part) for part in index.search(queries.float().numpy(), top + extra))
        scores, rows = torch.empty(len(queries), top), torch.empty(len(queries), top, dtype=torch.int64)
        for query, captions in enumerate(banned):
            kept = ~torch.isin(all_rows[query], torch.tensor(list(captions), dtype=torch.int64))
            scores[query], rows[query] = all_scores[query][kept][:top], all_rows[query][kept][:top]
        return scores, rows

    @cached_property
    def _faiss_index(self) -> Any:
        faiss = _faiss()
        if faiss is None:
            raise DataError("faiss is not installed.\n  pip install faiss-cpu")
        index = faiss.IndexFlatIP(self.vectors.shape[1])
        index.add(self._searchable.numpy())
        return index

    def compact(self) -> TextDatabase:
        """A copy to distribute: the same sentences with 8-bit vectors and without owners."""
        rounded = _dequantise(*_quantise(self.vectors))
        manifest = replace(self.manifest, origin=self.origin)
        return TextDatabase([Entry(entry.sentence) for entry in self.entries], rounded, manifest)

    def save(self, directory: str | Path, quantised: bool = False) -> None:
        """`quantised`: save vectors in 8 bits, which is lossless for a database made by `compact`"""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {"vectors": self.vectors.contiguous()}
        if quantised:
            tensors["vectors"], tensors["scales"] = _quantise(self.vectors)
        lines = "".join(
            json.dumps([entry.sentence, list(entry.owners)], ensure_ascii=False) + "\n" for entry in self.entries
        )
        write_atomically(directory / ENTRIES, lambda path: path.write_text(lines, encoding="utf-8"))
        write_atomically(directory / VECTORS, lambda path: save_file(tensors, path))
        stamped = asdict(self.manifest) | {"fingerprint": self.fingerprint, "files": _digests(directory)}
        write_atomically(
            directory / MANIFEST, lambda path: path.write_text(json.dumps(stamped, indent=1), encoding="utf-8")
        )

    @classmethod
    def load(cls, directory: str | Path) -> TextDatabase:
        directory = Path(directory)
        require_files(directory, (MANIFEST, ENTRIES, VECTORS), "Make a text database with: haav textdb")
        try:
            data = json_of((directory / MANIFEST).read_text(encoding="utf-8"))
            entries: Sequence[Entry] = EntryLines((directory / ENTRIES).read_text(encoding="utf-8").splitlines())
            known = data.get("files") == _digests(directory)  # the same bytes as when the fingerprint was computed
            entries = entries if known else list(entries)  # parsed here, so that damage is named
            tensors = load_file(directory / VECTORS)
            vectors = tensors["vectors"]
            if "scales" in tensors:
                vectors = _dequantise(vectors, tensors["scales"])
            fingerprint, files = data.pop("fingerprint"), data.pop("files", None)
            manifest = Manifest(**data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise DataError(f"text database {directory} is damaged: {error}.") from None
        if manifest.format != FORMAT or len(entries) != len(vectors):
            raise DataError(
                f"text database {directory} is not of format '{FORMAT}', or its files do not belong together."
            )
        database = cls(entries, vectors, manifest)
        if known:
            database.__dict__["fingerprint"] = fingerprint
        elif files is not None or database.fingerprint != fingerprint:
            raise DataError(f"text database {directory} is damaged: its fingerprint does not match.")
        return database


def _digests(directory: Path) -> dict[str, str]:
    """SHA-256 of sentences and vectors as they are on disk"""
    return {name: file_digest(directory / name) for name in (ENTRIES, VECTORS)}


def _quantise(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """(N, D) → int8 (N, D), and the scale of each row (N, 1)"""
    scales = vectors.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return (vectors.float() / scales).round().to(torch.int8), scales


def _dequantise(steps: Tensor, scales: Tensor) -> Tensor:
    return steps.float().mul_(scales)


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        return None
    return faiss


def merge_entries(entries: Iterable[Entry]) -> list[Entry]:
    """Each sentence once, with all of its owners, in order of first appearance."""
    owners: dict[str, dict[str, None]] = {}
    for entry in entries:
        owners.setdefault(" ".join(entry.sentence.split()), {}).update(dict.fromkeys(entry.owners))
    return [Entry(sentence, tuple(known)) for sentence, known in owners.items() if sentence]


def sample_entries(entries: Sequence[Entry], limit: int) -> list[Entry]:
    """At most `limit` entries, in their order. The sample is drawn by a hash of the sentence."""
    if limit < 1:
        raise DataError(f"a text database has at least 1 sentence, not {limit}.")

    def sentence_hash(row: int) -> bytes:
        return hashlib.blake2b(entries[row].sentence.encode(), digest_size=8).digest()

    return [entries[row] for row in sorted(sorted(range(len(entries)), key=sentence_hash)[:limit])]


def read_text_file(path: Path) -> Iterator[Entry]:
    """Reads one sentence per line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            yield Entry(line)


def read_visual_genome(path: Path, exclude: frozenset[str] = frozenset()) -> Iterator[Entry]:
    """Phrases of `attributes.json` ("red car") or `relationships.json` ("man riding horse"), as Xmodal-Ctx takes them.

    `exclude`: Visual Genome or COCO image ids whose phrases stay out (photos shared with val or test).
    """
    for image in json_of(path.read_text(encoding="utf-8")):
        if {str(image.get("image_id")), str(image.get("coco_id"))} & exclude:
            continue
        for item in image.get("attributes", ()):
            for attribute in item.get("attributes") or ():
                for name in item.get("names", ())[:1]:
                    yield Entry(f"{attribute} {name}".lower())
        for relation in image.get("relationships", ()):
            subject, thing = (_name(relation[side]) for side in ("subject", "object"))
            yield Entry(f"{subject} {relation['predicate']} {thing}".lower())


def _name(item: Mapping[str, Any]) -> str:
    return str(item["name"] if "name" in item else item["names"][0])
