"""Which rank holds which rollout engine."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from p3o_train.config import TrainConfig
from p3o_train.hf_files import save_hf
from p3o_train.hf_model import hf_config
from p3o_train.local_engine import LocalEngine
from p3o_train.model import ModelConfig
from p3o_train.parallel import ParallelGroups
from p3o_train.rollouts import EngineShare
from p3o_train.runtime import Trainee
from p3o_train.sglang_engine import SGLangEngine


def engine_share(config: TrainConfig, model: ModelConfig, trainee: Trainee, log_prob_kind: str) -> EngineShare:
    """The engine of this rank, if it holds one.

    local: the first rank of each replica has the whole model once more and answers its share of the requests.
    sglang: the first rank of all speaks to the servers, which take new weights from the run directory.

    Args:
        log_prob_kind: "scaled" or "raw", what is recorded.
    """
    if config.rollout_engine == "local":
        leads = _leads_replica(trainee.groups)
        if not leads:
            return EngineShare(None)
        engine = LocalEngine(
            hf_config(model), dtype=model.dtype, device=trainee.device, records_raw=log_prob_kind == "raw"
        )
        return EngineShare(engine, trainee.dp_rank, trainee.dp_size)
    if dist.is_initialized() and dist.get_rank() != 0:
        return EngineShare(None)
    described = hf_config(model)
    servers = SGLangEngine(
        [url.strip() for url in config.sglang_urls.split(",")],
        model.vocab_size,
        save=lambda directory, weights: save_hf(directory, described, weights),
        weights_dir=Path(config.run_dir) / "weights",
        max_concurrency=config.rollout_max_concurrency,
        returns_original=log_prob_kind == "raw",
    )
    return EngineShare(servers)


def _leads_replica(groups: ParallelGroups) -> bool:
    return all(group is None or group.rank() == 0 for group in (groups.tensor, groups.context, groups.pipeline))
