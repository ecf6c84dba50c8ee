"""Hub views run for real, on small random models of the same classes saved to a folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from haav.cli.main import main
from haav.errors import ViewError
from haav.store.records import pack, unpack
from haav.views import ExtractorOptions, PhotoBatch, build_extractor, extractors
from haav.views.embedded.regions import CROPS, crops
from haav.views.hub import clip as hub_clip
from haav.views.hub import detr as hub_detr
from haav.views.retrieval.textdb import Entry, Manifest, TextDatabase
from haav.weights import hub

transformers = pytest.importorskip("transformers", reason='the hub views need transformers: pip install "haav[hub]"')

SIZES = ((50, 40), (40, 64), (33, 33), (90, 31), (40, 64))
CLIP_SIDE, PATCH, WIDTH, SHARED = 32, 8, 24, 12
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "layer_type": "basic"}


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    """Coloured blocks, so that crops and sizes make a difference"""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


PICTURES = [picture(seed, size) for seed, size in enumerate(SIZES)]


def batch(*pictures: Image.Image) -> PhotoBatch:
    return PhotoBatch([f"{index}.jpg" for index in range(len(pictures))], pictures)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders clip, detr, rtdetr, yolos as `save_pretrained` writes them; preprocessor files as the hub has them."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    transformers.utils.logging.set_verbosity_error()
    tower = {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": SHARED}
    letters = [chr(97 + number) for number in range(26)]
    words = ["<|startoftext|>", *letters, *(f"{letter}</w>" for letter in letters), "<|endoftext|>"]
    ends = {"bos_token_id": 0, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
    config = transformers.CLIPConfig(
        text_config={"vocab_size": len(words), "hidden_size": 16, "max_position_embeddings": 12, **tower, **ends},
        vision_config={"hidden_size": WIDTH, "image_size": CLIP_SIDE, "patch_size": PATCH, **tower},
        projection_dim=SHARED,
    )
    clip = transformers.CLIPModel(config)
    for parameter in clip.parameters():  # CLIP's initial weights are so small that all photos look alike
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    clip.save_pretrained(folder / "clip")
    write(folder / "clip" / "vocab.json", {word: number for number, word in enumerate(words)})
    (folder / "clip" / "merges.txt").write_text("#version: 0.2\n")
    write(folder / "clip" / "tokenizer_config.json", {"tokenizer_class": "CLIPTokenizer"})
    write(folder / "clip" / "preprocessor_config.json", CLIP_PROCESSOR)

    small = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "decoder_layers": 2, "num_labels": 5}
    small |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    detr = transformers.DetrForObjectDetection(
        transformers.DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config={"model_type": "resnet", "out_features": ["stage4"], **RESNET},
            encoder_layers=1,
            num_queries=7,
            **small,
        )
    )
    spread(detr.class_labels_classifier, detr.bbox_predictor.layers[-1], detr.model.query_position_embeddings)
    detr.class_labels_classifier.bias.data[-1] = -8  # "no object" may not win everywhere
    detr.bbox_predictor.layers[-1].bias.data[:] = 4  # boxes so large that some reach over the edge
    detr.save_pretrained(folder / "detr")
    write(folder / "detr" / "preprocessor_config.json", DETR_PROCESSOR)
    rtdetr = transformers.RTDetrForObjectDetection(
        transformers.RTDetrConfig(
            backbone_config={"model_type": "rt_detr_resnet", "out_features": ["stage2", "stage3", "stage4"], **RESNET},
            encoder_hidden_dim=16,
            encoder_in_channels=[16, 24, 32],
            decoder_in_channels=[16, 16, 16],
            decoder_n_points=2,
            num_queries=60,
            **small,
        )
    )
    spread(rtdetr.model.decoder.class_embed[-1])
    yolos = transformers.YolosForObjectDetection(
        transformers.YolosConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=[64, 64],
            patch_size=16,
            num_detection_tokens=6,
            num_labels=5,
        )
    )
    spread(yolos.class_labels_classifier.layers[-1])
    yolos.vit.embeddings.detection_tokens.data.normal_()
    yolos.save_pretrained(folder / "yolos")
    write(folder / "yolos" / "preprocessor_config.json", DETR_PROCESSOR)
    rtdetr.save_pretrained(folder / "rtdetr")
    write(folder / "rtdetr" / "preprocessor_config.json", RTDETR_PROCESSOR)
    return folder


def spread(*layers: torch.nn.Module) -> None:
    """Random heads say nearly the same of every query: make them differ, or sorting would mean nothing."""
    for layer in layers:
        layer.weight.data.normal_(std=1.5)
        if getattr(layer, "bias", None) is not None:
            layer.bias.data.zero_()


def write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings), encoding="utf-8")


MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
# the old layout of openai's repositories: plain numbers
CLIP_PROCESSOR = {
    "crop_size": CLIP_SIDE,
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": MEAN,
    "image_std": STD,
    "resample": 3,
    "size": CLIP_SIDE,
}
DETR_PROCESSOR = {
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "size": {"shortest_edge": 48, "longest_edge": 80},
}
RTDETR_PROCESSOR = {
    "do_normalize": False,
    "do_pad": False,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 64, "width": 64},
}


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """A copy of the models that a test may damage"""
    return Path(shutil.copytree(models, tmp_path / "models"))


def database(models: Path, vectors: torch.Tensor, owners: dict[int, str] | None = None) -> TextDatabase:
    entries = [Entry(f"text {row}", (owners[row],) if owners and row in owners else ()) for row in range(len(vectors))]
    encoder = hub_clip.text_encoder_name(hub.find_hub_model(models / "clip", "clip_text_model"))
    return TextDatabase(entries, torch.nn.functional.normalize(vectors, dim=1).half(), Manifest(encoder))


def random_database(models: Path, rows: int = 80) -> TextDatabase:
    return database(models, torch.randn(rows, SHARED, generator=torch.Generator().manual_seed(1)))


def text_view(models: Path, name: str, textdb: TextDatabase | None = None) -> hub_clip.ClipTextExtractor:
    textdb = textdb or random_database(models)
    view = build_extractor(
        name, ExtractorOptions(clip_text_model=str(models / "clip"), textdb=textdb, bridge="left out")
    )
    assert isinstance(view, hub_clip.ClipTextExtractor)
    return view


# Preparing photos


def prepared(models: Path, name: str, picture: Image.Image) -> torch.Tensor:
    defaults = {"do_center_crop": True} if name == "clip" else None
    return hub.load_preparation(hub.find_hub_model(models / name, "model"), defaults)(picture)


@pytest.mark.parametrize(("name", "processor"), [("clip", "CLIP"), ("detr", "Detr"), ("rtdetr", "RTDetr")])
def test_photos_are_prepared_as_transformers_does(models: Path, name: str, processor: str) -> None:
    own = processor_class(processor).from_pretrained(models / name)
    for image in [*PICTURES, picture(7, (200, 48)), picture(8, (48, 61)), picture(9, (31, 300)), picture(10, (3, 4))]:
        expected = own(images=image, return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(prepared(models, name, image), expected, atol=1e-5, rtol=1e-5)


def processor_class(name: str) -> Any:
    """transformers' processors of plain Pillow, which do without torchvision; a reference here, no dependency"""
    pillow_class = getattr(transformers, f"{name}ImageProcessorPil", None)
    if pillow_class is None:
        pytest.skip("this transformers has no Pillow processors to compare with")
    return pillow_class


