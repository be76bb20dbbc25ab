"""What an optimizer step would cost on many GPUs, with GRPO and with every source of e: a model, not a measurement.

Nothing overlaps: what moves over a link is added to what is computed. With

    t = micro-batch tokens of a rank, m = micro-batches of a replica, (L, H, V) = layers, width, vocabulary

    layer   = 2 P_layer + 2 s h d                  forward flops of a token: weights, and causal attention over s tokens
    head    = 2 H V                                 of the output layer; backward costs twice the forward of both
    forward = t (L / pp layer + head) / (tp peak mfu) + t V / tp bytes / memory + links           of the slowest stage
    pass    = (m + pp - 1) (forward + backward)     1F1B: its bubble is pp - 1 micro-batches
    step    = pre-pass + pass + gradients + optimizer

    all-reduce of b bytes over n ranks      2 (n - 1) / n b / bandwidth + 2 ceil(log2 n) latency
    all-gather, reduce-scatter              (n - 1) / n b / bandwidth + ceil(log2 n) latency
    broadcast, send                         b / bandwidth + ceil(log2 n) latency

P3O adds to GRPO, whose loss is taken at the least that it can move: a logit is read and its gradient written, 4 bytes
in bfloat16. A part of the step that P3O leaves alone, such as the sum of gradients over replicas, lowers the share:

    prepass      a forward pass (2 bytes a logit, no gradient), and the reduction of e
    reuse        the token log-probs read again, and the reduction of e
    micro-batch  2 bytes a logit (it is read again once e is known), and one all-reduce for each micro-batch

The reduction of e is an all-reduce of 4 float64 over DP x CP, a broadcast over PP and a read on the host. Left out:
imbalance between ranks, for which micro-batch scope waits in every micro-batch; recomputation of activations; whether
it all fits into memory; the rollout; the synchronisation of weights.
"""

import argparse
import math
import sys
from dataclasses import dataclass, replace

SOURCES = ("micro-batch", "reuse", "prepass")
GRPO = "grpo"


@dataclass(frozen=True, slots=True)
class Gpu:
    """Rates of the data sheet, each way, per GPU."""

    flops: float
    """Dense bfloat16 per second."""
    memory: float
    """Bytes per second."""
    link: float
    """Bytes per second each way over NVLink."""
    network: float
    """Bytes per second each way between nodes, one adapter for each GPU."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What no data sheet says; ``MEANINGS`` says it in words."""

    mfu: float = 0.4
    memory_share: float = 0.85
    link_share: float = 0.8
    link_latency: float = 3e-6
    network_latency: float = 8e-6
    host_read: float = 20e-6
    node: int = 8


MEANINGS = {
    "mfu": "share of the peak that matrix products and attention reach over a whole step",
    "memory_share": "share of the memory bandwidth that the loss and the optimizer reach",
    "link_share": "share of NVLink and network bandwidth that a collective reaches",
    "link_latency": "seconds for each stage of a collective on NVLink",
    "network_latency": "seconds for each stage of a collective between nodes",
    "host_read": "seconds until a number of the GPU is known on the host",
    "node": "GPUs that NVLink connects",
}


@dataclass(frozen=True, slots=True)
class Decoder:
    """A dense decoder: grouped-query attention, gated feed-forward layer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    tied: bool

    @property
    def layer_parameters(self) -> int:
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.vocab * self.hidden * (1 if self.tied else 2)


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the groups, in Megatron's order of ranks: tensor, context, data, pipeline."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline


@dataclass(frozen=True, slots=True)
class Batch:
    """Of one optimizer step; a micro-batch is one sequence, cut over the context-parallel ranks."""

    sequences: int
    length: int


@dataclass(frozen=True, slots=True)
class Link:
    bandwidth: float
    latency: float

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds for ``size`` bytes on each of ``ranks``."""
        return 2 * self.gather(size, ranks)

    def gather(self, size: float, ranks: int) -> float:
        """All-gather or reduce-scatter; ``size`` is that of the whole."""
        return (ranks - 1) / ranks * size / self.bandwidth + _stages(ranks) * self.latency

    def broadcast(self, size: float, ranks: int) -> float:
        return (size / self.bandwidth if ranks > 1 else 0.0) + _stages(ranks) * self.latency


