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
import importlib.metadata
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
from rich.console import Console

from keras_aiayn.config import TrainingConfig, TransformerConfig, preset, with_settings
from keras_aiayn.data import batching, corpus
from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.data.prepared import Prepared
from keras_aiayn.evaluation import corpus_scores
from keras_aiayn.training import checkpoint
from keras_aiayn.training.loss import LabelSmoothedCrossentropy
from keras_aiayn.training.memory import keep_freed_memory
from keras_aiayn.training.progress import StepProgress
from keras_aiayn.training.schedule import NoamSchedule
from keras_aiayn.transformer import Transformer
from keras_aiayn.translator import Translator

Configs = tuple[TransformerConfig, TrainingConfig]


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
        console: where to report; standard error by default.

    Returns:
        The translator, which also stands in `output / "model.keras"`.

    Raises:
        ValueError: where the run cannot be as asked; nothing is written then.
    """
    model_config, config = configs
    console = console or Console(stderr=True)
    _check(data, configs, average)
    _open_folder(output, data, configs, resume)
    _warn(console, config)

    keep_freed_memory()
    keras.utils.set_random_seed(config.seed)
    model = model_config.build(seed=config.seed)
    schedule = _compile(model, model_config, config)
    if init is not None:
        _warm_start(model, init, data)
    translator = Translator(model, data.source_tokenizer, data.target_tokenizer)
    position: dict[str, Any] = {
        "step": 0,
        "epoch": 0,
        "batch": 0,
        "seconds": 0.0,
        "best_bleu": -1.0,
    }
    if resume:
        position = _resume(output, model, console) or position
    _truncate_log(output / "log.jsonl", position["step"])
    console.print(_headline(data, model, configs, position["epoch"]))

    progress = StepProgress(
        console,
        config.steps,
        position["step"],
        lambda s: float(schedule(_micro(s, config))),
        config.accumulation,
    )
    with _writer(output) as write, progress, _stopping_on_interrupt(progress):
        while position["step"] < config.steps:
            plan = _plan(data, config, position["epoch"])
            updates = _updates_ahead(position, plan, config)
            segment = range(position["batch"], position["batch"] + updates)
            progress.begin_segment([plan.target_tokens(batch) for batch in segment])
            began = time.perf_counter()
            history = model.fit(
                batching.dataset(
                    data.train,
                    plan,
                    start=segment.start,
                    stop=segment.stop,
                    accumulation=config.accumulation,
                ),
                shuffle=False,
                verbose=0,
                callbacks=[progress],
            )
            seconds = time.perf_counter() - began
            done = range(segment.start, segment.start + progress.step - position["step"])
            position = _advance(position, plan, len(done), seconds)

            finished = position["step"] == config.steps
            stopped = progress.stop_requested
            if _due(position["step"], config.evaluate_every) and not stopped or finished:
                record = {
                    **position,
                    **_training_record(history.history, plan, done, seconds),
                    "learning_rate": float(schedule(_micro(position["step"], config))),
                    **_validate(data, translator, config),
                }
                position["best_bleu"] = max(position["best_bleu"], record.get("bleu", -1.0))
                write(record)
                console.print(_line(record))
            if _due(position["step"], config.checkpoint_every) or finished or stopped:
                checkpoint.save(output / "checkpoints", model, position)
                checkpoint.prune(output / "checkpoints", config.keep_last)
            if stopped:
                console.print(f"stopped at step {position['step']:,}; go on with --resume")
                raise KeyboardInterrupt

    if average > 1:
        paths = checkpoint.find(output / "checkpoints")[-average:]
        checkpoint.average(paths, model)
        scores = _validate(data, translator, config)
        console.print(
            f"average of {', '.join(path.stem for path in paths)}: {_line_of_scores(scores)}"
        )
    translator.save(output / "model.keras")
    return translator


def average_run(folder: Path, last: int, output: Path) -> list[Path]:
    """Averages the last checkpoints of a run that ended, or still goes on, into a translator.

    Args:
        folder: of the run.
        last: how many checkpoints.
        output: the `.keras` file to write.

    Returns:
        The checkpoints that went in.
    """
    started = _started_with(folder)
    paths = checkpoint.find(folder / "checkpoints")[-last:] if last > 0 else []
    if len(paths) != last or not paths:
        kept = len(checkpoint.find(folder / "checkpoints"))
        raise ValueError(f"{folder} keeps {kept} checkpoints. Received: an average of {last}")
    model = TransformerConfig(**started["model"]).build()
    checkpoint.average(paths, model)
    source, target = tokenizers.load(folder)
    Translator(model, source, target).save(output)
    return paths


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
    kept = min(config.keep_last, config.steps // config.checkpoint_every)
    if average > max(1, kept):
        raise ValueError(
            f"an average of {average} checkpoints needs as many to be kept. Received: "
            f"keep_last={config.keep_last}, steps={config.steps}, "
            f"checkpoint_every={config.checkpoint_every}, which keep {kept}"
        )


def _open_folder(output: Path, data: Prepared, configs: Configs, resume: bool) -> None:
    """Makes the folder of a new run, or compares a resumed one with how it was started."""
    now = {
        "package": importlib.metadata.version("keras-aiayn"),
        "corpus": data.fingerprint,
        "model": dataclasses.asdict(configs[0]),
        "training": dataclasses.asdict(configs[1]),
    }
    path = output / "config.json"
    if not resume:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise FileExistsError(f"{output} is not empty: name another output, or pass --resume")
        output.mkdir(parents=True, exist_ok=True)
        tokenizers.save(data.source_tokenizer, data.target_tokenizer, output)
        with corpus.whole_file(path, "w") as stream:
            stream.write(json.dumps(now, indent=2) + "\n")
        return
    differences = _differences(_started_with(output), now)
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
    """What differs, as `name: then, now`. The package's version may, and so may the steps."""
    if isinstance(now, dict) and isinstance(then, dict):
        return [
            difference
            for key in now.keys() | then.keys()
            if key not in ("package", "steps", "keep_last")
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
) -> NoamSchedule:
    """Section 5.3: Adam under the paper's schedule."""
    schedule = NoamSchedule(
        model_config.hidden_dim,
        config.warmup_steps,
        config.learning_rate_scale,
        config.accumulation,
    )
    optimizer = keras.optimizers.Adam(
        schedule,
        beta_1=config.beta_1,
        beta_2=config.beta_2,
        epsilon=config.epsilon,
        gradient_accumulation_steps=config.accumulation if config.accumulation > 1 else None,
    )
    model.compile(optimizer=optimizer, loss=LabelSmoothedCrossentropy(config.label_smoothing))
    # Unbuilt, it would make its variables inside TensorFlow's graph, which is then traced twice.
    optimizer.build(model.trainable_variables)
    return schedule


