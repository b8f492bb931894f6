"""JoeyNMT 2.3.0 for the benchmarks: its environment, our subwords as its words, and a worker.

JoeyNMT wants versions of its own, so it has an environment of its own, made from PyPI where it is
missing. Run as a script in that environment, this file is a worker that trains.
"""

import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

REQUIREMENTS = ["joeynmt==2.3.0", "importlib_metadata", "torch==2.13.0", "protobuf<3.21"]
CONFIG = """
name: benchmark
model_dir: "{home}/run"
use_cuda: False
random_seed: 1
data:
  train: "{home}/train"
  dev: "{home}/val"
  test: "{home}/test_2016_flickr"
  dataset_type: "plain"
  src: {{lang: "en", level: "word", voc_file: "{home}/vocabulary"}}
  trg: {{lang: "de", level: "word", voc_file: "{home}/vocabulary"}}
testing: {{beam_size: 5, beam_alpha: 0.6, batch_size: 64, max_output_length: 100}}
training:
  batch_size: {tokens}
  batch_type: "token"
  updates: {updates}
  epochs: 1000
  scheduling: "noam"
  learning_rate: 0.0001
  learning_rate_factor: {scale}
  learning_rate_warmup: {warmup}
  learning_rate_min: 0.00000001
  optimizer: "adam"
  adam_betas: [0.9, 0.98]
  normalization: "tokens"
  label_smoothing: 0.1
  logging_freq: 50
  validation_freq: {updates}
  early_stopping_metric: "ppl"
model:
  initializer: "xavier_uniform"
  bias_initializer: "zeros"
  embed_initializer: "xavier_uniform"
  tied_embeddings: True
  tied_softmax: True
  encoder: {sizes}
  decoder: {sizes}
"""
SIZES = """
    type: "transformer"
    num_layers: {num_layers}
    num_heads: {num_heads}
    embeddings: {{embedding_dim: {hidden_dim}, scale: True, dropout: 0.0}}
    hidden_size: {hidden_dim}
    ff_size: {intermediate_dim}
    dropout: {dropout}
    layer_norm: "post"
"""


def write_texts(home: Path, tokenizer: Any, texts: dict[str, list[Path]]) -> None:
    """Writes the vocabulary, and each file with our pieces between blanks."""
    from keras_aiayn.data import corpus

    home.mkdir(parents=True, exist_ok=True)
    pieces = tokenizer.pieces(range(tokenizer.vocabulary_size))
    (home / "vocabulary").write_text("\n".join(pieces[4:]) + "\n", encoding="utf-8")
    for paths in texts.values():
        for path in paths:
            lines = tokenizer.encode(list(corpus.read_lines(path)))
            words = (" ".join(pieces[i] for i in ids) for ids in lines)
            (home / path.name).write_text("\n".join(words) + "\n", encoding="utf-8")


def write_config(home: Path, model: Any, **training: Any) -> Path:
    """Writes its configuration for a `TransformerConfig`; `training` fills the template."""
    sizes = SIZES.format(**vars(model))
    path = home / "config.yaml"
    path.write_text(CONFIG.format(home=home.resolve(), sizes=sizes, **training), encoding="utf-8")
    return path


def environment(folder: Path) -> Path:
    """The interpreter of its environment."""
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        run(python, "-m", "pip", "install", "--quiet", *REQUIREMENTS)
        (folder / "installed").touch()
    return python


def run(*command: Any) -> None:
    """A command that must succeed."""
    subprocess.run([str(part) for part in command], check=True)


def work(config: Path) -> None:
    """A worker: trains by JoeyNMT's own steps on its own batches."""
    import workers
    from joeynmt.config import load_config, parse_global_args, set_validation_args
    from joeynmt.prediction import prepare
    from joeynmt.training import TrainManager

    args = parse_global_args(load_config(config), rank=0, mode="train")
    model, data, _, _ = prepare(args, rank=0, mode="train")
    manager = TrainManager(
        model=model, model_dir=args.model_dir, device=args.device, n_gpu=args.n_gpu, rank=0,
        num_workers=args.num_workers, autocast=args.autocast, seed=args.seed,
        train_args=args.train, dev_args=set_validation_args(args.test),
    )  # fmt: skip
    batches = data.make_iter(
        batch_size=args.train.batch_size, batch_type="token", seed=1, shuffle=True,
        eos_index=model.eos_index, pad_index=model.pad_index,
    )  # fmt: skip

    def handle(steps: int) -> dict[str, float]:
        model.train()
        model.zero_grad()
        batches.batch_sampler.set_seed(1)  # the same batches in every round
        tokens, began = 0, time.perf_counter()
        for number, batch in enumerate(batches, start=1):
            manager._train_step(batch)
            manager.optimizer.step()
            manager.scheduler.step(number)
            model.zero_grad()
            tokens += int(batch.ntokens)
            if number == steps:
                break
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    workers.serve(handle)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
