"""What an accelerator makes of the paper's models: tokens a second, share of its peak, memory.

    python benchmarks/accelerator.py
    python benchmarks/accelerator.py --tiny     the same code at toy sizes, on a CPU

`base` and `big` with 37,000 subwords learn in mixed_bfloat16 from batches of 25,000 source and
25,000 target tokens, on JAX and on PyTorch: by `fit`, with the loss, Adam and the schedule of
`keras-aiayn train`. The batches are made, so neither a corpus nor TensorFlow is needed; an eighth
of each is pads, as in batches of sentences. Every model has a process of its own.

    tokens/s          real ones of both sides, in the median of some groups of steps; a group ends
                      when its loss has been read back from the device
    of the peak       the operations a second in the matrix products of the step, pads and
                      gradients included, over those in products of large bfloat16 matrices that
                      the same process timed
    memory            the most that was in use on the device
    fused attention   how many of the step's attentions the backend's own kernel computed: the
                      calls in the compiled program (JAX), or those that a profile saw (PyTorch)
"""

import argparse
import collections
import json
import os
import re
import statistics
import subprocess
import sys
import time
import types
from typing import Any

import curves
import numpy as np
import train as training
import workers

BACKENDS = {"jax": "JAX", "torch": "PyTorch"}
SIZES = ("base", "big")
BATCHES = 4  # different ones, one after the other
PRODUCTS = 16  # of a timing of the peak
TOY = {"num_layers": 2, "hidden_dim": 32, "intermediate_dim": 64, "num_heads": 2}


def flops(config: Any, rows: int, source: int, target: int) -> int:
    """Operations in all matrix products of a training step, gradients included."""
    products = training.products(config, rows, source, target)
    return sum(2 * number * batch * m * k * n for number, batch, m, k, n in products)


