"""The run: from text to a file that translates, resumed, refused, interrupted."""

import dataclasses
import importlib.util
import json
import random
import shutil

import keras
import numpy as np
import pytest
from rich.console import Console

from keras_aiayn.config import TrainingConfig
from keras_aiayn.data import prepared
from keras_aiayn.training import checkpoint, report, train, validation
from keras_aiayn.training import folder as run_folder
from keras_aiayn.translator import Translator

WORDS = [("red", "rot"), ("blue", "blau"), ("old", "alt"), ("dog", "Hund"), ("cat", "Katze"),
         ("runs", "läuft"), ("sleeps", "schläft"), ("here", "hier")]  # fmt: skip
SETTINGS = ["num_layers=1", "hidden_dim=32", "intermediate_dim=32", "num_heads=2", "dropout=0.1",
            "warmup_steps=5", "max_shapes=2", "tokens_per_batch=400", "evaluate_lines=4",
            "checkpoint_every=3", "evaluate_every=6", "steps=6"]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(1)
    pairs = [
        tuple(map(" ".join, zip(*generator.choices(WORDS, k=generator.randint(1, 6)), strict=True)))
        for _ in range(120)
    ]
    files = {}
    for name, part in (("train", pairs[:-8]), ("valid", pairs[-8:])):
        for side, texts in zip(("en", "de"), zip(*part, strict=True), strict=True):
            files[name, side] = folder / f"{name}.{side}"
            files[name, side].write_text("\n".join(texts) + "\n", encoding="utf-8")
    return prepared.write(*files.values(), folder / "prepared", tokenizer="bytes")


def run(corpus, output, *changes, **options):
    configs = train.configure(corpus, "tiny", [*SETTINGS, *changes])
    with open(output.parent / f"{output.name}.txt", "a") as said:
        return train.run(corpus, output, configs, console=Console(file=said), **options)


def said_in(folder):
    return " ".join((folder / "run.txt").read_text().split())


def weights_of(translator):
    return translator.model.get_weights()


def weights_by_name(model):
    """The weights, without the random state of dropout, by their names in a checkpoint."""
    return [
        (f"model/{i:04d}", keras.ops.convert_to_numpy(variable))
        for i, variable in enumerate(model.variables)
        if any(variable is weight for weight in model.weights)
    ]


