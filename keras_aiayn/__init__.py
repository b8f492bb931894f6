"""Attention Is All You Need (Vaswani et al., 2017) as a Keras 3 package.

Example:
```python
import keras
import keras_aiayn  # makes its classes known to Keras

translator = keras.saving.load_model("model.keras")
translator.translate(["A dog runs."])
```
"""

import sys as _sys
from pathlib import Path as _Path

__version__ = "0.1.0"

_AS_COMMAND = _Path(_sys.argv[0]).name == "keras-aiayn" or ("-m", "keras_aiayn") in zip(
    _sys.orig_argv, _sys.orig_argv[1:], strict=False
)
if not _AS_COMMAND:  # the command imports what its verb needs, and answers --help without Keras
    from keras_aiayn.config import TrainingConfig, TransformerConfig, table3
    from keras_aiayn.layers.attention import MultiHeadAttention, scaled_dot_product_attention
    from keras_aiayn.layers.decoder import TransformerDecoderBlock
    from keras_aiayn.layers.embedding import SharedEmbedding
    from keras_aiayn.layers.encoder import TransformerEncoderBlock
    from keras_aiayn.layers.feed_forward import PositionwiseFeedForward
    from keras_aiayn.layers.position import LearnedPositionEmbedding, SinusoidalPositionEncoding
    from keras_aiayn.training.loss import LabelSmoothedCrossentropy
    from keras_aiayn.training.metrics import TokenMetrics
    from keras_aiayn.training.schedule import NoamSchedule
    from keras_aiayn.transformer import Transformer
    from keras_aiayn.translator import Translation, Translator

    __all__ = [
        "LabelSmoothedCrossentropy",
        "LearnedPositionEmbedding",
        "MultiHeadAttention",
        "NoamSchedule",
        "PositionwiseFeedForward",
        "SharedEmbedding",
        "SinusoidalPositionEncoding",
        "TokenMetrics",
        "TrainingConfig",
        "TransformerConfig",
        "TransformerDecoderBlock",
        "TransformerEncoderBlock",
        "Transformer",
        "Translation",
        "Translator",
        "scaled_dot_product_attention",
        "table3",
    ]
