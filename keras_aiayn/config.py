"""Table 3: the sizes of models and the settings of their training, as plain values.

`TransformerConfig.base()`, `big()`, `small()`, `tiny()` and `table3(name)` for each row of the
paper's Table 3. Layers, model and search take keyword arguments and never see these objects.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from keras_aiayn.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The arguments of `Transformer`, by the same names.

    Raises:
        ValueError: where a value cannot be.
    """

    vocabulary_size: int
    num_layers: int = 6
    hidden_dim: int = 512
    intermediate_dim: int = 2048
    num_heads: int = 8
    key_dim: int | None = None
    value_dim: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    positions: str = "sinusoidal"
    max_length: int | None = None
    share_embeddings: bool = True
    target_vocabulary_size: int | None = None
    tie_projection: bool = True
    use_logits_bias: bool = False
    activation: str = "relu"
    normalize_first: bool = False
    layer_norm_epsilon: float = 1e-6
    use_bias: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Refuses what would fail later and further away."""
        sizes = ("vocabulary_size", "num_layers", "hidden_dim", "intermediate_dim", "num_heads")
        for name in sizes:
            _check(getattr(self, name) > 0, f"`{name}` must be positive", name, self)
        for name in ("dropout", "attention_dropout"):
            rate = getattr(self, name)
            _check(0.0 <= rate < 1.0, f"`{name}` must be at least 0 and below 1", name, self)

    @classmethod
    def base(cls, vocabulary_size: int = 37_000, **changes: Any) -> "TransformerConfig":
        """The base model: N 6, d_model 512, d_ff 2048, h 8, d_k = d_v = 64, P_drop 0.1."""
        return cls(**{"vocabulary_size": vocabulary_size, **changes})

    @classmethod
    def big(cls, vocabulary_size: int = 37_000, **changes: Any) -> "TransformerConfig":
        """The big model: N 6, d_model 1024, d_ff 4096, h 16, P_drop 0.3."""
        sizes = {"hidden_dim": 1024, "intermediate_dim": 4096, "num_heads": 16, "dropout": 0.3}
        return cls(**{"vocabulary_size": vocabulary_size, **sizes, **changes})

    @classmethod
    def small(cls, vocabulary_size: int = 8_000, **changes: Any) -> "TransformerConfig":
        """A model for some hundred thousand sentences: N 3, d_model 256, d_ff 1024, h 4."""
        sizes = {"num_layers": 3, "hidden_dim": 256, "intermediate_dim": 1024, "num_heads": 4}
        return cls(**{"vocabulary_size": vocabulary_size, **sizes, **changes})

    @classmethod
    def tiny(cls, vocabulary_size: int = 8_000, **changes: Any) -> "TransformerConfig":
        """A model for some ten thousand sentences: N 4, d_model 128, d_ff 256, h 4, P_drop 0.3."""
        sizes = {"num_layers": 4, "hidden_dim": 128, "intermediate_dim": 256, "num_heads": 4}
        return cls(**{"vocabulary_size": vocabulary_size, **sizes, "dropout": 0.3, **changes})

    @classmethod
    def of(cls, model: Transformer) -> "TransformerConfig":
        """The arguments that a model was made with."""
        arguments = model.get_config()
        names = [field.name for field in dataclasses.fields(cls) if field.name != "dtype"]
        dtype = model.target_embedding.dtype_policy.name
        return cls(**{name: arguments[name] for name in names}, dtype=dtype)

    def build(self, seed: int | None = None) -> Transformer:
        """The model. `seed` is that of dropout."""
        return Transformer(**dataclasses.asdict(self), seed=seed)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained; the defaults are the paper's where the paper says.

    Attributes:
        steps: updates.
        tokens_per_batch: of one update: rows times the longer padded side. 25,000 is the
            paper's "25,000 source tokens and 25,000 target tokens".
        label_smoothing: eps.
        warmup_steps: updates over which the learning rate rises.
        learning_rate_scale: a factor on the paper's rate.
        beta_1: Adam's decay of the first moment.
        beta_2: Adam's decay of the second moment.
        epsilon: Adam's.
        global_clipnorm: largest norm of the gradient over all weights; 0 for any.
        accumulation: micro-batches per update.
        remat: whether to compute the blocks again for their gradients instead of keeping what
            they computed: slower by a forward pass, in much less memory.
        max_shapes: most batch shapes, each of which JAX and XLA compile once.
        evaluate_every: updates between validations; 0 for one at the end only.
        evaluate_lines: most validation lines that are translated for BLEU; 0 for all.
        checkpoint_every: updates between checkpoints; 0 for as time alone says.
        checkpoint_minutes: time after which there is one sooner; 0 for never (10 in the paper).
        keep_last: checkpoints kept.
        keep_best: checkpoints kept beside them, of the best validations.
        best_by: what makes a validation better: `"bleu"` or `"perplexity"`.
        patience: validations in a row without a better one that end the run, whose result is
            then the best checkpoint; 0 for any number.
        corpus_weights: of each pair of training files that was prepared, in their order: how
            many times an epoch takes its pairs; none for once each.
        seed: of initial weights, dropout and the order of batches.
    """

    steps: int = 100_000
    tokens_per_batch: int = 25_000
    label_smoothing: float = 0.1
    warmup_steps: int = 4_000
    learning_rate_scale: float = 1.0
    beta_1: float = 0.9
    beta_2: float = 0.98
    epsilon: float = 1e-9
    global_clipnorm: float = 0.0
    accumulation: int = 1
    remat: bool = False
    max_shapes: int = 8
    evaluate_every: int = 1_000
    evaluate_lines: int = 0
    checkpoint_every: int = 1_000
    checkpoint_minutes: float = 0.0
    keep_last: int = 5
    keep_best: int = 0
    best_by: str = "bleu"
    patience: int = 0
    corpus_weights: tuple[float, ...] = ()
    seed: int = 1

    def __post_init__(self) -> None:
        """Refuses what would fail later and further away."""
        for name in (
            "steps",
            "tokens_per_batch",
            "warmup_steps",
            "learning_rate_scale",
            "epsilon",
            "accumulation",
            "max_shapes",
            "keep_last",
        ):
            value = getattr(self, name)
            _check(0 < value < math.inf, f"`{name}` must be positive", name, self)
        for name in ("beta_1", "beta_2"):
            _check(0 <= getattr(self, name) < 1, f"`{name}` must be in [0, 1)", name, self)
        for name in (
            "evaluate_every",
            "evaluate_lines",
            "checkpoint_every",
            "global_clipnorm",
            "checkpoint_minutes",
            "keep_best",
            "patience",
            "seed",
        ):
            _check(getattr(self, name) >= 0, f"`{name}` must not be negative", name, self)
        _check(
            self.checkpoint_every > 0 or self.checkpoint_minutes > 0,
            "`checkpoint_every` must be positive, or `checkpoint_minutes`",
            "checkpoint_every",
            self,
        )
        # Dropout counts on from it, in 32 bits.
        _check(self.seed <= LARGEST_SEED, f"`seed` must be at most {LARGEST_SEED}", "seed", self)
        _check(
            self.best_by in ("bleu", "perplexity"),
            '`best_by` must be "bleu" or "perplexity"',
            "best_by",
            self,
        )
        _check(
            all(0 < weight < math.inf for weight in self.corpus_weights),
            "`corpus_weights` must be positive",
            "corpus_weights",
            self,
        )
        smoothing = self.label_smoothing
        _check(
            0.0 <= smoothing < 1.0, "`label_smoothing` must be in [0, 1)", "label_smoothing", self
        )

    @property
    def best_kept(self) -> int:
        """How many of the best checkpoints are kept: with `patience` one at least."""
        return max(self.keep_best, int(self.patience > 0))


