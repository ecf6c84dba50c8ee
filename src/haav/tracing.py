"""Whether the network that runs is being recorded as a graph of ONNX."""

from __future__ import annotations

import sys


def is_exporting() -> bool:
    """`torch.onnx.is_in_onnx_export()`, without importing torch.onnx, which takes 0.1 s: an export has imported it."""
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and bool(onnx.is_in_onnx_export())
