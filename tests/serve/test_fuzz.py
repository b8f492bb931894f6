"""Schemathesis asks what the interface allows and what it does not; the answers are as it tells.

It makes requests from `/openapi.json`, valid ones and broken ones, and checks status, type and
schema of each answer, and that what is broken is refused, and what is not is answered.
"""

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")

import hypothesis
import schemathesis
from schemathesis.config import SchemathesisConfig
from stand_in import Upper, served, words

from keras_aiayn.serve.app import Limits, Look, make_app

pytestmark = [pytest.mark.slow, pytest.mark.backend_free]

# The schema tells how many characters there may be. It cannot tell how many tokens or bytes: these
# are never too many here.
LIMITS = Limits(bytes=50_000, texts=8, tokens=1_000, characters=100, n_best=3, pairs=1_000_000)
OPTIONS = {"limits": LIMITS, "api_key": "secret"}
# How what is broken is refused: 413 is what is too long.
REFUSED = {"negative_data_rejection": {"expected-statuses": ["400", "401", "405", "413", "422"]}}


class Stand(Upper):
    """Looks everywhere alike, too."""

    def __call__(self, new, asked):
        if not isinstance(asked, Look):
            return super().__call__(new, asked)
        found = {}
        for number, text in new.items():
            read, written = ([*side.split(), "</s>"] for side in (text, asked.translation))
            found[number] = read, written, np.full((1, 2, len(written), len(read)), 1 / len(read))
        return found


@pytest.fixture(scope="module")
def address():
    with served(Stand(), **OPTIONS) as (_, port):
        yield f"http://127.0.0.1:{port}"


INTERFACE = schemathesis.openapi.from_dict(
    make_app([Stand()], words, words, **OPTIONS).openapi(),
    config=SchemathesisConfig.from_dict({"checks": REFUSED}),
)


@INTERFACE.parametrize()
@hypothesis.settings(max_examples=100, deadline=None)
def test_the_service_does_as_its_interface_tells(case, address):
    case.call_and_validate(base_url=address, headers={"Authorization": "Bearer secret"})