def _check(holds: bool, rule: str, name: str, config: Any) -> None:
    if not holds:
        raise ValueError(f"{rule}. Received: {name}={getattr(config, name)}")


LARGEST_SEED = 1_000_000_000

# What each row of Table 3 changes of base: (of the model, of the training).
TABLE_3: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base": ({}, {}),
    "A-h1": ({"num_heads": 1, "key_dim": 512, "value_dim": 512}, {}),
    "A-h4": ({"num_heads": 4, "key_dim": 128, "value_dim": 128}, {}),
    "A-h16": ({"num_heads": 16, "key_dim": 32, "value_dim": 32}, {}),
    "A-h32": ({"num_heads": 32, "key_dim": 16, "value_dim": 16}, {}),
    "B-dk16": ({"key_dim": 16, "value_dim": 64}, {}),
    "B-dk32": ({"key_dim": 32, "value_dim": 64}, {}),
    "C-N2": ({"num_layers": 2}, {}),
    "C-N4": ({"num_layers": 4}, {}),
    "C-N8": ({"num_layers": 8}, {}),
    "C-d256": ({"hidden_dim": 256, "key_dim": 32, "value_dim": 32}, {}),
    "C-d1024": ({"hidden_dim": 1024, "key_dim": 128, "value_dim": 128}, {}),
    "C-ff1024": ({"intermediate_dim": 1024}, {}),
    "C-ff4096": ({"intermediate_dim": 4096}, {}),
    "D-drop0.0": ({"dropout": 0.0}, {}),
    "D-drop0.2": ({"dropout": 0.2}, {}),
    "D-ls0.0": ({}, {"label_smoothing": 0.0}),
    "D-ls0.2": ({}, {"label_smoothing": 0.2}),
    "E-learned": ({"positions": "learned", "max_length": 512}, {}),
    "big": (
        {"hidden_dim": 1024, "intermediate_dim": 4096, "num_heads": 16, "dropout": 0.3},
        {"steps": 300_000},
    ),
}

