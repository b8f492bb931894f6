"""Training speed beside JoeyNMT, transformers' Marian, KerasHub's blocks and torch's Transformer.

    python benchmarks/train.py --size tiny --folder /tmp/train

Counted are real target tokens a second, pads and pipeline included, after compilation, over an
evenly drawn sample of the batches of an epoch of Multi30k, English to German, vocabulary 8,000:

    ours                on each backend: our plan, pipeline and `fit`
    KerasHub's blocks   on each backend: our plan and pipeline, its layers, our loss
    nn.Transformer      our plan and pipeline, a plain loop
    Marian              its `Trainer`'s batches of like length, as many sentences a batch as ours
    JoeyNMT             its own batches of as many tokens, in an environment of its own

The corpus is $AIAYN_DATA/multi30k. The others come with the extra [bench].
"""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import joey
import workers
from multi30k import opened, texts

BACKENDS = {"TensorFlow": "tensorflow", "JAX": "jax", "PyTorch": "torch"}
# Steps of a timing: about half a minute of each.
STEPS = {"tiny": 80, "small": 30, "base": 6}
TOKENS = 4_096


def sample(data: Any, steps: int, tokens: int) -> tuple[Any, Any, int]:
    """An evenly drawn part of the plan of an epoch, as a plan, and its real target tokens."""
    from keras_aiayn.data import batching

    whole = batching.plan(
        data.train.source_lengths(), data.train.target_lengths(), tokens_per_batch=tokens, seed=1,
        epoch=0,
    )  # fmt: skip
    chosen = [len(whole) * step // steps for step in range(steps)]
    parts = {
        name: getattr(whole, name)[chosen]
        for name in ("_starts", "_stops", "_shape_ids", "_source_tokens", "_target_tokens")
    }
    plan = dataclasses.replace(whole, **parts)
    return plan, batching.dataset(data.train, plan), sum(map(plan.target_tokens, range(steps)))


def config_of(size: str, vocabulary_size: int) -> Any:
    """The sizes, with the paper's dropout for all."""
    from keras_aiayn import TransformerConfig

    return getattr(TransformerConfig, size)(vocabulary_size, dropout=0.1)


def adam(config: Any) -> Any:
    """The paper's."""
    import keras

    from keras_aiayn import NoamSchedule

    schedule = NoamSchedule(config.hidden_dim, 4_000)
    return keras.optimizers.Adam(schedule, beta_1=0.9, beta_2=0.98, epsilon=1e-9)


def fitted(model: Any, data: Any, options: argparse.Namespace) -> Any:
    """A handler that fits a compiled model to the sample."""
    from keras_aiayn.memory import keep_freed_memory

    keep_freed_memory()
    _, dataset, tokens = sample(data, options.steps, options.tokens)

    def handle() -> dict[str, float]:
        began = time.perf_counter()
        model.fit(dataset, shuffle=False, verbose=0)
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    return handle


def ours(options: argparse.Namespace) -> Any:
    """This package."""
    from keras_aiayn import LabelSmoothedCrossentropy
    from keras_aiayn.memory import keep_freed_memory

    keep_freed_memory()  # before the first operation
    data = opened(options.folder)
    config = config_of(options.size, data.source_tokenizer.vocabulary_size)
    model = config.build(seed=1)
    model.compile(adam(config), LabelSmoothedCrossentropy(0.1))
    model.optimizer.build(model.trainable_variables)
    return fitted(model, data, options)


def keras_hub(options: argparse.Namespace) -> Any:
    """KerasHub's blocks and embeddings, put together as its guide for translation does."""
    import keras
    import keras_hub

    from keras_aiayn import LabelSmoothedCrossentropy

    data = opened(options.folder)
    config = config_of(options.size, data.source_tokenizer.vocabulary_size)
    names = ("encoder_token_ids", "decoder_token_ids")
    inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in names}
    embedding = keras_hub.layers.ReversibleEmbedding(config.vocabulary_size, config.hidden_dim)
    x, y = (embedding(inputs[name]) * config.hidden_dim**0.5 for name in names)
    x, y = (side + keras_hub.layers.SinePositionEncoding()(side) for side in (x, y))
    pads = keras.layers.Lambda(lambda ids: ids != 0, output_shape=lambda shape: shape)
    mask = pads(inputs["encoder_token_ids"])
    sizes = {"intermediate_dim": config.intermediate_dim, "num_heads": config.num_heads,
             "dropout": config.dropout}  # fmt: skip
    for _ in range(config.num_layers):
        x = keras_hub.layers.TransformerEncoder(**sizes)(x, padding_mask=mask)
    for _ in range(config.num_layers):
        y = keras_hub.layers.TransformerDecoder(**sizes)(y, x, encoder_padding_mask=mask)
    model = keras.Model(inputs, embedding(y, reverse=True))
    model.compile(adam(config), LabelSmoothedCrossentropy(0.1))
    return fitted(model, data, options)


