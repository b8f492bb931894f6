"""A `.keras` file from anyone, opened without trusting it.

Keras deserialises whatever its registry knows, and reads weights past the checksums of a damaged
archive. So before Keras sees a file, what it holds is compared with what a translator may hold.
"""

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import keras

from keras_aiayn.data import tokenizer as tokenizers
from keras_aiayn.data.tokenizer import KINDS, Tokenizer
from keras_aiayn.layers.precision import MODES
from keras_aiayn.translator import FORMAT, Translator

CLASSES = {
    ("keras_aiayn.translator", "Translator"),
    ("keras_aiayn.transformer", "Transformer"),
    ("keras", "DTypePolicy"),
    ("keras.dtype_policies", "QuantizedDTypePolicy"),
}
_ASSETS = {kind.asset_name for kind in KINDS.values()}
MEMBERS = {"metadata.json", "config.json", "model.weights.h5"} | {
    f"assets/{side}{name}" for name in _ASSETS for side in ("", "source/", "target/")
}
_LONGEST_CONFIG = 1 << 20
LARGEST_BEAM = 1_000
LONGEST_OUTPUT = 100_000  # tokens more than the input
DEEPEST_GROUP = 30  # groups of HDF5 inside each other; one that holds itself has no end


def load(path: str | os.PathLike[str]) -> Translator:
    """Loads a translator; any other file is an error of one line, and runs nothing.

    Args:
        path: of a `.keras` file.

    Returns:
        The translator.

    Raises:
        FileNotFoundError: where there is no file.
        ValueError: where it is not a translator of this package, damaged, or of a newer format.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix != ".keras" or not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a .keras file: train a model, or name RUN/model.keras")
    try:
        _check(path)
        loaded = keras.saving.load_model(path, compile=False, safe_mode=True)
        if loaded.source_tokenizer is None:  # which raises where there is none
            raise ValueError("its tokenizer is missing")
    except Exception as error:
        # Whatever a foreign or broken archive makes Keras raise, it is this file that is wrong.
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} cannot be loaded as a translator: {reason}") from error
    return loaded


def load_tokenizers(path: str | os.PathLike[str]) -> tuple[Tokenizer, Tokenizer]:
    """Reads the tokenizers of a translator alone; no model is made.

    Args:
        path: of a `.keras` file.

    Returns:
        That of the source and that of the target; one object twice where they are shared.

    Raises:
        ValueError: as of `load`.
    """
    path = Path(path)
    try:
        _check(path)  # so that no member lies elsewhere than its name should
        return tokenizers.load_from_keras(path)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} has no tokenizers that can be read: {reason}") from error


def _check(path: Path) -> None:
    """Refuses a file that holds more, less or other than a translator."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        # Keras stores its members as they are: what unpacks to more was made to.
        if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
            raise ValueError("its parts are larger than the file")
        if archive.getinfo("config.json").file_size > _LONGEST_CONFIG:
            raise ValueError("its config.json is too long")
        damaged = archive.testzip()  # Keras would read past a wrong checksum
        if damaged:
            raise ValueError(f"it is damaged: {damaged} has changed since it was written")
        config = json.loads(archive.read("config.json"))
        if config.get("class_name") != "Translator":
            raise ValueError(
                f"it holds a {config.get('class_name')} and not a Translator: "
                "save one with `Translator(model, tokenizer).save(...)`"
            )
        if config["config"]["format"] > FORMAT:
            Translator.from_config(config["config"])  # which refuses it by name
        strange = [name for name in names if name not in MEMBERS]
        if strange or len(set(names)) != len(names):
            raise ValueError(f"a translator's file holds no {(strange or names)[0]!r}")
        _check_classes(config)
        _check_search(config["config"])
        _check_precision(config["config"]["model"]["config"]["dtype"])
        weights = archive.read("model.weights.h5")
        arrays = _check_weights(weights)
        _check_sizes(config["config"]["model"]["config"], len(weights), arrays)


def _check_classes(value: Any) -> None:
    """Only our classes, of plain values: nothing else is made, imported or looked up."""
    if isinstance(value, list):
        for part in value:
            _check_classes(part)
    if not isinstance(value, dict):
        return
    if "class_name" in value:
        name = (value.get("module"), value["class_name"])
        # Keras looks up the registered name first.
        registered = (None, value["class_name"], f"keras_aiayn>{value['class_name']}")
        if name not in CLASSES or value.get("registered_name") not in registered:
            raise ValueError(f"it asks for {'.'.join(map(str, name))}, which is no part of one")
    for part in value.values():
        _check_classes(part)


def _check_search(config: dict[str, Any]) -> None:
    """Search settings that a person could mean: a larger beam would ask for all memory."""
    for name, most in (("beam_size", LARGEST_BEAM), ("max_extra_length", LONGEST_OUTPUT)):
        if not 0 <= config[name] <= most:
            raise ValueError(f"its {name} is {config[name]}, and more than {most:,} means harm")


def _check_precision(policy: dict[str, Any]) -> None:
    """Only what `save` writes: Keras reads more out of a name, and other modes ask for more."""
    mode = policy["config"].get("mode")
    if mode is not None and mode not in MODES:
        raise ValueError(f"its weights are in {mode!r}, which is none of {', '.join(MODES)}")


def _check_weights(content: bytes) -> int:
    """Only arrays that lie in the file themselves; gives their number.

    HDF5 can point to other files, which are opened to follow it, and claim arrays of any size
    that take no room.
    """
    import h5py

    def arrays_in(group: h5py.Group, depth: int) -> int:
        if depth > DEEPEST_GROUP:
            raise ValueError("its weights lie too deep")
        found = 0
        for name in group:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise ValueError(f"its weights point to another place by {name!r}")
            member = group[name]
            if isinstance(member, h5py.Group):
                found += arrays_in(member, depth + 1)
                continue
            elsewhere = member.external or member.is_virtual
            if elsewhere or member.id.get_storage_size() < member.nbytes:
                raise ValueError(f"its weights do not hold what {name!r} claims")
            found += 1
        return found

    with h5py.File(io.BytesIO(content), "r") as weights:
        return arrays_in(weights, 0)


def _check_sizes(model: dict[str, Any], weights: int, arrays: int) -> None:
    """No larger model than the weights fill: a short file could ask for all memory."""
    layers, width = model["num_layers"], model["hidden_dim"]
    if layers > arrays:
        raise ValueError("its num_layers asks for more weights than it holds")
    heads = layers * width * model["num_heads"]
    parts = {
        "hidden_dim": layers * width * (0 if model["key_dim"] else width),
        "key_dim": heads * (model["key_dim"] or 0),
        "value_dim": heads * (model["value_dim"] or 0),
        "vocabulary_size": model["vocabulary_size"] * width,
        "target_vocabulary_size": (model["target_vocabulary_size"] or 0) * width,
        "intermediate_dim": layers * width * model["intermediate_dim"],
        "max_length": (model["max_length"] or 0) * width,
    }
    for name, least in parts.items():
        if least > weights:
            raise ValueError(f"its {name} asks for more weights than it holds")
