"""Addresses to listen on: free ones, taken ones, and those that can never be used."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import structlog
from structlog.testing import capture_logs

from executor_svc.config.settings import load_settings as executor_settings
from scheduler_svc.config.settings import load_settings as scheduler_settings
from tandem.errors import AddressInUse, InvalidConfig
from tandem.network.listen_address import ListenAddress, check_all_free, reaches_beyond_this_machine
from tandem.process.telemetry import warn_where_unprotected

HOLD_UNTIL_KILLED = """
import socket, sys, time
from tandem.network.address import unix_path
from tandem.network.listen_address import ListenAddress
held = ListenAddress("listen", sys.argv[1])
listener = socket.socket(socket.AF_UNIX)
listener.bind(str(unix_path(sys.argv[1])))
listener.listen()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def unix_socket(tmp_path_factory):
    """Yield a path that is short enough for a socket, by itself and as an address."""
    path = tmp_path_factory.getbasetemp().parent / "s.sock"
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


class TestTcp:
    def test_all_taken_addresses_are_named_at_once(self):
        """
        Several addresses in use give one error that names all of them and the flags to change them.
        """
        with (
            socket.create_server(("127.0.0.1", 0)) as one,
            socket.create_server(("127.0.0.1", 0)) as two,
        ):
            first, second = (f"127.0.0.1:{each.getsockname()[1]}" for each in (one, two))
            with pytest.raises(AddressInUse) as refused:
                check_all_free(
                    {"listen": first, "admin_listen": "127.0.0.1:0", "metrics_listen": second}
                )

        assert (
            f"listen {first} and metrics_listen {second} are in use by other processes: stop them "
            "or choose others with --listen and --metrics-listen" == refused.value.message
        )

    @pytest.mark.parametrize(
        ("address", "why"),
        [
            ("nohost.invalid:1", "listen: cannot resolve nohost.invalid: "),
            ("192.0.2.1:1", "listen: cannot listen on 192.0.2.1:1: "),
        ],
        ids=["unknown host", "another machine's"],
    )
    def test_address_that_can_never_be_is_wrong_configuration(self, address, why):
        """
        A host that cannot be resolved or is another machine's is INVALID_CONFIG, not a taken port.
        """
        with pytest.raises(InvalidConfig) as refused:
            ListenAddress("listen", address)

        assert refused.value.message.startswith(why)

    def test_same_address_twice_is_wrong_configuration(self):
        """
        Two settings with one address are INVALID_CONFIG, not an address that another process has.
        """
        with pytest.raises(InvalidConfig, match=r"listen and admin_listen are both 127\.0\.0\.1:1"):
            check_all_free({"listen": "127.0.0.1:1", "admin_listen": "127.0.0.1:1"})


class TestUnix:
    def test_socket_of_a_live_process_is_in_use(self, unix_socket):
        """
        A service is refused a unix path while another service on it lives, and gets it after kill
        -9.
        """
        address = f"unix:{unix_socket}"
        with subprocess.Popen(
            [sys.executable, "-c", HOLD_UNTIL_KILLED, address], stdout=subprocess.PIPE
        ) as other:
            assert b"held\n" == other.stdout.readline()
            with pytest.raises(AddressInUse, match="is in use by another process"):
                ListenAddress("listen", address)
            other.kill()
        ListenAddress("listen", address).release()

        assert unix_socket.is_socket()
        assert not unix_socket.with_name("s.sock.lock").exists()

    def test_listener_without_a_lock_is_respected(self, unix_socket):
        """
        A program other than ours that listens on the path is not replaced either.
        """
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(unix_socket))
            other.listen()
            with pytest.raises(AddressInUse):
                ListenAddress("listen", f"unix:{unix_socket}")

    def test_other_file_is_left_alone(self, unix_socket):
        """
        A file that is not a socket is kept, and the error says that it is there.
        """
        unix_socket.write_text("precious")
        with pytest.raises(InvalidConfig, match="a file that is not a socket is there"):
            ListenAddress("listen", f"unix:{unix_socket}")

        assert "precious" == unix_socket.read_text()

    @pytest.mark.parametrize(
        ("path", "why"),
        [(f"/tmp/{'x' * 110}", "longer than the 107 bytes"), ("/nowhere/s.sock", "No such file")],
        ids=["too long", "no directory"],
    )
    def test_impossible_path_is_wrong_configuration(self, path, why):
        """
        A path that no socket can have is INVALID_CONFIG with the reason.
        """
        with pytest.raises(InvalidConfig, match=why):
            ListenAddress("listen", f"unix:{path}")

    def test_frontends_cannot_share_one(self, unix_socket):
        """
        A unix path for several frontends, which would replace each other's socket, is refused.
        """
        with pytest.raises(InvalidConfig, match="several frontends cannot share the unix socket"):
            ListenAddress("listen", f"unix:{unix_socket}", is_shared=True)


class TestSettings:
    @pytest.mark.parametrize("text", ["unix:", "unix://", "dns:///host:1", "::1:50051", "host"])
    @pytest.mark.parametrize(
        "load",
        [
            lambda *flags: scheduler_settings(flags, {}),
            lambda *flags: executor_settings(["--model=m", *flags], {}),
        ],
        ids=["scheduler", "executor"],
    )
    def test_both_services_refuse_what_is_no_address(self, load, text):
        """
        An address that is neither HOST:PORT nor unix:PATH gets the same refusal from both services.
        """
        with pytest.raises(InvalidConfig, match="--listen: must be HOST:PORT or unix:PATH"):
            load(f"--listen={text}")

    def test_metrics_know_no_unix_socket(self):
        """
        A unix path for metrics, which need a port, is refused before anything starts.
        """
        with pytest.raises(InvalidConfig, match="--metrics-listen: must be HOST:PORT"):
            scheduler_settings(["--metrics-listen=unix:/m.sock"], {})


class TestWarning:
    @pytest.mark.parametrize(
        ("address", "expected"),
        [
            ("0.0.0.0:1", True),
            ("[::]:1", True),
            ("192.0.2.1:1", True),
            ("127.0.0.1:1", False),
            ("[::1]:1", False),
            ("localhost:1", False),
            ("unix:/s.sock", False),
        ],
    )
    def test_address_that_others_can_reach_is_known(self, address, expected):
        """
        Loopback addresses and unix sockets, and no others, stay within this machine.
        """
        assert expected is reaches_beyond_this_machine(address)

    def test_one_warning_for_each_open_address(self):
        """
        A service that other machines can reach warns that nothing is authenticated or encrypted.
        """
        structlog.reset_defaults()
        with capture_logs() as logged:
            warn_where_unprotected({"listen": "0.0.0.0:1", "admin_listen": "127.0.0.1:2"})

        assert [("listening_unprotected", "listen", "0.0.0.0:1")] == [
            (one["event"], one["setting"], one["address"]) for one in logged
        ]
        assert "nothing on it is authenticated or encrypted" in logged[0]["message"]
