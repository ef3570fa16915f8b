"""`tandem config suggest`: a configuration file for a model, a memory size and a kind of load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.bundled_model import bundled_model
from tandem.engine_config import MAX_GIB, EngineConfig
from tandem.settings.options import table_of
from tandem_client.cli.config.tuning import Facts, Suggestion, Wishes, step_tokens
from tandem_client.cli.config.tuning import suggest as suggest_limits
from tandem_client.cli.shared import options
from tandem_client.cli.shared.failures import ExitCode, fail, readable_errors

DEFAULTS = EngineConfig()


@readable_errors
def suggest(
    *,
    model: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL_DIR", help="Model to serve; default: the bundled one."),
    ] = None,
    avg_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt and output of an average request, tokens.")
    ] = 512,
    max_batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences that are to run together.")
    ] = DEFAULTS.max_batch_size,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest request; default: what the model supports.")
    ] = None,
    memory_gb: Annotated[
        float | None,
        typer.Option(min=0, max=MAX_GIB, help="GiB of the device; default: this machine's."),
    ] = None,
    utilization: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1, help="Share of that memory to use; default: as tandem up takes it."
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens per KV block.")
    ] = DEFAULTS.block_size,
    dtype: Annotated[str, typer.Option(help="As the executor's --dtype.")] = "auto",
    device: Annotated[str, typer.Option(help="As the executor's --device.")] = "auto",
    as_json: options.Json = False,
) -> None:
    """Print a configuration file for both services, with the reason of each line."""
    folder = model or bundled_model()
    if folder is None:
        raise fail("no bundled model in this installation: name a model", ExitCode.USAGE)
    wishes = Wishes(
        avg_tokens=avg_tokens,
        max_batch_size=max_batch_size,
        max_model_len=max_model_len,
        utilization=utilization,
        memory_gb=memory_gb,
    )
    flags = [
        f"--model={folder}",
        f"--max-batch-size={max_batch_size}",
        f"--max-total-tokens={step_tokens(wishes)}",
        f"--block-size={block_size}",
        f"--dtype={dtype}",
        f"--device={device}",
    ]
    if max_model_len is not None:
        flags.append(f"--max-model-len={max_model_len}")
    suggestions = suggest_limits(wishes, _facts(flags))
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in suggestions]))
    else:
        typer.echo(as_toml(suggestions, folder), nl=False)


def as_toml(suggestions: Sequence[Suggestion], model: Path) -> str:
    """Return the text of a configuration file that both services read."""
    lines = [f"# For {model}. Save as tandem.toml, then: tandem up {model} --config tandem.toml"]
    for one in suggestions:
        lines += [f"# {one.reason}", f"{one.name} = {json.dumps(one.value)}"]
    return "\n".join(lines) + "\n"


def _facts(flags: Sequence[str]) -> Facts:
    """Return the facts of an executor's dry run, in its own process: clients import no service."""
    # The dry run plans one block, because the number that fits is computed here.
    command = [sys.executable, "-m", "executor_svc", "--dry-run", "--log-format=json"]
    prefix = table_of("executor").env_prefix
    environ = {name: text for name, text in os.environ.items() if not name.startswith(prefix)}
    ran = subprocess.run(  # noqa: S603  # our own interpreter
        [*command, "--max-num-blocks=1", *flags],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )
    if ran.returncode != 0:
        said = [line for line in ran.stderr.splitlines() if line.strip()]
        line = said[-1] if said else f"the executor's dry run ended with {ran.returncode}"
        raise fail(line, ExitCode.USAGE if ran.returncode == ExitCode.USAGE else ExitCode.FAILED)
    plan: dict[str, Any] = json.loads(ran.stdout)
    return Facts(**{field.name: plan[field.name] for field in fields(Facts)})
