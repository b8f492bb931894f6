"""How far data parallel carries: devices of this machine, and the arithmetic beyond it.

    KERAS_BACKEND=jax python benchmarks/scaling.py --folder /tmp/scaling

First, on this machine: updates a second on 1, 2 and 4 CPU devices, which share its cores, and the
share of an update that is not computation, by comparing with an update whose gradients are not
summed (PyTorch) or with one device that does the same work (JAX, TensorFlow).

Then the arithmetic for accelerators, drawn as a picture. An update of the paper's batch, 25,000
tokens a side, needs 6 operations for each weight and token (a weight of either stack meets the
tokens of its side; the embedding counts as the projection). N devices share it. A ring sends
2 (N - 1) / N times the gradients, 4 bytes a weight or 2 in bfloat16, over the slowest link. The
two are not overlapped here: what is shown is the least that data parallel gives.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import workers
from multi30k import opened

# Operations a second that a training reaches (about 40 % of an H100's peak in bfloat16), and bytes
# a second between two accelerators of a machine, and between two machines.
COMPUTE, INSIDE, BETWEEN, PER_MACHINE = 4e14, 4.5e11, 5e10, 8
TOKENS = 25_000
DEVICES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def step_times(folder: Path, devices: int, steps: int) -> dict[str, float]:
    """Seconds an update of `tiny` takes on some devices, in a process of its own."""
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    command = [sys.executable, __file__, "--folder", str(folder), "--devices", str(devices),
               "--steps", str(steps)]  # fmt: skip
    if backend == "torch" and devices > 1:
        call = f"from keras_aiayn.training import launch; launch.launch({devices}, {command!r})"
        command = [sys.executable, "-c", f"{call} and exit(2)"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> None:
    """In that process: prints the times of an update with and without its sums."""
    import keras
    import train as training

    from keras_aiayn import LabelSmoothedCrossentropy
    from keras_aiayn.data import batching
    from keras_aiayn.training import distribution, optimizer

    own = distribution.start(options.devices)
    data = opened(options.folder)
    plan, _, _ = training.sample(data, options.steps, 4_096)
    config = training.config_of("tiny", data.source_tokenizer.vocabulary_size)
    times = {}
    summed = optimizer.sum_over_replicas
    kinds = ["whole"]
    if keras.backend.backend() == "torch" and own.replicas > 1:
        kinds.append("without sums")
    for kind in kinds:
        if kind != "whole":
            optimizer.sum_over_replicas = list
        with own.scope():
            model = config.build(seed=1)
            adam = training.adam(config)
            optimizer.watched(adam)
            model.compile(adam, LabelSmoothedCrossentropy(0.1))
            model.optimizer.build(model.trainable_variables)
        own.share(model)
        seconds = []
        for _ in range(3):
            dataset, steps = own.feed(
                batching.dataset(data.train, plan, replicas=own.replicas, parts=own.parts)
            )
            began = time.perf_counter()
            model.fit(dataset, steps_per_epoch=steps, shuffle=False, verbose=0)
            seconds.append(time.perf_counter() - began)
        times[kind] = min(seconds[1:]) / options.steps
        optimizer.sum_over_replicas = summed
    if own.is_first:
        print(json.dumps(times))


def update(config: Any, devices: int, bytes_of_weight: int) -> tuple[float, float]:
    """Seconds of computing and of communicating an update of the paper's batch."""
    weights = config.build().count_params()
    computing = 6 * weights * TOKENS / devices / COMPUTE
    slowest = INSIDE if devices <= PER_MACHINE else BETWEEN
    sent = 2 * (devices - 1) / devices * weights * bytes_of_weight
    return computing, sent / slowest


def draw(path: Path) -> str:
    """Draws the arithmetic, and gives it as a table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from keras_aiayn import TransformerConfig

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    rows = []
    for name in ("base", "big"):
        config = getattr(TransformerConfig, name)()
        for size, style in ((4, "-"), (2, "--")):
            times = [update(config, devices, size) for devices in DEVICES]
            speedups = [times[0][0] / (computing + sending) for computing, sending in times]
            axes.plot(DEVICES, speedups, style, marker="o", label=f"{name}, {size} bytes a weight")
            if size == 4:
                rows += [
                    [name, devices, f"{1e3 * computing:,.2f}", f"{1e3 * sending:,.2f}",
                     f"{speedup:,.1f}", f"{100 * sending / (computing + sending):.0f} %"]
                    for devices, (computing, sending), speedup in zip(
                        DEVICES, times, speedups, strict=True)
                ]  # fmt: skip
    axes.plot(DEVICES, DEVICES, ":", color="grey", label="as many times as devices")
    axes.set(xscale="log", yscale="log", xlabel="accelerators", ylabel="times as fast as one")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    header = ["model", "devices", "computing, ms", "communicating, ms", "speed-up", "communication"]
    return workers.table(header, rows)


def conclusions() -> str:
    """How far the paper's batch carries, and what pays beyond."""
    from keras_aiayn import TransformerConfig

    lines = []
    for name in ("base", "big"):
        config = getattr(TransformerConfig, name)()
        times = {devices: update(config, devices, 4) for devices in DEVICES}
        half = max(n for n, (computing, sending) in times.items() if sending <= computing)
        computing, sending = update(config, 64, 4)
        lines.append(
            f"- {name}: up to {half} devices an update computes longer than it sends. On 64, a "
            f"batch {sending / computing:,.0f} times as large, or as many accumulated, would "
            "compute as long as it sends."
        )
    lines.append(
        "- Cutting the weights among the devices of a machine sends activations instead: of each "
        "block twice the width times the tokens of a device. It pays where a replica does not fit, "
        "or where a device's share of the batch is a few hundred tokens."
    )
    return "\n".join(lines)


def main() -> None:
    """Measures here, and works out what is elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="For the prepared corpus.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.devices:
        measure(options)
        return
    opened(options.folder)
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    rows, alone = [], None
    for devices in (1, 2, 4):
        times = step_times(options.folder, devices, options.steps)
        alone = alone or times["whole"]
        without = times.get("without sums", min(alone, times["whole"]))
        share = 100 - 100 * without / times["whole"]
        rows.append([devices, f"{1 / times['whole']:.2f}", f"{share:.0f} %" if devices > 1 else ""])
    header = ["CPU devices", "updates/s", "not computing"]
    workers.write_section(f"Scaling on this machine, {backend}", workers.table(header, rows))
    picture = Path(__file__).parents[1] / "docs" / "scaling.png"
    workers.write_section(
        "Scaling by arithmetic",
        f"{draw(picture)}\n\n![speed-up](../docs/scaling.png)\n\n{conclusions()}",
    )


if __name__ == "__main__":
    main()
