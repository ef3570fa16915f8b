"""Loads a model directory's weights onto a device."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from executor_svc.device.choice import choose_dtype, dtype_name, resolve_device
from executor_svc.device.free_memory import available_bytes
from executor_svc.model.config import ModelConfig, read_model_config
from executor_svc.model.embeddings import settle_tie
from executor_svc.model.files.checkpoint import Checkpoint
from executor_svc.model.files.fingerprint import model_fingerprint
from executor_svc.model.packing import pack_weights
from executor_svc.model.weights import (
    DecoderWeights,
    check_tensors,
    load_weights,
    stored_bytes,
    weight_bytes,
)
from kernels.packed_linear import can_pack
from tandem.errors import OutOfMemory
from tandem.wording import gib

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """
    A loaded model, ready to compute.

    Attributes:
        fingerprint: sha256 (hex) of description, weights, tokenizer and type: models with equal
            fingerprints give equal tokens.
        weight_bytes: Device memory that the weights take.
    """

    config: ModelConfig
    weights: DecoderWeights
    dtype: torch.dtype
    device: torch.device
    fingerprint: str
    weight_bytes: int

    @property
    def dtype_name(self) -> str:
        """Name of the type, as in `load_model`."""
        return dtype_name(self.dtype)


def load_model(
    model_dir: Path, *, dtype: str = "auto", device: str = "auto", packs: bool = False
) -> LoadedModel:
    """
    Load a Hugging Face directory.

    The fingerprint is computed in a thread while the weights load, so start-up pays for reading the
    files once.

    Args:
        model_dir: Directory with config.json and model.safetensors or its shards.
        dtype: "auto", "float32", "bfloat16" or "float16"; weights are converted piece by piece.
        device: "auto", "cpu", "cuda" or "cuda:N".
        packs: Bring matrices into the order of our own products if there are any for this type
            and device; other operations cannot use packed matrices.

    Raises:
        InvalidModel: The model is missing, incomplete, corrupt or of a kind that is not supported;
            the message names the file.
        InvalidConfig: The dtype or device is unknown, or the device does not exist.
        OutOfMemory: The weights do not fit.
    """
    started = time.monotonic()
    config = read_model_config(model_dir)
    where = resolve_device(device)
    kind, why = choose_dtype(dtype, config.checkpoint_dtype, where)
    config, checkpoint = open_checkpoint(model_dir, config, kind)
    needed = weight_bytes(config, kind)
    check_weights_fit(model_dir, needed, kind, where)
    with ThreadPoolExecutor(1, thread_name_prefix="fingerprint") as pool:
        digest = pool.submit(model_fingerprint, model_dir, checkpoint.files, dtype_name(kind))
        held = [load_weights(config, checkpoint, kind, where)]
        fingerprint = digest.result()
    weights = pack_weights(held) if packs and can_pack(kind, where) else held.pop()
    model = LoadedModel(
        config=config,
        weights=weights,
        dtype=kind,
        device=where,
        fingerprint=fingerprint,
        weight_bytes=stored_bytes(weights),
    )
    _log.info(
        "model_loaded",
        architecture=config.architecture,
        dtype=model.dtype_name,
        dtype_because=why,
        device=str(where),
        weight_bytes=model.weight_bytes,
        fingerprint=model.fingerprint,
        seconds=round(time.monotonic() - started, 3),
    )
    return model


def open_checkpoint(
    model_dir: Path, config: ModelConfig, dtype: torch.dtype
) -> tuple[ModelConfig, Checkpoint]:
    """
    Open the weights' files and compare what they describe with the model.

    Returns:
        The model, with `tied_embeddings` corrected by the files, and the checkpoint.

    Raises:
        InvalidModel: Files are missing, incomplete, corrupt or another model's.
    """
    checkpoint = Checkpoint.open(model_dir)
    config = settle_tie(config, checkpoint, dtype)
    check_tensors(config, checkpoint)
    return config, checkpoint


def check_weights_fit(
    model_dir: Path, needed: int, dtype: torch.dtype, device: torch.device
) -> None:
    """
    Refuse weights that need more bytes than are free.

    Raises:
        OutOfMemory: The weights do not fit; says what would help.
    """
    free = available_bytes(device)
    if free is None or needed <= free:
        return
    advice = "use a smaller model or a device with more memory"
    if dtype == torch.float32:
        advice = f"use --dtype bfloat16, which needs {gib(needed / 2)} GiB, or a smaller model"
    raise OutOfMemory(
        f"the weights of {model_dir} need {gib(needed)} GiB as {dtype_name(dtype)} but only "
        f"{gib(free)} GiB are free on {device}: {advice}"
    )
