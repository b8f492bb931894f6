"""The run, from a prepared corpus to `RUN/model.keras`, top to bottom."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
from keras import ops
from rich.console import Console

from keras_aiayn.config import TrainingConfig, TransformerConfig, preset, with_settings
from keras_aiayn.data import batching
from keras_aiayn.data.prepared import Prepared
from keras_aiayn.data.tokenizer import one_vocabulary
from keras_aiayn.loading import load
from keras_aiayn.training import checkpoint, distribution, folder, report, validation
from keras_aiayn.training.distribution import Devices
from keras_aiayn.training.folder import Configs
from keras_aiayn.training.interrupts import interrupts_to
from keras_aiayn.training.loss import LabelSmoothedCrossentropy
from keras_aiayn.training.optimizer import adam
from keras_aiayn.training.progress import StepProgress
from keras_aiayn.training.remat import recompute_blocks
from keras_aiayn.training.schedule import NoamSchedule
from keras_aiayn.transformer import Transformer
from keras_aiayn.translator import Translator

# One Ctrl-C may come twice: from the terminal, and from what started this process.
ONE_INTERRUPT_SECONDS = 2.0


def configure(data: Prepared, name: str, settings: list[str]) -> Configs:
    """The configurations of a name, `name=value` settings applied, for a corpus's vocabulary.

    Args:
        data: the corpus.
        name: `"tiny"`, `"small"`, `"base"`, `"big"` or another row of Table 3; or a `.keras`
            file, for a model of its sizes.
        settings: such as `"dropout=0.2"` or `"steps=5000"`.
    """
    source_size = data.source_tokenizer.vocabulary_size
    if name.endswith(".keras"):
        configs = TransformerConfig.of(load(Path(name)).model), TrainingConfig()
        return with_settings(configs, settings)
    model, training = preset(name, source_size)
    if not one_vocabulary(data.source_tokenizer, data.target_tokenizer):
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
    devices: Devices | None = None,
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
        devices: what `distribution.start` took, before anything else was done; all by default.
        console: where the first process reports; standard error by default.

    Returns:
        The translator, which also stands in `output / "model.keras"`.

    Raises:
        ValueError: where the run cannot be as asked; nothing is written then.
    """
    model_config, config = configs
    own = devices or distribution.start()
    console = console or Console(stderr=True)
    console.quiet = console.quiet or not own.is_first
    own.first(lambda: _check(output, data, configs, own, average, resume))
    report.warn(console, config)

    keras.utils.set_random_seed(config.seed)
    with own.scope():
        model, schedule, gradient_norm = _make(model_config, config)
    _check_trainable(model)
    if init is not None:
        _warm_start(model, init, data)
    translator = Translator(model, data.source_tokenizer, data.target_tokenizer)
    position = (_resume(output, model, own, console) if resume else None) or _beginning()
    own.share(model)
    plan = _plan(data, config, position["epoch"])
    if not resume:  # all that can be refused has been
        own.first(lambda: folder.create(output, data, configs))
    if init is not None and position == _beginning():
        # A run that is killed before its first update must not go on from random weights.
        own.first(lambda: folder.save(output, model, position | {"passing": True}, config))
    console.print(report.headline(data, model, config, plan, _weighted(data, config), own))

    progress = StepProgress(
        console,
        config.steps,
        position["step"],
        lambda s: float(schedule(_micro(s, config))),
        config.accumulation,
        checkpoint_seconds=60 * config.checkpoint_minutes,
        agree=own.any if own.processes > 1 else None,
    )
    with report.writer(output, own) as write, progress, _stopping_on_interrupt(progress):

        def validated(position: dict[str, Any]) -> dict[str, Any]:
            skipped = _skipped(model, position)
            record = {
                **report.training_record(position),
                "gradient_norm": float(ops.convert_to_numpy(gradient_norm)),
                "learning_rate": float(schedule(_micro(position["step"] - skipped, config))),
                **({"skipped_updates": skipped} if skipped else {}),
                **validation.validate(data, translator, config, own),
            }
            own.first(functools.partial(write, record))
            console.print(report.line(record))
            return _judge(position, record, config)

        def saved(position: dict[str, Any]) -> None:
            own.first(functools.partial(folder.save, output, model, position, config))
            progress.checkpoint_was_saved()

        if _validation_is_due(position, config):  # an interrupt came between it and its update
            position = validated(position)
            saved(position)
        while not _is_over(position, config):
            if plan.epoch != position["epoch"]:
                plan = _plan(data, config, position["epoch"])
            updates = _updates_ahead(position, plan, config)
            segment = range(position["batch"], position["batch"] + updates)
            means, seconds = _fit(model, data, plan, segment, config, progress, own)
            data.check_unchanged()
            _check_finite(means, position["step"], progress.step, output)
            done = range(segment.start, segment.start + progress.step - position["step"])
            real_share = plan.real_share(config.accumulation * own.replicas)
            position = _advance(position, plan, done, seconds, means, real_share)

            stopped, time_is_up = own.any(progress.stop_requested, progress.checkpoint_is_due())
            validates = _validation_is_due(position, config) and not stopped
            if validates:
                position = validated(position)
            regular = (
                time_is_up
                or _is_over(position, config)
                or _due(position["step"], config.checkpoint_every)
            )
            if regular or stopped or (validates and config.best_kept):
                # What an interrupt alone makes must not count among the last ones for good.
                saved(position | {"passing": stopped and not regular})
            if stopped:
                console.print(f"stopped at step {position['step']:,}; go on with --resume")
                raise KeyboardInterrupt

    names = own.first(lambda: folder.chosen(output / "checkpoints", config, average))
    if len(names) < average > 1:
        console.print(f"warning: the run has {len(names)} checkpoints, and not {average}")
    if names:
        checkpoint.average([output / "checkpoints" / name for name in names], model)
        scores = validation.validate(data, translator, config, own)
        how = "average of" if len(names) > 1 else "the best checkpoint,"
        stems = ", ".join(Path(name).stem for name in names)
        console.print(f"{how} {stems}: {report.line_of_scores(scores)}")
    own.first(lambda: translator.save(output / "model.keras"))
    console.print(f"trained: {output / 'model.keras'}")
    if any(own.any(progress.stop_requested)):  # in the last validation: nothing is to follow
        raise KeyboardInterrupt
    return translator


