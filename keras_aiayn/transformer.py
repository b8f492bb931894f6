"""Figure 1: the encoder-decoder Transformer, as a functional Keras model.

The paper's symbols and the names used here:

| paper  | here                                     | base  |
|--------|------------------------------------------|-------|
| N      | `num_layers`                             | 6     |
| d_model| `hidden_dim`                             | 512   |
| d_ff   | `intermediate_dim`                       | 2048  |
| h      | `num_heads`                              | 8     |
| d_k    | `key_dim`                                | 64    |
| d_v    | `value_dim`                              | 64    |
| P_drop | `dropout`                                | 0.1   |

Axes: B batch, S source, T target, V vocabulary, d `hidden_dim`, L capacity of a cache.
"""

import random
import types
from typing import Any

import keras

from keras_aiayn import masking
from keras_aiayn.layers.decoder import TransformerDecoderBlock
from keras_aiayn.layers.embedding import SharedEmbedding
from keras_aiayn.layers.encoder import TransformerEncoderBlock
from keras_aiayn.layers.position import LearnedPositionEmbedding, SinusoidalPositionEncoding
from keras_aiayn.layers.precision import check_mode, is_matrix, policies

# Blocks draw their dropout seeds from ranges this far apart (see layers/residual.py).
BLOCK_SEED_STEP = 10_000_019


