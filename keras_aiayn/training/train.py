"""The run, from a prepared corpus to `RUN/model.keras`, top to bottom.

A run folder holds

    tokenizer.model   the subwords
    config.json       what the run was started with; a resume must agree with it
    log.jsonl         one line a validation
    tensorboard/      the same for TensorBoard
    checkpoints/      step-NNNNNNNN.npz, the last `keep_last` of them
    model.keras       the translator, at the end
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
from keras import ops
from rich.console import Console

from keras_aiayn.config import TrainingConfig, TransformerConfig, preset, with_settings
from keras_aiayn.data import batching, corpus
from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.data.prepared import Prepared
from keras_aiayn.evaluation import corpus_scores
from keras_aiayn.loading import load
from keras_aiayn.training import checkpoint, distribution
from keras_aiayn.training.distribution import Devices
from keras_aiayn.training.loss import LabelSmoothedCrossentropy
from keras_aiayn.training.memory import keep_freed_memory
from keras_aiayn.training.optimizer import adam
from keras_aiayn.training.progress import StepProgress
from keras_aiayn.training.remat import recompute_blocks
from keras_aiayn.training.schedule import NoamSchedule
from keras_aiayn.transformer import Transformer
from keras_aiayn.translator import Translator

Configs = tuple[TransformerConfig, TrainingConfig]

# What `log.jsonl` tells of a training token, from the metrics of `fit`.
TOKEN_MEANS = ("token_loss", "nll", "token_accuracy")
# What a resumed run may have otherwise than when it was started.
MAY_CHANGE = ("package", "steps", "patience", "keep_last", "keep_best", "checkpoint_minutes")
ONE_INTERRUPT_SECONDS = 2.0
COLLAPSED = (
    "warning: all translations of the validation are alike: the decoder says one sentence "
    "whatever it reads. Early in a run it may pass; if it stays, lower learning_rate_scale"
)


def configure(data: Prepared, name: str, settings: list[str]) -> Configs:
    """The configurations of a name, `name=value` settings applied, for a corpus's vocabulary.

    Args:
        data: the corpus.
        name: `"tiny"`, `"small"`, `"base"`, `"big"` or another row of Table 3.
        settings: such as `"dropout=0.2"` or `"steps=5000"`.
    """
    source_size = data.source_tokenizer.vocabulary_size
    model, training = preset(name, source_size)
    if data.source_tokenizer is not data.target_tokenizer:
        target_size = data.target_tokenizer.vocabulary_size
        model = dataclasses.replace(
            model, share_embeddings=False, target_vocabulary_size=target_size
        )
    return with_settings((model, training), settings)


def run(
    data: Prepared,
    output: Path,
    configs: Configs,
    *,
    resume: bool = False,
    init: Path | None = None,
    average: int = 1,
    devices: int | None = None,
    model_parallel: int = 1,
    console: Console | None = None,
) -> Translator:
    """Trains a translator.

    Args:
        data: the prepared corpus.
        output: the run folder; new, or with `resume` that of an earlier run.
        configs: of the model and of its training.
        resume: whether to go on from the last whole checkpoint.
        init: a `.keras` whose weights to start from.
        average: how many of the last checkpoints the result is the mean of.
        devices: of this machine, as `distribution.start` takes them; all by default.
        model_parallel: devices that share the weights of one replica (JAX).
        console: where the first process reports; standard error by default.

    Returns:
        The translator, which also stands in `output / "model.keras"`.

    Raises:
        ValueError: where the run cannot be as asked; nothing is written then.
    """
    model_config, config = configs
    own = distribution.start(devices, model_parallel=model_parallel)
    parts = config.accumulation * own.replicas
    console = console or Console(stderr=True)
    console.quiet = console.quiet or not own.is_first
    own.first(lambda: _begin(output, data, configs, own, average, resume))
    _warn(console, config)

    keep_freed_memory()
    keras.utils.set_random_seed(config.seed)
    with own.scope():
        model = model_config.build(seed=config.seed)
        if config.remat:
            recompute_blocks(model)
        schedule, gradient_norm = _compile(model, model_config, config)
    if init is not None:
        _warm_start(model, init, data)
    translator = Translator(model, data.source_tokenizer, data.target_tokenizer)
    position: dict[str, Any] = {
        "step": 0,
        "epoch": 0,
        "batch": 0,
        "seconds": 0.0,
        "sums": {},  # since the last validation
        "best": {},  # of each measure, over all validations
        "validations_since_best": 0,
    }
    if resume:
        position = _resume(output, model, own, console) or position
        own.first(lambda: _truncate_log(output / "log.jsonl", position["step"]))
    own.share(model)
    console.print(_headline(data, model, configs, position["epoch"], own))

    progress = StepProgress(
        console,
        config.steps,
        position["step"],
        lambda s: float(schedule(_micro(s, config))),
        config.accumulation,
        checkpoint_seconds=60 * config.checkpoint_minutes,
        agree=own.any if own.processes > 1 else None,
    )
    with _writer(output, own) as write, progress, _stopping_on_interrupt(progress):

        def validated(position: dict[str, Any]) -> dict[str, Any]:
            record = {
                **_training_record(position),
                "gradient_norm": float(ops.convert_to_numpy(gradient_norm)),
                "learning_rate": float(schedule(_micro(position["step"], config))),
                **_validate(data, translator, config, own),
            }
            own.first(functools.partial(write, record))
            console.print(_line(record))
            return _judge(position, record, config)

        if _validation_is_due(position, config):  # an interrupt came between it and its update
            position = validated(position)
        while not _is_over(position, config):
            data.check_unchanged()
            plan = _plan(data, config, position["epoch"])
            updates = _updates_ahead(position, plan, config)
            segment = range(position["batch"], position["batch"] + updates)
            means, seconds = _fit(model, data, plan, segment, config, progress, own)
            _check_finite(means, position["step"], progress.step, output)
            done = range(segment.start, segment.start + progress.step - position["step"])
            position = _advance(position, plan, done, seconds, means, parts)

            stopped, time_is_up = own.any(progress.stop_requested, progress.checkpoint_is_due())
            validates = _validation_is_due(position, config) and not stopped
            if validates:
                position = validated(position)
            if (
                stopped
                or time_is_up
                or _is_over(position, config)
                or _due(position["step"], config.checkpoint_every)
                or (validates and config.best_kept)
            ):
                own.first(functools.partial(_save, output, model, position, config))
                progress.checkpoint_was_saved()
            if stopped:
                console.print(f"stopped at step {position['step']:,}; go on with --resume")
                raise KeyboardInterrupt

    names = own.first(lambda: _chosen(output / "checkpoints", config, average))
    if names:
        chosen = [output / "checkpoints" / name for name in names]
        checkpoint.average(chosen, model)
        scores = _validate(data, translator, config, own)
        names = ", ".join(path.stem for path in chosen)
        how = "average of" if len(chosen) > 1 else "the best checkpoint,"
        console.print(f"{how} {names}: {_line_of_scores(scores)}")
    own.first(lambda: translator.save(output / "model.keras"))
    console.print(f"trained: {output / 'model.keras'}")
    return translator


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


def _begin(
    output: Path, data: Prepared, configs: Configs, own: Devices, average: int, resume: bool
) -> None:
    """Refuses what cannot be, and opens the folder of the run."""
    _check(data, configs, average)
    own.check(*configs)
    _open_folder(output, data, configs, resume)


def _check(data: Prepared, configs: Configs, average: int) -> None:
    model_config, config = configs
    sizes = (data.source_tokenizer.vocabulary_size, data.target_tokenizer.vocabulary_size)
    model_sizes = (
        model_config.vocabulary_size,
        model_config.target_vocabulary_size or model_config.vocabulary_size,
    )
    if sizes != model_sizes:
        raise ValueError(
            f"the corpus has vocabularies of {sizes} tokens (source, target), the model "
            f"{model_sizes}: leave vocabulary_size to the corpus"
        )
    weights, corpora = config.corpus_weights, len(data.corpus_sizes)
    if weights and len(weights) != corpora:
        raise ValueError(
            f"`corpus_weights` must have one for each pair of training files that was prepared, "
            f"{corpora}. Received: {len(weights)}"
        )
    kept = min(config.keep_last, config.steps // config.checkpoint_every)
    if average > max(1, kept):
        raise ValueError(
            f"an average of {average} checkpoints needs as many to be kept. Received: "
            f"keep_last={config.keep_last}, steps={config.steps}, "
            f"checkpoint_every={config.checkpoint_every}, which keep {kept}"
        )
    if data.valid is None and config.best_kept:
        raise ValueError(
            "`patience` and `keep_best` compare validations, and the corpus was prepared without "
            f"any. Received: patience={config.patience}, keep_best={config.keep_best}"
        )


def _open_folder(output: Path, data: Prepared, configs: Configs, resume: bool) -> None:
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


def _warn(console: Console, config: TrainingConfig) -> None:
    if config.steps <= config.warmup_steps:
        console.print(
            f"warning: the run ends after {config.steps:,} steps, inside its warm-up of "
            f"{config.warmup_steps:,}: the learning rate only rises (--set warmup_steps=N)"
        )


def _compile(
    model: Transformer, model_config: TransformerConfig, config: TrainingConfig
) -> tuple[NoamSchedule, keras.Variable]:
    """The optimizer and the loss: the schedule, and the norm of the last gradient."""
    schedule = NoamSchedule(
        model_config.hidden_dim,
        config.warmup_steps,
        config.learning_rate_scale,
        config.accumulation,
    )
    optimizer, gradient_norm = adam(schedule, config)
    model.compile(optimizer=optimizer, loss=LabelSmoothedCrossentropy(config.label_smoothing))
    # Unbuilt, it would make its variables inside TensorFlow's graph, which is then traced twice.
    model.optimizer.build(model.trainable_variables)
    return schedule, gradient_norm


def _micro(step: int, config: TrainingConfig) -> int:
    """The micro-step by which the optimizer asks for the rate of update `step`, from 1."""
    return max(0, step - 1) * config.accumulation


def _warm_start(model: Transformer, path: Path, data: Prepared) -> None:
    """Takes the weights of a translator with the same tokenizers and sizes."""
    other = load(path)
    ours = [data.source_tokenizer.fingerprint, data.target_tokenizer.fingerprint]
    theirs = [other.source_tokenizer.fingerprint, other.target_tokenizer.fingerprint]
    if ours != theirs:
        raise ValueError(
            f"{path} has another vocabulary than the corpus: "
            f"prepare the corpus with --tokenizer-from {path}"
        )
    shapes = [[tuple(weight.shape) for weight in one.weights] for one in (model, other.model)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{path} is a model of other sizes than this run's: change the --config")
    model.set_weights(other.model.get_weights())


def _resume(
    output: Path, model: Transformer, own: Devices, console: Console
) -> dict[str, Any] | None:
    """Loads the last whole checkpoint, if there is one."""
    name = own.first(lambda: _last_whole(output / "checkpoints", console))
    return checkpoint.load(output / "checkpoints" / name, model) if name else None


def _last_whole(folder: Path, console: Console) -> str | None:
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


def _save(
    output: Path, model: Transformer, position: dict[str, Any], config: TrainingConfig
) -> None:
    """Writes a checkpoint, and removes those that are no longer kept."""
    checkpoint.save(output / "checkpoints", model, position)
    checkpoint.prune(output / "checkpoints", config.keep_last, config.best_kept)


def _truncate_log(path: Path, step: int) -> None:
    """Drops what was logged after the checkpoint: it will be logged again, the same."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    with corpus.whole_file(path, "w") as stream:
        for line in lines:
            if json.loads(line)["step"] <= step:
                stream.write(line + "\n")