def row_lengths(tokens: int, longest: int) -> np.ndarray:
    """Lengths of rows that hold so many tokens together, of 3/4 of the longest and more."""
    lengths = longest - np.arange(tokens) % (longest // 4 + 1)
    rows = np.searchsorted(np.cumsum(lengths), tokens) + 1
    lengths = lengths[:rows]
    lengths[-1] -= lengths.sum() - tokens  # what is left
    return lengths


def made_batch(vocabulary_size: int, tokens: int, longest: int, seed: int) -> tuple:
    """Random sentences as the pipeline gives them: inputs, targets, and weights of the targets."""
    from keras_aiayn.data import batching
    from keras_aiayn.special_ids import PAD

    pieces = row_lengths(tokens, longest) - 1  # and EOS
    offsets = np.concatenate([[0], np.cumsum(pieces)])
    drawn = np.random.default_rng(seed).integers(4, vocabulary_size, (2, offsets[-1]))
    split = types.SimpleNamespace(
        source_tokens=drawn[0], source_offsets=offsets,
        target_tokens=drawn[1], target_offsets=offsets,
    )  # fmt: skip
    rows = len(pieces)
    inputs, targets = batching.gather(split, np.arange(rows), rows, longest, longest)
    return inputs, targets, np.where(targets != PAD, 1 / tokens, 0).astype("float32")


def compiled_model(size: str, tiny: bool) -> tuple[Any, Any]:
    """The sizes, and the model with what `keras-aiayn train` trains it by."""
    from keras_aiayn import LabelSmoothedCrossentropy, NoamSchedule, TransformerConfig
    from keras_aiayn.config import TrainingConfig
    from keras_aiayn.training.optimizer import adam

    changes = {"vocabulary_size": 200, **TOY} if tiny else {}
    config = getattr(TransformerConfig, size)(**changes, dtype="mixed_bfloat16")
    model = config.build(seed=1)
    optimizer, _ = adam(NoamSchedule(config.hidden_dim), TrainingConfig())
    model.compile(optimizer, LabelSmoothedCrossentropy())
    model.optimizer.build(model.trainable_variables)
    return config, model


def peak_flops(side: int) -> float:
    """The most operations a second that products of square bfloat16 matrices reach."""
    from keras import ops

    from keras_aiayn.decoding.compiled import compiled

    def chain(a: Any, b: Any) -> Any:
        for _ in range(PRODUCTS):  # each needs the one before, so that none is left out
            a = ops.matmul(a, b)
        return ops.max(ops.cast(a, "float32"))

    drawn = np.random.default_rng(1).normal(size=(2, side, side)) * side**-0.5
    a, b = (ops.convert_to_tensor(one.astype("float32"), dtype="bfloat16") for one in drawn)
    run, seconds = compiled([], chain), []
    for _ in range(6):
        began = time.perf_counter()
        run(a, b)
        seconds.append(time.perf_counter() - began)
    return 2 * PRODUCTS * side**3 / min(seconds[1:])


def fused_attentions(model: Any, batch: tuple) -> dict[str, int]:
    """How many attentions of a training step each fused kernel computes, forward."""
    import keras

    count = {"jax": _in_jax_program, "torch": _in_torch_profile}[keras.backend.backend()]
    return count(model, batch)


def _in_jax_program(model: Any, batch: tuple) -> dict[str, int]:
    """By the calls of cuDNN in the compiled program: what falls back to XLA is none."""
    import jax

    lists = (
        model.trainable_variables, model.non_trainable_variables, model.optimizer.variables,
        model.metrics_variables,
    )  # fmt: skip
    state = tuple([variable.value for variable in variables] for variables in lists)
    program = jax.jit(model.train_step).lower(state, batch).compile().as_text()
    calls = re.findall(r'custom_call_target="__cudnn\$(fmha\w+)"', program)
    return collections.Counter(f"cuDNN {name}" for name in calls if "Backward" not in name)


def _in_torch_profile(model: Any, batch: tuple) -> dict[str, int]:
    """By the operations that a profile of a step saw: the one called `math` is not fused."""
    from torch import profiler

    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as profile:
        model.train_on_batch(*batch)
    kernels = {}
    for event in profile.key_averages():
        found = re.fullmatch(r"aten::_scaled_dot_product_(\w+)", event.key)
        if found and not found[1].endswith(("_math", "_backward")):
            kernels[found[1]] = event.count
    return kernels


def device_name() -> str:
    """What the backend computes on."""
    import keras

    from keras_aiayn.decoding.compiled import has_accelerator

    if not has_accelerator():
        return "CPU"
    if keras.backend.backend() == "jax":
        import jax

        return jax.devices()[0].device_kind
    import torch

    return torch.cuda.get_device_name()


def measure(options: argparse.Namespace) -> None:
    """In a process of its own: prints the figures of one size on Keras's backend."""
    from keras_aiayn.decoding.compiled import has_accelerator
    from keras_aiayn.memory import peak_memory

    if not (options.tiny or has_accelerator()):
        print("null")
        return
    config, model = compiled_model(options.one, options.tiny)
    batches = [
        made_batch(config.vocabulary_size, options.tokens, options.length, seed)
        for seed in range(BATCHES)
    ]
    seconds = curves.step_seconds(model, batches, options.steps, options.groups)
    held = peak_memory()  # of training: what comes after needs some as well
    figures = {
        "device": device_name(),
        "seconds": seconds,
        "flops": flops(config, *batches[0][1].shape[:1], options.length, options.length),
        "memory": held.get("peak_device_memory_mb", held["peak_memory_mb"]) * 2**20,
        "fused": fused_attentions(model, batches[0]),
        "attentions": 3 * config.num_layers,
        "peak": peak_flops(options.side),
    }
    print(json.dumps(figures))


def run(size: str, backend: str) -> dict[str, Any] | None:
    """`measure` in a new process; None where the backend sees no accelerator."""
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--one", size],
        env=os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def row(size: str, backend: str, figures: dict[str, Any], tokens: int) -> list[str]:
    """A line of the table."""
    seconds = statistics.median(figures["seconds"])
    rate, peak = figures["flops"] / seconds, figures["peak"]
    spread = f"{1e3 * min(figures['seconds']):,.1f} to {1e3 * max(figures['seconds']):,.1f}"
    kernels = ", ".join(figures["fused"])
    fused = f"{sum(figures['fused'].values())} of {figures['attentions']}"
    return [
        size, BACKENDS[backend], f"{2 * tokens / seconds:,.0f}", f"{1e3 * seconds:,.1f} ({spread})",
        f"{100 * rate / peak:.0f} % of {peak / 1e12:,.3g}", f"{figures['memory'] / 1e9:,.1f}",
        f"{fused}{kernels and ': '}{kernels}",
    ]  # fmt: skip


def main() -> None:
    """Measures all, or as one of the processes one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=list(BACKENDS), help="Both.")
    parser.add_argument("--size", action="append", choices=SIZES, help="Both.")
    parser.add_argument("--tokens", type=int, help="Real ones of a batch, a side: 25,000.")
    parser.add_argument("--length", type=int, help="The longest sentence: 32.")
    parser.add_argument("--steps", type=int, help="Of a group: 20.")
    parser.add_argument("--groups", type=int, default=5, help="After a first one: %(default)s.")
    parser.add_argument("--side", type=int, help="Of the large matrices: 8,192.")
    parser.add_argument("--tiny", action="store_true", help="Toy sizes, on a CPU too; not kept.")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    defaults = {"tokens": 25_000, "length": 32, "steps": 20, "side": 8_192}
    if options.tiny:
        defaults = {"tokens": 100, "length": 8, "steps": 2, "side": 64}
    for name, value in defaults.items():
        setattr(options, name, getattr(options, name) or value)
    if options.one:
        measure(options)
        return
    rows, devices, without = [], set(), []
    for backend in options.backend or BACKENDS:
        for size in options.size or SIZES:
            if (figures := run(size, backend)) is None:
                without.append(BACKENDS[backend])
                break
            rows.append(row(size, backend, figures, options.tokens))
            devices.add(figures["device"])
    if without:
        names = " and ".join(without)
        print(f"no accelerator for {names}; --tiny tries the same on a CPU", file=sys.stderr)
    if not rows:
        sys.exit(2)
    header = ["model", "backend", "real tokens/s", "ms a step (least to most)",
              "share of the peak, TFLOP/s", "memory, GB", "fused attention"]  # fmt: skip
    text = (
        f"{', '.join(sorted(devices))}; {options.tokens:,} source and as many target tokens a "
        f"step, sentences of at most {options.length}, mixed_bfloat16."
    )
    workers.write_section(
        "Accelerator", f"{text}\n\n{workers.table(header, rows)}", keep=not options.tiny
    )


if __name__ == "__main__":
    main()