def torch_transformer(options: argparse.Namespace) -> Any:
    """`torch.nn.Transformer` in a plain loop over our batches."""
    import numpy as np
    import torch

    from keras_aiayn.layers.position import SinusoidalPositionEncoding

    data = opened(options.folder)
    config = config_of(options.size, data.source_tokenizer.vocabulary_size)
    width = config.hidden_dim
    embedding = torch.nn.Embedding(config.vocabulary_size, width)
    transformer = torch.nn.Transformer(
        width, config.num_heads, config.num_layers, config.num_layers, config.intermediate_dim,
        config.dropout, batch_first=True,
    )  # fmt: skip
    encodings = SinusoidalPositionEncoding.encode(np.arange(512), width)
    positions = torch.tensor(np.asarray(encodings.detach()))
    parameters = [*embedding.parameters(), *transformer.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-4, (0.9, 0.98), 1e-9)
    loss = torch.nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
    drop = torch.nn.Dropout(config.dropout)
    _, dataset, tokens = sample(data, options.steps, options.tokens)

    def embed(ids: torch.Tensor) -> torch.Tensor:
        return drop(embedding(ids) * width**0.5 + positions[: ids.shape[1]])

    def handle() -> dict[str, float]:
        began = time.perf_counter()
        for inputs, targets, _ in dataset.as_numpy_iterator():
            source, target = (torch.from_numpy(ids).long() for ids in inputs.values())
            pads = source == 0
            later = torch.nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            hidden = transformer(
                embed(source), embed(target), tgt_mask=later, src_key_padding_mask=pads,
                memory_key_padding_mask=pads, tgt_is_causal=True,
            )  # fmt: skip
            logits = hidden @ embedding.weight.T
            optimizer.zero_grad()
            loss(logits.flatten(0, 1), torch.from_numpy(targets).long().flatten()).backward()
            optimizer.step()
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    return handle


