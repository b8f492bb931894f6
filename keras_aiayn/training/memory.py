"""Freed memory stays with the process, so that training on a CPU is spared its page faults."""

import ctypes
import os

# Numbers of glibc's <malloc.h>.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8

# What a person sets who chooses how memory is managed.
CHOSEN_BY_HAND = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Tells the C library to keep what is freed instead of handing it back to the system.

    By default glibc maps each large array anew and unmaps it after use, so that every step of a
    training on a CPU has its activations zeroed page by page. One heap that never shrinks is
    faster and holds some more (`benchmarks/memory.py` measures both). Call it before the first
    operation: threads that have a heap of their own keep it.

    Returns:
        Whether it was done: not where the C library is another one, or the environment has
        settings of its own.
    """
    if any(name.startswith(CHOSEN_BY_HAND) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    settings = {
        M_MMAP_MAX: 0,
        M_TRIM_THRESHOLD: 2**31 - 1,
        M_TOP_PAD: 64 * 2**20,
        M_ARENA_MAX: 1,
    }
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
