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
from executor_svc.parallel.collectives import AllRanks
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
        return _share_of(self.config, self.groups)

    @property
    def rank_config(self) -> ModelConfig:
        """Geometry of this rank: its layers, heads and part of MLPs; the vocabulary is whole."""
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
        InvalidConfig: The dtype or device is unknown or not there, or so many ranks cannot hold the
            model.
        OutOfMemory: The weights do not fit.
    """
    started = time.monotonic()
    config = read_model_config(model_dir)
    sharding = _share_of(config, groups)
    where = resolve_device(device)
    kind, why = choose_dtype(dtype, config.checkpoint_dtype, where)
    config, checkpoint = open_checkpoint(model_dir, config, kind)
    files, ranks = model_files(model_dir, checkpoint.files), AllRanks(groups)
    own_bytes = weight_bytes(config, kind, sharding=sharding)
    found = ranks.all_of((_place_of(files[0]), own_bytes))
    beside, peers = _ranks_beside([place for place, _ in found], groups.rank)
    needed = own_bytes if where.type == "cuda" else sum(found[rank][1] for rank in beside)
    check_weights_fit(model_dir, needed, kind, where)
    ranks.all_of(None)  # until all have looked at the free memory, none loads
    with ThreadPoolExecutor(1, thread_name_prefix="fingerprint") as pool:
        digests = pool.submit(file_digests, files[peers.index(groups.rank) :: len(peers)])
        held = [load_weights(config, checkpoint, kind, where, sharding=sharding)]
        told = ranks.all_of(digests.result())
    digest = fingerprint_of((file for one in peers for file in told[one]), dtype_name(kind))
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


def _share_of(config: ModelConfig, groups: ProcessGroups) -> Sharding:
    return sharding_of(
        config,
        groups.tensor_rank,
        groups.tensor_size,
        pipeline_rank=groups.pipeline_rank,
        pipeline_size=groups.pipeline_size,
    )


def _log_loaded(model: LoadedModel, dtype_because: str, seconds: float) -> None:
    groups, layers = model.groups, model.sharding.stage.layers
    place: dict[str, object] = {}
    if groups.tensor is not None:
        place |= {"tensor_rank": groups.tensor_rank, "tensor_size": groups.tensor_size}
    if groups.pipeline is not None:
        place |= {"pipeline_rank": groups.pipeline_rank, "pipeline_size": groups.pipeline_size}
        place |= {"layers": f"{layers.start} to {layers.stop - 1}"}
    _log.info(
        "model_loaded",
        architecture=model.config.architecture,
        dtype=model.dtype_name,
        dtype_because=dtype_because,
        device=str(model.device),
        weight_bytes=model.weight_bytes,
        fingerprint=model.fingerprint,
        seconds=round(seconds, 3),
        **place,
    )


def _place_of(file: Path) -> tuple[str, int, int]:
    """Return the host and the file's identity there, equal for ranks that read the same files."""
    status = file.stat()
    return platform.node(), status.st_dev, status.st_ino


def _ranks_beside(places: Sequence[tuple[str, int, int]], rank: int) -> tuple[list[int], list[int]]:
    """
    Return the ranks on the host of a rank, and those that read the same files, both with itself.
    """
    beside = [one for one, place in enumerate(places) if place[0] == places[rank][0]]
    return beside, [one for one in beside if places[one] == places[rank]]


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
) -> None:
    """
    Refuse weights that need more bytes than are free.

    Args:
        model_dir: Directory of the model, for the message.
        needed: Bytes that all processes need that load on this device.
        dtype: Type of the weights.
        device: Where they are to lie; each process has a GPU of its own.

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