def test_clip_is_prepared_without_a_preprocessor_file_too(folder: Path) -> None:
    expected = hub_clip.ClipGridExtractor(folder / "clip").prepare
    (folder / "clip" / "preprocessor_config.json").unlink()
    found = hub_clip.ClipGridExtractor(folder / "clip").prepare
    torch.testing.assert_close(found(PICTURES[0]), expected(PICTURES[0]))


def test_newer_folders_keep_the_settings_in_processor_config(folder: Path) -> None:
    expected = hub_detr.DetrObjectsExtractor(folder / "detr").prepare
    (folder / "detr" / "preprocessor_config.json").unlink()
    write(folder / "detr" / "processor_config.json", {"image_processor": DETR_PROCESSOR})
    assert hub_detr.DetrObjectsExtractor(folder / "detr").prepare == expected


def test_a_strip_is_not_blown_up(models: Path) -> None:
    """2 × 9000 pixels: the whole strip at 32 pixels' height would have 32 × 144,000"""
    prepare = hub_clip.ClipGridExtractor(models / "clip").prepare
    sizes: list[tuple[int, int]] = []

    strip = Image.new("RGB", (9000, 2), "red")
    original = Image.Image.resize

    def resize(self: Image.Image, size: tuple[int, int], *rest: Any) -> Image.Image:
        sizes.append(size)
        return original(self, size, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "resize", resize)
        assert prepare(strip).shape == (3, CLIP_SIDE, CLIP_SIDE)
    assert max(sizes[0]) <= 64 * CLIP_SIDE