def _plan(data: Prepared, config: TrainingConfig, epoch: int) -> batching.BatchPlan:
    return batching.plan(
        data.train.source_lengths(),
        data.train.target_lengths(),
        tokens_per_batch=config.tokens_per_batch,
        seed=config.seed,
        epoch=epoch,
        max_shapes=config.max_shapes,
        corpora=_weighted(data, config),
    )


def _weighted(data: Prepared, config: TrainingConfig) -> list[tuple[int, float]]:
    """(pairs, weight) of each corpus; none where they have no weights."""
    weights = config.corpus_weights
    return list(zip(data.corpus_sizes, weights, strict=True)) if weights else []


def _updates_ahead(
    position: dict[str, Any], plan: batching.BatchPlan, config: TrainingConfig
) -> int:
    """Updates until the epoch ends, something is due, or the run is over."""
    step = position["step"]
    every = [n for n in (config.evaluate_every, config.checkpoint_every) if n]
    return min(len(plan) - position["batch"], config.steps - step, *(n - step % n for n in every))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _is_over(position: dict[str, Any], config: TrainingConfig) -> bool:
    patient = not config.patience or position["validations_since_best"] < config.patience
    return position["step"] >= config.steps or not patient


def _validation_is_due(position: dict[str, Any], config: TrainingConfig) -> bool:
    """Whether the log is to say something of what was learned since it last did."""
    step = position["step"]
    return bool(position["sums"]) and (_due(step, config.evaluate_every) or step == config.steps)


