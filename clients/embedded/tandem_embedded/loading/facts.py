"""Facts that the ranks of an engine must have in common to compute the same steps."""

from __future__ import annotations

from importlib.metadata import version

import torch

from executor_svc.model.loader import LoadedModel
from executor_svc.parallel.agreement import check_agreement
from executor_svc.parallel.collectives import AllRanks
from kernels.cpu_features import vector_features
from kernels.packed_linear import can_pack


def check_ranks_agree(model: LoadedModel, arguments: object) -> None:
    """
    Check that all ranks have one model, one way of computing, and the same arguments of the engine.

    Raises:
        InvalidConfig: A rank differs; every rank raises then.
    """
    facts = {
        "the model": model.fingerprint,
        "the device": model.device.type,
        "the number type": model.dtype_name,
        "Tandem": version("tandem-serve"),
        "PyTorch": torch.__version__,
        "use of the C++ kernels": str(can_pack(torch.float32, model.device)),
        "the processor": vector_features() if model.device.type == "cpu" else "any",
        "the engine's arguments": repr(arguments),
    }
    check_agreement(AllRanks(model.groups).all_of(facts))
