"""CLIP's and DINOv2's towers, held to onnxruntime's evaluation of the same weights on the sample photos."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

import helpers
from haav import weights
from haav.cpu import has_fbgemm
from haav.errors import ConfigError, ViewError
from haav.photos.images import load_image
from haav.views import ExtractorOptions, PhotoBatch, build_extractor, extractors
from haav.views.embedded import clip, dinov2, vit
from haav.views.embedded.onnx_weights import OnnxWeights
from haav.views.embedded.prepared import load_tower, prepared_file
from haav.views.embedded.vit import FbgemmLinear, Int8Linear, VisionTransformer, VitConfig, smoothing

SAMPLES = sorted(helpers.SAMPLES.glob("*.jpg"))
TOWER_VIEWS = [
    name
    for name in extractors
    if "precision" in inspect.signature(extractors.get(name)).parameters and not extractors.get(name).needs
]


@pytest.fixture(scope="module")
def photos() -> PhotoBatch:
    return PhotoBatch([path.name for path in SAMPLES], [load_image(path) for path in SAMPLES])


def fresh(photos: PhotoBatch) -> PhotoBatch:
    """The same photos, of which nothing is known yet"""
    return PhotoBatch(photos.ids, photos.images)


def normalised(photos: PhotoBatch, config: VitConfig) -> np.ndarray:
    pixels = photos.pixels(224, Image.Resampling.BICUBIC).float() / 255
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (config.mean, config.std))
    return ((pixels - mean) / std).numpy()


def cosine(one: Tensor, other: Tensor) -> float:
    return F.cosine_similarity(one, other, dim=-1).mean().item()


# The towers against onnxruntime


def quiet(runtime: Any) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # it tells of every tensor that the float graph no longer reads
    return options


def errors(ours: Tensor, theirs: Tensor) -> Tensor:
    """Of each token, as a share of its length"""
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)


def float_graph(path: Path) -> bytes:
    """The 8-bit graph with each MatMulInteger and what stands around it replaced by MatMul of dequantised weights"""
    onnx = pytest.importorskip("onnx", reason="needs the onnx extra")
    from onnx import numpy_helper

    model = onnx.load(path)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    inputs = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "DynamicQuantizeLinear"}
    products = {node.output[0]: node for node in model.graph.node if node.op_type == "MatMulInteger"}
    nodes = []
    for node in model.graph.node:
        if node.op_type in ("DynamicQuantizeLinear", "MatMulInteger") or node.name.endswith("_scales_mul"):
            continue
        if node.op_type == "Cast" and node.input[0] in products:
            continue
        if node.name.endswith("_output_scale_mul"):
            product = products[node.input[0].removesuffix("_cast_output")]
            name = product.input[1]
            steps, zero = tensors[name].astype(np.float32), tensors[product.input[3]].astype(np.float32)
            weight = (steps - zero) * tensors[name.removesuffix("_quantized") + "_scale"]
            model.graph.initializer.append(numpy_helper.from_array(weight, f"{name}_float"))
            nodes.append(onnx.helper.make_node("MatMul", [inputs[product.input[0]], f"{name}_float"], [node.output[0]]))
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return with_layer_11(model)


def with_layer_11(model: Any) -> bytes:
    """The graph with a further output"""
    onnx = pytest.importorskip("onnx", reason="needs the onnx extra")
    model.graph.output.append(onnx.ValueInfoProto(name="/vision_model/encoder/layers.10/Add_1_output_0"))
    return bytes(model.SerializeToString())


def run_clip(runtime: Any, graph: bytes, photos: PhotoBatch) -> dict[int, Tensor]:
    """All hidden states after layers 11 and 12"""
    session = runtime.InferenceSession(graph, quiet(runtime), providers=["CPUExecutionProvider"])
    _, last, before = session.run(None, {"pixel_values": normalised(photos, clip.CONFIG)})
    return {11: torch.from_numpy(before), 12: torch.from_numpy(last)}


def chosen(hidden: dict[int, Tensor]) -> Tensor:
    """What the tower returns of them"""
    return torch.cat([hidden[12][:, :1], hidden[11][:, 1:]], dim=1)


@pytest.mark.slow
def test_clip_equals_onnxruntime_in_float(photos: PhotoBatch) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="needs the onnx extra")
    theirs = run_clip(runtime, float_graph(weights.locate(clip.WEIGHTS) / "clip_encoder.int8.onnx"), photos)
    ours = clip.load_clip(precision="float32").hidden(fresh(photos))
    every_token = VisionTransformer(replace(clip.CONFIG, patch_layer=12), clip.read_clip())
    last = every_token(photos.pixels(224, Image.Resampling.BICUBIC))
    # Two of the 985 tokens amplify float32's rounding: there each of the two is 1.2e-4 from a float64 evaluation.
    for part, wanted in ((ours, chosen(theirs)), (last, theirs[12])):
        assert errors(part, wanted).quantile(0.99) < 1e-4
        assert errors(part, wanted).max() < 5e-4


@pytest.mark.slow
def test_the_8_bit_graph_as_it_is_differs_far_more_than_our_int8(photos: PhotoBatch) -> None:
    """Its activations have one scale per tensor, ours one per token."""
    runtime = pytest.importorskip("onnxruntime", reason="needs the onnx extra")
    onnx = pytest.importorskip("onnx", reason="needs the onnx extra")
    model = onnx.load(weights.locate(clip.WEIGHTS) / "clip_encoder.int8.onnx")
    theirs = chosen(run_clip(runtime, with_layer_11(model), photos))
    exact = clip.load_clip(precision="float32").hidden(fresh(photos))
    ours = clip.load_clip(precision="int8").hidden(fresh(photos))
    assert 1 - cosine(theirs, exact) > 5 * (1 - cosine(ours, exact))
    assert cosine(ours, exact) > 0.99


def test_dinov2_equals_onnxruntime(photos: PhotoBatch) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the onnx extra")
    runtime = pytest.importorskip("onnxruntime", reason="needs the onnx extra")
    model = onnx.load(weights.locate(dinov2.WEIGHTS) / "dinov2_vits14_patch_8x8.onnx")
    model.graph.output.append(onnx.ValueInfoProto(name="/norm/Add_1_output_0"))
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (hidden,) = session.run(["/norm/Add_1_output_0"], {"input": normalised(photos, dinov2.CONFIG)})
    ours = dinov2.load_dinov2("float32").hidden(fresh(photos))
    apart = errors(ours, torch.from_numpy(hidden))
    assert apart.quantile(0.99) < 1e-4
    assert apart.max() < 1e-3, "a few tokens amplify rounding"


# Reading ONNX files


@pytest.mark.parametrize("name", [clip.WEIGHTS, dinov2.WEIGHTS])
def test_tensors_are_read_as_the_onnx_package_reads_them(name: str) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the onnx extra")
    (path,) = weights.locate(name).glob("*.onnx")
    ours = OnnxWeights(path)
    for tensor in onnx.load(path).graph.initializer:
        theirs = onnx.numpy_helper.to_array(tensor)
        assert ours[tensor.name].dtype == theirs.dtype
        np.testing.assert_array_equal(ours[tensor.name], theirs)


def test_a_damaged_onnx_file_is_an_error(tmp_path: Path) -> None:
    whole = (weights.locate(dinov2.WEIGHTS) / "dinov2_vits14_patch_8x8.onnx").read_bytes()
    for name, data in (("cut", whole[:100_000]), ("other", b"\x0bnot an onnx file at all"), ("empty", b"")):
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(data)
        with pytest.raises(ViewError, match="not a readable ONNX file"):
            OnnxWeights(path)
    good = OnnxWeights(weights.locate(dinov2.WEIGHTS) / "dinov2_vits14_patch_8x8.onnx")
    with pytest.raises(ViewError, match="no tensor 'absent'"):
        good["absent"]
    with pytest.raises(ViewError, match="no node '/absent'"):
        good.linear("/absent")


# Precision


def test_int8_equals_the_slow_obvious_way() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(5, 8), torch.randn(5), torch.randn(2, 3, 8)
    layer = Int8Linear.round(weight, bias)
    for row, result in zip(x.view(-1, 8), layer(x).view(-1, 5), strict=True):
        for channel in range(5):
            row_step, weight_step = row.abs().max() / 127, weight[channel].abs().max() / 127
            total = sum(
                round(float(a / row_step)) * round(float(b / weight_step))
                for a, b in zip(row, weight[channel], strict=True)
            )
            assert_close(result[channel], total * row_step * weight_step + bias[channel])


needs_fbgemm = pytest.mark.skipif(not has_fbgemm(), reason="PyTorch has no 8-bit kernels for this processor")


@needs_fbgemm
def test_fbgemm_equals_the_slow_obvious_way() -> None:
    """Inputs in 255 steps of −max … max per token, weights in 127 steps per output channel"""
    torch.manual_seed(0)
    weight, bias, x = torch.randn(5, 8), torch.randn(5), torch.randn(2, 3, 8)
    result = FbgemmLinear(weight, bias)(x)
    row_step = x.abs().amax(dim=-1, keepdim=True) * 2 / 255
    weight_step = weight.abs().amax(dim=1, keepdim=True) / 63
    expected = ((x / row_step).round() * row_step) @ ((weight / weight_step).round() * weight_step).T + bias
    # A value half-way between two steps may go to either.
    assert_close(result, expected, rtol=0, atol=float(row_step.max() * weight.abs().max()))
    assert (result - expected).abs().median() < 0.02


@needs_fbgemm
def test_sums_of_two_products_fit_16_bits() -> None:
    """AVX2 would saturate at 32,767: the largest inputs meet the largest weights, all of one sign."""
    layer = FbgemmLinear(torch.ones(4, 64), torch.zeros(4))
    assert_close(layer(torch.ones(2, 64)), torch.full((2, 4), 64.0), rtol=1e-2, atol=0)


@needs_fbgemm
def test_fbgemm_gives_a_token_the_same_numbers_in_every_batch() -> None:
    torch.manual_seed(0)
    layer, x = FbgemmLinear(torch.randn(5, 16), torch.randn(5)), torch.rand(3, 16)
    larger = torch.cat([x, -10 * torch.rand(4, 16)])
    assert torch.equal(layer(larger)[:3], layer(x))


def test_auto_is_int8_where_a_kernel_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for vnni, fbgemm, expected in ((True, False, "int8"), (False, True, "int8"), (False, False, "float32")):
        monkeypatch.setattr(vit, "has_vnni", lambda answer=vnni: answer)
        monkeypatch.setattr(vit, "has_fbgemm", lambda answer=fbgemm: answer)
        assert vit.resolve_precision("auto") == expected


def test_weights_that_are_on_an_8_bit_grid_are_kept_exactly() -> None:
    steps = torch.randint(-127, 128, (6, 16))
    steps[:, 0] = 127
    layer = Int8Linear.round(steps * 0.003, torch.zeros(6))
    assert torch.equal(layer.get_buffer("steps").long(), steps)


def test_a_token_does_not_depend_on_the_other_photos(photos: PhotoBatch) -> None:
    """Rounding is per token, so int8 gives a photo the same numbers in every batch."""
    tower = clip.load_clip(precision="int8")
    alone = tower.hidden(PhotoBatch(photos.ids[:1], photos.images[:1]))
    assert_close(tower.hidden(fresh(photos))[:1], alone, rtol=1e-3, atol=1e-3)


SMALL = VitConfig(16, 2, 2, 4, 1e-5, True, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))


def small_tower(precision: str, smooth: dict[str, Tensor] | None = None) -> VisionTransformer:
    return VisionTransformer(SMALL, small_state(), precision, smooth)


def small_state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    state = {"patch.weight": torch.randn(16, 3, 4, 4), "patch.bias": torch.randn(16)}
    state |= {"cls": torch.randn(16), "positions": torch.randn(5, 16)}
    for layer in range(2):
        sizes = {"norm1": (16,), "norm2": (16,), "qkv": (48, 16), "out": (16, 16), "fc1": (64, 16), "fc2": (16, 64)}
        for name, size in sizes.items():
            state[f"layers.{layer}.{name}.weight"] = torch.randn(size) * size[-1] ** -0.5
            state[f"layers.{layer}.{name}.bias"] = torch.randn(size[0])
        state[f"layers.{layer}.norm1.weight"][3] = 60.0  # one channel far larger than the rest
        state[f"layers.{layer}.norm2.weight"][5] = 60.0
    return state


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_few_photos_are_computed_at_once_whatever_the_batch(precision: str) -> None:
    tower, sizes = small_tower(precision), []
    tower.blocks[0].register_forward_pre_hook(lambda block, inputs: sizes.append(len(inputs[0])))
    pixels = torch.randint(0, 256, (2 * vit.AT_ONCE + 1, 3, 8, 8), dtype=torch.uint8)
    hidden = tower(pixels)
    assert sizes == [vit.AT_ONCE, vit.AT_ONCE, 1]
    assert_close(hidden, torch.cat([tower(photo) for photo in pixels.split(1)]))


def test_smoothing_lowers_the_error_of_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit, "has_vnni", lambda: True)  # Int8Linear computes the same on every machine
    pixels = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    exact = small_tower("float32")
    divisors = smoothing(exact, pixels)
    plain, smooth = small_tower("int8"), small_tower("int8", divisors)
    rough, fine = ((tower(pixels) - exact(pixels)).norm() for tower in (plain, smooth))
    assert fine < 0.7 * rough
    assert_close(small_tower("float32", divisors)(pixels), exact(pixels))  # only int8 is smoothed


def test_a_tower_is_rounded_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit, "has_vnni", lambda: True)
    monkeypatch.setenv("HAAV_CACHE", str(tmp_path))
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    divisors = smoothing(small_tower("float32"), pixels)
    fresh = small_tower("int8", divisors)
    reads: list[str] = []

    def load(precision: str = "int8", key: str = "a") -> VisionTransformer:
        return load_tower(SMALL, key, precision, lambda: reads.append(key) or small_state(), divisors)  # type: ignore[func-returns-value]

    for _ in range(3):
        assert torch.equal(load()(pixels), fresh(pixels))
    assert reads == ["a"]
    assert torch.equal(load(key="b")(pixels), fresh(pixels))
    assert reads == ["a", "b"], "other weights have a file of their own"
    assert torch.equal(load("float32")(pixels), small_tower("float32")(pixels)), "only int8 is kept"
    file = prepared_file("a")
    assert file is not None
    whole = file.read_bytes()
    for damaged in (b"", whole[:100], whole[:-10], whole.replace(b"kernel", b"colonel"[:6])):
        file.write_bytes(damaged)
        assert torch.equal(load()(pixels), fresh(pixels))
        assert file.read_bytes() == whole, "it is made again"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit, "has_vnni", lambda: True)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HAAV_CACHE", str(tmp_path / "file"))
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(load_tower(SMALL, "a", "int8", small_state)(pixels), small_tower("int8")(pixels))


def test_an_unknown_precision_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"unknown precision 'int9'\. Did you mean 'int8'"):
        small_tower("int9")


def test_flops_are_counted_as_by_hand() -> None:
    """4 patches of 3 × 4 × 4 and a class token, width 16, two layers"""
    linear = 5 * (16 * 48 + 16 * 16 + 16 * 64 + 64 * 16)
    attention = 2 * 5 * 5 * 16
    assert small_tower("float32").gigaflops == pytest.approx(2 * (4 * 48 * 16 + 2 * (linear + attention)) / 1e9)


@pytest.mark.parametrize("name", TOWER_VIEWS)
def test_a_wrong_precision_is_refused_before_any_photo(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown precision 'int9'"):
        build_extractor(name, ExtractorOptions(precision="int9"))


# Other sources of the same weights


def test_clip_is_read_from_safetensors_of_the_hub_too(tmp_path: Path, photos: PhotoBatch) -> None:
    """transformers' names and layout; the same numbers give the same features, under another fingerprint."""
    file = OnnxWeights(weights.locate(clip.WEIGHTS) / "clip_encoder.int8.onnx")
    tensors = {name: torch.from_numpy(file[name].copy()) for name in file.names() if name.startswith("vision_model.")}
    for node in file.inputs:
        if node.endswith("/MatMul_quant"):
            name = node.removesuffix("/MatMul_quant").strip("/").replace("/", ".")
            tensors[f"{name}.weight"] = torch.from_numpy(file.linear(node[:-6]))
    path = tmp_path / "model.safetensors"
    save_file(tensors | {"text_model.embeddings.token_embedding.weight": torch.zeros(2, 2)}, path)
    other, ours = clip.ClipTower(str(path), "float32"), clip.load_clip(precision="float32")
    one = PhotoBatch(photos.ids[:1], photos.images[:1])
    assert torch.equal(other.hidden(one), ours.hidden(fresh(one)))
    assert other.fingerprint != ours.fingerprint
    extractor = build_extractor("patches", ExtractorOptions(clip_source=str(path)))
    assert extractor.fingerprint != build_extractor("patches").fingerprint


