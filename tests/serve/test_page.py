"""The page at `/`: what it is made of, what it may ask, and what it tells of attention."""

import json
import re

import numpy as np
import pytest

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from keras import ops

from keras_aiayn import TransformerConfig, Translator
from keras_aiayn.data.tokenizer import ByteTokenizer
from keras_aiayn.serve import page, run
from keras_aiayn.serve.app import Limits, make_app
from keras_aiayn.serve.grid import Grid

LIMITS = Limits(tokens=40, characters=100, pairs=300)
SIZES = {"num_layers": 2, "hidden_dim": 16, "intermediate_dim": 16, "num_heads": 2}


@pytest.fixture(scope="module")
def translator():
    tokenizer = ByteTokenizer()
    model = TransformerConfig.tiny(tokenizer.vocabulary_size, **SIZES).build(seed=1)
    return Translator(model, tokenizer, max_extra_length=3)


def client_of(translator, **options):
    def work(new, asked):
        return run._turn(lambda device, call: call(translator), 0, Grid(40, 64), new, asked)

    def count(text):
        return run._count(translator.source_tokenizer, text)

    return TestClient(make_app([work], count, count, **{"limits": LIMITS} | options))


@pytest.fixture(scope="module")
def client(translator):
    with client_of(translator) as client:
        yield client


@pytest.mark.parametrize("path", page.FILES)
def test_each_file_has_its_type_and_may_ask_this_server_only(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].split(";")[0] == page.FILES[path][1]
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and "http" not in policy


def test_the_files_name_no_other_server_and_hold_no_inline_script(client):
    texts = {path: client.get(path).text for path in page.FILES}
    for path, text in texts.items():
        found = set(re.findall(r"\b\w+://[^\s\"'`)]+|[\"'`(]//[^\s\"'`)]+", text))
        assert found <= {"http://www.w3.org/2000/svg"}, path  # a name, which no one asks
    html = texts["/"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|javascript:", html)
    named = re.findall(r"(?:src|href)=\"([^\"]+)\"", html)
    named += re.findall(r"from \"\./([^\"]+)\"", "".join(texts.values()))
    assert named and {f"/{name}" for name in named} <= {*page.FILES, "/docs"}
    assert not re.search(r"url\(|@import", texts["/page.css"])


def test_every_control_has_a_label(client):
    html = client.get("/").text
    controls = re.findall(r"<(?:input|select|textarea)[^>]*\sid=\"([^\"]+)\"", html)
    assert controls and set(controls) == set(re.findall(r"<label[^>]*\sfor=\"([^\"]+)\"", html))


def luminance(color):
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return np.dot(linear, [0.2126, 0.7152, 0.0722])


@pytest.mark.backend_free
@pytest.mark.parametrize("scheme", [0, 1])
def test_text_stands_out_in_light_and_in_dark(client, scheme):
    block = client.get("/page.css").text.split(":root {")[1 + scheme].split("}")[0]
    colors = dict(re.findall(r"--(\w+): (#\w{6})", block))
    for text in ("ink", "quiet", "accent", "bad"):
        for ground in ("ground", "card"):
            one, two = sorted(luminance(colors[name]) for name in (text, ground))
            assert (two + 0.05) / (one + 0.05) >= 4.5, (text, ground)
    one, two = sorted(luminance(colors[name]) for name in ("ink", "mark"))
    assert (two + 0.05) / (one + 0.05) >= 4.5


@pytest.mark.parametrize(
    ("source", "target"), [("ab", "xyz"), ("a dog", ""), ("", "a"), ("é", "é")]
)
def test_attention_is_that_of_the_model(client, translator, source, target):
    answer = client.post("/attention", json={"text": source, "translation": target})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    tokenizer = translator.source_tokenizer
    read, written = ([*tokenizer.encode([text])[0], 3] for text in (source, target))
    expected = translator.model.attention_scores(
        np.array([read], "int32"), np.array([[2, *written[:-1]]], "int32")
    )["cross"]
    weights = np.array(found["weights"])
    assert weights.shape == (2, 2, len(written), len(read))
    for layer, own in zip(weights, expected, strict=True):
        np.testing.assert_allclose(layer, ops.convert_to_numpy(own)[0], atol=1e-4)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-3)
    assert found["source"] == tokenizer.pieces(read) and found["translation"] == target
    assert found["target"] == tokenizer.pieces(written)


def test_without_a_translation_it_is_that_of_the_best(client, translator):
    found = client.post("/attention", json={"text": "ab"}).json()
    best = client.post("/translate", json={"texts": "ab"}).json()["translations"][0][0]["text"]
    assert found["translation"] == best
    again = client.post("/attention", json={"text": "ab", "translation": best}).json()
    assert found == again
    _, _, weights = translator.attention_by_head("ab", best)
    np.testing.assert_allclose(found["weights"], weights, atol=1e-4)


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({}, 422, "text"),
        ({"text": ["a"]}, 422, "text"),
        ({"text": "a", "layer": 1}, 422, "layer"),
        ({"text": "a", "translation": "\ud800"}, 422, "surrogate"),
        ({"text": "a" * 50}, 413, "51 tokens; at most 40"),
        ({"text": "a", "translation": "a" * 50}, 413, "51 tokens; at most 40"),
        ({"text": "a" * 101}, 413, "101 characters; at most 100"),
        ({"text": "a" * 29, "translation": "a" * 29}, 413, "30 written; at most 300 pairs"),
    ],
)
def test_what_cannot_be_is_refused(client, body, status, word):
    answer = client.post(
        "/attention", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == status and word in answer.json()["error"]


def test_the_key_is_asked_for_by_attention_and_not_by_the_page(translator):
    with client_of(translator, api_key="secret") as client:
        assert client.get("/").status_code == 200
        body = {"text": "a", "translation": "b"}
        assert client.post("/attention", json=body).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert client.post("/attention", json=body, headers=headers).status_code == 200


def test_where_no_room_is_left_attention_is_refused_with_429(translator):
    with client_of(translator, tokens_waiting=4) as client:
        answer = client.post("/attention", json={"text": "ab", "translation": "ab"})
        assert answer.status_code == 429 and answer.headers["retry-after"]


def test_positions_that_end_cut_both_sides():
    tokenizer = ByteTokenizer()
    sizes = SIZES | {"positions": "learned", "max_length": 4}
    model = TransformerConfig.tiny(tokenizer.vocabulary_size, **sizes).build(seed=1)
    read, written, weights = Translator(model, tokenizer).attention_by_head("abcdef", "uvwxyz")
    assert (read, written) == (list("abcd"), list("uvwx")) and weights.shape == (2, 2, 4, 4)
