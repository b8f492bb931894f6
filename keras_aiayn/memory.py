"""Memory of a process: what it takes, and freed memory that stays with it.

The latter spares training on a CPU its page faults, and keeps a long translation at one size.
"""

import ctypes
import os
import sys

import keras

# Numbers of glibc's <malloc.h>.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8

# What a person sets who chooses how memory is managed.
CHOSEN_BY_HAND = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Tells the C library to keep what is freed instead of handing it back to the system.

    By default glibc maps each large array anew and unmaps it after use, so that every step of a
    training on a CPU has its activations zeroed page by page, and what it does keep falls into
    pieces: the heap of a long translation grows with each new order of batches. One heap that
    never shrinks is faster, holds some more (`benchmarks/memory.py` measures both), and stays as
    it is. Call it before the first operation: threads that have a heap of their own keep it.

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


def peak_memory() -> dict[str, float]:
    """The most memory in MB that was held: by the process, and by its first accelerator.

    Either is left out where nothing tells.
    """
    peaks = {"peak_memory_mb": _peak_of_process(), "peak_device_memory_mb": _peak_of_device()}
    return {name: peak / 2**20 for name, peak in peaks.items() if peak}


def _peak_of_process() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10


def _peak_of_device() -> int:
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    if backend == "torch":
        import torch

        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    import tensorflow as tf

    if not tf.config.list_logical_devices("GPU"):
        return 0
    return tf.config.experimental.get_memory_info("GPU:0")["peak"]
