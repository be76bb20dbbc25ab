"""What transformers says about a response, in float64 from its float32 logits."""

import torch

from p3o_train.recording import Request


def logits(model, request, response):
    """[R, V] float64: row j predicts response token j."""
    ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
    with torch.no_grad():
        return model(ids).logits[0, len(request.prompt_ids) - 1 : -1].double()


def log_probs(model, request, response, temperature=1.0):
    """[R] float64 of log_softmax(z / temperature) at the response tokens."""
    scaled = (logits(model, request, response) / temperature).log_softmax(-1)
    return scaled.gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]


def largest_difference(expected, response, part=slice(None)):
    """In nats, over a part of the response."""
    return (expected - torch.tensor(response.log_probs, dtype=torch.float64))[part].abs().max().item()


def make_requests(lengths, first=0):
    """Prompts of these lengths, all different."""
    generator = torch.Generator().manual_seed(7 + first)
    prompts = [torch.randint(0, 512, (length,), generator=generator).tolist() for length in lengths]
    return [Request(f"prompt{first + index}", tuple(ids), index) for index, ids in enumerate(prompts)]
