"""The training layer: P3O on Megatron-Core with rollouts from an inference server.

It will hold what lies between the fused operators of ``p3o_kernels`` and a training run: packing samples
into token batches, the sums that cross ranks, the loss, weight transfer to the rollout engine and the loop
itself. The order of dependence is one way: this package imports ``p3o_kernels``, never the reverse.

Importing it loads neither Megatron-Core nor an inference engine; those come with the extras ``train``,
``te`` and ``rollout``, in the modules that need them.
"""
