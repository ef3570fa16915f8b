"""Misspelt keyword arguments of constructors and methods."""

from __future__ import annotations

import pytest

from tandem_client import (
    AdminClient,
    AsyncAdminClient,
    AsyncClient,
    ChannelOptions,
    Client,
    RetryPolicy,
)

CLIENTS = [Client, AsyncClient, AdminClient, AsyncAdminClient]
ADDRESS = "127.0.0.1:1"


class TestNames:
    @pytest.mark.parametrize(
        ("make", "name", "meant"),
        [
            *[(cls, "retyr", "retry") for cls in CLIENTS],
            *[(cls, "host", "address") for cls in CLIENTS],
            *[(cls, "retry_policy", "retry") for cls in CLIENTS],
            (ChannelOptions, "headers", "metadata"),
            (ChannelOptions, "keepalive", "keepalive_s"),
            (RetryPolicy, "max_attemps", "max_attempts"),
        ],
    )
    def test_constructor_names_what_was_meant(self, make, name, meant):
        """
        A wrong name is a TypeError with the right one.
        """
        with pytest.raises(TypeError, match=f"'{name}'. Did you mean '{meant}'") as refused:
            make(**{name: 1})
        assert make.__name__ in str(refused.value)

    @pytest.mark.parametrize("cls", CLIENTS)
    def test_methods_name_what_was_meant(self, cls):
        """
        So do settings of a client, and calls; one that is like no name is refused without a hint.
        """
        client = cls(ADDRESS)
        with pytest.raises(TypeError, match="Did you mean 'deadline_s'"):
            client.with_options(timeout=3)
        call = client.get_model if hasattr(client, "get_model") else client.stats
        with pytest.raises(TypeError, match="Did you mean 'deadline_s'"):
            call(deadline=3)
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'qqqqqqqq'$"):
            call(qqqqqqqq=3)

    @pytest.mark.parametrize("cls", [Client, AsyncClient])
    def test_batch_names_what_was_meant(self, cls):
        """
        Options of a batch are checked like those of a request.
        """
        with pytest.raises(TypeError, match="Did you mean 'temperature'"):
            cls(ADDRESS).generate_many(["a"], tempature=1)
