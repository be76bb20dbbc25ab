"""Servers that answer with recorded JSON, and engines on them."""

import pytest
import torch

from tests.train.replay_server import ReplayServer


@pytest.fixture
def server():
    started = ReplayServer()
    yield started
    started.close()


@pytest.fixture
def second():
    started = ReplayServer()
    yield started
    started.close()


@pytest.fixture
def make_engine(tmp_path):
    def save(directory, weights):
        directory.mkdir()
        torch.save(dict(weights), directory / "weights.pt")

    def make(*servers, **options):
        # it needs httpx, which the other tests of this folder do not
        from p3o_train.sglang_engine import SGLangEngine

        urls = [getattr(server, "url", server) for server in servers]
        engine = SGLangEngine(urls, 512, **{"weights_dir": tmp_path / "weights", "save": save, "attempts": 2} | options)
        for server in servers:
            if isinstance(server, ReplayServer):
                server.calls.clear()
        return engine

    return make