@keras.saving.register_keras_serializable(package="keras_aiayn")
class Transformer(keras.Model):
    """Maps source tokens and earlier target tokens to logits of the next target token.

    A functional model: `model({"encoder_token_ids": ..., "decoder_token_ids": ...})` gives
    float32 logits (B, T, V), and `fit` trains it. The parts of the forward pass are methods, and
    the graph is made by calling exactly these.

    Args:
        vocabulary_size: V, of source and target, or of the source where
            `target_vocabulary_size` is given.
        num_layers: N, of the encoder and of the decoder.
        hidden_dim: d_model, even.
        intermediate_dim: d_ff.
        num_heads: h.
        key_dim: d_k; `hidden_dim // num_heads` by default.
        value_dim: d_v; `key_dim` by default.
        dropout: P_drop, on every sub-layer's output and on the sums of embeddings and positions.
        attention_dropout: rate on the attention weights (0 in the paper).
        positions: `"sinusoidal"` or `"learned"` (Table 3, row E).
        max_length: number of learned positions.
        share_embeddings: whether source and target have one matrix (section 3.4).
        target_vocabulary_size: of the target, where the embeddings are not shared.
        tie_projection: whether the projection is the transpose of the target embedding.
        use_logits_bias: whether a bias is added to the logits (not in the paper).
        activation: of the feed-forward networks.
        normalize_first: pre-norm instead of the paper's post-norm.
        layer_norm_epsilon: added to the variance.
        use_bias: whether the projections of attention have a bias (not in the paper).
        seed: of dropout; drawn from Python's generator by default, so that
            `keras.utils.set_random_seed` governs it.
        dtype: a dtype policy: `"float32"`, `"mixed_bfloat16"`, or `"int8_from_float32"` for a model
            whose weights were quantised; Keras's own by default.

    Raises:
        ValueError: where the arguments contradict each other.
    """

    def __init__(
        self,
        vocabulary_size,
        num_layers=6,
        hidden_dim=512,
        intermediate_dim=2048,
        num_heads=8,
        key_dim=None,
        value_dim=None,
        dropout=0.1,
        attention_dropout=0.0,
        positions="sinusoidal",
        max_length=None,
        share_embeddings=True,
        target_vocabulary_size=None,
        tie_projection=True,
        use_logits_bias=False,
        activation="relu",
        normalize_first=False,
        layer_norm_epsilon=1e-6,
        use_bias=False,
        seed=None,
        dtype=None,
        name="transformer",
        **kwargs,
    ):
        arguments = {
            "vocabulary_size": vocabulary_size,
            "num_layers": num_layers,
            "hidden_dim": hidden_dim,
            "intermediate_dim": intermediate_dim,
            "num_heads": num_heads,
            "key_dim": key_dim,
            "value_dim": value_dim,
            "dropout": dropout,
            "attention_dropout": attention_dropout,
            "positions": positions,
            "max_length": max_length,
            "share_embeddings": share_embeddings,
            "target_vocabulary_size": target_vocabulary_size,
            "tie_projection": tie_projection,
            "use_logits_bias": use_logits_bias,
            "activation": activation,
            "normalize_first": normalize_first,
            "layer_norm_epsilon": layer_norm_epsilon,
            "use_bias": use_bias,
            "seed": random.randrange(2**30) if seed is None else seed,
            "dtype": dtype,
        }
        _check(arguments)
        # Layers become attributes only after `super().__init__`: torch refuses them before.
        parts = _make_parts(**arguments)
        inputs = {
            "encoder_token_ids": keras.Input((None,), dtype="int32", name="encoder_token_ids"),
            "decoder_token_ids": keras.Input((None,), dtype="int32", name="decoder_token_ids"),
        }
        super().__init__(inputs, _forward(parts, **inputs), name=name, **kwargs)
        for attribute, part in vars(parts).items():
            setattr(self, attribute, part)
        self.vocabulary_size = vocabulary_size
        self.target_vocabulary_size = target_vocabulary_size or vocabulary_size
        self.max_length = max_length
        self._arguments = arguments

    def build_masks(self, encoder_token_ids, decoder_token_ids):
        """The masks of the three attentions (section 3.2.3).

        Args:
            encoder_token_ids: (B, S).
            decoder_token_ids: (B, T).

        Returns:
            `encoder_mask` (B, 1, S), `decoder_mask` (B, T, T), `memory_mask` (B, 1, S).
        """
        return _build_masks(encoder_token_ids, decoder_token_ids)

    def encode(self, encoder_token_ids, encoder_mask, training=None):
        """The encoder: ids (B, S) to memory (B, S, d)."""
        return _encode(self, encoder_token_ids, encoder_mask, training)

    def decode(
        self,
        decoder_token_ids,
        memory,
        decoder_mask,
        memory_mask,
        cache=None,
        cache_index=0,
        positions=None,
        training=None,
    ):
        """The decoder: ids (B, T) and memory (B, S, d) to hidden (B, T, d).

        With a cache the ids are new ones only, and `memory` is not read.

        Args:
            decoder_token_ids: (B, T).
            memory: (B, S, d); may be None with a cache.
            decoder_mask: booleans (B, T, T), with a cache (B, T, L).
            memory_mask: booleans (B, 1, S).
            cache: what `init_cache` or the last call gave.
            cache_index: row of the cache at which the T new rows begin.
            positions: of the ids, integers that broadcast to (B, T); from 0 on by default.
            training: whether dropout is on.

        Returns:
            hidden (B, T, d), or with a cache `(hidden, cache)`.
        """
        return _decode(
            self,
            decoder_token_ids,
            memory,
            decoder_mask,
            memory_mask,
            cache,
            cache_index,
            positions,
            training,
        )

    def init_cache(self, memory, length):
        """An empty cache of `length` rows for `decode`, the memory (B, S, d) projected once."""
        return [block.init_cache(memory, length) for block in self.decoder_blocks]

    def take_from_cache(self, cache, batch, rows, memory):
        """A cache made of parts of another one; see `TransformerDecoderBlock.take_from_cache`."""
        return [
            block.take_from_cache(layer, batch, rows, memory)
            for block, layer in zip(self.decoder_blocks, cache, strict=True)
        ]

    def output_projection(self, hidden):
        """Hidden (B, T, d) to float32 logits (B, T, V)."""
        return self.target_embedding(hidden, reverse=True)

    def attention_scores(self, encoder_token_ids, decoder_token_ids):
        """The attention weights of every layer for given pairs.

        Returns:
            A dict of lists with one array a layer: `"encoder"` (B, H, S, S), `"decoder"`
            (B, H, T, T) and `"cross"` (B, H, T, S).
        """
        encoder_mask, decoder_mask, memory_mask = _build_masks(encoder_token_ids, decoder_token_ids)
        scores: dict[str, list] = {"encoder": [], "decoder": [], "cross": []}
        x = _embed(self, self.source_embedding, self.encoder_dropout, encoder_token_ids)
        for block in self.encoder_blocks:
            x, weights = block(x, attention_mask=encoder_mask, return_attention_scores=True)
            scores["encoder"].append(weights)
        memory = _normalize(self.encoder_norm, x)
        x = _embed(self, self.target_embedding, self.decoder_dropout, decoder_token_ids)
        for block in self.decoder_blocks:
            x, weights = block(
                x,
                memory,
                self_attention_mask=decoder_mask,
                memory_mask=memory_mask,
                return_attention_scores=True,
            )
            scores["decoder"].append(weights["self"])
            scores["cross"].append(weights["cross"])
        return scores

    @property
    def quantized_to(self):
        """What the weights were quantised to, `"int8"`, or None."""
        return self.target_embedding.table.quantization_mode

    def quantize(self, mode=None, config=None, filters=None, **kwargs):
        """Quantises the weights of all matrices in place, as Keras does; there is no way back.

        Biases, learned positions and normalisations stay as they are.

        Args:
            mode: `"int8"`.
            config: Keras's own of that mode; a file says no more than the mode.
            filters: none, for the same reason: a model is quantised as a whole.
            **kwargs: of Keras.

        Raises:
            ValueError: for another mode, and where the model is quantised already.
        """
        check_mode(mode)
        if self.quantized_to is not None:
            raise ValueError(f"the model is quantised already, to {self.quantized_to}")
        own = keras.quantizers.Int8QuantizationConfig().get_config()
        if filters is not None or (config is not None and config.get_config() != own):
            raise ValueError("a model is quantised as a whole, and as Keras does by default")
        # Keras would ask every layer, and warn of each that has no matrix.
        super().quantize(mode, filters=is_matrix, **kwargs)

    def compile(self, *args, **kwargs):
        """As any Keras model; a loss with `statistics` and `metrics` of its tokens brings them."""
        super().compile(*args, **kwargs)
        self._tracker.unlock()  # Keras locks a model as it quantises it
        if getattr(self, "token_metrics", None) is not None:
            self._tracker.untrack(self.token_metrics)  # or they would be reported for ever
        self.token_metrics: Any = self.loss.metrics() if hasattr(self.loss, "statistics") else None
        if self.token_metrics is not None:
            # `compute_loss` does without. Never called, it would be built at the beginning of each
            # `fit`, for which Keras traces the whole model.
            self._compile_loss = None

    def get_compile_config(self):
        """As Keras does, but for any backend: Keras writes down what suits the present one.

        That is the name of torch's own class of the optimizer, which no other backend can run,
        and whether this one compiles, which the next one has to decide anew.
        """
        config = super().get_compile_config()
        if not config:  # not compiled
            return config
        optimizer = config["optimizer"]
        if optimizer and optimizer["module"].startswith("keras.src.backend.torch."):
            optimizer.update(module="keras.optimizers", registered_name=None)
        return config | {"jit_compile": "auto"}

    def compile_from_config(self, config):
        """As Keras does for a model whose `compile` is its own."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        self.optimizer.build(self.trainable_variables)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """The loss, and in the same pass over the logits what the metrics need."""
        if training and self.quantized_to is not None:
            raise ValueError(
                f"a model of {self.quantized_to} cannot be trained: "
                "train the one that it was quantised from"
            )
        if self.token_metrics is None:
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        statistics = self.loss.statistics(y, y_pred)
        self.token_metrics.update_from(statistics)
        return self.loss.reduce(statistics, sample_weight) + sum(self.losses)

    def get_config(self):
        """The constructor's arguments."""
        # Written out here only: Keras imports TensorFlow, where it is installed, to serialise.
        policy = keras.dtype_policies.serialize(self.target_embedding.table.dtype_policy)
        own = {**self._arguments, "dtype": policy}
        return {**own, "name": self.name, "trainable": self.trainable}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes the model from the constructor's arguments."""
        return cls(**config)


