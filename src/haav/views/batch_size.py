"""How many photos are extracted and captioned together, by the memory that is free."""

from __future__ import annotations

import os

import torch

from haav.memory import free_memory

PHOTO = 24_000_000
"""bytes of a photo in work: 12.6 MB of pixels at most, measured 3 MB of activations, and room to spare"""
MOST = {"cpu": 8, "cuda": 64}
"""photos of a batch where memory is plenty; more are not faster"""
SHARE = 0.5
"""of the free memory"""
READ_AHEAD = 2
"""batches of each thread that are in memory at once"""


def fitting_batch(device: str = "cpu") -> int:
    """Photos of a batch. On a CPU, this process gets as large a share of the memory as it has of the cores."""
    processor = device.partition(":")[0]
    most = MOST.get(processor, MOST["cpu"])
    free = free_memory(device)
    if free is None:
        return most
    if processor == "cuda":
        batches, share = 1, SHARE
    else:
        threads = torch.get_num_threads()
        batches, share = READ_AHEAD * threads, SHARE * min(1.0, threads / (os.cpu_count() or 1))
    return max(1, min(most, int(share * free / (batches * PHOTO))))
