"""What a run says: on the screen, in `log.jsonl` and to TensorBoard."""

import contextlib
import importlib.util
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
from rich.console import Console

from keras_aiayn.config import TrainingConfig
from keras_aiayn.data import batching
from keras_aiayn.data.prepared import Prepared
from keras_aiayn.memory import peak_memory
from keras_aiayn.training.distribution import Devices
from keras_aiayn.transformer import Transformer

# What `log.jsonl` tells of a training token, from the metrics of `fit`.
TOKEN_MEANS = ("token_loss", "nll", "token_accuracy")
LARGEST_NLL = 700.0  # whose exponential is still a float
COLLAPSED = (
    "warning: all translations of the validation are alike: the decoder says one sentence "
    "whatever it reads. Early in a run it may pass; if it stays, lower learning_rate_scale"
)


def warn(console: Console, config: TrainingConfig) -> None:
    """Says what will go wrong, before it does."""
    if config.steps <= config.warmup_steps:
        console.print(
            f"warning: the run ends after {config.steps:,} steps, inside its warm-up of "
            f"{config.warmup_steps:,}: the learning rate only rises (--set warmup_steps=N)"
        )


def training_record(position: dict[str, Any]) -> dict[str, float]:
    """What the log says of the training since the last validation."""
    sums = position["sums"]
    means = {name: sums[name] / sums["target"] for name in TOKEN_MEANS}
    names = ("step", "epoch", "batch", "seconds", "real_share", "shapes")
    return {
        **{name: position[name] for name in names},
        **means,
        "perplexity": perplexity(means["nll"]),
        "source_tokens_per_second": sums["source"] / sums["seconds"],
        "target_tokens_per_second": sums["target"] / sums["seconds"],
        **peak_memory(),
    }


def perplexity(nll: float) -> float:
    """Of a mean negative log-likelihood in nats; of a run that diverged a very large number."""
    return math.exp(min(nll, LARGEST_NLL))


def check_installed() -> None:
    """Refuses a run that could not write its log."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ImportError("training needs TensorBoard: pip install 'keras-aiayn[train]'")


def read_log(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The records of a `log.jsonl`, and whether its last line is torn: a full disk leaves one.

    Raises:
        ValueError: where another line is no record.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):
                return records, True
            record = None
        if not isinstance(record, dict) or "step" not in record:
            raise ValueError(f"{path}, line {number}, is no record of a run")
        records.append(record)
    return records, False


def headline(
    data: Prepared,
    model: Transformer,
    config: TrainingConfig,
    plan: batching.BatchPlan,
    corpora: Sequence[tuple[int, float]],
    own: Devices,
) -> str:
    """What is trained, on what and how.

    Args:
        data: the corpus.
        model: to be trained.
        config: of the training.
        plan: of the epoch that comes.
        corpora: (pairs, weight) of each, where they have weights.
        own: the devices.
    """
    shapes = ", ".join(f"{rows}x{source}+{target}" for rows, source, target in plan.shapes)
    weights = ", ".join(f"{pairs:,} x {weight:g}" for pairs, weight in corpora)
    weighted = f" ({weights} an epoch)" if corpora else ""
    devices = f", {own.replicas} devices" if own.replicas > 1 else ""
    processes = f" in {own.processes} processes" if own.processes > 1 else ""
    share = plan.real_share(config.accumulation * own.replicas)
    return (
        f"{len(data.train):,} pairs{weighted}, vocabulary {model.vocabulary_size:,}, "
        f"{model.count_params():,} parameters, {config.steps:,} steps of "
        f"{config.tokens_per_batch:,} tokens, {len(plan):,} batches an epoch on "
        f"{keras.backend.backend()}{devices}{processes}\n"
        f"{len(plan.shapes)} shapes (rows x source + target): {shapes}; "
        f"{100 * share:.1f} % real tokens"
    )


def line(record: dict[str, Any]) -> str:
    """A record of the log, for the screen."""
    text = (
        f"step {record['step']:,}  epoch {record['epoch']}  loss {record['token_loss']:.3f}  "
        f"perplexity {record['perplexity']:.2f}  accuracy {100 * record['token_accuracy']:.1f} %  "
        f"rate {record['learning_rate']:.2e}  "
        f"{record['target_tokens_per_second']:,.0f} target tokens/s"
    )
    line = f"{text}  {line_of_scores(record)}  {record['seconds'] / 60:.1f} min"
    return f"{line}\n{COLLAPSED}" if record.get("collapsed") else line


def line_of_scores(scores: dict[str, Any]) -> str:
    """What of it a validation told."""
    if "bleu" not in scores:
        return "no validation text"
    return f"validation perplexity {scores['valid_perplexity']:.2f}  BLEU {scores['bleu']:.2f}"


@contextlib.contextmanager
def writer(output: Path, own: Devices) -> Iterator[Any]:
    """A function that appends a record to the log and to TensorBoard's files, in one process."""
    if not own.is_first:
        yield lambda record: None
        return
    from tensorboard.summary import Writer

    tensorboard = Writer(str(output / "tensorboard"))

    def write(record: dict[str, Any]) -> None:
        with open(output / "log.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                tensorboard.add_scalar(name, value, record["step"])
        tensorboard.flush()

    try:
        yield write
    finally:
        tensorboard.close()