def _beginning() -> dict[str, Any]:
    """The position of a run that has not begun."""
    return {
        "step": 0,
        "epoch": 0,
        "batch": 0,
        "seconds": 0.0,
        "passing": False,  # whether its checkpoint goes when the next is saved
        "sums": {},  # since the last validation
        "best": {},  # of each measure, over all validations
        "validations_since_best": 0,
    }


def _make(
    model_config: TransformerConfig, config: TrainingConfig
) -> tuple[Transformer, NoamSchedule, keras.Variable]:
    """The model, compiled; the schedule, and the norm of the last gradient."""
    model = model_config.build(seed=config.seed)
    if config.remat:
        recompute_blocks(model)
    return model, *_compile(model, model_config, config)


def _check_trainable(model: Transformer) -> None:
    """Refuses weights that are integers."""
    if model.quantized_to is not None:
        raise ValueError(
            f"a model of {model.quantized_to} cannot be trained: take the one that it was "
            "quantised from, or dtype=float32"
        )


def _check(
    output: Path, data: Prepared, configs: Configs, own: Devices, average: int, resume: bool
) -> None:
    """Refuses what cannot be."""
    report.check_installed()
    if data.valid is not None:
        validation.check_installed()
    _check_corpus(data, configs)
    _check_average(configs[1], average)
    own.check(*configs)
    folder.check(output, data, configs, resume)
    if resume:
        data.check_contents()


