"""What ``test_tensor_parallel`` runs on every rank: problems, the calls on them, and what the calls leave behind."""

import contextlib
import itertools
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import p3o_kernels
from p3o_kernels import reference

TOKENS, WIDTH = 23, 8
SHARD = 13  # entries a rank: no power of two, and no 16-byte boundary between shards
WIDE_SHARD = 1101  # above the 1024 entries that a tile may always have
COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "reduce_scatter_tensor", "barrier")
TERMS = {"entropy_coef": 0.05, "ref_kl_coef": 0.3}
E_GIVEN = p3o_kernels.RatioStats.from_vector(torch.tensor([20.0, 25.0, 23.0, 0.0], dtype=torch.float64)).to_context()
STEP_SCOPE = {"context": E_GIVEN, "num_tokens": 40, "return_entropy": True}
OPS = {
    "logits": ("token_log_probs", {}),
    "logits, entropy": ("token_log_probs", {"return_entropy": True}),
    "hidden": ("linear_log_probs", {}),
    "hidden, entropy": ("linear_log_probs", {"return_entropy": True}),
    "logits, loss": ("p3o_loss_from_logits", TERMS),
    "hidden, loss": ("p3o_loss_from_hidden", TERMS),
    "logits, loss, e given": ("p3o_loss_from_logits", STEP_SCOPE),
    "hidden, loss, e given": ("p3o_loss_from_hidden", STEP_SCOPE),
}
NO_LOSS = [name for name in OPS if "loss" not in name]
FROM_LOGITS = [name for name in OPS if "logits" in name]
FROM_HIDDEN = [name for name in OPS if "hidden" in name]
CASES = {
    "plain": list(OPS),
    "masked rows of NaN": list(OPS),
    "no valid row": list(OPS),
    "temperature of each row": list(OPS),
    "temperature and softcap": list(OPS),
    "a shard of -inf": list(OPS),
    "a row of -inf on one shard": FROM_LOGITS,
    "label at -inf": NO_LOSS,
    "label outside": NO_LOSS,
    "offset 1e4": list(OPS),
    "one shard holds all probability": list(OPS),
    "column tiles": FROM_HIDDEN,
    "column and row tiles": FROM_HIDDEN,
    "bfloat16": FROM_HIDDEN,
}
INTERPRETED = {  # half a second a call
    "plain": ["hidden, loss"],
    "masked rows of NaN": ["hidden, loss"],
    "temperature and softcap": ["logits, entropy"],
    "a shard of -inf": ["logits, entropy"],
}
DATA_ROWS = (slice(0, 14), slice(14, TOKENS))
WORKSPACE = {"column tiles": 4 * TOKENS * 1024, "column and row tiles": 4 * 8 * 1024}
SHARDED = ("d logits", "d weight", "d bias")


@dataclass
class Problem:
    """A whole batch; tensors of ``tokens`` have a row for each token."""

    tokens: dict[str, Any]
    layer: dict[str, Any]
    options: dict[str, Any]
    shard: int


def problem(case, ranks):
    generator = torch.Generator().manual_seed(7)
    shard = WIDE_SHARD if "tiles" in case else SHARD
    vocab = ranks * shard

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    layer = {"weight": 0.5 * normal(vocab, WIDTH), "bias": 0.5 * normal(vocab)}
    hidden, options = normal(TOKENS, WIDTH), {}
    edges = [entry for rank in range(ranks) for entry in (rank * shard, rank * shard + shard - 1)]
    labels = torch.cat([torch.tensor(edges), torch.randint(vocab, (TOKENS - len(edges),), generator=generator)])
    made = Problem({"labels": labels, "hidden": hidden, "mask": None}, layer, options, shard)
    if case == "a shard of -inf":
        layer["bias"][:shard] = -torch.inf
        labels[labels < shard] += shard
    elif case == "label at -inf":
        layer["bias"][labels[2]] = -torch.inf
    elif case == "label outside":
        labels[:4] = torch.tensor([-1, vocab, vocab + shard, -100])
    elif case == "offset 1e4":
        layer["bias"] += 1e4
    elif case == "one shard holds all probability":
        layer["bias"][:shard] += 200.0
        labels[labels >= shard] %= shard
    elif case == "temperature of each row":
        made.tokens["temperature"] = 0.5 + torch.rand(TOKENS, generator=generator)
    elif case == "temperature and softcap":
        options |= {"temperature": 0.7, "softcap": 3.0}
    elif case == "bfloat16":
        made.tokens["hidden"], layer["weight"], layer["bias"] = (t.bfloat16() for t in (hidden, *layer.values()))
    fill(made, case, normal)
    return made


