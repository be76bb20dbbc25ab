"""The cost model gives what a pencil gives, and its limits are the right ones."""

import dataclasses

import pytest

from bench import scaling
from bench.scaling import GRPO, SOURCES, Assumptions, Batch, Cluster, Decoder, Gpu, Layout, Link, step_seconds

# 2 layers of width 4: attention 2 x 4 x 2 x (2 + 1) = 48, feed-forward 3 x 4 x 8 = 96, so 144 weights a layer
TINY = Decoder(layers=2, hidden=4, heads=2, kv_heads=1, head_size=2, ffn=8, vocab=16, tied=False)
# a flop and a byte take a second each; a stage of a collective 0.5 s inside a node and 1 s outside
SECOND = Gpu(flops=1.0, memory=1.0, link=1.0, network=1.0)
EXACT = Assumptions(
    mfu=1.0, memory_share=1.0, link_share=1.0, link_latency=0.5, network_latency=1.0, host_read=3.0, node=2
)


def tiny(**sizes):
    return Cluster(TINY, Layout(**sizes), Batch(sequences=4, length=8), SECOND, EXACT)


def total(cluster, objective=GRPO):
    return sum(step_seconds(cluster, objective).values())


def test_parameters():
    """144 weights in each of 2 layers; embedding and output layer have 64 each. Known: 4.0 and 70.6 billion."""
    assert (TINY.layer_parameters, TINY.parameters) == (144, 2 * 144 + 2 * 64)
    assert [round(model.parameters / 1e9, 1) for model in scaling.MODELS.values()] == [4.0, 70.6]


def test_one_gpu_by_hand():
    """A token costs 2 x (2 x 144 + 2 x 8 x 4) + 2 x 4 x 16 = 832 flops forward, 4 micro-batches have 8 tokens each.

    Logits: 8 x 16 of a micro-batch, 4 bytes each. 416 parameters, 30 bytes each.
    """
    parts = step_seconds(tiny(), GRPO)
    assert parts == {
        "compute": 4 * 3 * 8 * 832,
        "links of the model": 0.0,
        "loss": 4 * 128 * 4,
        "pre-pass": 0.0,
        "e": 0.0,
        "gradients": 0.0,
        "optimizer": 30 * 416,
    }
    # without links a pre-pass is a third of forward and backward, 2 bytes a logit and a read on the host
    assert total(tiny(), "prepass") - total(tiny()) == parts["compute"] / 3 + 4 * 128 * 2 + 3.0
    # 9 bytes a token are read again
    assert total(tiny(), "reuse") - total(tiny()) == 4 * 8 * 9 + 3.0
    assert total(tiny(), "micro-batch") - total(tiny()) == 4 * 128 * 2


def test_eight_gpus_by_hand():
    """TP 2 inside a node, DP 2 and PP 2 across nodes: 2 micro-batches and a bubble of 1, 1 layer and half of 416."""
    cluster = tiny(tensor=2, data=2, pipeline=2)
    parts = step_seconds(cluster, "prepass")
    forward = 8 * (2 * 144 + 2 * 8 * 4 + 128) / 2
    assert parts["compute"] == 3 * 3 * forward
    # 64 bytes of activations: all-reduce 64 + 2 x 0.5 s, 3 of them; to the next stage half of them and 1 s
    one_way = 3 * (64 + 1.0) + (32 + 1.0)
    # 8 bytes for 8 tokens of 2 ranks, half of them from the other
    statistics = 64 + 0.5
    assert parts["links of the model"] == 3 * (2 * one_way + statistics)
    assert parts["loss"] == 3 * 64 * 4
    assert parts["pre-pass"] == 3 * (forward + one_way + statistics + 64 * 2)
    # 32 bytes: all-reduce over 2, broadcast over 2, read
    assert parts["e"] == (32 + 2 * 1.0) + (32 + 1.0) + 3.0
    # 104 parameters on a rank, scattered with 4 bytes and gathered with 2
    assert parts["gradients"] == (104 * 4 / 2 + 1.0) + (104 * 2 / 2 + 1.0)
    assert parts["optimizer"] == 30 * 104 / 2
    # micro-batch scope reduces twice, on the last stage
    assert step_seconds(cluster, "micro-batch")["e"] == 2 * (32 + 2 * 1.0)