@pytest.fixture(scope="module")
def whole_run(corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    return output, run(corpus, output)


def test_a_run_leaves_a_translator_a_log_and_checkpoints(whole_run):
    output, translator = whole_run
    assert [path.stem for path in checkpoint.find(output / "checkpoints")] == [
        "step-00000003", "step-00000006",
    ]  # fmt: skip
    (record,) = map(json.loads, (output / "log.jsonl").read_text().splitlines())
    assert record["step"] == 6 and record["perplexity"] == pytest.approx(np.exp(record["nll"]))
    assert {"bleu", "bleu_signature", "valid_perplexity", "learning_rate"} <= record.keys()
    assert list((output / "tensorboard").iterdir())
    loaded = keras.saving.load_model(output / "model.keras")
    assert not loaded.model.compiled  # else the optimizer would be in the file
    assert loaded.translate(["red dog"]) == translator.translate(["red dog"])


def test_the_same_run_gives_the_same_weights(corpus, whole_run, tmp_path):
    for ours, theirs in zip(
        weights_of(run(corpus, tmp_path / "again")), weights_of(whole_run[1]), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.works("training that goes on after a stop, to the bit")
def test_a_resumed_run_gives_the_same_weights_and_log(corpus, whole_run, tmp_path):
    output = tmp_path / "run"
    run(corpus, output, "steps=3")
    translator = run(corpus, output, resume=True)
    for ours, theirs in zip(weights_of(translator), weights_of(whole_run[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    last = [
        json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
        for folder in (output, whole_run[0])
    ]
    same = ("step", "epoch", "batch", "valid_nll", "bleu", "learning_rate")
    assert [last[0][name] for name in same] == [last[1][name] for name in same]


def test_a_damaged_checkpoint_is_named_and_passed_over(corpus, whole_run, tmp_path):
    output = tmp_path / "run"
    run(corpus, output)
    newest = checkpoint.find(output / "checkpoints")[-1]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    translator = run(corpus, output, resume=True)
    said = (tmp_path / "run.txt").read_text().replace("\n", "")
    assert f"{newest.name} is damaged" in said and "step-00000003.npz" in said
    for ours, theirs in zip(weights_of(translator), weights_of(whole_run[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.works("updates accumulated from parts")
def test_accumulated_micro_batches_give_the_update_of_the_whole(corpus, tmp_path):
    changes = ["dropout=0.0", "steps=3", "learning_rate_scale=0.01"]
    start = run(corpus, tmp_path / "start", *changes, "learning_rate_scale=1e-12")
    once = run(corpus, tmp_path / "once", *changes)
    twice = run(corpus, tmp_path / "twice", *changes, "accumulation=2")
    rates = [log_of(tmp_path / name)[-1]["learning_rate"] for name in ("once", "twice")]
    assert rates[0] == rates[1]
    # Adam divides by the gradient's own size: where that is all rounding, so is the direction.
    for one, two, before in zip(*map(weights_of, (once, twice, start)), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-5)
        assert np.abs(one - before).max() > 3e-4  # what is equal has moved


def test_the_average_is_the_mean_of_the_last_checkpoints(corpus, tmp_path):
    translator = run(corpus, tmp_path / "run", average=2)
    states = [np.load(path) for path in checkpoint.find(tmp_path / "run" / "checkpoints")]
    for name, weight in weights_by_name(translator.model):
        mean = sum(state[name] for state in states) / 2
        np.testing.assert_allclose(weight, mean, rtol=1e-6, atol=1e-7)

    for ours, theirs in zip(average_of(tmp_path / "run"), weights_of(translator), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def average_of(folder):
    """What the verb `average` makes of a run."""
    run_folder.average_run(folder, folder / "average.keras", last=2)
    return weights_of(keras.saving.load_model(folder / "average.keras"))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"last": 3}, r"keeps 2 checkpoints\. Received: an average of 3"),
        ({}, r"keeps 2 checkpoints\. Received: an average of 5"),
        ({"last": 0}, r"Received: an average of 0"),
        ({"last": -1}, r"Received: an average of -1"),
        ({"best": 2}, r"keeps 1 checkpoints of a validation\. Received: an average of 2"),
        ({"last": 1, "best": 1}, r"last or of the best\. Received: last=1, best=1"),
    ],
)
def test_an_average_that_cannot_be_is_refused(whole_run, tmp_path, asked, message):
    with pytest.raises(ValueError, match=message):
        run_folder.average_run(whole_run[0], tmp_path / "average.keras", **asked)
    assert not list(tmp_path.iterdir())


def test_a_warm_start_takes_the_weights(corpus, whole_run, tmp_path):
    started = run(
        corpus, tmp_path / "run", "steps=1", "learning_rate_scale=1e-12",
        init=whole_run[0] / "model.keras",
    )  # fmt: skip
    for ours, theirs in zip(weights_of(started), weights_of(whole_run[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_warm_start_may_take_the_sizes_too(corpus, whole_run, tmp_path):
    path = str(whole_run[0] / "model.keras")
    model, config = train.configure(corpus, path, ["steps=1", "tokens_per_batch=400"])
    assert dataclasses.asdict(model) == dataclasses.asdict(
        dataclasses.replace(train.configure(corpus, "tiny", SETTINGS)[0], dtype="float32")
    )
    assert config == TrainingConfig(steps=1, tokens_per_batch=400)


@pytest.fixture(scope="module")
def two_corpora(corpus, tmp_path_factory):
    """The pairs of `corpus` in two pairs of files, 100 and 12."""
    folder = tmp_path_factory.mktemp("two")
    files = {"source": [], "target": []}
    for side, suffix in (("source", "en"), ("target", "de")):
        lines = (corpus.folder.parent / f"train.{suffix}").read_text(encoding="utf-8").split("\n")
        for name, part in (("large", lines[:100]), ("small", lines[100:112])):
            files[side].append(folder / f"{name}.{suffix}")
            files[side][-1].write_text("\n".join(part) + "\n", encoding="utf-8")
    valid = [corpus.folder.parent / f"valid.{suffix}" for suffix in ("en", "de")]
    return prepared.write(*files.values(), *valid, folder / "prepared", tokenizer="bytes")


def test_corpora_have_weights_and_a_resume_keeps_them(two_corpora, tmp_path):
    assert two_corpora.corpus_sizes == [100, 12]
    weighted = ("corpus_weights=0.5,4", "steps=9")
    whole = run(two_corpora, tmp_path / "whole", *weighted)
    assert "112 pairs (100 x 0.5, 12 x 4 an epoch)" in (tmp_path / "whole.txt").read_text()
    run(two_corpora, tmp_path / "parts", "corpus_weights=0.5,4", "steps=3")
    resumed = run(two_corpora, tmp_path / "parts", *weighted, resume=True)
    for one, other in zip(weights_of(whole), weights_of(resumed), strict=True):
        np.testing.assert_array_equal(one, other)
    unweighted = run(two_corpora, tmp_path / "unweighted", "steps=9")
    assert any(
        (one != other).any()
        for one, other in zip(weights_of(whole), weights_of(unweighted), strict=True)
    )
    with pytest.raises(ValueError, match=r"corpus_weights was \[0.5, 4.0\] and is \[4.0, 0.5\]"):
        run(two_corpora, tmp_path / "parts", "corpus_weights=4,0.5", "steps=9", resume=True)
    with pytest.raises(ValueError, match="one for each pair of training files .* 2. Received: 3"):
        run(two_corpora, tmp_path / "three", "corpus_weights=1,2,3")


def test_a_warm_start_survives_a_kill_before_the_first_update(corpus, whole_run, tmp_path):
    def die(*_, **__):
        raise RuntimeError("as a kill would")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "_fit", die)
        with pytest.raises(RuntimeError):
            run(corpus, tmp_path / "run", "steps=1", init=whole_run[0] / "model.keras")
    resumed = run(corpus, tmp_path / "run", "steps=1", resume=True)
    straight = run(corpus, tmp_path / "on", "steps=1", init=whole_run[0] / "model.keras")
    for ours, theirs in zip(weights_of(resumed), weights_of(straight), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    kept = checkpoint.find(tmp_path / "run" / "checkpoints")
    assert [path.stem for path in kept] == ["step-00000001"]


def test_a_run_cannot_be_resumed_otherwise_than_it_was_started(corpus, whole_run):
    with pytest.raises(ValueError, match=r"training.seed was 1 and is 2"):
        run(corpus, whole_run[0], "seed=2", resume=True)


def test_a_folder_that_holds_something_is_refused(corpus, whole_run):
    with pytest.raises(FileExistsError, match="--resume"):
        run(corpus, whole_run[0])


def test_an_average_of_more_than_is_kept_is_refused_before_training(corpus, tmp_path):
    for average in (3, 0):
        with pytest.raises(ValueError, match=f"1 to 2 checkpoints here. .* average={average}"):
            run(corpus, tmp_path / "run", average=average)
    assert not (tmp_path / "run").exists()


def test_what_is_refused_leaves_no_folder_in_the_way(corpus, tmp_path, monkeypatch):
    (tmp_path / "damaged.keras").write_bytes(b"no model")
    for changes, options, message in (
        (["tokens_per_batch=4"], {}, "tokens_per_batch"),
        (["num_heads=5"], {}, "`hidden_dim` must be a multiple of `num_heads`"),
        (["dtype=foo"], {}, "foo"),
        (["dtype=mixed_float16", "accumulation=2"], {}, "an update of accumulated parts"),
        (["positions=learned", "max_length=4"], {}, "the corpus has a text of .* tokens"),
        ([], {"init": tmp_path / "damaged.keras"}, "is not a .keras file"),
    ):
        with pytest.raises(ValueError, match=message):
            run(corpus, tmp_path / "run", *changes, **options)
        assert not (tmp_path / "run").exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"TensorBoard: pip install 'keras-aiayn\[train\]'"):
        run(corpus, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_full_disk_leaves_the_last_checkpoint_whole(corpus, tmp_path, monkeypatch):
    output = tmp_path / "run"
    saved = np.savez

    def savez(stream, **arrays):
        if checkpoint.find(output / "checkpoints"):
            stream.write(b"half")
            raise OSError(28, "No space left on device")
        saved(stream, **arrays)

    monkeypatch.setattr(np, "savez", savez)
    with pytest.raises(OSError, match="No space"):
        run(corpus, output)
    (only,) = (output / "checkpoints").iterdir()
    assert checkpoint.whole(only)


def test_a_line_that_a_full_disk_tore_is_dropped(corpus, whole_run, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(whole_run[0], output)
    log = output / "log.jsonl"
    line = log.read_text()
    log.write_text(line + line[:100])
    run(corpus, output, resume=True)
    assert log.read_text() == line
    assert "was not finished and is dropped" in said_in(tmp_path)
    log.write_text(line[:100] + "\n" + line)
    with pytest.raises(ValueError, match=r"log.jsonl, line 1, is no record of a run"):
        run(corpus, output, resume=True)


def log_of(output):
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


@pytest.mark.works("blocks computed again, for memory")
def test_computing_blocks_again_changes_no_weight(corpus, whole_run, tmp_path, monkeypatch):
    """Dropout is on: the masks of the second computation must be those of the first."""
    remat, wrapped = keras.remat, []
    monkeypatch.setattr(keras, "remat", lambda f: wrapped.append(f) or remat(f))
    again = run(corpus, tmp_path / "run", "remat=true")
    assert len(wrapped) >= 2  # a block on either side, or the weights are the same for nothing
    for ours, theirs in zip(weights_of(again), weights_of(whole_run[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize("best_by", ["bleu", "perplexity"])
def test_a_run_ends_when_validations_no_longer_get_better(corpus, tmp_path, monkeypatch, best_by):
    """Validations 1 to 5 as told; the second is the best, and the run ends after two more."""
    told = iter([3.0, 9.0, 5.0, 9.0, 10.0])

    def validate(*_):
        score = next(told)
        return {"bleu": score, "valid_perplexity": 20 - score}

    monkeypatch.setattr(validation, "validate", validate)
    translator = run(
        corpus, tmp_path / "run", "steps=40", "evaluate_every=4", "patience=2",
        f"best_by={best_by}", "checkpoint_every=40",
    )  # fmt: skip
    assert [line["step"] for line in log_of(tmp_path / "run")] == [4, 8, 12, 16]
    best = np.load(tmp_path / "run" / "checkpoints" / "step-00000008.npz")
    for name, weight in weights_by_name(translator.model):
        np.testing.assert_array_equal(weight, best[name])
    assert "the best checkpoint, step-00000008" in (tmp_path / "run.txt").read_text()


def test_the_best_checkpoints_are_kept_beside_the_last(corpus, tmp_path, monkeypatch):
    told = iter([3.0, 9.0, 5.0, 9.0, 8.0])
    monkeypatch.setattr(
        validation, "validate", lambda *_: {"bleu": next(told), "valid_perplexity": 1.0}
    )
    run(
        corpus, tmp_path / "run", "steps=5", "evaluate_every=1", "checkpoint_every=1",
        "keep_last=1", "keep_best=2",
    )  # fmt: skip
    kept = checkpoint.find(tmp_path / "run" / "checkpoints")
    assert [path.stem[-1] for path in kept] == ["2", "4", "5"]
    assert checkpoint.best(tmp_path / "run" / "checkpoints", 1) == kept[:1]  # the earlier 9


def test_a_loss_that_is_no_number_ends_the_run_and_spares_the_checkpoints(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"loss became nan at step 2; .*step-00000001"):
        # One update leaves weights of 1e27, which are numbers; their products are not.
        run(corpus, tmp_path / "run", "steps=40", "checkpoint_every=1", "learning_rate_scale=1e30")
    (only, *_) = checkpoint.find(tmp_path / "run" / "checkpoints")
    assert checkpoint.whole(only)


@pytest.mark.parametrize("alike", [True, False])
def test_a_decoder_that_says_one_thing_only_is_noticed(corpus, tmp_path, monkeypatch, alike):
    texts = prepared.Split.source_texts

    def translate(self, texts):
        return [text and "rot" if alike else text for text in texts]

    def with_a_blank_line(self):
        return ["", *texts(self)[1:]]

    monkeypatch.setattr(Translator, "translate", translate)
    monkeypatch.setattr(prepared.Split, "source_texts", with_a_blank_line)
    run(corpus, tmp_path / "run", "steps=1")
    (record,) = log_of(tmp_path / "run")
    said = (tmp_path / "run.txt").read_text().replace("\n", " ")
    assert record["collapsed"] is alike
    assert ("all translations of the validation are alike" in said) is alike


def test_a_run_that_ends_inside_its_warm_up_is_told_so(corpus, whole_run, tmp_path):
    run(corpus, tmp_path / "run", "steps=1", "warmup_steps=2")
    assert "ends after 1 steps, inside its warm-up of 2" in said_in(tmp_path)
    assert "warm-up" not in said_in(whole_run[0].parent)


def test_a_very_large_perplexity_is_a_number():
    """A run that diverged; nats per word where a line of 100 subwords is one word (Chinese)."""
    assert 1e300 < report.training_record(diverged())["perplexity"] < float("inf")
    assert report.perplexity(2.0) == pytest.approx(np.exp(2.0))


def diverged():
    sums = dict.fromkeys(report.TOKEN_MEANS, 800.0 * 10) | {"source": 9, "target": 10}
    return {"sums": sums | {"seconds": 1.0}} | dict.fromkeys(
        ("step", "epoch", "batch", "seconds", "real_share", "shapes"), 1
    )


def test_an_interrupt_leaves_no_checkpoint_among_the_last_for_good(
    corpus, tmp_path, interrupting_at
):
    settings = ("steps=6", "checkpoint_every=2", "keep_last=3", "evaluate_every=0")
    whole = run(corpus, tmp_path / "whole", *settings, average=3)
    for step in (3, 5):
        with interrupting_at(step), pytest.raises(KeyboardInterrupt):
            run(corpus, tmp_path / "stopped", *settings, average=3, resume=step > 3)
        newest = checkpoint.find(tmp_path / "stopped/checkpoints")[-1]
        assert newest.stem == f"step-0000000{step}"
    stopped = run(corpus, tmp_path / "stopped", *settings, average=3, resume=True)
    kept = checkpoint.find(tmp_path / "stopped/checkpoints")
    assert [path.stem[-1] for path in kept] == ["2", "4", "6"]
    for ours, theirs in zip(weights_of(stopped), weights_of(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_validation_at_a_resume_is_saved(corpus, tmp_path, monkeypatch, interrupting_at):
    settings = ("steps=6", "evaluate_every=3", "keep_best=1", "keep_last=1")
    told = iter([9.0, 3.0])
    monkeypatch.setattr(
        validation, "validate", lambda *_: {"bleu": next(told), "valid_perplexity": 1.0}
    )
    with interrupting_at(3), pytest.raises(KeyboardInterrupt):
        run(corpus, tmp_path / "run", *settings)
    run(corpus, tmp_path / "run", *settings, resume=True)
    kept = checkpoint.find(tmp_path / "run/checkpoints")
    assert [path.stem[-1] for path in kept] == ["3", "6"]  # the best, and the last
    assert checkpoint.best(tmp_path / "run/checkpoints", 1) == kept[:1]


def test_an_interrupt_between_an_update_and_its_validation_loses_no_line(
    corpus, tmp_path, interrupting_at
):
    """Stopped by Ctrl-C in the very step that a validation follows; the log is that of no stop."""
    settings = ("steps=6", "evaluate_every=3")
    run(corpus, tmp_path / "whole", *settings)
    with interrupting_at(3), pytest.raises(KeyboardInterrupt):
        run(corpus, tmp_path / "stopped", *settings)
    assert [p.stem for p in checkpoint.find(tmp_path / "stopped/checkpoints")] == ["step-00000003"]
    run(corpus, tmp_path / "stopped", *settings, resume=True)
    names = ("step", "token_loss", "valid_nll", "bleu", "gradient_norm", "learning_rate", "shapes")
    stopped, whole = (
        [[line[name] for name in names] for line in log_of(tmp_path / folder)]
        for folder in ("stopped", "whole")
    )
    assert stopped == whole and [line[0] for line in whole] == [3, 6]


def test_a_corpus_that_changes_under_a_run_ends_it(corpus, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    data = prepared.open(copy)
    (copy / "train.target.tokens").touch()
    with pytest.raises(ValueError, match=r"train.target.tokens changed while it was in use"):
        run(data, tmp_path / "run")
    assert not checkpoint.find(tmp_path / "run" / "checkpoints")  # nothing of it was kept


def test_a_corpus_that_changed_between_two_runs_is_refused(corpus, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    run(prepared.open(copy), tmp_path / "run", "steps=3")
    tokens = bytearray((copy / "train.target.tokens").read_bytes())
    tokens[0] ^= 1
    (copy / "train.target.tokens").write_bytes(tokens)
    with pytest.raises(ValueError, match=r"train.target.tokens is not what was prepared"):
        run(prepared.open(copy), tmp_path / "run", resume=True)


def test_time_makes_checkpoints_too(corpus, whole_run, tmp_path):
    translator = run(
        corpus, tmp_path / "run", "checkpoint_every=0", "checkpoint_minutes=1e-9", "keep_last=9"
    )
    names = [path.stem[-1] for path in checkpoint.find(tmp_path / "run" / "checkpoints")]
    assert names == list("123456")
    for ours, theirs in zip(weights_of(translator), weights_of(whole_run[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_log_holds_what_a_run_should_be_judged_by(corpus, whole_run):
    (record,) = log_of(whole_run[0])
    assert record["gradient_norm"] > 0 and record["peak_memory_mb"] > 50
    assert 0 < record["real_share"] <= 1 and record["shapes"] <= 2
    tokens = corpus.valid.target_lengths().sum()
    words = sum(len(text.split()) for text in corpus.valid.target_texts())
    assert record["valid_word_perplexity"] ** words == pytest.approx(
        record["valid_perplexity"] ** float(tokens), rel=1e-3
    )
    assert record["source_tokens_per_second"] > 0 and record["target_tokens_per_second"] > 0


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("mixed_bfloat16", marks=pytest.mark.works("training in bfloat16")),
        pytest.param("mixed_float16", marks=pytest.mark.works("training in float16")),
    ],
)
def test_mixed_precision_trains_and_resumes(corpus, tmp_path, policy):
    """float16 with Keras's loss scaling, whose state is part of a checkpoint."""
    if policy == "mixed_float16" and keras.backend.backend() == "jax":
        pytest.skip("JAX has no float16 product on a CPU")
    once = run(corpus, tmp_path / "once", f"dtype={policy}")
    run(corpus, tmp_path / "twice", f"dtype={policy}", "steps=3")
    twice = run(corpus, tmp_path / "twice", f"dtype={policy}", resume=True)
    for ours, theirs in zip(weights_of(twice), weights_of(once), strict=True):
        assert ours.dtype == "float32"
        np.testing.assert_array_equal(ours, theirs)
    scales = isinstance(once.model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scales == (policy == "mixed_float16")
    record, *_ = log_of(tmp_path / "once")
    assert 0 < record["gradient_norm"] < 100 and np.isfinite(record["valid_perplexity"])
    assert once.model.encoder_blocks[0].compute_dtype == policy.removeprefix("mixed_")