def marian(options: argparse.Namespace) -> Any:
    """Marian of transformers, on batches as its `Trainer` groups them by length."""
    import torch
    from marian import empty
    from transformers.trainer_pt_utils import LabelSmoother, LengthGroupedSampler

    data = opened(options.folder)
    config = config_of(options.size, data.source_tokenizer.vocabulary_size)
    model = empty(config.build(seed=1), max_length=512, dropout=config.dropout).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, (0.9, 0.98), 1e-9, weight_decay=0.0)
    plan, _, _ = sample(data, options.steps, options.tokens)
    sentences = round(sum(len(plan.indices(batch)) for batch in range(len(plan))) / len(plan))
    lengths = data.train.source_lengths().tolist()
    smoother = LabelSmoother(0.1)

    def pair(index: int) -> dict[str, list[int]]:
        both = {}
        for side, name in (("source", "input_ids"), ("target", "labels")):
            tokens, offsets = (
                getattr(data.train, f"{side}_{what}") for what in ("tokens", "offsets")
            )
            both[name] = [*tokens[offsets[index] : offsets[index + 1]].tolist(), 3]
        return both | {"attention_mask": [1] * len(both["input_ids"])}

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """As `DataCollatorForSeq2Seq`, which wants a tokenizer of theirs."""
        pads = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {
            name: torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=pad
            )
            for name, pad in pads.items()
        }

    generator = torch.Generator().manual_seed(1)
    sampler = LengthGroupedSampler(sentences, lengths=lengths, generator=generator)
    order = list(sampler)
    groups = [order[at : at + sentences] for at in range(0, len(order), sentences)]
    chosen = [groups[len(groups) * step // options.steps] for step in range(options.steps)]
    batches = torch.utils.data.DataLoader(
        [[pair(i) for i in group] for group in chosen], batch_size=None, collate_fn=collate
    )

    def handle() -> dict[str, float]:
        tokens, began = 0, time.perf_counter()
        for batch in batches:
            batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(
                batch["labels"]
            )
            labels = batch.pop("labels")
            outputs = model(**batch)
            loss = smoother(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as the Trainer does
            optimizer.step()
            tokens += int((labels != -100).sum())
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    return handle


def products(config: Any, rows: int, source: int, target: int) -> list[tuple[int, ...]]:
    """Every product of matrices of a training step: (number, batch, m, k, n).

    The gradient of a product is two more, with m, k and n in another order.
    """
    d, ff, heads = config.hidden_dim, config.intermediate_dim, config.num_heads
    size, layers = d // heads, config.num_layers
    forward = []
    for length, keys, blocks in ((source, source, layers), (target, target, layers),
                                 (target, source, layers)):  # fmt: skip
        forward += [
            (2 * blocks, 1, rows * length, d, d),  # queries and output
            (2 * blocks, 1, rows * keys, d, d),
            (blocks, rows * heads, length, size, keys),
            (blocks, rows * heads, length, keys, size),
        ]
    for length in (source, target):
        forward += [(layers, 1, rows * length, d, ff), (layers, 1, rows * length, ff, d)]
    forward.append((1, 1, rows * target, d, config.vocabulary_size))
    return [
        (number, batch, *sides)
        for number, batch, m, k, n in forward
        for sides in ((m, k, n), (m, n, k), (k, m, n))
    ]


def arithmetic(options: argparse.Namespace) -> Any:
    """The matrix products of the sample alone, on our backend."""
    import numpy as np
    from keras import ops

    from keras_aiayn.decoding.compiled import compiled

    data = opened(options.folder)
    config = config_of(options.size, data.source_tokenizer.vocabulary_size)
    plan, _, _ = sample(data, options.steps, options.tokens)
    counts: dict[tuple[int, ...], int] = {}
    for batch in range(len(plan)):
        for number, *sides in products(config, *plan.shape(batch)):
            counts[tuple(sides)] = counts.get(tuple(sides), 0) + number
    generator = np.random.default_rng(1)
    model = config.build(seed=1)  # `compiled` wants one
    run = compiled(model, lambda a, b: ops.max(ops.matmul(a, b)))

    def seconds_of(batch: int, m: int, k: int, n: int) -> float:
        a, b = (generator.normal(size=(batch, *s)).astype("float32") for s in ((m, k), (k, n)))
        a, b = (ops.convert_to_tensor(side) for side in (a, b))
        run(a, b)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            run(a, b)
            times.append(time.perf_counter() - began)
        return min(times)

    def handle() -> dict[str, float]:
        seconds = sum(count * seconds_of(*sides) for sides, count in counts.items())
        flops = sum(2 * b * m * k * n * count for (b, m, k, n), count in counts.items())
        return {"seconds": seconds, "tokens": 0, "flops": flops}

    return handle


KINDS = {"ours": ours, "KerasHub": keras_hub, "nn.Transformer": torch_transformer,
         "Marian": marian, "products": arithmetic}  # fmt: skip


def start(name: str, options: argparse.Namespace) -> workers.Worker:
    """The process of a system, by the name of its row."""
    if name == "JoeyNMT":
        data = opened(options.folder)
        home = options.folder / f"joeynmt-{options.size}"
        splits = {split: texts(split) for split in ("train", "val", "test_2016_flickr")}
        joey.write_texts(home, data.source_tokenizer, splits)
        config = joey.write_config(
            home, config_of(options.size, data.source_tokenizer.vocabulary_size),
            tokens=options.tokens, updates=10_000, scale=1.0, warmup=4_000,
        )  # fmt: skip
        return workers.Worker(
            joey.__file__, config, python=str(joey.environment(options.folder / "joeynmt"))
        )
    kind, _, backend = name.partition(", ")
    return workers.Worker(
        __file__, "--folder", options.folder, "--size", options.size, "--tokens", options.tokens,
        "--steps", options.steps, "--worker", kind, backend=BACKENDS.get(backend, "torch"),
    )  # fmt: skip


def main() -> None:
    """Compares, or as a worker trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="For what is made once.")
    parser.add_argument("--size", choices=list(STEPS), default="tiny")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="Of a batch, a side, padded.")
    parser.add_argument("--steps", type=int, help="Of a timing.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", help="Only systems whose names begin so.")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or STEPS[options.size]
    if options.worker:
        workers.serve(KINDS[options.worker](options))
        return
    names = [
        f"{kind}, {backend}" for kind in ("ours", "products", "KerasHub") for backend in BACKENDS
    ]
    names += ["nn.Transformer", "Marian", "JoeyNMT"]
    names = [n for n in names if not options.only or n.startswith(tuple(options.only))]
    options.folder.mkdir(parents=True, exist_ok=True)
    opened(options.folder)
    running = {name: start(name, options) for name in names}
    answers = {
        name: workers.rounds({name: worker}, 0, **request(name, options))[name]
        for name, worker in running.items()
    }
    for _ in range(options.rounds):
        for name, worker in running.items():
            time.sleep(0.3)
            answers[name].append(worker.ask(**request(name, options)))
    for worker in running.values():
        worker.close()
    report(answers, options)


def request(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a worker has to know: JoeyNMT the number of steps."""
    return {"steps": options.steps} if name == "JoeyNMT" else {}


def report(answers: dict[str, list[dict]], options: argparse.Namespace) -> None:
    """Writes the table."""
    speeds = {
        name: [answer["tokens"] / answer["seconds"] for answer in each]
        for name, each in answers.items()
        if not name.startswith("products")
    }
    peers = {name: own for name, own in speeds.items() if not name.startswith("ours")}
    middle = {name: sorted(own)[len(own) // 2] for name, own in speeds.items()}
    best = max(peers, key=middle.__getitem__, default=None)
    rows = []
    for name, own in speeds.items():
        ratio = f"{workers.median_ratio(own, speeds[best]):.2f}" if best else ""
        share = ""
        alone = answers.get(name.replace("ours", "products"))
        if name.startswith("ours") and alone:
            pairs = zip(alone, answers[name], strict=True)
            shares = sorted(one["seconds"] / other["seconds"] for one, other in pairs)
            share = f"{shares[len(shares) // 2]:.2f}"
        rows.append([name, f"{middle[name]:,.0f}", ratio, share])
    header = ["system", "real target tokens/s", f"over {best}", "share of matrix products"]
    workers.write_section(f"Training, {options.size}", workers.table(header, rows))


if __name__ == "__main__":
    main()
