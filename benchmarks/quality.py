"""BLEU and speed on equal work: this package and JoeyNMT 2.3.0 on Multi30k, English to German.

    KERAS_BACKEND=tensorflow python benchmarks/quality.py ours --folder /tmp/quality
    python benchmarks/quality.py joeynmt --folder /tmp/quality
    python benchmarks/quality.py report --folder /tmp/quality

The two train on the same subwords with the same sizes, schedule and number of updates, and
translate test_2016_flickr with beam 5. Each leaves its translations and its speed in the folder,
so that they need not run in one go; nothing else should run beside them. JoeyNMT comes from PyPI
into an environment of its own. The corpus is $AIAYN_DATA/multi30k.

What cannot be equal: JoeyNMT's positions and initial weights are its own, its dropout also falls
on attention weights and inside the feed-forward network, and it does not batch by length, so that
4,096 tokens with their padding hold fewer real ones.
"""

import argparse
import json
import os
import re
import statistics
from pathlib import Path
from typing import Any

import joey
from multi30k import opened, texts

from keras_aiayn.config import TransformerConfig
from keras_aiayn.data import corpus

UPDATES, TOKENS, WARMUP, SCALE, DROPOUT, BEAM = 1_500, 4_096, 500, 0.7, 0.1, 5


def ours(folder: Path) -> None:
    """Trains and translates with this package."""
    from keras_aiayn.training import train

    data = opened(folder)
    settings = [f"steps={UPDATES}", f"tokens_per_batch={TOKENS}", f"warmup_steps={WARMUP}",
                f"learning_rate_scale={SCALE}", f"dropout={DROPOUT}",
                "evaluate_every=0"]  # fmt: skip
    translator = train.run(data, folder / "ours", train.configure(data, "tiny", settings))
    (record,) = corpus.read_lines(folder / "ours" / "log.jsonl")
    sources = list(corpus.read_lines(texts("test_2016_flickr")[0]))
    save(
        folder / "ours.json",
        translations=translator.translate(sources, beam_size=BEAM),
        tokens_per_second=json.loads(record)["target_tokens_per_second"],
        backend=os.environ.get("KERAS_BACKEND", "tensorflow"),
    )


def joeynmt(folder: Path) -> None:
    """Trains and translates with JoeyNMT, on our subwords as its words."""
    data = opened(folder)
    home = folder / "joeynmt"
    tokenizer = data.source_tokenizer
    splits = ("train", "val", "test_2016_flickr")
    joey.write_texts(home, tokenizer, {split: texts(split) for split in splits})
    joey.write_config(
        home, TransformerConfig.tiny(tokenizer.vocabulary_size, dropout=DROPOUT), tokens=TOKENS,
        updates=UPDATES, scale=SCALE, warmup=WARMUP,
    )  # fmt: skip
    python = joey.environment(folder / "joeynmt-environment")
    if not (home / "run" / "best.ckpt").exists():
        joey.run(python, "-m", "joeynmt", "train", home / "config.yaml", "--skip-test")
    joey.run(python, "-m", "joeynmt", "test", home / "config.yaml", "-o", home / "translations")
    log = (home / "run" / "train.log").read_text(encoding="utf-8")
    speeds = [float(speed) for speed in re.findall(r"Tokens per Sec: +([\d.]+)", log)]
    pieces = tokenizer.pieces(range(tokenizer.vocabulary_size))
    ids = {piece: number for number, piece in enumerate(pieces)}
    translated = corpus.read_lines(home / "translations.test")
    save(
        folder / "joeynmt.json",
        translations=tokenizer.decode(
            [[ids[word] for word in line.split(" ") if word in ids] for line in translated]
        ),
        tokens_per_second=statistics.median(speeds),
        backend="torch",
    )


def save(path: Path, **result: Any) -> None:
    """Keeps a result for the report."""
    with corpus.whole_file(path, "w") as stream:
        json.dump(result, stream, ensure_ascii=False)


def report(folder: Path) -> None:
    """Prints both scores and both speeds."""
    from keras_aiayn.evaluation import corpus_scores, paper_bleu

    references = list(corpus.read_lines(texts("test_2016_flickr")[1]))
    results = {}
    for name in ("ours", "joeynmt"):
        results[name] = result = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        translations = result["translations"]
        scores = corpus_scores(translations, references)
        tokenised = paper_bleu(translations, references, lowercase=True, split_compounds=False)
        print(f"{name} ({result['backend']}): sacreBLEU {scores.bleu:.2f} "
              f"({scores.bleu_signature}), tokenised and lower-cased {tokenised:.2f}, "
              f"length ratio {scores.length_ratio:.3f}, "
              f"{result['tokens_per_second']:,.0f} target tokens/s in training")  # fmt: skip
    speed = [results[name]["tokens_per_second"] for name in ("ours", "joeynmt")]
    print(f"speed, ours over JoeyNMT's: {speed[0] / speed[1]:.2f}")


def main() -> None:
    """Runs one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["ours", "joeynmt", "report"])
    parser.add_argument("--folder", type=Path, required=True, help="Holds what the parts leave.")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    {"ours": ours, "joeynmt": joeynmt, "report": report}[options.part](options.folder)


if __name__ == "__main__":
    main()
