"""How far data parallel carries: devices of this machine, and the arithmetic beyond it.

    KERAS_BACKEND=jax python benchmarks/scaling.py --folder /tmp/scaling

First, on this machine: updates a second on 1, 2 and 4 CPU devices, which share its cores, and the
share of an update that is not computation, by comparing with an update whose gradients are not
summed (PyTorch) or with one device that does the same work (JAX, TensorFlow).

Then the arithmetic for accelerators, drawn as a picture. An update of the paper's batch, 25,000
tokens a side, needs 6 operations for each weight and token (a weight of either stack meets the
tokens of its side; the embedding counts as the projection). N devices share it. Gradients, 4 bytes
a weight, are summed in rings: within each machine, then each device its part between the machines,
over a link of its own. Nothing is overlapped, and latencies are not counted. Weights that are cut
among the devices of a machine (model parallel) need no sum of gradients there, but of activations,
there and back: behind attention and behind the feed-forward network of each block.
"""

import argparse
import functools
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


def ring(devices: int, size: float) -> float:
    """Bytes that each of some devices sends to sum arrays of so many bytes."""
    return 2 * (devices - 1) / devices * size


def update(config: Any, devices: int, tokens: int = TOKENS, cut: bool = False) -> tuple[float, ...]:
    """An update on some devices, by data parallel alone or with weights cut in each machine.

    Returns:
        Seconds of computing and of sending, and the bytes that each device sends.
    """
    own = min(devices, PER_MACHINE)
    machines = devices // own
    gradients = 4 * weights_of(config)
    sums = config.num_layers * (2 + 3) * 2 if cut else 1  # of either block, there and back
    summed = tokens / machines * config.hidden_dim * 4 if cut else gradients
    inside, between = sums * ring(own, summed), ring(machines, gradients / own)
    computing = 6 * weights_of(config) * tokens / devices / COMPUTE
    return computing, inside / INSIDE + between / BETWEEN, inside + between


@functools.cache
def weights_of(config: Any) -> int:
    """Weights of a model."""
    return config.build().count_params()


def draw(path: Path) -> str:
    """Draws the arithmetic, and gives it as a table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from keras_aiayn import TransformerConfig

    configs = {name: getattr(TransformerConfig, name)() for name in ("base", "big")}
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")

    def line(label: str, config: Any, style: str, **settings: Any) -> None:
        times = [sum(update(config, devices, **settings)[:2]) for devices in DEVICES]
        alone = update(config, 1, settings.get("tokens", TOKENS))[0]
        axes.plot(DEVICES, [alone / time for time in times], style, marker="o", label=label)

    for times in (1, 4, 16, 64):
        batch = "the paper's batch" if times == 1 else f"{times} times that"
        line(f"data parallel, {batch}", configs["base"], "-", tokens=times * TOKENS)
    for name, config in configs.items():
        line(f"{name} cut in each machine, the paper's batch", config, "--", cut=True)
    axes.plot(DEVICES, DEVICES, ":", color="grey", label="as many times as devices")
    axes.set(xscale="log", yscale="log", xlabel="accelerators", ylabel="times as fast as one")
    axes.set_xticks(DEVICES, [f"{devices:,}" for devices in DEVICES])
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    rows = []
    for name, config in configs.items():
        for devices in DEVICES:
            (computing, sending, sent), cut = (
                update(config, devices),
                update(config, devices, cut=True),
            )
            rows.append([
                name, devices, f"{sent / 1e6:,.0f}", f"{1e3 * computing:,.2f}",
                f"{1e3 * sending:,.2f}", f"{update(config, 1)[0] / (computing + sending):,.1f}",
                f"{100 * sending / (computing + sending):.0f} %", f"{1e3 * cut[1]:,.2f}",
            ])  # fmt: skip
    header = ["model", "devices", "MB sent by each", "computing, ms", "sending, ms",
              "times as fast", "share of sending", "sending if cut, ms"]  # fmt: skip
    return workers.table(header, rows)


def conclusions() -> str:
    """How far the paper's batch carries, and what pays beyond."""
    from keras_aiayn import TransformerConfig

    lines = [
        "Both models compute and send in proportion to their weights, so data parallel carries one "
        "as far as the other.\n"
    ]
    for name in ("base", "big"):
        config = getattr(TransformerConfig, name)()
        times = {devices: update(config, devices) for devices in DEVICES}
        half = max(n for n, (computing, sending, _) in times.items() if sending <= computing)
        computing, sending, _ = times[DEVICES[-1]]
        pays = [n for n in DEVICES[1:] if update(config, n, cut=True)[1] < times[n][1]]
        lines.append(
            f"- {name}: up to {half} devices an update of the paper's batch computes longer than "
            f"it sends. On {DEVICES[-1]:,}, a batch {sending / computing:,.0f} times as large, or "
            "as many accumulated, would compute as long as it sends. Weights cut among the devices "
            f"of a machine are sent for less from {min(pays)} devices on. Until then they pay only "
            "where a replica does not fit: its weights, gradients and Adam's two moments are "
            f"{16 * weights_of(config) / 1e9:.1f} GB."
        )
    return "\n".join(lines)


def main() -> None:
    """Measures here, and works out what is elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="For the prepared corpus; else only the rest.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.devices:
        measure(options)
        return
    if options.folder:
        here(options)
    picture = Path(__file__).parents[1] / "docs" / "pictures" / "scaling.png"
    workers.write_section(
        "Scaling by arithmetic",
        f"{draw(picture)}\n\n![speed-up](../docs/pictures/scaling.png)\n\n{conclusions()}",
    )


def here(options: argparse.Namespace) -> None:
    """Measures on this machine."""
    options.folder.mkdir(parents=True, exist_ok=True)
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


if __name__ == "__main__":
    main()
