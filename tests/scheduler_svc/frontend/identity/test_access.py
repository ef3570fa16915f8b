"""Tenant and priority of a call as its credential decides them."""

from __future__ import annotations

import pytest

from scheduler_svc.frontend.identity.access import certificate_names, claim, token_of
from scheduler_svc.frontend.identity.identity import Identity, Role
from tandem.error_codes import PermissionDenied, Unauthenticated
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import model_pb2

USER = Identity(name="user", tenant="acme", roles=frozenset({Role.GENERATE}))
GATEWAY = Identity(
    name="gateway", tenant="", roles=frozenset({Role.GENERATE, Role.DELEGATE}), highest_priority=-2
)
BATCH = Identity(name="b", tenant="acme", roles=frozenset({Role.GENERATE}), highest_priority=5)


def claimed(identity: Identity, **fields: object) -> tuple[str, int]:
    request = pb.GenerateRequest(**fields)
    claim(request, identity)
    return request.tenant, request.priority


class TestToken:
    @pytest.mark.parametrize("value", ["Bearer t", "bearer t", "BEARER  t ", b"Bearer t"])
    def test_bearer_token_is_found(self, value):
        """
        The scheme is in any case, and spaces around the token are not part of it.
        """
        assert "t" == token_of([("x", "y"), ("authorization", value)])

    def test_without_authorization_there_is_none(self):
        """
        A call without the metadata has no token, which is no error yet.
        """
        assert None is token_of([("x", "Bearer t")])

    @pytest.mark.parametrize(
        "values", [["Basic dTpw"], ["t"], ["Bearer"], ["Bearer a", "Bearer b"]]
    )
    def test_anything_else_is_refused(self, values):
        """
        Another scheme, or two tokens, is UNAUTHENTICATED.
        """
        with pytest.raises(Unauthenticated, match="one `Bearer TOKEN`"):
            token_of([("authorization", value) for value in values])


class TestCertificate:
    def test_alternative_names_come_before_the_common_name(self):
        """
        Every name of a certificate can be the one that is known.
        """
        context = {
            "x509_common_name": [b"cn"],
            "x509_subject_alternative_name": [b"a", b"b"],
            "peer": [b"x"],
        }
        assert ["a", "b", "cn"] == certificate_names(context)
        assert [] == certificate_names({})


class TestTenant:
    def test_unset_is_filled_from_the_credential(self):
        """
        A request that names no tenant has the credential's.
        """
        assert "acme" == claimed(USER)[0]
        assert "acme" == claimed(USER, tenant="")[0]
        assert "acme" == claimed(USER, tenant="acme")[0]

    def test_another_tenant_is_denied_by_its_field(self):
        """
        Another tenant's name is PERMISSION_DENIED, with the path of the field.
        """
        with pytest.raises(PermissionDenied) as denied:
            claimed(USER, tenant="globex")
        assert "tenant" == denied.value.field
        with pytest.raises(PermissionDenied) as denied:
            claim(pb.CompleteRequest(request={"tenant": "globex"}), USER)
        assert "request.tenant" == denied.value.field

    def test_delegate_names_any(self):
        """
        A gateway speaks for any tenant that it names, and for none where it names none.
        """
        assert "globex" == claimed(GATEWAY, tenant="globex")[0]
        assert "" == claimed(GATEWAY)[0]

    def test_request_inside_a_message_is_filled_too(self):
        """
        The request of Complete is claimed at its depth, even where it is not set.
        """
        message = pb.CompleteRequest()
        claim(message, USER)
        assert "acme" == message.request.tenant

    def test_message_without_a_tenant_stays(self):
        """
        A message that has nothing to claim is not changed.
        """
        message = model_pb2.GetModelRequest()
        claim(message, USER)
        assert b"" == message.SerializeToString()


class TestPriority:
    @pytest.mark.parametrize(
        ("identity", "asked", "expected"),
        [(USER, None, 0), (USER, 0, 0), (USER, 7, 7),
         (GATEWAY, None, 0), (GATEWAY, -2, -2),
         (BATCH, None, 5), (BATCH, 5, 5), (BATCH, 6, 6)],
    )  # fmt: skip
    def test_allowed_priority_is_kept(self, identity, asked, expected):
        """
        Numbers from the credential's highest on are kept; unset is 0, or what comes nearest to it.
        """
        fields = {} if asked is None else {"priority": asked}
        assert expected == claimed(identity, **fields)[1]

    @pytest.mark.parametrize(("identity", "asked"), [(USER, -1), (GATEWAY, -3), (BATCH, 0)])
    def test_higher_priority_is_denied(self, identity, asked):
        """
        A lower number than the credential allows is PERMISSION_DENIED, and says what is allowed.
        """
        with pytest.raises(PermissionDenied) as denied:
            claimed(identity, priority=asked)
        assert ("priority", {"highest_priority": str(identity.highest_priority)}) == (
            denied.value.field,
            denied.value.metadata,
        )
