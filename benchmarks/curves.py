"""What the benchmarks of growth share: times, fitted exponents, and panels that show both."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

COLORS = ("#1f6fb4", "#d9622b", "#2f8f5b", "#8a4fa3")


class Fit(NamedTuple):
    """`factor * size ** exponent`, which holds from size `start` on."""

    exponent: float
    factor: float
    start: float


class Curve(NamedTuple):
    """What was measured at some sizes, and the exponent that theory expects."""

    sizes: Sequence[float]
    values: Sequence[float]
    expected: str

    def fit(self) -> Fit:
        """The power of the size that the values follow."""
        return fit(self.sizes, self.values)

    def exponents(self) -> str:
        """The exponent that was measured, and in brackets the expected one."""
        return f"{self.fit().exponent:.2f} ({self.expected})"


def fit(sizes: Sequence[float], values: Sequence[float]) -> Fit:
    """Fits a power by least squares in logarithms, over the upper half of the range.

    At small sizes a call costs more than what it computes; the upper half says what growth costs.

    Args:
        sizes: in rising order, two at least.
        values: as many, positive.
    """
    x, y = np.log(sizes), np.log(values)
    upper = x >= min((x[0] + x[-1]) / 2, x[-2]) - 1e-9
    exponent, offset = np.polyfit(x[upper], y[upper], 1)
    return Fit(float(exponent), math.exp(offset), float(np.asarray(sizes)[upper][0]))


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """The median time of some calls, after one that compiles."""
    run()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def step_seconds(model: Any, batches: Sequence[tuple], steps: int, groups: int) -> list[float]:
    """Seconds of a training step, in each group of steps but a first one that compiles.

    All are steps of one `fit`: what it prepares as it begins does not count.

    Args:
        model: a compiled one.
        batches: taken in turn: inputs, targets and, if need be, weights.
        steps: of a group; its end is when its loss has been read back from the device.
        groups: after the first one.

    Raises:
        ValueError: if the loss is no number, whose speed means nothing.
    """
    import keras

    times = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            if (batch + 1) % steps == 0:
                loss = float(keras.ops.convert_to_numpy(logs["loss"]))
                times.append(time.perf_counter())
                if not math.isfinite(loss):
                    raise ValueError(f"the loss became {loss}")

    total = steps * (groups + 1)
    feed = (batches[step % len(batches)] for step in range(total))
    model.fit(feed, steps_per_epoch=total, shuffle=False, verbose=0, callbacks=[Clock()])
    return [(end - start) / steps for start, end in itertools.pairwise(times)]


def figure(width: float, height: float, title: str) -> Any:
    """An empty figure."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    made.suptitle(title, fontsize=12)
    return made


def draw(axis: Any, curves: dict[str, Curve], xlabel: str, ylabel: str = "") -> None:
    """Draws curves on logarithmic axes, fits as heavy lines, their exponents in the legend."""
    for color, (name, curve) in zip(COLORS, curves.items(), strict=False):
        own = curve.fit()
        ends = np.array([own.start, curve.sizes[-1]])
        label = f"{name}: {curve.exponents()}"
        axis.plot(curve.sizes, curve.values, color=color, linewidth=0.8, alpha=0.6)
        axis.plot(ends, own.factor * ends**own.exponent, color=color, linewidth=2.2, alpha=0.8)
        axis.plot(curve.sizes, curve.values, "o", color=color, markersize=4.5, label=label)
    axis.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    _label_sizes(axis, sorted({size for curve in curves.values() for size in curve.sizes}))
    _label_values(axis, [value for curve in curves.values() for value in curve.values])
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", fontsize=8.5, frameon=False, handletextpad=0.2)


def _label_sizes(axis: Any, sizes: list[float]) -> None:
    """Labels the largest size, and of the others as many as there is room for."""
    shown = sizes[:: -(len(sizes) // 5 + 1)]
    names = [f"{size:g}" if size % 1000 else f"{size / 1000:g}k" for size in shown]
    axis.set_xticks(shown, names)
    axis.set_xticks([], minor=True)
    axis.tick_params(labelsize=8.5)


def _label_values(axis: Any, values: list[float]) -> None:
    """Labels in plain numbers, on a scale with room for the legend above the curves."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = min(values), max(values)
    decades = max(1.0, math.log10(high / low))
    axis.set_ylim(low / 10 ** (0.1 * decades), high * 10 ** (0.45 * decades))
    subs = (1.0, 2.0, 5.0) if decades < 1.2 else (1.0, 3.0) if decades < 2 else (1.0,)
    axis.yaxis.set_major_locator(LogLocator(subs=subs))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def save(drawn: Any, picture: Path) -> None:
    """Writes a figure."""
    drawn.savefig(picture, dpi=130, facecolor="white")
    print(f"drawn: {picture}")


def picture(name: str, quick: bool) -> Path:
    """Where a picture belongs: among the docs, or if it only tries the code, here."""
    return Path(name) if quick else Path(__file__).parents[1] / "docs" / name
