"""Reads the tensors of an ONNX file without the onnx package or onnxruntime.

An ONNX file is a protobuf message. Only four of its message types matter here, so this file decodes them itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from haav.errors import ViewError

Field = tuple[int, int | memoryview]
"""(field number, value): an integer, or the bytes of a string, a message or packed numbers"""

# Field numbers of ModelProto, GraphProto, NodeProto and TensorProto in onnx.proto
MODEL_GRAPH, GRAPH_NODE, GRAPH_INITIALIZER = 7, 1, 5
NODE_INPUT, NODE_NAME = 1, 3
TENSOR_DIMS, TENSOR_TYPE, TENSOR_NAME, TENSOR_RAW = 1, 2, 8, 9
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("u1"), 3: np.dtype("i1"), 7: np.dtype("<i8")}
FLOAT_DATA, INT32_DATA = 4, 5


class OnnxWeights:
    """The initializers of an ONNX graph by name, and the names that its nodes read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, memoryview] = {}
        self.inputs: dict[str, list[str]] = {}
        """node name → the names of its inputs"""
        try:
            with open(path, "rb") as file:
                self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            for graph in _messages(self._data, MODEL_GRAPH):
                for tensor in _messages(graph, GRAPH_INITIALIZER):
                    (name,) = _messages(tensor, TENSOR_NAME)
                    self._tensors[str(name, "utf-8")] = tensor
                for node in _messages(graph, GRAPH_NODE):
                    for name in _messages(node, NODE_NAME):
                        self.inputs[str(name, "utf-8")] = [str(i, "utf-8") for i in _messages(node, NODE_INPUT)]
        except (ValueError, IndexError) as error:
            raise ViewError(f"{path} is not a readable ONNX file: {error}.") from None

    def names(self) -> list[str]:
        return list(self._tensors)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._tensors:
            raise ViewError(f"{self.path} holds no tensor '{name}'.")
        dims: list[int] = []
        dtype = DTYPES[1]
        raw: memoryview | bytes | None = None
        for field_number, value in _fields(self._tensors[name]):
            if field_number == TENSOR_DIMS:
                dims += [value] if isinstance(value, int) else list(_varints(value))
            elif field_number == TENSOR_TYPE:
                if not isinstance(value, int) or value not in DTYPES:
                    raise ViewError(f"{self.path}: tensor '{name}' has the unsupported type {value}.")
                dtype = DTYPES[value]
            elif isinstance(value, int):
                continue
            elif field_number in (TENSOR_RAW, FLOAT_DATA):
                raw = value
            elif field_number == INT32_DATA:
                raw = np.array([v - (1 << 64) if v >> 63 else v for v in _varints(value)]).astype(dtype).tobytes()
        if raw is None or len(raw) != int(np.prod(dims)) * dtype.itemsize:
            raise ViewError(f"{self.path}: tensor '{name}' does not hold {dims} numbers.")
        return np.frombuffer(raw, dtype).reshape(dims)

    def linear(self, node: str) -> np.ndarray:
        """The float32 weight (out, in) of a MatMul node; an 8-bit one is (steps - zero point) × scale per output."""
        if f"{node}_quant" in self.inputs:
            steps, zero = self.inputs[f"{node}_quant"][1], self.inputs[f"{node}_quant"][3]
            weight = np.ascontiguousarray(self[steps].T).astype(np.float32)  # transposed while it is small
            if self[zero].any():
                weight -= self[zero].astype(np.float32)[:, None]
            weight *= self[steps.removesuffix("_quantized") + "_scale"][:, None]
            return weight
        if node not in self.inputs:
            raise ViewError(f"{self.path} holds no node '{node}'.")
        return np.ascontiguousarray(self[self.inputs[node][1]].T)


def _messages(data: memoryview, message_field: int) -> Iterator[memoryview]:
    for field_number, value in _fields(data):
        if field_number == message_field and not isinstance(value, int):
            yield value


def _fields(data: memoryview) -> Iterator[Field]:
    """The fields of a protobuf message in order"""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if position + size > len(data):
            raise ValueError("it ends too early")
        yield key >> 3, data[position : position + size]
        position += size


def _varints(data: memoryview) -> Iterator[int]:
    position = 0
    while position < len(data):
        value, position = _varint(data, position)
        yield value


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError(f"a number at byte {position} is too long")
