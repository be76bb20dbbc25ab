"""Which log-probs still belong to which tokens, when responses are put together from turns or their tokens replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from p3o_train.contract_rules import ContractViolation


class Turn(NamedTuple):
    """One request of a conversation and what was sampled for it."""

    prompt_ids: Sequence[int]
    """The whole conversation so far, as the engine was given it."""
    token_ids: Sequence[int]
    """What was sampled."""
    log_probs: Sequence[float | None] | None
    """Of each sampled token; None: not recorded."""
    pairing_mask: Sequence[bool] | None = None
    """False where a token was replaced after it was sampled. None: all True."""


class Conversation(NamedTuple):
    """The arguments of ``Sample.from_lists`` for the sequence that the last turn ends with."""

    token_ids: list[int]
    response_length: int
    """All but the prompt of the first turn."""
    log_probs: list[float | None]
    """[R]; None where nothing was sampled."""
    loss_mask: list[bool]
    """[R] True where a turn sampled."""
    pairing_mask: list[bool]
    """[R] False where a turn sampled, but other tokens or a replaced one are in the sequence now."""


def check_turns(turns: Sequence[Turn]) -> list[bool]:
    """For each turn, whether its log-probs belong to the sequence that the last turn ends with.

    They do if that begins with the turn's prompt and response, token for token. Text that is decoded and encoded again
    need not give the same tokens: then every turn from the first difference on has recorded log-probs of other tokens
    or after another context, and only the last is sure to have its own.
    """
    whole = [*turns[-1].prompt_ids, *turns[-1].token_ids] if turns else []
    own = ([*turn.prompt_ids, *turn.token_ids] for turn in turns)
    return [whole[: len(ids)] == ids for ids in own]


def accumulate_turns(turns: Sequence[Turn]) -> Conversation:
    """Puts a conversation together; what was not sampled, such as the output of tools, is masked.

    Raises:
        ContractViolation: no turns, a turn without log-probs or with another number of them or of mask entries than
            tokens, a conversation whose first prompt was changed later.
    """
    if not turns:
        raise ContractViolation("turns are missing; a conversation has one at least")
    for number, turn in enumerate(turns):
        _check_turn(number, turn, turns[0])
    paired = check_turns(turns)
    whole = [*turns[-1].prompt_ids, *turns[-1].token_ids]
    begin = len(turns[0].prompt_ids)
    if whole[:begin] != list(turns[0].prompt_ids):
        raise ContractViolation(
            f"the {begin} prompt tokens of turn 0 are not the first of the {len(whole)} tokens of turn "
            f"{len(turns) - 1}; train on the turns as samples of their own"
        )
    length = len(whole) - begin
    log_probs: list[float | None] = [None] * length
    loss_mask, pairing = [False] * length, [True] * length
    for turn, own in zip(turns, paired, strict=True):
        place = len(turn.prompt_ids) - begin
        masks = [True] * len(turn.token_ids) if turn.pairing_mask is None else turn.pairing_mask
        for index, (value, mask) in enumerate(zip(turn.log_probs or (), masks, strict=True), place):
            if 0 <= index < length:
                log_probs[index], loss_mask[index] = value, True
                pairing[index] = own and bool(mask)
    return Conversation(whole, length, log_probs, loss_mask, pairing)


def _check_turn(number: int, turn: Turn, first: Turn) -> None:
    tokens = len(turn.token_ids)
    if turn.log_probs is None:
        before = f", though turn 0 has {len(first.log_probs)}" if first.log_probs is not None else ""
        raise ContractViolation(
            f"turn {number} requires behavior log-probs, got none for {tokens} tokens{before}; let the engine return "
            "them for every request of a conversation"
        )
    for name, values in (("log_probs", turn.log_probs), ("pairing_mask", turn.pairing_mask)):
        if values is not None and len(values) != tokens:
            raise ContractViolation(
                f"turn {number}: {name} has {len(values)} entries for {tokens} sampled tokens after "
                f"{len(turn.prompt_ids)} of prompt; one for each token is needed, and none is made up"
            )


def replace_placeholders(
    token_ids: Sequence[int] | Tensor,
    placeholder_ids: Iterable[int | None],
    pad_token_id: int,
    mask_suffix: bool = False,
) -> tuple[Tensor, Tensor, dict[int, int]]:
    """Replaces placeholders of images, sounds and videos that a model wrote into its response, features or not.

    Args:
        token_ids: [R] response.
        placeholder_ids: of any number of kinds; None for a kind that a tokenizer does not have.
        pad_token_id: what they are replaced with.
        mask_suffix: the tokens after the first replaced one were sampled after the placeholder, and are trained on
            after padding; True masks them as well.

    Returns:
        [R] int64 token ids; [R] bool pairing mask, False where replaced (and after it); placeholder id -> number
        of them, for those that occurred.

    Raises:
        ValueError: a pad token that is a placeholder itself.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    unwanted = sorted({token for token in placeholder_ids if token is not None})
    if pad_token_id in unwanted:
        raise ValueError(f"pad_token_id {pad_token_id} is one of placeholder_ids {unwanted}; give another token")
    hit = torch.isin(ids, torch.tensor(unwanted, dtype=torch.int64))
    masked = hit.long().cumsum(0) > 0 if mask_suffix else hit
    return torch.where(hit, pad_token_id, ids), ~masked, dict(Counter(ids[hit].tolist()))


def check_custom_generate(function: Callable[..., Any]) -> None:
    """Refuses a rollout function that does not say that it returns behavior log-probs as the contract has them.

    Raises:
        ContractViolation: no attribute ``p3o_behavior_logprob_contract`` that is True.
    """
    name = "p3o_behavior_logprob_contract"
    declared = getattr(function, name, None)
    if declared is not True:
        raise ContractViolation(
            f"{getattr(function, '__qualname__', function)!r}: {name} is {declared!r}; a rollout function of your own "
            f"must return the recorded log-prob of every sampled token, and say so with {name} = True"
        )