def _micro(step: int, config: TrainingConfig) -> int:
    """The micro-step by which the optimizer asks for the rate of update `step`, from 1."""
    return max(0, step - 1) * config.accumulation


def _warm_start(model: Transformer, path: Path, data: Prepared) -> None:
    """Takes the weights of a translator with the same tokenizers and sizes."""
    other = keras.saving.load_model(path)
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


def _resume(output: Path, model: Transformer, console: Console) -> dict[str, Any] | None:
    """Loads the last whole checkpoint, if there is one, and says what was passed over."""
    for path in reversed(checkpoint.find(output / "checkpoints")):
        if checkpoint.whole(path):
            console.print(f"resuming from {path}")
            return checkpoint.load(path, model)
        console.print(f"warning: {path} is damaged and passed over")
    console.print("there is no whole checkpoint yet: starting at step 0")
    return None


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
        multiple=config.accumulation,
    )


def _updates_ahead(
    position: dict[str, Any], plan: batching.BatchPlan, config: TrainingConfig
) -> int:
    """Updates until the epoch ends, something is due, or the run is over."""
    step = position["step"]
    every = [n for n in (config.evaluate_every, config.checkpoint_every) if n]
    return min(len(plan) - position["batch"], config.steps - step, *(n - step % n for n in every))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _advance(
    position: dict[str, Any], plan: batching.BatchPlan, updates: int, seconds: float
) -> dict[str, Any]:
    batch = position["batch"] + updates
    epochs, batch = divmod(batch, len(plan))
    return {
        **position,
        "step": position["step"] + updates,
        "epoch": position["epoch"] + epochs,
        "batch": batch,
        "seconds": position["seconds"] + seconds,
    }


