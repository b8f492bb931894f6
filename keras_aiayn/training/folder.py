"""The folder of a run: what it was started with, its checkpoints, its log.

It holds

    tokenizer.model   the subwords
    config.json       what the run was started with; a resume must agree with it
    log.jsonl         one line a validation
    tensorboard/      the same for TensorBoard
    checkpoints/      step-NNNNNNNN.npz, the last `keep_last` of them
    model.keras       the translator, at the end
"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from keras_aiayn.config import TrainingConfig, TransformerConfig
from keras_aiayn.data import corpus
from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.data.prepared import Prepared
from keras_aiayn.training import checkpoint, report
from keras_aiayn.transformer import Transformer
from keras_aiayn.translator import Translator

Configs = tuple[TransformerConfig, TrainingConfig]

# What a resumed run may have otherwise than when it was started: the version, and what decides
# nothing but the end.
MAY_CHANGE = ("package", "steps", "patience", "keep_last", "keep_best", "checkpoint_minutes")


def check(output: Path, data: Prepared, configs: Configs, resume: bool) -> None:
    """Refuses a folder that is in use, or a resume of a run that was started otherwise."""
    if not resume:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise FileExistsError(f"{output} is not empty: name another output, or pass --resume")
        return
    check_alike(output, _started_with(output), started_now(data, configs))


def check_alike(
    output: Path, then: dict[str, Any], now: dict[str, Any], may_change: Sequence[str] = MAY_CHANGE
) -> None:
    """Refuses to go on with what was started otherwise, in a setting that may not change."""
    # A setting that is newer than the run stands at its default, which changes nothing.
    training = {**dataclasses.asdict(TrainingConfig()), **then["training"]}
    training["corpus_weights"] = list(training["corpus_weights"])
    differences = _differences({**then, "training": training}, now, may_change)
    if differences:
        raise ValueError(
            f"{output} was started otherwise, and cannot be resumed so: {'; '.join(differences)}"
        )


def create(output: Path, data: Prepared, configs: Configs) -> None:
    """Makes the folder of a new run."""
    text = json.dumps(started_now(data, configs), indent=2) + "\n"
    with corpus.whole_folder(output) as folder:
        tokenizers.save(data.source_tokenizer, data.target_tokenizer, folder)
        (folder / "config.json").write_text(text, encoding="utf-8")


def started_now(data: Prepared, configs: Configs) -> dict[str, Any]:
    """What a run is started with, as JSON keeps it."""
    weights = configs[1].corpus_weights  # JSON has lists only
    return {
        "package": importlib.metadata.version("keras-aiayn"),
        "corpus": data.fingerprint,
        "model": dataclasses.asdict(configs[0]),
        "training": {**dataclasses.asdict(configs[1]), "corpus_weights": list(weights)},
    }


def _started_with(folder: Path) -> dict[str, Any]:
    try:
        started = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if {"corpus", "model", "training"} <= started.keys():
            return started
    except (OSError, ValueError, AttributeError):
        pass
    raise ValueError(f"{folder} is not the folder of a run: it has no config.json of one")


def _differences(then: Any, now: Any, may_change: Sequence[str], name: str = "") -> list[str]:
    """What differs, as `name: then, now`, but for what may."""
    if isinstance(now, dict) and isinstance(then, dict):
        return [
            difference
            for key in now.keys() | then.keys()
            if key not in may_change
            for difference in _differences(
                then.get(key), now.get(key), may_change, f"{name}.{key}".strip(".")
            )
        ]
    return [] if then == now else [f"{name} was {then} and is {now}"]


def truncate_log(path: Path, step: int, console: Console) -> None:
    """Drops what was logged after the checkpoint: it will be logged again, the same."""
    if not path.exists():
        return
    records, torn = report.read_log(path)
    if torn:
        console.print(f"the last line of {path} was not finished and is dropped")
    with corpus.whole_file(path, "w") as stream:
        for record in records:
            if record["step"] <= step:
                stream.write(json.dumps(record) + "\n")


def last_whole(folder: Path, console: Console) -> str | None:
    """The name of the last whole checkpoint; says what is passed over."""
    for part in sorted(folder.glob("*.part")):
        console.print(f"{part} was not finished and is passed over")
        part.unlink()
    for path in reversed(checkpoint.find(folder)):
        if checkpoint.whole(path):
            console.print(f"resuming from {path}")
            return path.name
        # Under its name it would count among those that are kept.
        aside = path.rename(path.with_suffix(".damaged"))
        console.print(f"warning: {path} is damaged and passed over; it is now {aside.name}")
    console.print("there is no whole checkpoint yet: starting at step 0")
    return None


def save(
    output: Path, model: Transformer, position: dict[str, Any], config: TrainingConfig
) -> None:
    """Writes a checkpoint, and removes those that are no longer kept."""
    checkpoint.save(output / "checkpoints", model, position)
    checkpoint.prune(output / "checkpoints", config.keep_last, config.best_kept)


def chosen(folder: Path, config: TrainingConfig, average: int) -> list[str]:
    """The checkpoints that the result is made of; none where it is what training left."""
    if average > 1:
        chosen = checkpoint.find(folder)[-average:]
    else:
        chosen = checkpoint.best(folder, 1) if config.patience else []
    return [path.name for path in chosen]


def average_run(
    folder: Path, output: Path, *, last: int | None = None, best: int | None = None
) -> list[Path]:
    """Averages checkpoints of a run that ended, or still goes on, into a translator.

    Args:
        folder: of the run.
        output: the `.keras` file to write.
        last: how many of the last checkpoints; 5, as in the paper, where neither is said.
        best: how many of those with the best validations.

    Returns:
        The checkpoints that went in.
    """
    if last is not None and best is not None:
        raise ValueError(
            f"an average is of the last or of the best. Received: last={last}, best={best}"
        )
    started = _started_with(folder)
    if best is None:
        asked = 5 if last is None else last
        paths = checkpoint.find(folder / "checkpoints")[-asked:] if asked > 0 else []
        kept = f"{len(checkpoint.find(folder / 'checkpoints'))} checkpoints"
    else:
        asked, paths = best, checkpoint.best(folder / "checkpoints", best)
        kept = f"{len(paths)} checkpoints of a validation"
    if asked < 1 or len(paths) != asked:
        raise ValueError(f"{folder} keeps {kept}. Received: an average of {asked}")
    model = TransformerConfig(**started["model"]).build()
    checkpoint.average(paths, model)
    source, target = tokenizers.load(folder)
    Translator(model, source, target).save(output)
    return paths
