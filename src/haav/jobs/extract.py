"""The job of extracting views into shards, which training streams."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, BinaryIO

from PIL import Image

from haav.errors import HaavError
from haav.inference.stream import PhotoItem
from haav.jobs.folder import Folder
from haav.jobs.job import Job, Output, Writer, read_record
from haav.jobs.shipped_files import ShippedFiles
from haav.jobs.source import SourcePart
from haav.photos.images import load_image
from haav.provenance import MadeBy, check_made_by
from haav.store import ViewManifest
from haav.store.shards import add_sample, write_index
from haav.types import PhotoView
from haav.views import Extractor, ExtractorOptions, PhotoBatch, build_extractor
from haav.views.batch_size import fitting_batch


@dataclass(frozen=True)
class ExtractJob(Job):
    views: tuple[str, ...]
    options: ExtractorOptions
    """without a bridge and a text database"""
    texts: dict[str, ShippedFiles]
    """"bridge" and "textdb", for the views that need them"""
    manifests: dict[str, ViewManifest]
    made_by: MadeBy
    """the extractors that the model accepts, if there is one"""
    out: str
    batch: int | None = None
    ending: str = "tar"

    @property
    def device(self) -> str:  # type: ignore[override]
        return self.options.device

    def identity(self) -> dict[str, Any]:
        return {"views": {name: manifest.fingerprint for name, manifest in self.manifests.items()}}

    def writer(self) -> Writer:
        texts = {name: files.place() for name, files in self.texts.items()}
        options = replace(self.options, bridge=texts.get("bridge"), textdb=texts.get("textdb"))
        extractors = {name: build_extractor(name, options) for name in self.views}
        for name, extractor in extractors.items():
            check_made_by(self.made_by, {name: extractor.origin}, "the one to be extracted")

        def write(part: SourcePart, file: BinaryIO) -> Output:
            output = Output()
            with tarfile.open(fileobj=file, mode="w") as tar:
                for photo, views in self._extracted(part, extractors, output):
                    add_sample(tar, f"{len(output.ids):09d}", photo, views)
                    output.ids.append(photo)
            return output

        return write

    def _extracted(
        self, part: SourcePart, extractors: dict[str, Extractor], output: Output
    ) -> Iterator[tuple[str, dict[str, PhotoView]]]:
        waiting, size = part.photos(), self.batch or fitting_batch(self.device)
        while batch := list(islice(waiting, size)):
            images = {}
            for photo, item in batch:
                try:
                    images[photo] = _load(item)
                except HaavError as error:
                    output.add(item.name, str(error))
            photos = PhotoBatch(tuple(images), list(images.values()))
            for photo, views in _views(photos, extractors).items():
                failed = views if isinstance(views, str) else None
                output.add(photo, failed)
                if not isinstance(views, str):
                    yield photo, views

    def write_index(self, parts: int) -> None:
        """List the photos of all shards, when all are there."""
        folder, sizes = Folder(self.out), dict[str, int]()

        def names() -> Iterator[str]:
            for index in range(parts):
                ids = read_record(folder, index).ids
                sizes[self.file(index)] = len(ids)
                yield from ids

        write_index(folder.write, self.manifests, sizes, names)


def _load(item: PhotoItem) -> Image.Image:
    return load_image(item.read())


def _views(photos: PhotoBatch, extractors: dict[str, Extractor]) -> dict[str, dict[str, PhotoView] | str]:
    """For each photo its views, or why they cannot be extracted"""
    if not len(photos):
        return {}
    try:
        columns = {name: photos.view(extractor) for name, extractor in extractors.items()}
    except Exception as error:
        if len(photos) == 1:
            return {photos.ids[0]: f"{type(error).__name__}: {error}"}
        results: dict[str, dict[str, PhotoView] | str] = {}
        for photo in photos.apart():  # at least one photo of the batch fails
            results |= _views(photo, extractors)
        return results
    return {photo: {name: views[row] for name, views in columns.items()} for row, photo in enumerate(photos.ids)}


def manifests_of(views: Sequence[str], options: ExtractorOptions) -> dict[str, ViewManifest]:
    """How the views are made by extractors with these options"""
    manifests = {}
    for name in views:
        extractor = build_extractor(name, options)
        origin = extractor.origin if extractor.origin != extractor.fingerprint else ""
        manifests[name] = ViewManifest(extractor.spec, extractor.fingerprint, extractor.licence, origin=origin)
    return manifests


def job_of(
    views: Sequence[str], options: ExtractorOptions, made_by: MadeBy, out: str, batch: int | None = None
) -> ExtractJob:
    """`options`: as `haav extract` has them, with paths on this machine"""
    texts = {
        name: ShippedFiles.of(str(path))
        for name, path in (("bridge", options.bridge), ("textdb", options.textdb))
        if path is not None
    }
    bare = replace(options, bridge=None, textdb=None)
    return ExtractJob(tuple(views), bare, texts, manifests_of(views, options), made_by, out, batch)
