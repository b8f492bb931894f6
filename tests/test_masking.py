import keras
import numpy as np
import pytest

from keras_aiayn import masking
from keras_aiayn.special_ids import BOS, EOS, PAD

IDS = np.array([[BOS, 7, 8, EOS, PAD], [BOS, 9, PAD, PAD, PAD], [PAD] * 5], "int32")


def as_numpy(tensor):
    return keras.ops.convert_to_numpy(tensor)


def test_padding_mask_keeps_the_real_tokens():
    mask = as_numpy(masking.padding_mask(IDS))
    np.testing.assert_array_equal(mask, (IDS != PAD)[:, np.newaxis, :])


def test_causal_mask_hides_later_keys():
    mask = as_numpy(masking.causal_mask(IDS))
    np.testing.assert_array_equal(mask, np.broadcast_to(np.tri(5, dtype=bool), (3, 5, 5)))


def test_decoder_mask_hides_later_keys_and_pads():
    mask = as_numpy(masking.decoder_mask(IDS))
    expected = np.tri(5, dtype=bool) & (IDS != PAD)[:, np.newaxis, :]
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (masking.padding_mask, (None, 1, None)),
        (masking.causal_mask, (None, None, None)),
        (masking.decoder_mask, (None, None, None)),
    ],
)
def test_masks_are_boolean_where_lengths_are_unknown_too(make, shape):
    symbolic = make(keras.Input((None,), dtype="int32"))
    assert symbolic.shape == shape
    assert symbolic.dtype == "bool"
    assert keras.backend.standardize_dtype(make(IDS).dtype) == "bool"


def test_ancestor_mask_lets_a_beam_see_its_own_history_only():
    # Three steps of two beams are written, of four. Beam 0 descends from row 1, then row 0.
    ancestors = np.array([[[1, 0, 0, -1], [1, 1, 1, -1]]], "int32")
    batch, beams, length = ancestors.shape
    expected = np.zeros((batch, beams, length * beams), bool)
    for b, k, t in np.ndindex(ancestors.shape):
        if ancestors[b, k, t] >= 0:
            expected[b, k, t * beams + ancestors[b, k, t]] = True
    np.testing.assert_array_equal(as_numpy(masking.ancestor_mask(ancestors)), expected)
    assert expected.sum() == beams * 3