def _check_corpus(data: Prepared, configs: Configs) -> None:
    """Refuses what the corpus does not allow."""
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
    if model_config.max_length is not None and data.longest() > model_config.max_length:
        raise ValueError(
            f"the corpus has a text of {data.longest()} tokens, and `max_length` of the model is "
            f"{model_config.max_length}: prepare with --max-length, or learn more positions"
        )
    if model_config.dtype == "mixed_float16" and config.accumulation > 1:
        raise ValueError(
            "float16 leaves out a part whose gradient is not finite, and an update of "
            "accumulated parts would be torn: use dtype=mixed_bfloat16, or accumulation=1"
        )
    if data.valid is None and config.best_kept:
        raise ValueError(
            "`patience` and `keep_best` compare validations, and the corpus was prepared without "
            f"any. Received: patience={config.patience}, keep_best={config.keep_best}"
        )


def _check_average(config: TrainingConfig, average: int) -> None:
    """Refuses an average of more checkpoints than will be there."""
    every = config.checkpoint_every
    kept = config.keep_last
    if not config.checkpoint_minutes:  # by time, how many there will be is not known
        kept = min(kept, -(-config.steps // every))
    if not 1 <= average <= kept:
        raise ValueError(
            f"an average is of 1 to {kept} checkpoints here. Received: average={average}, "
            f"keep_last={config.keep_last}, steps={config.steps}, checkpoint_every={every}"
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
    if model_config.dtype == "mixed_float16":
        # Keras does so by the policy of the model itself, which is that of its layers only here.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer=optimizer, loss=LabelSmoothedCrossentropy(config.label_smoothing))
    # Unbuilt, it would make its variables inside TensorFlow's graph, which is then traced twice.
    model.optimizer.build(model.trainable_variables)
    return schedule, gradient_norm


def _micro(step: int, config: TrainingConfig) -> int:
    """The micro-step by which the optimizer asks for the rate of update `step`, from 1."""
    return max(0, step - 1) * config.accumulation


def _skipped(model: Transformer, position: dict[str, Any]) -> int:
    """Updates that float16 left out because a gradient was not finite."""
    return position["step"] - int(ops.convert_to_numpy(model.optimizer.iterations))


def _warm_start(model: Transformer, path: Path, data: Prepared) -> None:
    """Takes the weights of a translator with the same tokenizers and sizes."""
    other = load(path)
    _check_trainable(other.model)
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
    """Loads the last whole checkpoint, if there is one, and cuts what was logged after it."""
    name = own.first(lambda: folder.last_whole(output / "checkpoints", console))
    position = checkpoint.load(output / "checkpoints" / name, model) if name else None
    # What is still summed up has not been logged: a line of that step is of an undone validation.
    step = 0 if position is None else position["step"] - bool(position["sums"])
    own.first(lambda: folder.truncate_log(output / "log.jsonl", step, console))
    return None if position is None else _beginning() | position


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
    real_share: float,
) -> dict[str, Any]:
    """The position after a segment, with what the log will say of it added up."""
    source_tokens, target_tokens = (
        sum(count(batch) for batch in batches) for count in (plan.source_tokens, plan.target_tokens)
    )
    added = {name: means[name] * target_tokens for name in report.TOKEN_MEANS}
    added |= {"source": source_tokens, "target": target_tokens, "seconds": seconds}
    epochs, batch = divmod(batches.stop, len(plan))
    return {
        **position,
        "step": position["step"] + len(batches),
        "epoch": position["epoch"] + epochs,
        "batch": batch,
        "seconds": position["seconds"] + seconds,
        "sums": {name: position["sums"].get(name, 0) + value for name, value in added.items()},
        "real_share": real_share,
        "shapes": len(plan.shapes),
        "passing": False,
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


@contextlib.contextmanager
def _stopping_on_interrupt(progress: StepProgress) -> Iterator[None]:
    """Ctrl-C ends the segment after the current update; a second one ends at once."""
    first = math.inf

    def on_interrupt(number: int, frame: Any) -> None:
        nonlocal first
        if progress.stop_requested and time.monotonic() - first > ONE_INTERRUPT_SECONDS:
            raise KeyboardInterrupt
        first = min(first, time.monotonic())
        progress.stop_requested = True

    with interrupts_to(on_interrupt):
        yield
