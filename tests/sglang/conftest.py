"""One server for all tests of this folder, which is skipped unless P3O_SGLANG_PYTHON names a Python with sglang."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

from p3o_train.sglang_engine import SGLangEngine
from tests.sglang.server import VOCABULARY, make_model, running, server_python


def pytest_collection_modifyitems(items):
    if server_python():
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="P3O_SGLANG_PYTHON is not set: make test-sglang"))


@pytest.fixture(scope="session")
def models():
    """Weights of version 0, which the server starts with, and those it gets later."""
    return [make_model(seed) for seed in range(2)]


@pytest.fixture(scope="session")
def model_path(models, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    models[0].save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def server(model_path, tmp_path_factory):
    with running(model_path, tmp_path_factory.mktemp("server") / "log.txt") as started:
        yield started


@pytest.fixture
def make_engine(tmp_path):
    """Engines on given servers, with weights in safetensors and no other file."""

    def save(directory, weights):
        directory.mkdir()
        save_file({name: value.contiguous() for name, value in weights.items()}, directory / "model.safetensors")

    def make(*urls, save=save, **options):
        return SGLangEngine(urls, VOCABULARY, weights_dir=tmp_path / "weights", save=save, **options)

    return make


@pytest.fixture
def engine(make_engine, server, models):
    """An engine whose server has the weights of the first model, whatever the test before left."""
    made = make_engine(server.url)
    made.update_weights(models[0].state_dict(), 0)
    return made