def _fit(
    model: Transformer,
    data: Prepared,
    plan: batching.BatchPlan,
    segment: range,
    config: TrainingConfig,
    progress: StepProgress,
    own: Devices,
) -> tuple[dict[str, float], float]:
    """Trains on some batches of an epoch: the means of the metrics, and the seconds it took."""
    progress.begin_segment([plan.target_tokens(batch) for batch in segment])
    began = time.perf_counter()
    dataset = batching.dataset(
        data.train,
        plan,
        start=segment.start,
        stop=segment.stop,
        accumulation=config.accumulation,
        replicas=own.replicas,
        parts=own.parts,
    )
    dataset, steps = own.feed(dataset)
    model.fit(dataset, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[progress])
    return own.metrics(model), time.perf_counter() - began


def _check_finite(means: dict[str, float], before: int, now: int, output: Path) -> None:
    """Ends a run whose loss is no number, before anything of it is saved."""
    loss = means["token_loss"]
    if math.isfinite(loss):
        return
    first = before + 1
    when = f"at step {now:,}" if now == first else f"between steps {first:,} and {now:,}"
    kept = checkpoint.find(output / "checkpoints")
    last = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
    raise ValueError(
        f"the loss became {loss} {when}; {last}. Start anew "
        "with a lower learning_rate_scale, a longer warmup_steps or global_clipnorm=1"
    )