# CLIP's grid


def test_clip_grid_is_the_towers_last_state_with_the_class_token_first(models: Path) -> None:
    view = build_extractor("clip_grid", ExtractorOptions(clip_model=str(models / "clip")))
    assert (view.spec.dim, view.spec.max_tokens) == (WIDTH, 1 + (CLIP_SIDE // PATCH) ** 2)
    tower = transformers.CLIPModel.from_pretrained(models / "clip").eval().vision_model
    for image, found in zip(PICTURES, view.extract(batch(*PICTURES)), strict=True):
        with torch.no_grad():
            own = tower(prepared(models, "clip", image)[None])
        assert found.tokens.shape == (view.spec.max_tokens, view.spec.dim)
        torch.testing.assert_close(found.tokens, own.last_hidden_state[0])
        # transformers pools the class token: the first of ours must be the one behind its pooled output
        torch.testing.assert_close(tower.post_layernorm(found.tokens[0]), own.pooler_output[0])


def extractors_of(models: Path) -> Iterator[Any]:
    yield build_extractor("clip_grid", ExtractorOptions(clip_model=str(models / "clip")))
    yield text_view(models, "clip_text_five")
    yield build_extractor("detr_objects", ExtractorOptions(detr_model=str(models / "detr")))
    yield build_extractor("detr_objects", ExtractorOptions(detr_model=str(models / "rtdetr")))


def test_a_batch_gives_what_its_photos_give_alone(models: Path) -> None:
    for view in extractors_of(models):
        together = view.extract(batch(*PICTURES))
        for image, found in zip(PICTURES, together, strict=True):
            [alone] = view.extract(batch(image))
            torch.testing.assert_close(found.tokens, alone.tokens, atol=1e-4, rtol=1e-4)
            assert found.labels == alone.labels
            if alone.boxes is not None:
                torch.testing.assert_close(found.boxes, alone.boxes, atol=1e-4, rtol=1e-4)


def test_photos_differ(models: Path) -> None:
    """Else the other tests would hold for a network that ignores its input."""
    for view in extractors_of(models):
        first, second, *_ = view.extract(batch(*PICTURES))
        assert first.tokens.shape != second.tokens.shape or not torch.allclose(first.tokens, second.tokens, atol=1e-2)


def test_views_fit_their_spec_and_the_store(models: Path) -> None:
    for view in extractors_of(models):
        for found in view.extract(batch(*PICTURES)):
            assert 0 < len(found.tokens) <= view.spec.max_tokens
            assert found.tokens.shape[1] == view.spec.dim
            assert set(found.indices) == set(view.spec.indices)
            assert all(int(index.max()) < view.spec.indices[name] for name, index in found.indices.items())
            assert (found.boxes is not None) == view.spec.boxes
            assert not found.tokens.requires_grad
            assert unpack(pack(found), "it").labels == found.labels


# CLIP's texts


@pytest.mark.parametrize(("name", "count", "per_crop"), [("whole", 1, 64), ("five", 5, 16), ("nine", 9, 8)])
def test_text_views_have_the_papers_sizes(models: Path, name: str, count: int, per_crop: int) -> None:
    view = text_view(models, f"clip_text_{name}")
    assert view.spec.max_tokens == count * per_crop
    assert view.spec.indices == {"crop": count, "rank": per_crop}
    [found] = view.extract(batch(PICTURES[0]))
    assert found.tokens.shape == (count * per_crop, SHARED)
    assert found.indices["crop"].tolist() == [crop for crop in range(count) for _ in range(per_crop)]
    assert found.indices["rank"].tolist() == [*range(per_crop)] * count


def test_crops_are_pieces_of_the_photo(models: Path) -> None:
    """What a crop retrieves is what a photo of that piece alone would retrieve."""
    textdb = random_database(models)
    five, whole = text_view(models, "clip_text_five", textdb), text_view(models, "clip_text_whole", textdb)
    image = PICTURES[1]
    [found] = five.extract(batch(image))
    assert found.labels is not None
    seen = set()
    for crop, box in enumerate(crops()[CROPS["five"]].tolist()):
        left, top, right, bottom = (round(side * size) for side, size in zip(box, image.size * 2, strict=True))
        [alone] = whole.extract(batch(image.crop((left, top, right, bottom))))
        assert alone.labels is not None
        mine = slice(16 * crop, 16 * crop + 16)
        assert found.labels[mine] == alone.labels[:16]
        torch.testing.assert_close(found.tokens[mine], alone.tokens[:16])
        seen.add(alone.labels[:16])
    assert len(seen) > 1, "crops must not all retrieve the same"


def test_image_vectors_are_clips_own(models: Path) -> None:
    clip = transformers.CLIPModel.from_pretrained(models / "clip").eval()
    with torch.no_grad():
        tower = clip.vision_model(prepared(models, "clip", PICTURES[0])[None])
        own = clip.visual_projection(tower.pooler_output)
    found = text_view(models, "clip_text_whole").embed([PICTURES[0]])
    torch.testing.assert_close(found, own / own.norm())


def test_retrieval_finds_the_planted_text(models: Path) -> None:
    view = text_view(models, "clip_text_nine")
    pieces = [hub_clip.cut(PICTURES[3], box) for box in crops()[CROPS["nine"]].tolist()]
    vectors = torch.randn(90, SHARED)
    vectors[70:79] = view.embed(pieces)  # a text for each piece, exactly where the piece lies
    [found] = text_view(models, "clip_text_nine", database(models, vectors)).extract(batch(PICTURES[3]))
    assert found.labels is not None
    assert [found.labels[8 * crop] for crop in range(9)] == [f"text {70 + crop}" for crop in range(9)]
    torch.testing.assert_close(found.tokens[0].float(), vectors[70], atol=2e-3, rtol=2e-3)


def test_a_photo_never_gets_its_own_captions(models: Path) -> None:
    vectors = torch.randn(90, SHARED)
    vectors[5] = text_view(models, "clip_text_whole").embed([PICTURES[0]])[0]
    mine, others = (
        text_view(models, "clip_text_whole", database(models, vectors, {5: owner})).extract(batch(PICTURES[0]))[0]
        for owner in ("0.jpg", "another.jpg")
    )
    assert others.labels is not None
    assert mine.labels is not None
    assert others.labels[0] == "text 5"
    assert "text 5" not in mine.labels


def test_small_photos_can_be_cut(models: Path) -> None:
    for size in ((1, 1), (2, 5), (7, 1)):
        image = Image.new("RGB", size, "white")
        pieces = [hub_clip.cut(image, box) for box in crops().tolist()]
        assert all(min(piece.size) >= 1 and np.asarray(piece).min() == 255 for piece in pieces)  # outside is black
        assert text_view(models, "clip_text_nine").extract(batch(image))[0].tokens.shape == (72, SHARED)


def test_sentences_become_clips_text_vectors_whatever_their_batch(models: Path) -> None:
    encoder = hub_clip.ClipTextEncoder(models / "clip")
    sentences = ["a dog", "cab", "a very long tale of no end", "", "a dog", "zoo"]
    steps: list[tuple[int, int]] = []
    found = encoder.encode(sentences, lambda done, todo: steps.append((done, todo)))
    assert found.dtype == torch.float16
    assert steps[-1] == (6, 6)
    torch.testing.assert_close(found.float().norm(dim=1), torch.ones(6), atol=1e-3, rtol=1e-3)
    clip = transformers.CLIPTextModelWithProjection.from_pretrained(models / "clip").eval()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(models / "clip")
    for sentence, vector in zip(sentences, found, strict=True):
        tokens = tokenizer([sentence], truncation=True, max_length=12, return_tensors="pt")
        with torch.no_grad():
            own = clip(**tokens).text_embeds[0]
        torch.testing.assert_close(vector.float(), own / own.norm(), atol=2e-3, rtol=2e-3)
    assert not torch.allclose(found[0], found[1], atol=0.05)
    assert encoder.encode([]).shape == (0, SHARED)


def test_a_database_of_the_encoder_serves_the_view(models: Path, tmp_path: Path) -> None:
    sentences = [f"{first}{second} {first}" for first in "abcdefghij" for second in "klmnopq"]
    (tmp_path / "texts.txt").write_text("\n".join(sentences))
    build = ["textdb", "--out", str(tmp_path / "db"), "--text", str(tmp_path / "texts.txt")]
    assert main([*build, "--clip-text-model", str(models / "clip")]) == 0
    view = build_extractor(
        "clip_text_whole", ExtractorOptions(clip_text_model=str(models / "clip"), textdb=str(tmp_path / "db"))
    )
    [found] = view.extract(batch(PICTURES[0]))
    assert found.labels is not None
    assert set(found.labels) <= set(sentences)


def test_texts_of_another_encoder_are_refused(models: Path, folder: Path) -> None:
    textdb = random_database(models)
    text_view(folder, "clip_text_whole", textdb)  # the same weights at another place
    network = transformers.CLIPModel.from_pretrained(folder / "clip")
    network.text_projection.weight.data.neg_()
    network.save_pretrained(folder / "clip")
    with pytest.raises(ViewError, match=r"vectors of clip-text-[0-9a-f]{16}\.(.|\n)*clip_text_model="):
        text_view(folder, "clip_text_whole", textdb)


def test_text_views_say_what_they_need(models: Path) -> None:
    with pytest.raises(ViewError, match=r"clip_text_five(.|\n)*haav textdb"):
        build_extractor("clip_text_five", ExtractorOptions(clip_text_model=str(models / "clip")))
    with pytest.raises(ViewError, match="takes 64 texts a crop; the text database has 63"):
        text_view(models, "clip_text_whole", random_database(models, 63))


# Objects


@pytest.mark.parametrize(("name", "most"), [("detr", 7), ("rtdetr", 50), ("yolos", 6)])
def test_objects_are_the_detectors_queries_the_surest_first(models: Path, name: str, most: int) -> None:
    view = build_extractor("detr_objects", ExtractorOptions(detr_model=str(models / name)))
    assert (view.spec.dim, view.spec.max_tokens) == (16 + 5 + 1, 50 if name == "yolos" else most)
    network = transformers.AutoModelForObjectDetection.from_pretrained(models / name).eval()
    for image, found in zip(PICTURES, view.extract(batch(*PICTURES)), strict=True):
        with torch.no_grad():
            own = network(prepared(models, name, image)[None])
        states = own.last_hidden_state[0, -6:] if name == "yolos" else own.last_hidden_state[0]
        scores, boxes = found.tokens[:, -1], found.boxes
        assert boxes is not None
        assert found.labels is not None
        assert scores.min() >= 0.1
        assert torch.equal(scores, scores.sort(descending=True).values)
        assert boxes.min() >= 0
        assert boxes.max() <= 1
        assert (boxes[:, 2:] >= boxes[:, :2]).all()
        # each token: the state of one query, its class probabilities, its score, its box
        query = torch.cdist(found.tokens[:, :16], states).argmin(dim=1)
        torch.testing.assert_close(found.tokens[:, :16], states[query], atol=1e-4, rtol=1e-4)
        everything = own.logits[0].sigmoid() if name == "rtdetr" else own.logits[0].softmax(dim=1)[:, :5]
        likely = everything[query]
        torch.testing.assert_close(found.tokens[:, 16:-1], likely, atol=1e-4, rtol=1e-4)
        assert found.labels == tuple(f"LABEL_{number}" for number in likely.argmax(dim=1).tolist())
        middle = (boxes[:, :2] + boxes[:, 2:]) / 2
        inside = (own.pred_boxes[0, query, :2] - middle).abs() < 1e-4
        clipped = (boxes == 0) | (boxes == 1)
        assert name != "detr" or clipped.any()
        assert (inside | clipped[:, :2] | clipped[:, 2:]).all()
        assert len(found.tokens) == min(most, int((everything.max(dim=1).values >= 0.1).sum()))


def test_no_object_is_not_an_object(folder: Path) -> None:
    """DETR's last class is "nothing here"; a photo of nothing else lacks the view."""
    network = transformers.DetrForObjectDetection.from_pretrained(folder / "detr")
    network.class_labels_classifier.bias.data[-1] = 1000
    network.save_pretrained(folder / "detr")
    view = build_extractor("detr_objects", ExtractorOptions(detr_model=str(folder / "detr")))
    [found] = view.extract(batch(PICTURES[0]))
    assert found.tokens.shape == (0, view.spec.dim)
    assert found.boxes is not None
    assert found.boxes.shape == (0, 4)
    assert unpack(pack(found), "it").labels == ()


# Finding and loading models


def test_the_fingerprint_is_that_of_the_weights(models: Path, folder: Path) -> None:
    def view(path: Path) -> Any:
        return build_extractor("clip_grid", ExtractorOptions(clip_model=str(path / "clip")))

    first = view(models)
    assert view(folder).fingerprint == first.fingerprint
    write(folder / "clip" / "preprocessor_config.json", {**CLIP_PROCESSOR, "resample": 2})
    assert view(folder).fingerprint != first.fingerprint
    write(folder / "clip" / "preprocessor_config.json", CLIP_PROCESSOR)
    network = transformers.CLIPModel.from_pretrained(folder / "clip")
    network.vision_model.embeddings.class_embedding.data.neg_()
    size = (folder / "clip" / "model.safetensors").stat().st_size
    network.save_pretrained(folder / "clip")
    assert (folder / "clip" / "model.safetensors").stat().st_size == size
    second = view(folder)
    assert second.fingerprint != first.fingerprint
    photos = batch(PICTURES[0])
    assert not torch.equal(second.extract(photos)[0].tokens, first.extract(photos)[0].tokens), "the old one was kept"


def test_weights_in_several_files_are_one_model(folder: Path) -> None:
    expected = build_extractor("clip_grid", ExtractorOptions(clip_model=str(folder / "clip")))
    network = transformers.CLIPModel.from_pretrained(folder / "clip")
    (folder / "clip" / "model.safetensors").unlink()
    network.save_pretrained(folder / "clip", max_shard_size="20KB")
    found = build_extractor("clip_grid", ExtractorOptions(clip_model=str(folder / "clip")))
    assert len(hub.weight_files(folder / "clip")) > 1
    assert torch.equal(found.extract(batch(PICTURES[0]))[0].tokens, expected.extract(batch(PICTURES[0]))[0].tokens)
    hub.weight_files(folder / "clip")[-1].unlink()
    with pytest.raises(ViewError, match=r"holds no model-0"):
        build_extractor("clip_grid", ExtractorOptions(clip_model=str(folder / "clip")))


def test_pickles_are_not_read(folder: Path) -> None:
    (folder / "clip" / "model.safetensors").rename(folder / "clip" / "pytorch_model.bin")
    with pytest.raises(ViewError, match=r"holds no model\.safetensors(.|\n)*safetensors only"):
        build_extractor("clip_grid", ExtractorOptions(clip_model=str(folder / "clip")))


def test_missing_weights_are_not_made_up(folder: Path, models: Path) -> None:
    tower = transformers.CLIPVisionModel.from_pretrained(folder / "clip")
    (folder / "clip" / "model.safetensors").unlink()
    tower.save_pretrained(folder / "clip")
    build_extractor("clip_grid", ExtractorOptions(clip_model=str(folder / "clip")))  # needs no more than the tower
    textdb = random_database(folder)
    with pytest.raises(ViewError, match=r"lacks 1 weights of CLIPVisionModelWithProjection \(first: visual_proj"):
        text_view(folder, "clip_text_whole", textdb)


def test_threads_share_one_network_and_one_tokenizer(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hub.find_hub_model(models / "clip", "of this test")  # not loaded by another test
    loads: list[str] = []

    def slowly(name: str, load: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            loads.append(name)
            time.sleep(0.2)
            return load(*args, **kwargs)

        return wrapped

    for name in ("CLIPVisionModel", "AutoTokenizer"):
        library_class = getattr(transformers, name)
        monkeypatch.setattr(library_class, "from_pretrained", slowly(name, library_class.from_pretrained))
    with ThreadPoolExecutor(8) as pool:
        networks = list(pool.map(lambda _: hub.load_network(model, "CLIPVisionModel"), range(4)))
        tokenizers = list(pool.map(lambda _: hub.load_tokenizer(model), range(4)))
    assert sorted(loads) == ["AutoTokenizer", "CLIPVisionModel"]
    assert len({id(network) for network in networks}) == len({id(tokenizer) for tokenizer in tokenizers}) == 1


def test_damaged_weights_are_named(folder: Path) -> None:
    (folder / "clip" / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ViewError, match=r"cannot be loaded as CLIPVisionModel \("):
        build_extractor("clip_grid", ExtractorOptions(clip_model=str(folder / "clip")))


def test_other_kinds_of_models_are_refused(models: Path) -> None:
    with pytest.raises(ViewError, match=r"is a model of type 'detr'; this view takes CLIP"):
        build_extractor("clip_grid", ExtractorOptions(clip_model=str(models / "detr")))
    with pytest.raises(ViewError, match=r"cannot be loaded as AutoModelForObjectDetection"):
        build_extractor("detr_objects", ExtractorOptions(detr_model=str(models / "clip")))


def test_a_detector_without_preprocessor_file_is_refused(folder: Path) -> None:
    (folder / "detr" / "preprocessor_config.json").unlink()
    with pytest.raises(ViewError, match=r"has no preprocessor_config\.json"):
        build_extractor("detr_objects", ExtractorOptions(detr_model=str(folder / "detr")))
    write(folder / "detr" / "preprocessor_config.json", {"size": {"side": 3}})
    with pytest.raises(ViewError, match="cannot be understood"):
        build_extractor("detr_objects", ExtractorOptions(detr_model=str(folder / "detr")))


def test_a_backbone_of_timm_is_refused_with_a_way_out(folder: Path) -> None:
    config = json.loads((folder / "detr" / "config.json").read_text())
    config["backbone_config"] = {"model_type": "timm_backbone", "backbone": "resnet50"}
    write(folder / "detr" / "config.json", config)
    with pytest.raises(ViewError, match=r"needs a library that haav does without(.|\n)*PekingU/rtdetr_r50vd"):
        build_extractor("detr_objects", ExtractorOptions(detr_model=str(folder / "detr")))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ViewError, match=r"clip_model: there is no folder .*nowhere"):
        build_extractor("clip_grid", ExtractorOptions(clip_model=str(tmp_path / "nowhere")))


# The hub


class FakeHub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for: what a model holds, and its files"""

    folder: Path
    asked: list[str]
    COMMIT = "0123456789012345678901234567890123456789"

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/someone/clip/tree/"):
            files = [{"type": "file", "path": file.name, "size": file.stat().st_size} for file in self.folder.iterdir()]
            data = json.dumps([file | {"oid": file["path"]} for file in files]).encode()
        elif path.startswith("/api/models/someone/clip"):
            names = [file.name for file in self.folder.iterdir()]
            siblings = [{"rfilename": name} for name in names]
            data = json.dumps({"id": "someone/clip", "sha": self.COMMIT, "siblings": siblings}).encode()
        elif (file := self.folder / path.rpartition("/")[2]).is_file() and "/resolve/" in path:
            data = file.read_bytes()
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{path.rpartition("/")[2]}"')
        self.send_header("X-Repo-Commit", self.COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An empty cache, and a hub at a port where nobody answers"""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return monkeypatch


@pytest.fixture
def fake_hub(hub_cache: pytest.MonkeyPatch, folder: Path) -> Iterator[type[FakeHub]]:
    import huggingface_hub

    handler = type("Handler", (FakeHub,), {"folder": folder / "clip", "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    hub_cache.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    hub_cache.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    yield handler
    server.shutdown()
    server.server_close()


def test_a_model_is_downloaded_once(fake_hub: type[FakeHub], models: Path) -> None:
    (fake_hub.folder / "pytorch_model.bin").write_bytes(b"never to be fetched")
    view = build_extractor("clip_grid", ExtractorOptions(clip_model="someone/clip"))
    expected = build_extractor("clip_grid", ExtractorOptions(clip_model=str(models / "clip")))
    assert view.fingerprint == expected.fingerprint
    assert torch.equal(view.extract(batch(PICTURES[0]))[0].tokens, expected.extract(batch(PICTURES[0]))[0].tokens)
    assert not any("pytorch_model.bin" in path for path in fake_hub.asked)
    assert any("tokenizer_config.json" in path for path in fake_hub.asked)
    hub_clip.ClipTextEncoder("someone/clip").encode(["a dog"])  # its tokenizer came along
    fake_hub.asked.clear()
    build_extractor("clip_grid", ExtractorOptions(clip_model="someone/clip"))
    assert not fake_hub.asked, "what is here is not asked for again"


def test_a_model_that_another_program_fetched_serves_without_a_connection(
    hub_cache: pytest.MonkeyPatch, models: Path, tmp_path: Path
) -> None:
    """transformers itself fetches the weights without the preprocessor's settings, and leaves no list of files."""
    here = tmp_path / "cache" / "models--someone--clip"
    commit = FakeHub.COMMIT
    (here / "refs").mkdir(parents=True)
    (here / "refs" / "main").write_text(commit)
    (here / "snapshots" / commit).mkdir(parents=True)
    shutil.copy(models / "clip" / "config.json", here / "snapshots" / commit)
    with pytest.raises(ViewError, match="cannot be fetched from the hub"):  # a broken-off download
        build_extractor("clip_grid", ExtractorOptions(clip_model="someone/clip"))
    shutil.copy(models / "clip" / "model.safetensors", here / "snapshots" / commit)
    view = build_extractor("clip_grid", ExtractorOptions(clip_model="someone/clip"))
    assert len(view.extract(batch(PICTURES[0]))[0].tokens) == view.spec.max_tokens


def test_models_without_safetensors_and_unknown_ones_are_named(fake_hub: type[FakeHub]) -> None:
    (fake_hub.folder / "model.safetensors").unlink()
    with pytest.raises(ViewError, match=r"'someone/clip' has no safetensors(.|\n)*clip_model=someone/clip@REVISION"):
        build_extractor("clip_grid", ExtractorOptions(clip_model="someone/clip"))
    with pytest.raises(ViewError, match="'someone/else' is neither a folder nor a model of the hub"):
        build_extractor("clip_grid", ExtractorOptions(clip_model="someone/else"))
    with pytest.raises(ViewError, match="is neither a folder nor a model of the hub"):
        build_extractor("clip_grid", ExtractorOptions(clip_model="not a name!"))


def test_revisions_can_be_chosen(fake_hub: type[FakeHub]) -> None:
    build_extractor("clip_grid", ExtractorOptions(clip_model="someone/clip@refs/pr/3"))
    assert any(path.startswith("/api/models/someone/clip/revision/refs%2Fpr%2F3") for path in fake_hub.asked)


@pytest.mark.parametrize(
    ("view", "option", "model"),
    [
        ("clip_grid", "clip_model", "openai/clip-vit-base-patch32"),
        ("clip_text_whole", "clip_text_model", "openai/clip-vit-large-patch14"),
        ("detr_objects", "detr_model", "PekingU/rtdetr_r50vd"),
    ],
)
@pytest.mark.parametrize("offline", [False, True])
def test_an_unreachable_hub_is_told_at_once_with_a_way_out(
    hub_cache: pytest.MonkeyPatch, models: Path, view: str, option: str, model: str, offline: bool
) -> None:
    import huggingface_hub

    hub_cache.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    textdb = random_database(models)
    start = time.monotonic()
    with pytest.raises(ViewError) as caught:
        build_extractor(view, ExtractorOptions(textdb=textdb))
    assert time.monotonic() - start < hub.TIMEOUT
    message = str(caught.value)
    assert f"hf download {model}" in message
    assert f"{option}: '{model}' cannot be fetched from the hub (" in message
    assert f"{option}=FOLDER" in message
    assert "embedded views" in message


def test_without_transformers_the_extra_is_named(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    textdb = random_database(models)
    monkeypatch.setitem(sys.modules, "transformers", None)  # what Python keeps of a failed import
    views = [name for name in extractors if extractors.get(name).__module__.startswith("haav.views.hub.")]
    assert views
    for view in views:
        with pytest.raises(ViewError, match=r'pip install "haav\[hub\]"'):
            build_extractor(view, ExtractorOptions(textdb=textdb))


def test_the_views_are_imported_without_transformers() -> None:
    code = "import sys, haav.views; print(sorted({'transformers', 'huggingface_hub'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
