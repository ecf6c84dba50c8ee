"""Memory that this process may still use."""

from __future__ import annotations

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
"""limit and use of a container, versions 2 and 1"""


def free_memory(device: str = "cpu") -> int | None:
    """Bytes that are free on the machine or in its container, or on a GPU. None where the system does not tell."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    known = (_machine(), *(_container(*files) for files in CGROUPS))
    return min((size for size in known if size is not None), default=None)


def _machine() -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):
        return None


def _container(limit: Path, use: Path) -> int | None:
    try:
        return max(0, int(limit.read_text(encoding="ascii")) - int(use.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or "max"
        return None