def _advance(
    position: dict[str, Any],
    plan: batching.BatchPlan,
    batches: range,
    seconds: float,
    means: dict[str, float],
    parts: int,
) -> dict[str, Any]:
    """The position after a segment, with what the log will say of it added up."""
    source_tokens, target_tokens = (
        sum(count(batch) for batch in batches) for count in (plan.source_tokens, plan.target_tokens)
    )
    added = {name: means[name] * target_tokens for name in TOKEN_MEANS}
    added |= {"source": source_tokens, "target": target_tokens, "seconds": seconds}
    epochs, batch = divmod(batches.stop, len(plan))
    return {
        **position,
        "step": position["step"] + len(batches),
        "epoch": position["epoch"] + epochs,
        "batch": batch,
        "seconds": position["seconds"] + seconds,
        "sums": {name: position["sums"].get(name, 0) + value for name, value in added.items()},
        "real_share": plan.real_share(parts),
        "shapes": len(plan.shapes),
        "score": None,  # no validation was made of these weights
    }


def _judge(
    position: dict[str, Any], record: dict[str, Any], config: TrainingConfig
) -> dict[str, Any]:
    """The position after a validation: the best of each measure, and how long ago that was."""
    measures = {"bleu": 1, "valid_perplexity": -1}
    scores = {name: sign * record[name] for name, sign in measures.items() if name in record}
    best = {name: max(score, position["best"].get(name, score)) for name, score in scores.items()}
    decisive = "bleu" if config.best_by == "bleu" else "valid_perplexity"
    score, before = scores.get(decisive), position["best"].get(decisive)
    better = score is not None and (before is None or score > before)
    return {
        **position,
        "sums": {},
        "score": score,
        "best": best,
        "validations_since_best": 0 if better else position["validations_since_best"] + 1,
    }


def _training_record(position: dict[str, Any]) -> dict[str, float]:
    """What the log says of the training since the last validation."""
    sums = position["sums"]
    means = {name: sums[name] / sums["target"] for name in TOKEN_MEANS}
    names = ("step", "epoch", "batch", "seconds", "real_share", "shapes")
    return {
        **{name: position[name] for name in names},
        **means,
        "perplexity": math.exp(means["nll"]),
        "source_tokens_per_second": sums["source"] / sums["seconds"],
        "target_tokens_per_second": sums["target"] / sums["seconds"],
        **_peak_memory(),
    }


