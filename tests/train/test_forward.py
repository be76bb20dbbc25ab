"""Output layers are bypassed for as long as asked, and only where nothing is lost with them."""

from types import SimpleNamespace

import pytest
import torch

from p3o_train.forward import bypassed_output_layers, output_weight


class OutputLayer(torch.nn.Module):
    def __init__(self, bias=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).view(3, 2))
        self.bias = bias

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        return hidden @ self.weight.T, None


def chunk(bias=None, post_process=True, tied=False, **config):
    config = {"mtp_num_layers": None, "sequence_parallel": False} | config
    embedding = torch.nn.Parameter(torch.zeros(3, 2))
    return SimpleNamespace(
        post_process=post_process,
        output_layer=OutputLayer(bias),
        config=SimpleNamespace(**config),
        share_embeddings_and_output_weights=tied,
        shared_embedding_or_output_weight=lambda: embedding,
    )


def wrapped(inner):
    return SimpleNamespace(module=SimpleNamespace(module=inner))


@pytest.mark.parametrize("failure", [None, ValueError, KeyboardInterrupt])
def test_bypass_stays(failure):
    last, hidden = chunk(), torch.ones(4, 2)
    with pytest.raises(failure) if failure else pytest.MonkeyPatch.context(), bypassed_output_layers([wrapped(last)]):
        assert last.output_layer(hidden, weight=None, runtime_gather_output=False) == (hidden, None)
        if failure:
            raise failure
    assert "forward" not in vars(last.output_layer)
    assert last.output_layer(hidden)[0].shape == (4, 3)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"bias": torch.zeros(3)}, "a bias of the output layer"),
        ({"mtp_num_layers": 1}, "multi-token prediction"),
        ({"sequence_parallel": True}, "sequence parallelism"),
    ],
)
def test_bypass_loses_something_in_silence(wrong, name):
    good, bad = chunk(), chunk(**wrong)
    refused = pytest.raises(ValueError, match=f"cannot bypass an output layer with {name}; set from_hidden=False")
    with refused, bypassed_output_layers([good, bad]):
        pytest.fail("the body must not run")
    assert "forward" not in vars(good.output_layer) and "forward" not in vars(bad.output_layer)


def test_stages_without_an_output_layer_are_looked_at():
    with bypassed_output_layers([SimpleNamespace(post_process=False)]):
        pass


def test_weight_of_the_output_layer_is_the_one_that_is_used():
    for tied in (False, True):
        last = chunk(tied=tied)
        want = last.shared_embedding_or_output_weight() if tied else last.output_layer.weight
        assert output_weight(wrapped(last)) is want