def fill(made, case, normal):
    """Logits, upstream gradients, and the inputs of the loss near the log-probs that the logits have."""
    tokens, labels = made.tokens, made.tokens["labels"]
    tokens |= {"upstream": normal(TOKENS), "entropy_upstream": normal(TOKENS)}
    tokens["logits"] = torch.nn.functional.linear(tokens["hidden"], **made.layer)
    if case == "a row of -inf on one shard":
        labels[5] = 2 * made.shard - 1
        tokens["logits"][5, : made.shard] = -torch.inf
    exact = run(reference, "logits", made, torch.float64)["log_probs"].float()
    exact = torch.where(exact.isfinite(), exact, 0.0)
    tokens["behavior_log_probs"], tokens["ref_log_probs"] = exact + 0.3 * normal(TOKENS), exact + 0.2 * normal(TOKENS)
    tokens["advantages"] = normal(TOKENS)
    if case == "label outside":
        tokens["upstream"][:4] = 0.0  # a probability of 0 that no logit can change has no gradient to compare
    if case == "no valid row":
        tokens["mask"] = torch.zeros(TOKENS, dtype=torch.bool)
    if case == "masked rows of NaN":
        tokens["mask"] = torch.arange(TOKENS) % 3 != 1
        labels[~tokens["mask"]] = 10**6
        for name in ("logits", "hidden", "behavior_log_probs", "advantages", "ref_log_probs"):
            tokens[name][~tokens["mask"]] = torch.nan


def some_rows(made, rows):
    """The same problem with a part of the tokens."""
    return replace(made, tokens={name: None if t is None else t[rows] for name, t in made.tokens.items()})


def leaves_of(op, made, dtype, columns, frozen):
    """Cut to ``columns`` by views into the whole, so that rows of logits start at odd addresses."""
    if "hidden" in op:
        hidden, weight, bias = made.tokens["hidden"], made.layer["weight"], made.layer["bias"]
        cut = {"hidden": hidden, "weight": weight[columns], "bias": bias[columns]}
    else:
        cut = {"logits": made.tokens["logits"][:, columns]}
    return {name: t.detach().to(dtype or t.dtype).requires_grad_(name not in frozen) for name, t in cut.items()}


@contextlib.contextmanager
def counted(calls):
    """Adds (name, elements) of every collective to ``calls``."""

    def wrap(name, function):
        def called(*arguments, **options):
            calls.append((name, next(a.numel() for a in reversed(arguments) if isinstance(a, torch.Tensor))))
            return function(*arguments, **options)

        return called

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, wrap(name, getattr(dist, name))))
        yield


