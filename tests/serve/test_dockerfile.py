"""What the Dockerfile of the service names is there: files, extras, options and the health page.

No image is built here.
"""

import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from keras_aiayn import cli

pytestmark = pytest.mark.backend_free
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "serve"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions():
    """(instruction, its arguments) of each line, continued ones joined."""
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return [tuple(line.split(maxsplit=1)) for line in lines]


def arguments(name):
    return [rest for instruction, rest in instructions() if instruction == name]


def test_the_files_that_are_copied_exist_and_are_all_that_the_build_gets():
    copied = [name for rest in arguments("COPY") for name in rest.split()[:-1]
              if not rest.startswith("--from")]  # fmt: skip
    assert all((ROOT / name).exists() for name in copied)
    rules = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied)
    # What the build of the package reads.
    assert {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml"} <= set(copied)
    assert "keras_aiayn" in copied


def test_the_extras_exist_for_the_backend_that_runs():
    (install,) = (rest for rest in arguments("RUN") if "pip install" in rest)
    (extras,) = re.findall(r"\.\[(.+?)]", install)
    (backend,) = {rest.partition("=")[2] for rest in arguments("ARG") if "=" in rest}
    assert set(extras.replace("$BACKEND", backend).split(",")) <= set(
        PROJECT["optional-dependencies"]
    )
    assert backend in cli.BACKENDS and "KERAS_BACKEND=$BACKEND" in arguments("ENV")[0]


def test_python_is_one_that_the_package_takes():
    for image in arguments("FROM"):
        minor = int(re.match(r"python:3\.(\d+)-", image)[1])
        least, below = re.match(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
        assert int(least) <= minor < int(below)


def test_the_entry_point_is_the_command_with_options_that_it_has():
    program, verb, model, *options = json.loads(arguments("ENTRYPOINT")[0])
    assert program in PROJECT["scripts"] and model.endswith(".keras")
    command = get_command(cli.app).commands[verb]
    given = command.make_context(verb, [model, *options]).params
    assert given["host"] == "0.0.0.0" and str(given["port"]) == arguments("EXPOSE")[0]


def test_the_health_check_asks_for_a_page_of_the_service_at_its_port():
    _, _, command = arguments("HEALTHCHECK")[0].partition("CMD")
    python, flag, code = json.loads(command)
    assert (python, flag) == ("python", "-c")
    compile(code, "healthcheck", "exec")
    pytest.importorskip("fastapi")
    from keras_aiayn.serve import app

    (port, path) = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", code).groups()
    service = app.make_app([lambda texts, asked: []], len, len)
    assert path in {route.path for route in service.routes} and port == arguments("EXPOSE")[0]


def test_it_does_not_run_as_root():
    (user,) = arguments("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    last = [name for name, _ in instructions()]
    assert last.index("USER") > max(i for i, name in enumerate(last) if name in ("RUN", "COPY"))