def test_another_file_is_refused_as_a_source_of_clip(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"vision_model.embeddings.class_embedding": torch.zeros(3)}, path)
    with pytest.raises(ViewError, match="holds no CLIP image tower"):
        clip.ClipTower(str(path))
    path.write_bytes(b"nothing")
    with pytest.raises(ViewError, match="holds no CLIP image tower"):
        clip.ClipTower(str(path))


# The views


@pytest.mark.parametrize("name", TOWER_VIEWS)
def test_a_view_is_as_its_spec_says(name: str, photos: PhotoBatch) -> None:
    extractor = build_extractor(name)
    for view in extractor.extract(fresh(photos)):
        assert view.tokens.shape[1] == extractor.spec.dim
        assert 0 < len(view.tokens) <= extractor.spec.max_tokens or name == "patch_objects"
        assert view.boxes is not None
        assert view.boxes.shape == (len(view.tokens), 4)
        assert view.tokens.isfinite().all()


def test_patches_are_means_of_the_tokens_under_their_boxes(photos: PhotoBatch) -> None:
    tower = clip.load_clip()
    hidden = tower.hidden(photos)
    view = build_extractor("patches").extract(photos)[2]
    assert_close(view.tokens[0], hidden[2, 0])
    # row 1, column 2 of 7 × 7 covers rows 2–3 and columns 4–5 of 14 × 14
    patches = [1 + 14 * row + column for row in (2, 3) for column in (4, 5)]
    assert_close(view.tokens[1 + 7 + 2], hidden[2, patches].mean(dim=0))
    assert view.boxes is not None
    assert_close(view.boxes[1 + 7 + 2], torch.tensor([2.0, 1.0, 3.0, 2.0]) / 7)


def test_a_region_is_described_by_the_patches_under_it(photos: PhotoBatch) -> None:
    patches = build_extractor("patches").extract(photos)[2].tokens
    view = build_extractor("patch_regions").extract(photos)[2]
    assert_close(view.tokens[0], torch.cat([patches[0], patches[1:].mean(dim=0)]))
    # The first of the nine crops covers 0.4 of each side: 2.8 cells, so the third row and column count for 0.8.
    share = torch.tensor([1.0, 1.0, 0.8, 0.0, 0.0, 0.0, 0.0]) / 2.8
    mean = (share[:, None] * share).flatten() @ patches[1:]
    assert_close(view.tokens[6], torch.cat([mean, mean]))


def test_regions_of_stored_patches_need_no_photo(photos: PhotoBatch) -> None:
    stored = build_extractor("patches").extract(photos)
    extractor = build_extractor("patch_regions")
    assert list(extractor.reads) == ["patches"]
    without = extractor.extract(PhotoBatch(photos.ids, None, patches=stored))
    assert_close([view.tokens for view in without], [view.tokens for view in extractor.extract(photos)])