def forward(module, op, made, leaves, dtype, options):
    """(values by name, differentiable outputs, gradients that arrive at them)."""
    name, own = OPS[op]
    matrices = [leaf for key, leaf in leaves.items() if key != "bias"]
    tokens = {
        k: v.to(dtype) if dtype and v is not None and v.is_floating_point() else v for k, v in made.tokens.items()
    }
    options = {"mask": tokens["mask"], **made.options, **own, **options}
    options |= {"bias": leaves["bias"]} if "bias" in leaves else {}
    options |= {"temperature": tokens["temperature"]} if "temperature" in tokens else {}
    if "loss" in op:
        options |= {"ref_log_probs": tokens["ref_log_probs"]}
        rest = (tokens["labels"], tokens["behavior_log_probs"], tokens["advantages"])
        output = getattr(module, name)(*matrices, *rest, **options)
        values = {"loss": output.loss, "metrics": output.metrics.vector, "ess": output.context.ess}
        return values, [output.loss], [None]
    outputs = getattr(module, name)(*matrices, tokens["labels"], **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [tokens["upstream"], tokens["entropy_upstream"]][: len(outputs)]
    upstream = [grad.to(value.dtype) for grad, value in zip(upstream, outputs, strict=True)]
    return dict(zip(("log_probs", "entropy"), outputs, strict=False)), outputs, upstream


def run(module, op, made, dtype=None, columns=slice(None), frozen=(), passes=1, **options):
    """Values, gradients and collectives of ``passes`` calls; ``dtype`` None: as the tensors are."""
    leaves = leaves_of(op, made, dtype, columns, frozen)
    calls = {"forward": [], "backward": []}
    for _ in range(passes):
        with counted(calls["forward"]):
            values, outputs, upstream = forward(module, op, made, leaves, dtype, options)
        with counted(calls["backward"]):
            torch.autograd.backward(outputs, upstream)
    values = {name: value.detach().clone() for name, value in values.items()}
    return values | {f"d {name}": leaf.grad for name, leaf in leaves.items()} | {"calls": calls}


def refusal(*arguments, **options):
    """The text of the ValueError that a call must raise."""
    try:
        run(*arguments, **options)
    except ValueError as error:
        return str(error)
    return None


class ReducedGradient(torch.autograd.Function):
    """What Megatron's ColumnParallelLinear does to its input: the layer below gets a gradient summed over the ranks."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def column_parallel(made, columns, options):
    """d(hidden) of a Megatron layer in front of ``token_log_probs``."""
    leaves = leaves_of("hidden", made, None, columns, ())
    logits = torch.nn.functional.linear(ReducedGradient.apply(leaves["hidden"]), leaves["weight"], leaves["bias"])
    p3o_kernels.token_log_probs(logits, made.tokens["labels"], **options).backward(made.tokens["upstream"])
    return {"d hidden": leaves["hidden"].grad}


def all_cases(rank, ranks, cases, options):
    answers = {}
    for case, ops in cases.items():
        made = problem(case, ranks)
        columns = slice(rank * made.shard, (rank + 1) * made.shard)
        extra = options | ({"workspace_bytes": WORKSPACE[case]} if case in WORKSPACE else {})
        for op, run_number in itertools.product(ops, (1, 2)):
            key = (options["backend"], case, op, run_number)
            answers[key] = run(p3o_kernels, op, made, columns=columns, **extra)
    return answers


def special_cases(rank, ranks, options):
    made, half = problem("plain", ranks), problem("bfloat16", ranks)
    columns = slice(rank * SHARD, (rank + 1) * SHARD)
    main_grad = torch.full((SHARD, WIDTH), 0.5)
    twice = run(p3o_kernels, "hidden", half, columns=columns, passes=2, main_grad=main_grad, **options)
    masked = problem("masked rows of NaN", ranks)
    valid = int(masked.tokens["mask"].sum())
    return {
        "megatron": column_parallel(made, columns, options),
        "frozen weight": run(p3o_kernels, "hidden", made, columns=columns, frozen=("weight",), **options),
        "frozen hidden": run(p3o_kernels, "hidden", made, columns=columns, frozen=("hidden",), **options),
        "main_grad": twice | {"main_grad": main_grad},
        "valid_tokens": run(p3o_kernels, "hidden, loss", masked, columns=columns, valid_tokens=valid, **options),
        "in place": run(p3o_kernels, "logits, loss", made, columns=columns, inplace_backward=True, **options),
    }


def bad_cases(rank, ranks, options):
    """Everything that must be refused on all ranks, one after the other, in one group."""
    answers = {}
    made = problem("plain", ranks)
    columns = slice(rank * SHARD, (rank + 1) * SHARD - (rank == ranks - 1))
    for op in OPS:
        quiet = options | ({"validate": False} if "loss" in op else {})
        answers["unequal", op] = run(p3o_kernels, op, made, columns=columns, **quiet)
        if "loss" in op:
            answers["unequal, refused", op] = refusal(p3o_kernels, op, made, columns=columns, **options)
    for case, op in itertools.product(("NaN on the last shard", "label at -inf", "label outside"), OPS):
        made = problem(case, ranks)
        if case == "NaN on the last shard":
            made.tokens["logits"][3, -1] = made.layer["weight"][-1, 0] = torch.nan
        if "loss" in op:
            columns = slice(rank * SHARD, (rank + 1) * SHARD)
            answers[case, op] = refusal(p3o_kernels, op, made, columns=columns, **options)
    ones = torch.ones(())
    dist.all_reduce(ones)
    return answers | {"usable": ones.item()}


def grid_cases(rank, options):
    """2 (data) x 2 (tensor): 14 tokens and 9; then none and 9; then a NaN in the first 14."""
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    data, tensor = divmod(rank, 2)
    options = options | {"process_group": groups[data], "ess_process_group": groups[2 + tensor]}
    columns = slice(tensor * SHARD, (tensor + 1) * SHARD)
    answers = {}
    for op in ("logits, loss", "hidden, loss"):
        made = some_rows(problem("plain", 2), DATA_ROWS[data])
        answers["grid", op] = run(p3o_kernels, op, made, columns=columns, num_tokens=TOKENS, **options)
        if data == 0:
            made.tokens["advantages"][3] = torch.nan
        answers["grid, NaN", op] = refusal(p3o_kernels, op, made, columns=columns, **options)
        made.tokens["mask"] = torch.full(made.tokens["labels"].shape, data == 1)
        answers["grid, no token", op] = run(p3o_kernels, op, made, columns=columns, num_tokens=9, **options)
    return answers


def everything(rank, ranks):
    options = {"process_group": dist.group.WORLD, "backend": "eager"}
    answers = all_cases(rank, ranks, CASES, options) | special_cases(rank, ranks, options)
    if ranks == 2:
        answers |= all_cases(rank, ranks, INTERPRETED, options | {"backend": "triton"})
    if ranks == 4:
        answers |= grid_cases(rank, {"backend": "eager"})
    return answers | bad_cases(rank, ranks, options)
