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
from pathlib import Path
from typing import Any

from rich.console import Console

from keras_aiayn.config import TrainingConfig, TransformerConfig
from keras_aiayn.data import corpus
from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.data.prepared import Prepared
from keras_aiayn.training import checkpoint
from keras_aiayn.transformer import Transformer
from keras_aiayn.translator import Translator

Configs = tuple[TransformerConfig, TrainingConfig]

# What a resumed run may have otherwise than when it was started.
MAY_CHANGE = ("package", "steps", "patience", "keep_last", "keep_best", "checkpoint_minutes")


def open_folder(output: Path, data: Prepared, configs: Configs, resume: bool) -> None:
    """Makes the folder of a new run, or compares a resumed one with how it was started."""
    weights = configs[1].corpus_weights  # JSON has lists only
    now = {
        "package": importlib.metadata.version("keras-aiayn"),
        "corpus": data.fingerprint,
        "model": dataclasses.asdict(configs[0]),
        "training": {**dataclasses.asdict(configs[1]), "corpus_weights": list(weights)},
    }
    path = output / "config.json"
    if not resume:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise FileExistsError(f"{output} is not empty: name another output, or pass --resume")
        with corpus.whole_folder(output) as folder:
            tokenizers.save(data.source_tokenizer, data.target_tokenizer, folder)
            (folder / path.name).write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
        return
    then = _started_with(output)
    # A setting that is newer than the run stands at its default, which changes nothing.
    then["training"] = {**dataclasses.asdict(TrainingConfig()), **then["training"]}
    then["training"]["corpus_weights"] = list(then["training"]["corpus_weights"])
    differences = _differences(then, now)
    if differences:
        raise ValueError(
            f"{output} was started otherwise, and cannot be resumed so: {'; '.join(differences)}"
        )


def _started_with(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(f"{folder} is not the folder of a run: it has no config.json") from None


def _differences(then: Any, now: Any, name: str = "") -> list[str]:
    """What differs, as `name: then, now`. The version may, and what decides nothing but the end."""
    if isinstance(now, dict) and isinstance(then, dict):
        return [
            difference
            for key in now.keys() | then.keys()
            if key not in MAY_CHANGE
            for difference in _differences(then.get(key), now.get(key), f"{name}.{key}".strip("."))
        ]
    return [] if then == now else [f"{name} was {then} and is {now}"]


def truncate_log(path: Path, step: int) -> None:
    """Drops what was logged after the checkpoint: it will be logged again, the same."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    with corpus.whole_file(path, "w") as stream:
        for line in lines:
            if json.loads(line)["step"] <= step:
                stream.write(line + "\n")


def last_whole(folder: Path, console: Console) -> str | None:
    """The name of the last whole checkpoint; says what is passed over."""
    for part in sorted(folder.glob("*.part")):
        console.print(f"{part} was not finished and is passed over")
    for path in reversed(checkpoint.find(folder)):
        if checkpoint.whole(path):
            console.print(f"resuming from {path}")
            return path.name
        console.print(f"warning: {path} is damaged and passed over")
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
