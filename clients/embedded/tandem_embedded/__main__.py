"""One-shot generation: `python -m tandem_embedded --model DIR --prompt TEXT`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from tandem.engine_config import PRESETS, EngineConfig
from tandem.errors import InvalidConfig
from tandem.process.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED
from tandem.sampling_params import MODEL_DEFAULT_PARAMS, SamplingParams
from tandem.settings.options import flag_of
from tandem_embedded.engine import InferenceEngine
from tandem_embedded.errors import ConfigError, EngineError, engine_error
from tandem_embedded.params import GenerationParams
from tandem_embedded.results import CompletedRequest

_USAGE_HINT = 'give a prompt, for example: python -m tandem_embedded --model DIR --prompt "Once"'
_METAVARS = {int: "INT", float: "FLOAT"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one request, and return the exit status: 0, 1 if it failed, 2 for wrong arguments."""
    given = _parser().parse_args(arguments)
    if given.prompt is None:
        _say(_USAGE_HINT)
        return EXIT_REFUSED
    try:
        engine = InferenceEngine(
            _config(given),
            given.model,
            dtype=given.dtype,
            device=given.device,
            num_threads=given.num_threads,
            cpu_extension=given.cpu_extension,
        )
        completed = engine.complete(given.prompt, _params(given))
    except EngineError as error:
        _say(str(error))
        return EXIT_REFUSED if isinstance(error, ConfigError) else EXIT_FAILED
    return _print(completed, str(engine.get_memory_stats()))


def _print(completed: CompletedRequest, memory_line: str) -> int:
    if completed.error is not None:
        _say(str(completed.error))
        return EXIT_FAILED
    sys.stdout.write(completed.output_text + "\n")
    reason = "" if completed.finish_reason is None else completed.finish_reason.name
    _say(f"Generated {completed.generated_tokens} tokens ({reason}, seed {completed.seed})")
    _say(memory_line)
    return EXIT_DONE


def _say(line: str) -> None:
    """Write a line to stderr: stdout holds the output alone, so that it can be piped."""
    sys.stderr.write(line + "\n")


def _config(given: argparse.Namespace) -> EngineConfig | None:
    """
    Return the limits: defaults, overridden by preset, file and flags in this order; None without
    any of these three.
    """
    try:
        config = EngineConfig() if given.preset is None else EngineConfig.preset(given.preset)
        if given.config is not None:
            config = EngineConfig.from_file(given.config, base=config)
    except InvalidConfig as error:
        raise engine_error(error) from error
    names = [field.name for field in fields(EngineConfig)]
    flags = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    is_given = flags or given.preset is not None or given.config is not None
    return replace(config, **flags) if is_given else None


def _params(given: argparse.Namespace) -> GenerationParams:
    names = [field.name for field in fields(GenerationParams) if hasattr(given, field.name)]
    values = {name: getattr(given, name) for name in names}
    return GenerationParams(**(values | {"stop": tuple(given.stop)}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tandem_embedded", description=__doc__)
    parser.add_argument(
        "--model", metavar="DIR", type=Path, required=True, help="model in Hugging Face format"
    )
    parser.add_argument("--prompt", "--input", metavar="TEXT", help="text to continue")
    _add_request(parser.add_argument_group("request"))
    _add_engine(parser.add_argument_group("engine"))
    _add_limits(
        parser.add_argument_group(
            "engine limits",
            "Without any of them, --config and --preset they are those of a service: context "
            "length and KV memory as the model and the free memory have it. With one, these are "
            "the defaults of the others.",
        )
    )
    return parser


def _add_request(group: argparse._ArgumentGroup) -> None:
    defaults = GenerationParams()
    group.add_argument(
        "--max-tokens",
        metavar="INT",
        type=int,
        default=defaults.max_tokens,
        help="largest number of output tokens [default: 100, as far as the context has room]",
    )
    for param in fields(SamplingParams):
        if isinstance(param.default, int | float) and hasattr(defaults, param.name):
            kind, default = type(param.default), getattr(defaults, param.name)
            shown = param.default if default is None else default
            whose = "the model's, else " if param.name in MODEL_DEFAULT_PARAMS else ""
            if param.name == "seed":
                whose, shown = "", "drawn"
            group.add_argument(
                flag_of(param.name),
                metavar=_METAVARS[kind],
                type=kind,
                default=default,
                help=f"[default: {whose}{shown}]",
            )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after an end of sequence [default: off]"
    )
    group.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="a string that ends the text; may be repeated",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--config", metavar="FILE", type=Path, help="JSON file of engine limits")
    group.add_argument("--preset", choices=PRESETS, help="engine limits for a purpose")
    for name, kind, default in (
        ("dtype", "auto|float32|bfloat16|float16", "auto"),
        ("device", "cpu|cuda|cuda:N|auto", "cpu"),
    ):
        group.add_argument(f"--{name}", metavar=kind, default=default, help=f"[default: {default}]")
    group.add_argument(
        "--num-threads", metavar="INT", type=int, help="compute threads [default: PyTorch's]"
    )
    group.add_argument(
        "--cpu-extension",
        default="auto",
        choices=["auto", "on", "off"],
        help="C++ kernels on the CPU [default: auto]",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    for field in fields(EngineConfig):
        kind = type(field.default)
        text = f"[default: {field.default}]"
        group.add_argument(flag_of(field.name), metavar=_METAVARS[kind], type=kind, help=text)


if __name__ == "__main__":
    sys.exit(main())