def test_context_parallelism_by_hand():
    """CP 2: 4 tokens a rank; keys and values of the sequence are 2 x 2 x 8 x 2 = 64 bytes, half of them foreign."""
    parts = step_seconds(tiny(context=2), GRPO)
    assert parts["compute"] == 4 * 3 * 4 * 832
    # two layers; forward once, and twice in the backward
    assert parts["links of the model"] == 4 * 3 * 2 * (32 + 0.5)
    # gradients of both ranks belong to the same weights
    assert parts["gradients"] == (416 * 4 / 2 + 0.5) + (416 * 2 / 2 + 0.5)


def test_collectives():
    link = Link(bandwidth=2.0, latency=1.0)
    assert link.gather(16, 4) == 0.75 * 16 / 2 + 2
    assert link.all_reduce(16, 4) == 2 * link.gather(16, 4)
    assert link.broadcast(16, 4) == 8 + 2
    assert [link.all_reduce(16, 1), link.gather(16, 1), link.broadcast(16, 1)] == [0.0, 0.0, 0.0]
    assert link.gather(0, 5) == 3  # stages of 5 ranks


def test_links_by_distance():
    """Groups that stay inside a node use NVLink."""
    cluster = scaling.clusters("4B", 64)
    assert cluster.tensor_link.latency == cluster.assumed.link_latency
    assert cluster.replica_link.latency == cluster.assumed.network_latency
    assert scaling.clusters("4B", 8).replica_link.latency == cluster.assumed.link_latency


def test_twice_the_replicas_compute_in_half_the_time():
    small, large = (step_seconds(scaling.clusters("4B", gpus), GRPO) for gpus in (64, 128))
    for part in ("compute", "loss", "optimizer", "links of the model"):
        assert large[part] == pytest.approx(small[part] / 2, rel=1e-12)
    assert large["gradients"] > small["gradients"]


@pytest.mark.parametrize("model", scaling.MODELS)
@pytest.mark.parametrize("source", SOURCES)
def test_overheads(model, source):
    """P3O never costs less than GRPO; a pre-pass costs about a third, the others under a percent."""
    found = [scaling.overhead(scaling.clusters(model, gpus), source) for gpus in (32, 256, 1024)]
    assert all(0 < share < (0.4 if source == "prepass" else 0.01) for share in found)


def test_no_traffic_without_groups():
    cluster = Cluster(scaling.MODELS["4B"], Layout())
    parts = {objective: step_seconds(cluster, objective) for objective in (GRPO, *SOURCES)}
    assert all(found["links of the model"] == found["gradients"] == 0.0 for found in parts.values())
    assert parts["micro-batch"]["e"] == 0.0


@pytest.mark.parametrize("size", ["length", "sequences"])
@pytest.mark.parametrize("objective", [GRPO, *SOURCES])
def test_more_tokens_take_longer(size, objective):
    small = scaling.clusters("70B", 64)
    large = dataclasses.replace(small, batch=dataclasses.replace(small.batch, **{size: 8192}))
    assert total(large, objective) > total(small, objective)


@pytest.mark.parametrize("rate", ["flops", "memory", "link", "network"])
def test_faster_gpus_are_faster(rate):
    """Every rate is used."""
    slow = scaling.clusters("70B", 64)
    fast = dataclasses.replace(slow, gpu=dataclasses.replace(slow.gpu, **{rate: 2 * getattr(slow.gpu, rate)}))
    assert total(fast, "prepass") < total(slow, "prepass")


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="data parallel size 3 must divide 4 sequences"):
        tiny(data=3)
    with pytest.raises(ValueError, match="pipeline parallel size 4 must divide 2 layers"):
        tiny(pipeline=4)
    with pytest.raises(ValueError, match="70B needs a multiple of 32 GPUs, got 48"):
        scaling.clusters("70B", 48)


def test_every_assumption_is_explained():
    assert list(scaling.MEANINGS) == [field.name for field in dataclasses.fields(Assumptions)]