def _peak_memory() -> dict[str, float]:
    """The most memory that the process has held, where the system tells."""
    try:
        import resource
    except ImportError:  # Windows
        return {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_memory_mb": peak / (2**20 if sys.platform == "darwin" else 2**10)}


def _chosen(folder: Path, config: TrainingConfig, average: int) -> list[str]:
    """The checkpoints that the result is made of; none where it is what training left."""
    if average > 1:
        chosen = checkpoint.find(folder)[-average:]
    else:
        chosen = checkpoint.best(folder, 1) if config.patience else []
    return [path.name for path in chosen]


def _validate(
    data: Prepared, translator: Translator, config: TrainingConfig, own: Devices
) -> dict[str, Any]:
    """Perplexity without smoothing over all validation pairs, BLEU of real beam output."""
    if data.valid is None:
        return {}
    lengths = data.valid.source_lengths(), data.valid.target_lengths()
    tokens = config.tokens_per_batch // config.accumulation
    plan = batching.plan(
        *lengths,
        tokens_per_batch=max(tokens, *(int(side.max()) for side in lengths)),
        seed=0,
        epoch=0,
        max_shapes=config.max_shapes,
    )
    dataset, steps = own.feed(
        batching.dataset(data.valid, plan, replicas=own.replicas, parts=own.parts)
    )
    translator.model.evaluate(dataset, steps=steps, verbose=0)
    means = own.metrics(translator.model)
    words = sum(len(text.split()) for text in data.valid.target_texts())
    return {
        "valid_nll": means["nll"],
        "valid_perplexity": means["perplexity"],
        # Words do not depend on the vocabulary, so models with others can be compared.
        "valid_word_perplexity": math.exp(means["nll"] * int(lengths[1].sum()) / words),
        "valid_token_accuracy": means["token_accuracy"],
        **own.first(lambda: _judge_translations(data.valid, translator, config)),
    }


def _judge_translations(valid: Any, translator: Translator, config: TrainingConfig) -> dict:
    """BLEU and what else the translations of the first validation lines tell."""
    lines = slice(config.evaluate_lines or None)
    references = valid.target_texts()[lines]
    translations = translator.translate(valid.source_texts()[lines])
    judged = corpus_scores(translations, references)
    return {
        "bleu": judged.bleu,
        "bleu_signature": judged.bleu_signature,
        "length_ratio": judged.length_ratio,
        "collapsed": len(set(translations)) == 1 < len(set(references)),
    }


def _headline(
    data: Prepared, model: Transformer, configs: Configs, epoch: int, own: Devices
) -> str:
    config = configs[1]
    plan = _plan(data, config, epoch)
    shapes = ", ".join(f"{rows}x{source}+{target}" for rows, source, target in plan.shapes)
    corpora = ", ".join(f"{pairs:,} x {weight:g}" for pairs, weight in _weighted(data, config))
    weighted = f" ({corpora} an epoch)" if corpora else ""
    devices = f", {own.replicas} devices" if own.replicas > 1 else ""
    processes = f" in {own.processes} processes" if own.processes > 1 else ""
    parts = config.accumulation * own.replicas
    return (
        f"{len(data.train):,} pairs{weighted}, vocabulary {model.vocabulary_size:,}, "
        f"{model.count_params():,} parameters, {config.steps:,} steps of "
        f"{config.tokens_per_batch:,} tokens, {len(plan):,} batches an epoch on "
        f"{keras.backend.backend()}{devices}{processes}\n"
        f"{len(plan.shapes)} shapes (rows x source + target): {shapes}; "
        f"{100 * plan.real_share(parts):.1f} % real tokens"
    )


def _line(record: dict[str, Any]) -> str:
    text = (
        f"step {record['step']:,}  epoch {record['epoch']}  loss {record['token_loss']:.3f}  "
        f"perplexity {record['perplexity']:.2f}  accuracy {100 * record['token_accuracy']:.1f} %  "
        f"rate {record['learning_rate']:.2e}  "
        f"{record['target_tokens_per_second']:,.0f} target tokens/s"
    )
    line = f"{text}  {_line_of_scores(record)}  {record['seconds'] / 60:.1f} min"
    return f"{line}\n{COLLAPSED}" if record.get("collapsed") else line


def _line_of_scores(scores: dict[str, Any]) -> str:
    if "bleu" not in scores:
        return "no validation text"
    return f"validation perplexity {scores['valid_perplexity']:.2f}  BLEU {scores['bleu']:.2f}"


@contextlib.contextmanager
def _writer(output: Path, own: Devices) -> Iterator[Any]:
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


@contextlib.contextmanager
def _stopping_on_interrupt(progress: StepProgress) -> Iterator[None]:
    """Ctrl-C ends the segment after the current update; a second one ends at once."""
    first = math.inf

    def on_interrupt(number: int, frame: Any) -> None:
        nonlocal first
        # One Ctrl-C may come twice: from the terminal, and from what started this process.
        if progress.stop_requested and time.monotonic() - first > ONE_INTERRUPT_SECONDS:
            raise KeyboardInterrupt
        first = min(first, time.monotonic())
        progress.stop_requested = True

    try:
        before = signal.signal(signal.SIGINT, on_interrupt)
    except ValueError:  # not in the main thread: whoever runs it there stops it
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