# Small data and small batches want a shorter warm-up, or a run would end inside it.
SMALL_TRAINING: dict[str, Any] = {"steps": 10_000, "tokens_per_batch": 4_096, "warmup_steps": 1_000}


def table3(name: str, vocabulary_size: int = 37_000) -> tuple[TransformerConfig, TrainingConfig]:
    """A row of Table 3: what it changes of the base model and of its training.

    Args:
        name: `"base"`, `"A-h1"`, `"B-dk16"`, `"C-N2"`, `"D-ls0.0"`, `"E-learned"`, `"big"` ...
        vocabulary_size: V.

    Raises:
        ValueError: for a name that is not a row; it lists them.
    """
    if name not in TABLE_3:
        raise ValueError(f"Table 3 has no row {name!r}. Rows: {', '.join(TABLE_3)}")
    model, training = TABLE_3[name]
    return TransformerConfig.base(vocabulary_size, **model), TrainingConfig(**training)


def preset(name: str, vocabulary_size: int) -> tuple[TransformerConfig, TrainingConfig]:
    """`"tiny"`, `"small"`, or a row of Table 3 (`"base"` and `"big"` among them).

    Raises:
        ValueError: for another name; it lists them.
    """
    if name in ("tiny", "small"):
        make = getattr(TransformerConfig, name)
        return make(vocabulary_size), TrainingConfig(**SMALL_TRAINING)
    if name not in TABLE_3:
        raise ValueError(
            f"There is no configuration {name!r}. Choose from tiny, small, {', '.join(TABLE_3)}"
        )
    return table3(name, vocabulary_size)


def with_settings(
    configs: tuple[TransformerConfig, TrainingConfig], settings: list[str]
) -> tuple[TransformerConfig, TrainingConfig]:
    """Both configurations with `name=value` settings applied to whichever has the name.

    Raises:
        ValueError: for an unknown name, or a value of another type.
    """
    changes: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    fields = [{field.name: field for field in dataclasses.fields(config)} for config in configs]
    for setting in settings:
        name, separator, text = setting.partition("=")
        owner = next((i for i in range(2) if name in fields[i]), None)
        if not separator or owner is None:
            names = ", ".join(sorted(fields[0] | fields[1]))
            raise ValueError(f"A setting is NAME=VALUE. Received: {setting!r}. Names: {names}")
        kind = fields[owner][name].type
        written = kind.__name__ if isinstance(kind, type) else str(kind)
        changes[owner][name] = _parse(name, text, written)
    model, training = configs
    return dataclasses.replace(model, **changes[0]), dataclasses.replace(training, **changes[1])


def _parse(name: str, text: str, kind: str) -> Any:
    """The value of a field whose type is written `kind`, as in `int | None`."""
    if "None" in kind and text.lower() in ("none", ""):
        return None
    try:
        if "bool" in kind:
            return {"true": True, "false": False}[text.lower()]
        if "int" in kind:
            return int(text.replace("_", ""))
        if "tuple" in kind:
            return tuple(float(part) for part in text.split(","))
        if "float" in kind:
            return float(text)
    except (ValueError, KeyError):
        raise ValueError(f"`{name}` takes a value of type {kind}. Received: {text!r}") from None
    return text
