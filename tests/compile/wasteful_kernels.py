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
