"""Samples for the tests of the training layer: small ones by hand and any by hypothesis."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

from p3o_train.types import ContextLayout, Sample

# a decorator, not a profile: a profile would be that of every test module collected later
PROPERTY = settings(deadline=None, max_examples=60, derandomize=True)


def make_sample(prompt=2, response=3, *, valid=None, first_token=100, **fields):
    """Token ids count up from ``first_token``; the log-prob of response token j is -1 - j."""
    fields.setdefault("sample_id", f"s{first_token}")
    return Sample.from_lists(
        list(range(first_token, first_token + prompt + response)),
        response,
        [-1.0 - index for index in range(response)],
        valid,
        **fields,
    )


def layouts(order, cp_size, tp_size=1):
    """The layout of every context-parallel rank."""
    return [ContextLayout(cp_size, rank, tp_size, order) for rank in range(cp_size)]


@st.composite
def sample_lists(draw):
    """One to five samples with masks; token ids are unique, so that a label tells where it comes from."""
    samples, token = [], 1
    for index in range(draw(st.integers(1, 5))):
        prompt, response = draw(st.integers(1, 9)), draw(st.integers(0, 12))
        masks = [draw(st.lists(st.booleans(), min_size=response, max_size=response)) for _ in range(2)]
        log_probs = [-0.001 * (token + prompt + place) for place in range(response)]
        both = [a and b for a, b in zip(*masks, strict=True)]
        log_probs = [value if valid else float("nan") for value, valid in zip(log_probs, both, strict=True)]
        ids = range(token, token + prompt + response)
        samples.append(
            Sample.from_lists(ids, response, log_probs, masks[0], pairing_mask=masks[1], sample_id=f"s{index}")
        )
        token += prompt + response
    return samples


CUTS = st.sampled_from([(order, cp, tp) for order in ("zigzag", "contiguous") for cp in (1, 2, 4) for tp in (1, 2)])


def log_probs_of(samples):
    return [torch.where(sample.valid_mask, sample.behavior_log_probs, 0.0) for sample in samples]