def _check(arguments):
    size, target_size = arguments["vocabulary_size"], arguments["target_vocabulary_size"]
    if arguments["share_embeddings"] and target_size not in (None, size):
        raise ValueError(
            "Shared embeddings need one vocabulary; with two, pass share_embeddings=False. "
            f"Received: vocabulary_size={size}, target_vocabulary_size={target_size}"
        )
    hidden_dim, num_heads = arguments["hidden_dim"], arguments["num_heads"]
    if arguments["key_dim"] is None and hidden_dim % num_heads:
        raise ValueError(
            "`hidden_dim` must be a multiple of `num_heads` where `key_dim` is not given. "
            f"Received: hidden_dim={hidden_dim}, num_heads={num_heads}"
        )
    positions, max_length = arguments["positions"], arguments["max_length"]
    if positions not in ("sinusoidal", "learned"):
        raise ValueError(
            f'`positions` must be "sinusoidal" or "learned". Received: positions={positions!r}'
        )
    if (positions == "learned") != (max_length is not None):
        raise ValueError(
            "`max_length` is the number of learned positions: give it with them, and only then. "
            f"Received: positions={positions!r}, max_length={max_length}"
        )


def _make_parts(
    vocabulary_size,
    num_layers,
    hidden_dim,
    positions,
    max_length,
    share_embeddings,
    target_vocabulary_size,
    tie_projection,
    use_logits_bias,
    seed,
    dtype,
    **block_arguments,
):
    """All layers, by name."""
    own, of_matrices = policies(dtype)

    def embedding(size, name, **options):
        return SharedEmbedding(size, hidden_dim, dtype=of_matrices, name=name, **options)

    def block(kind, index, name):
        # The width of a head is known only here: a block would take it from its inputs.
        options = block_arguments | {
            "key_dim": block_arguments["key_dim"] or hidden_dim // block_arguments["num_heads"],
            "seed": seed + BLOCK_SEED_STEP * (index + 1),
        }
        return kind(**options, dtype=of_matrices, name=name)

    def dropout(name, offset):
        rate = block_arguments["dropout"]
        return keras.layers.Dropout(rate, seed=seed + offset, dtype=own, name=name)

    def final_norm(name):
        # Pre-norm leaves the last sum of a stack unnormalised.
        if not block_arguments["normalize_first"]:
            return None
        epsilon = block_arguments["layer_norm_epsilon"]
        return keras.layers.LayerNormalization(epsilon=epsilon, dtype=own, name=name)

    projection = {"tie_projection": tie_projection, "use_logits_bias": use_logits_bias}
    if share_embeddings:
        source = target = embedding(vocabulary_size, "embedding", **projection)
    else:
        source = embedding(vocabulary_size, "source_embedding")
        target = embedding(
            target_vocabulary_size or vocabulary_size, "target_embedding", **projection
        )
    if positions == "learned":
        position = LearnedPositionEmbedding(max_length, dtype=own, name="position")
    else:
        position = SinusoidalPositionEncoding(dtype=own, name="position")
    return types.SimpleNamespace(
        source_embedding=source,
        target_embedding=target,
        position=position,
        encoder_dropout=dropout("encoder_dropout", 0),
        decoder_dropout=dropout("decoder_dropout", BLOCK_SEED_STEP // 2),
        encoder_blocks=[
            block(TransformerEncoderBlock, i, f"encoder_block_{i}") for i in range(num_layers)
        ],
        decoder_blocks=[
            block(TransformerDecoderBlock, num_layers + i, f"decoder_block_{i}")
            for i in range(num_layers)
        ],
        encoder_norm=final_norm("encoder_norm"),
        decoder_norm=final_norm("decoder_norm"),
    )


# The forward pass. `parts` is the model, or its layers while the model is being made.


def _forward(parts, encoder_token_ids, decoder_token_ids):
    encoder_mask, decoder_mask, memory_mask = _build_masks(encoder_token_ids, decoder_token_ids)
    memory = _encode(parts, encoder_token_ids, encoder_mask)
    hidden = _decode(parts, decoder_token_ids, memory, decoder_mask, memory_mask)
    return parts.target_embedding(hidden, reverse=True)


def _build_masks(encoder_token_ids, decoder_token_ids):
    source_mask = masking.padding_mask(encoder_token_ids)
    return source_mask, masking.decoder_mask(decoder_token_ids), source_mask


def _embed(parts, embedding, dropout, token_ids, positions=None, training=None):
    x = embedding(token_ids, training=training)
    return dropout(parts.position(x, positions=positions), training=training)


def _normalize(norm, x):
    return x if norm is None else norm(x)


def _encode(parts, token_ids, mask, training=None):
    x = _embed(parts, parts.source_embedding, parts.encoder_dropout, token_ids, None, training)
    for block in parts.encoder_blocks:
        x = block(x, attention_mask=mask, training=training)
    return _normalize(parts.encoder_norm, x)


def _decode(
    parts,
    token_ids,
    memory,
    decoder_mask,
    memory_mask,
    cache=None,
    cache_index=0,
    positions=None,
    training=None,
):
    embedding, dropout = parts.target_embedding, parts.decoder_dropout
    x = _embed(parts, embedding, dropout, token_ids, positions, training)
    masks = {"self_attention_mask": decoder_mask, "memory_mask": memory_mask}
    new_cache = []
    for i, block in enumerate(parts.decoder_blocks):
        if cache is None:
            x = block(x, memory, **masks, training=training)
        else:
            x, layer_cache = block(
                x, memory, **masks, cache=cache[i], cache_index=cache_index, training=training
            )
            new_cache.append(layer_cache)
    hidden = _normalize(parts.decoder_norm, x)
    return hidden if cache is None else (hidden, new_cache)