def _stages(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


# NVIDIA data sheets of A100 80 GB SXM, H100 SXM, H200 SXM and B200: dense bfloat16, memory, half of the NVLink rate,
# which is given for both ways; 200, 400, 400 and 400 Gb/s of InfiniBand for each GPU, as in the DGX systems.
GPUS = {
    "A100": Gpu(312e12, 2.039e12, 300e9, 25e9),
    "H100": Gpu(989e12, 3.35e12, 450e9, 50e9),
    "H200": Gpu(989e12, 4.8e12, 450e9, 50e9),
    "B200": Gpu(2250e12, 8.0e12, 900e9, 50e9),
}
# Sizes as in the published configurations of Qwen3-4B and Llama-3-70B.
MODELS = {
    "4B": Decoder(36, 2560, 32, 8, 128, 9728, 151_936, tied=True),
    "70B": Decoder(80, 8192, 64, 8, 128, 28_672, 128_256, tied=False),
}
LAYOUTS = {"4B": Layout(tensor=2), "70B": Layout(tensor=8, pipeline=4)}
BATCH = Batch(sequences=1024, length=4096)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything that a time depends on but the objective."""

    model: Decoder
    layout: Layout
    batch: Batch = BATCH
    gpu: Gpu = GPUS["H100"]
    assumed: Assumptions = Assumptions()

    def __post_init__(self) -> None:
        if self.batch.sequences % self.layout.data or self.model.layers % self.layout.pipeline:
            raise ValueError(
                f"data parallel size {self.layout.data} must divide {self.batch.sequences} sequences, and pipeline "
                f"parallel size {self.layout.pipeline} must divide {self.model.layers} layers; choose other sizes"
            )

    @property
    def micro_batches(self) -> int:
        return self.batch.sequences // self.layout.data

    @property
    def tokens(self) -> float:
        """Of a micro-batch, on one rank."""
        return self.batch.length / self.layout.context

    def link(self, span: int) -> Link:
        """Between ranks ``span`` apart at most."""
        assumed, inside = self.assumed, span <= self.assumed.node
        bandwidth = assumed.link_share * (self.gpu.link if inside else self.gpu.network)
        return Link(bandwidth, assumed.link_latency if inside else assumed.network_latency)

    @property
    def tensor_link(self) -> Link:
        return self.link(self.layout.tensor)

    @property
    def context_link(self) -> Link:
        return self.link(self.layout.tensor * self.layout.context)

    @property
    def replica_link(self) -> Link:
        return self.link(self.layout.tensor * self.layout.context * self.layout.data)

    @property
    def stage_link(self) -> Link:
        return self.link(self.layout.gpus)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights, and whose tokens e is taken over."""
        return self.layout.data * self.layout.context


def forward_flops(cluster: Cluster) -> float:
    """Of a micro-batch on one rank of the last stage, which has the output layer too."""
    model, layout = cluster.model, cluster.layout
    attention = 2 * cluster.batch.length * model.heads * model.head_size
    layer = 2 * model.layer_parameters + attention
    head = 2 * model.hidden * model.vocab
    return cluster.tokens * (model.layers / layout.pipeline * layer + head) / layout.tensor


def loss_seconds(cluster: Cluster, bytes_per_logit: float) -> float:
    """Of a micro-batch: its logits through the memory of one rank."""
    logits = cluster.tokens * cluster.model.vocab / cluster.layout.tensor
    return logits * bytes_per_logit / (cluster.gpu.memory * cluster.assumed.memory_share)


def tensor_seconds(cluster: Cluster) -> float:
    """Of a forward or a backward: two all-reduces a layer and one at the embedding or the output layer."""
    model, layout = cluster.model, cluster.layout
    activations = 2 * cluster.tokens * model.hidden
    count = 2 * model.layers / layout.pipeline + 1
    return count * cluster.tensor_link.all_reduce(activations, layout.tensor)


def vocabulary_seconds(cluster: Cluster) -> float:
    """One all-gather of 8 bytes a token and rank: sum of exponentials and logit of the label."""
    size = 8 * cluster.tokens * cluster.layout.tensor
    return cluster.tensor_link.gather(size, cluster.layout.tensor)


def context_seconds(cluster: Cluster) -> float:
    """Of a forward: keys and values of the other ranks, in every layer."""
    model, layout = cluster.model, cluster.layout
    keys_and_values = 2 * 2 * cluster.batch.length * model.kv_heads * model.head_size / layout.tensor
    return model.layers / layout.pipeline * cluster.context_link.gather(keys_and_values, layout.context)


def stage_seconds(cluster: Cluster) -> float:
    """Of a forward or a backward: activations to the next stage, cut over the tensor-parallel ranks."""
    if cluster.layout.pipeline == 1:
        return 0.0
    return cluster.stage_link.broadcast(2 * cluster.tokens * cluster.model.hidden / cluster.layout.tensor, 2)


def ess_seconds(cluster: Cluster, everywhere: bool) -> float:
    """The all-reduce of e; ``everywhere``: also the broadcast to all stages and the read on the host."""
    reduced = cluster.replica_link.all_reduce(32, cluster.replicas)
    if not everywhere:
        return reduced
    return reduced + cluster.stage_link.broadcast(32, cluster.layout.pipeline) + cluster.assumed.host_read


def step_seconds(cluster: Cluster, objective: str) -> dict[str, float]:
    """Parts of a step in seconds, by name; their sum is its time. ``objective``: "grpo", or a source of e."""
    layout, model, assumed = cluster.layout, cluster.model, cluster.assumed
    slots = cluster.micro_batches + layout.pipeline - 1
    compute = forward_flops(cluster) / (cluster.gpu.flops * assumed.mfu)
    links = tensor_seconds(cluster) + context_seconds(cluster) + stage_seconds(cluster)
    parts = {"compute": slots * 3 * compute}
    # the backward of attention sends keys, values and their gradients
    parts["links of the model"] = slots * (2 * links + context_seconds(cluster) + vocabulary_seconds(cluster))
    parts["loss"] = slots * loss_seconds(cluster, 6 if objective == "micro-batch" else 4)
    parts["pre-pass"] = parts["e"] = 0.0
    if objective == "prepass":
        parts["pre-pass"] = slots * (compute + links + vocabulary_seconds(cluster) + loss_seconds(cluster, 2))
    if objective == "reuse":
        again = 9 * cluster.tokens / (cluster.gpu.memory * assumed.memory_share)  # two float32 and a mask
        parts["e"] = cluster.micro_batches * again
    if objective in ("prepass", "reuse"):
        parts["e"] += ess_seconds(cluster, everywhere=True)
    if objective == "micro-batch":
        parts["e"] = cluster.micro_batches * ess_seconds(cluster, everywhere=False)
    mine = model.parameters / (layout.tensor * layout.pipeline)
    # float32 gradients are scattered, bfloat16 weights gathered
    parts["gradients"] = cluster.replica_link.gather(4 * mine, cluster.replicas)
    parts["gradients"] += cluster.replica_link.gather(2 * mine, cluster.replicas)
    # gradient, master weight and two moments are read; master weight, moments and a bfloat16 weight written
    parts["optimizer"] = 30 * mine / cluster.replicas / (cluster.gpu.memory * assumed.memory_share)
    return parts


def overhead(cluster: Cluster, source: str) -> float:
    """Extra time of a P3O step over a GRPO step, as a share of it."""
    base = sum(step_seconds(cluster, GRPO).values())
    return sum(step_seconds(cluster, source).values()) / base - 1.0


def clusters(model: str, gpus: int, gpu: str = "H100", batch: Batch = BATCH) -> Cluster:
    """A model of ``MODELS`` in its layout, with as many replicas as ``gpus`` allow.

    Raises:
        ValueError: a number of GPUs that the layout does not divide, or more replicas than sequences.
    """
    layout = LAYOUTS[model]
    if gpus < 1 or gpus % layout.gpus:
        raise ValueError(f"{model} needs a multiple of {layout.gpus} GPUs, got {gpus}")
    return Cluster(MODELS[model], replace(layout, data=gpus // layout.gpus), batch, GPUS[gpu])


def report(cluster: Cluster) -> str:
    """Parts of a step in milliseconds, one line for each objective."""
    parts = {objective: step_seconds(cluster, objective) for objective in (GRPO, *SOURCES)}
    names = list(parts[GRPO])
    lines = [f"{'ms':12}" + "".join(f"{name:>20}" for name in (*names, "total"))]
    for objective, found in parts.items():
        cells = "".join(f"{1e3 * value:20.3f}" for value in (*found.values(), sum(found.values())))
        lines.append(f"{objective:12}{cells}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="4B")
    parser.add_argument("--gpu", choices=GPUS, default="H100")
    parser.add_argument("--sequences", type=int, default=BATCH.sequences, help="of an optimizer step")
    parser.add_argument("--length", type=int, default=BATCH.length, help="tokens of a sequence")
    for size in ("tensor", "context", "data", "pipeline"):
        parser.add_argument(f"--{size}", type=int, default=1, help="size of the group")
    given = parser.parse_args()
    layout = Layout(given.tensor, given.context, given.data, given.pipeline)
    try:
        cluster = Cluster(MODELS[given.model], layout, Batch(given.sequences, given.length), GPUS[given.gpu])
    except ValueError as error:
        parser.error(str(error))
    print(f"a model, not a measurement: {given.model} on {layout.gpus:,} {given.gpu}")
    print(report(cluster))
    return 0


if __name__ == "__main__":
    sys.exit(main())
