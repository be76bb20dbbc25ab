"""The training layer: P3O on Megatron-Core, from samples to weights.

    types, packing, batching, advantage     samples to packed micro-batches of a data- and context-parallel rank
    objective, passes, step, replay         e of a step, then its gradients, on Megatron's own schedules
    parallel, agreement                     what crosses ranks: sums of tensors, and verdicts
    model, runtime, rollout, checkpoint     a decoder with optimizer, sampling, exact resume
    arguments, config, trainer, cli         flags and refusals, the loop, ``p3o train`` and ``p3o doctor``

This package imports ``p3o_kernels``, never the reverse. Importing it loads neither Megatron-Core nor an inference
engine; those come with the extras ``train``, ``te`` and ``rollout``, in the functions that need them.
"""
