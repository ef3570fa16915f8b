"""`tandem token`: a new bearer token, and its entry in a service's tokens file."""

from __future__ import annotations

import enum
import json
from datetime import UTC, datetime
from typing import Annotated

import typer

from tandem.bearer_token import new_token, token_hash
from tandem_client.cli.shared.failures import ExitCode, fail, readable_errors
from tandem_client.cli.shared.screen import remark


class Role(enum.StrEnum):
    """Rights that an entry can give."""

    GENERATE = "generate"
    OPERATE = "operate"
    DELEGATE = "delegate"


@readable_errors
def token(
    *,
    name: Annotated[str, typer.Argument(help="Name of the credential, for logs.")],
    tenant: Annotated[
        str, typer.Option(help="Tenant that it speaks for; needed unless it may name any.")
    ] = "",
    role: Annotated[
        list[Role],
        typer.Option(
            help="What it may do, repeatable: generate (public port), operate (admin port), "
            "delegate (name any tenant)."
        ),
    ] = [Role.GENERATE],  # noqa: B006  # typer copies it
    highest_priority: Annotated[
        int, typer.Option(help="Lowest priority number of its requests; lower goes first.")
    ] = 0,
    expires: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S"],
            help="Time from which it is refused, in UTC unless it has an offset.",
        ),
    ] = None,
) -> None:
    """
    Make a token, and print its entry for a tokens file.

    The entry, for a scheduler's --tokens-file, has only a hash. It goes to stdout, so that `tandem
    token NAME >> tokens.toml` adds it. The token goes to stderr, and is stored nowhere.
    """
    for what, text in (("NAME", name), ("--tenant", tenant)):
        if not text.isprintable():
            raise fail(f"{what} must have printable characters only", ExitCode.USAGE)
    if not tenant and Role.GENERATE in role and Role.DELEGATE not in role:
        raise fail("--tenant is needed, unless --role delegate is given too", ExitCode.USAGE)
    made = new_token()
    typer.echo("\n[[credentials]]")
    typer.echo(f"name = {_quoted(name)}")
    typer.echo(f'token_sha256 = "{token_hash(made)}"')
    if tenant:
        typer.echo(f"tenant = {_quoted(tenant)}")
    typer.echo(f"roles = [{', '.join(_quoted(one) for one in role)}]")
    typer.echo(f"highest_priority = {highest_priority}")
    if expires is not None:
        end = expires if expires.tzinfo is not None else expires.replace(tzinfo=UTC)
        typer.echo(f"expires = {end.isoformat()}")
    remark(f"token, shown only now: {made}", is_dim=False)


def _quoted(text: str) -> str:
    """Return a string of TOML, which spells those that are printable as JSON does."""
    return json.dumps(text, ensure_ascii=False)
