"""Decoder families from a Hugging Face directory: description, weights and forward pass."""

from executor_svc.model.config import GenerationDefaults, ModelConfig, read_model_config
from executor_svc.model.decoder import Decoder, DecoderInputs
from executor_svc.model.loader import LoadedModel, load_model

__all__ = [
    "Decoder",
    "DecoderInputs",
    "GenerationDefaults",
    "LoadedModel",
    "ModelConfig",
    "load_model",
    "read_model_config",
]
