"""Validation: perplexity of all pairs, BLEU of real beam output."""

import importlib.util
from typing import Any

from keras_aiayn.config import TrainingConfig
from keras_aiayn.data import batching
from keras_aiayn.data.prepared import Prepared
from keras_aiayn.evaluation import corpus_scores
from keras_aiayn.training import report
from keras_aiayn.training.distribution import Devices
from keras_aiayn.translator import Translator


def check_installed() -> None:
    """Refuses a run whose first validation could not be scored."""
    if importlib.util.find_spec("sacrebleu") is None:
        raise ImportError("validation needs sacreBLEU: pip install 'keras-aiayn[train]'")


def validate(
    data: Prepared, translator: Translator, config: TrainingConfig, own: Devices
) -> dict[str, Any]:
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
    dataset, steps = own.feed(
        batching.dataset(data.valid, plan, replicas=own.replicas, parts=own.parts)
    )
    translator.model.evaluate(dataset, steps=steps, verbose=0)
    means = own.metrics(translator.model)
    # Words do not depend on the vocabulary, so models with others can be compared.
    words = sum(len(text.split()) for text in data.valid.target_texts())
    nats_a_word = means["nll"] * int(lengths[1].sum()) / max(1, words)
    return {
        "valid_nll": means["nll"],
        "valid_perplexity": report.perplexity(means["nll"]),
        "valid_word_perplexity": report.perplexity(nats_a_word),
        "valid_token_accuracy": means["token_accuracy"],
        **own.first(lambda: _judge_translations(data.valid, translator, config)),
    }


def _judge_translations(valid: Any, translator: Translator, config: TrainingConfig) -> dict:
    """BLEU and what else the translations of the first validation lines tell."""
    lines = slice(config.evaluate_lines or None)
    references = valid.target_texts()[lines]
    sources = valid.source_texts()[lines]
    translations = translator.translate(sources)
    judged = corpus_scores(translations, references)
    # A blank line stays blank, whatever the decoder says.
    said = {one for source, one in zip(sources, translations, strict=True) if source.strip()}
    return {
        "bleu": judged.bleu,
        "bleu_signature": judged.bleu_signature,
        "length_ratio": judged.length_ratio,
        "collapsed": len(said) == 1 < len(set(references)),
    }
