"""Right results at a needless price: what the compile budgets must notice."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def masked_kernel(x_ptr, out_ptr, num_tokens, BLOCK: tl.constexpr):
    """Masks every block, not only the last: without knowing T, no load is wider than one token."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token, mask=token < num_tokens, other=0.0)
    tl.store(out_ptr + token, 2.0 * x, mask=token < num_tokens)


@triton.jit(do_not_specialize=["num_tokens"])
def giant_tile_kernel(x_ptr, out_ptr, num_tokens, BLOCK: tl.constexpr):
    """Keeps a whole tile in registers between two passes over it."""
    for start in range(0, num_tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token)
        tl.store(out_ptr + token, x / tl.sum(x, 0))


@triton.jit(do_not_specialize=["vocab"])
def masked_row_kernel(logits_ptr, out_ptr, vocab, BLOCK: tl.constexpr):
    """Masks every block of a row: a lean loop, but it moves one logit at a time."""
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + column, mask=column < vocab, other=0.0).to(tl.float32)
        tl.store(out_ptr + column, tl.exp2(x).to(out_ptr.dtype.element_ty), mask=column < vocab)


@triton.jit(do_not_specialize=["vocab"])
def two_powers_row_kernel(logits_ptr, out_ptr, vocab, BLOCK: tl.constexpr):
    """Takes two exponentials of a logit where the gradient needs one."""
    for start in range(0, vocab // BLOCK * BLOCK, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + column).to(tl.float32)
        power = tl.exp2(x) * (1.0 + tl.exp2(0.7 * x))
        tl.store(out_ptr + column, power.to(out_ptr.dtype.element_ty))
