"""Real processes over Gloo: a task runs once on every rank, and what it returns comes back in rank order.

A task is a function of an importable module that takes its rank, and after it whatever ``on_all_ranks`` was given.
"""

import multiprocessing
import os
import pickle
import queue
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist

# the slow imports of a rank; the server leaves out what is not installed
PRELOADED = ["torch", "p3o_kernels", "megatron.core.models.gpt.gpt_model", "megatron.core.optimizer"]
TIMEOUT = 240  # seconds for the slowest rank: several rank sets may start at once on few cores


def run_rank(rank, ranks, port, environment, results, task, arguments):
    os.environ |= environment  # a fork of the server has the server's
    torch.set_num_threads(1)  # several ranks share few cores
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        # pickled here: the queue would hand tensors over in shared memory that dies with this process
        results.put((rank, pickle.dumps(task(rank, *arguments)), None))
    except Exception:  # reported to the test, which fails with the text
        results.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _context(interpret):
    """How ranks start: as forks of a server that has imported what takes seconds, but not initialised anything.

    Triton's interpreter needs fresh processes: the server was started without it.
    """
    if interpret:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def on_all_ranks(task, ranks, *arguments, interpret=False):
    """``interpret``: with Triton's interpreter, which reads the environment when it is imported."""
    # kept here, at a port that nobody else can take meanwhile
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = _context(interpret)
    results = context.Queue()
    with mock.patch.dict(os.environ, TRITON_INTERPRET=str(int(interpret))):
        places = [(rank, ranks, store.port, dict(os.environ), results, task, arguments) for rank in range(ranks)]
        processes = [context.Process(target=run_rank, args=place) for place in places]
        for process in processes:
            process.start()
    try:
        collected = [results.get(timeout=TIMEOUT) for _ in processes]
    except queue.Empty:
        pytest.fail("a rank did not answer: a collective is waiting for another")
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()
    errors = [f"rank {rank}: {error}" for rank, _, error in collected if error]
    assert not errors, "\n".join(errors)
    return [pickle.loads(value) for _, value, _ in sorted(collected)]
