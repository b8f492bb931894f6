"""What can be asked of a translation, with a small random model on each backend."""

import keras
import numpy as np
import pytest

from keras_aiayn import Transformer, Translator
from keras_aiayn.data import sentences
from keras_aiayn.data.tokenizer import ByteTokenizer, SentencePieceTokenizer
from keras_aiayn.decoding.alignment import word_alignment
from keras_aiayn.decoding.settings import SearchSettings

LINES = [f"{color} {animal} {verb}" for color in ("red", "blue", "grün") for animal in
         ("dogs", "cats", "owls") for verb in ("run", "sleep", "sing loudly")]  # fmt: skip
TEXTS = ["red dogs run", "", "blue cats sleep and sing loudly", "owls"]


@pytest.fixture(scope="module")
def tokenizer():
    return SentencePieceTokenizer.learn(LINES, vocabulary_size=300)


def translator_of(tokenizer, seed, **arguments):
    keras.utils.set_random_seed(seed)
    model = Transformer(
        tokenizer.vocabulary_size, num_layers=2, hidden_dim=16, intermediate_dim=32, num_heads=2,
        **arguments,
    )  # fmt: skip
    # Random weights say nearly the same of every token: larger ones have opinions.
    model.set_weights([1.5 * weight for weight in model.get_weights()])
    return Translator(model, tokenizer, max_extra_length=5)


@pytest.fixture(scope="module")
def translator(tokenizer):
    return translator_of(tokenizer, 3)


def lengths(translations):
    return [len(one.tokens) for one in translations]


