"""The command `keras-aiayn VERB`: options in, one call of the package, errors as one line.

Nothing here computes. Modules are imported by the verb that needs them, so that `--help` and
usage errors answer at once.
"""

import contextlib
import gc
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Attention Is All You Need: train a Transformer on your own sentences, and translate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Training needs TensorFlow beside any backend, so another one was installed on purpose.
BACKENDS = ("jax", "torch", "tensorflow")

# What errors of the backends say, in their own words, and what it means.
TROUBLES = {
    ("out of memory", "resource_exhausted", "resource exhausted", "oom when", "bad_alloc"): (
        "the memory does not suffice: take a smaller --tokens-per-batch (training makes the same "
        "updates with --set accumulation=2), or --split-long for very long lines"
    ),
    (
        "connection closed by peer",
        "connection reset",
        "unavailable",
        "heartbeat",
        "socket closed",
    ): ("another process of the run is gone: start all of them again, with --resume"),
}

Backend = Annotated[
    str | None, typer.Option(help="tensorflow, jax or torch; KERAS_BACKEND by default.")
]
Corpus = Annotated[Path, typer.Option("--data", help="A folder made by `prepare`.")]
Model = Annotated[Path, typer.Argument(help="A .keras file.", metavar="MODEL")]
Output = Annotated[Path, typer.Option(help="Where to write.")]


def main() -> None:
    """Runs the command. Errors are one line on standard error, and exit status 2."""
    try:
        app(prog_name="keras-aiayn")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output left
        _give_up_standard_output()
        sys.exit(141)
    except Exception as error:
        expected = isinstance(error, (ValueError, OSError, ImportError, MemoryError))
        reason = str(error) if expected else _trouble(str(error))
        if reason is None or os.environ.get("KERAS_AIAYN_TRACEBACK"):
            raise
        _say(f"error: {' '.join(reason.split()) or type(error).__name__}")
        try:
            sys.stdout.flush()
        except OSError:  # it is full: Python would say so once more, and end with another status
            _give_up_standard_output()
        if not expected:  # backends would wait for processes that are gone, and abort
            os._exit(2)
        sys.exit(2)


