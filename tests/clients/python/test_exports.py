"""Names that the package offers."""

from __future__ import annotations

import subprocess
import sys

import tandem_client
from tandem.error_codes import ERROR_BY_CODE, TandemError
from tandem.errors import ERROR_BY_REASON
from tandem.status import CallCancelled, PeerUnavailable


class TestExports:
    def test_every_error_that_a_call_may_raise_is_there(self):
        """
        The package has the class of each reason and of each gRPC code, and those made locally.
        """
        errors = {*ERROR_BY_REASON.values(), *ERROR_BY_CODE.values()}
        for error in errors | {TandemError, CallCancelled, PeerUnavailable}:
            assert error is getattr(tandem_client, error.__name__)

    def test_every_name_is_loaded_when_it_is_used(self):
        """
        Each public name has a value, and the package itself loads no gRPC.
        """
        assert all(getattr(tandem_client, name) is not None for name in tandem_client.__all__)
        program = "import sys, tandem_client; sys.exit('grpc' in sys.modules)"
        assert 0 == subprocess.run([sys.executable, "-c", program], check=False).returncode
