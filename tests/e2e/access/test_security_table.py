"""The security table: real services against strangers."""

from __future__ import annotations

import pytest

from tests.e2e.access.secured_system import SecuredSystem
from tests.e2e.access.security_table import PAGE, measured, page_of


@pytest.mark.slow
def test_every_port_answers_strangers_as_the_page_says(tiny_model, tmp_path):
    """
    Each kind of caller gets the status of the committed table on each port, and disturbs neither
    another tenant's stream nor the executor's session.
    """
    system = SecuredSystem(tiny_model, tmp_path)
    try:
        assert PAGE.read_text() == page_of(measured(system))
    finally:
        system.close()