def test_lengths_keep_within_what_is_asked(translator):
    sources = [len(ids) + 1 for ids in translator.source_tokenizer.encode(TEXTS)]
    real = [0, 2, 3]
    absolute = lengths(translator.translate(TEXTS, details=True, max_length=3))
    assert all(1 <= absolute[i] <= 3 for i in real)
    relative = lengths(translator.translate(TEXTS, details=True, max_length_ratio=0.5))
    assert all(1 <= relative[i] <= max(1, sources[i] // 2) for i in real)
    least = lengths(translator.translate(TEXTS, details=True, min_length=6))
    assert all(least[i] >= 6 for i in real)
    least = lengths(translator.translate(TEXTS, details=True, min_length_ratio=1.0))
    assert all(least[i] >= sources[i] for i in real)
    assert absolute[1] == relative[1] == least[1] == 0  # an empty line stays empty


def test_translations_begin_with_their_prefixes(translator):
    prefixes = ["blue", "", "", "grün cats"]
    free = translator.translate(TEXTS)
    found = translator.translate(TEXTS, prefixes=prefixes)
    assert found[0].startswith("blue") and found[3].startswith("grün cats")
    assert found[1:3] == free[1:3]


def test_suppressed_pieces_and_repeats_do_not_come(translator):
    free = translator.translate(TEXTS, details=True)
    piece = free[0].tokens[0]
    for one in translator.translate(TEXTS, details=True, suppress=(piece,)):
        assert piece not in one.tokens
    for one in translator.translate(TEXTS, details=True, no_repeat_ngram_size=1):
        assert len(set(one.tokens)) == len(one.tokens)


@pytest.mark.works("sampling")
def test_samples_are_the_same_in_any_company(translator):
    settings = {"sampling": True, "n_best": 3, "seed": 5, "details": True}

    def texts(translations):
        return [[one.text, *(other.text for other in one.alternatives)] for one in translations]

    together = texts(translator.translate(TEXTS, **settings))
    assert together == texts(translator.translate(TEXTS, tokens_per_batch=8, **settings))
    for number, text in enumerate(TEXTS):
        alone = translator.translate([text], first=number, **settings)
        assert texts(alone) == together[number : number + 1]
    assert together != texts(translator.translate(TEXTS, **settings | {"seed": 6}))
    streamed = translator.translate_lines(iter(TEXTS), chunk_size=2, **settings)
    assert texts(streamed) == together


def test_the_temperature_goes_down_to_greedy(translator):
    cold = translator.translate(TEXTS, sampling=True, temperature=1e-4)
    assert cold == translator.translate(TEXTS, beam_size=1)


def test_an_ensemble_of_one_model_is_the_model(translator):
    one, twice = (
        translator.translate(TEXTS, details=True, together_with=others)
        for others in ((), (translator,))
    )
    assert [found.text for found in one] == [found.text for found in twice]
    np.testing.assert_allclose(
        [found.score for found in one], [found.score for found in twice], atol=1e-4
    )


@pytest.mark.works("several models at once")
def test_an_ensemble_averages_probabilities(translator, tokenizer):
    other = translator_of(tokenizer, 4)
    (found,) = translator.translate(
        TEXTS[:1], beam_size=1, together_with=(other,), details=True, max_length=1
    )
    (source,) = tokenizer.encode(TEXTS[:1])
    inputs = {"encoder_token_ids": np.array([[*source, 3]]), "decoder_token_ids": np.array([[2]])}
    probabilities = [
        keras.ops.convert_to_numpy(keras.ops.softmax(one.model(inputs)[0, 0]))
        for one in (translator, other)
    ]
    mean = np.mean(probabilities, axis=0)
    mean[[0, 2]] = 0
    assert found.tokens == tokenizer.pieces([int(mean.argmax())])
    assert found.raw_score == pytest.approx(np.log(mean.max()), abs=1e-4)
    assert found != translator.translate(TEXTS[:1], beam_size=1, details=True, max_length=1)[0]


def test_translators_of_other_vocabularies_cannot_work_together(translator):
    other = translator_of(ByteTokenizer(), 1)
    with pytest.raises(ValueError, match="vocabularies are the same"):
        translator.translate(TEXTS, together_with=(other,))


@pytest.mark.works("scores of given pairs")
def test_given_pairs_score_what_search_found():
    translator = translator_of(ByteTokenizer(), 3, use_logits_bias=True)
    (bias,) = [weight for weight in translator.model.weights if weight.shape == (260,)]
    bias.assign(4.0 * (np.arange(260) == 3))  # or hardly an output would end
    pieces = translator.target_tokenizer.pieces(range(260))
    # Letters alone, which come back as the same tokens.
    other = (pieces[1], *(piece for piece in pieces[4:] if not piece.isalpha()))
    texts = [f"{number} dogs" for number in range(24)]
    settings = {"details": True, "n_best": 4, "suppress": other, "max_extra_length": 20}
    found = [translator.translate(texts, **settings, sampling=drawn) for drawn in (False, True)]
    pairs = [
        (text, hypothesis)
        for results in found
        for text, one in zip(texts, results, strict=True)
        for hypothesis in (one, *one.alternatives)
        if not hypothesis.hit_limit
    ]
    assert len(pairs) >= 20 and len({len(one.token_ids) for _, one in pairs}) >= 5
    scored = translator.score([text for text, _ in pairs], [one.text for _, one in pairs])
    for (_, one), again in zip(pairs, scored, strict=True):
        assert again.token_ids == one.token_ids and again.tokens == one.tokens
        assert again.score == pytest.approx(one.score, abs=1e-4)
        assert again.raw_score == pytest.approx(one.raw_score, abs=1e-4)


def test_a_score_is_the_sum_of_log_probabilities_whatever_the_company(translator, tokenizer):
    targets = ["blue cats", "red", "", "owls sing loudly"]
    together = translator.score(TEXTS, targets)
    for text, target, one in zip(TEXTS, targets, together, strict=True):
        (source,), (ids,) = tokenizer.encode([text]), tokenizer.encode([target])
        inputs = {
            "encoder_token_ids": np.array([[*source, 3]]),
            "decoder_token_ids": np.array([[2, *ids]]),
        }
        log_probs = keras.ops.convert_to_numpy(
            keras.ops.log_softmax(keras.ops.cast(translator.model(inputs), "float32"))
        )[0]
        expected = sum(log_probs[i, token] for i, token in enumerate([*ids, 3]))
        assert one.raw_score == pytest.approx(expected, rel=1e-5, abs=1e-4)
        (alone,) = translator.score([text], [target])
        assert alone.raw_score == pytest.approx(one.raw_score, rel=1e-5, abs=1e-4)


def test_unequal_numbers_are_not_scored(translator):
    with pytest.raises(ValueError, match="2 sources and 1 targets"):
        translator.score(["a", "b"], ["c"])


@pytest.mark.works("alignments")
def test_words_are_aligned_by_where_they_looked():
    weights = np.array([[0.1, 0.2, 0.6, 0.1], [0.3, 0.3, 0.1, 0.3], [0.0, 0.1, 0.2, 0.7]])
    # Two source words of two and one tokens, then EOS; two target words, the first of two tokens.
    assert word_alignment(weights, [0, 0, 1, -1], [0, 0, -1]) == [(0, 0)]
    assert word_alignment(weights, [0, 0, 1, -1], [0, 1, -1]) == [(1, 0), (0, 1)]
    assert word_alignment(weights, [-1, -1, -1, -1], [0, 1, -1]) == []


def test_alignments_name_words_that_are_there(translator):
    for text, one in zip(
        TEXTS, translator.translate(TEXTS, details=True, alignments=True, n_best=2), strict=True
    ):
        for found in (one, *one.alternatives):
            targets = [target for _, target in found.alignment]
            assert targets == list(range(len(targets)))
            assert len(targets) == len([word for word in found.text.split(" ") if word])
            assert all(0 <= source < len(text.split()) for source, _ in found.alignment)


def test_attention_is_shown_for_the_tokens_that_were_written(translator):
    for text in ("red dogs run", "owls"):
        (one,) = translator.translate([text], details=True)
        sources, weights = translator.attention(text, one)
        assert weights.shape == (len(one.tokens), len(sources)) and sources[-1] == "</s>"
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-4)


def test_alignments_and_attention_end_where_learned_positions_do(tokenizer):
    model = Transformer(
        tokenizer.vocabulary_size, num_layers=1, hidden_dim=8, intermediate_dim=8, num_heads=1,
        positions="learned", max_length=12,
    )  # fmt: skip
    translator = Translator(model, tokenizer)
    (one,) = translator.translate(["owls " * 30], details=True, alignments=True, min_length=12)
    assert len(one.tokens) == 12 and one.hit_limit
    assert translator.attention("owls " * 30, one)[1].shape == (12, 12)


def test_long_texts_are_cut_at_sentence_ends_and_joined(translator):
    text = "red dogs run. blue cats sleep!  owls sing."
    parts = ["red dogs run.", "blue cats sleep!", "owls sing."]
    whole = translator.translate([text, "x"], split_long=12, details=True)
    longest = max(len(ids) + 1 for ids in translator.source_tokenizer.encode(parts))
    assert longest <= 12
    a, b, c = translator.translate(parts)
    assert whole[0].text == f"{a} {b}  {c}"
    assert whole[1].text == translator.translate(["x"])[0]
    assert translator.translate([text], split_long=500) == translator.translate([text])


@pytest.mark.parametrize(("dtype", "near"), [("bfloat16", 0.2), ("float16", 0.02)])
def test_another_precision_scores_much_the_same(translator, dtype, near):
    if dtype == "float16" and keras.backend.backend() == "jax":
        pytest.skip("JAX has no float16 product on a CPU")
    other = translator.as_dtype(dtype)
    assert other.model.source_embedding.compute_dtype == dtype
    assert translator.model.source_embedding.compute_dtype == "float32"
    found = other.translate(TEXTS, details=True)
    targets = [one.text for one in found]
    exact = translator.score(TEXTS, targets)
    rounded = other.score(TEXTS, targets)
    for one, other_one, searched in zip(exact, rounded, found, strict=True):
        length = len(one.token_ids)
        assert abs(one.raw_score - other_one.raw_score) < near * length
        if searched.token_ids == one.token_ids:
            assert abs(searched.raw_score - other_one.raw_score) < near * length


@pytest.mark.backend_free
def test_a_long_line_of_marks_is_cut_in_no_time():
    assert sentences.cut("a" + "." * 100_000 + "b", 5, len) == [("a" + "." * 100_000 + "b", "")]


@pytest.mark.backend_free
@pytest.mark.parametrize(
    ("text", "translations", "joined"),
    [
        ("你好。世界。", ["Hello.", "World."], "Hello. World."),
        ("One. Two.\n\nThree.", ["Eins.", "Zwei.", "Drei."], "Eins. Zwei.\n\nDrei."),
        ("One. Two.", ["一。", "二。"], "一。 二。"),
    ],
)
def test_joined_sentences_have_the_blanks_that_they_want(text, translations, joined):
    parts = sentences.cut(text, 1, len)
    assert sentences.join(parts) == text
    blanks = [blank for _, blank in parts]
    assert sentences.join(list(zip(translations, blanks, strict=True))) == joined


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam_size": 0}, "`beam_size` must be at least 1. Received: 0"),
        ({"n_best": 5, "beam_size": 4}, "`n_best` must be at most the beam size, 4. Received: 5"),
        ({"max_length": 0}, "`max_length` must be at least 1"),
        ({"min_length_ratio": -1}, "`min_length_ratio` must be at least 0"),
        ({"temperature": 0}, "`temperature` must be above 0"),
        ({"top_p": 2}, "`top_p` must be above 0 and at most 1. Received: 2"),
        ({"beams": 2}, "no setting beams. Settings: beam_size"),
        ({"suppress": ("no piece",)}, "pieces of the vocabulary. Received: 'no piece'"),
        ({"prefixes": ["a"]}, "as many strings as there are texts"),
        ({"split_long": 9, "n_best": 2}, "`split_long` goes neither with"),
    ],
)
def test_what_cannot_be_asked_is_refused(translator, settings, message):
    with pytest.raises(ValueError, match=message):
        translator.translate(TEXTS, **settings)


@pytest.mark.backend_free
def test_settings_know_their_lengths():
    assert SearchSettings().max_output(10) == 60
    assert SearchSettings(max_length=7).max_output(10) == 7
    assert SearchSettings(max_length=7, max_length_ratio=0.5).max_output(10) == 5
    assert SearchSettings(min_length=3, min_length_ratio=0.45).min_output(10) == 5
    assert SearchSettings(min_length=9, max_length=4).min_output(10) == 4
