"""Real processes over Gloo: a task runs once on every rank, and what it returns comes back in rank order.

A task is a function of an importable module that takes its rank, and after it whatever ``on_all_ranks`` was given.
"""

import multiprocessing
import os
import pickle
import queue
import socket
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist

TIMEOUT = 240  # seconds for the slowest rank: several rank sets may start at once on few cores


def run_rank(rank, ranks, port, results, task, arguments):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)  # several ranks share few cores
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        # pickled here: the queue would hand tensors over in shared memory that dies with this process
        results.put((rank, pickle.dumps(task(rank, *arguments)), None))
    except Exception:  # reported to the test, which fails with the text
        results.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def on_all_ranks(task, ranks, *arguments, interpret=False):
    """``interpret``: with Triton's interpreter, which reads the environment when it is imported."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    places = [(rank, ranks, port, results, task, arguments) for rank in range(ranks)]
    processes = [context.Process(target=run_rank, args=place) for place in places]
    with mock.patch.dict(os.environ, TRITON_INTERPRET=str(int(interpret))):
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
