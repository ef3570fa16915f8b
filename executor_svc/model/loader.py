"""Loads a model directory's weights onto a device."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
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
from executor_svc.model.files.fingerprint import file_digests, fingerprint_of, model_files
from executor_svc.model.packing import pack_weights
from executor_svc.model.shares import rank_config, sharding_of
from executor_svc.model.weights import (
    DecoderWeights,
    check_tensors,
    load_weights,
    stored_bytes,
    weight_bytes,
)
from executor_svc.parallel.collectives import TensorCollectives
from executor_svc.parallel.process_groups import SINGLE, ProcessGroups
from executor_svc.parallel.sharding import Sharding
from kernels.packed_linear import can_pack
from tandem.errors import OutOfMemory
from tandem.wording import gib

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """
    A loaded model, or one rank's share of it, ready to compute.

    Attributes:
        config: The whole model.
        weights: All weights, or those of the rank.
        fingerprint: sha256 (hex) of description, weights, tokenizer and type: models with equal
            fingerprints give equal tokens.
        weight_bytes: Device memory that the weights take.
        groups: The ranks that compute the model together.
    """

    config: ModelConfig
    weights: DecoderWeights
    dtype: torch.dtype
    device: torch.device
    fingerprint: str
    weight_bytes: int
    groups: ProcessGroups = SINGLE

    @property
    def sharding(self) -> Sharding:
        """The share of the model that this rank holds."""
        return sharding_of(self.config, self.groups.tensor_rank, self.groups.tensor_size)

    @property
    def rank_config(self) -> ModelConfig:
        """Geometry of this rank: its heads and its part of the MLP; the vocabulary is whole."""
        return rank_config(self.config, self.sharding)

    @property
    def dtype_name(self) -> str:
        """Name of the type, as in `load_model`."""
        return dtype_name(self.dtype)


def load_model(
    model_dir: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    packs: bool = False,
    groups: ProcessGroups = SINGLE,
) -> LoadedModel:
    """
    Load a Hugging Face directory, or this rank's share of it.

    The fingerprint is computed in a thread while the weights load, so start-up pays for reading the
    files once. Ranks that read the same files divide them; on each host all are hashed, and the
    fingerprint is the same for any number of ranks.

    Args:
        model_dir: Directory with config.json and model.safetensors or its shards.
        dtype: "auto", "float32", "bfloat16" or "float16"; weights are converted piece by piece.
        device: "auto", "cpu", "cuda" or "cuda:N".
        packs: Bring matrices into the order of our own products if there are any for this type
            and device; other operations cannot use packed matrices.
        groups: The ranks that load the model together, all with the same arguments.

    Raises:
        InvalidModel: The model is missing, incomplete, corrupt or of a kind that is not supported;
            the message names the file.
        InvalidConfig: The dtype or device is unknown, or the device does not exist, or so many
            ranks cannot hold the model.
        OutOfMemory: The weights do not fit.
    """
    started = time.monotonic()
    config = read_model_config(model_dir)
    sharding = sharding_of(config, groups.tensor_rank, groups.tensor_size)
    where = resolve_device(device)
    kind, why = choose_dtype(dtype, config.checkpoint_dtype, where)
    config, checkpoint = open_checkpoint(model_dir, config, kind)
    files, ranks = model_files(model_dir, checkpoint.files), TensorCollectives(groups)
    num_beside, peers = _ranks_beside(ranks.all_of(_place_of(files[0])), groups.tensor_rank)
    own_bytes = weight_bytes(config, kind, sharding=sharding)
    check_weights_fit(model_dir, own_bytes, kind, where, num_processes=num_beside)
    ranks.all_of(None)  # until all have looked at the free memory, none loads
    own_files = files[peers.index(groups.tensor_rank) :: len(peers)]
    with ThreadPoolExecutor(1, thread_name_prefix="fingerprint") as pool:
        digests = pool.submit(file_digests, own_files)
        held = [load_weights(config, checkpoint, kind, where, sharding=sharding)]
        found = ranks.all_of(digests.result())
    digest = fingerprint_of((file for one in peers for file in found[one]), dtype_name(kind))
    weights = pack_weights(held) if packs and can_pack(kind, where) else held.pop()
    model = LoadedModel(
        config=config,
        weights=weights,
        dtype=kind,
        device=where,
        fingerprint=digest,
        weight_bytes=stored_bytes(weights),
        groups=groups,
    )
    _log_loaded(model, why, time.monotonic() - started)
    return model


def _log_loaded(model: LoadedModel, dtype_because: str, seconds: float) -> None:
    groups = model.groups
    place = {"tensor_rank": groups.tensor_rank, "tensor_size": groups.tensor_size}
    _log.info(
        "model_loaded",
        architecture=model.config.architecture,
        dtype=model.dtype_name,
        dtype_because=dtype_because,
        device=str(model.device),
        weight_bytes=model.weight_bytes,
        fingerprint=model.fingerprint,
        seconds=round(seconds, 3),
        **(place if groups.tensor is not None else {}),
    )


def _place_of(file: Path) -> tuple[str, int, int]:
    """Return the host and the file's identity there, equal for ranks that read the same files."""
    status = file.stat()
    return platform.node(), status.st_dev, status.st_ino


def _ranks_beside(places: Sequence[tuple[str, int, int]], rank: int) -> tuple[int, list[int]]:
    """
    Return the number of ranks on the host of a rank, and the ranks that read the same files, both
    with itself.
    """
    num_beside = [host for host, *_ in places].count(places[rank][0])
    return num_beside, [one for one, place in enumerate(places) if place == places[rank]]


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
    model_dir: Path,
    needed: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_processes: int = 1,
) -> None:
    """
    Refuse weights that need more bytes than are free.

    Args:
        model_dir: Directory of the model, for the message.
        needed: Bytes that one process needs.
        dtype: Type of the weights.
        device: Where they are to lie; each process has a GPU of its own.
        num_processes: Processes that load as much on this host.

    Raises:
        OutOfMemory: The weights do not fit; says what would help.
    """
    free = available_bytes(device)
    needed *= num_processes if device.type == "cpu" else 1
    if free is None or needed <= free:
        return
    advice = "use a smaller model or a device with more memory"
    if dtype == torch.float32:
        advice = f"use --dtype bfloat16, which needs {gib(needed / 2)} GiB, or a smaller model"
    raise OutOfMemory(
        f"the weights of {model_dir} need {gib(needed)} GiB as {dtype_name(dtype)} but only "
        f"{gib(free)} GiB are free on {device}: {advice}"
    )