def _give_up_standard_output() -> None:
    """What could not be written to it is lost: it has been said, or no one is there to read."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _trouble(said: str) -> str | None:
    """What befell the machine, where an error of a backend tells of that: each has its own kind."""
    said = said.lower()
    for signs, meaning in TROUBLES.items():
        if any(sign in said for sign in signs):
            return f"{meaning} ({' '.join(said.split())[:200]})"
    return None


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"keras-aiayn {version('keras-aiayn')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def prepare(
    train_source: Annotated[list[Path], typer.Option(help="Sentences, one a line; repeatable.")],
    train_target: Annotated[list[Path], typer.Option(help="Their translations, line by line.")],
    output: Output,
    valid_source: Annotated[Path | None, typer.Option(help="Held-out sentences.")] = None,
    valid_target: Annotated[Path | None, typer.Option(help="Their translations.")] = None,
    vocabulary_size: Annotated[int, typer.Option(help="Subwords of both languages.")] = 8_000,
    tokenizer: Annotated[str, typer.Option(help="sentencepiece, wordpiece or bytes.")] = (
        "sentencepiece"
    ),
    tokenizer_from: Annotated[
        Path | None,
        typer.Option(help="Take subwords from a .keras, a prepared folder or an spm .model."),
    ] = None,
    separate_vocabularies: Annotated[
        bool, typer.Option("--separate-vocabularies", help="One vocabulary for each language.")
    ] = False,
    max_length: Annotated[int, typer.Option(help="Drop longer pairs; subwords, EOS counted.")] = (
        256
    ),
    max_length_ratio: Annotated[float, typer.Option(help="Drop more uneven pairs.")] = 9.0,
    backend: Backend = None,
) -> None:
    """Check, clean and tokenise sentences into a folder to train from."""
    _start_backend(backend, quiet=True)
    from keras_aiayn.data import prepared

    prepared.write(
        train_source,
        train_target,
        valid_source,
        valid_target,
        output,
        vocabulary_size=vocabulary_size,
        tokenizer=tokenizer,
        tokenizer_from=tokenizer_from,
        separate_vocabularies=separate_vocabularies,
        max_length=max_length,
        max_length_ratio=max_length_ratio,
        progress=_say,
    )
    _say(f"prepared: {output}")


@app.command()
def train(
    data: Corpus,
    output: Annotated[Path, typer.Option(help="The run's folder.")],
    config: Annotated[
        str | None,
        typer.Option(
            help="tiny, small, base, big, a row of Table 3, or a .keras of the same sizes; "
            "base by default, with --init that file's."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Updates; the configuration's by default.")] = (
        None
    ),
    tokens_per_batch: Annotated[
        int | None, typer.Option(help="Rows times the longer padded side, per update.")
    ] = None,
    set_: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="Any other setting.")
    ] = [],  # noqa: B006 (Typer copies it)
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = (
        False
    ),
    init: Annotated[Path | None, typer.Option(help="A .keras whose weights to start from.")] = None,
    average: Annotated[
        int, typer.Option(help="The result is the mean of so many last checkpoints.")
    ] = 1,
    devices: Annotated[
        int | None, typer.Option(help="Of this machine; all its accelerators by default.")
    ] = None,
    model_parallel: Annotated[
        int, typer.Option(help="Devices that share the weights of one replica (jax).")
    ] = 1,
    backend: Backend = None,
) -> None:
    """Train a model: OUTPUT/model.keras translates."""
    own = _start_devices(backend, devices, model_parallel)
    from keras_aiayn.data import prepared
    from keras_aiayn.training import train as training

    settings = list(set_)
    settings += [] if steps is None else [f"steps={steps}"]
    settings += [] if tokens_per_batch is None else [f"tokens_per_batch={tokens_per_batch}"]
    corpus = prepared.open(data)
    name = config or ("base" if init is None else str(init))
    configs = training.configure(corpus, name, settings)
    training.run(
        corpus,
        output,
        configs,
        resume=resume,
        init=init,
        average=average,
        devices=own,
    )


@app.command()
def ablate(
    data: Corpus,
    output: Annotated[Path, typer.Option(help="The folder of runs, results and table.")],
    steps: Annotated[int, typer.Option(help="Updates of each row.")],
    rows: Annotated[
        str, typer.Option(help="Names, as in A-h1,B-dk16; all by default. base is always one.")
    ] = "",
    seeds: Annotated[int, typer.Option(help="Runs of each row, with seeds 1, 2 ...")] = 1,
    scale: Annotated[
        float, typer.Option(help="On d_model, d_ff, d_k and d_v; layers and heads stay.")
    ] = 1.0,
    tokens_per_batch: Annotated[
        int | None, typer.Option(help="Rows times the longer padded side, per update.")
    ] = None,
    set_: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="Any setting of all rows.")
    ] = [],  # noqa: B006
    devices: Annotated[
        int | None, typer.Option(help="Of this machine; all its accelerators by default.")
    ] = None,
    backend: Backend = None,
) -> None:
    """Train the rows of the paper's Table 3; the same command again goes on."""
    own = _start_devices(backend, devices)
    from keras_aiayn import ablation
    from keras_aiayn.data import prepared

    settings = list(set_)
    settings += [] if tokens_per_batch is None else [f"tokens_per_batch={tokens_per_batch}"]
    ablation.run(
        prepared.open(data),
        output,
        steps=steps,
        rows=rows.split(",") if rows else (),
        seeds=seeds,
        scale=scale,
        settings=settings,
        devices=own,
    )
    if own.is_first:
        print((output / "table.md").read_text(encoding="utf-8"), end="")


@app.command()
def average(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")],
    output: Annotated[Path, typer.Option(help="The .keras file to write.")],
    last: Annotated[int | None, typer.Option(help="How many of the last checkpoints.")] = None,
    best: Annotated[int | None, typer.Option(help="Or of those with the best validations.")] = None,
    backend: Backend = None,
) -> None:
    """Average checkpoints of a run into one model (section 6.1): the last 5 by default."""
    _start_backend(backend)
    from keras_aiayn.training import folder

    files = folder.average_run(run, output, last=last, best=best)
    _say(f"average of {', '.join(path.name for path in files)}: {output}")