def _training_record(
    history: dict[str, list[float]], plan: batching.BatchPlan, batches: range, seconds: float
) -> dict[str, float]:
    """What the segment that just ended says of training."""
    names = ("token_loss", "nll", "perplexity", "token_accuracy")
    source_tokens, target_tokens = (
        sum(count(batch) for batch in batches) for count in (plan.source_tokens, plan.target_tokens)
    )
    return {
        **{name: history[name][-1] for name in names},
        "source_tokens_per_second": source_tokens / seconds,
        "target_tokens_per_second": target_tokens / seconds,
        "real_share": plan.real_share,
    }


def _validate(data: Prepared, translator: Translator, config: TrainingConfig) -> dict[str, float]:
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
    scores = translator.model.evaluate(
        batching.dataset(data.valid, plan), verbose=0, return_dict=True
    )
    lines = slice(config.evaluate_lines or None)
    sources, references = data.valid.source_texts()[lines], data.valid.target_texts()[lines]
    translations = translator.translate(sources)
    judged = corpus_scores(translations, references)
    return {
        "valid_nll": scores["nll"],
        "valid_perplexity": scores["perplexity"],
        "valid_token_accuracy": scores["token_accuracy"],
        "bleu": judged.bleu,
        "bleu_signature": judged.bleu_signature,
        "length_ratio": judged.length_ratio,
    }


def _headline(data: Prepared, model: Transformer, configs: Configs, epoch: int) -> str:
    config = configs[1]
    plan = _plan(data, config, epoch)
    shapes = ", ".join(f"{rows}x{source}+{target}" for rows, source, target in plan.shapes)
    return (
        f"{len(data.train):,} pairs, vocabulary {model.vocabulary_size:,}, "
        f"{model.count_params():,} parameters, {config.steps:,} steps of "
        f"{config.tokens_per_batch:,} tokens, {len(plan):,} batches an epoch on "
        f"{keras.backend.backend()}\n"
        f"{len(plan.shapes)} shapes (rows x source + target): {shapes}; "
        f"{100 * plan.real_share:.1f} % real tokens"
    )


def _line(record: dict[str, Any]) -> str:
    text = (
        f"step {record['step']:,}  epoch {record['epoch']}  loss {record['token_loss']:.3f}  "
        f"perplexity {record['perplexity']:.2f}  accuracy {100 * record['token_accuracy']:.1f} %  "
        f"rate {record['learning_rate']:.2e}  "
        f"{record['target_tokens_per_second']:,.0f} target tokens/s"
    )
    return f"{text}  {_line_of_scores(record)}  {record['seconds'] / 60:.1f} min"


def _line_of_scores(scores: dict[str, Any]) -> str:
    if "bleu" not in scores:
        return "no validation text"
    return f"validation perplexity {scores['valid_perplexity']:.2f}  BLEU {scores['bleu']:.2f}"


@contextlib.contextmanager
def _writer(output: Path) -> Iterator[Any]:
    """A function that appends a record to the log and to TensorBoard's files."""
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

    def on_interrupt(number: int, frame: Any) -> None:
        if progress.stop_requested:
            raise KeyboardInterrupt
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
