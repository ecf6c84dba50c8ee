"""Make ONNX files small without changing what they compute.

Each large tensor is stored in the smallest type that holds its numbers: 8-bit steps with a scale per row, where the
weights came in 8 bits (CLIP, packed text databases); float16, where a model or bridge was packed; otherwise float32.
The graph turns them back into float32, which onnxruntime does once, when it loads the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto
from onnx.helper import make_node
from onnx.numpy_helper import from_array, to_array

LARGE = 1024
"""elements of a tensor that is worth two more nodes"""
ROUNDING = 4e-7
"""a few units in the last place of float32: the products of steps and scales were rounded before"""


def compress(path: Path) -> None:
    """Rewrite an ONNX file."""
    model = onnx.load(path)
    graph = model.graph
    tensors: list[TensorProto] = []
    nodes: list[NodeProto] = []
    for name, tensor in _tensors(graph):
        array = to_array(tensor)
        if array.dtype != np.float32 or array.size < LARGE:
            tensors.append(from_array(array, name))
            continue
        stored, restoring = _store(name, array)
        tensors += stored
        nodes += restoring
    nodes += [node for node in graph.node if not _is_tensor(node)]
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(tensors)
    graph.node.extend(nodes)
    onnx.save(model, path)


def _tensors(graph: GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """Initializers and constants. PyTorch writes tensors that are no parameters of a module as constants."""
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    yield from ((node.output[0], node.attribute[0].t) for node in graph.node if _is_tensor(node))


def _is_tensor(node: NodeProto) -> bool:
    return node.op_type == "Constant" and node.attribute[0].name == "value"


def _store(name: str, array: np.ndarray) -> tuple[list[TensorProto], list[NodeProto]]:
    """What to store of a tensor, and the nodes that turn it into `name`"""
    rows = in_rows(array)
    if rows is not None:
        stored = [from_array(part, f"{name}.{suffix}") for part, suffix in zip(rows, ("steps", "scales"), strict=True)]
        cast = make_node("Cast", [f"{name}.steps"], [f"{name}.float"], to=TensorProto.FLOAT)
        return stored, [cast, make_node("Mul", [f"{name}.float", f"{name}.scales"], [name])]
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    if np.array_equal(half.astype(np.float32), array):
        return [from_array(half, f"{name}.half")], [make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT)]
    return [from_array(array, name)], []


def in_rows(array: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """int8 steps and the scale of each row (of the first axis), if their products are the numbers of the array"""
    if array.ndim < 2 or array.size < 16 * len(array):
        return None
    largest = np.abs(array).max(axis=tuple(range(1, array.ndim)), keepdims=True)
    scales = np.where(largest > 0, largest, 1).astype(np.float32) / np.float32(127)
    steps = np.rint(array / scales).astype(np.int8)
    same = np.abs(steps * scales - array) <= ROUNDING * np.abs(array)
    return (steps, scales) if same.all() else None