@app.command()
def translate(
    models: Annotated[
        list[Path],
        typer.Argument(
            help="A .keras file, or several that translate together.", metavar="MODEL..."
        ),
    ],
    input_: Annotated[
        str, typer.Option("--input", help="A file of sentences, - for standard input.")
    ] = "-",
    output: Annotated[str, typer.Option(help="A file, - for standard output.")] = "-",
    beam: Annotated[int | None, typer.Option(help="Beams; 1 is greedy.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="alpha of section 6.1.")] = None,
    n_best: Annotated[int, typer.Option(help="Translations of each line.")] = 1,
    max_length: Annotated[
        int | None, typer.Option(help="Most tokens of an output; input + 50 by default.")
    ] = None,
    max_length_ratio: Annotated[
        float | None, typer.Option(help="Most tokens, as a multiple of the input's.")
    ] = None,
    min_length: Annotated[int, typer.Option(help="Least tokens of an output.")] = 0,
    min_length_ratio: Annotated[
        float, typer.Option(help="Least tokens, as a multiple of the input's.")
    ] = 0.0,
    prefixes: Annotated[
        Path | None, typer.Option(help="A file with what each translation begins with.")
    ] = None,
    no_repeat_ngram_size: Annotated[
        int, typer.Option(help="No output holds so many tokens twice.")
    ] = 0,
    suppress: Annotated[
        list[str], typer.Option(help="A piece that no output holds; repeatable.")
    ] = [],  # noqa: B006
    sampling: Annotated[
        bool, typer.Option("--sampling", help="Draw at random instead of searching.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Of sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Of sampling: so many of the likeliest tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="Of sampling: those that add up to this.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    split_long: Annotated[
        int | None, typer.Option(help="Cut lines of more tokens at sentence ends.")
    ] = None,
    file_format: Annotated[
        str, typer.Option("--format", help="text, or jsonl: an object for each line.")
    ] = "text",
    alignments: Annotated[
        bool, typer.Option("--alignments", help="Which word became which, as 0-0 1-2.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the model's by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from OUTPUT.part after its last whole line.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Say time and tokens at the end.")] = (
        False
    ),
    show_attention: Annotated[
        bool, typer.Option("--show-attention", help="On a terminal: where the decoder looked.")
    ] = False,
    tokens_per_batch: Annotated[int, typer.Option(help="Padded source tokens at a time.")] = 2_048,
    on_bad_bytes: Annotated[str, typer.Option(help="error, or replace what is not UTF-8.")] = (
        "error"
    ),
    chunk_size: Annotated[
        int, typer.Option(min=1, help="Lines read ahead, so that those of like length meet.")
    ] = 2_048,
    devices: Annotated[int, typer.Option(min=1, help="That share the lines of a file.")] = 1,
    backend: Backend = None,
) -> None:
    """Translate line for line, in order; what is typed, on a terminal."""
    from keras_aiayn.data import corpus

    # What is wrong with the files is said before anything is loaded.
    for path in (one for one in (input_, prefixes) if one not in ("-", None)):
        corpus.check_readable(path)
        corpus.check_apart(path, output)
    if output != "-":
        corpus.check_writable(output)
    _start_backend(backend)
    from rich.console import Console

    from keras_aiayn import files

    options: dict[str, Any] = {
        "beam_size": beam,
        "length_penalty": length_penalty,
        "n_best": n_best,
        "max_length": max_length,
        "max_length_ratio": max_length_ratio,
        "min_length": min_length,
        "min_length_ratio": min_length_ratio,
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "suppress": tuple(suppress),
        "sampling": sampling,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "alignments": alignments,
        "split_long": split_long,
    }
    # What asks for a file's format, or its line for each line, is a file even when it is typed.
    as_a_file = prefixes or resume or alignments or report or file_format != "text"
    terminal = input_ == output == "-" and sys.stdin.isatty() and sys.stdout.isatty()
    typed = terminal and not as_a_file and devices == 1
    if show_attention and not typed:
        raise ValueError("`--show-attention` is for what is typed on a terminal: see `plot`")
    with _translating(models, dtype, devices) as (translator, others):
        if others:
            options["together_with"] = others
        if typed:
            console = Console()
            texts = files.typed(console)
            files.interact(translator, texts, console, show_attention=show_attention, **options)
            return
        done = files.translate_file(
            translator,
            sys.stdin.buffer if input_ == "-" else input_,
            sys.stdout.buffer if output == "-" else output,
            prefixes=prefixes,
            file_format=file_format,
            resume=resume,
            on_bad_bytes=on_bad_bytes,
            console=Console(stderr=True),
            tokens_per_batch=tokens_per_batch,
            chunk_size=chunk_size,
            begun_with={"models": [corpus.sha256(path) for path in models], "dtype": dtype},
            **options,
        )
    if done.hit_limit:
        _say(f"{done.hit_limit:,} translations were cut at their maximum length")
    if report:
        _say(str(done))


@app.command()
def score(
    model: Model,
    source: Annotated[Path, typer.Option(help="Sentences, one a line.")],
    target: Annotated[Path, typer.Option(help="Their translations, line by line.")],
    length_penalty: Annotated[float | None, typer.Option(help="alpha of section 6.1.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the model's by default.")
    ] = None,
    backend: Backend = None,
) -> None:
    """Print for each pair its score and its log-probability, as search would give them."""
    from keras_aiayn.data import corpus

    pairs = corpus.read_pairs(source, target)
    _start_backend(backend)
    translator = _load(model) if dtype is None else _load(model).as_dtype(dtype)
    while chunk := list(itertools.islice(pairs, 2_048)):
        sources, targets = map(list, zip(*chunk, strict=True))
        for scored in translator.score(sources, targets, length_penalty=length_penalty):
            print(f"{scored.score:.6f}\t{scored.raw_score:.6f}")


@app.command()
def evaluate(
    model: Model,
    source: Annotated[Path, typer.Option(help="Sentences, one a line.")],
    target: Annotated[Path, typer.Option(help="Their right translations.")],
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    paper_bleu: Annotated[
        bool,
        typer.Option(
            "--paper-bleu", help="Tokenised BLEU too, as in Table 2, and without its splitting."
        ),
    ] = False,
    language: Annotated[str, typer.Option(help="Of the target, for --paper-bleu.")] = "de",
    beam: Annotated[int | None, typer.Option(help="Beams; 1 is greedy.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="alpha of section 6.1.")] = None,
    backend: Backend = None,
) -> None:
    """Translate a file and print sacreBLEU and chrF."""
    from keras_aiayn.data import corpus

    pairs = list(corpus.read_pairs(source, target))
    _start_backend(backend)
    translator = _load(model)
    from keras_aiayn import evaluation

    sources, references = [list(side) for side in zip(*pairs, strict=True)] or ([], [])
    translations = list(
        translator.translate_lines(sources, beam_size=beam, length_penalty=length_penalty)
    )
    scores = evaluation.corpus_scores(translations, references, lowercase=lowercase)
    print(f"BLEU {scores.bleu:.2f}  {scores.bleu_signature}")
    print(f"chrF {scores.chrf:.2f}  {scores.chrf_signature}")
    print(f"length ratio {scores.length_ratio:.3f}")
    if paper_bleu:
        for split, kind in ((True, "paper BLEU"), (False, "tokenised BLEU")):
            score = evaluation.paper_bleu(
                translations,
                references,
                language=language,
                lowercase=lowercase,
                split_compounds=split,
            )
            how = "compounds split" if split else "compounds whole"
            print(f"{kind} {score:.2f}  Moses tokens ({language}), {how}, no smoothing")


@app.command()
def export(
    model: Model,
    output: Annotated[Path, typer.Option(help="A new folder.")],
    file_format: Annotated[
        str, typer.Option("--format", help="ctranslate2, onnx or saved_model.")
    ] = "ctranslate2",
    quantization: Annotated[
        str | None,
        typer.Option(help="Of CTranslate2's weights: float32, int8, int8_float16 and others."),
    ] = None,
    beam: Annotated[int | None, typer.Option(help="Of saved_model: beams; 1 is greedy.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Of saved_model: alpha of section 6.1.")
    ] = None,
    backend: Backend = None,
) -> None:
    """Write a model in the format of another engine."""
    if file_format == "ctranslate2":
        _refuse_options(file_format, {"--beam": beam, "--length-penalty": length_penalty})
        _start_backend(backend)
        from keras_aiayn.interop import ctranslate2

        ctranslate2.export(_load(model), output, quantization or "float32")
    elif file_format == "saved_model":
        _refuse_options(file_format, {"--quantization": quantization})
        _start_backend(backend or os.environ.get("KERAS_BACKEND") or "tensorflow")
        from keras_aiayn.interop import saved_model

        translator = _load(model)
        with _without_noise():  # SentencePiece in the graph reports how it normalises
            saved_model.export(translator, output, beam_size=beam, length_penalty=length_penalty)
    elif file_format == "onnx":
        _refuse_options(
            file_format,
            {"--quantization": quantization, "--beam": beam, "--length-penalty": length_penalty},
        )
        _start_backend(backend or os.environ.get("KERAS_BACKEND") or "torch")
        from keras_aiayn.interop import onnx

        translator = _load(model)
        with _without_noise():  # the exporter warns of torchvision
            onnx.export(translator, output)
    else:
        raise ValueError(
            f"`--format` must be ctranslate2, onnx or saved_model. Received: {file_format!r}"
        )
    _say(f"exported: {output}")


@app.command()
def quantize(
    model: Model,
    output: Annotated[Path, typer.Option(help="The .keras file to write.")],
    mode: Annotated[str, typer.Option(help="int8.")] = "int8",
    source: Annotated[
        Path | None, typer.Option(help="Sentences to measure the speed on, one a line.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Their right translations, for BLEU.")
    ] = None,
    backend: Backend = None,
) -> None:
    """Write a model with smaller weights; print its size, and with --source its speed."""
    _start_backend(backend)
    from keras_aiayn import quantization

    quantization.quantize_file(model, output, mode, source=source, reference=reference)
    _say(f"quantised: {output}")


def _refuse_options(file_format: str, options: dict[str, Any]) -> None:
    """Refuses what another format would understand."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"`{name}` is nothing that `--format {file_format}` takes")


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="0.0.0.0 to be reached from elsewhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="To listen at.")] = 8000,
    devices: Annotated[int, typer.Option(min=1, help="That translate side by side.")] = 1,
    tokens_per_batch: Annotated[int, typer.Option(help="Source tokens translated at a time.")] = (
        2_048
    ),
    backend: Backend = None,
) -> None:
    """Serve a model over HTTP. KERAS_AIAYN_API_KEY, if set, is asked for before translating."""
    _start_backend(backend)
    try:
        from keras_aiayn.serve import run as service
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'keras-aiayn[serve]'") from None

    service.run(
        model,
        host=host,
        port=port,
        devices=devices,
        api_key=os.environ.get("KERAS_AIAYN_API_KEY"),
        tokens_per_batch=tokens_per_batch,
        say=_say,
    )


importer = typer.Typer(help="Take models from elsewhere: marian.", no_args_is_help=True)
app.add_typer(importer, name="import")


@importer.command("marian")
def import_marian(
    folder: Annotated[Path, typer.Argument(help="Of transformers' Marian or OPUS-MT.")],
    output: Annotated[Path, typer.Option(help="The .keras file to write.")],
    backend: Backend = None,
) -> None:
    """Make a translator of a Marian or OPUS-MT model."""
    _start_backend(backend)
    from keras_aiayn.interop import marian

    marian.load(folder).save(output)
    _say(f"imported: {output}")


plot = typer.Typer(
    help="Draw a picture: attention, positions, schedule or run.", no_args_is_help=True
)
app.add_typer(plot, name="plot")
Picture = Annotated[Path, typer.Option(help="A .png, .svg or .pdf.")]


@plot.command("attention")
def plot_attention(
    model: Model,
    text: Annotated[str, typer.Argument(help="A source sentence.")],
    output: Picture,
    layer: Annotated[int, typer.Option(help="From 0; the last by default.")] = -1,
    kind: Annotated[str, typer.Option(help="encoder, decoder or cross.")] = "cross",
    backend: Backend = None,
) -> None:
    """Draw where each head of a layer looks as a sentence is translated."""
    _start_backend(backend)
    translator = _load(model)
    from keras_aiayn import plots

    plots.plot_attention(translator, text, output, layer=layer, kind=kind)


@plot.command("positions")
def plot_positions(
    output: Picture,
    hidden_dim: Annotated[int, typer.Option(help="d_model.")] = 512,
    length: Annotated[int, typer.Option(help="Positions.")] = 100,
    backend: Backend = None,
) -> None:
    """Draw the sinusoids of section 3.5."""
    _start_backend(backend, quiet=True)
    from keras_aiayn import plots

    plots.plot_positions(output, hidden_dim, length)


@plot.command("schedule")
def plot_schedule(
    output: Picture,
    hidden_dim: Annotated[list[int], typer.Option(help="d_model; repeatable.")] = [512, 1024],  # noqa: B006
    warmup_steps: Annotated[list[int], typer.Option(help="Repeatable.")] = [4_000, 8_000],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Updates to draw.")] = 20_000,
    backend: Backend = None,
) -> None:
    """Draw the learning rate of section 5.3."""
    _start_backend(backend, quiet=True)
    from keras_aiayn import plots
    from keras_aiayn.training.schedule import NoamSchedule

    schedules = {
        f"d = {dim}, warm-up {warmup:,}": NoamSchedule(dim, warmup)
        for dim in hidden_dim
        for warmup in warmup_steps
    }
    plots.plot_schedule(schedules, output, steps)


@plot.command("run")
def plot_run(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders that `train` made.", metavar="RUN...")
    ],
    output: Picture,
    backend: Backend = None,
) -> None:
    """Draw BLEU, perplexity and learning rate from the logs of runs."""
    _start_backend(backend, quiet=True)
    from keras_aiayn import plots

    plots.plot_run(runs, output)


def _start_backend(name: str | None, quiet: bool = False, training: bool = False) -> None:
    """Settles Keras's backend and imports both, and for training the data pipeline."""
    if name is not None and name not in BACKENDS:
        raise ValueError(f"`--backend` must be tensorflow, jax or torch. Received: {name!r}")
    name = name or os.environ.get("KERAS_BACKEND")
    if name is None:
        name = next((one for one in BACKENDS if importlib.util.find_spec(one)), None)
        if name is None:
            raise ImportError(
                "no backend is installed: pip install 'keras-aiayn[jax]', [tensorflow] or [torch]"
            )
        if not quiet:
            _say(f"backend: {name} (--backend or KERAS_BACKEND chooses)")
    os.environ["KERAS_BACKEND"] = name
    # JAX compiles each shape for seconds; what it compiled once it need not compile again.
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "keras-aiayn" / "jax"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # small ones too
    with _without_noise(), _without_collection():
        import keras

        if keras.backend.backend() != name:  # it was imported before we were asked
            raise ValueError(
                f"Keras runs on {keras.backend.backend()} already: KERAS_BACKEND={name}"
            )
        if training or name == "tensorflow":
            from keras_aiayn.data import batching

            # It looks for GPUs when it is first asked for them, and reports each failure.
            batching.import_tensorflow().config.list_physical_devices("GPU")


def _start_devices(backend: str | None, devices: int | None, model_parallel: int = 1) -> Any:
    """What to train on, before anything computes; processes of their own where those are needed."""
    _start_backend(backend)
    from keras_aiayn.training import distribution, launch

    processes = distribution.processes_to_start(devices)
    if processes:
        command = [sys.executable, "-m", "keras_aiayn", *sys.argv[1:]]
        raise typer.Exit(launch.launch(processes, command))
    _start_backend(backend, training=True)
    return distribution.start(devices, model_parallel=model_parallel)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Keeps Python from looking again and again for garbage in what is imported to stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Keeps back what TensorFlow writes as it is imported, unless TF_CPP_MIN_LOG_LEVEL is set.

    Its C++ reports its build and the GPUs that it has not found, past Python's `sys.stderr` and
    whatever the level of its log. If the import fails, all of it is shown.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    sys.stderr.flush()
    screen = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(screen, said.read())
            raise
        finally:
            os.dup2(screen, 2)
            os.close(screen)
            del os.environ["TF_CPP_MIN_LOG_LEVEL"]  # a process of ours decides anew


@contextlib.contextmanager
def _translating(
    models: list[Path], dtype: str | None, devices: int
) -> Iterator[tuple[Any, list[Any]]]:
    """What translates, and the translators that do it together with it in this process."""
    if devices > 1:
        from keras_aiayn.pool import Pool

        with Pool(models, devices, dtype) as pool:
            yield pool, []
        return
    from keras_aiayn.memory import keep_freed_memory

    keep_freed_memory()
    loaded = [_load(path) for path in models]
    translator, *others = loaded if dtype is None else [one.as_dtype(dtype) for one in loaded]
    yield translator, others


def _load(path: Path) -> Any:
    """A translator, or an error of one line."""
    from keras_aiayn.loading import load

    return load(path)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
