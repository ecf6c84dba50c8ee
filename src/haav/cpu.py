"""Capabilities of the processor of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

from haav.errors import ConfigError

PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); assert (a @ a).sum() == 64**3"
CPUINFO = Path("/proc/cpuinfo")
LOAD = Path("/proc/loadavg")
"""its fourth field begins with the number of threads on this machine that run or wait for a core"""


def has_vnni() -> bool:
    """Whether the processor has instructions that sum 8-bit products in 32 bits (VNNI)"""
    supported = getattr(torch.cpu, "_is_avx512_vnni_supported", None) or getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(supported and supported() and hasattr(torch, "_int_mm"))


def has_fbgemm() -> bool:
    """Whether PyTorch has its 8-bit kernels for x86 without VNNI"""
    return torch.backends.quantized.engine in ("x86", "fbgemm") and hasattr(torch.ops.quantized, "linear_dynamic")


@cache
def mkl_is_slow() -> bool:
    """Whether the processor has AVX-512 and is not Intel's: MKL, by which torch multiplies, then computes without it"""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and _vendor() not in ("", "GenuineIntel")


def _vendor() -> str:
    """As Linux knows it; "" elsewhere"""
    try:
        lines = CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def free_cores() -> int | None:
    """Cores that nothing but this thread wants at this moment, at least 1. None where the system does not tell."""
    try:
        runnable = int(LOAD.read_text(encoding="ascii").split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(1, (os.cpu_count() or 1) - max(runnable - 1, 0))  # this thread is one of those that run


def check_bfloat16() -> None:
    """Raise ConfigError if bfloat16 products crash.

    Some virtual machines announce matrix units (AMX) that end a process when it uses them.
    """
    if _bfloat16_status() != 0:
        raise ConfigError(
            "products in bfloat16 end with an illegal instruction on this machine.\n"
            "  Compute in float32, or switch the faulty units off: ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
        )


@cache
def _bfloat16_status() -> int:
    """Exit status of a process that computes one product"""
    return subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False).returncode
